"""What is expected to follow: by hand, the same for a request as for its trace, and whole inside an artefact."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_model import Tiny

from presage.datasets.law import generate
from presage.datasets.length_law import generate_lengths
from presage.datasets.schema import conform
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.moment import PREFILL
from presage.features.prefixes import prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.ahead import AgentsAhead, GivenModel


@dataclass
class Sure:
    """A next-agent predictor that always says the same, of the agents a and b, two steps ahead."""

    vocabulary = Vocabulary(("t",), ("a", "b"))
    horizon = 2

    def without_states(self, offsets: Any, workflow_type: Any, agent: Any, sizes: Any, *, last: bool = False) -> Any:
        said = np.array([[0.5, 0.3, 0.2], [0.1, 0.4, 0.5]], np.float32)
        return np.tile(said, (len(offsets) - 1 if last else len(agent), 1, 1))


def trace(*steps: tuple[str, str]) -> pa.Table:
    """One workflow of agents and kinds."""
    rows = [
        {"workflow_type": "t", "workflow_id": "w", "step": step, "agent": agent, "kind": kind}
        for step, (agent, kind) in enumerate(steps)
    ]
    return conform(pa.Table.from_pylist(rows), "test")


def test_what_is_expected_by_hand() -> None:
    # b is called as a tool half of the time. The second step ahead comes with .8.
    table = trace(("a", "llm"), ("b", "tool"), ("new", "llm"), ("b", "llm"))
    given: Any = GivenModel(Sure(), "sure", "sha256:0")  # type: ignore[arg-type]
    ahead = AgentsAhead.fit(given, table, LengthEncoder.fit(table))
    assert ahead.counted == ("a", "b", "new")
    assert ahead.llm.tolist() == [1.0, 0.5]
    assert ahead.names == (
        "llm_steps_ahead", "end_1", "end_2", "calls_ahead_0", "calls_ahead_1", "calls_ahead_2",
    )  # fmt: skip
    a, b = 0.5 + 0.8 * 0.1, 0.3 + 0.8 * 0.4
    wanted = [a + b / 2, 0.2, 0.8 * 0.5, a, b, 0.0]
    assert ahead.of_table(table) == pytest.approx(np.tile(wanted, (4, 1)))
    assert ahead.of_steps(table.to_pylist()) == pytest.approx(wanted)


@pytest.fixture(scope="module")
def ahead(tiny: Tiny) -> AgentsAhead:
    """Of a model trained with states, in rows of traces that it knows partly."""
    table = generate("retry", 20, 5, state_size=16).table
    return AgentsAhead.fit(GivenModel.load(tiny.folder, "tiny"), table, LengthEncoder.fit(table))


def test_it_is_what_the_model_says_at_prefill_without_states(ahead: AgentsAhead) -> None:
    predictor = ahead.given.predictor
    table = generate("retry", 15, 6, state_size=16).table
    bare = prefixes_of(table, predictor.vocabulary, predictor.horizon)
    wanted = predictor.predict(bare, PREFILL)
    columns = (bare.offsets, bare.workflow_type, bare.agent, bare.sizes)
    np.testing.assert_array_equal(predictor.without_states(*columns), wanted)
    last = predictor.without_states(*columns, last=True)
    np.testing.assert_array_equal(last, wanted[bare.offsets[1:] - 1])


@pytest.mark.parametrize("law", ["retry", "triage", "lengths"])
def test_a_request_is_told_what_its_trace_is(ahead: AgentsAhead, law: str) -> None:
    """Known agents, unknown ones, unknown workflow types, with sizes and without."""
    table = generate_lengths(12, 0).table if law == "lengths" else generate(law, 12, 7, state_size=16).table
    of_trace, steps = ahead.of_table(table), table.to_pylist()
    assert of_trace.shape == (len(table), len(ahead.names))
    for at, step in enumerate(steps):
        request = [dict(one) for one in steps[at - step["step"] : at + 1]]
        request[-1] |= {"output_tokens": None, "output_text": None, "ended_at": None, "completion_state": None}
        np.testing.assert_allclose(ahead.of_steps(request), of_trace[at], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("law", ["retry", "lengths"])
def test_a_running_workflow_is_told_what_its_trace_is(ahead: AgentsAhead, law: str) -> None:
    table = generate_lengths(12, 0).table if law == "lengths" else generate(law, 12, 7, state_size=16).table
    for of_trace, step in zip(ahead.of_table(table), table.to_pylist(), strict=True):
        if step["step"] == 0:
            running = ahead.open(step["workflow_type"])
        np.testing.assert_allclose(ahead.begun(running, step), of_trace, rtol=1e-5, atol=1e-6)
        ahead.completed(running, step)


def test_nothing_that_comes_later_is_seen(ahead: AgentsAhead) -> None:
    table = generate_lengths(12, 0).table
    field = table.schema.get_field_index("output_tokens")
    louder = table.set_column(field, table.schema.field(field), pa.array([9999] * len(table), pa.int32()))
    first = table["step"].to_numpy() == 0
    np.testing.assert_array_equal(ahead.of_table(louder)[first], ahead.of_table(table)[first])
    steps = table.slice(0, 2).to_pylist()
    changed = [steps[0], steps[1] | {"output_tokens": 7777, "output_text": "something else"}]
    np.testing.assert_array_equal(ahead.of_steps(changed), ahead.of_steps(steps))


def test_expectations_are_shares_and_counts(ahead: AgentsAhead) -> None:
    told = ahead.of_table(generate("retry", 30, 8, state_size=16).table)
    horizon = ahead.given.predictor.horizon
    steps, ends, calls = told[:, 0], told[:, 1 : 1 + horizon], told[:, 1 + horizon :]
    assert (told >= 0).all()
    assert (ends.sum(axis=1) <= 1 + 1e-5).all()
    assert (steps <= horizon + 1e-5).all()
    np.testing.assert_allclose(calls.sum(axis=1), steps, rtol=1e-4)  # every agent is tracked, and none a tool


def test_a_row_of_lengths_ends_with_it_in_traces_and_in_requests(ahead: AgentsAhead) -> None:
    table = generate("retry", 10, 9, state_size=16).table
    encoder = LengthEncoder.fit(table)
    seeing = replace(encoder, ahead=replace(ahead, counted=("coder",)))
    rows = length_rows(table, seeing)
    width = len(seeing.names) - len(encoder.names)
    assert width == 1 + ahead.given.predictor.horizon + 1
    np.testing.assert_array_equal(rows.numbers[:, :-width], length_rows(table, encoder).numbers)
    one = seeing.row(table.slice(0, 3).to_pylist())
    np.testing.assert_allclose(one.numbers[0], rows.numbers[2], rtol=1e-5, atol=1e-6)
    given = np.full((len(table), width), 7, np.float32)
    assert (length_rows(table, seeing, ahead=given).numbers[:, -width:] == 7).all()


def test_an_artefact_holds_all_of_it_and_no_source_of_states(ahead: AgentsAhead) -> None:
    config, tensors = ahead.to_artefact()
    assert (config["model"], config["digest"]) == ("tiny", ahead.given.digest)
    assert not [name for name in tensors if name.startswith("states/")]
    again = AgentsAhead.from_artefact(json.loads(json.dumps(config)), tensors)
    table = generate("retry", 10, 9, state_size=16).table
    np.testing.assert_array_equal(again.of_table(table), ahead.of_table(table))
    assert (again.names, again.counted) == (ahead.names, ahead.counted)
    for broken in (
        {**tensors, "ahead/llm": np.ones(99, np.float32)},
        {k: v for k, v in tensors.items() if "llm" not in k},
    ):
        with pytest.raises((LookupError, ValueError)):
            AgentsAhead.from_artefact(config, broken)
