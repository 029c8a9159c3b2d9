"""Bodies: who sends slowly or much takes nothing from others, and how much the event loop walks through is bounded."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
from served import Seen, before, eventually
from starlette.responses import JSONResponse, Response

from presage.gateway.bodies import parsed_body, top_of_body
from presage.gateway.config import Limits, gateway_config
from presage.gateway.outcomes import outcome_report
from presage.gateway.refusal import Refusal
from presage.gateway.serve import build_decisions
from presage.serving_hooks.identity.request import ApiRequest, Endpoint

CHAT: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {"model": "m", "messages": [{"role": "user", "content": "Where is parcel 17?"}]}


def well(_: Seen) -> Response:
    return JSONResponse({"choices": []})


def beginning(url: str, size: int, sent: int, *headers: str) -> socket.socket:
    """A connection with a request of which only a part has been sent."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port), timeout=60)
    head = [f"POST {CHAT} HTTP/1.1", "Host: a", f"Content-Length: {size}", *headers]
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + b" " * sent)
    return connection


def test_slow_bodies_take_no_place_from_others() -> None:
    with before(well, limits={"requests": 4}) as (url, _, front), ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(beginning(url, 100, 1))
        assert eventually(lambda: front.bodies.size == 40)
        assert front.in_flight == 0
        for _ in range(5):
            assert httpx.post(url + CHAT, json=BODY).status_code == 200


def test_the_slowest_body_makes_room_for_others() -> None:
    limits = {"body_mb": 1, "bodies_mb": 1}
    with before(well, limits=limits) as (url, _, front), ExitStack() as stack:
        slow = [stack.enter_context(beginning(url, 400_000, 390_000)) for _ in range(2)]
        assert eventually(lambda: front.bodies.size == 780_000)
        content = json.dumps({**BODY, "note": "x" * 500_000})
        assert httpx.post(url + CHAT, content=content).status_code == 200
        assert b"503" in slow[0].recv(100)
        assert eventually(lambda: front.bodies.size == 390_000)
        slow[1].sendall(json.dumps(BODY).encode().rjust(10_000))
        assert b"200 OK" in slow[1].recv(100)
    assert front.bodies.size == 0


def test_a_tenant_takes_its_share_of_places_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", "one,two")
    limits = {"bodies_mb": 1, "tenant_share": 0.5}
    with before(well, keys_variable="GATEWAY_KEYS", limits=limits) as (url, _, front), ExitStack() as stack:
        stack.enter_context(beginning(url, 500_000, 400_000, "X-Api-Key: one"))
        assert eventually(lambda: front.bodies.size == 400_000)
        content = json.dumps({**BODY, "note": "x" * 300_000})
        for key, status in (("one", 429), ("two", 200)):
            assert httpx.post(url + CHAT, content=content, headers={"x-api-key": key}).status_code == status
        with front.slots.held("key-0"):
            front.slots.check("key-0")
        with ExitStack() as held:
            for _ in range(1024):
                held.enter_context(front.slots.held("key-0"))
            assert httpx.post(url + CHAT, json=BODY, headers={"x-api-key": "one"}).status_code == 429
            assert httpx.post(url + CHAT, json=BODY, headers={"x-api-key": "two"}).status_code == 200


LIMITS: Final = Limits()
TINY: Final = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [TINY] * 20_000},
        {"messages": [1] * 20_000},
        {"messages": [1, *[TINY] * 20_000]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        {"messages": [{"role": "user", "content": [{"type": "x", "text": [[]] * 20_000}]}]},
        {"messages": [{str(number): "a" for number in range(20_000)}]},
        {"input": [{"type": "message", "content": [{"text": "a"}] * 20_000}]},
        {"prompt": ["a"] * 20_000},
        {"prompt": [{"text": "a"}] * 20_000},
        {"messages": [], "system": [{"type": "text", "text": "a"}] * 20_000},
        {"messages": [], **{f"key{number}": 1 for number in range(1_100_000)}},
        {"messages": [], "metadata": [[]] * 250_000},
    ],
)
def test_what_would_keep_the_event_loop_is_refused(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    with pytest.raises(Refusal, match="more than") as refused:
        parsed_body(raw, LIMITS)
    assert refused.value.status == 413
    assert "[limits]" in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": '{"a": [1, 2, {"b": "c"}]}, ' * 20_000}]},
        {"prompt": [7] * 900_000},
        {"messages": [{"role": "user", "content": '[{"a": 1}, {"b": "\\\\"}], ' * 200_000}]},
        {"prompt": [[7] * 1000] * 100},
        {"messages": [TINY] * 9_000},
        {"messages": [TINY], "tools": [{"function": {"name": "a", "parameters": {"x": [{}] * 50}}}] * 300},
    ],
)
def test_what_is_long_and_simple_passes(body: dict[str, Any]) -> None:
    assert parsed_body(json.dumps(body).encode(), LIMITS) == body


@pytest.mark.parametrize(
    "raw", [b'{"a": "' + b'\\"' * 10**6, b'{"a": "' + b"\\\\" * 10**6 + b'"', b'"' * 10**6, b"{" * 10**6]
)
def test_a_body_that_breaks_off_is_refused_in_linear_time(raw: bytes) -> None:
    with pytest.raises(Refusal):
        parsed_body(raw, Limits(values=1, messages=1))


def test_a_body_that_is_passed_on_is_parsed_only_as_far_as_it_is_read() -> None:
    body = {"model": "m", "input": [[7] * 8000] * 200, "metadata": {"session_id": "s"}}
    raw = json.dumps(body).encode()
    read = top_of_body(raw, LIMITS)
    assert (read["model"], read["metadata"]) == ("m", {"session_id": "s"})
    assert json.loads(bytes(read["input"])) == body["input"]
    assert calls(lambda: top_of_body(raw, LIMITS)) < 100
    for odd in (b"", b"[1]", b"not json", b"\xff", b"[" * 100_000):
        assert top_of_body(odd, LIMITS) == {}
    with pytest.raises(Refusal):
        top_of_body(json.dumps({"metadata": {"a": [1] * 20_000}}).encode(), LIMITS)


def calls(work: Callable[[], object]) -> int:
    """Function calls of our code and of the standard library."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


MANY: Final = 9_000
ENTRIES: Final = ("messages", "parts", "blocks", "items", "calls", "tokens")
HOSTILE: Final[dict[str, tuple[Endpoint, dict[str, Any], dict[str, str]]]] = {
    "messages": ("chat", {"messages": [TINY] * MANY}, {}),
    "parts": ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]}, {}),
    "blocks": ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}] * MANY}]}, {}),
    "items": ("responses", {"input": [{"type": "message", "content": "a"}] * MANY}, {}),
    "tokens": ("completions", {"prompt": list(range(500_000))}, {}),
    "tools": ("chat", {"messages": [TINY], "tools": [{"function": {"name": "a" * 99}}] * 200_000}, {}),
    "keys": ("chat", {"messages": [TINY], **{f"workflow_idd{number}": "a" for number in range(200_000)}}, {}),
    "metadata": ("chat", {"messages": [TINY], "metadata": {f"agennt{number}": "a" for number in range(200_000)}}, {}),
    "xargs": ("chat", {"messages": [TINY], "vllm_xargs": {f"agent-{number}": "a" for number in range(200_000)}}, {}),
    "names": ("chat", {"messages": [TINY], "vllm_xargs": {"workflow_id": "w" * 10**7, "agent": "a" * 10**7}}, {}),
    "context": ("chat", {"messages": [TINY], "agentic_context": '{"a": ' + "[" * 10**6}, {}),
    "text": ("chat", {"messages": [{"role": "system", "content": "1-" * 10**6}, TINY]}, {}),
    "calls": ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}] * MANY}]}, {}),
    "headers": ("chat", {"messages": [TINY]}, {"baggage": "a=b," * 10**5, "traceparent": "0-" * 10**5}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_decision_makes_a_bounded_number_of_calls(what: str) -> None:
    forecasts = dict.fromkeys(("next_agent", "remaining_length", "return_time", "profile", "reload_s"))
    config = gateway_config({"upstreams": [{"url": "http://a"}], "forecasts": forecasts}, "test")
    decisions = build_decisions(config)
    endpoint, body, headers = HOSTILE[what]

    def decide() -> None:
        decision = decisions.arrived(ApiRequest(endpoint, {"model": "m", **body}, headers, "key-0"))
        decisions.failed(decision)

    decide()  # what is imported and compiled only once
    assert calls(decide) < (100 * MANY if what in ENTRIES else 5_000)
    decisions.close()


@pytest.mark.parametrize("inner", ['{"content": %s}', "[%s]", '{"text": %s}', '{"type": "text", "content": [%s]}'])
def test_a_deep_body_is_decided_on_like_any(inner: str) -> None:
    content = '"a"'
    for _ in range(400):
        content = inner % content
    raw = f'{{"model": "m", "messages": [{{"role": "user", "content": {content}}}]}}'.encode()
    with before(well) as (url, server, _):
        assert httpx.post(url + CHAT, content=raw).status_code == 200
        assert server.seen[-1].content == raw


def test_a_long_unknown_field_of_a_report_is_compared_by_its_beginning() -> None:
    def report() -> None:
        with pytest.raises(Refusal, match="did you mean success"):
            outcome_report({"sucess" + "-" * 200_000: 1}, "")

    report()
    assert calls(report) < 2_000
