"""Rows of a predictor of lengths: labels and bounds, columns by hand, and a request's row equal to its trace's."""

import numpy as np
import pyarrow as pa
import pytest

from presage.datasets.schema import conform
from presage.datasets.synthetic.lengths import generate_lengths
from presage.errors import InputError, TraceError
from presage.features.input_profiles import PROFILES, masked
from presage.features.lengths import LengthEncoder, LengthWorkflow, length_rows
from presage.features.rows import LEARNT_PROFILES, join_rows, profiles_of
from presage.training.length.train import LengthTexts


def step(workflow: str, number: int, agent: str, tokens: int | None, **more: object) -> dict[str, object]:
    return {
        "workflow_type": "app",
        "workflow_id": workflow,
        "step": number,
        "agent": agent,
        "output_tokens": tokens,
        **more,
    }


def table_of(*steps: dict[str, object]) -> pa.Table:
    names = dict.fromkeys(name for s in steps for name in s)
    return conform(pa.Table.from_pylist([{name: s.get(name) for name in names} for s in steps]), "test")


def reading(table: pa.Table) -> LengthEncoder:
    """An encoder that reads texts."""
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    return texts.fit(encoder, relevant=False, seed=0)[0]


def numbers_of(encoder: LengthEncoder, steps: list[dict[str, object]]) -> tuple[int, int, int, np.ndarray]:
    """What a running workflow makes of its last step."""
    workflow = LengthWorkflow(encoder, str(steps[0]["workflow_type"]))
    for before in steps[:-1]:
        workflow.begun(before)
        workflow.completed(before)
    return workflow.begun(steps[-1])


def column(rows, encoder: LengthEncoder, name: str) -> list[float]:
    return rows.numbers[:, encoder.names.index(name)].tolist()


def test_what_remains_is_this_step_and_all_later_ones() -> None:
    table = table_of(step("a", 0, "x", 5), step("a", 1, "y", 7), step("b", 0, "x", 11))
    encoder = LengthEncoder.fit(table)
    assert length_rows(table, encoder).label.tolist() == [12, 7, 11]
    assert length_rows(table, encoder, "step").label.tolist() == [5, 7, 11]


def test_a_missing_count_hides_what_remains_before_it_in_its_own_workflow_only() -> None:
    table = table_of(step("a", 0, "x", 5), step("a", 1, "y", None), step("a", 2, "y", 3), step("b", 0, "x", 11))
    rows = length_rows(table, LengthEncoder.fit(table))
    assert np.isnan(rows.label).tolist() == [True, True, False, False]
    assert rows.labelled.tolist() == [False, False, True, True]
    assert rows.label[2:].tolist() == [3, 11]


def test_a_cut_workflow_gives_bounds_for_what_remains_and_labels_for_single_steps() -> None:
    table = table_of(step("a", 0, "x", 5, complete=False), step("a", 1, "y", 7, complete=False), step("b", 0, "x", 1))
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    assert rows.lower_bound.tolist() == [True, True, False]
    assert rows.label.tolist() == [12, 7, 1]
    assert rows.labelled.tolist() == [False, False, True]
    assert length_rows(table, encoder, "step").labelled.all()


def test_a_tool_call_is_no_step() -> None:
    table = table_of(step("a", 0, "x", 5), step("a", 1, "grep", None, kind="tool"), step("a", 2, "y", 3))
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    assert encoder.vocabulary.agents == ("x", "y")
    assert rows.step.tolist() == [0, 1]
    assert rows.label.tolist() == [8, 3]
    assert column(rows, encoder, "step") == [0, 1]


def test_columns_by_hand() -> None:
    table = table_of(
        step("a", 0, "x", 5, input_tokens=40, system_prompt="s" * 8, input_text="u" * 12),
        step("a", 1, "y", 7, input_text="u" * 16),
        step("a", 2, "y", 9),
    )
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    assert column(rows, encoder, "system_tokens")[0] == 2
    assert column(rows, encoder, "user_tokens")[:2] == [3, 4]
    assert column(rows, encoder, "prompt_tokens")[:2] == [40, 4]  # not counted: what texts there are
    assert np.isnan(column(rows, encoder, "prompt_tokens")[2])
    assert column(rows, encoder, "agents_so_far") == [1, 2, 2]
    assert column(rows, encoder, "run") == [1, 1, 2]
    assert column(rows, encoder, "produced_tokens") == [0, 5, 12]
    assert np.isnan(column(rows, encoder, "previous_output_tokens")[0])
    assert column(rows, encoder, "previous_output_tokens")[1:] == [5, 7]
    assert column(rows, encoder, "calls_0") == [1, 1, 1]  # of x
    assert column(rows, encoder, "since_0") == [0, 1, 2]


def test_no_output_of_this_or_a_later_step_is_seen() -> None:
    table = generate_lengths(20, 0).table
    encoder = reading(table)
    first = pa.array(table["step"].to_numpy() == 0)
    blind = table.set_column(
        table.schema.get_field_index("output_tokens"),
        table.schema.field("output_tokens"),
        pa.array(np.full(len(table), 123, np.int32)),
    )
    seen = length_rows(table, encoder).numbers[first]
    np.testing.assert_array_equal(seen, length_rows(blind, encoder).numbers[first])


def test_one_request_makes_the_row_of_its_trace_bit_by_bit() -> None:
    table = generate_lengths(30, 3).table
    texts = pa.array([f"answer {i % 7} done" for i in range(len(table))], pa.large_string())
    table = table.set_column(table.schema.get_field_index("output_text"), table.schema.field("output_text"), texts)
    encoder = reading(table.slice(0, 60))  # later types, agents and models are partly unknown
    rows = length_rows(table, encoder)
    steps = table.to_pylist()
    for at in range(len(table)):
        first = at - steps[at]["step"]
        request = [dict(s) for s in steps[first : at + 1]]
        request[-1] |= {"output_tokens": None, "output_text": None}  # not produced yet
        *names, numbers = numbers_of(encoder, request)
        np.testing.assert_array_equal(numbers, rows.numbers[at])
        assert names == [rows.workflow_type[at], rows.agent[at], rows.model[at]]


def test_models_unknown_and_absent_are_values_of_their_own() -> None:
    table = table_of(step("a", 0, "x", 5, model="m"), step("a", 1, "x", 5, model="n"))
    encoder = LengthEncoder.fit(table)
    other = table_of(step("a", 0, "x", 5, model="new"), step("a", 1, "x", 5), step("a", 2, "x", 5, model="n"))
    assert length_rows(other, encoder).model.tolist() == [2, 3, 1]
    assert [encoder.model(name) for name in ("new", None, "n")] == [2, 3, 1]


def test_texts_nobody_shares_a_word_of_teach_nothing() -> None:
    table = table_of(step("a", 0, "x", 5, input_text="one"), step("b", 0, "x", 6, input_text="two"))
    with pytest.raises(InputError, match="no term occurs in 3 tasks"):
        reading(table)


def test_counts_that_no_float_holds_are_rounded_as_those_of_a_request() -> None:
    table = table_of(step("a", 0, "x", 2**24 + 1, input_tokens=2**31 - 1), step("a", 1, "x", 2**31 - 1))
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    np.testing.assert_array_equal(rows.numbers[1], numbers_of(encoder, table.to_pylist())[3])
    assert rows.label.tolist() == pytest.approx([2**31 + 2**24, 2**31 - 1])


@pytest.mark.parametrize("text", ["", "word " * 250_000])
def test_empty_and_huge_prompts_make_finite_rows(text: str) -> None:
    table = generate_lengths(20, 0).table
    request = [step("a", 0, "planner", None, input_text=text, input_tokens=7)]
    encoder = reading(table)
    assert np.isfinite(numbers_of(encoder, request)[3][encoder.names.index("prompt_0")])


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("input_tokens", -1, "0 or more"), ("output_tokens", "9", "0 or more"), ("input_text", 7, "expected a string")],
)
def test_a_request_with_nonsense_is_refused(field: str, value: object, told: str) -> None:
    encoder = LengthEncoder.fit(generate_lengths(10, 0).table)
    with pytest.raises(InputError, match=told):
        numbers_of(encoder, [step("a", 0, "planner", None) | {field: value}, step("a", 1, "planner", None)])


def test_a_trace_of_tool_calls_alone_is_refused() -> None:
    table = table_of(step("a", 0, "grep", None, kind="tool"))
    with pytest.raises(TraceError, match="no LLM step"):
        length_rows(table, LengthEncoder.fit(table))


def test_rows_taken_apart_and_joined_are_the_same_rows() -> None:
    table = generate_lengths(20, 1).table
    rows = length_rows(table, LengthEncoder.fit(table))
    half = len(rows) // 2
    again = join_rows(rows.take(np.arange(half)), rows.take(np.arange(half, len(rows))))
    np.testing.assert_array_equal(again.numbers, rows.numbers)
    np.testing.assert_array_equal(again.workflow, rows.workflow)
    assert rows.workflows == 20


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("counted", [True, False])
def test_rows_observed_are_those_of_the_trace_with_the_other_columns_null(profile: str, counted: bool) -> None:
    table = generate_lengths(40, 3).table
    texts = pa.array([f"answer {i % 7} done" if i % 5 else None for i in range(len(table))], pa.large_string())
    table = table.set_column(table.schema.get_field_index("output_text"), table.schema.field("output_text"), texts)
    if not counted:  # the characters of the texts stand in
        at = table.schema.get_field_index("input_tokens")
        table = table.set_column(at, table.schema.field(at), pa.nulls(len(table), table.schema.field(at).type))
    encoder = reading(table)
    rows = length_rows(table, encoder)
    seen, wanted = encoder.observed(rows, PROFILES[profile]), length_rows(masked(table, PROFILES[profile]), encoder)
    np.testing.assert_array_equal(seen.numbers, wanted.numbers)
    np.testing.assert_array_equal(seen.model, wanted.model)
    np.testing.assert_array_equal(seen.label, rows.label)
    np.testing.assert_array_equal(
        profiles_of(seen.numbers) <= max(n for n, of in enumerate(LEARNT_PROFILES) if of <= PROFILES[profile]), True
    )


def test_rows_without_names_are_those_of_a_trace_whose_agent_has_another_name() -> None:
    table = generate_lengths(12, 3).table
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    nameless = encoder.nameless(rows)
    agents = table["agent"].to_pylist()
    at = table.schema.get_field_index("agent")
    for number, name in enumerate(encoder.vocabulary.agents):
        called = pa.array([agent + " v2" if agent == name else agent for agent in agents], table.schema.field(at).type)
        renamed = length_rows(table.set_column(at, table.schema.field(at), called), encoder)
        own = np.flatnonzero(rows.agent == number)
        assert len(own)
        for of in ("workflow_type", "agent", "model", "numbers", "label"):
            np.testing.assert_array_equal(getattr(nameless, of)[own], getattr(renamed, of)[own])


def test_rows_with_unknown_names_are_those_of_a_trace_after_a_release_that_renames() -> None:
    table = generate_lengths(40, 3).table
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    unnamed = encoder.with_unknown_names(rows, np.random.default_rng(0))
    agents, types = encoder.vocabulary.unknown, len(encoder.vocabulary.workflow_types)
    renamed = unnamed.agent == agents
    for workflow in range(rows.workflows):
        mine = rows.workflow == workflow
        assert renamed[mine].any()
        assert not set(rows.agent[mine & renamed]) & set(rows.agent[mine & ~renamed]), "a name is known or it is not"
    other = unnamed.workflow_type == types
    assert 0.1 < other.mean() < 0.6
    for column, new in (("agent", renamed), ("workflow_type", other)):
        at = table.schema.get_field_index(column)
        names = [name + " v2" * bool(of) for name, of in zip(table[column].to_pylist(), new, strict=True)]
        table = table.set_column(at, table.schema.field(at), pa.array(names, table.schema.field(at).type))
    seen = length_rows(table, encoder)
    for of in ("workflow_type", "agent", "model", "numbers", "label"):
        np.testing.assert_array_equal(getattr(unnamed, of), getattr(seen, of))


def test_sketches_of_training_rows_are_out_of_fold_and_those_of_fresh_texts_are_not() -> None:
    words = ["alpha", "beta", "gamma", "delta"]
    table = table_of(*(step(f"w{i}", 0, "x", 5 + i, input_text=f"{words[i % 4]} common") for i in range(60)))
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    again, rows = texts.fit(encoder, relevant=False, seed=0)
    assert rows.numbers.shape == length_rows(table, again).numbers.shape
    np.testing.assert_array_equal(rows.numbers[:, : len(encoder.names)], length_rows(table, encoder).numbers)
    assert np.isnan(rows.numbers[:, [again.names.index("answer_0")]]).all()


def test_a_context_grows_from_the_prompt_to_the_largest_that_is_to_come_or_to_the_next() -> None:
    """Contexts are 105, 307, 202 (it was compacted) and, in another workflow, 11."""
    table = table_of(
        step("a", 0, "x", 5, input_tokens=100),
        step("a", 1, "x", 7, input_tokens=300),
        step("a", 2, "x", 2, input_tokens=200),
        step("b", 0, "x", 1, input_tokens=10),
    )
    encoder = LengthEncoder.fit(table)
    assert length_rows(table, encoder, "final-context").label.tolist() == [207, 7, 2, 1]
    assert length_rows(table, encoder, "next-context").label.tolist() == [207, 0, 2, 1]


def test_a_count_that_is_missing_or_a_cut_workflow_leaves_growth_unknown_or_a_bound() -> None:
    table = table_of(
        step("a", 0, "x", 5, input_tokens=100, complete=False),
        step("a", 1, "x", 7, input_tokens=300, complete=False),
        step("b", 0, "x", 1, input_tokens=10),
        step("b", 1, "x", 1),
        step("b", 2, "x", 1, input_tokens=20),
    )
    encoder = LengthEncoder.fit(table)
    final = length_rows(table, encoder, "final-context")
    assert final.lower_bound.tolist() == [True, True, False, False, False]
    np.testing.assert_array_equal(final.label, np.float32([207, 7, np.nan, np.nan, 1]))
    coming = length_rows(table, encoder, "next-context")
    assert coming.lower_bound.tolist() == [False, True, False, False, False]
    np.testing.assert_array_equal(coming.label, np.float32([207, 7, np.nan, np.nan, 1]))
