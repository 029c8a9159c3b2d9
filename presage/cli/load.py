"""The kinds of predictor as the commands see them, and loading one by reference."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from presage.cli.kinds import Kind, Loaded
from presage.errors import ArtefactError
from presage.predictors import KINDS

if TYPE_CHECKING:
    from presage.registry.connect import Registry


def kind_of(name: str) -> Kind:
    """The kind of that name.

    Raises:
        ArtefactError: unknown name.
    """
    if name not in KINDS:
        raise ArtefactError(f"a predictor of kind {name!r}; wanted one of {', '.join(KINDS)}")
    kind: Kind = resolve_name(KINDS[name].commands)
    return kind


def load(reference: str, registry: Callable[[], Registry]) -> Loaded:
    """Load `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder."""
    from presage.predictors.common.artefact import read_artefact
    from presage.registry.resolve import resolve
    from presage.registry.table import load_predictor

    found = resolve(reference, registry)
    kind = kind_of(read_artefact(found.folder).kind)
    return Loaded(found.folder, kind, load_predictor(found.folder), found.name, found.version, reference)
