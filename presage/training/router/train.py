"""Train and evaluate a router and baselines on outcomes.

Test prompts are split off first. A calibration part of the rest calibrates the scores into probabilities. Baselines
need no calibration and are fitted on the whole training part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from presage.datasets.outcomes import Outcomes, outcomes_digest, prompt_keys
from presage.datasets.outcomes.split import Chosen, choose_models, families, split_outcomes
from presage.errors import TraceError
from presage.predictors.router.linear import LinearScorer
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.training.baselines import check_names
from presage.training.configuration import Limits
from presage.training.router.baselines import BASELINES, BaseRate, Routes
from presage.training.router.evaluate import RouterEvaluation, evaluate
from presage.training.sets import TEST_FRACTION
from presage.training.training import Judged, Progress, Training, fit_baselines, median_us, named_digests, versions
from presage.wording import counted

if TYPE_CHECKING:
    from presage.predictors.router.transformer import TransformerScorer

CALIBRATION_FRACTION: Final = 0.25
"""Of the training prompts."""

LIMITS: Final[Limits] = dict.fromkeys(("rank", "min_evidence"), (1, math.inf))

SHARED_PROMPTS: Final = "test prompts left out because they are in the training set"

FitScorer = Callable[[Outcomes, Outcomes], "TransformerScorer"]
"""Fits a scorer on the first part; may use the second for early stopping."""

_TIMED: Final = 300


RouterTraining = Training[RouterPredictor, RouterEvaluation]


def train_router(
    outcomes: Outcomes,
    test: Outcomes | None = None,
    config: RouterConfig | None = None,
    *,
    seed: int = 0,
    baselines: Sequence[str] = tuple(BASELINES),
    name: str | None = None,
    fit_scorer: FitScorer | None = None,
    progress: Progress | None = None,
) -> RouterTraining:
    """Fit a router and baselines and evaluate them on the same held-out prompts.

    Args:
        outcomes: of at least two models.
        test: test outcomes; None splits off a fifth of the prompts.
        seed: of the splits and of the bootstrap.
        baselines: keys of `BASELINES`.
        fit_scorer: trains a custom head; receives the training and the calibration part, and may use the latter to
            choose an epoch.

    Raises:
        ConfigurationError: an unknown baseline, or a configuration out of range.
        TraceError: too few models, labels or prompts, or a single class.
        InputError: no two prompts share a term.
    """
    (config or RouterConfig()).check()
    check_names(baselines, BASELINES)
    chosen = choose_models(outcomes)
    train, held, shared = _parts(chosen.outcomes, test, seed)
    fitted = fit_router(chosen._replace(outcomes=train), config, seed=seed, fit_scorer=fit_scorer, progress=progress)
    rule = "separate test outcomes" if test is not None else "a fifth of the prompts, at random by prompt"
    return assess_router(fitted, held, rule=rule, shared=shared, baselines=baselines, name=name, progress=progress)


@dataclass(frozen=True)
class FittedRouter:
    """A fitted router; `chosen`, its training outcomes and the models left out of them, consists of `inner` and
    `calibration`; `seconds` is the time of the fit.
    """

    predictor: RouterPredictor
    chosen: Chosen
    inner: Outcomes
    calibration: Outcomes
    seconds: float


def fit_router(
    chosen: Chosen,
    config: RouterConfig | None = None,
    *,
    seed: int = 0,
    fit_scorer: FitScorer | None = None,
    progress: Progress | None = None,
) -> FittedRouter:
    """Fit a router on all outcomes of the chosen models; arguments as in `train_router`."""
    inner, calibration = split_outcomes(chosen.outcomes, CALIBRATION_FRACTION, seed + 1)
    begun = time.perf_counter()
    predictor = RouterPredictor(config, seed).fit(
        inner.prompts,
        inner.correct,
        calibration.prompts,
        calibration.correct,
        models=chosen.outcomes.models,
        groups=families(inner.task),
        trained_on=prompt_keys(chosen.outcomes),
        scorer=fit_scorer(inner, calibration) if fit_scorer is not None else None,
        progress=progress,
    )
    return FittedRouter(predictor, chosen, inner, calibration, time.perf_counter() - begun)


def assess_router(
    fitted: FittedRouter,
    held: Outcomes,
    *,
    rule: str = "separate test outcomes",
    shared: int = 0,
    baselines: Sequence[str] = tuple(BASELINES),
    name: str | None = None,
    progress: Progress | None = None,
) -> RouterTraining:
    """Fit baselines where a router was fitted, and evaluate all of them on `held`, outcomes of its models for other
    prompts.

    `rule` is how these were set apart, for the report; `shared` prompts were left out of them because training saw
    them. Raises ConfigurationError for an unknown baseline, and TraceError if the models have no label.
    """
    check_names(baselines, BASELINES)
    report, predictor, train = progress or (lambda _, __: None), fitted.predictor, fitted.chosen.outcomes

    def routes_of(baseline: str) -> Routes:
        return BASELINES[baseline]().fit(train.prompts, train.correct)

    routes = fit_baselines(baselines, routes_of, report)

    report("judging on the test set", None)
    evaluation = evaluate(predictor, held, predictor.seed, baselines=routes)
    digests = {
        "training outcomes": f"sha256:{outcomes_digest(train)}",
        "test outcomes": f"sha256:{outcomes_digest(held)}",
    }
    training_data = {
        "digest": digests["training outcomes"],
        "prompts": len(train),
        "labels": int(train.labels.sum()),
        "split": rule,
    }
    metrics = {
        **evaluation.to_dict(),
        "model": name,
        "data": {
            "training": _size(fitted.inner),
            "calibration": _size(fitted.calibration),
            "test": _size(held),
            "split": rule,
            SHARED_PROMPTS: shared,
            "models left out for few labels": ", ".join(f"{n} ({c})" for n, c in fitted.chosen.left_out.items())
            or "none",
            "seed": predictor.seed,
            **named_digests(digests),
        },
        "models": _of_models(train),
        "config": _config(predictor),
        "versions": versions(),
        "fit_seconds": round(fitted.seconds, 2),
        "latency_us": forecast_latency_us(predictor, held),
        "size_bytes": None,
    }
    return RouterTraining(predictor, metrics, training_data, evaluation, digests)


def evaluate_router(predictor: RouterPredictor, outcomes: Outcomes, seed: int) -> Judged[RouterEvaluation]:
    """Evaluate a fitted router on prompts that it was not trained on, for its own models, beside its base rates.

    Raises TraceError if its models have no label.
    """
    judged = outcomes.of_models(predictor.models)
    floor = BaseRate()
    floor.base = predictor.base
    evaluation = evaluate(predictor, judged, seed, baselines={BaseRate.name: floor})
    return Judged(evaluation, forecast_latency_us(predictor, judged))


def forecast_latency_us(predictor: RouterPredictor, outcomes: Outcomes) -> float:
    """Median time of one forecast, microseconds, over up to 300 prompts, on one thread."""
    prompts = outcomes.prompts
    return median_us(lambda i: predictor.forecast(prompts[i % len(prompts)]), min(_TIMED, 4 * len(prompts)))


def _parts(outcomes: Outcomes, test: Outcomes | None, seed: int) -> tuple[Outcomes, Outcomes, int]:
    """Training outcomes, test outcomes, and the number of test prompts left out because they are in both."""
    if test is None:
        return *split_outcomes(outcomes, TEST_FRACTION, seed), 0
    shared = np.isin(prompt_keys(test), prompt_keys(outcomes))
    if shared.all():
        raise TraceError(
            f"all {len(test)} test prompts are in the training set, so figures on them would prove nothing: give others"
        )
    return outcomes, test.of_models(outcomes.models).take(~shared), int(shared.sum())


def _config(predictor: RouterPredictor) -> dict[str, Any]:
    """The settings, with those of a transformer, which it may have from the router that it was trained further from."""
    config = {**asdict(predictor.config), "trust": predictor.trust}
    scorer = predictor.scorer
    if isinstance(scorer, LinearScorer):
        return config
    return {**config, "encoder": scorer.encoder, "head_tokens": scorer.tokens.head, "tail_tokens": scorer.tokens.tail}


def _size(outcomes: Outcomes) -> str:
    return f"{counted(len(outcomes), 'prompt')}, {counted(outcomes.labels.sum(), 'label')}"


def _of_models(outcomes: Outcomes) -> dict[str, dict[str, float | int | None]]:
    """Labels, base rate, mean cost and mean output tokens of each model in training; None where unknown."""
    return {
        name: {
            "labels": int(outcomes.labels[m]),
            "base_rate": _mean(outcomes.correct[:, m]),
            "cost": _mean(outcomes.cost[:, m]),
            "output_tokens": _mean(outcomes.output_tokens[:, m]),
        }
        for m, name in enumerate(outcomes.models)
    }


def _mean(values: np.ndarray) -> float | None:
    numbers = values[~np.isnan(values)]
    return float(numbers.mean(dtype=np.float64)) if len(numbers) else None
