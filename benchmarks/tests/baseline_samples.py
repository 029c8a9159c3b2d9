"""Every baseline by its name, made to learn in a moment, and traces it has to cope with."""

from dataclasses import replace
from functools import cache

import numpy as np
import paper_baselines
from paper_baselines.neural import NeuralBaseline

from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent.baselines import PublishedGraphSage
from presage.testing.prefixes import prefixes_from
from presage.training.baselines import BASELINES, NextAgentEstimator

BY_NAME = {**BASELINES, **paper_baselines.BASELINES}
EVERY = tuple(BY_NAME)
NEURAL = ("mlp-tiny", "mlp-small", "mlp-deep", "tcn-small", "tcn-large", "transformer-1", "transformer-2", "rgcn")
READS_COMPLETION = tuple(n for n in EVERY if not n.startswith(("markov", "published")) and n != "boosted-trees-ids")
WORDS = ("abcab", "bca", "ccab", "abcc", "bb", "cabcabca") * 3
SIZES = {"prefill": 5, "completion": 3}


def make(name: str, seed: int = 0, epochs: int = 2) -> NextAgentEstimator:
    """A baseline as the registry has it, but for the number of epochs."""
    estimator = BY_NAME[name].make(seed, 0)
    if isinstance(estimator, NeuralBaseline | PublishedGraphSage):
        estimator.config = replace(estimator.config, epochs=epochs, batch_steps=32)  # type: ignore[assignment,arg-type,type-var]
    return estimator


@cache
def fitted(name: str, trace: str) -> NextAgentEstimator:
    """A baseline that has learnt one of TRACES."""
    return make(name).fit(TRACES[trace], TRACES[trace])


def with_random_states(prefixes: Prefixes, seed: int = 0, moments: tuple[Moment, ...] = MOMENTS) -> Prefixes:
    """Random states at these moments, one step in five without any."""
    rng = np.random.default_rng(seed)
    states = {}
    for moment in moments:
        states[moment] = rng.standard_normal((prefixes.steps, SIZES[moment])).astype(np.float32)
        states[moment][rng.random(prefixes.steps) < 0.2] = np.nan
    return prefixes.with_states(states)


def plain(words: tuple[str, ...] = WORDS, **more: object) -> Prefixes:
    return prefixes_from(words, **{"agents": "abc", **more})  # type: ignore[arg-type]


TRACES = {
    "both states": with_random_states(plain()),
    "no states": plain(),
    "prefill states alone": with_random_states(plain(), moments=("prefill",)),
    "completion states alone": with_random_states(plain(), moments=("completion",)),
    "states that are all missing": plain().with_states({"prefill": np.full((plain().steps, 4), np.nan, np.float32)}),
    "two agents, two workflows": plain(("ab", "ba"), agents="ab"),
    "one step a workflow": plain(("a", "b", "a", "c")),
    "one outcome a horizon": plain(("a", "a", "a")),
    "nothing known three steps ahead": plain(("ab", "ba", "ab"), cut={0, 1, 2}),
    "nothing known at all": plain(("a", "b", "c"), cut={0, 1, 2}),
    "agents and outcomes out of the vocabulary": with_random_states(plain(("axb", "xxab", "bx", "abc", "x") * 2)),
    "a type and a horizon": plain(("ab", "bc", "abc"), known_types=("t", "u"), types=("u", "t", "t"), horizon=1),
}
"""What may come in, the same number of states at every moment that has them."""

ASKED = with_random_states(plain(("abc", "xa", "cx", "b", "abcabcabcab"), types=("z",) * 5), 9)
