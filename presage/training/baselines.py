"""Baselines by name, alone and in sets: what an option such as `--baselines default,module:name` stands for.

Each baseline of next-agent predictors loads its library when it is made. Those that decide something on the validation
part learn from the rest of the training part; the others, which need none, learn from all of it, as ours does in the
end.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from presage.errors import ConfigurationError
from presage.features.prefixes import Prefixes
from presage.predictors.estimator import NextAgentEstimator

Make = Callable[[int, int], NextAgentEstimator]
"""Makes a baseline from a seed and the number of steps it will learn from."""

_STEPS_A_THREAD: Final = 50_000


@dataclass(frozen=True)
class Baseline:
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


def _markov(order: int) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.ngram import BackoffNgram

        return BackoffNgram(order)

    return Baseline(make, validates=False)


def _boosted(use_states: bool) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.baselines import BoostedTrees

        # LightGBM's threads wait for each other by spinning: on little data, beside anything else that runs, two of
        # them took over three times as long as one.
        threads = min(os.cpu_count() or 1, 1 + steps // _STEPS_A_THREAD)
        return BoostedTrees(use_states=use_states, seed=seed, threads=threads)

    return Baseline(make, validates=False)


def _published(seed: int, steps: int) -> NextAgentEstimator:
    from presage.predictors.baselines import PublishedConfig, PublishedGraphSage

    return PublishedGraphSage(PublishedConfig(seed=seed))


BASELINES: Final[Mapping[str, Baseline]] = {
    "markov-1": _markov(1),
    "markov-2": _markov(2),
    "markov-3": _markov(3),
    "boosted-trees": _boosted(True),
    "boosted-trees-ids": _boosted(False),
    "published-graphsage": Baseline(_published, validates=True),
}
"""What a training compares next-agent predictors with unless told otherwise: counting, the strongest on real traces,
and the published model."""


def find(name: str) -> Baseline:
    """A baseline by its name: one of `BASELINES`, or `module:name`, an entry of another module's `BASELINES`.

    Raises:
        ConfigurationError: there is no such baseline, or its module cannot be loaded.
    """
    module, own, key = name.partition(":")
    if not own:
        check_names((name,), BASELINES)
        return BASELINES[name]
    try:
        found: Baseline = importlib.import_module(module).BASELINES[key]
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"baseline {name!r} cannot be loaded ({error!r}); wanted is module:name, a module on PYTHONPATH whose "
            "mapping BASELINES has that name"
        ) from error
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
