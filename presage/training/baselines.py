"""The baselines by name: what a training compares its predictor with.

Each loads its library when it is made. Those that decide something on the validation part learn from the rest of the
training part; the others, which need none, learn from all of it, as ours does in the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from presage.features.prefixes import Prefixes
from presage.predictors.estimator import NextAgentEstimator
from presage.training.choose import check_names, choose_names

if TYPE_CHECKING:
    from presage.predictors.baselines.mlp import Size as MlpSize
    from presage.predictors.baselines.tcn import Size as TcnSize

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
        from presage.predictors.baselines.boosted_trees import BoostedTrees

        # LightGBM's threads wait for each other by spinning: on little data, beside anything else that runs, two of
        # them took over three times as long as one.
        threads = min(os.cpu_count() or 1, 1 + steps // _STEPS_A_THREAD)
        return BoostedTrees(use_states=use_states, seed=seed, threads=threads)

    return Baseline(make, validates=False)


def _published(seed: int, steps: int) -> NextAgentEstimator:
    from presage.predictors.baselines.published import PublishedConfig, PublishedGraphSage

    return PublishedGraphSage(PublishedConfig(seed=seed))


def _nearest(neighbours: int) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.baselines.nearest import NearestPrefixes

        return NearestPrefixes(neighbours, seed=seed)

    return Baseline(make, validates=True)


def _linear_probe(seed: int, steps: int) -> NextAgentEstimator:
    from presage.predictors.baselines.linear_probe import LinearProbe

    return LinearProbe(seed=seed)


def _mlp(size: MlpSize) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.baselines.mlp import Mlp
        from presage.predictors.baselines.neural import NeuralConfig

        return Mlp(size, NeuralConfig(seed=seed))

    return Baseline(make, validates=True)


def _tcn(size: TcnSize) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.baselines.neural import NeuralConfig
        from presage.predictors.baselines.tcn import Tcn

        return Tcn(size, NeuralConfig(seed=seed))

    return Baseline(make, validates=True)


def _transformer(layers: int) -> Baseline:
    def make(seed: int, steps: int) -> NextAgentEstimator:
        from presage.predictors.baselines.neural import NeuralConfig
        from presage.predictors.baselines.transformer import Transformer

        return Transformer(layers, NeuralConfig(seed=seed))

    return Baseline(make, validates=True)


def _rgcn(seed: int, steps: int) -> NextAgentEstimator:
    from presage.predictors.baselines.neural import NeuralConfig
    from presage.predictors.baselines.rgcn import Rgcn

    return Rgcn(NeuralConfig(seed=seed))


_DEFAULT: Final[Mapping[str, Baseline]] = {
    "markov-1": _markov(1),
    "markov-2": _markov(2),
    "markov-3": _markov(3),
    "boosted-trees": _boosted(True),
    "boosted-trees-ids": _boosted(False),
    "published-graphsage": Baseline(_published, validates=True),
}

BASELINES: Final[Mapping[str, Baseline]] = {
    **_DEFAULT,
    "knn-5": _nearest(5),
    "knn-20": _nearest(20),
    "linear-probe": Baseline(_linear_probe, validates=True),
    "mlp-tiny": _mlp("tiny"),
    "mlp-small": _mlp("small"),
    "mlp-deep": _mlp("deep"),
    "tcn-small": _tcn("small"),
    "tcn-large": _tcn("large"),
    "transformer-1": _transformer(1),
    "transformer-2": _transformer(2),
    "rgcn": Baseline(_rgcn, validates=True),
}
"""Every baseline there is."""

SETS: Final[Mapping[str, tuple[str, ...]]] = {"default": tuple(_DEFAULT), "all": tuple(BASELINES), "none": ()}
"""Names for several at once. `default` is what a training compares with unless told otherwise: counting, the strongest
on real traces, and the published model."""


def choose(names: str) -> tuple[str, ...]:
    """The baselines that a comma-separated list of names and sets stands for, each once.

    Raises:
        ConfigurationError: there is no such baseline and no such set.
    """
    return choose_names(names, BASELINES, SETS)


def check(names: Iterable[str]) -> None:
    """Raises ConfigurationError unless each is the name of a baseline."""
    check_names(names, BASELINES, SETS)
