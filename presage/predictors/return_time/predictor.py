"""The return-time predictor: when the next request of a workflow arrives after a step, and whether there is one.

Ours; no paper has it. Quantiles of the time, given that the workflow returns, come from the estimators of
`predictors/quantiles`, calibrated by workflow type. Boosted trees give the probability that the workflow has ended.
`ReturnForecast.waited` conditions a forecast on the time that has already passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.errors import InputError, TraceError
from presage.features.input_profiles import ANSWERS, TOKENS, Sources
from presage.features.return_times import LEAST_MS, ReturnEncoder, last_row, return_rows
from presage.features.rows import LEARNT_PROFILES, LabelledRows, join_rows
from presage.predictors.common.artefact import under
from presage.predictors.common.forecast import RETENTION_TARGET, Source
from presage.predictors.common.steps import check_steps
from presage.predictors.quantiles.boosted import Ensemble
from presage.predictors.quantiles.choice import QuantileConfig
from presage.predictors.quantiles.linear import CATEGORIES
from presage.predictors.quantiles.predictor import QuantilePredictor

KIND: Final = "return-time"
_END_ROUNDS: Final = 80
_END_SETTINGS: Final = {"num_leaves": 6, "min_child_samples": 50}
_LEAST_S: Final = LEAST_MS / 1e3
_MOST_LOG_S: Final = 50.0
_LONGEST_TTL_S: Final = 1e9
"""Thirty years."""
_TAIL: Final = (0.2, 5.0)
"""Least and greatest exponent of the Pareto tail beyond the last quantile."""


@dataclass(frozen=True)
class ReturnTimeConfig(QuantileConfig):
    """Settings of a return-time predictor; the quantiles describe the whole distribution."""

    quantiles: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class ReturnForecast:
    """Forecast of the time until the next request of a workflow.

    Attributes:
        end: probability that there is none: the workflow has ended.
        quantiles: seconds from the completion of the step, by quantile, given that the workflow returns.
        source: `champion`, or `back-off` if this agent is rare in this workflow type.
        evidence: training steps of this agent in this workflow type.
        calibrated: whether the workflow type has enough calibration rows; if not, the upper quantiles are those of all
            workflow types or wider.
        calibration: calibration rows of this workflow type.
        largest_s: the longest time in them, or in those of all types where these calibrate, less the time waited; None
            if the artefact was written before it was kept.
    """

    end: float
    quantiles: dict[float, float]
    source: Source
    evidence: int
    calibrated: bool
    calibration: int
    largest_s: float | None = None

    def returned(self, seconds: float) -> float:
        """Probability that the workflow, if it returns, has returned after this time.

        Linear in the logarithm of time between the quantiles; beyond the last one a Pareto tail through the last two.
        """
        return -math.expm1(self._log_survival(seconds))

    def waited(self, seconds: float) -> ReturnForecast:
        """The forecast after `seconds` without a request: quantiles of the time that is left, and END's probability.

        Raises InputError unless it is a number of seconds, 0 or more.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InputError(f"waited {seconds!r} s; expected a number of seconds, 0 or more")
        gone = self._log_survival(seconds)
        still = math.exp(gone) * (1.0 - self.end)
        left = {q: max(self._time_at(gone + math.log1p(-q)) - seconds, 0.0) for q in self.quantiles}
        end = self.end / (self.end + still) if self.end else 0.0
        return replace(
            self, end=end, quantiles=left, largest_s=None if self.largest_s is None else self.largest_s - seconds
        )

    def ttl(self, target: float = RETENTION_TARGET) -> float:
        """Time to live: seconds after which the workflow still returns with probability 1 − `target` at most.

        After END it does not return, so a workflow that has ended with probability `target` has 0 s. 1e9 s at most.
        Raises InputError unless 0 < target < 1.
        """
        if not 0.0 < target < 1.0:
            raise InputError(f"target {target!r}; expected a probability above 0 and below 1")
        returns = 1.0 - self.end
        if returns <= 1.0 - target:
            return 0.0
        return min(self._time_at(math.log((1.0 - target) / returns)), _LONGEST_TTL_S)

    def _log_survival(self, seconds: float) -> float:
        """Logarithm of the probability that a workflow that returns is still away."""
        levels, logs = self._curve
        if seconds <= _LEAST_S:
            return 0.0
        log_seconds = math.log(seconds)
        if log_seconds <= logs[-1]:
            return math.log1p(-float(np.interp(log_seconds, logs, levels)))
        return math.log1p(-levels[-1]) - self._tail * (log_seconds - logs[-1])

    def _time_at(self, log_survival: float) -> float:
        """Inverse of `_log_survival`."""
        levels, logs = self._curve
        beyond = math.log1p(-levels[-1]) - log_survival
        if beyond <= 0:
            return math.exp(float(np.interp(-math.expm1(log_survival), levels, logs)))
        return math.exp(min(logs[-1] + beyond / self._tail, _MOST_LOG_S))

    @property
    def _curve(self) -> tuple[list[float], list[float]]:
        """Rising levels and logarithms of seconds, from level 0."""
        logs = [math.log(_LEAST_S)]
        for seconds in self.quantiles.values():
            logs.append(min(max(math.log(max(seconds, _LEAST_S)), logs[-1]), _MOST_LOG_S))
        return [0.0, *self.quantiles], logs

    @property
    def _tail(self) -> float:
        levels, logs = self._curve
        fall, over = math.log((1.0 - levels[-2]) / (1.0 - levels[-1])), logs[-1] - logs[-2]
        return min(max(fall / over, _TAIL[0]), _TAIL[1]) if over > 0 else _TAIL[1]

    @property
    def prediction(self) -> float:
        """The median, or the quantile just above it, seconds, given that the workflow returns."""
        return self.quantiles[min((q for q in self.quantiles if q >= 0.5), default=max(self.quantiles))]

    @property
    def beyond_calibration(self) -> bool | None:
        """Whether the highest quantile, to the millisecond, is above all that calibrated it; None if unknown."""
        return None if self.largest_s is None else round(max(self.quantiles.values()), 3) > round(self.largest_s, 3)

    def to_dict(self) -> dict[str, Any]:
        """As `presage forecast --json` prints it."""
        return {
            "source": self.source,
            "evidence": self.evidence,
            "calibrated": self.calibrated,
            "calibration": self.calibration,
            "largest_s": self.largest_s,
            "beyond_calibration": self.beyond_calibration,
            "end": self.end,
            "quantiles": {str(quantile): seconds for quantile, seconds in self.quantiles.items()},
            "retention": {"target": RETENTION_TARGET, "ttl_s": self.ttl()},
        }


class ReturnTimePredictor(QuantilePredictor):
    """Forecasts return times in milliseconds; create one with `fit` or `load`."""

    kind = KIND
    unit = "log seconds"
    settings = ReturnTimeConfig
    config: ReturnTimeConfig
    reads: Sources = frozenset((TOKENS, ANSWERS))
    """The input sources that its forecasts use where available: text for the model and the tools that it calls."""
    encoder: ReturnEncoder
    _ends: Ensemble

    def rows(self, table: pa.Table) -> LabelledRows:
        """See `return_rows`."""
        return return_rows(table, self.encoder)

    def predict_end(self, rows: LabelledRows) -> NDArray[np.float64]:
        """Probability that the workflow has ended, float64 [n]."""
        return 1.0 / (1.0 + np.exp(-self._ends(self.estimator.inputs(rows))))

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> ReturnForecast:
        """Forecast after the LLM step that completed last among the given steps of one workflow.

        The steps are in order, keyed by column names of traces; `workflow_type` and `agent` are required. Tool calls
        after an LLM step are those of its answer. Raises InputError for no LLM step, steps of different workflows, an
        invalid agent, count, text or time.
        """
        steps = check_steps(steps)
        return self.forecast_row(*last_row(self.encoder, steps))

    def forecast_row(self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]) -> ReturnForecast:
        """Forecast from a row's workflow type, agent, model and numbers float32 [F]."""
        estimator = self.estimator
        seconds = self.predict_one(workflow_type, agent, model, numbers).astype(np.float64) / 1e3
        odds = self._ends(estimator.inputs_one(workflow_type, agent, model, numbers)[None])[0]
        largest_ms = estimator.largest_one(workflow_type, agent)
        return ReturnForecast(
            end=1.0 / (1.0 + math.exp(-odds)),
            quantiles=dict(zip(self.quantiles, seconds.tolist(), strict=True)),
            largest_s=None if largest_ms is None else largest_ms / 1e3,
            **self.standing(workflow_type, agent),
        )

    @staticmethod
    def _encoder(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> ReturnEncoder:
        return ReturnEncoder.from_config(config["encoder"])

    def _check(self, train: LabelledRows, selection: LabelledRows) -> None:
        if not train.labelled.any():
            raise TraceError(
                f"none of {len(train)} LLM steps has a known return time: expected started_at and ended_at on every "
                "LLM step, and workflows of two steps or more"
            )

    def _learn(self, train: LabelledRows, selection: LabelledRows) -> None:
        """Boosted trees for the log odds of END; each row is shown under one input profile, drawn at random."""
        rows = join_rows(train, selection)
        rows = rows.take(~np.isnan(rows.label))
        drawn = np.random.default_rng(self.seed).integers(len(LEARNT_PROFILES), size=len(rows))
        inputs = np.stack([self.estimator.inputs(self.encoder.observed(rows, profile)) for profile in LEARNT_PROFILES])
        ended = np.isinf(rows.label)
        # Half a step that ended and half a step that did not keep the odds finite where every step did the same.
        share = (ended * len(rows) + 0.5) / (len(rows) + 1.0)
        shown = inputs[drawn, np.arange(len(rows))]
        self._ends = Ensemble.fit(shown, share, "cross_entropy", _END_ROUNDS, self.seed, **_END_SETTINGS)

    def _tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        return {**super()._tensors(), "ends": self._ends.to_tensors()}

    def _take(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        super()._take(config, tensors)
        self._ends = Ensemble.from_tensors(under(tensors, "ends/"), self.estimator.numbers + CATEGORIES)
