"""Events of a stream are those of an independent reader, and their bytes are the stream's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_samples import MESSAGE, message_events
from openai._streaming import SSEDecoder

from presage.gateway.streams import UsageFilter
from presage.serving_hooks.answer_reader import AnswerReader, Api
from presage.serving_hooks.event_stream import LONGEST, EventReader, StreamEvent

ENDS = st.sampled_from(["\n", "\r", "\r\n"])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), max_size=8)
FIELDS = st.sampled_from(["data: ", "data:", "data", "event: ", "id: ", "retry: ", ": ", ":", "other: ", ""])
COUNTS = '{"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lines of any kind, with ends of any kind, begun with a BOM or not, ended or not."""
    lines = draw(st.lists(st.tuples(FIELDS, TEXT | st.just(COUNTS), ENDS) | st.tuples(ENDS), max_size=24))
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + "".join(map("".join, lines)).encode()


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream, and its parts as the network may cut it."""
    stream = draw(streams())
    places = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return stream, [stream[begin:end] for begin, end in zip([0, *places], [*places, len(stream)], strict=True)]


def events_of(parts: Sequence[bytes]) -> list[StreamEvent]:
    reader = EventReader()
    found = [event for part in parts for event in reader.add(part)]
    return found + reader.end()


@given(cut_streams())
def test_events_are_those_of_another_reader_and_their_bytes_the_streams(case: tuple[bytes, list[bytes]]) -> None:
    stream, parts = case
    events = events_of(parts)
    assert b"".join(event.raw for event in events) == stream
    theirs = SSEDecoder().iter_bytes(iter([stream.removeprefix(b"\xef\xbb\xbf") + b"\n\n"]))
    assert [event.data.decode() for event in events if event.data] == [event.data for event in theirs if event.data]


@given(cut_streams())
def test_all_but_the_token_counts_pass_byte_for_byte(case: tuple[bytes, list[bytes]]) -> None:
    stream, parts = case
    filtered = UsageFilter()
    passed = b"".join([*(filtered.passed(part)[0] for part in parts), filtered.rest()[0]])
    kept = [event.raw for event in events_of([stream]) if (event.data or b"").strip() != COUNTS.encode()]
    assert passed == b"".join(kept)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_any_bytes_pass_and_raise_nothing(parts: list[bytes]) -> None:
    filtered, readers = UsageFilter(), [AnswerReader(api, streamed) for api in APIS for streamed in (True, False)]
    passed = b""
    for part in parts:
        passed += filtered.passed(part)[0]
        for reader in readers:
            reader.add(part)
    for reader in readers:
        reader.end()
        assert isinstance(reader.text, str | None)
    assert passed + filtered.rest()[0] == b"".join(parts)


APIS: tuple[Api, ...] = ("chat", "completions", "responses", "messages")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_of_any_size_passes_and_the_next_one_is_read(end: bytes) -> None:
    long = b"data: " + b"x" * (2 * LONGEST) + end
    parts = [(long + b"data: 1" + end)[place : place + 65_521] for place in range(0, len(long) + 20, 65_521)]
    events = events_of(parts)
    assert b"".join(event.raw for event in events) == long + b"data: 1" + end
    assert [event.data for event in events if event.data is not None] == [b"1"]


@pytest.mark.parametrize(
    ("event", "alone"),
    [
        ('{"choices":[],"usage":{"prompt_tokens":3}}', True),
        ('{"usage":{"prompt_tokens":3}}', True),
        ('{ "choices" : [ ] , "usage" : { "prompt_tokens" : 3 } }', True),
        ('{"choices":null,"usage":{"total_tokens":3}}', True),
        ('{"choices":[],"usage":null}', False),
        ('{"choices":[],"prompt_filter_results":[]}', False),
        ('{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}', False),
        ('{"choices":[{"index":0,"delta":{"content":"\\"choices\\":[],\\"usage\\":{}"}}]}', False),
        ('{"error":{"message":"x"},"usage":{"prompt_tokens":3}}', False),
        ('["choices","usage"]', False),
        ('"usage"', False),
    ],
)
@pytest.mark.parametrize("prefix", ["data: ", "data:", ": ping\nid: 7\nevent: x\ndata: ", "retry: 3\r\ndata:"])
def test_which_event_is_the_one_that_was_asked_for(event: str, alone: bool, prefix: str) -> None:
    stream = f"data: 1\n\n{prefix}{event}\n\ndata: [DONE]\n\n".encode()
    filtered = UsageFilter()
    assert filtered.passed(stream)[0] == (b"data: 1\n\ndata: [DONE]\n\n" if alone else stream)


def read(api: Api, *events: Any, streamed: bool = True) -> AnswerReader:
    reader = AnswerReader(api, streamed)
    for event in events:
        raw = event if isinstance(event, bytes) else json.dumps(event).encode()
        reader.add(b"data: " + raw + b"\n\n" if streamed else raw)
    reader.end()
    return reader


def test_an_answer_outlives_heartbeats_and_odd_values() -> None:
    finished = {"id": 7, "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}], "model": []}
    usage = {"choices": None, "usage": {"prompt_tokens": "12", "completion_tokens": 3.0, "queue_time": "x"}}
    reader = read("chat", b": keepalive", b"ping", b"", b"7", b"[1]", b"{", finished, usage, b"[DONE]")
    assert (reader.text, reader.finish_reason, reader.response_id) == ("hi", "stop", "7")
    assert (reader.input_tokens, reader.output_tokens, reader.is_error) == (12, 3, False)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("chat", {"error": {"message": "engine died", "code": 500}}),
        ("chat", {"choices": [], "error": "out of memory"}),
        ("chat", {"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}),
        ("completions", {"object": "error", "message": "engine died"}),
        ("messages", {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
        ("responses", {"type": "error", "code": "server_error", "message": "died"}),
        ("responses", {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x"}}}),
    ],
)
def test_an_error_in_an_answer_of_status_200_is_one(api: Api, event: dict[str, Any]) -> None:
    assert read(api, event, b"[DONE]").is_error
    assert read(api, event.get("response", event), streamed=False).is_error
    reader = AnswerReader(api, streamed=True)
    reader.add(b"event: error\ndata: the engine died\n\n")
    assert reader.is_error


def test_an_answer_of_anthropics_api_is_read_alike_streamed_and_whole() -> None:
    for reader in (read("messages", *message_events(MESSAGE)), read("messages", MESSAGE, streamed=False)):
        assert (reader.input_tokens, reader.cached_tokens, reader.output_tokens) == (9012, 9000, 42)
        assert (reader.response_id, reader.model, reader.finish_reason) == ("msg_1", "m", "tool_use")
        assert reader.tools == ["read", "list"]
        (message,) = reader.messages
        arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
        assert reader.text is not None
        assert 'read({"path":"a.py"})' in reader.text.replace(": ", ":")
        assert (message["content"], arguments) == ("I look.", [{"path": "a.py"}, {}])
