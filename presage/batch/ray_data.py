"""A plan as a stage of Ray Data: a dataset's rows in, the same rows with the plan's outputs as columns out.

    review = ray_stage("plan.py", ["http://engine-1:8000", "http://engine-2:8000"], batch_size=1000, concurrency=2)
    ds = review(ray.data.read_parquet("reviews/"))

Used as a processor of `ray.data.llm`. An actor runs batch after batch: within a batch work is shared and ordered as in
a run by itself, between batches and actors nothing is, but for `cache`. Ray asks again for a batch that it lost, so
a batch has its folder for as long as it runs, and a dataset's results are written by Ray, once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from presage.batch.answers import Answers
from presage.batch.load import load_plan
from presage.batch.plan import Plan, text_columns
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.run import BatchRun, RunSettings
from presage.batch.schedule import soft_order
from presage.errors import ConfigurationError
from presage.wording import install

_MB = 1_000_000


def ray_stage(
    plan: Plan | str,
    engines: Sequence[str],
    *,
    batch_size: int = 1000,
    concurrency: int = 1,
    settings: RunSettings | None = None,
    cache: Path | None = None,
    cache_mb: int = 1000,
) -> Callable[[Any], Any]:
    """A function from a dataset to a dataset with the plan's outputs and `error` as columns.

    All of these are texts; values that are no text are JSON. Rows that fail have their reason in `error`.

    Args:
        plan: or the address of its file, which every node can read: `plan.py`, `graph.py:graph`.
        engines: addresses of OpenAI-compatible servers, the same for every actor.
        batch_size: rows of a batch. Work is shared and ordered within one.
        concurrency: actors. Each has `settings.concurrency` calls at each engine.
        cache: file of answers at temperature 0, on each node; it holds answers as text.

    Raises:
        ConfigurationError: ray is missing, or the plan cannot be made.
    """
    try:
        import ray.data  # noqa: F401
    except ImportError:
        raise ConfigurationError(f"ray_stage needs the extra distributed: {install('distributed')}") from None
    if not engines:
        raise ConfigurationError("no engine to run on; give its address, such as http://127.0.0.1:8000")
    if isinstance(plan, str):
        load_plan(plan)  # a mistake is told here, not by an actor
    (settings or RunSettings()).check()
    arguments = {"plan": plan, "engines": engines, "settings": settings, "cache": cache, "cache_mb": cache_mb}

    def stage(dataset: Any) -> Any:
        return dataset.map_batches(
            PlanActor,
            fn_constructor_kwargs=arguments,
            batch_size=batch_size,
            batch_format="pyarrow",
            concurrency=concurrency,
        )

    return stage


class PlanActor:
    """Runs batches of rows through a plan, one after the other."""

    def __init__(
        self,
        plan: Plan | str,
        engines: Sequence[str],
        settings: RunSettings | None = None,
        cache: Path | None = None,
        cache_mb: int = 1000,
    ) -> None:
        self._plan, self._engines, self._settings = plan, engines, settings
        self._cache, self._cache_mb = cache, cache_mb

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the outputs as columns; raises EngineError if an engine is not there or goes away."""
        rows = [{name: value for name, value in row.items() if name != "id"} for row in batch.to_pylist()]
        plan = self._plan if isinstance(self._plan, Plan) else load_plan(self._plan, batch.column_names)
        if missing := [field for field in plan.fields if field not in batch.column_names]:
            there = ", ".join(batch.column_names)
            raise ConfigurationError(f"the dataset has no column {missing[0]!r}, which the plan reads; it has {there}")
        order = soft_order(plan, tree_of(plan, field_tokens(plan, rows)), rows, workers=len(self._engines))
        with tempfile.TemporaryDirectory(prefix="presage-batch-") as folder, ExitStack() as opened:
            cache = None
            if self._cache is not None:  # here: Ray makes the actor in another thread, and SQLite keeps to one
                cache = opened.enter_context(closing(Answers(self._cache, self._cache_mb * _MB)))
            run = BatchRun(plan, rows, self._engines, Path(folder), order=order, settings=self._settings, cache=cache)
            opened.callback(run.close)
            asyncio.run(run.run())
            columns = text_columns(list(run.results()), [*plan.outputs, "error"])
        for name, values in columns.items():
            column = pa.array(values, pa.string())
            position = batch.column_names.index(name) if name in batch.column_names else -1
            batch = batch.append_column(name, column) if position < 0 else batch.set_column(position, name, column)
        return batch
