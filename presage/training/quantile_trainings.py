"""Training and evaluation of the predictors of quantiles; `Family` has what lengths and return times share.

As in `presage.training.next_agent.train`, test tasks are split off first, and vocabularies come from the training part
only. A selection part of it, never the test set, selects the estimator; the other training tasks calibrate the
quantiles. Baselines are fitted on the whole training part.

Token counts that the traces lack are estimated (`features/missing_counts.py`), those of the test part by what the
training part says. To evaluate a fitted predictor, they are estimated by the evaluated traces themselves, so that two
versions of a model are compared on the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.split import Split
from presage.features.agent_names import recognised
from presage.features.input_profiles import PROFILES
from presage.features.missing_counts import CountEstimates, FilledTrace
from presage.features.rows import LabelledRows, Target
from presage.features.served_steps import served_steps
from presage.predictors.quantiles.choice import QuantileConfig
from presage.predictors.quantiles.predictor import QuantilePredictor
from presage.training.baselines import check_names
from presage.training.quantiles import (
    FLOOR,
    Predict,
    QuantileEvaluation,
    by_quantile,
    row_latency_us,
    rows_under_profiles,
)
from presage.training.sets import SHARED_TASKS, check_known_agents, described, set_apart, shared_tasks, workflow_names
from presage.training.training import Judged, Progress, Training, fit_baselines, named_digests, versions
from presage.wording import counted

SELECTION_FRACTION: Final = 0.25
"""Of the training tasks. The others calibrate: .99 needs hundreds of steps of each type."""

Of = TypeVar("Of", bound=QuantilePredictor)
Figures = TypeVar("Figures", bound=QuantileEvaluation, covariant=True)


def size(rows: LabelledRows) -> str:
    """A part of the traces, as a report says it."""
    return f"{counted(rows.workflows, 'workflow')}, {counted(len(rows), 'LLM step')}"


@dataclass(frozen=True)
class FittedQuantiles(Generic[Of]):
    """A fitted predictor.

    Attributes:
        counts: estimates missing token counts.
        learning: its training rows, selection part included.
        seconds: time of the fit.
        parts, facts: lines of the report on the training data.
        further: metrics of the kind.
    """

    predictor: Of
    counts: CountEstimates
    learning: LabelledRows
    seconds: float
    parts: Mapping[str, str]
    facts: Mapping[str, object]
    further: Mapping[str, Any]


class Judge(Protocol[Figures]):
    """Evaluates a predictor and baselines on rows, which are those of a trace whose missing counts were filled in."""

    def __call__(
        self,
        predictor: Any,
        rows: LabelledRows,
        filled: FilledTrace,
        *,
        baselines: Mapping[str, Predict],
        seed: int,
        profiles: Mapping[str, LabelledRows] | None,
    ) -> Figures:
        """The figures; with those under each input profile, unless `profiles` is None."""


@dataclass(frozen=True)
class Family(Generic[Of, Figures]):
    """The parts in which predictors of quantiles differ, and training and evaluation by them.

    Attributes:
        fit: (valid trace, settings or None) with `seed`, `progress` and arguments of its own -> a fitted predictor.
        names: target -> names of the baselines.
        baseline: (predictor, name, rows to fit on) -> the baseline.
        forecast: (predictor) -> forecasts one row; its time is measured.
    """

    fit: Callable[..., FittedQuantiles[Of]]
    names: Callable[[Target | None], Collection[str]]
    baseline: Callable[[Of, str, LabelledRows], Predict]
    judge: Judge[Figures]
    forecast: Callable[[Of], Callable[..., object]]

    def train(
        self,
        table: pa.Table,
        test: pa.Table | None = None,
        config: QuantileConfig | None = None,
        *,
        seed: int = 0,
        baselines: Sequence[str] | None = None,
        name: str | None = None,
        progress: Progress | None = None,
        **own: Any,
    ) -> Training[Of, Figures]:
        """Fit a predictor and baselines and evaluate them on the same held-out workflows.

        Args:
            table: a valid trace.
            test: a valid test trace; None splits off a fifth of the tasks of `table`, the latest if times are recorded.
            seed: of the splits, of every fit and of the bootstrap.
            baselines: their names; None for all.
            own: arguments of `fit`.

        Raises:
            ConfigurationError: an unknown baseline, or as `fit`.
            TraceError: too few traces to split, or no known label.
        """
        check_names(baselines or (), self.names(own.get("target", "remaining")))
        parts = set_apart(table, test, seed)
        fitted = self.fit(parts.train, config, seed=seed, progress=progress, **own)
        return self.assess(fitted, parts, baselines=baselines, name=name, progress=progress)

    def assess(
        self,
        fitted: FittedQuantiles[Of],
        parts: Split,
        *,
        baselines: Sequence[str] | None = None,
        name: str | None = None,
        progress: Progress | None = None,
    ) -> Training[Of, Figures]:
        """Fit baselines where a predictor was fitted, on the training part, and evaluate all of them on the test set.

        Raises ConfigurationError for an unknown baseline, and TraceError if no step has a known label.
        """
        predictor, learning, report = fitted.predictor, fitted.learning, progress or (lambda _, __: None)
        names = self.names(predictor.target)
        baselines = tuple(names) if baselines is None else baselines
        check_names(baselines, names)
        filled = fitted.counts.fill(parts.test)
        held = predictor.rows(filled.table)
        predicts = fit_baselines(baselines, lambda baseline: self.baseline(predictor, baseline, learning), report)
        report("judging on the test set", None)
        profiles = rows_under_profiles(held, predictor.encoder.observed)
        evaluation = self.judge(predictor, held, filled, baselines=predicts, seed=predictor.seed, profiles=profiles)
        digests, training_data = described(parts, learning.workflows, len(learning))
        metrics = {
            **evaluation.to_dict(),
            "model": name,
            "data": {
                **fitted.parts,
                "split": parts.rule,
                SHARED_TASKS: shared_tasks(parts),
                **fitted.facts,
                "seed": predictor.seed,
                **named_digests(digests),
            },
            **fitted.further,
            "estimators": {
                estimator: by_quantile(predictor.quantiles, losses) for estimator, losses in predictor.losses.items()
            },
            "traces": describe(parts.train),
            "config": {
                **asdict(predictor.config),
                **({"target": predictor.target} if predictor.target is not None else {}),
                "chosen": predictor.estimator.name,
            },
            "versions": versions(),
            "fit_seconds": round(fitted.seconds, 2),
            "latency_us": row_latency_us(held, self.forecast(predictor)),
            "size_bytes": None,
        }
        return Training(predictor, metrics, training_data, evaluation, digests)

    def evaluate(self, predictor: Of, table: pa.Table, seed: int, *, profile: str | None = None) -> Judged[Figures]:
        """Evaluate a fitted predictor on a valid trace that it was not trained on, beside `FLOOR`.

        With `profile`, use this input profile only; otherwise use all inputs, and each profile in addition. Raises
        TraceError if no step has a known label, or the predictor knows none of the agents.
        """
        table = recognised(served_steps(table), predictor.agent_names, predictor.vocabulary)
        check_known_agents(table, predictor.vocabulary)
        filled = CountEstimates.fit(table, seed).fill(table)
        rows, observed = predictor.rows(filled.table), predictor.encoder.observed
        if profile is not None:
            rows = observed(rows, PROFILES[profile])
        evaluation = self.judge(
            predictor,
            rows,
            filled,
            baselines={FLOOR: self.baseline(predictor, FLOOR, rows)},
            seed=seed,
            profiles=rows_under_profiles(rows, observed) if profile is None else None,
        )
        return Judged(evaluation, row_latency_us(rows, self.forecast(predictor)), workflow_names(table))
