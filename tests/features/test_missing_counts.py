"""Missing token counts are estimated by text or by a draw, alike for every order, and recorded ones never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.schema import conform
from presage.features.missing_counts import COUNTS, ENOUGH, CountEstimates, FilledTrace

Json = dict[str, Any]


def step(number: int, output: int | None, text: str | None = None, **more: Any) -> Json:
    """A step of the agent "writer", alone in its workflow."""
    names = {
        "workflow_type": "app",
        "workflow_id": f"w{number}",
        "step": 0,
        "agent": "writer",
        "model": "m",
        "kind": "llm",
    }
    return {**names, "input_tokens": 100, "output_tokens": output, "output_text": text, **more}


def table_of(*rows: Json) -> pa.Table:
    return conform(pa.Table.from_pylist(list(rows)), "test")


def filled(*rows: Json, seed: int = 0) -> FilledTrace:
    table = table_of(*rows)
    return CountEstimates.fit(table, seed).fill(table)


def outputs(found: FilledTrace) -> list[int | None]:
    counts: list[int | None] = found.table["output_tokens"].to_pylist()
    return counts


def many(output: int, text: str | None = None, first: int = 0, **more: Any) -> list[Json]:
    return [step(first + i, output, text, **more) for i in range(ENOUGH)]


def test_a_text_counts_by_the_characters_a_token_of_its_agent_and_model() -> None:
    # The agent writes 300 characters in 100 tokens with this model, 600 with the other; another agent 1,000.
    found = filled(
        *many(100, "x" * 300),
        *many(100, "x" * 600, 10, model="n"),
        *many(100, "x" * 1000, 20, agent="coder"),
        step(30, None, "x" * 60),
        step(31, None, "x" * 60, model="n"),
        step(32, None, "x" * 90, model="unheard of"),  # of the agent: 900 characters in 200 tokens
        step(33, None, "x" * 130, agent="unheard of"),  # of the model: 1,300 in 200
        step(34, None, "x" * 190, agent="unheard of", model="unheard of"),  # of all: 1,900 in 300
    )
    assert outputs(found)[-5:] == [20, 10, 20, 20, 30]
    assert np.flatnonzero(found.estimated["output_tokens"]).tolist() == [15, 16, 17, 18, 19]
    assert not found.estimated["input_tokens"].any()


def test_without_any_count_a_text_counts_four_characters_a_token_and_no_text_nothing() -> None:
    found = filled(step(0, None, "x" * 40), step(1, None), step(2, None, ""))
    assert outputs(found) == [10, None, None]
    assert found.estimated["output_tokens"].tolist() == [True, False, False]


def test_the_size_of_a_prompt_is_that_of_both_texts_and_at_least_what_a_cache_had() -> None:
    prompt = {"input_tokens": None, "system_prompt": "x" * 60, "input_text": "x" * 20}
    assert filled(step(0, 1, **prompt)).table["input_tokens"].to_pylist() == [20]
    assert filled(step(0, 1, **prompt, cached_input_tokens=64)).table["input_tokens"].to_pylist() == [64]
    assert filled(step(0, 1, **prompt, prefix_blocks=[[0, 1]])).table["input_tokens"].to_pylist() == [128]


def test_without_a_text_a_count_is_drawn_from_those_of_the_agent_in_the_type() -> None:
    known = [step(i, 100 + i % 10) for i in range(100)] + [step(200 + i, 5, agent="coder") for i in range(100)]
    other = [step(300 + i, 7, workflow_type="bot") for i in range(100)]
    found = outputs(filled(*known, *other, *(step(1000 + i, None) for i in range(200))))[-200:]
    assert {count for count in found if count is not None} == set(range(100, 110))  # the spread stays


def test_a_draw_backs_off_to_the_agent_then_to_the_type_then_to_all() -> None:
    known = [*many(9), *many(5, first=10, agent="coder", workflow_type="bot")]
    asked = [
        step(20, None, workflow_type="bot"),
        step(21, None, agent="new", workflow_type="bot"),
        step(22, None, agent="new", workflow_type="new"),
    ]
    agent, of_type, of_all = outputs(filled(*known, *asked))[-3:]
    assert (agent, of_type) == (9, 5)
    assert of_all in (5, 9)


def test_tools_have_no_counts() -> None:
    found = filled(*many(9), step(9, None), {**step(9, None), "step": 1, "kind": "tool"})
    assert outputs(found)[-2:] == [9, None]
    assert found.estimated["output_tokens"].tolist()[-2:] == [True, False]


def test_another_trace_is_filled_by_the_ratios_and_counts_of_the_fitted_one() -> None:
    counts = CountEstimates.fit(table_of(*many(100, "x" * 200), *many(7, first=10, agent="coder")), 0)
    test = table_of(
        *many(1, "x" * 200, agent="writer"), step(30, None, "x" * 200), *many(1, first=40, agent="coder"),
        step(50, None, agent="coder"),
    )  # fmt: skip
    found = outputs(counts.fill(test))
    assert (found[ENOUGH], found[-1]) == (100, 7)


counted = st.one_of(st.none(), st.integers(0, 5000))
steps = st.lists(
    st.builds(
        lambda agent, model, kind, sizes, texts: {
            "agent": agent, "model": model, "workflow_type": kind, **dict(zip(COUNTS, sizes, strict=True)),
            **dict(zip(("input_text", "output_text"), texts, strict=True)),
        },
        st.sampled_from("ab"), st.sampled_from(["m", "n", None]), st.sampled_from("xy"), st.tuples(counted, counted),
        st.tuples(*[st.one_of(st.none(), st.text("z", max_size=40))] * 2),
    ),
    min_size=1,
    max_size=40,
)  # fmt: skip


@given(steps, st.integers(0, 3), st.randoms(use_true_random=False))
def test_recorded_counts_stay_and_neither_order_nor_repetition_changes_an_estimate(
    drawn: list[Json], seed: int, random: Any
) -> None:
    table = table_of(*({**row, "workflow_id": f"w{i}", "step": 0} for i, row in enumerate(drawn)))
    found = CountEstimates.fit(table, seed).fill(table)
    for name in COUNTS:
        known = table[name].is_valid().to_numpy()
        assert table[name].filter(known).equals(found.table[name].filter(known))
        assert found.estimated[name].tolist() == (~known & found.table[name].is_valid().to_numpy()).tolist()
        estimates = found.table[name].filter(found.estimated[name])
        assert pc.all(pc.greater(estimates, 0)).as_py() is not False
        if known.any():
            assert found.table[name].null_count == 0
    others = [name for name in table.column_names if name not in COUNTS]
    assert found.table.select(others).equals(table.select(others))
    assert CountEstimates.fit(table, seed).fill(table).table.equals(found.table)

    order = list(range(len(table)))
    random.shuffle(order)
    shuffled = table.take(order)
    assert CountEstimates.fit(shuffled, seed).fill(shuffled).table.equals(found.table.take(order))


@pytest.mark.parametrize("column", COUNTS)
def test_draws_of_two_seeds_differ(column: str) -> None:
    known = [step(i, 10 + i, input_tokens=10 + i) for i in range(50)]
    asked = [step(100 + i, None, input_tokens=None) for i in range(50)]
    first, second = (filled(*known, *asked, seed=seed).table[column].to_pylist()[50:] for seed in (0, 1))
    assert first != second
