"""Rows as Arrow batches of the form in `presage.datasets.recording`. Of the thread that writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from presage.datasets.recording import ENDS, FORECASTS, STEPS
from presage.serving_hooks.recorder.rows import EndRow, ForecastRow, StepRow
from presage.serving_hooks.recorder.states import StateColumn
from presage.serving_hooks.recorder.texts import Texts

Of = TypeVar("Of")

_PLAIN = ("step", "client_step", "step_id", "agent", "input_tokens", "output_tokens", "cached_input_tokens")
_ALSO = ("finish_reason", "started_at", "ended_at")


class Batches:
    """Makes the batches of one engine.

    Args:
        texts: what is kept of texts.
        wanted: the state columns that every step should have.
        counts: what is not kept, by reason.
    """

    def __init__(self, texts: Texts, wanted: Sequence[str], counts: Counter[str]) -> None:
        self._texts, self._wanted, self._counts = texts, wanted, counts
        self._states = {name: StateColumn(name, counts) for name in ("prefill_state", "completion_state")}

    def steps(self, rows: Sequence[StepRow]) -> pa.RecordBatch | None:
        """Steps that are over; None where not one can be written."""
        return self._all_but_bad(rows, self._steps)

    def forecasts(self, rows: Sequence[ForecastRow]) -> pa.RecordBatch | None:
        """Forecasts, likewise."""
        return self._all_but_bad(rows, _forecasts)

    def ends(self, rows: Sequence[EndRow]) -> pa.RecordBatch | None:
        """Ends of runs, likewise."""
        return self._all_but_bad(rows, _ends)

    def _steps(self, rows: Sequence[StepRow]) -> pa.RecordBatch:
        columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in (*_PLAIN, *_ALSO)}
        columns |= _names(rows)
        for name in ("input_text", "output_text"):
            columns[name] = [self._texts.kept(getattr(row, name), name) for row in rows]
        for name, column in self._states.items():
            states = [getattr(row, name) for row in rows]
            columns[name] = column.build(states)
            if name in self._wanted and None in states:
                self._counts[f"{name} that never came"] += states.count(None)
        return _batch(columns, STEPS)

    def _all_but_bad(
        self, rows: Sequence[Of], build: Callable[[Sequence[Of]], pa.RecordBatch]
    ) -> pa.RecordBatch | None:
        """One row that Arrow cannot take must not cost the others their place."""
        if not rows:
            return None
        try:
            return build(rows)
        except Exception as error:
            if len(rows) == 1:
                self._counts[f"row not written: {type(error).__name__}"] += 1
                return None
        middle = len(rows) // 2
        halves = (self._all_but_bad(rows[:middle], build), self._all_but_bad(rows[middle:], build))
        kept = [half for half in halves if half is not None]
        return pa.Table.from_batches(kept).combine_chunks().to_batches()[0] if kept else None


def _forecasts(rows: Sequence[ForecastRow]) -> pa.RecordBatch:
    lives = [row.live for row in rows]
    left = [live.remaining for live in lives]
    probabilities = [np.asarray(live.probabilities, np.float32).reshape(-1) for live in lives]
    columns: dict[str, Any] = {
        "step": [row.step for row in rows],
        "moment": [live.moment for live in lives],
        "made_at": [row.made_at for row in rows],
        "agents": [live.agents for live in lives],
        "probabilities": probabilities,
        "quantiles": [one.quantiles for one in left],
        "remaining_tokens": [one.tokens for one in left],
    }
    for name in ("source", "version", "evidence", "reason"):
        columns[name] = [getattr(live, name) for live in lives]
        columns[f"remaining_{name}"] = [getattr(one, name) for one in left]
    return _batch(columns | _names(rows), FORECASTS)


def _ends(rows: Sequence[EndRow]) -> pa.RecordBatch:
    columns = {name: [getattr(row, name) for row in rows] for name in ("steps", "how", "ended_at")}
    return _batch(columns | _names(rows), ENDS)


def _names(rows: Sequence[StepRow] | Sequence[ForecastRow] | Sequence[EndRow]) -> dict[str, list[Any]]:
    return {
        "run": [row.run.number for row in rows],
        "workflow_type": [row.run.workflow_type for row in rows],
        "workflow_id": [row.run.workflow_id for row in rows],
    }


def _batch(columns: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        value if isinstance(value := columns[field.name], pa.Array) else pa.array(value, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
