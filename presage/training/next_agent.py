"""From a trace to a next-agent predictor and the figures that speak for it, next to every baseline.

The order is what keeps the figures honest: test tasks are set apart first, vocabulary and states are made from the
training part alone, and a validation part of it, never the test set, decides when to stop and how to mix. Baselines
that decide nothing on the validation part learn from the whole training part, as ours does in the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.digest import digest
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.states import SKETCH, States, StateSource, fit_states
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent import NextAgentPredictor
from presage.predictors.parts import NextAgentConfig
from presage.training.baselines import BASELINES, SETS, check
from presage.training.configuration import Limits
from presage.training.evaluate import Evaluation, Predict, evaluate
from presage.training.latency import forecast_latency_us
from presage.training.record import Progress, versions
from presage.training.sets import SHARED_TASKS, set_apart, shared_tasks, workflow_names
from presage.training.training import Training
from presage.training.validation_split import split_validation

VALIDATION_FRACTION: Final = 0.15

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
"""What the numbers of a `NextAgentConfig` have to keep to."""

NGRAM: Final = "n-gram"
"""The baseline that a fitted predictor carries inside: order 3, counted on its own training traces."""


class NextAgentTraining(Training[NextAgentPredictor, Evaluation]):
    """With "traces" among the metrics, the training traces as `describe` tells them."""


@dataclass(frozen=True)
class Judged:
    """A predictor judged on a trace.

    Attributes:
        evaluation: its figures; the only baseline is the n-gram inside the predictor, `NGRAM`.
        workflows: "type/id" of each workflow, in the order of the figures' rows.
        latency_us: median of one warm forecast.
    """

    evaluation: Evaluation
    workflows: tuple[str, ...]
    latency_us: float


def train(
    table: pa.Table,
    test: pa.Table | None = None,
    config: NextAgentConfig | None = None,
    *,
    horizon: int = 3,
    seed: int = 0,
    states: States = "auto",
    text_encoder: str = SKETCH,
    baselines: Sequence[str] = SETS["default"],
    name: str | None = None,
    progress: Progress | None = None,
) -> NextAgentTraining:
    """Fits a predictor and its baselines and judges them on the same held-out workflows.

    Args:
        table: a valid trace.
        test: a valid trace to judge on; None sets a fifth of `table` apart, whole tasks, later ones where times permit.
        config: of the predictor.
        horizon: K, how many steps ahead.
        seed: of the splits, of every fit and of the bootstrap.
        states: where semantic states come from.
        text_encoder: "sketch", or a folder or hub name, where they come from texts.
        baselines: names out of `presage.training.baselines.BASELINES`.
        name: of the model, for the record.
        progress: told what is being done.

    Raises:
        ConfigurationError: an unknown baseline, a horizon below 1, or states that the traces do not have.
        TraceError: the traces are too few to split, or name fewer than two agents.
    """
    config, tell = config or NextAgentConfig(), progress or (lambda _, __: None)
    if horizon < 1:
        raise ConfigurationError(f"horizon is {horizon}; at least 1 step ahead is wanted")
    check(baselines)
    parts = set_apart(table, test, seed)
    vocabulary = Vocabulary.from_table(parts.train)
    tell("reading states", None)
    texts = _Count(2 * parts.train.num_rows, lambda share: tell("embedding texts", share))
    source = fit_states(parts.train, states=states, text_encoder=text_encoder, seed=seed, progress=texts)
    learning, held = (
        prefixes_of(part, vocabulary, horizon).with_states(source.states(part)) for part in (parts.train, parts.test)
    )
    inner, validation = split_validation(learning, VALIDATION_FRACTION, seed)

    begun = time.perf_counter()
    predictor = NextAgentPredictor(config, seed).fit(
        inner, validation, source=source, trained_on=task_keys(parts.train), progress=tell
    )
    fit_seconds = time.perf_counter() - begun
    fitted: dict[str, Predict] = {}
    for index, baseline in enumerate(baselines):
        tell(f"baseline {baseline}", index / len(baselines))
        fitted[baseline] = BASELINES[baseline].fit(seed, learning, inner, validation).predict

    tell("judging on the test set", None)
    evaluation = evaluate(_predict(predictor, held), held, np.random.default_rng(seed), baselines=fitted, model=name)
    training_data = {
        "digest": f"sha256:{digest(parts.train)}",
        "workflows": learning.workflows,
        "steps": learning.steps,
        "split": parts.rule,
    }
    metrics = {
        **evaluation.to_dict(),
        "data": {
            "training": f"{inner.workflows} workflows, {inner.steps} steps",
            "validation": f"{validation.workflows} workflows, {validation.steps} steps",
            "split": parts.rule,
            SHARED_TASKS: shared_tasks(parts),
            "states": _of_states(source),
            "seed": seed,
            "digest of the training traces": training_data["digest"],
            "digest of the test traces": f"sha256:{digest(parts.test)}",
        },
        "traces": describe(parts.train),
        "config": asdict(config),
        "versions": versions(),
        "fit_seconds": round(fit_seconds, 2),
        "latency_us": forecast_latency_us(predictor, held),
        "size_bytes": None,
    }
    return NextAgentTraining(predictor, metrics, training_data, evaluation)


def evaluate_model(
    predictor: NextAgentPredictor,
    table: pa.Table,
    seed: int,
    *,
    model: str | None = None,
    version: int | None = None,
) -> Judged:
    """Judges a fitted predictor on a valid trace that it was not trained on."""
    prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon).with_states(predictor.source.states(table))
    evaluation = evaluate(
        _predict(predictor, prefixes),
        prefixes,
        np.random.default_rng(seed),
        baselines={NGRAM: predictor.back_off.predict},
        model=model,
        version=version,
    )
    return Judged(evaluation, workflow_names(table), forecast_latency_us(predictor, prefixes))


class _Count:
    """Turns a count of things done into a share of at most `total` things."""

    def __init__(self, total: int, tell: Callable[[float], None]) -> None:
        self.total, self.tell, self.done = total, tell, 0

    def __call__(self, more: int) -> None:
        self.done += more
        self.tell(min(1.0, self.done / self.total))


def _predict(predictor: NextAgentPredictor, prefixes: Prefixes) -> Predict:
    """Both moments come out of one pass over a trace, so it is made once."""
    forecasts = predictor.predict_both(prefixes)
    return lambda _, moment: forecasts[moment]


def _of_states(source: StateSource) -> str:
    if source.kind == "none":
        return "none"
    return f"{source.kind}, " + ", ".join(f"{size} numbers at {moment}" for moment, size in source.sizes.items())
