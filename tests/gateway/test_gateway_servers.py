"""Servers differ: in what they take of the gateway's additions, how they end events, and where they put errors."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any, Final

import httpx
import pytest
from served import Seen, before, eventually
from starlette.responses import JSONResponse, Response

CHAT: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {"model": "m", "messages": [{"role": "user", "content": "Where is parcel 17?"}]}
WORD: Final = {
    "id": "c-1",
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "Here"}, "finish_reason": None}],
}
LAST: Final = {"id": "c-1", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
COUNTS: Final = {"id": "c-1", "model": "m", "choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}
BARE_COUNTS: Final = {"usage": COUNTS["usage"]}


def stream(*events: Any, end: str = "\n\n", kind: str = "text/event-stream; charset=utf-8") -> Response:
    lines = "".join(f"data: {json.dumps(event)}{end}" for event in events) + f"data: [DONE]{end}"
    return Response(lines, headers={"content-type": kind})


def text(*events: Any, end: str = "\n\n") -> str:
    return bytes(stream(*events, end=end).body).decode()


@pytest.mark.parametrize("mode", ["off", "shadow", "on"])
def test_a_client_gets_the_events_that_it_would_get_without_us(mode: str) -> None:
    ends = "\n\n", "\r\n\r\n", "\r\r", "\n\r\n"
    shapes = itertools.product(ends, (COUNTS, BARE_COUNTS, {**COUNTS, "choices": None}))
    sent: list[tuple[str, Any]] = []

    def answer(seen: Seen) -> Response:
        end, counts = sent[-1]
        asked = seen.body.get("stream_options", {}).get("include_usage")
        return stream(WORD, LAST, *([counts] if asked else []), end=end)

    with before(answer, modes={"default": mode}) as (url, server, _):
        for end, counts in shapes:
            sent.append((end, counts))
            assert httpx.post(url + CHAT, json={**BODY, "stream": True}).text == text(WORD, LAST, end=end)
            assert server.seen[-1].body["stream_options"] == {"include_usage": True}
            asks = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
            assert httpx.post(url + CHAT, json=asks).text == text(WORD, LAST, counts, end=end)


def refuses(*fields: str, status: int = 422) -> Callable[[Seen], Response]:
    """A server that refuses these fields."""

    def answer(seen: Seen) -> Response:
        unknown = sorted(set(fields) & seen.body.keys())
        if unknown:
            return JSONResponse({"detail": [{"type": "extra_forbidden", "loc": ["body", unknown[0]]}]}, status)
        return stream(WORD, LAST) if seen.body.get("stream") else JSONResponse({"choices": []})

    return answer


@pytest.mark.parametrize("mode", ["off", "shadow", "on"])
@pytest.mark.parametrize(("path", "status"), [(CHAT, 400), (CHAT, 500), ("/v1/completions", 422)])
def test_a_server_that_refuses_token_counts_is_asked_once_more_and_then_never(
    mode: str, path: str, status: int
) -> None:
    given = {"modes": {"default": mode}, "upstream": {"dialect": "presage"}}
    with before(refuses("stream_options", status=status), **given) as (url, server, _):
        for _ in range(3):
            answer = httpx.post(url + path, json={"model": "m", "prompt": "a", "messages": [], "stream": True})
            assert (answer.status_code, answer.text) == (200, text(WORD, LAST))
    assert ["stream_options" in seen.body for seen in server.seen] == [True, False, False, False]
    assert ["vllm_xargs" in seen.body for seen in server.seen] == [mode == "on"] * 4


def test_a_server_that_refuses_annotations_gets_the_clients_bytes() -> None:
    content = json.dumps(BODY, indent=2).encode()
    with before(refuses("vllm_xargs"), upstream={"dialect": "presage"}) as (url, server, _):
        for _ in range(2):
            assert httpx.post(url + CHAT, content=content).status_code == 200
    assert ["vllm_xargs" in seen.body for seen in server.seen] == [True, False, False]
    assert server.seen[-1].content == content


def test_what_is_wrong_with_the_clients_own_request_is_its_servers_word() -> None:
    refused = {"error": {"message": "no such field"}}
    with before(lambda _: JSONResponse(refused, 400)) as (url, server, _):
        answer = httpx.post(url + CHAT, json={**BODY, "stream": True, "oops": 1})
        assert (answer.status_code, answer.json()) == (400, refused)
        assert "stream_options" not in server.seen[-1].body
    with before(lambda seen: JSONResponse(refused, 400) if "oops" in seen.body else stream(LAST)) as (url, server, _):
        httpx.post(url + CHAT, json={**BODY, "stream": True})
        assert httpx.post(url + CHAT, json={**BODY, "stream": True, "oops": 1}).status_code == 400
        assert len(server.seen) == 2, "a server that has taken token counts is not asked twice"


ERROR: Final = {"error": {"message": "the engine died", "type": "server_error", "code": 500}}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (CHAT, lambda: stream(WORD, ERROR)),
        ("/v1/completions", lambda: stream({"object": "error", "message": "died"})),
        ("/v1/responses", lambda: stream({"type": "response.failed", "response": {"status": "failed"}})),
        ("/v1/messages", lambda: stream({"type": "error", "error": {"type": "overloaded_error"}})),
        (CHAT, lambda: JSONResponse(ERROR)),
        (CHAT, lambda: Response("event: error\ndata: died\n\n", media_type="text/event-stream")),
    ],
)
def test_an_error_in_a_200_is_a_failure_and_passes_as_it_came(path: str, answer: Callable[[], Response]) -> None:
    with before(lambda _: answer()) as (url, _, front):
        got = httpx.post(url + path, json={**BODY, "prompt": "a", "input": "a", "stream": True})
        assert (got.status_code, got.content) == (200, bytes(answer().body))
        page = httpx.get(url + "/metrics").text
        assert 'reason="error in its answer"' in page
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)
        assert not len(front.decisions.request_forecasts.outputs)


def test_an_answer_is_read_as_it_comes_and_not_as_it_was_asked_for() -> None:
    whole: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Here"}}]}
    whole |= {"usage": {"prompt_tokens": 12, "completion_tokens": 3}}
    answers: list[Response] = [JSONResponse(whole), stream(WORD, LAST), Response(zlib.compress(b"{}"))]
    answers[-1].headers["content-encoding"] = "deflate"
    with before(lambda _: answers[0]) as (url, _, front):
        while answers:
            asked = {**BODY, "stream": len(answers) != 2}
            raw = bytes(answers[0].body)
            with httpx.stream("POST", url + CHAT, json=asked) as got:
                assert b"".join(got.iter_raw()) == raw
            answers.pop(0)
        assert eventually(lambda: len(front.decisions.request_forecasts.outputs) == 1)
