"""The remaining-length predictor: quantiles of the output tokens that a workflow still has to produce.

Ni et al., "Chimera", §3.4: the median ranks requests, shortest total job first. Here the quantiles are calibrated, and
boosted trees and a ridge are alternatives to the paper's forest. With the target "step" the same predictor forecasts
the output length of the current step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from numpy.typing import NDArray

from presage.errors import TraceError
from presage.features.input_profiles import TEXT, TOKENS, Sources
from presage.features.lengths import LengthEncoder, LengthWorkflow, count_of, length_rows
from presage.features.rows import LabelledRows, Target
from presage.predictors.common.artefact import under
from presage.predictors.common.forecast import Source
from presage.predictors.common.steps import check_steps
from presage.predictors.quantiles.predictor import QuantilePredictor

KIND: Final = "remaining-length"


@dataclass(frozen=True)
class LengthForecast:
    """Forecast of the output tokens that a workflow has left, by quantile.

    Attributes:
        source: `champion`, or `back-off` if this agent is rare in this workflow type.
        evidence: training steps of this agent in this workflow type.
        calibrated: whether the workflow type has enough calibration rows; if not, the upper quantiles are those of all
            workflow types or wider.
        calibration: calibration rows of this workflow type.
        largest: the largest number of tokens in them, or in those of all types where these calibrate; None if the
            artefact was written before it was kept.
    """

    quantiles: dict[float, float]
    source: Source
    evidence: int
    calibrated: bool
    calibration: int
    largest: float | None = None

    @property
    def prediction(self) -> float:
        """The median, or the quantile just above it, tokens."""
        return self.quantiles[min((q for q in self.quantiles if q >= 0.5), default=max(self.quantiles))]

    @property
    def beyond_calibration(self) -> bool | None:
        """Whether the highest quantile, in whole tokens, is above all that calibrated it; None if that is not known."""
        return None if self.largest is None else round(max(self.quantiles.values())) > self.largest

    def to_dict(self) -> dict[str, Any]:
        """As `presage forecast --json` prints it."""
        return {
            "source": self.source,
            "evidence": self.evidence,
            "calibrated": self.calibrated,
            "calibration": self.calibration,
            "largest": self.largest,
            "beyond_calibration": self.beyond_calibration,
            "quantiles": {str(quantile): tokens for quantile, tokens in self.quantiles.items()},
        }


class RemainingLengthPredictor(QuantilePredictor):
    """Forecasts remaining output tokens; create one with `fit` or `load`."""

    kind = KIND
    unit = "tokens"
    target: Target
    encoder: LengthEncoder

    @property
    def reads(self) -> Sources:
        """The input sources that its forecasts use where available."""
        return frozenset((TOKENS, TEXT)) if self.encoder.sketch is not None else frozenset((TOKENS,))

    @property
    def ranks(self) -> int:
        """Index of the quantile that ranks requests: the first at or above .5."""
        return next((place for place, q in enumerate(self.quantiles) if q >= 0.5), len(self.quantiles) - 1)

    def rows(self, table: pa.Table) -> LabelledRows:
        """See `length_rows`."""
        return length_rows(table, self.encoder, self.target)

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> LengthForecast:
        """Forecast at the last of the given steps of one workflow, before its output.

        The steps are in order, keyed by column names of traces; `workflow_type` and `agent` are required. Raises
        InputError for no step, steps of different workflows, an invalid agent, count or text.
        """
        steps = check_steps(steps)
        workflow = self.open(steps[0]["workflow_type"])
        workflow.passed(steps[:-1])
        count_of(steps[-1], "output_tokens")  # not used, but refused if invalid
        return self.begun(workflow, steps[-1])

    def open(self, workflow_type: str) -> LengthWorkflow:
        """State of a new workflow, for `begun` and `LengthWorkflow.completed`."""
        return LengthWorkflow(self.encoder, workflow_type)

    def begun(self, workflow: LengthWorkflow, step: Mapping[str, Any]) -> LengthForecast:
        """Begin a step (see `LengthWorkflow.begun`): the result of `forecast` at the cost of one step."""
        workflow_type, agent, model, numbers = workflow.begun(step)
        tokens = self.predict_one(workflow_type, agent, model, numbers).tolist()
        return LengthForecast(
            quantiles=dict(zip(self.quantiles, tokens, strict=True)),
            largest=self.estimator.largest_one(workflow_type, agent),
            **self.standing(workflow_type, agent),
        )

    @staticmethod
    def _encoder(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> LengthEncoder:
        if config.get("next_agent") is not None:
            raise ValueError("it reads a next-agent model, which is no longer supported")
        return LengthEncoder.from_artefact(config["encoder"], under(tensors, "encoder/"))

    def _check(self, train: LabelledRows, selection: LabelledRows) -> None:
        for rows in (train, selection):
            if (rows.label < 0).any():
                raise TraceError("output_tokens below 0 among the labels; expected a number of tokens, 0 or more")
        self.target = train.target

    def _config(self) -> dict[str, Any]:
        # "next_agent" is kept for the format: removing it would change the digests of artefacts.
        return {"next_agent": None, "target": self.target}

    def _tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        return {"encoder": self.encoder.to_tensors(), **super()._tensors()}

    def _take(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        self.target = config["target"]
        super()._take(config, tensors)
