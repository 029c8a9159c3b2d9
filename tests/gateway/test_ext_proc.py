"""The gateway as Envoy's external processor, asked over gRPC by a client that plays Envoy."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from served import WITHOUT_MODELS, served

from presage.datasets.read import read_traces
from presage.gateway.config import gateway_config
from presage.gateway.front import Front
from presage.gateway.hosts.ext_proc import DESTINATION, MESSAGES, SERVICE, serving
from presage.gateway.serve import beside, build

BUFFERED, STREAMED, DUPLEX = 2, 1, 4
ONE = ({"url": "http://10.0.0.1:8000", "models": ("small",), "dialect": "presage"},)
TWO = (*ONE, {"url": "http://10.0.0.2:8000", "models": ("small",), "dialect": "presage"})
HEADERS = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json", "host": "h"}


def front(upstreams: Any = ONE, **given: Any) -> Front:
    return build(gateway_config({"upstreams": upstreams, "forecasts": WITHOUT_MODELS, **given}, "test"))


def chat(text: str = "Plan it.", **more: Any) -> bytes:
    messages = [{"role": "system", "content": "You plan."}, {"role": "user", "content": text}]
    return json.dumps({"model": "small", "messages": messages, **more}).encode()


def answer(text: str = "plan") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    return json.dumps({"id": "chatcmpl-1", "model": "small", "choices": [choice], "usage": usage}).encode()


def event(**more: Any) -> bytes:
    return b"data: " + json.dumps({"id": "chatcmpl-1", "model": "small", **more}).encode() + b"\n\n"


class Envoy:
    """One stream: sends what Envoy sends, and takes what it is told."""

    def __init__(self, call: Any, body_mode: int, answer_mode: int = STREAMED) -> None:
        self._call, self._modes = call, (body_mode, answer_mode)

    async def send(self, **fields: Any) -> None:
        await self._call.write(MESSAGES["ProcessingRequest"](**fields))

    async def told(self) -> Any:
        return await asyncio.wait_for(self._call.read(), 20)

    async def headers(self, headers: dict[str, str], kind: str = "request_headers", ends: bool = False) -> None:
        made = MESSAGES["HttpHeaders"](end_of_stream=ends)
        for name, value in headers.items():
            made.headers.headers.add(key=name, raw_value=value.encode())
        first = {"protocol_config": dict(zip(("request_body_mode", "response_body_mode"), self._modes, strict=True))}
        await self.send(**{kind: made}, **(first if kind == "request_headers" else {}))

    async def body(self, body: bytes, kind: str = "request_body", ends: bool = True) -> None:
        await self.send(**{kind: {"body": body, "end_of_stream": ends}})

    async def request(self, body: bytes, **headers: str) -> Any:
        """What Envoy is told of a buffered request."""
        await self.headers({**HEADERS, **headers})
        assert (await self.told()).HasField("request_headers")
        await self.body(body)
        return (await self.told()).request_body.response

    async def response(self, *parts: bytes, status: int = 200) -> list[Any]:
        """What Envoy is told of the parts of a response."""
        await self.headers({":status": str(status)}, "response_headers")
        assert (await self.told()).HasField("response_headers")
        found = []
        for number, part in enumerate(parts):
            await self.body(part, "response_body", ends=number == len(parts) - 1)
            found.append((await self.told()).response_body.response)
        return found

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self.told() is grpc.aio.EOF

    def cancel(self) -> None:
        self._call.cancel()


def stream(channel: grpc.aio.Channel, mode: int = BUFFERED, back: int = STREAMED) -> Envoy:
    request, response = MESSAGES["ProcessingRequest"].SerializeToString, MESSAGES["ProcessingResponse"].FromString
    return Envoy(channel.stream_stream(f"/{SERVICE}/Process", request, response)(), mode, back)


def played(of: Front, *plays: Callable[[Envoy], Awaitable[Any]], mode: int = BUFFERED, back: int = STREAMED) -> Any:
    """Plays, one after the other, each on a stream of its own; the result of the last."""

    async def run() -> Any:
        result = None
        most = [("grpc.max_receive_message_length", -1)]
        async with (
            serving(of, "127.0.0.1:0") as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=most) as channel,
        ):
            for play in plays:
                result = await play(stream(channel, mode, back))
        return result

    return asyncio.run(run())


def set_headers(response: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in response.header_mutation.set_headers}


def unchanged(response: Any) -> bool:
    return not response.HasField("header_mutation") and not response.HasField("body_mutation")


@pytest.fixture
def single() -> Iterator[Front]:
    of = front()
    yield of
    of.decisions.close()


def test_a_request_is_annotated_and_its_answer_read(single: Front) -> None:
    async def play(envoy: Envoy) -> Any:
        told = await envoy.request(chat(), **{"x-presage-workflow-id": "w1", "x-presage-workflow-type": "report"})
        assert single.decisions.explain("report", "w1")["alive"]
        parts = await envoy.response(answer()[:40], answer()[40:])
        assert all(map(unchanged, parts))
        await envoy.end()
        return told

    told = played(single, play)
    body = json.loads(told.body_mutation.body)
    assert body["vllm_xargs"]["workflow_id"] == "w1"
    assert body["messages"] == json.loads(chat())["messages"]
    assert set_headers(told)["content-length"] == str(len(told.body_mutation.body))
    assert set(told.header_mutation.remove_headers) == {"x-presage-workflow-id", "x-presage-workflow-type"}
    assert DESTINATION not in set_headers(told)  # a single upstream
    (decided,) = single.decisions.explain("report", "w1")["decisions"]
    assert decided["upstream"] == "10.0.0.1:8000"
    assert b'presage_gateway_answers_total{status="200",upstream="10.0.0.1:8000"} 1.0' in single.metrics.page(0, 0)


def test_a_conversation_that_goes_on_is_one_workflow(single: Front) -> None:
    async def first(envoy: Envoy) -> None:
        await envoy.request(chat())
        await envoy.response(answer("A plan of more than a few words, made by the planner."))
        await envoy.end()

    async def second(envoy: Envoy) -> Any:
        history = json.loads(chat())["messages"]
        said = {"role": "assistant", "content": "A plan of more than a few words, made by the planner."}
        body = {"model": "small", "messages": [*history, said, {"role": "user", "content": "Go on."}]}
        return await envoy.request(json.dumps(body).encode())

    told = played(single, first, second)
    assert json.loads(told.body_mutation.body)["vllm_xargs"]["step"] == 1
    assert len(single.decisions.table) == 1


def test_of_several_upstreams_envoy_is_told_which_one() -> None:
    of = front(TWO)

    async def play(envoy: Envoy) -> Any:
        await envoy.headers(HEADERS)
        await envoy.told()
        await envoy.body(chat())
        told = await envoy.told()
        await envoy.response(answer())
        await envoy.end()
        return told

    told = played(of, play)
    place = set_headers(told.request_body.response)[DESTINATION]
    assert place in ("10.0.0.1:8000", "10.0.0.2:8000")
    assert told.request_body.response.clear_route_cache
    (namespace,) = told.dynamic_metadata.fields
    (field,) = namespace.value.struct_value.fields
    assert (namespace.key, field.key, field.value.string_value) == ("envoy.lb", DESTINATION, place)
    assert f'presage_gateway_answers_total{{status="200",upstream="{place}"}} 1.0' in of.metrics.page(0, 0).decode()


def test_a_streamed_answer_passes_without_the_counts_that_the_client_did_not_ask_for(tmp_path: Path) -> None:
    of = front(forecasts={**WITHOUT_MODELS, "recorder": {"folder": str(tmp_path)}})
    delta = {"index": 0, "delta": {"content": "plan"}, "finish_reason": None}
    stop = {"index": 0, "delta": {}, "finish_reason": "stop"}
    said = [event(choices=[delta]), event(choices=[stop])]
    counts = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 7})

    async def play(envoy: Envoy) -> Any:
        told = await envoy.request(chat(stream=True), **{"x-presage-workflow-id": "w", "x-presage-agent": "planner"})
        assert json.loads(told.body_mutation.body)["stream_options"] == {"include_usage": True}
        parts = await envoy.response(said[0], said[1], counts, b"data: [DONE]\n\n")
        await envoy.end()
        return parts

    parts = played(of, play)
    assert [unchanged(part) for part in parts] == [True, True, False, True]
    assert parts[2].body_mutation.clear_body
    of.decisions.close()
    (row,) = read_traces([str(tmp_path)]).table.to_pylist()
    assert (row["output_tokens"], row["finish_reason"], row["agent"]) == (7, "stop", "planner")


def test_a_body_in_parts_is_held_in_full_duplex() -> None:
    of, body = front(TWO), chat("x" * 150_000)

    async def play(envoy: Envoy) -> tuple[Any, list[Any]]:
        await envoy.headers(HEADERS)
        for start in range(0, len(body), 60_000):
            await envoy.body(body[start : start + 60_000], ends=start + 60_000 >= len(body))
        first, parts = await envoy.told(), []
        while not parts or not parts[-1].end_of_stream:
            parts.append((await envoy.told()).request_body.response.body_mutation.streamed_response)
        await envoy.headers({":status": "200"}, "response_headers")
        await envoy.told()
        await envoy.body(answer(), "response_body")
        back = (await envoy.told()).response_body.response.body_mutation.streamed_response
        assert (back.body, back.end_of_stream) == (answer(), True)
        await envoy.end()
        return first, parts

    first, parts = played(of, play, mode=DUPLEX, back=DUPLEX)
    whole = b"".join(part.body for part in parts)
    assert json.loads(whole)["vllm_xargs"]["step"] == 0
    assert json.loads(whole)["messages"] == json.loads(body)["messages"]
    assert set_headers(first.request_headers.response)["content-length"] == str(len(whole))
    assert max(len(part.body) for part in parts) <= 64 * 1024
    assert first.HasField("dynamic_metadata")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 100_000], ids=repr)
@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
def test_a_body_that_is_no_object_passes_unchanged(single: Front, body: bytes, mode: int) -> None:
    async def play(envoy: Envoy) -> Any:
        await envoy.headers(HEADERS)
        if mode == BUFFERED:
            await envoy.told()
        await envoy.body(body)
        if mode == DUPLEX:
            assert unchanged((await envoy.told()).request_headers.response)
            parts = []
            while not parts or not parts[-1].end_of_stream:
                parts.append((await envoy.told()).request_body.response.body_mutation.streamed_response)
            assert b"".join(part.body for part in parts) == body
        else:
            assert unchanged((await envoy.told()).request_body.response)
        assert all(map(unchanged, await envoy.response(b"{}", status=400))) or mode == DUPLEX
        await envoy.end()

    played(single, play, mode=mode)
    assert len(single.decisions.table) == 0


def test_a_body_beyond_the_limit_passes_unchanged() -> None:
    of, body = front(limits={"body_mb": 1}), chat("x" * 1_200_000)

    async def buffered(envoy: Envoy) -> None:
        assert unchanged(await envoy.request(body))
        await envoy.response(answer())
        await envoy.end()

    async def held(envoy: Envoy) -> bytes:
        await envoy.headers(HEADERS)
        taken = b""
        for start in range(0, len(body), 400_000):
            await envoy.body(body[start : start + 400_000], ends=start + 400_000 >= len(body))
        assert unchanged((await envoy.told()).request_headers.response)
        while True:
            part = (await envoy.told()).request_body.response.body_mutation.streamed_response
            taken += part.body
            if part.end_of_stream:
                return taken

    played(of, buffered)
    assert played(of, held, mode=DUPLEX) == body
    assert len(of.decisions.table) == 0


def test_parts_that_have_gone_are_recognised_and_not_changed(single: Front) -> None:
    async def play(envoy: Envoy) -> None:
        await envoy.headers({**HEADERS, "x-presage-workflow-id": "w"})
        await envoy.told()
        for part, ends in ((chat()[:30], False), (chat()[30:], True)):
            await envoy.body(part, ends=ends)
            assert unchanged((await envoy.told()).request_body.response)
        await envoy.response(answer())
        await envoy.end()

    played(single, play, mode=STREAMED)
    assert len(single.decisions.table) == 1


@pytest.mark.parametrize("how", ["cancelled", "ended", "an error"])
def test_a_request_without_an_answer_has_failed(single: Front, how: str) -> None:
    async def play(envoy: Envoy) -> None:
        await envoy.request(chat(stream=True), **{"x-presage-workflow-id": "w", "x-presage-workflow-type": "t"})
        if how == "an error":
            await envoy.response(b'{"error": {}}', status=500)
            await envoy.end()
            return
        await envoy.headers({":status": "200"}, "response_headers")
        await envoy.told()
        await envoy.body(event(choices=[]), "response_body", ends=False)
        await envoy.told()
        if how == "cancelled":
            envoy.cancel()
        else:
            await envoy.end()
        for _ in range(500):
            if single.decisions.explain("t", "w")["decisions"]:
                break
            await asyncio.sleep(0.01)

    played(single, play)
    assert len(single.decisions.explain("t", "w")["decisions"]) == 1
    assert single.upstreams.monitor.status()["10.0.0.1:8000"]["requests"] == 0


def test_an_error_of_ours_lets_the_request_pass(single: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(single.upstreams, "choose", fails)

    async def play(envoy: Envoy) -> None:
        assert unchanged(await envoy.request(chat()))
        assert all(map(unchanged, await envoy.response(answer())))
        await envoy.end()

    async def held(envoy: Envoy) -> None:
        await envoy.headers(HEADERS)
        await envoy.body(chat()[:20], ends=False)
        await envoy.body(chat()[20:])
        assert unchanged((await envoy.told()).request_headers.response)
        part = (await envoy.told()).request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (chat(), True)

    played(single, play)
    played(single, held, mode=DUPLEX)
    assert b'presage_gateway_errors_total{reason="RuntimeError",what="ext_proc"} 2.0' in single.metrics.page(0, 0)


def test_an_unknown_model_is_envoys_to_route() -> None:
    of = front(TWO)

    async def play(envoy: Envoy) -> None:
        assert unchanged(await envoy.request(chat(model="other")))
        await envoy.response(answer())
        await envoy.end()

    played(of, play)
    assert len(of.decisions.table) == 1


def test_shadow_changes_no_body() -> None:
    of = front(modes={"default": "shadow"})

    async def play(envoy: Envoy) -> Any:
        told = await envoy.request(chat())
        await envoy.response(answer())
        return told

    told = played(of, play)
    assert not told.HasField("body_mutation")
    assert set_headers(told) == {"accept-encoding": "identity"}


@pytest.mark.parametrize("headers", [{":path": "/v1/models", ":method": "GET"}, {":path": "/v1/embeddings"}])
def test_other_requests_pass(single: Front, headers: dict[str, str]) -> None:
    async def play(envoy: Envoy) -> None:
        await envoy.headers({**HEADERS, **headers})
        assert unchanged((await envoy.told()).request_headers.response)
        await envoy.body(b"anything")
        assert unchanged((await envoy.told()).request_body.response)
        await envoy.response(b"any", b"thing")
        await envoy.send(response_trailers={})
        assert (await envoy.told()).HasField("response_trailers")
        await envoy.end()

    played(single, play)
    assert len(single.decisions.table) == 0


def test_keys_are_asked_for_and_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_GATEWAY_KEYS", "key-of-a-tenant-1,key-of-a-tenant-2")
    of = front(keys_variable="TEST_GATEWAY_KEYS")

    async def without(envoy: Envoy) -> Any:
        await envoy.headers(HEADERS)
        return await envoy.told()

    async def good(envoy: Envoy) -> Any:
        await envoy.headers({**HEADERS, "authorization": "Bearer key-of-a-tenant-1"})
        return await envoy.told()

    refused = played(of, without).immediate_response
    assert refused.status.code == 401
    assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"
    assert "authorization" in played(of, good).request_headers.response.header_mutation.remove_headers


def test_a_client_may_ask_for_the_forecast(single: Front) -> None:
    async def play(envoy: Envoy) -> Any:
        await envoy.request(chat(), **{"x-presage-forecast": "1"})
        await envoy.headers({":status": "200"}, "response_headers")
        return (await envoy.told()).response_headers.response

    assert json.loads(set_headers(played(single, play))["x-presage-forecast"])["upstream"] == "10.0.0.1:8000"


def test_envoy_and_the_gateways_own_http_share_one_state() -> None:
    of, ports = front(), []

    @asynccontextmanager
    async def host(front: Front) -> AsyncIterator[None]:
        async with serving(front, "127.0.0.1:0") as port:
            ports.append(port)
            yield

    async def asked() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            envoy = stream(channel)
            await envoy.request(chat(), **{"x-presage-workflow-id": "w", "x-presage-workflow-type": "t"})
            await envoy.response(answer())
            await envoy.end()

    with served(beside(of.app(), of, [host])) as url:
        asyncio.run(asked())
        (explained,) = httpx.get(f"{url}/v1/workflows/w/explain", params={"workflow_type": "t"}).json()["engines"]
    assert explained["decisions"][0]["upstream"] == "10.0.0.1:8000"


def test_messages_have_the_bytes_of_envoys_protocol() -> None:
    """Numbers as in external_processor.proto, base.proto and http_status.proto of Envoy's API version 3."""
    sent = b"\x12\x12\x0a\x10\x0a\x0e\x0a\x05:path\x1a\x05/v1/x\x5a\x04\x08\x04\x10\x01"
    request = MESSAGES["ProcessingRequest"].FromString(sent)
    assert request.request_headers.headers.headers[0].raw_value == b"/v1/x"
    assert (request.protocol_config.request_body_mode, request.protocol_config.response_body_mode) == (4, 1)
    response = MESSAGES["ProcessingResponse"]()
    common = response.request_body.response
    option = common.header_mutation.set_headers.add(append_action=2)
    option.header.key, option.header.raw_value = "a", b"b"
    common.header_mutation.remove_headers.append("c")
    common.body_mutation.body, common.clear_route_cache = b"{}", True
    expected = b"\x1a\x1b\x0a\x19\x12\x0f\x0a\x0a\x0a\x06\x0a\x01a\x1a\x01b\x18\x02\x12\x01c\x1a\x04\x0a\x02{}\x28\x01"
    assert response.SerializeToString() == expected
    part = MESSAGES["ProcessingResponse"]()
    part.response_body.response.body_mutation.streamed_response.body = b"x"
    part.response_body.response.body_mutation.streamed_response.end_of_stream = True
    assert part.SerializeToString() == b"\x22\x0b\x0a\x09\x1a\x07\x1a\x05\x0a\x01x\x10\x01"
