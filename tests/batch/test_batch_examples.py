"""The plans in examples/batch: each runs over the rows beside it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from batch_samples import ENGINE, Echo

from presage.batch.load import load_plan
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.rows import RowFile
from presage.batch.run import BatchRun
from presage.batch.schedule import soft_order

FOLDER = Path(__file__).parents[2] / "examples" / "batch"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("map_reduce", {"facts": 8, "doubts": 8, "numbers": 8, "writer": 8}),
        ("debate", {"optimist": 24, "critic": 24, "judge": 8}),
        ("reflection", {"writer": 4 * 2, "critic": 4}),  # four texts; what two rows ask alike is asked once
        ("refinement", {"reader": 4 * 3}),
        (
            "trading",
            {"business analyst": 2, "finances analyst": 2, "risks analyst": 2, "bull": 2, "bear": 2, "trader": 8},
        ),
    ],
)
def test_every_row_has_results_and_what_rows_share_is_asked_once(
    tmp_path: Path, name: str, asked: dict[str, int]
) -> None:
    rows = RowFile(FOLDER / "rows.jsonl")
    plan = load_plan(str(FOLDER / f"{name}.py"), rows.fields)
    rows.check(plan.fields)
    order = soft_order(plan, tree_of(plan, field_tokens(plan, rows)), rows)
    server = Echo(delay_s=0.001)
    run = BatchRun(plan, rows, [ENGINE], tmp_path / name, order=order, transport=server)
    try:
        asyncio.run(run.run())
        results = list(run.results())
    finally:
        run.close()
        rows.close()
    assert [row["id"] for row in results] == [f"row{number}" for number in range(1, 9)]
    assert all(row["error"] is None and all(row[output] for output in plan.outputs) for row in results)
    assert Counter(agent.replace("%20", " ") for _, _, agent in server.names) == asked
