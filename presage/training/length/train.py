"""Train and evaluate a predictor of lengths or of context growth, and baselines.

As in `presage.training.next_agent.train`, test tasks are split off first, and vocabularies and the sketch come from the
training part only. A selection part of it, never the test set, selects texts and estimator; the other training
tasks calibrate the quantiles. Baselines are fitted on the whole training part.

Token counts that the traces lack are estimated (`features/missing_counts.py`), those of the test part by what the
training part says. To evaluate a fitted predictor, they are estimated by the evaluated traces themselves, so that two
versions of a model are compared on the same lengths.

`ablate` retrains with one group of features withheld from training, selection and evaluation, as if the trace did not
record it. If two groups carry the same information, withholding one of them has no effect, although it may matter when
the other is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.describe import describe
from presage.datasets.schema import digest
from presage.datasets.split import Split
from presage.datasets.tasks import task_keys
from presage.features.history import PROGRESS
from presage.features.input_profiles import PROFILES
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.rows import CONTEXT_TARGETS, PROMPT, LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.predictors.length.baselines import CONTEXT_BASELINES, LENGTH_BASELINES, constant
from presage.predictors.length.context import ContextGrowthPredictor
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.baselines import check_names
from presage.training.length.evaluate import LengthEvaluation, evaluate
from presage.training.length.texts import TextChoice, Texts, choose_texts
from presage.training.quantiles import (
    FLOOR,
    Predict,
    QuantileDifference,
    QuantileFigures,
    difference,
    row_latency_us,
    rows_under_profiles,
)
from presage.training.sets import (
    SHARED_TASKS,
    check_known_agents,
    set_apart,
    shared_tasks,
    tasks_apart,
    workflow_names,
)
from presage.training.training import Judged, Progress, Training, fit_baselines, named_digests, versions
from presage.wording import counted

SELECTION_FRACTION: Final = 0.25
"""Of the training tasks. The others calibrate: .99 needs hundreds of steps of each type."""

LengthTraining = Training[RemainingLengthPredictor, LengthEvaluation]


def train_lengths(
    table: pa.Table,
    test: pa.Table | None = None,
    config: QuantileConfig | None = None,
    *,
    target: Target = "remaining",
    seed: int = 0,
    texts: Texts = "auto",
    baselines: Sequence[str] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> LengthTraining:
    """Fit a predictor and baselines and evaluate them on the same held-out workflows.

    Args:
        table: a valid trace.
        test: a valid test trace; None splits off a fifth of the tasks of `table`, the latest if times are recorded.
        target: "remaining" tokens of this and all later steps, or those of this "step" alone; or one of
            `CONTEXT_TARGETS`, for a predictor of context growth.
        seed: of the splits, of every fit and of the bootstrap.
        texts: "auto" uses texts if held-out tasks show that they help; "text" and "none" force the choice.
        baselines: keys of `baselines_of(target)`; None for all.

    Raises:
        ConfigurationError: an unknown baseline, or texts that the traces lack.
        InputError: texts are requested, but insufficient for a sketch.
        TraceError: too few traces to split, or no known output tokens.
    """
    check_names(baselines or (), baselines_of(target))
    parts = set_apart(table, test, seed)
    fitted = fit_lengths(parts.train, config, target=target, seed=seed, texts=texts, progress=progress)
    return assess_lengths(fitted, parts, baselines=baselines, name=name, progress=progress)


def baselines_of(target: Target) -> Mapping[str, Callable[[LabelledRows, Sequence[float]], Predict]]:
    """The baselines of a target, by name."""
    return CONTEXT_BASELINES if target in CONTEXT_TARGETS else LENGTH_BASELINES


@dataclass(frozen=True)
class FittedLengths:
    """A fitted predictor; `counts` estimates missing token counts; `learning`, its training rows with the chosen
    features, consists of `inner` and `selection`; `seconds` is the time of the fit.
    """

    predictor: RemainingLengthPredictor
    counts: CountEstimates
    learning: LabelledRows
    inner: LabelledRows
    selection: LabelledRows
    choice: TextChoice
    seconds: float


def fit_lengths(
    table: pa.Table,
    config: QuantileConfig | None = None,
    *,
    target: Target = "remaining",
    seed: int = 0,
    texts: Texts = "auto",
    progress: Progress | None = None,
) -> FittedLengths:
    """Fit a predictor on all of a valid trace; arguments as in `train_lengths`."""
    report = progress or (lambda _, __: None)
    report("reading prompts", None)
    counts = CountEstimates.fit(table, seed)
    choice, apart = _features(counts.fill(table).table, target, texts, seed, report)
    inner, selection = choice.rows.take(~apart), choice.rows.take(apart)
    begun = time.perf_counter()
    of_target = ContextGrowthPredictor if target in CONTEXT_TARGETS else RemainingLengthPredictor
    predictor = of_target(config, seed).fit(
        inner, selection, encoder=choice.encoder, trained_on=task_keys(table), progress=report
    )
    return FittedLengths(predictor, counts, choice.rows, inner, selection, choice, time.perf_counter() - begun)


def assess_lengths(
    fitted: FittedLengths,
    parts: Split,
    *,
    baselines: Sequence[str] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> LengthTraining:
    """Fit baselines where a predictor was fitted, on the training part, and evaluate all of them on the test set.

    Raises ConfigurationError for an unknown baseline, and TraceError if no step has a known length, or the predictor
    knows none of the agents.
    """
    report, predictor = progress or (lambda _, __: None), fitted.predictor
    known = baselines_of(predictor.target)
    baselines = tuple(known) if baselines is None else baselines
    check_names(baselines, known)
    encoder, learning, inner, selection = predictor.encoder, fitted.learning, fitted.inner, fitted.selection
    filled = fitted.counts.fill(parts.test)
    held = length_rows(filled.table, encoder, predictor.target)
    seed = predictor.seed
    quantiles = tuple(predictor.quantiles)
    predicts = fit_baselines(baselines, lambda baseline: known[baseline](learning, quantiles), report)

    report("judging on the test set", None)
    profiles = rows_under_profiles(held, predictor.encoder.observed)
    marked = _estimated(filled, held)
    evaluation = evaluate(
        predictor.predict, held, quantiles, seed, estimated=marked, baselines=predicts, profiles=profiles
    )
    digests = {
        "training traces": f"sha256:{digest(parts.train)}",
        "test traces": f"sha256:{digest(parts.test)}",
    }
    training_data = {
        "digest": digests["training traces"],
        "workflows": learning.workflows,
        "steps": len(learning),
        "split": parts.rule,
    }
    metrics = {
        **evaluation.to_dict(),
        "model": name,
        "data": {
            "training": f"{counted(inner.workflows, 'workflow')}, {counted(len(inner), 'LLM step')}",
            "selection": f"{counted(selection.workflows, 'workflow')}, {counted(len(selection), 'LLM step')}",
            "split": parts.rule,
            SHARED_TASKS: shared_tasks(parts),
            "training steps of workflows that were cut": int(learning.lower_bound.sum()),
            "texts": fitted.choice.name if encoder.sketch is not None else "not recorded, or not read",
            "seed": seed,
            **named_digests(digests),
        },
        "state_choice": fitted.choice.to_dict(),
        "estimators": {
            name: {f"{q:g}": loss for q, loss in zip(quantiles, losses, strict=True)}
            for name, losses in predictor.losses.items()
        },
        "traces": describe(parts.train),
        "config": {**asdict(predictor.config), "target": predictor.target, "chosen": predictor.estimator.name},
        "versions": versions(),
        "fit_seconds": round(fitted.seconds, 2),
        "latency_us": row_latency_us(held, predictor.predict_one),
        "size_bytes": None,
    }
    return LengthTraining(predictor, metrics, training_data, evaluation, digests)


def _features(
    table: pa.Table, target: Target, texts: Texts, seed: int, report: Progress
) -> tuple[TextChoice, NDArray[np.bool_]]:
    """The chosen features of a training trace, and the mask of its selection rows."""
    table = served_steps(table)
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder, target)
    apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    return choose_texts(table, encoder, rows, apart, texts, seed, lambda doing: report(doing, None)), apart


def evaluate_lengths(
    predictor: RemainingLengthPredictor,
    table: pa.Table,
    seed: int,
    *,
    profile: str | None = None,
) -> Judged[LengthEvaluation]:
    """Evaluate a fitted predictor on a valid trace that it was not trained on, beside `FLOOR`.

    With `profile`, use this input profile only; otherwise use all inputs, and each profile in addition. Raises
    TraceError if no step has a known length, or the predictor knows none of the agents.
    """
    table = served_steps(table)
    check_known_agents(table, predictor.encoder.vocabulary)
    filled = CountEstimates.fit(table, seed).fill(table)
    rows = length_rows(filled.table, predictor.encoder, predictor.target)
    if profile is not None:
        rows = predictor.encoder.observed(rows, PROFILES[profile])
    quantiles = tuple(predictor.quantiles)
    evaluation = evaluate(
        predictor.predict,
        rows,
        quantiles,
        seed,
        estimated=_estimated(filled, rows),
        baselines={FLOOR: constant(rows, quantiles)},
        profiles=rows_under_profiles(rows, predictor.encoder.observed) if profile is None else None,
    )
    return Judged(evaluation, row_latency_us(rows, predictor.predict_one), workflow_names(table))


def _estimated(filled: FilledTrace, rows: LabelledRows) -> NDArray[np.bool_]:
    """The rows of served steps whose label contains an estimated count, bool [n], or may: it depends on later steps."""
    own = filled.estimated["output_tokens"]
    if rows.target in CONTEXT_TARGETS:
        own = own | filled.estimated["input_tokens"]
    if rows.target == "step":
        return own
    later = np.cumsum(own[::-1])[::-1]  # estimates in this row and all after it
    by_workflow = np.bincount(rows.workflow, own)
    of_others = (np.cumsum(by_workflow[::-1])[::-1] - by_workflow)[rows.workflow]
    return np.asarray(later > of_others)


AGENTS: Final = "agents, this one and before"
MODEL: Final = "model"

GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sizes of the prompt": PROMPT,
        "words of the prompt": ("prompt_",),
        "words of the last answer": ("answer_",),
        "progress and tokens so far": PROGRESS,
        AGENTS: ("agent_", "calls_", "since_"),
        MODEL: (),
    }
)
"""Columns of `LengthEncoder.names` by group; a name that ends in "_" is a prefix. The step's agent and the model are
replaced by names unknown to training. The workflow type is in no group, because quantiles are calibrated by it."""


def ablate(
    table: pa.Table,
    test: pa.Table,
    config: QuantileConfig | None = None,
    *,
    seed: int = 0,
) -> dict[str, QuantileDifference]:
    """Train with all features and once without each group that the traces have, and evaluate on `test` (other tasks).

    With the estimator "auto", the estimators may differ. Returns by group the figures without it minus those with all
    features; above 0 the group helps. Raises TraceError for too few traces to split, or no known output tokens.
    """
    config = config or QuantileConfig()
    counts = CountEstimates.fit(table, seed)
    choice, apart = _features(counts.fill(table).table, "remaining", "auto", seed, lambda _, __: None)
    encoder, learning = choice.encoder, choice.rows
    held = length_rows(counts.fill(served_steps(test)).table, encoder)

    def figures(group: str | None) -> QuantileFigures:
        rows, judged = (without(of, encoder, group) if group else of for of in (learning, held))
        predictor = RemainingLengthPredictor(config, seed).fit(rows.take(~apart), rows.take(apart), encoder=encoder)
        return evaluate(predictor.predict, judged, config.quantiles, seed).figures

    whole = figures(None)
    groups = [group for group in GROUPS if _varies(learning, encoder, group)]
    return {group: difference(figures(group), whole, seed) for group in groups}


def without(rows: LabelledRows, encoder: LengthEncoder, group: str) -> LabelledRows:
    """The same rows with a group of `GROUPS` unknown."""
    numbers = rows.numbers.copy()
    numbers[:, _columns(encoder, group)] = np.nan
    agent, model = len(encoder.vocabulary.agents), len(encoder.models)
    return replace(
        rows,
        numbers=numbers,
        agent=np.full_like(rows.agent, agent) if group == AGENTS else rows.agent,
        model=np.full_like(rows.model, model) if group == MODEL else rows.model,
    )


def _varies(rows: LabelledRows, encoder: LengthEncoder, group: str) -> bool:
    if group in (AGENTS, MODEL):
        values = rows.agent if group == AGENTS else rows.model
        return bool((values != values[0]).any())
    numbers = rows.numbers[:, _columns(encoder, group)]
    return bool(not np.isnan(numbers).all() and (numbers != numbers[:1]).any())


def _columns(encoder: LengthEncoder, group: str) -> list[int]:
    wanted, named = GROUPS[group], PROMPT + PROGRESS
    begin = tuple(name for name in wanted if name not in named)
    # "prompt_tokens" is a size, not a word of the prompt: a full name precedes a prefix.
    return [
        i for i, name in enumerate(encoder.names) if name in wanted or (name not in named and name.startswith(begin))
    ]
