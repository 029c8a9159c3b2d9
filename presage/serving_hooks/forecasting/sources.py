"""Which predictors an engine runs with: found, loaded and tried at its start, or left out with a reason.

An engine must start whether or not the registry answers. So nothing is raised here: a registry that is down, a model
that is not there, an artefact that is broken or of another kind, a predictor that cannot answer a trial are reasons,
and that part is missing. Both parts are tried before either is handed out; the trial also compiles what is compiled,
which the first request would otherwise wait for.

An alias is resolved once; who wants to know what it means later asks again, and loads anew (vllm/reload.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np

from presage.errors import ArtefactError, why
from presage.features.states import STATE_COLUMN
from presage.predictors.common.artefact import artefact_digest
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.registry.connect import Registry, attached
from presage.registry.promote import PROFILE
from presage.registry.resolve import ResolvedModel, resolve
from presage.serving_hooks.forecasting.adapters import LengthAdapter, NextAgentAdapter
from presage.serving_hooks.forecasting.live import NO_LENGTHS, NO_MODEL
from presage.serving_hooks.monitoring.promoted import PROMOTED_FILE, PROMOTED_FOLDER, Promoted, read_promoted

Predictor = TypeVar("Predictor")

_TRIALS: Final = 3
"""Steps of a trial: the later ones have a prefix."""

_TEXTS: Final = {"input_text": "a trial", "output_text": "a trial"}

_OWN_BEGINNING: Final = "each workflow type is held against its own first workflows"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held(Generic[Predictor]):
    """One predictor of an engine, or why there is none.

    Attributes:
        predictor: loaded and tried; None where there is none.
        reference: as it was given; None where none was.
        version: in the registry; None for a plain folder.
        digest: of the artefact.
        reason: why there is none.
        promoted: what forecasts of each workflow type are held against; empty where the version keeps no figures.
        folder: it was loaded from.
        profile: the inputs it was judged with when it was promoted: "engine", "gateway" or "full"; None where nobody
            has judged it.
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
    """What an engine runs with.

    Attributes:
        next_agent: says who comes next.
        remaining_length: says how many output tokens are left.
    """

    next_agent: Held[NextAgentPredictor]
    remaining_length: Held[RemainingLengthPredictor]


def resolve_predictors(
    registry: Callable[[], Registry],
    *,
    next_agent: str | None = None,
    remaining_length: str | None = None,
    cache: Path | None = None,
) -> Predictors:
    """Find, load and try the predictors. Raises nothing; what is missing is told to the log as well.

    Args:
        registry: opens the registry; called at most once, and not at all if folders are given.
        next_agent, remaining_length: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, an artefact folder, or None.
        cache: where copies of remote versions are kept; by default the user's cache.
    """
    opened = _once(registry)
    return Predictors(
        _held(next_agent, opened, cache, load_next_agent),
        _held(remaining_length, opened, cache, load_length),
    )


def load_next_agent(
    reference: str, registry: Callable[[], Registry], cache: Path | None = None
) -> Held[NextAgentPredictor]:
    """Find, load and try one that says who comes next.

    Raises:
        PresageError: the registry does not answer or has none; the artefact is broken, or of another kind.
        Exception: whatever it raised at its trial.
    """
    return _loaded(reference, registry, cache, NextAgentPredictor.load, _try_next_agent)


def load_length(
    reference: str, registry: Callable[[], Registry], cache: Path | None = None
) -> Held[RemainingLengthPredictor]:
    """The same of one that says how many output tokens are left."""
    return _loaded(reference, registry, cache, RemainingLengthPredictor.load, _try_length)


def take_next_agent(folder: Path, digest: str) -> NextAgentPredictor:
    """One that another process has tried here: loaded, and asked what an engine asks, without texts and states.

    That reads into this process what is compiled. A text encoder, which no engine asks, is not loaded.

    Args:
        folder: its artefact.
        digest: of what has been tried.

    Raises:
        ArtefactError: the artefact is broken, of another kind, or another than was tried.
        Exception: whatever it raised when it was asked.
    """
    predictor = NextAgentPredictor.load(folder)
    _check_same(folder, digest)
    _try_next_agent(predictor, sizes_alone=True)
    return predictor


def take_length(folder: Path, digest: str) -> RemainingLengthPredictor:
    """The same of one that says how many output tokens are left."""
    predictor = RemainingLengthPredictor.load(folder)
    _check_same(folder, digest)
    _try_length(predictor, sizes_alone=True)
    return predictor


def _check_same(folder: Path, digest: str) -> None:
    found = artefact_digest(folder)
    if found != digest:
        raise ArtefactError(f"{folder}: digest {found[:19]}…; that of {digest[:19]}… was tried: put it back")


def _held(
    reference: str | None,
    registry: Callable[[], Registry],
    cache: Path | None,
    load: Callable[[str, Callable[[], Registry], Path | None], Held[Predictor]],
) -> Held[Predictor]:
    if reference is None:
        return Held(None, None, reason=NO_MODEL)
    try:
        return load(reference, registry, cache)
    except Exception as error:
        _log.warning("%s is not used: %s", reference, why(error))
        return Held(None, reference, reason=why(error))


def _loaded(
    reference: str,
    registry: Callable[[], Registry],
    cache: Path | None,
    load: Callable[[Path], Predictor],
    trial: Callable[[Predictor], None],
) -> Held[Predictor]:
    found = resolve(reference, registry, cache=cache)
    predictor = load(found.folder)
    trial(predictor)
    digest = artefact_digest(found.folder)
    promoted, profile = _promoted(found, registry), judged_under(found, registry)
    return Held(predictor, reference, found.version, digest, promoted=promoted, folder=found.folder, profile=profile)


def judged_under(found: ResolvedModel, registry: Callable[[], Registry]) -> str | None:
    """The inputs a version was judged with when it was promoted; None where that is not known."""
    if found.name is None or found.version is None:
        return None
    try:
        tags = registry().version(found.name, found.version).tags
    except Exception as error:
        _log.warning("%s version %s: its tags cannot be read: %s", found.name, found.version, why(error))
        return None
    return tags.get(PROFILE)


def _promoted(found: ResolvedModel, registry: Callable[[], Registry]) -> Mapping[str, Promoted]:
    """What a version was promoted with. Without it the version serves all the same, and the log says so."""
    if found.name is None or found.version is None:
        return {}
    called = f"{found.name} version {found.version}"
    try:
        content = attached(registry(), found.name, found.version, PROMOTED_FOLDER, PROMOTED_FILE)
        if content is not None:
            return read_promoted(content)
    except Exception as error:
        _log.warning(
            "%s: what it was promoted with is not known: %s; %s", called, why(error).rstrip("."), _OWN_BEGINNING
        )
    else:
        _log.info("%s: no figures were kept when it was promoted; %s", called, _OWN_BEGINNING)
    return {}


def _try_next_agent(predictor: NextAgentPredictor, *, sizes_alone: bool = False) -> None:
    """A forecast at both moments of a few steps, of a known type and agent and of unknown ones."""
    adapter, vocabulary = NextAgentAdapter(predictor, None), predictor.vocabulary
    known: dict[str, Any] = {} if sizes_alone else dict(_TEXTS)
    if not sizes_alone:
        known |= {STATE_COLUMN[moment]: np.zeros(size, np.float32) for moment, size in predictor.source.sizes.items()}
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:_TRIALS], ""):
            adapter.prefilled(workflow, agent, {"input_tokens": 1, **known}, NO_LENGTHS)
            adapter.completed(workflow, {"output_tokens": 1, **known}, NO_LENGTHS)


def _try_length(predictor: RemainingLengthPredictor, *, sizes_alone: bool = False) -> None:
    if predictor.target != "remaining":
        raise ArtefactError(
            f"the predictor says how long a {predictor.target} is; one of what remains of a workflow is wanted, "
            "which is the default of `train-predictor remaining-length`"
        )
    adapter, vocabulary = LengthAdapter(predictor, None), predictor.encoder.vocabulary
    known: Mapping[str, Any] = {} if sizes_alone else _TEXTS
    for workflow_type in (*vocabulary.workflow_types[:1], ""):
        workflow = predictor.open(workflow_type)
        for agent in (*vocabulary.agents[:_TRIALS], ""):
            adapter.prefilled(workflow, {"agent": agent, "input_tokens": 1, **known})
            workflow.completed({"output_tokens": 1, **known})


def _once(registry: Callable[[], Registry]) -> Callable[[], Registry]:
    """The same, asked once: a registry that is down is waited for once."""
    answers: list[Any] = []

    def opened() -> Registry:
        if not answers:
            try:
                answers.append(registry())
            except Exception as error:
                answers.append(error)
        if isinstance(answers[0], Exception):
            raise answers[0]
        found: Registry = answers[0]
        return found

    return opened
