"""The router: the probability that each served model solves a request.

Ni et al., "Chimera", §3.3, use an encoder with one sigmoid a model. Here a scorer predicts log-odds, and the router
adds calibration on separate prompts, shrinkage to base rates with distance from the training prompts and for models
with few labels, and a model choice (`choice.py`) that is not simply the highest probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError, InputError, TraceError
from presage.features.prompt_terms import prompt_form
from presage.features.text_encoder import TextEncoder
from presage.predictors.common import Progress
from presage.predictors.common.artefact import nested, read_artefact, rebuilding, under, write_artefact
from presage.predictors.common.forecast import Source
from presage.predictors.router.calibration import Calibration, Opinions, Widening, leave_out_folds
from presage.predictors.router.choice import learn_trust, pick
from presage.predictors.router.factors import base_rates
from presage.predictors.router.linear import RANK, LinearScorer
from presage.predictors.router.novelty import Novelty, PromptEvidence, TrainingPrompts, too_far, words_of

if TYPE_CHECKING:
    from presage.predictors.router.transformer import Precision, TransformerScorer

    Scorer = LinearScorer | TransformerScorer
    """Predicts uncalibrated log-odds that each of M models solves a prompt; the router does everything else."""


KIND: Final = "router"
HEADS: Final = ("linear", "transformer")
MIN_EVIDENCE: Final = 50


@dataclass(frozen=True)
class RouterConfig:
    """Settings of a router.

    Attributes:
        encoder: for the head "linear", folder or hub name of a sentence encoder to add to the terms, or "".
        rank: for the head "linear", greatest number of common factors.
        min_evidence: a model with fewer labels gets its base rate.
        refit: for the head "linear", fit again on training and calibration prompts after calibration.
    """

    head: Literal["linear", "transformer"] = "linear"
    encoder: str = ""
    rank: int = RANK
    min_evidence: int = MIN_EVIDENCE
    refit: bool = True

    def check(self) -> None:
        """Raise ConfigurationError unless every field is in its range."""
        if self.head not in HEADS:
            raise ConfigurationError(f"head is {self.head!r}; expected one of {', '.join(HEADS)}")
        for name, value in (("rank", self.rank), ("min_evidence", self.min_evidence)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; expected at least 1")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RouterConfig:
        """Inverse of `asdict`, checked."""
        config = cls(**data)
        config.check()
        return config


@dataclass(frozen=True)
class RouteForecast:
    """The forecast for one request.

    Attributes:
        pick: the model to use if only success counts.
        source: `champion`, or `back-off` with probabilities near the base rates if the prompt is too far.
        evidence: training labels of each model; with fewer than `min_evidence` its probability is a base rate.
        known: weighted share of known words, 0..1.
        distance: from the training prompts, 0..1: the share of held-out prompts that are nearer.
    """

    probabilities: dict[str, float]
    pick: str
    source: Source
    evidence: dict[str, int]
    known: float
    distance: float

    @property
    def prediction(self) -> str:
        """The pick."""
        return self.pick

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class RouterPredictor:
    """Forecasts which models solve a prompt; create one with `fit` or `load`."""

    scorer: Scorer
    models: tuple[str, ...]
    base: NDArray[np.float64]
    """Share of prompts each model solved in training, float64 [M], smoothed."""
    labels: NDArray[np.int64]
    """Labels of each model in training, int64 [M]."""
    trust: float
    """How far picks follow the probabilities, 0..1."""
    widening: Widening | None
    """How deviations from the base rates shrink with distance. None with too few families or a given scorer: a prompt
    that is too far then gets base rates."""
    trained_on: NDArray[np.uint64]
    fallback: RouterPredictor | None = None
    """Of a router with a transformer: one with the linear head, of the same labels, for answers that cannot wait.
    None where no two prompts share a term, and in artefacts of before."""

    def __init__(self, config: RouterConfig | None = None, seed: int = 0) -> None:
        self.config = config or RouterConfig()
        self.seed = seed

    def fit(
        self,
        prompts: Sequence[str],
        correct: NDArray[np.float32],
        calibration: Sequence[str],
        calibration_correct: NDArray[np.float32],
        *,
        models: Sequence[str],
        groups: Sequence[str | None] | None = None,
        trained_on: NDArray[np.uint64] | None = None,
        scorer: Scorer | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Fit the scorer on `prompts` and the calibration on other prompts.

        Args:
            prompts: n texts; calibration: other texts.
            correct: float32 [n, M], 0..1, NaN without a label; calibration_correct: of the other texts.
            models: M names.
            groups: the family of each of `prompts`, such as its task. Families are left out in turn to measure the
                forecast on new topics; this needs three families.
            trained_on: keys of all these prompts (`presage.datasets.outcomes.prompt_keys`).
            scorer: already fitted on `prompts`; None fits a linear one.

        Raises:
            ConfigurationError: a setting out of range, or a head that needs `scorer`.
            TraceError: no labels, labels outside 0..1, or of another shape.
            InputError: no two prompts share a term.
        """
        self.config.check()
        if scorer is not None and scorer.name != self.config.head:
            raise ConfigurationError(
                f"head is {self.config.head!r} and the scorer is {scorer.name!r}; expected the same"
            )
        _check_labels(prompts, correct, len(models))
        _check_labels(calibration, calibration_correct, len(models))
        report = progress or (lambda _, __: None)
        report("learning", 0.0)
        words, forms = words_of(prompts), prompt_form(prompts)
        folds, away = np.zeros(len(prompts), np.int64), np.zeros(0)
        refit = scorer is None and self.config.refit
        if scorer is None:
            if self.config.head != "linear":
                raise ConfigurationError(
                    f"head {self.config.head!r} needs a fitted scorer; fine-tune one first, or use the head linear"
                )
            folds = leave_out_folds(groups if groups is not None else [None] * len(prompts))
            encoder = TextEncoder.load(self.config.encoder) if self.config.encoder else None
            scorer, away = LinearScorer.fit(
                prompts, correct, calibration, calibration_correct, folds, rank=self.config.rank, encoder=encoder
            )
        else:
            self.fallback = self._linear(prompts, correct, calibration, calibration_correct, models, groups)
        self.scorer = scorer
        report("calibrating", 0.6)
        everything = np.concatenate([correct, calibration_correct])
        self.models, self.base = tuple(models), base_rates(everything)
        self.labels = np.asarray((~np.isnan(everything)).sum(axis=0), np.int64)
        self.trained_on = np.unique(trained_on) if trained_on is not None else np.zeros(0, np.uint64)
        learnt = base_rates(correct)
        logits = self.scorer.logits(calibration)
        self.calibration = Calibration.fit(logits, calibration_correct, learnt)
        training = TrainingPrompts.of(words, forms)
        novelty = training.novelty(words_of(calibration), prompt_form(calibration))
        self.evidence = PromptEvidence.of(training, novelty)
        distance = self.evidence.distance(novelty)
        self.widening = None
        if folds.any():
            of_known = Opinions(self.calibration.opinion(logits), learnt, distance, calibration_correct)
            self.widening = Widening.fit(self._left_out(folds, away, words, forms, correct), of_known)
        self.trust = learn_trust(self._probabilities(logits, distance, novelty), calibration_correct, learnt)
        if refit:
            report("learning again on all", 0.7)
            assert isinstance(self.scorer, LinearScorer)
            self.scorer = self.scorer.learn_again([*prompts, *calibration], everything)
        return self

    def _linear(
        self,
        prompts: Sequence[str],
        correct: NDArray[np.float32],
        calibration: Sequence[str],
        calibration_correct: NDArray[np.float32],
        models: Sequence[str],
        groups: Sequence[str | None] | None,
    ) -> RouterPredictor | None:
        linear = RouterPredictor(replace(self.config, head="linear", encoder=""), self.seed)
        try:
            return linear.fit(prompts, correct, calibration, calibration_correct, models=models, groups=groups)
        except InputError:
            return None

    def _left_out(
        self,
        folds: NDArray[np.int64],
        away: NDArray[np.float64],
        words: Sequence[NDArray[np.uint32]],
        forms: NDArray[np.float32],
        correct: NDArray[np.float32],
    ) -> list[Opinions]:
        """Forecasts of each fold by a router trained without it; `away` [n, M]: log-odds minus base rates' log-odds."""
        opinions = []
        for fold in np.unique(folds):
            apart, rest = np.flatnonzero(folds == fold).tolist(), np.flatnonzero(folds != fold).tolist()
            others = TrainingPrompts.of([words[i] for i in rest], forms[rest])
            novelty = others.novelty([words[i] for i in apart], forms[apart])
            opinion = self.calibration.opinion(self.calibration.base + away[apart])
            opinions.append(
                Opinions(opinion, base_rates(correct[rest]), self.evidence.distance(novelty), correct[apart])
            )
        return opinions

    def at_precision(self, precision: Precision, device: str = "cpu") -> Self:
        """A copy with its transformer at another precision, on a torch device.

        Raises ConfigurationError if the head is linear, or the device does not support the precision.
        """
        if isinstance(self.scorer, LinearScorer):
            raise ConfigurationError("a linear router has no precision; only a router with a transformer has one")
        served = copy(self)
        served.scorer = self.scorer.at_precision(precision, device)
        return served

    def probabilities(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Probability that each model solves each prompt, float32 [n, M]; base rates where evidence is missing."""
        novelty = self.evidence.novelty(prompts)
        return self._answer(prompts, self.evidence.distance(novelty), novelty)

    def picks(self, probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
        """The model for each of n prompts if only success counts, int64 [n]."""
        return pick(probabilities, self.base, self.trust)

    def forecast(self, prompt: str) -> RouteForecast:
        """Forecast one request; raises InputError if the prompt is not a string."""
        return self.forecasts([prompt])[0]

    def forecasts(self, prompts: Sequence[str]) -> list[RouteForecast]:
        """Forecast n requests as one batch; raises InputError if a prompt is not a string."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise InputError(f"a prompt of type {type(prompt).__name__}; expected a string")
        novelty = self.evidence.novelty(prompts)
        distance = self.evidence.distance(novelty)
        probabilities = self._answer(prompts, distance, novelty)
        picks, far = self.picks(probabilities), too_far(distance)
        evidence = dict(zip(self.models, self.labels.tolist(), strict=True))
        return [
            RouteForecast(
                probabilities=dict(zip(self.models, probabilities[i].tolist(), strict=True)),
                pick=self.models[int(picks[i])],
                source="back-off" if far[i] else "champion",
                evidence=evidence,
                known=float(novelty.known[i]),
                distance=float(distance[i]),
            )
            for i in range(len(prompts))
        ]

    def _answer(self, prompts: Sequence[str], distance: NDArray[np.float64], novelty: Novelty) -> NDArray[np.float32]:
        probabilities = self._probabilities(self.scorer.logits(prompts), distance, novelty)
        return np.where(self.labels < self.config.min_evidence, self.base.astype(np.float32), probabilities)

    def _probabilities(
        self, logits: NDArray[np.float32], distance: NDArray[np.float64], novelty: Novelty
    ) -> NDArray[np.float32]:
        """Calibrated probabilities of log-odds [n, M], shrunk to the base rates according to the distance [n]."""
        if self.widening is None:
            probabilities, unsure = self.calibration.probabilities(logits), too_far(distance)
        else:
            opinion, unsure = self.calibration.opinion(logits), novelty.known == 0.0
            probabilities = self.widening.probabilities(opinion, self.calibration.base, distance)
        return np.where(unsure[:, None], self.base.astype(np.float32), probabilities)

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Write the artefact: config.json, model.safetensors and the scorer's files, nothing executable."""
        config, tensors = self._to_config(), self._to_tensors()
        if self.fallback is not None:
            config["fallback"] = self.fallback._to_config()
            tensors |= nested({"fallback": self.fallback._to_tensors()})
        write_artefact(
            Path(folder),
            kind=KIND,
            config=config,
            tensors=tensors,
            training_data=training_data or {},
            files={} if isinstance(self.scorer, LinearScorer) else self.scorer.to_files(),
        )

    def _to_config(self) -> dict[str, Any]:
        return {
            "predictor": asdict(self.config),
            "models": list(self.models),
            "scorer": self.scorer.to_config(),
            "evidence": self.evidence.to_config(),
            "trust": self.trust,
            "widening": None if self.widening is None else asdict(self.widening),
            "seed": self.seed,
        }

    def _to_tensors(self) -> dict[str, NDArray[Any]]:
        parts = {
            "scorer": self.scorer.to_tensors(),
            "calibration": self.calibration.to_tensors(),
            "evidence": self.evidence.to_tensors(),
            "training": {"prompts": self.trained_on},
        }
        return {**nested(parts), "base": self.base, "labels": self.labels}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load an artefact folder; raises ArtefactError unless it is a valid artefact and its text encoder is there."""
        artefact = read_artefact(Path(folder), kind=KIND)
        with rebuilding(folder, KIND):
            predictor = cls._rebuilt(artefact.config, artefact.tensors, Path(folder))
            if "fallback" in artefact.config:
                linear = under(artefact.tensors, "fallback/")
                predictor.fallback = cls._rebuilt(artefact.config["fallback"], linear, Path(folder))
                if predictor.fallback.models != predictor.models:
                    raise ValueError("the linear head's models do not match the artefact's")
        return predictor

    @classmethod
    def _rebuilt(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], folder: Path) -> Self:
        predictor = cls(RouterConfig.from_dict(config["predictor"]), config["seed"])
        predictor.models = tuple(config["models"])
        predictor.base, predictor.labels = tensors["base"], tensors["labels"]
        predictor.trust = float(config["trust"])
        if not predictor.base.shape == predictor.labels.shape == (len(predictor.models),):
            raise ValueError("base rates and labels do not match the models")
        if not (0 <= predictor.trust <= 1 and ((predictor.base > 0) & (predictor.base < 1)).all()):
            raise ValueError("a base rate or the trust is not between 0 and 1")
        predictor.calibration = Calibration.from_tensors(under(tensors, "calibration/"))
        predictor.calibration.check(len(predictor.models))
        predictor.evidence = PromptEvidence.from_artefact(config["evidence"], under(tensors, "evidence/"))
        predictor.widening = None if config["widening"] is None else Widening(**config["widening"])
        if predictor.widening is not None:
            predictor.widening.check()
        scorer = _scorer_of(predictor.config.head)
        predictor.scorer = scorer.from_artefact(config["scorer"], under(tensors, "scorer/"), folder)
        if predictor.scorer.logits([""]).shape != (1, len(predictor.models)):
            raise ValueError("the scorer's models do not match the artefact's")
        predictor.trained_on = tensors["training/prompts"].astype(np.uint64)
        return predictor


def _scorer_of(head: str) -> type[Scorer]:
    if head == LinearScorer.name:
        return LinearScorer
    from presage.predictors.router.transformer import TransformerScorer  # imports torch and transformers

    return TransformerScorer


def _check_labels(prompts: Sequence[str], correct: NDArray[np.float32], models: int) -> None:
    if correct.shape != (len(prompts), models):
        raise TraceError(
            f"labels {list(correct.shape)} for {len(prompts)} prompts and {models} models; expected one each"
        )
    labels = correct[~np.isnan(correct)]
    if not len(labels):
        raise TraceError(f"no label among {len(prompts)} prompts; expected correct 0 or 1: give outcomes with labels")
    if not ((labels >= 0) & (labels <= 1)).all():
        raise TraceError("a label outside 0..1; expected 0 or 1, or a share of tries between them: correct it")
