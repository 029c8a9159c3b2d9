"""What the commands do differently for each kind of predictor: the one place where they part.

A command loads an artefact, whatever its kind, and asks the `Kind` that goes with it to judge, to compare and to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.connect import Registry
    from presage.registry.verdict import Verdict


@dataclass(frozen=True)
class Loaded:
    """A predictor and where it came from.

    Attributes:
        folder: its artefact.
        kind: what the commands do with it.
        predictor: fitted, of that kind.
        name: registered model; None for a plain folder.
        version: its version; None for a plain folder.
        source: the reference as it was given.
    """

    folder: Path
    kind: Kind
    predictor: Any
    name: str | None
    version: int | None
    source: str

    @property
    def called(self) -> str:
        """What people know it by."""
        return f"{self.name} version {self.version}" if self.name else self.source


class Kind(Protocol):
    """One kind of predictor, to the commands.

    Attributes:
        name: as artefacts have it.
        legend: what the figures of `headline` are.
    """

    name: str
    legend: str

    def metrics(self, loaded: Loaded, table: pa.Table, seed: int) -> dict[str, Any]:
        """The object of the command contract: the predictor judged on a valid trace it was not trained on."""
        ...

    def verdict(
        self, candidate: Loaded, champion: Loaded | None, table: pa.Table, seed: int, *, name: str, version: int
    ) -> Verdict:
        """The gates' answer on a candidate, both judged on the same valid trace."""
        ...

    def tables(self, metrics: dict[str, Any], called: str) -> list[Any]:
        """`metrics` for people."""
        ...

    def forecast(self, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
        """A forecast after the steps `rows`, for people."""
        ...

    def headline(self, figures: Mapping[str, float]) -> dict[str, str]:
        """The figures of a registered version that matter most, by what they are called."""
        ...


def kind_of(name: str) -> Kind:
    """The kind of that name.

    Raises:
        ArtefactError: there is none.
    """
    from presage.cli.next_agent import NextAgent
    from presage.cli.remaining_length import RemainingLength
    from presage.errors import ArtefactError

    kinds: tuple[Kind, ...] = (NextAgent(), RemainingLength())
    for kind in kinds:
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in kinds)
    raise ArtefactError(f"a predictor of kind {name!r}; these commands know the kinds {known}")


def load(reference: str, registry: Callable[[], Registry]) -> Loaded:
    """The predictor that a reference means: `models:/NAME@ALIAS`, `models:/NAME/VERSION` or a folder."""
    from presage.predictors.artefact import read_artefact
    from presage.registry.resolve import resolve
    from presage.registry.table import load_predictor

    found = resolve(reference, registry)
    kind = kind_of(read_artefact(found.folder).kind)
    return Loaded(found.folder, kind, load_predictor(found.folder), found.name, found.version, reference)
