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
from typing import Any, Final, Generic, TypeVar

import numpy as np

from presage.errors import ArtefactError, PresageError, why
from presage.features.return_times import ReturnWorkflow
from presage.features.states import STATE_COLUMN
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import artefact_digest
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.return_time.predictor import ReturnTimePredictor
from presage.predictors.router.predictor import RouterPredictor
from presage.registry.connect import Registry, attached
from presage.registry.promote import PROFILE
from presage.registry.resolve import ResolvedModel, resolve
from presage.serving_hooks.forecasting.adapters import LengthAdapter, NextAgentAdapter, ReturnAdapter
from presage.serving_hooks.forecasting.live import NO_LENGTHS, NO_MODEL
from presage.serving_hooks.monitoring.promoted import PROMOTED_FILE, PROMOTED_FOLDER, Promoted, read_promoted

Predictor = TypeVar("Predictor")

_TRIAL_STEPS: Final = 3
"""Steps of a trial; the later ones have a prefix."""

_TEXTS: Final = {"input_text": "a trial", "output_text": "a trial"}

_OWN_BEGINNING: Final = "each workflow type is compared with its own first workflows"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held(Generic[Predictor]):
    """One predictor of an engine, loaded and validated, or the reason why there is none.

    Attributes:
        version: in the registry; None for a plain folder.
        promoted: promoted figures by workflow type, for drift detection; empty if the version has none.
        profile: the inputs that its promotion evaluated: "engine", "gateway" or "full"; None if it was never
            evaluated.
    """

    predictor: Predictor | None
    reference: str | None
    version: int | None = None
    digest: str | None = None
    reason: str | None = None
    promoted: Mapping[str, Promoted] = field(default_factory=dict)
    folder: Path | None = None
    profile: str | None = None


@dataclass(frozen=True)
class Predictors:
    """The predictors of an engine."""

    next_agent: Held[NextAgentPredictor]
    remaining_length: Held[RemainingLengthPredictor]
    return_time: Held[ReturnTimePredictor]
    context_growth: Held[ContextGrowthPredictor]


def resolve_predictors(
    registry: Callable[[], Registry],
    *,
    next_agent: str | None = None,
    remaining_length: str | None = None,
    return_time: str | None = None,
    context_growth: str | None = None,
) -> Predictors:
    """Resolves, loads and validates the predictors. Raises nothing; logs why a predictor is missing.

    Args:
        registry: opens the registry; called at most once, and not at all if folders are given.
        next_agent, remaining_length, return_time, context_growth: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, an
            artefact folder, or None.
    """
    opened = _cached(registry)
    return Predictors(
        _held("next-agent", next_agent, opened),
        _held("remaining-length", remaining_length, opened),
        _held("return-time", return_time, opened),
        _held("context-growth", context_growth, opened),
    )


def load(kind: str, reference: str, registry: Callable[[], Registry]) -> Held[Any]:
    """Resolves, loads and validates a predictor.

    Raises:
        RegistryError: the registry does not answer or lacks the model.
        ArtefactError: the artefact is broken, of another kind, or fails its trial.
    """
    found = resolve(reference, registry)
    predictor = _tried(kind, found.folder, _TEXTS)
    digest = artefact_digest(found.folder)
    promoted, profile = _evidence(found, registry)
    return Held(predictor, reference, found.version, digest, promoted=promoted, folder=found.folder, profile=profile)


def load_validated(kind: str, folder: Path, digest: str) -> Any:
    """Loads a predictor that another process on this machine has validated.

    Makes trial forecasts without texts and states: these load the compiled code into this process, but no text encoder.

    Raises:
        ArtefactError: the artefact is broken, of another kind, not the validated one, or fails its trial.
    """
    predictor = _tried(kind, folder, {})
    found = artefact_digest(folder)
    if found != digest:
        raise ArtefactError(f"{folder}: digest {found[:19]}… is not {digest[:19]}…, which was validated: put it back")
    return predictor


def _tried(kind: str, folder: Path, texts: Mapping[str, str]) -> Any:
    """The predictor of a folder after trial forecasts; raises ArtefactError, which names the folder, if one fails."""
    try:
        predictor = KINDS[kind].load(folder)
        _TRIALS[kind](predictor, texts)
    except PresageError:
        raise
    except Exception as error:
        raise ArtefactError(
            f"{folder}: found a predictor that fails a trial ({type(error).__name__}: {error}); expected forecasts. "
            "Train it again"
        ) from error
    return predictor


def _held(kind: str, reference: str | None, registry: Callable[[], Registry]) -> Held[Any]:
    if reference is None:
        return Held(None, None, reason=NO_MODEL)
    try:
        return load(kind, reference, registry)
    except Exception as error:
        _log.warning("%s is not used: %s", reference, why(error))
        return Held(None, reference, reason=why(error))


def _evidence(found: ResolvedModel, registry: Callable[[], Registry]) -> tuple[Mapping[str, Promoted], str | None]:
    """The promoted figures of a version, and the inputs that its promotion evaluated; it serves without them too."""
    if found.name is None or found.version is None:
        return {}, None
    called = f"{found.name} version {found.version}"
    promoted: Mapping[str, Promoted] = {}
    profile = None
    try:
        content = attached(registry(), found.name, found.version, PROMOTED_FOLDER, PROMOTED_FILE)
        if content is not None:
            promoted = read_promoted(content)
        else:
            _log.info("%s: it was promoted without figures; %s", called, _OWN_BEGINNING)
    except Exception as error:
        _log.warning("%s: its promoted figures cannot be read: %s; %s", called, why(error).rstrip("."), _OWN_BEGINNING)
    try:
        profile = registry().version(found.name, found.version).tags.get(PROFILE)
    except Exception as error:
        _log.warning("%s: its tags cannot be read: %s", called, why(error))
    return promoted, profile


def _try_next_agent(predictor: NextAgentPredictor, texts: Mapping[str, str]) -> None:
    """Forecasts a few steps at both moments, of known and unknown workflow types and agents."""
    adapter, vocabulary = NextAgentAdapter(predictor, None), predictor.vocabulary
    known: dict[str, Any] = dict(texts)
    if texts:
        known |= {STATE_COLUMN[moment]: np.zeros(size, np.float32) for moment, size in predictor.source.sizes.items()}
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:_TRIAL_STEPS], ""):
            adapter.prefilled(workflow, agent, {"input_tokens": 1, **known}, NO_LENGTHS)
            adapter.completed(workflow, {"output_tokens": 1, **known}, NO_LENGTHS)


_SERVED: Final = ("remaining", "final-context")
"""Targets that engines serve: the defaults of `train-predictor`."""


def _try_length(predictor: RemainingLengthPredictor, texts: Mapping[str, str]) -> None:
    if predictor.target not in _SERVED:
        raise ArtefactError(
            f"the predictor forecasts the target {predictor.target}; an engine needs what remains of a workflow, "
            f"the default of `train-predictor {predictor.kind}`"
        )
    adapter, vocabulary = LengthAdapter(predictor, None), predictor.encoder.vocabulary
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:_TRIAL_STEPS], ""):
            adapter.prefilled(workflow, {"agent": agent, "input_tokens": 1, **texts})
            workflow.completed({"output_tokens": 1, **texts})


def _try_return_time(predictor: ReturnTimePredictor, texts: Mapping[str, str]) -> None:
    adapter, vocabulary = ReturnAdapter(predictor, None), predictor.vocabulary
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow, now = ReturnWorkflow(predictor.encoder, workflow_type), 0.0
        for agent in (*vocabulary.agents[:_TRIAL_STEPS], ""):
            begun = workflow.arrived({"agent": agent, "input_tokens": 1, **texts}, now)
            now += 1e3
            adapter.forecast(workflow.completed(begun, {"output_tokens": 1, "finish_reason": "stop"}, now))
            answered = workflow.answered("stop", ())
            assert answered is not None
            adapter.forecast(answered)


def _try_router(predictor: RouterPredictor, texts: Mapping[str, str]) -> None:
    """Forecasts with and without a prompt; a router reads nothing else, so `texts` make no difference."""
    for forecast in predictor.forecasts(["", _TEXTS["input_text"]]):
        if not all(0.0 <= share <= 1.0 for share in forecast.probabilities.values()):  # NaN is neither
            raise ArtefactError("the router forecasts a probability that is not between 0 and 1: train it again")


_TRIALS: Final[Mapping[str, Callable[[Any, Mapping[str, str]], None]]] = {
    "next-agent": _try_next_agent,
    "remaining-length": _try_length,
    "context-growth": _try_length,
    "return-time": _try_return_time,
    "router": _try_router,
}


def _cached(registry: Callable[[], Registry]) -> Callable[[], Registry]:
    """Caches the registry, or its error, so that one that is down is waited for once."""

    @cache
    def outcome() -> Registry | Exception:
        try:
            return registry()
        except Exception as error:
            return error

    def opened() -> Registry:
        found = outcome()
        if isinstance(found, Exception):
            raise found
        return found

    return opened
