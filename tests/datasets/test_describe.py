"""The description of a trace: figures one can count by hand."""

from __future__ import annotations

import json

import pytest
from dataset_samples import row, trace, workflow

from presage.datasets.describe import describe, generated_names_warning, missing_counts_warning


def test_describe_counts_what_can_be_counted_by_hand() -> None:
    table = trace(
        *workflow("w", 3, task="q", success=True, output_tokens=10, prefill_state=[1.0]),
        *workflow("cut", 2, complete=False, start_time=0.0),
        row("other", workflow_type="z", input_text="hello"),
    )
    described = describe(table)
    json.dumps(described)
    assert (described["workflows"], described["steps"]) == (3, 6)
    kind = described["workflow_types"]["t"]
    assert (kind["workflows"], kind["steps"], kind["tasks"]) == (2, 5, 1)
    assert kind["agents"] == {"a": 3, "b": 2}
    assert (kind["length"]["min"], kind["length"]["max"], kind["length"]["mean"]) == (2.0, 3.0, 2.5)
    assert kind["output_tokens"]["p50"] == 10.0
    assert kind["input_tokens"] is None
    assert (kind["censored_share"], kind["success_share"], kind["text_share"]) == (0.5, 1.0, 0.0)
    assert kind["states"] == {"prefill_state": {"size": 1, "share": 0.6}}
    assert kind["started_at"] == ["1970-01-01T00:00:00+00:00"] * 2
    # "cut" stops after b: what follows is unknown, so b has one successor only, and a ends once.
    assert kind["call_graph"] == {
        "a": {
            "b": {"count": 2, "probability": pytest.approx(2 / 3)},
            "END": {"count": 1, "probability": pytest.approx(1 / 3)},
        },
        "b": {"a": {"count": 1, "probability": 1.0}},
    }
    assert described["workflow_types"]["z"]["text_share"] == 1.0


def test_finish_reasons_are_shares_of_the_steps_that_have_one() -> None:
    reasons = ["stop", "length", "stop", "stop", None]
    table = trace(*(row("w", i, finish_reason=r) for i, r in enumerate(reasons)), row("v", workflow_type="none"))
    described = describe(table)
    json.dumps(described)
    assert described["workflow_types"]["t"]["finish_reasons"] == {"stop": 0.75, "length": 0.25}
    assert described["workflow_types"]["none"]["finish_reasons"] == {}


def test_fan_out_is_siblings_and_joins() -> None:
    parents = [None, [0], [0], [1, 2]]
    table = trace(
        *(row("w", i, parent_steps=p) for i, p in enumerate(parents)),
        *(row("chain", i, parent_steps=p) for i, p in enumerate([None, [0]])),
    )
    assert describe(table)["workflow_types"]["t"]["fan_out_share"] == 3 / 6


def test_missing_counts_are_shares_of_llm_steps_and_a_warning_names_agents_and_remedy() -> None:
    both = {"input_tokens": 9, "output_tokens": 1}
    table = trace(
        *(row(f"w{i}", 0, "planner", **both) for i in range(6)),
        *(row(f"w{i}", 1, "writer", input_tokens=9, output_tokens=i or None) for i in range(2)),
        row("w0", 2, "coder", input_tokens=9),
        row("w1", 2, "search", kind="tool"),
    )
    described = describe(table)
    json.dumps(described)
    agents = {"coder": 1.0, "writer": 0.5}
    assert described["missing_counts"] == {"output_tokens": {"steps": 2, "of": 9, "share": 2 / 9, "agents": agents}}
    warning = missing_counts_warning(described)
    assert warning is not None
    assert "output_tokens are missing on 2 of 9 LLM steps (22.2%): coder 100%, writer 50% of their steps." in warning
    assert 'stream_options: {"include_usage": true}' in warning


@pytest.mark.parametrize(("missing", "warned"), [(0, False), (1, False), (2, True)])
def test_from_two_in_a_hundred_missing_counts_are_warned_of(missing: int, warned: bool) -> None:
    table = trace(*(row(f"w{i}", input_tokens=1, output_tokens=None if i < missing else 1) for i in range(100)))
    assert (missing_counts_warning(describe(table)) is not None) == warned


def test_names_that_look_generated_are_told() -> None:
    runs = [row(f"w{n}", agent="a", workflow_type=f"Turn {n}") for n in range(12)]
    told = generated_names_warning(describe(trace(*runs)))
    assert told is not None
    assert "12 workflow types for 12 workflows" in told
    topics = [one for n in range(12) for one in (row(f"w{n}", agent="writer"), row(f"w{n}", 1, f"Expert on {n}"))]
    told = generated_names_warning(describe(trace(*topics)))
    assert told is not None
    assert "12 of 13 agents of t seen in one workflow only" in told
    assert generated_names_warning(describe(trace(*(one for n in range(12) for one in workflow(f"w{n}", 2))))) is None


def test_agents_that_appear_and_vanish() -> None:
    rows = []
    for n in range(8):
        rows += [
            row(f"w{n}", 0, "both", started_at=f"2026-01-0{n + 1}T00:00:00Z"),
            row(f"w{n}", 1, "old" if n < 4 else "new", started_at=f"2026-01-0{n + 1}T00:00:01Z"),
        ]
    of = describe(trace(*rows))["workflow_types"]["t"]
    assert (of["appeared"], of["vanished"], of["agents_once"]) == (["new"], ["old"], 0)
