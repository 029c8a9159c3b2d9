"""Train and evaluate a next-agent predictor and baselines.

Test tasks are split off first. Vocabulary and states come from the training part only, and a validation part of it,
never the test set, serves early stopping and the mixing weights. Baselines that need no validation part are fitted on
the whole training part, as the predictor is in its final fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.describe import describe
from presage.datasets.schema import digest
from presage.datasets.split import Split
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.agent_names import AgentNames, recognised
from presage.features.input_profiles import PROFILES
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.served_steps import served_steps
from presage.features.states import SKETCH, States, StateSource
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.continued import Extension
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.baselines import BASELINES, find
from presage.training.configuration import Limits
from presage.training.metrics import json_values
from presage.training.next_agent.evaluate import Evaluation, Predict, evaluate
from presage.training.next_agent.semantic_state import StateChoice, TrainingTraces, choose_states
from presage.training.sets import (
    SHARED_TASKS,
    check_known_agents,
    described,
    held_out,
    set_apart,
    shared_tasks,
    under_profiles,
    workflow_names,
)
from presage.training.training import Judged, Progress, Training, fit_baselines, named_digests, versions
from presage.wording import counted

_STEPS = 1000
_WARM_UP = 50


def forecast_latency_us(predictor: NextAgentPredictor, prefixes: Prefixes) -> float:
    """Median time of one forecast with its state, microseconds, over a thousand steps and both moments.

    Includes the projection of the state, not the encoding of texts; on one thread.
    """
    out = np.empty((predictor.horizon, predictor.vocabulary.outcomes), np.float32)
    sizes = np.nan_to_num(prefixes.sizes, nan=0.0).tolist()
    taken: list[int] = []
    # Repeat a short trace: the first forecasts after loading a model include loading its code.
    for w, (start, stop) in cycle(enumerate(pairwise(prefixes.offsets.tolist()))):
        if len(taken) >= 2 * (_STEPS + _WARM_UP):
            break
        types = predictor.vocabulary.workflow_types
        index = int(prefixes.workflow_type[w])
        workflow = predictor.open(types[index] if index < len(types) else "")
        for row in range(start, stop):
            state = {moment: _state(prefixes, moment, row) for moment in MOMENTS}
            input_tokens, output_tokens = sizes[row]
            agent = int(prefixes.agent[row])
            begun = time.perf_counter_ns()
            predictor.prefilled(workflow, agent, input_tokens, predictor.project(PREFILL, state[PREFILL]), out)
            between = time.perf_counter_ns()
            predictor.completed(workflow, output_tokens, predictor.project(COMPLETION, state[COMPLETION]), out)
            taken += [between - begun, time.perf_counter_ns() - between]
    return float(np.median(taken[2 * _WARM_UP :])) / 1000


def _state(prefixes: Prefixes, moment: Moment, row: int) -> NDArray[np.float32] | None:
    states = prefixes.states.get(moment)
    return None if states is None or np.isnan(states[row, 0]) else states[row]


LIMITS: Final[Limits] = {
    **dict.fromkeys(("network.agent_size", "network.prefix_size", "network.hidden_size"), (1, 1024)),
    **dict.fromkeys(("network.epochs", "network.patience", "network.batch_steps"), (1, math.inf)),
    **dict.fromkeys(("network.dropout", "network.input_dropout"), (0, 0.95)),
    "network.averaging": (0, 0.9999),
    **dict.fromkeys(("boosting.patience", "boosting.min_rows"), (1, math.inf)),
    **dict.fromkeys(("boosting.columns", "boosting.rows"), (0.01, 1)),
    "boosting.depth": (1, 16),
    "boosting.bins": (2, 256),
    "boosting.directions": (1, 1024),
}

OLD: Final = "old model"
"""The model that a training started from, among the baselines."""

NGRAM: Final = "n-gram"
"""The n-gram inside a fitted predictor: order 3, counted on its training traces."""


NextAgentTraining = Training[NextAgentPredictor, Evaluation]


def train(
    table: pa.Table,
    test: pa.Table | None = None,
    config: NextAgentConfig | None = None,
    *,
    horizon: int = 3,
    seed: int = 0,
    states: States = "auto",
    text_encoder: str = SKETCH,
    baselines: Sequence[str] = tuple(BASELINES),
    name: str | None = None,
    progress: Progress | None = None,
) -> NextAgentTraining:
    """Fit a predictor and baselines and evaluate them on the same held-out workflows.

    Args:
        table: a valid trace.
        test: a valid test trace; None splits off a fifth of the tasks of `table`, the latest if times are recorded.
        horizon: K, the number of steps to forecast.
        seed: of the splits, of every fit and of the bootstrap.
        states: source of semantic states.
        text_encoder: for states from texts: "sketch", or a folder or hub name.
        baselines: names for `presage.training.baselines.find`.

    Raises:
        ConfigurationError: an unknown baseline, a horizon below 1, or states that the traces lack.
        TraceError: too few traces to split, or fewer than two agents.
    """
    if horizon < 1:
        raise ConfigurationError(f"horizon is {horizon}; wanted at least 1")
    for baseline in baselines:
        find(baseline)
    parts = set_apart(table, test, seed)
    fitted = fit_predictor(
        parts.train, config, horizon=horizon, seed=seed, states=states, text_encoder=text_encoder, progress=progress
    )
    return assess(fitted, parts, baselines=baselines, name=name, progress=progress)


@dataclass(frozen=True)
class OldModel:
    """The predictor that a training started from, how users name it, and old test traces, if any."""

    predictor: NextAgentPredictor
    reference: str
    digest: str
    test: pa.Table | None = None

    def as_baseline(self, vocabulary: Vocabulary) -> Predict:
        """Its forecasts over a vocabulary that extends its own: new names are unknown to it."""
        within = Extension(self.predictor.vocabulary, vocabulary, {})
        return lambda prefixes, moment: within.forecasts(self.predictor.predict(within.before(prefixes), moment))


def assess(
    fitted: FittedPredictor,
    parts: Split,
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    name: str | None = None,
    origin: OldModel | None = None,
    progress: Progress | None = None,
) -> NextAgentTraining:
    """Fit baselines where a predictor was fitted, on the training part, and evaluate all of them on the test set.

    `origin`, the one it started from, is a baseline; on its test set all are judged too.

    Raises ConfigurationError for an unknown baseline, and TraceError if the predictor knows none of the agents.
    """
    report, seed = progress or (lambda _, __: None), fitted.predictor.seed
    predictor, learning, inner, validation = fitted.predictor, fitted.learning, fitted.inner, fitted.validation
    check_known_agents(parts.test, predictor.vocabulary)
    held = prefixes_of(parts.test, predictor.vocabulary, predictor.horizon)
    held = held.with_states(predictor.source.states(parts.test))

    def predict(baseline: str) -> Predict:
        return find(baseline).fit(seed, learning, inner, validation).predict

    predicts = fit_baselines(baselines, predict, report)
    if origin is not None:
        predicts = {OLD: origin.as_baseline(predictor.vocabulary), **predicts}

    report("judging on the test set", None)
    evaluation = evaluate(
        _predict(predictor),
        held,
        np.random.default_rng(seed),
        baselines=predicts,
        profiles=_profiles(predictor, held),
    )
    digests, training_data = described(parts, learning.workflows, learning.steps)
    started: dict[str, Any] = {}
    if origin is not None:
        training_data |= {"started_from": origin.reference, "started_from_digest": origin.digest}
        started = {"model": origin.reference, "digest": origin.digest}
        if origin.test is not None:
            older, _ = held_out(origin.test, predictor)
            digests |= {"old test traces": f"sha256:{digest(older)}"}
            started["old_test"] = _on_old_traces(predictor, older, predicts)
    metrics = {
        **evaluation.to_dict(),
        "model": name,
        "started_from": started or None,
        "data": {
            "training": f"{counted(inner.workflows, 'workflow')}, {counted(inner.steps, 'step')}",
            "validation": f"{counted(validation.workflows, 'workflow')}, {counted(validation.steps, 'step')}",
            "split": parts.rule,
            SHARED_TASKS: shared_tasks(parts),
            **({"started from": f"{started['model']}, {started['digest']}"} if started else {}),
            "states": _of_states(predictor.source),
            "choice of states": str(fitted.choice or "that of the model it started from"),
            "seed": seed,
            **named_digests(digests),
        },
        "state_choice": fitted.choice.to_dict() if fitted.choice is not None else None,
        "curves": json_values({name: list(values) for name, values in predictor.curves.items()}),
        "traces": describe(parts.train),
        "config": {**asdict(predictor.config), "horizon": predictor.horizon},
        "versions": versions(),
        "fit_seconds": round(fitted.seconds, 2),
        "latency_us": forecast_latency_us(predictor, held),
        "size_bytes": None,
    }
    return NextAgentTraining(predictor, metrics, training_data, evaluation, digests)


def evaluate_model(
    predictor: NextAgentPredictor,
    table: pa.Table,
    seed: int,
    *,
    profile: str | None = None,
) -> Judged[Evaluation]:
    """Evaluate a fitted predictor on a valid trace that it was not trained on, beside its own n-gram, `NGRAM`.

    With `profile`, use this input profile only; otherwise all inputs, and each profile in addition. Raises TraceError
    if there is no workflow, or no agent that the predictor knows.
    """
    table = recognised(served_steps(table), predictor.agent_names, predictor.vocabulary)
    check_known_agents(table, predictor.vocabulary)
    prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon).with_states(predictor.source.states(table))
    if profile is not None:
        prefixes = predictor.observed(prefixes, PROFILES[profile])
    evaluation = evaluate(
        _predict(predictor),
        prefixes,
        np.random.default_rng(seed),
        baselines={NGRAM: predictor.parts.ngram.predict},
        profiles=_profiles(predictor, prefixes) if profile is None else None,
    )
    return Judged(evaluation, forecast_latency_us(predictor, prefixes), workflow_names(table))


@dataclass(frozen=True)
class FittedPredictor:
    """A fitted predictor; `learning`, its training prefixes with the chosen states, consists of `inner` and
    `validation`; `seconds` is the time of the fit. There is no choice of states where it started from another one.
    """

    predictor: NextAgentPredictor
    learning: Prefixes
    inner: Prefixes
    validation: Prefixes
    choice: StateChoice | None
    seconds: float


def fit_predictor(
    table: pa.Table,
    config: NextAgentConfig | None = None,
    *,
    horizon: int = 3,
    seed: int = 0,
    states: States = "auto",
    text_encoder: str = SKETCH,
    progress: Progress | None = None,
) -> FittedPredictor:
    """Fit a predictor on all served steps of a valid trace; arguments as in `train`."""
    config, report, begun = config or NextAgentConfig(), progress or (lambda _, __: None), time.perf_counter()
    table = served_steps(table)
    vocabulary = Vocabulary.from_table(table, numbered=True)
    report("reading states", None)
    done = 0

    def embedded(more: int) -> None:
        nonlocal done
        done += more
        report("embedding texts", min(1.0, done / (2 * table.num_rows)))

    traces = TrainingTraces(table, prefixes_of(table, vocabulary, horizon), seed, text_encoder, embedded)
    choice = choose_states(traces, states, config, seed, lambda doing: report(doing, None))
    # Without a final fit on all tasks, the model keeps the states that it was fitted with.
    source, learning = traces.seen(choice.name, inner=False) if config.refit else (choice.source, choice.prefixes)
    predictor = NextAgentPredictor(config, seed).fit(
        *(choice.prefixes.take(part) for part in traces.parts),
        source=source,
        whole=learning,
        grown=(choice.of, choice.trees),
        trained_on=task_keys(table),
        progress=report,
    )
    predictor.agent_names = AgentNames.of_traces(table)
    inner, validation = (learning.take(part) for part in traces.parts)
    return FittedPredictor(predictor, learning, inner, validation, choice, time.perf_counter() - begun)


def _on_old_traces(predictor: NextAgentPredictor, table: pa.Table, predicts: Mapping[str, Predict]) -> dict[str, Any]:
    """Figures on old test traces, and what was forgotten: by how much the old model is more accurate."""
    held = prefixes_of(table, predictor.vocabulary, predictor.horizon).with_states(predictor.source.states(table))
    evaluation = evaluate(_predict(predictor), held, np.random.default_rng(predictor.seed), baselines=predicts)
    kept = ("workflows", "steps", "moments", "baselines", "differences")
    forgotten: dict[str, Any] = {
        moment: {"difference": [-x for x in gap.difference], "ci95": [(-high, -low) for low, high in gap.ci95]}
        for moment, gap in evaluation.differences[OLD].items()
    }
    return {**{key: evaluation.to_dict()[key] for key in kept}, "forgotten": json_values(forgotten)}


def _predict(predictor: NextAgentPredictor) -> Predict:
    """Cache the last pass: one pass over prefixes yields both moments."""
    last: list[tuple[Prefixes, dict[Moment, NDArray[np.float32]]]] = []

    def predict(prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        if not last or last[0][0] is not prefixes:
            last[:] = [(prefixes, predictor.predict_both(prefixes))]
        return last[0][1][moment]

    return predict


def _profiles(predictor: NextAgentPredictor, prefixes: Prefixes) -> dict[str, Prefixes]:
    def alike(mine: Prefixes, other: Prefixes) -> bool:
        inputs = [
            (bool(np.isfinite(side.sizes).any()), bool(np.isfinite(side.called).any()), bool(side.states))
            for side in (mine, other)
        ]
        return inputs[0] == inputs[1]

    return under_profiles(prefixes, lambda sources: predictor.observed(prefixes, sources), alike)


def _of_states(source: StateSource) -> str:
    if source.kind == "none":
        return "none"
    return f"{source.kind}, " + ", ".join(f"{size} numbers at {moment}" for moment, size in source.sizes.items())
