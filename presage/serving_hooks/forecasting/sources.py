"""Resolves, loads and validates the predictors of an engine at its start.

If the registry is down, a model missing, an artefact broken or of another kind, or a trial forecast fails, the engine
runs without that predictor and keeps the reason. The trial forecasts also compile code that the first request would
otherwise wait for. An alias is resolved once, here; `reload.py` resolves it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from presage.errors import ArtefactError, PresageError, why
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import artefact_digest
from presage.registry.connect import Registry, attached
from presage.registry.promote import PROFILE
from presage.registry.resolve import ResolvedModel, resolve
from presage.serving_hooks.monitoring.promoted import PROMOTED_FILE, PROMOTED_FOLDER, Promoted, read_promoted
from presage.serving_hooks.workflows.live import NO_MODEL

_TEXTS: Final = {"input_text": "a trial", "output_text": "a trial"}

_OWN_BEGINNING: Final = "each workflow type is compared with its own first workflows"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """One predictor of an engine, loaded and validated, or the reason why there is none.

    Attributes:
        predictor: None if there is none.
        version: in the registry; None for a plain folder.
        promoted: promoted figures by workflow type, for drift detection; empty if the version has none.
        profile: the inputs that its promotion evaluated: "engine", "gateway" or "full"; None if it was never
            evaluated.
    """

    predictor: Any
    reference: str | None
    version: int | None = None
    digest: str | None = None
    reason: str | None = None
    promoted: Mapping[str, Promoted] = field(default_factory=dict)
    folder: Path | None = None
    profile: str | None = None


def resolve_predictors(registry: Callable[[], Registry], references: Mapping[str, str | None]) -> dict[str, Held]:
    """Resolves, loads and validates predictors, by kind. Raises nothing; logs why a predictor is missing.

    Args:
        registry: opens the registry; called at most once, and not at all if folders are given.
        references: by kind `models:/NAME@ALIAS`, `models:/NAME/VERSION`, an artefact folder, or None.
    """
    opened = _cached(registry)
    return {kind: _held(kind, reference, opened) for kind, reference in references.items()}


def load(kind: str, reference: str, registry: Callable[[], Registry]) -> Held:
    """Resolves, loads and validates a predictor.

    Raises:
        RegistryError: the registry does not answer or lacks the model.
        ArtefactError: the artefact is broken, of another kind, or fails its trial.
    """
    resolved = resolve(reference, registry)
    predictor = _tried(kind, resolved.folder, _TEXTS)
    digest = artefact_digest(resolved.folder)
    promoted, profile = _evidence(resolved, registry)
    return Held(
        predictor, reference, resolved.version, digest, promoted=promoted, folder=resolved.folder, profile=profile
    )


def load_validated(kind: str, folder: Path, digest: str) -> Any:
    """Loads a predictor that another process on this machine has validated.

    Makes trial forecasts without texts and states: these load the compiled code into this process, but no text encoder.

    Raises:
        ArtefactError: the artefact is broken, of another kind, not the validated one, or fails its trial.
    """
    predictor = _tried(kind, folder, {})
    actual = artefact_digest(folder)
    if actual != digest:
        raise ArtefactError(f"{folder}: digest {actual[:19]}… is not {digest[:19]}…, which was validated: put it back")
    return predictor


def _tried(kind: str, folder: Path, texts: Mapping[str, str]) -> Any:
    """The predictor of a folder after trial forecasts; raises ArtefactError, which names the folder, if one fails."""
    try:
        predictor, trial = KINDS[kind].load(folder), KINDS[kind].trial
        assert trial is not None
        trial(predictor, texts)
    except PresageError:
        raise
    except Exception as error:
        raise ArtefactError(
            f"{folder}: found a predictor that fails a trial ({type(error).__name__}: {error}); expected forecasts. "
            "Train it again"
        ) from error
    return predictor


def _held(kind: str, reference: str | None, registry: Callable[[], Registry]) -> Held:
    if reference is None:
        return Held(None, None, reason=NO_MODEL)
    try:
        return load(kind, reference, registry)
    except Exception as error:
        _log.warning("%s is not used: %s", reference, why(error))
        return Held(None, reference, reason=why(error))


def _evidence(resolved: ResolvedModel, registry: Callable[[], Registry]) -> tuple[Mapping[str, Promoted], str | None]:
    """The promoted figures of a version, and the inputs that its promotion evaluated; it serves without them too."""
    if resolved.name is None or resolved.version is None:
        return {}, None
    called = f"{resolved.name} version {resolved.version}"
    promoted: Mapping[str, Promoted] = {}
    profile = None
    try:
        content = attached(registry(), resolved.name, resolved.version, PROMOTED_FOLDER, PROMOTED_FILE)
        if content is not None:
            promoted = read_promoted(content)
        else:
            _log.info("%s: it was promoted without figures; %s", called, _OWN_BEGINNING)
    except Exception as error:
        _log.warning("%s: its promoted figures cannot be read: %s; %s", called, why(error).rstrip("."), _OWN_BEGINNING)
    try:
        profile = registry().version(resolved.name, resolved.version).tags.get(PROFILE)
    except Exception as error:
        _log.warning("%s: its tags cannot be read: %s", called, why(error))
    return promoted, profile


def _cached(registry: Callable[[], Registry]) -> Callable[[], Registry]:
    """Caches the registry, or its error, so that one that is down is waited for once."""

    @cache
    def outcome() -> Registry | Exception:
        try:
            return registry()
        except Exception as error:
            return error

    def opened() -> Registry:
        registry_or_error = outcome()
        if isinstance(registry_or_error, Exception):
            raise registry_or_error
        return registry_or_error

    return opened
