"""The remaining-length predictor: quantiles of the output tokens that a workflow still has to produce.

Ni et al., "Chimera", §3.4: the median ranks requests, shortest total job first. Here the quantiles are calibrated, and
boosted trees and a ridge are alternatives to the paper's forest. With the target "step" the same predictor forecasts
the output length of the current step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.datasets.schema.names import NameMapping
from presage.errors import TraceError
from presage.features.input_profiles import TEXT, TOKENS, Sources
from presage.features.lengths import LengthEncoder, LengthWorkflow, count_of
from presage.features.rows import LabelledRows, Target
from presage.predictors.common import Progress
from presage.predictors.common.artefact import nested, read_artefact, rebuilding, under, write_artefact
from presage.predictors.common.forecast import Source
from presage.predictors.common.steps import check_steps
from presage.predictors.quantiles.choice import ESTIMATORS, QuantileConfig, fit_estimator
from presage.predictors.quantiles.estimator import LogEstimator

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


class RemainingLengthPredictor:
    """Forecasts remaining output tokens; create one with `fit` or `load`."""

    kind: ClassVar[str] = KIND
    unit: ClassVar[str] = "tokens"
    """Of the pinball loss."""
    settings: ClassVar[type[QuantileConfig]] = QuantileConfig
    target: Target
    encoder: LengthEncoder
    estimator: LogEstimator
    """The fitted one; with `auto`, the selected one."""
    trained_on: NDArray[np.uint64]
    losses: dict[str, list[float]]
    """Mean pinball loss in tokens on the selection part: one a quantile, by estimator; empty after `load`."""

    def __init__(self, config: QuantileConfig | None = None, seed: int = 0) -> None:
        self.config = config or self.settings()
        self.seed = seed

    @property
    def reads(self) -> Sources:
        """The input sources that its forecasts use where available."""
        return frozenset((TOKENS, TEXT)) if self.encoder.sketch is not None else frozenset((TOKENS,))

    @property
    def names(self) -> NameMapping:
        """How names of workflow types and agents are folded before they are looked up."""
        return self.encoder.vocabulary.names

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The Q quantiles it predicts."""
        return self.config.quantiles

    @property
    def ranks(self) -> int:
        """Index of the quantile that ranks requests: the first at or above .5."""
        return next((place for place, q in enumerate(self.quantiles) if q >= 0.5), len(self.quantiles) - 1)

    def fit(
        self,
        train: LabelledRows,
        selection: LabelledRows,
        *,
        encoder: LengthEncoder,
        trained_on: NDArray[np.uint64] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Fit on `train`; `selection` (other tasks) selects the estimator if `auto`, and does not calibrate.

        Args:
            train, selection: rows of `length_rows(…, encoder, …)`, of one target.
            encoder: stored with the model for serving.
            trained_on: keys of the tasks of both parts.

        Raises:
            ConfigurationError: a field of the configuration is out of its range.
            TraceError: no training row has a label, or a length is negative.
        """
        for rows in (train, selection):
            if (rows.label < 0).any():
                raise TraceError("output_tokens below 0 among the labels; expected a number of tokens, 0 or more")
        self.target, self.encoder = train.target, encoder
        self.trained_on = np.unique(trained_on) if trained_on is not None else np.zeros(0, np.uint64)
        self.estimator, self.losses = fit_estimator(
            self.config, self.seed, train, selection, encoder.observed, progress=progress
        )
        return self

    def predict(self, rows: LabelledRows) -> NDArray[np.float32]:
        """Output tokens float32 [n, Q], not decreasing along Q."""
        return self.estimator.predict(rows)

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        return self.estimator.predict_one(workflow_type, agent, model, numbers)

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
        estimator = self.estimator
        tokens = self.predict_one(workflow_type, agent, model, numbers).tolist()
        evidence = int(estimator.evidence[workflow_type, agent])
        known = evidence >= self.config.min_evidence
        return LengthForecast(
            quantiles=dict(zip(self.quantiles, tokens, strict=True)),
            source="champion" if known else "back-off",
            evidence=evidence,
            calibrated=known and bool(estimator.conformal.calibrated[workflow_type]),
            calibration=int(estimator.conformal.rows[workflow_type]),
            largest=estimator.largest_one(workflow_type, agent),
        )

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Write the artefact: config.json and model.safetensors, nothing executable."""
        write_artefact(
            Path(folder),
            kind=self.kind,
            config={
                "predictor": asdict(self.config),
                "encoder": self.encoder.to_config(),
                "next_agent": None,  # kept for the format: removing it would change the digests of artefacts
                "estimator": self.estimator.name,
                "target": self.target,
                "seed": self.seed,
            },
            tensors=nested(self.to_tensors()),
            training_data=training_data or {},
        )

    def to_tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Tensors of the artefact by part."""
        return {
            "encoder": self.encoder.to_tensors(),
            "estimator": self.estimator.to_tensors(),
            "training": {"tasks": self.trained_on},
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load an artefact folder; raises ArtefactError unless it is a valid artefact of this kind."""
        artefact = read_artefact(Path(folder), kind=cls.kind)
        with rebuilding(folder, cls.kind):
            config = artefact.config
            predictor = cls(cls.settings.from_dict(config["predictor"]), config["seed"])
            predictor.target, predictor.losses = config["target"], {}
            predictor.encoder = LengthEncoder.from_artefact(config["encoder"], under(artefact.tensors, "encoder/"))
            if config.get("next_agent") is not None:
                raise ValueError("it reads a next-agent model, which is no longer supported")
            predictor.estimator = ESTIMATORS[config["estimator"]].from_tensors(
                under(artefact.tensors, "estimator/"), predictor.quantiles, predictor.config.min_evidence
            )
            vocabulary = predictor.encoder.vocabulary
            if predictor.estimator.evidence.shape != (len(vocabulary.workflow_types) + 1, len(vocabulary.agents) + 1):
                raise ValueError("the evidence does not match the workflow types and agents of the vocabulary")
            if predictor.estimator.numbers != len(predictor.encoder.names):
                raise ValueError("the estimator was fitted on other inputs than the encoder produces")
            predictor.take_tensors(artefact.tensors)
        return predictor

    def take_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take what an artefact holds beside encoder and estimator; raises KeyError or ValueError if it is invalid."""
        self.trained_on = tensors["training/tasks"].astype(np.uint64)
