"""What the commands do differently for each kind of predictor: the one place where they part.

A command loads an artefact, whatever its kind, and asks the `Kind` that goes with it to judge, to compare and to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from presage.cli.output import Output, Report

if TYPE_CHECKING:
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
    """One kind of predictor, to the commands. What it learns from and is judged on is its data: traces, or outcomes.

    Attributes:
        name: as artefacts have it.
        unit: what its data consists of: "workflows" or "prompts".
        legend: what the figures of `headline` are.
        advice: what to try where a baseline won.
    """

    name: str
    unit: str
    legend: str
    advice: str

    def read(self, paths: list[Path], skip_bad: bool, out: Output, report: Report) -> Any:
        """The data in these files, valid; says what was skipped."""
        ...

    def held_out(self, data: Any, predictors: list[Any]) -> tuple[Any, int]:
        """The part that none of the predictors was trained on, and how many units were left out."""
        ...

    def digest(self, data: Any) -> str:
        """One name for the content of the data, "sha256:…"."""
        ...

    def example(self, data: Any) -> list[dict[str, Any]]:
        """A few rows as an example of what MLflow serves: no text of a user, states of zeros."""
        ...

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """What makes the figures of a training too good, if anything, for people."""
        ...

    def at_precision(self, loaded: Loaded, precision: str) -> Loaded:
        """The same at another precision; raises ConfigurationError where there is none to choose."""
        ...

    def metrics(self, loaded: Loaded, data: Any, seed: int) -> dict[str, Any]:
        """The object of the command contract: the predictor judged on data it was not trained on."""
        ...

    def verdict(
        self, candidate: Loaded, champion: Loaded | None, data: Any, seed: int, *, name: str, version: int, profile: str
    ) -> Verdict:
        """The gates' answer on a candidate, both judged on the same data under an input profile."""
        ...

    def tables(self, metrics: dict[str, Any], called: str) -> list[Any]:
        """`metrics` for people."""
        ...

    def ask(self, predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The forecast after the steps `rows` of one workflow, JSON values."""
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
    from presage.cli.router import Router
    from presage.errors import ArtefactError

    kinds: tuple[Kind, ...] = (NextAgent(), RemainingLength(), Router())
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
