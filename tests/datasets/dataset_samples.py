"""Small valid traces, and any valid trace as a hypothesis strategy."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from presage.datasets.schema import PREFIX_BLOCK_TOKENS, conform, trace_schema
from presage.datasets.schema.validate import validate

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def row(workflow: str = "w", step: int = 0, agent: str = "a", workflow_type: str = "t", **more: Any) -> dict[str, Any]:
    return {"workflow_type": workflow_type, "workflow_id": workflow, "step": step, "agent": agent, **more}


def raw(*rows: dict[str, Any]) -> pa.Table:
    """A table of the rows; a key that only some have is null in the others."""
    names = list(dict.fromkeys(name for one in rows for name in one))
    return pa.table({name: [one.get(name) for one in rows] for name in names})


def trace(*rows: dict[str, Any]) -> pa.Table:
    """A valid trace of the rows given."""
    return validate(conform(raw(*rows), "test"), "test")


def workflow(name: str, length: int, workflow_type: str = "t", **more: Any) -> list[dict[str, Any]]:
    return [row(name, step, "ab"[step % 2], workflow_type, **more) for step in range(length)]


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8).filter(
    lambda name: bool(name.strip()) and name != "END"
)
TEXT = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNT = st.none() | st.integers(1, 2**31 - 1)  # 0 is no count


@st.composite
def traces(draw: st.DrawFn, min_workflows: int = 1) -> pa.Table:
    """Any valid trace: odd names, nulls anywhere they may be, ties in time, states on some rows."""
    sizes = draw(st.tuples(st.none() | st.integers(1, 3), st.none() | st.integers(1, 3)))
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from(["t", "T/ü", "a=b%"]) | NAMES, NAMES),
            min_size=min_workflows,
            max_size=5,
            unique=True,
        )
    )
    rows: list[dict[str, Any]] = []
    for workflow_type, workflow_id in keys:
        task = draw(st.none() | st.sampled_from(["q1", "q2", "q3"]))
        success, complete = draw(st.none() | st.booleans()), draw(st.booleans())
        clock = EPOCH + dt.timedelta(microseconds=draw(st.integers(0, 10**9)))
        for step in range(draw(st.integers(1, 4))):
            clock += dt.timedelta(microseconds=draw(st.integers(0, 10**6)))
            timed = draw(st.booleans())
            new = row(workflow_id, step, draw(NAMES), workflow_type, task=task, success=success, complete=complete)
            new |= {
                "parent_steps": draw(st.none() | st.lists(st.integers(0, step - 1), max_size=2) if step else st.none()),
                "kind": draw(st.sampled_from(["llm", "tool"])),
                "model": draw(TEXT),
                "input_tokens": draw(COUNT),
                "output_tokens": draw(COUNT),
                "cached_input_tokens": draw(COUNT),
                "prefix_blocks": draw(st.none() | st.lists(st.just([0, 0]), max_size=1)),
                "finish_reason": draw(TEXT),
                "started_at": clock if timed else None,
                "ended_at": clock + dt.timedelta(seconds=1) if timed else None,
                "system_prompt": draw(TEXT),
                "input_text": draw(TEXT),
                "output_text": draw(TEXT),
                "state_layer": draw(COUNT),
                "identity_confidence": draw(st.none() | st.floats(0, 1, width=32)),
                "step_score": draw(st.none() | st.floats(0, 1, width=32)),
            }
            for name, size in zip(("prefill_state", "completion_state"), sizes, strict=True):
                if size is not None:
                    number = st.floats(-1000, 1000, width=16)
                    new[name] = draw(st.none() | st.lists(number, min_size=size, max_size=size))
            if new["input_tokens"] is not None and new["input_tokens"] < PREFIX_BLOCK_TOKENS:
                new["prefix_blocks"] = None
            rows.append(new)
    columns = trace_schema(*sizes)
    return validate(pa.Table.from_pylist(rows, schema=columns), "drawn")
