"""A plan as a stage of Ray Data, on a local Ray and the simulated engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from presage.batch import Plan, call, function, given, template
from presage.batch.ray_data import PlanActor, ray_stage
from presage.batch.run import RunSettings
from presage.cli.demo_gateway import running
from presage.errors import ConfigurationError, EngineError
from presage.testing.servers import free_port

PLAN = """
from presage.batch import Plan, call, function, given, join, template

drafts = [call(role, template("{q}", q=given("question")), system=role, max_tokens=8) for role in ("a", "b")]
plan = Plan("review", answer=call("writer", join(drafts), max_tokens=4), size=function(len, given("question")))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("engine"), dict(os.environ)) as url:
        yield url


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.py"
    path.write_text(PLAN)
    return str(path)


def test_a_batch_keeps_its_rows_and_columns_and_gets_the_outputs_as_text(engine: str, plan: str) -> None:
    batch = pa.table({"id": ["x", "x"], "question": ["why", "how much"], "size": [0, 0], "other": [[1], [2]]})
    made = PlanActor(plan, [engine])(batch).to_pydict()
    assert list(made) == ["id", "question", "size", "other", "answer", "error"]
    assert (made["id"], made["other"], made["size"]) == (["x", "x"], [[1], [2]], ["3", "8"])
    assert all(made["answer"])
    assert made["error"] == [None, None]


def test_rows_that_fail_say_why_and_the_others_go_on(engine: str) -> None:
    failing = Plan("p", size=function(len, given("n")), said=call("x", template("{n}", n=given("n")), max_tokens=2))
    made = PlanActor(failing, [engine])(pa.table({"n": pa.array([[1, 2], None])})).to_pydict()
    assert made["size"] == ["2", None]
    assert made["error"] == [None, "function len raised TypeError: object of type 'NoneType' has no len()"]


def test_a_missing_column_engine_or_plan_is_said(engine: str, plan: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no column 'question', which the plan reads; it has n"):
        PlanActor(plan, [engine])(pa.table({"n": [1]}))
    with pytest.raises(EngineError, match="no OpenAI-compatible server"):
        PlanActor(plan, [f"http://127.0.0.1:{free_port()}"])(pa.table({"question": ["why"]}))
    with pytest.raises(ConfigurationError, match="no such Python file"):
        ray_stage(str(tmp_path / "none.py"), [engine])
    with pytest.raises(ConfigurationError, match="no engine to run on"):
        ray_stage(plan, [])


@pytest.mark.slow
@pytest.mark.engine
def test_a_dataset_goes_through_a_plan_on_ray(engine: str, plan: str, tmp_path: Path) -> None:
    ray: Any = pytest.importorskip("ray", reason="ray is not installed: pip install '.[distributed]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = [{"id": n, "question": f"why {n}"} for n in range(40)]
        review = ray_stage(plan, [engine], batch_size=10, settings=RunSettings(concurrency=8), cache=tmp_path / "c.db")
        made = sorted(review(ray.data.from_items(rows)).take_all(), key=lambda row: row["id"])
    finally:
        ray.shutdown()
    assert [row["question"] for row in made] == [f"why {n}" for n in range(40)]
    assert all(row["answer"] and row["error"] is None for row in made)
    assert [row["size"] for row in made] == [str(len(f"why {n}")) for n in range(40)]
