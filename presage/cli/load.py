"""All kinds of predictor, and loading one by reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from presage.cli.kinds import Kind, Loaded
from presage.cli.next_agent import NEXT_AGENT
from presage.cli.remaining_length import REMAINING_LENGTH
from presage.cli.router import ROUTER

if TYPE_CHECKING:
    from presage.registry.connect import Registry

KINDS: Final = (NEXT_AGENT, REMAINING_LENGTH, ROUTER)


def kind_of(name: str) -> Kind:
    """The kind of that name.

    Raises:
        ArtefactError: unknown name.
    """
    from presage.errors import ArtefactError

    for kind in KINDS:
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in KINDS)
    raise ArtefactError(f"a predictor of kind {name!r}; wanted one of {known}")


def load(reference: str, registry: Callable[[], Registry]) -> Loaded:
    """Load `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder."""
    from presage.predictors.common.artefact import read_artefact
    from presage.registry.resolve import resolve
    from presage.registry.table import load_predictor

    found = resolve(reference, registry)
    kind = kind_of(read_artefact(found.folder).kind)
    return Loaded(found.folder, kind, load_predictor(found.folder), found.name, found.version, reference)
