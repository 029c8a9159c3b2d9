"""Outcomes of four synthetic models, and the true probability that each model solves a prompt.

A prompt has a topic and a difficulty, and its words reveal both. The small model solves easy prompts, the large one
nearly all at ten times the price; the specialist is best at its topic and poor elsewhere; the slow one matches the
large one on hard prompts only. Labels are drawn from the probabilities; some are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, normalise
from presage.errors import ConfigurationError

MODELS: Final = ("large", "slow", "small", "specialist")
TOPICS: Final = ("algebra", "code", "history", "travel")
_WORDS: Final = (
    ("equation", "integer", "proof", "matrix", "angle", "root", "series", "factor"),
    ("function", "parse", "index", "string", "class", "loop", "module", "array"),
    ("treaty", "empire", "revolt", "senate", "crown", "archive", "colony", "siege"),
    ("hotel", "flight", "island", "ticket", "museum", "harbour", "visa", "coast"),
)
_EASY: Final = ("briefly", "simple", "one", "basic", "quick", "short")
_HARD: Final = ("derive", "rigorous", "minimal", "concurrent", "every", "without")
_FILLER: Final = ("please", "the", "with", "and", "of", "in", "a", "for", "this", "then")
_BASE: Final = np.array([2.6, 1.8, 0.9, 0.2])
_AGAINST_DIFFICULTY: Final = np.array([1.2, -0.6, 2.6, 1.6])
_AT_CODE: Final = np.array([-0.6, -0.2, -0.4, 2.8])
_PRICE: Final = np.array([10.0, 14.0, 1.0, 2.0])
_TOKENS: Final = np.array([300.0, 900.0, 220.0, 260.0])


@dataclass(frozen=True, eq=False)
class DrawnOutcomes:
    """Outcomes of n prompts and the four models, and the true probability of each, float64 [n, 4]."""

    outcomes: Outcomes
    probabilities: NDArray[np.float64]


def generate_outcomes(prompts: int, seed: int, *, missing: float = 0.1) -> DrawnOutcomes:
    """Draw prompts and outcomes; a share `missing` of the labels is unknown.

    Cost is in thousandths of a unit of the small model's price, tokens times price. Raises ConfigurationError for fewer
    than one prompt, or a share outside 0..1.
    """
    if prompts < 1:
        raise ConfigurationError(f"prompts is {prompts}; expected at least 1")
    if not 0 <= missing < 1:
        raise ConfigurationError(f"missing is {missing}; expected a share from 0 to below 1")
    rng = np.random.default_rng([seed, 0x0DD5])
    topic, difficulty = rng.integers(0, len(TOPICS), prompts), rng.normal(0.0, 1.0, prompts)
    texts = _distinct([_prompt(int(t), float(d), rng) for t, d in zip(topic, difficulty, strict=True)])
    logit = _BASE - _AGAINST_DIFFICULTY * difficulty[:, None] + np.where(topic[:, None] == 1, _AT_CODE, 0.0)
    chance = 1.0 / (1.0 + np.exp(-logit))
    correct = (rng.random(chance.shape) < chance).astype(np.float32)
    tokens = np.rint(_TOKENS * np.exp(0.3 * difficulty[:, None] + 0.3 * rng.normal(size=chance.shape)))
    cost = tokens * _PRICE / 1000.0
    unknown = rng.random(chance.shape) < missing
    for array in (correct, tokens, cost):
        array[unknown] = np.nan
    outcomes = Outcomes(
        tuple(texts),
        MODELS,
        correct,
        tokens.astype(np.float32),
        cost.astype(np.float32),
        tuple(TOPICS[t] for t in topic),
    )
    return DrawnOutcomes(outcomes, chance)


def _prompt(topic: int, difficulty: float, rng: np.random.Generator) -> str:
    of_topic = rng.choice(_WORDS[topic], rng.integers(4, 9))
    hard = rng.binomial(8, 1.0 / (1.0 + np.exp(-1.5 * difficulty)))
    effort = [*rng.choice(_HARD, hard), *rng.choice(_EASY, 8 - hard)]
    words = [*of_topic, *effort, *rng.choice(_FILLER, 10)]
    return " ".join(rng.permutation(words))


def _distinct(texts: list[str]) -> list[str]:
    """The texts, with a number appended to repeated ones."""
    seen: set[str] = set()
    for i, text in enumerate(texts):
        if normalise(text) in seen:
            texts[i] = f"{text} {i}"
        seen.add(normalise(texts[i]))
    return texts
