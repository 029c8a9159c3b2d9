"""What a training part teaches: distances on a graph of transitions, the trigram, medians of what is left."""

from dataclasses import replace

import numpy as np
import pytest
from replay_samples import chain, row, table

from presage.errors import ConfigurationError
from presage.features.moment import PREFILL
from presage.features.prefixes import prefixes_of
from presage.predictors.ngram import BackoffNgram
from presage.serving_hooks.policies.score import UNIT, ScoreConfig, lookahead
from presage.serving_hooks.replay.forecasts import source
from presage.serving_hooks.replay.markov import Markov
from presage.serving_hooks.replay.static_graph import DEEPEST, SETTINGS, StaticGraph, distances
from presage.serving_hooks.replay.taught import teach
from presage.serving_hooks.replay.workload import Convention
from presage.serving_hooks.vllm.metadata import Step

RING = {"p": frozenset("q"), "q": frozenset("rp"), "r": frozenset("s")}


def test_distances_are_the_fewest_steps_and_an_agent_may_come_again() -> None:
    assert distances(RING, "p") == {"q": 1, "r": 2, "p": 2, "s": 3}
    assert distances(RING, "r") == {"s": 1}
    assert distances(RING, "s") == distances(RING, "unknown") == {}
    assert distances(RING, "p", deepest=2) == {"q": 1, "r": 2, "p": 2}


def test_the_nearer_agent_counts_for_more_than_all_further_ones_together() -> None:
    graph = StaticGraph({"t": {"p": frozenset("q"), "q": frozenset("abcdefg")}})
    said = graph.on_prefill("t", "w", "p")
    ahead = lookahead(said.probabilities, said.agents, ScoreConfig(SETTINGS["horizon"], SETTINGS["gamma"]))
    near, far = ahead.worth("q")[0], ahead.worth("abcdefg")[0]
    assert near == UNIT
    assert 0 < far < near
    assert ahead.worth("p")[0] == 0


def test_every_workflow_of_a_type_gets_the_same_and_others_nothing() -> None:
    graph = StaticGraph({"t": RING})
    one, other = (graph.on_prefill("t", name, "p").probabilities for name in "ab")
    assert np.array_equal(one, other)
    assert graph.on_completion("t", "a").probabilities.tolist() == one.tolist()
    assert one.shape == (DEEPEST, 5)
    assert not graph.on_prefill("u", "c", "p").probabilities.any()


def traces() -> object:
    rows = [row(f"w{n}", step, agent) for n, of in enumerate(("pqpr", "pqr", "pqps")) for step, agent in enumerate(of)]
    return table(*rows)


def jobs() -> tuple:
    return tuple(chain(n, agents, Convention()) for n, agents in enumerate(("pqpr", "pqr", "pqps")))


def test_the_trigram_that_serves_is_the_one_that_is_evaluated() -> None:
    taught = teach(traces(), jobs())  # type: ignore[arg-type]
    markov = Markov(taught)
    prefixes = prefixes_of(traces(), taught.markov.vocabulary, 3)  # type: ignore[arg-type]
    wanted = BackoffNgram(3).fit(prefixes, prefixes).predict(prefixes, PREFILL)
    said = [
        markov.on_prefill("t", f"w{n}", agent).probabilities
        for n, agents in enumerate(("pqpr", "pqr", "pqps"))
        for agent in agents
    ]
    assert np.array_equal(np.stack(said), wanted)
    assert not np.array_equal(markov.on_prefill("t", "w9", "stranger").probabilities, wanted[0])


def test_what_is_left_is_a_median_and_cut_workflows_do_not_count() -> None:
    taught = teach(traces(), jobs())  # type: ignore[arg-type]
    markov = Markov(taught)
    # 20 tokens a step; when a q comes 60, 40 and 60 are left.
    assert markov.remaining_tokens(Step("t", "w", "q"), 0) == 60
    assert markov.remaining_tokens(Step("t", "w", "r"), 0) == 20
    assert markov.remaining_tokens(Step("t", "w", "z"), 0) is None
    cut = tuple(replace(job, complete=False) if job.workflow_id != "w1" else job for job in jobs())
    assert teach(traces(), cut).medians["t", "q"] == 40  # type: ignore[arg-type]


def test_transitions_are_those_from_parents() -> None:
    taught = teach(traces(), jobs())  # type: ignore[arg-type]
    assert taught.transitions == {"t": {"p": frozenset("qrs"), "q": frozenset("pr")}}


def test_the_trigram_without_a_training_part_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing was learnt"):
        source("markov-3")
