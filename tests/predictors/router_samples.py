"""Outcomes for tests of the router: from the known law, apart into training, calibration and fresh prompts."""

from __future__ import annotations

from functools import cache

from presage.datasets.outcomes import Outcomes, prompt_keys
from presage.datasets.outcomes.split import split_outcomes
from presage.datasets.synthetic.outcomes import DrawnOutcomes, generate_outcomes
from presage.predictors.router.predictor import RouterConfig, RouterPredictor


@cache
def law_parts(prompts: int = 1200) -> tuple[Outcomes, Outcomes]:
    """Training and calibration part."""
    return split_outcomes(generate_outcomes(prompts, 0).outcomes, 0.25, 0)


@cache
def fresh(prompts: int = 800) -> DrawnOutcomes:
    """Other prompts of the law, with the true probabilities."""
    return generate_outcomes(prompts, 99)


def fit(config: RouterConfig | None = None, prompts: int = 1200) -> RouterPredictor:
    train, calibration = law_parts(prompts)
    return RouterPredictor(config).fit(
        train.prompts,
        train.correct,
        calibration.prompts,
        calibration.correct,
        models=train.models,
        trained_on=prompt_keys(train),
    )
