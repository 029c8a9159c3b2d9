"""The key of a task: the same in every trace, another for another task, the workflow's own where there is none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from presage.datasets.tasks import task_keys, task_of


def trace(*rows: tuple[str, str, str | None]) -> pa.Table:
    types, ids, tasks = zip(*rows, strict=True)
    return pa.table({"workflow_type": types, "workflow_id": ids, "task": pa.array(tasks, pa.string())})


def test_runs_of_one_task_share_a_key_across_types_and_traces() -> None:
    first = task_keys(trace(("fix", "a", "t1"), ("fix", "b", "t2"), ("check", "c", "t1")))
    again = task_keys(trace(("other", "z", "t1")))
    assert first[0] == first[2] == again[0]
    assert first[0] != first[1]


def test_a_workflow_without_a_task_is_a_task_of_its_own() -> None:
    table = trace(("fix", "a", None), ("fix", "a", None), ("check", "a", None))
    keys = task_keys(table)
    assert keys[0] == keys[1] != keys[2]
    assert task_of(table).to_pylist() == ["fix\x1fa", "fix\x1fa", "check\x1fa"]


def test_keys_are_those_that_models_on_disk_carry() -> None:
    np.testing.assert_array_equal(task_keys(trace(("fix", "a", "t1"))), np.array([3012898748006197707], np.uint64))
