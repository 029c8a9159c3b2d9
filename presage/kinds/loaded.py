"""A predictor loaded by its reference: a registered version or an artefact folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.errors import ArtefactError
from presage.predictor_kinds import KINDS, Kind

if TYPE_CHECKING:
    from presage.registry.connect import Registry
    from presage.registry.gates import ArtefactEvidence, Interface
    from presage.registry.resolve import ResolvedModel


@dataclass(frozen=True)
class Loaded:
    """A predictor, and where it came from: the user's reference (`source`), and the registered version if it is one."""

    folder: Path
    kind: Kind
    predictor: Any
    name: str | None
    version: int | None
    source: str

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"{self.name} version {self.version}" if self.name else self.source

    @property
    def model(self) -> str:
        """Its name in metrics."""
        return self.name or self.source

    def artefact_evidence(self, latency: float, interface: Interface) -> ArtefactEvidence:
        """What the gates of every kind judge."""
        from presage.predictors.common.artefact import artefact_size_bytes, find_pickles
        from presage.registry.gates import ArtefactEvidence

        pickles = tuple(str(path.relative_to(self.folder)) for path in find_pickles(self.folder))
        return ArtefactEvidence(latency, artefact_size_bytes(self.folder), interface, pickles)


def kind_of(name: str) -> Kind:
    """The kind of that name; raises ArtefactError if there is none."""
    if name not in KINDS:
        raise ArtefactError(f"a predictor of kind {name!r}; wanted one of {', '.join(KINDS)}")
    return KINDS[name]


def load(reference: str, registry: Callable[[], Registry]) -> Loaded:
    """Load `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder."""
    from presage.registry.resolve import resolve

    return _load(resolve(reference, registry))


def load_at(reference: str, tracking_uri: str | None) -> Loaded:
    """`load` from the existing registry at a URI, without importing MLflow if that is a database on this machine."""
    from presage.registry.database import resolve_at

    return _load(resolve_at(reference, tracking_uri))


def _load(resolved: ResolvedModel) -> Loaded:
    from presage.predictors.common.artefact import read_artefact
    from presage.progress import say_when_compiling
    from presage.registry.table import load_predictor

    say_when_compiling()
    kind = kind_of(read_artefact(resolved.folder).kind)
    return Loaded(
        resolved.folder, kind, load_predictor(resolved.folder), resolved.name, resolved.version, resolved.source
    )
