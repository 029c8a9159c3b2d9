"""Baselines by name, and the comparisons in which a baseline beats the predictor.

`--baselines default,module:name` selects baselines and sets of them. A next-agent baseline imports its library on
construction. If a baseline wins significantly, the training output and the report show it first, and a tag of the
version records it for the registry's gate.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.input_profiles import TARGETS
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes
from presage.predictors.common.threads import lightgbm_threads
from presage.training.metrics import Interval, json_values
from presage.wording import counted


class NextAgentEstimator(Protocol):
    """Fits on training prefixes and forecasts the next K outcomes of any prefixes over the same vocabulary."""

    name: str

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Fit on `train`; `validation` (other tasks) is for early stopping and the choice of weights."""

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1] of each outcome 1..K steps ahead, at this moment of every step."""


@dataclass(frozen=True)
class NextAgentBaseline:
    """One baseline: `make` constructs the estimator from a seed and its number of training steps; `validates` if
    fitting uses validation prefixes (early stopping, weights), which must then be excluded from its training prefixes.
    """

    make: Callable[[int, int], NextAgentEstimator]
    validates: bool

    def fit(self, seed: int, learning: Prefixes, inner: Prefixes, validation: Prefixes) -> NextAgentEstimator:
        """Make the baseline and fit it on `learning`, or on its part `inner` if fitting uses `validation`."""
        return self.make(seed, learning.steps).fit(inner if self.validates else learning, validation)


def _markov(order: int) -> NextAgentBaseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.next_agent.ngram import BackoffNgram

        return BackoffNgram(order)

    return NextAgentBaseline(make, validates=False)


def _boosted(use_states: bool) -> NextAgentBaseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.next_agent.baselines import BoostedTrees

        return BoostedTrees(use_states=use_states, seed=seed, threads=lightgbm_threads(steps))

    return NextAgentBaseline(make, validates=False)


def _published(seed: int, steps: int) -> NextAgentEstimator:
    from presage.predictors.next_agent.baselines import PublishedConfig, PublishedGraphSage

    return PublishedGraphSage(PublishedConfig(seed=seed))


BASELINES: Final[Mapping[str, NextAgentBaseline]] = {
    "markov-1": _markov(1),
    "markov-2": _markov(2),
    "markov-3": _markov(3),
    "boosted-trees": _boosted(True),
    "boosted-trees-ids": _boosted(False),
    "published-graphsage": NextAgentBaseline(_published, validates=True),
}
"""Default baselines of next-agent predictors: n-grams, boosted trees (the strongest on real traces), and the published
model."""


def find(name: str) -> NextAgentBaseline:
    """Look up a baseline: a key of `BASELINES`, or `module:name` for a key of another module's `BASELINES`.

    Raises ConfigurationError if there is no such baseline, or its module cannot be loaded.
    """
    module, own, key = name.partition(":")
    if not own:
        check_names((name,), BASELINES)
        return BASELINES[name]
    try:
        baseline = importlib.import_module(module).BASELINES[key]
    except Exception as error:  # importing a user's module may raise any exception
        raise ConfigurationError(
            f"baseline {name!r} cannot be loaded ({error!r}); wanted is module:name, a module on PYTHONPATH whose "
            "mapping BASELINES has that name"
        ) from error
    if not isinstance(baseline, NextAgentBaseline):
        raise ConfigurationError(f"baseline {name!r} is a {type(baseline).__name__}; wanted a NextAgentBaseline")
    return baseline


def choose(text: str) -> tuple[str, ...]:
    """Next-agent baselines of a comma-separated list of names and sets; raises ConfigurationError for others."""
    chosen = _expanded(text, BASELINES)
    for name in chosen:
        find(name)
    return chosen


def choose_names(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The same for baselines of another kind, whose names are `known`; `module:name` is unknown."""
    chosen = _expanded(text, known)
    check_names(chosen, known)
    return chosen


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigurationError unless every name is known."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"no baseline {unknown[0]!r}; there are: {', '.join(known)}; and the sets default, all, none"
        )


def _expanded(text: str, names: Collection[str]) -> tuple[str, ...]:
    sets = {"default": tuple(names), "all": tuple(names), "none": ()}
    return tuple(dict.fromkeys(name for item in text.split(",") for name in sets.get(item, (item,))))


@dataclass(frozen=True)
class Behind:
    """A comparison that a baseline won: the paired 95 % interval of the difference excludes 0.

    Attributes:
        at: description of the comparison, such as "before the output, 1 step ahead".
        by: the baseline's lead, above 0, in the unit of the figure, with its interval `ci95`.
        of: the baseline's own figure.
    """

    baseline: str
    at: str
    by: float
    ci95: Interval
    of: float


def behind(baseline: str, at: str, by: float, ci95: Interval, of: float) -> list[Behind]:
    """The comparison as a list of one if the baseline won, else an empty list; positive `by` favours the baseline."""
    return [Behind(baseline, at, by, ci95, of)] if math.isfinite(by) and ci95[0] > 0 else []


def last_words(found: Sequence[Mapping[str, Any]], advice: str) -> list[str]:
    """Closing lines of a training's output, from the comparisons lost, as JSON values; empty without losses."""
    if not found:
        return []
    lines = [f"LOST: {counted(len(found), 'comparison')} with a baseline, beyond the 95 % interval"]
    for lost in sorted(found, key=lambda lost: -lost["by"])[:_MOST_LINES]:
        low, high = lost["ci95"]
        lines.append(f"  {lost['baseline']} is better {lost['at']} by {lost['by']:.4g} (95 % {low:.4g} to {high:.4g})")
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    return [*lines, f"What to try: {advice}"]


_MOST_LINES = 6


def worst(found: Iterable[Behind]) -> list[dict[str, Any]]:
    """JSON values, largest difference first."""
    return [json_values(vars(comparison)) for comparison in sorted(found, key=lambda comparison: -comparison.by)]


Shown = TypeVar("Shown")
Rivals = TypeVar("Rivals")
Judged = TypeVar("Judged")


def by_profile(
    profiles: Mapping[str, Shown],
    baselines: Mapping[str, Rivals],
    evaluate: Callable[[Shown, Mapping[str, Rivals]], Judged],
    known: Mapping[int, Judged],
) -> dict[str, Judged]:
    """Evaluate the predictor, and baselines, on test data as seen under each input profile.

    Baselines take longer than Presage's predictor, so they are evaluated only under profiles of promotion targets.

    Args:
        profiles: the test data by profile; profiles with equal inputs share one object.
        evaluate: evaluates the predictor and the given baselines.
        known: evaluations already done, by the `id` of their test data.
    """
    done = dict(known)
    for name, shown in sorted(profiles.items(), key=lambda named_profile: named_profile[0] not in TARGETS.values()):
        if id(shown) not in done:
            done[id(shown)] = evaluate(shown, baselines if name in TARGETS.values() else {})
    return {name: done[id(shown)] for name, shown in profiles.items()}
