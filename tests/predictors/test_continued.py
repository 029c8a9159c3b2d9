"""An old predictor in a larger vocabulary: it forecasts as before, and new agents start where they belong."""

from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import COMPLETION, PREFILL
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.states import StateSource, captured_source
from presage.features.vocabulary import TOOLS_KEPT, Vocabulary
from presage.predictors.engine import build_engine
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.continued import Extension
from presage.predictors.next_agent.kernels import forecast_trace
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.next_agent.parts import NextAgentConfig, NextAgentParts, project_all, with_presence
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.testing.prefixes import prefixes_from

FAST = NextAgentConfig(network=NetworkConfig(epochs=4), boosting=BoostingConfig(rounds=30))
TAKES = {"coder a": "coder", "coder b": "coder", "planner (new)": "planner"}


@cache
def old_table() -> pa.Table:
    return generate("retry", 80, 0, state_size=16).table


@cache
def old(states: bool) -> NextAgentPredictor:
    source = captured_source(old_table()) if states else StateSource("none")
    prefixes = prefixes_of(old_table(), Vocabulary.from_table(old_table()), 3)
    prefixes = prefixes.with_states(source.states(old_table()))
    order = np.arange(prefixes.workflows)
    return NextAgentPredictor(FAST).fit(
        prefixes.take(order[order % 5 > 0]), prefixes.take(order[order % 5 == 0]), source=source
    )


def extension(of: NextAgentPredictor) -> Extension:
    """Three new agents beside those whose place they take, one in nobody's place, a new type and new tools."""
    later = generate("retry", 5, 1, state_size=16).table
    names = ["critic", "coder a", "coder b", "planner (new)"]
    later = put(later, "agent", [names[i % 4] for i in range(len(later))])
    later = put(later, "workflow_type", ["another"] * len(later))
    later = put(later, "tools_called", [[f"tool {i % 40}"] for i in range(len(later))])
    return Extension(of.vocabulary, of.vocabulary.extended(later, TAKES), TAKES)


def put(table: pa.Table, column: str, values: list[object]) -> pa.Table:
    at = table.schema.get_field_index(column)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


def forecasts(parts: NextAgentParts, prefixes: Prefixes) -> NDArray[np.float32]:
    tools = len(prefixes.vocabulary.tools)
    engine = build_engine(
        parts.network, parts.trees, parts.ngram.table, parts.shares, parts.evidence, 10, tools, parts.widths
    )
    out = np.empty((2, prefixes.steps, prefixes.horizon, prefixes.vocabulary.outcomes), np.float32)
    projected = project_all(prefixes, parts.projections)
    moments = [with_presence(prefixes, projected, moment) for moment in (PREFILL, COMPLETION)]
    columns = (prefixes.offsets, prefixes.workflow_type, prefixes.agent, prefixes.sizes, prefixes.called)
    forecast_trace(*columns, *moments[0], *moments[1], engine, out)
    return out


def test_a_larger_vocabulary_keeps_the_order_and_puts_an_agent_beside_the_one_whose_place_it_takes() -> None:
    by = extension(old(states=False))
    assert [name for name in by.new.agents if name in by.old.agents] == list(by.old.agents)
    at = by.new.agents.index("coder")
    assert by.new.agents[at : at + 3] == ("coder", "coder a", "coder b")
    assert by.new.agents[-1] == "critic"
    assert by.new.workflow_types == (*by.old.workflow_types, "another")
    assert len(by.new.tools) == TOOLS_KEPT
    assert by.added.sum() == 4


@pytest.mark.parametrize("states", [False, True])
def test_before_any_training_old_traces_are_forecast_as_before(states: bool) -> None:
    of = old(states)
    by, held = extension(of), generate("retry", 40, 7, state_size=16).table
    seen = [prefixes_of(held, vocabulary, 3).with_states(of.source.states(held)) for vocabulary in (by.old, by.new)]
    before, after = forecasts(of.parts, seen[0]), forecasts(by.extend(of.parts), seen[1])
    assert before.max(axis=-1).mean() > 0.5
    assert after[..., by.added].sum(axis=-1).max() < 0.02
    np.testing.assert_allclose(after[..., by.places], before, atol=0.02)
    np.testing.assert_allclose(by.forecasts(before[1])[..., by.places], before[1])


def test_what_is_new_is_unknown_to_the_old_predictor() -> None:
    of = old(states=False)
    by = extension(of)
    held = generate("retry", 20, 7, state_size=16).table
    held = put(held, "agent", [name.replace("coder", "coder b") for name in held["agent"].to_pylist()])
    found, wanted = by.before(prefixes_of(held, by.new, 3)), prefixes_of(held, by.old, 3)
    for name in ("agent", "outcomes", "called"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_twins_are_the_workflows_before_there_were_new_agents() -> None:
    new = Vocabulary(("t",), ("a", "b", "B", "c", "x"))
    by = Extension(Vocabulary(("t",), ("a", "b", "c")), new, {"B": "b"})
    words = ["aBc", "abc", "aBxxc", "cBB?", "xx", "xaxb"]
    twins = by.twins(prefixes_from(words, agents="abBcx", cut=[5]))
    wanted = prefixes_from(["abc", "abc", "cbb?", "ab"], agents="abBcx", cut=[3])
    for name in ("offsets", "agent", "outcomes", "workflow_type"):
        np.testing.assert_array_equal(getattr(twins, name), getattr(wanted, name))
    none = by.twins(prefixes_from(["abc", "ca"], agents="abBcx"))
    assert (none.workflows, none.steps) == (0, 0)
    other = Vocabulary(("t", "u"), new.agents)
    of_new_type = prefixes_from(words, agents="abBcx", types=["u"] * 6, known_types=("t", "u"))
    assert Extension(by.old, other, by.takes).twins(of_new_type).workflows == 0


def test_counts_add_up() -> None:
    words, more = ["abcab", "cab", "bca"], ["abba", "caab"]
    parts = [prefixes_from(of, agents="abc") for of in (words, more, words + more)]
    first, second, both = (BackoffNgram().fit(of, of) for of in parts)
    found, wanted = first.and_then(second).to_tensors(), both.to_tensors()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_counts_in_a_larger_vocabulary_are_those_of_its_traces() -> None:
    words, large = ["abcab", "ca?b", "bca"], Vocabulary(("s", "t"), ("a", "x", "b", "c"))
    small = prefixes_from(words, agents="abc")
    wanted = prefixes_from(words, agents="axbc", known_types=("s", "t"), types=["t"] * 3)
    by = Extension(small.vocabulary, large, {})
    moved = BackoffNgram().fit(small, small).extended(large, by.type_places, by.places)
    np.testing.assert_array_equal(
        moved.predict(wanted, PREFILL), BackoffNgram().fit(wanted, wanted).predict(wanted, PREFILL)
    )


def test_transitions_are_counted_from_the_start_to_the_end() -> None:
    prefixes = prefixes_from(["ab", "abb?", "?a"], agents="ab")
    counted = BackoffNgram().fit(prefixes, prefixes).transitions()
    np.testing.assert_array_equal(counted, [[0, 2, 1], [0, 1, 1], [2, 0, 0]])
