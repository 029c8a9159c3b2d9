"""Baselines by name, alone and in sets, and the comparisons with a predictor that they win.

A name is what an option such as `--baselines default,module:name` takes. Each baseline of next-agent predictors loads
its library when it is made. Those that decide something on the validation part learn from the rest of the training
part; the others, which need none, learn from all of it, as ours does in the end.

Where a baseline wins beyond the interval, the end of the training and the top of its report say so, and the version
keeps it for a gate of the registry.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.moment import PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.predictors.common.threads import lightgbm_threads


class NextAgentEstimator(Protocol):
    """Fits on training prefixes and forecasts the next K outcomes of any prefixes over the same vocabulary."""

    name: str

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Learns from `train`; `validation` (other tasks) serves early stopping and the choice of weights."""
        ...

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1] of each outcome 1..K steps ahead, at this moment of every step."""
        ...


Make = Callable[[int, int], NextAgentEstimator]
"""Makes a baseline from a seed and the number of steps it will learn from."""


@dataclass(frozen=True)
class NextAgentBaseline:
    """One baseline.

    Attributes:
        make: makes it.
        validates: whether it decides something on validation prefixes, which it must not have learnt from.
    """

    make: Make
    validates: bool

    def fit(self, seed: int, learning: Prefixes, inner: Prefixes, validation: Prefixes) -> NextAgentEstimator:
        """Made and fitted on `learning`, or on its part `inner` where the other part, `validation`, decides."""
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
"""What a training compares next-agent predictors with by default: counting, the strongest on real traces,
and the published model."""


def find(name: str) -> NextAgentBaseline:
    """A baseline by its name: one of `BASELINES`, or `module:name`, an entry of another module's `BASELINES`.

    Raises:
        ConfigurationError: there is no such baseline, or its module cannot be loaded.
    """
    module, own, key = name.partition(":")
    if not own:
        check_names((name,), BASELINES)
        return BASELINES[name]
    try:
        found = importlib.import_module(module).BASELINES[key]
    except Exception as error:  # a module of the user's may raise anything
        raise ConfigurationError(
            f"baseline {name!r} cannot be loaded ({error!r}); wanted is module:name, a module on PYTHONPATH whose "
            "mapping BASELINES has that name"
        ) from error
    if not isinstance(found, NextAgentBaseline):
        raise ConfigurationError(f"baseline {name!r} is a {type(found).__name__}; wanted a NextAgentBaseline")
    return found


def choose(text: str) -> tuple[str, ...]:
    """The baselines of next-agent predictors that a comma-separated list of names and sets stands for, each once.

    Raises:
        ConfigurationError: there is no such baseline and no such set.
    """
    chosen = _expanded(text, BASELINES)
    for name in chosen:
        find(name)
    return chosen


def choose_names(text: str, known: Collection[str]) -> tuple[str, ...]:
    """What a comma-separated list of names and sets stands for, each once.

    Raises:
        ConfigurationError: there is no such baseline and no such set.
    """
    chosen = _expanded(text, known)
    check_names(chosen, known)
    return chosen


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigurationError unless each is the name of a baseline."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"no baseline {unknown[0]!r}; there are: {', '.join(known)}; and the sets default, all, none"
        )


def _expanded(text: str, known: Collection[str]) -> tuple[str, ...]:
    """Names as they are, "default" and "all" as every one there is, "none" as nothing."""
    sets = {"default": tuple(known), "all": tuple(known), "none": ()}
    return tuple(dict.fromkeys(name for item in text.split(",") for name in sets.get(item, (item,))))


@dataclass(frozen=True)
class Behind:
    """One comparison that a baseline won: the paired 95 % interval of the difference does not hold 0.

    Attributes:
        baseline: its name.
        at: what was compared, for people.
        by: how much better the baseline is, above 0, in the unit of the figure.
        ci95: interval of `by`.
        of: the baseline's own figure, for scale.
    """

    baseline: str
    at: str
    by: float
    ci95: tuple[float, float]
    of: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"ci95": list(self.ci95)}


def behind(baseline: str, at: str, by: float, ci95: tuple[float, float], of: float) -> list[Behind]:
    """The comparison if the baseline won it, else nothing; `by` and `ci95` are above 0 where the baseline is better."""
    return [Behind(baseline, at, by, ci95, of)] if math.isfinite(by) and ci95[0] > 0 else []


def moment_name(moment: Moment) -> str:
    """A moment in words: a forecast is made before a step's output, and again after it."""
    return "before the output" if moment == PREFILL else "after the output"


def last_words(found: Sequence[Mapping[str, Any]], advice: str) -> list[str]:
    """What a training ends with where a baseline won.

    Args:
        found: `Behind.to_dict` of each comparison lost.
        advice: what to try.
    """
    if not found:
        return []
    lines = [f"LOST: {len(found)} comparisons with a baseline, beyond the 95 % interval"]
    for one in sorted(found, key=lambda one: -one["by"])[:_MOST_LINES]:
        low, high = one["ci95"]
        lines.append(f"  {one['baseline']} is better {one['at']} by {one['by']:.4g} (95 % {low:.4g} to {high:.4g})")
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    return [*lines, f"What to try: {advice}"]


_MOST_LINES = 6


def worst(found: Iterable[Behind]) -> list[dict[str, Any]]:
    """All of them as JSON values, the largest difference first."""
    return [one.to_dict() for one in sorted(found, key=lambda one: -one.by)]
