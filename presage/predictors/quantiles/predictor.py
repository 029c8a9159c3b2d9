"""What predictors of quantiles share: settings, estimator, evidence and artefact. Features and labels are theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema.names import NameMapping
from presage.features.agent_names import AgentNames, as_files, from_files
from presage.features.rows import LabelledRows, Target
from presage.features.vocabulary import Vocabulary
from presage.predictors.common import Progress
from presage.predictors.common.artefact import nested, read_artefact, rebuilding, under, write_artefact
from presage.predictors.quantiles.choice import ESTIMATORS, QuantileConfig, fit_estimator
from presage.predictors.quantiles.estimator import LogEstimator

RENAMED_ROWS: Final = (3_000, 10_000)
"""Training rows for which workflows with unknown names have an estimator of their own (on 1,000 and 2,000 rows it was
worse than the one for known names), and about how many rows it learns from: whole workflows, drawn at random."""


class QuantilePredictor(ABC):
    """Forecasts Q quantiles of a label at every step; create one with `fit` or `load` of a subclass."""

    kind: ClassVar[str]
    unit: ClassVar[str]
    """Of the pinball loss."""
    settings: ClassVar[type[QuantileConfig]] = QuantileConfig
    target: Target | None = None
    encoder: Any
    """With `vocabulary`, `names` of the F numbers, `text_columns`, `unknown_column`, `observed`, `nameless` and
    `with_unknown_names`."""
    estimator: LogEstimator
    """The fitted one; with `auto`, the selected one."""
    unknown: LogEstimator | None
    """One of the same kind for workflows that have called unknown agents; None where training had too few rows."""
    trained_on: NDArray[np.uint64]
    agent_names: AgentNames | None = None
    """By the system prompts of the training traces."""
    losses: dict[str, list[float]]
    """Mean pinball loss on the selection part: one a quantile, by estimator; empty after `load`."""

    def __init__(self, config: QuantileConfig | None = None, seed: int = 0) -> None:
        self.config = config or self.settings()
        self.seed = seed

    @property
    def vocabulary(self) -> Vocabulary:
        """Workflow types and agents of the training traces."""
        return self.encoder.vocabulary  # type: ignore[no-any-return]

    @property
    def names(self) -> NameMapping:
        """How names of workflow types and agents are folded before they are looked up."""
        return self.vocabulary.names

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The Q quantiles it predicts."""
        return self.config.quantiles

    @abstractmethod
    def rows(self, table: pa.Table) -> LabelledRows:
        """The rows of a valid trace, one a served step, as `predict` takes them."""

    def predict(self, rows: LabelledRows) -> NDArray[np.float32]:
        """The quantiles in the unit of the label, float32 [n, Q], not decreasing along Q."""
        quantiles = self.estimator.predict(rows)
        renamed = self._renamed(rows.workflow_type, rows.agent, rows.numbers)
        if self.unknown is not None and renamed.any():
            quantiles[renamed] = self.unknown.predict(rows.take(renamed))
        return quantiles

    def predict_one(
        self, workflow_type: int, agent: int, model: int, numbers: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The same for a single row, float32 [Q]; numbers float32 [F]."""
        unknown = self.unknown if self._renamed(workflow_type, agent, numbers) else None
        return (unknown or self.estimator).predict_one(workflow_type, agent, model, numbers)

    def _renamed(self, workflow_type: Any, agent: Any, numbers: NDArray[np.float32]) -> Any:
        """Which rows are of workflows that have called unknown agents: bool, of one row or [n].

        An unknown agent in an unknown type is none of them: it may be of an application that was never learnt.
        """
        if self.unknown is None:
            return np.zeros(numbers.shape[:-1], bool)
        is_known = (workflow_type < len(self.vocabulary.workflow_types)) | (agent < self.vocabulary.unknown)
        return is_known & (numbers[..., self.encoder.unknown_column] > 0)

    def standing(self, workflow_type: int, agent: int) -> dict[str, Any]:
        """What every forecast tells of itself: its `source`, `evidence`, whether it is `calibrated`, and `calibration`.

        Args:
            workflow_type, agent: as the encoder numbers them.
        """
        evidence, conformal = int(self.estimator.evidence[workflow_type, agent]), self.estimator.conformal
        enough = evidence >= self.config.min_evidence
        return {
            "source": "champion" if enough else "back-off",
            "evidence": evidence,
            "calibrated": enough and bool(conformal.calibrated[workflow_type]),
            "calibration": int(conformal.rows[workflow_type]),
        }

    def fit(
        self,
        train: LabelledRows,
        selection: LabelledRows,
        *,
        encoder: Any,
        trained_on: NDArray[np.uint64] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Fit on `train`; `selection` (other tasks) selects the estimator if `auto`, and does not calibrate.

        Args:
            train, selection: rows made with the encoder, of one target.
            encoder: stored with the model for serving.
            trained_on: keys of the tasks of both parts.

        Raises:
            ConfigurationError: a field of the configuration is out of its range.
            TraceError: no training row has a label, or one is out of its range.
        """
        self._check(train, selection)
        self.encoder = encoder
        self.trained_on = np.unique(trained_on) if trained_on is not None else np.zeros(0, np.uint64)
        self.estimator, self.losses = fit_estimator(
            self.config,
            self.seed,
            train,
            selection,
            encoder.observed,
            encoder.nameless,
            text_columns=encoder.text_columns,
            logarithmic=self.unit.startswith("log"),
            progress=progress,
        )
        self.unknown = self._fit_unknown(train, selection)
        self._learn(train, selection)
        return self

    def _fit_unknown(self, train: LabelledRows, selection: LabelledRows) -> LogEstimator | None:
        """Fitted on workflows as after a release that renames; None if the training rows are too few.

        One estimator for both would read how rarely renamed agents were called, and take workflows to be at their
        beginning; and rows with unknown names would blur what it forecasts where nothing was renamed.
        """
        rng, encoder, config = np.random.default_rng(self.seed), self.encoder, self.config
        least, most = RENAMED_ROWS
        if train.labelled.sum() < least:
            return None
        share = min(1.0, most / len(train))

        def renamed(rows: LabelledRows) -> LabelledRows:
            workflows = np.unique(rows.workflow)
            some = rng.permutation(workflows)[: max(1, round(share * len(workflows)))]
            after: LabelledRows = encoder.with_unknown_names(rows.take(np.isin(rows.workflow, some)), rng)
            known_type = after.workflow_type < len(self.vocabulary.workflow_types)
            return after.take(known_type & (after.numbers[:, encoder.unknown_column] > 0))

        learning = renamed(train)
        if not learning.labelled.any():
            return None
        estimator = type(self.estimator)(self.seed, config.floor, config.min_evidence, encoder.text_columns)
        estimator.fit(learning, self.quantiles, encoder.observed, encoder.nameless)
        if config.refit:
            estimator.fit(learning, self.quantiles, encoder.observed, encoder.nameless, more=renamed(selection))
        return estimator

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Write the artefact: config.json and model.safetensors, nothing executable."""
        config = {
            "predictor": asdict(self.config),
            "encoder": self.encoder.to_config(),
            "estimator": self.estimator.name,
            "seed": self.seed,
        }
        write_artefact(
            Path(folder),
            kind=self.kind,
            config=config | self._config(),
            tensors=nested(self._tensors()),
            training_data=training_data or {},
            files=as_files(self.agent_names),
        )

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load an artefact folder; raises ArtefactError unless it is a valid artefact of this kind."""
        artefact = read_artefact(Path(folder), kind=cls.kind)
        with rebuilding(folder, cls.kind):
            config = artefact.config
            predictor = cls(cls.settings.from_dict(config["predictor"]), config["seed"])
            predictor.losses = {}
            predictor.encoder = cls._encoder(config, artefact.tensors)
            predictor.estimator = predictor._read(config["estimator"], under(artefact.tensors, "estimator/"))
            of_unknown = under(artefact.tensors, "unknown/")
            predictor.unknown = predictor._read(config["estimator"], of_unknown) if of_unknown else None
            predictor._take(config, artefact.tensors)
        predictor.agent_names = from_files(artefact.files, folder)
        return predictor

    def _read(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> LogEstimator:
        """An estimator of the artefact; raises KeyError or ValueError for an invalid one."""
        text_columns, vocabulary = self.encoder.text_columns, self.vocabulary
        estimator = ESTIMATORS[name].from_tensors(tensors, self.quantiles, self.config.min_evidence, text_columns)
        if estimator.evidence.shape != (len(vocabulary.workflow_types) + 1, len(vocabulary.agents) + 1):
            raise ValueError("the evidence does not match the workflow types and agents of the vocabulary")
        if estimator.numbers != len(self.encoder.names):
            raise ValueError("the estimator was fitted on other inputs than the encoder produces")
        return estimator

    @staticmethod
    @abstractmethod
    def _encoder(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Any:
        """The encoder of an artefact; `_encoder` and `_take` raise KeyError or ValueError for an invalid one."""

    @abstractmethod
    def _check(self, train: LabelledRows, selection: LabelledRows) -> None:
        """Raise TraceError for rows that teach nothing."""

    def _learn(self, train: LabelledRows, selection: LabelledRows) -> None:  # noqa: B027  # most have nothing
        """Fit what the kind has beside the estimator."""

    def _config(self) -> dict[str, Any]:
        """What the artefact's configuration has beside settings, encoder, estimator and seed."""
        return {}

    def _tensors(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Tensors of the artefact by part."""
        unknown = {} if self.unknown is None else {"unknown": self.unknown.to_tensors()}
        return {"estimator": self.estimator.to_tensors(), **unknown, "training": {"tasks": self.trained_on}}

    def _take(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take what an artefact holds beside encoder and estimator."""
        self.trained_on = tensors["training/tasks"].astype(np.uint64)
