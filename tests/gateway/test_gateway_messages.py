"""Anthropic's messages API (Claude Code): recognised, decided on, filtered and recorded as chat is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from message_samples import MESSAGE, message_events
from served import Seen, before, eventually
from starlette.responses import JSONResponse, Response

from presage.datasets.read import read_traces
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.identifier import Identifier, Identity
from presage.serving_hooks.identity.request import ApiRequest

PATH: Final = "/v1/messages"
TOOLS: Final = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
SESSION: Final = "0f8fad5b-d9cb-469f-a165-70867728950e"


def body(*messages: dict[str, Any], billing: int = 0, **more: Any) -> dict[str, Any]:
    """A request as Claude Code writes it."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37; cch={billing:05x};"},
        {"type": "text", "text": "You are a coder of few words.", "cache_control": {"type": "ephemeral"}},
    ]
    return {"model": "m", "max_tokens": 64, "system": system, "messages": list(messages), "tools": TOOLS, **more}


ASKED: Final = {"role": "user", "content": [{"type": "text", "text": "Mend the first of the two failing tests."}]}
ANSWERED: Final = {"role": "assistant", "content": MESSAGE["content"]}
RESULTS: Final = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "assert 1 == 2"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "a.py b.py", "is_error": False},
        {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
    ],
}


def answer(seen: Seen) -> Response:
    if not seen.body.get("stream"):
        return JSONResponse(MESSAGE)
    lines = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in message_events(MESSAGE))
    return Response(lines, media_type="text/event-stream")


@pytest.mark.parametrize("streams", [True, False])
def test_a_session_of_claude_code_is_one_workflow_with_all_its_figures(tmp_path: Path, streams: bool) -> None:
    recorder = {"folder": str(tmp_path), "text": "on"}
    with before(answer, forecasts={"recorder": recorder}, modes={"default": "shadow"}) as (url, server, front):
        for number, messages in enumerate(([ASKED], [ASKED, ANSWERED, RESULTS])):
            sent = json.dumps(body(*messages, billing=number, stream=streams), indent=1).encode()
            got = httpx.post(url + PATH, content=sent)
            assert got.content == bytes(answer(server.seen[-1]).body)
            assert server.seen[-1].content == sent
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)
    rows = read_traces([str(tmp_path)]).table.to_pylist()
    assert len(rows) == 2
    assert len({(row["workflow_id"], row["agent"]) for row in rows}) == 1
    for row in rows:
        assert (row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]) == (9012, 9000, 42)
        assert (row["finish_reason"], row["model"]) == ("tool_use", "m")
        assert row["system_prompt"] == "You are a coder of few words."
        assert 'read({"path":"a.py"})' in row["output_text"].replace('": "', '":"')
        assert "Hm." not in row["output_text"]
    assert "assert 1 == 2" in rows[1]["input_text"]
    assert "read(" in rows[1]["input_text"]


@pytest.mark.parametrize("dialect", ["vllm", "presage", "vllm-router"])
def test_it_is_filtered_and_annotated_as_chat_is(dialect: str) -> None:
    sent = body(ASKED, priority=-9, vllm_xargs={"workflow_type": "t", "workflow_id": "w", "agent": "a", "mine": 1})
    headers = {"x-vllm-priority": "-9", "x-presage-agent": "coder"}
    with before(answer, upstream={"dialect": dialect}) as (url, server, front):
        for number in range(9):
            sent["vllm_xargs"] |= {"workflow_id": f"w{number}", "workflow_end": "true"}
            assert httpx.post(url + PATH, json=sent, headers=headers).status_code == 200
        seen = server.seen[-1]
        assert "priority" not in seen.body
        assert "x-presage-agent" not in seen.headers
        assert seen.headers.get("x-vllm-priority") == ("42" if dialect == "vllm" else None)
        assert seen.body["vllm_xargs"]["mine"] == 1
        if dialect != "vllm":
            assert seen.body["vllm_xargs"]["agent"] == "coder"
        assert all(isinstance(value, str | int) for value in seen.body["vllm_xargs"].values())
        assert front.decisions.request_forecasts.outputs.finite(("t", "coder")) == (42.0, 42.0)


def test_a_refusal_is_one_for_both_sdks() -> None:
    with before(answer) as (url, _, _):
        error = httpx.post(url + PATH, content=b"[1]").json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert error["error"]["message"].startswith("The body is a JSON list")


@pytest.mark.parametrize(
    "user", [f"user_ab12_account__session_{SESSION}", json.dumps({"device_id": "d", "session_id": SESSION})]
)
def test_claude_code_names_its_session_in_the_user_id(user: str) -> None:
    identifier = Identifier(counts=EventCounts(), most_conversations=9)

    def identity(**more: Any) -> Identity:
        return identifier.identify(ApiRequest("messages", body(ASKED, **more), {}, ""))

    first, second = (identity(metadata={"user_id": user}) for _ in range(2))
    assert first.step.workflow == second.step.workflow
    assert first.workflow_source == "session"
    assert identity(metadata={"user_id": "a person"}).workflow_source != "session"
