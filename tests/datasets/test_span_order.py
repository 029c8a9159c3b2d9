"""The order of lines and files tells nothing: any permutation, and any split into files, gives the same table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.read import read_traces

MS = 1_000_000
BEGIN = 1_767_225_600_000 * MS
KINDS = ("chat", "chat", "execute_tool", "invoke_agent", "invoke_workflow", "responses", "some_word")


def line(span: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


@st.composite
def exported(draw: st.DrawFn) -> list[str]:
    """Spans of some traces in lines: ties of milliseconds, lost parents, spans reported twice, twins, failures, copies
    in other traces, links."""
    lines = []
    for trace in range(draw(st.integers(1, 3))):
        session = draw(st.sampled_from([None, "s", "t"]))
        for number in range(draw(st.integers(1, 8))):
            kind = draw(st.sampled_from(KINDS))
            start = draw(st.integers(0, 4))
            attributes = {
                "gen_ai.operation.name": kind,
                "gen_ai.request.model": "m",
                "gen_ai.provider.name": "p",
                "gen_ai.agent.name": draw(st.sampled_from(["a", "b"])),
                "gen_ai.tool.name": "t" if kind == "execute_tool" else "",
                "gen_ai.usage.output_tokens": str(draw(st.integers(0, 2))),
                "session.id": session if number == 0 and session else "",
                "gen_ai.response.id": draw(st.sampled_from(["", "", "r"])),
            }
            span: dict[str, Any] = {
                "traceId": f"{trace + 1:032x}",
                "spanId": f"{number + 1:016x}",
                "parentSpanId": f"{draw(st.integers(0, number)):016x}" if number else "",
                "name": f"{kind} m",
                "startTimeUnixNano": str(BEGIN + start * MS),
                "endTimeUnixNano": str(BEGIN + draw(st.integers(start, 6)) * MS) if draw(st.booleans()) else "0",
                "status": {"code": draw(st.sampled_from([0, 2]))},
                "links": [{"traceId": f"{one:032x}"} for one in draw(st.sets(st.integers(1, 4), max_size=2))],
                "attributes": [{"key": key, "value": {"stringValue": of}} for key, of in attributes.items() if of],
            }
            if span["parentSpanId"] == "0" * 16:
                span["parentSpanId"] = "f" * 16  # never exported
            lines.append(line(span))
            again = draw(st.sampled_from(["", "", "reported again", "twin"]))
            if again == "reported again":
                lines.append(line(span | {"endTimeUnixNano": str(BEGIN + 9 * MS)}))
            elif again == "twin":
                lines.append(line(span | {"spanId": f"{number + 101:016x}"}))
    bare = {"traceId": "e" * 32, "spanId": "1" * 16, "name": "chat m", "startTimeUnixNano": str(BEGIN)}
    operation = {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}
    return [*lines, line(bare | {"attributes": [operation]})]  # at least one step


@settings(max_examples=60, deadline=None)
@given(lines=exported(), data=st.data())
def test_any_order_and_any_split_give_the_same_table(
    lines: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("spans")
    found = []
    for attempt in range(2):
        order = lines if attempt == 0 else data.draw(st.permutations(lines))
        files: list[Path] = []
        for part in range(attempt + 1):
            files.append(folder / f"{attempt}-{part}.json")
            files[-1].write_text(
                "".join(f"{one}\n" for one in order[part :: attempt + 1]) or line({}), encoding="utf-8"
            )
        found.append(read_traces(files))
    assert found[0].table.equals(found[1].table)
    assert found[0].notices == found[1].notices
