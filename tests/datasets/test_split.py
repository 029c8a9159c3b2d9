"""Splits keep tasks whole, lose nothing, and say by what rule they were made; a task has one key in every trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dataset_samples import row, trace, traces, workflow
from hypothesis import assume, given
from hypothesis import strategies as st

from presage.datasets.read import read_traces
from presage.datasets.split import split
from presage.datasets.tasks import task_keys, task_of
from presage.errors import ConfigurationError, TraceError


def groups(table: pa.Table) -> set[tuple[str, ...]]:
    columns = (table[name].to_pylist() for name in ("task", "workflow_type", "workflow_id"))
    return {(task,) if task is not None else (kind, name) for task, kind, name in zip(*columns, strict=True)}


@given(traces(2), st.floats(0.05, 0.95), st.integers(0, 3), st.sampled_from(["auto", "task"]), st.randoms())
def test_no_task_stands_on_both_sides_and_nothing_is_lost(
    table: pa.Table, fraction: float, seed: int, by: Any, random: Any
) -> None:
    assume(len(groups(table)) >= 2)
    made = split(table, fraction, seed, by)
    assert not groups(made.train) & groups(made.test)
    assert made.train.num_rows + made.test.num_rows == table.num_rows
    assert groups(made.train) | groups(made.test) == groups(table)
    assert made.train.num_rows
    assert made.test.num_rows
    assert made.rule
    order = list(range(table.num_rows))
    random.shuffle(order)
    shuffled = split(table.take(pa.array(order)), fraction, seed, by)
    assert groups(shuffled.test) == groups(made.test)


def timed(name: str, start: float, workflow_type: str = "t", **more: Any) -> list[dict[str, Any]]:
    return workflow(name, 2, workflow_type, start_time=start, **more)


def test_where_times_permit_the_test_set_is_later() -> None:
    table = trace(*(one for i in range(10) for one in timed(f"w{9 - i}", float(i))))
    made = split(table, 0.3, 0)
    assert made.rule == "by time, every test workflow starts after every training workflow (t)"
    assert set(made.test["workflow_id"].to_pylist()) == {"w0", "w1", "w2"}


def test_tasks_spread_over_time_fall_back_to_task_and_say_so() -> None:
    runs = (one for run in range(4) for i in range(6) for one in timed(f"r{run}-{i}", run * 100.0 + i, task=f"q{i}"))
    table = trace(*runs)
    made = split(table, 0.34, 1)
    assert "runs of one task are spread over the time of others" in made.rule
    assert len(set(made.test["task"].to_pylist())) == 2
    with pytest.raises(TraceError, match="no split by time of t: runs of one task"):
        split(table, 0.34, 1, by="time")


def test_each_type_decides_for_itself_and_stands_on_both_sides() -> None:
    table = trace(
        *(one for i in range(10) for one in timed(f"a{i}", float(i), "a")),
        *(one for i in range(3) for one in workflow(f"b{i}", 2, "b")),
        *workflow("alone", 2, "c"),
    )
    made = split(table, 0.2, 0)
    assert set(made.train["workflow_type"].to_pylist()) == {"a", "b", "c"}
    assert set(made.test["workflow_type"].to_pylist()) == {"a", "b"}
    assert "by time" in made.rule
    assert "not every workflow has a start time (b)" in made.rule
    assert "all in training, a single task or workflow (c)" in made.rule


def test_types_that_share_tasks_are_split_together_and_both_stand_on_both_sides() -> None:
    shared = [one for i in range(8) for kind in "ab" for one in workflow(f"{kind}{i}", 1, kind, task=f"q{i}")]
    rare = [
        row("a-own1", workflow_type="a", task="x"),
        row("c1", workflow_type="c", task="x"),
        row("c2", workflow_type="c", task="y"),
    ]
    made = split(trace(*shared, *rare), 0.2, 3)
    for side in (made.train, made.test):
        assert set(side["workflow_type"].to_pylist()) == {"a", "b", "c"}


def test_the_seed_decides_and_a_new_task_moves_few_others() -> None:
    rows = [one for i in range(50) for one in workflow(f"w{i:02}", 1)]
    first, again, other = (split(trace(*rows), 0.2, seed) for seed in (0, 0, 1))
    assert first.test.equals(again.test)
    assert groups(first.test) != groups(other.test)
    wider = split(trace(*rows, row("new")), 0.2, 0)
    assert len(groups(wider.test) - groups(first.test)) <= 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 3.0, float("nan")])
def test_a_fraction_outside_0_and_1_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        split(trace(row("v"), row("w")), fraction, 0)


def test_a_single_workflow_or_task_cannot_be_split() -> None:
    with pytest.raises(TraceError, match="a single workflow cannot be split"):
        split(trace(*workflow("w", 3)), 0.2, 0)
    with pytest.raises(TraceError, match="a single task cannot be split"):
        split(trace(row("v", task="q"), row("w", task="q")), 0.2, 0)


@pytest.mark.realdata
def test_autocoderover_is_split_by_task(workflows_folder: Path) -> None:
    made = split(read_traces([workflows_folder / "autocoderover.jsonl.gz"]).table, 0.2, 0)
    assert "spread over the time of others (autocoderover, autocoderover_validate)" in made.rule
    assert len(set(made.test["task"].to_pylist())) == 47


def tasks_of(*rows: tuple[str, str, str | None]) -> pa.Table:
    types, ids, tasks = zip(*rows, strict=True)
    return pa.table({"workflow_type": types, "workflow_id": ids, "task": pa.array(tasks, pa.string())})


def test_runs_of_one_task_share_a_key_across_types_and_traces() -> None:
    first = task_keys(tasks_of(("fix", "a", "t1"), ("fix", "b", "t2"), ("check", "c", "t1")))
    again = task_keys(tasks_of(("other", "z", "t1")))
    assert first[0] == first[2] == again[0]
    assert first[0] != first[1]


def test_a_workflow_without_a_task_is_a_task_of_its_own() -> None:
    table = tasks_of(("fix", "a", None), ("fix", "a", None), ("check", "a", None))
    keys = task_keys(table)
    assert keys[0] == keys[1] != keys[2]
    assert task_of(table).to_pylist() == ["fix\x1fa", "fix\x1fa", "check\x1fa"]


def test_keys_are_those_that_models_on_disk_carry() -> None:
    np.testing.assert_array_equal(task_keys(tasks_of(("fix", "a", "t1"))), np.array([3012898748006197707], np.uint64))
