"""The gateway proxies an OpenAI-compatible API: what passes, what it adds, and what it answers itself."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from profile_samples import coding, table_of
from served import eventually, gateway, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from presage.features.sequences import sequences_of
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictors.profile.predictor import ProfilePredictor

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "simulated",
    "messages": [{"role": "system", "content": "You plan."}, {"role": "user", "content": "Plan a trip to the sea."}],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[SimulatedEngine, str]]:
    simulated = SimulatedEngine(token_s=0.0005)
    with served(simulated.app()) as url:
        yield simulated, url


@pytest.fixture(scope="module")
def behind(engine: tuple[SimulatedEngine, str]) -> Iterator[str]:
    with gateway(engine[1]) as (url, _):
        yield url


@pytest.mark.parametrize("endpoint", ["chat", "chat with two choices", "completions", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_answers_are_those_of_the_server_byte_for_byte(engine: Any, behind: str, endpoint: str, streamed: bool) -> None:
    path = {"completions": "/v1/completions", "responses": "/v1/responses"}.get(endpoint, CHAT)
    body = {
        "chat": BODY,
        "chat with two choices": {**BODY, "n": 2},
        "completions": {"model": "simulated", "prompt": "Once upon"},
        "responses": {"model": "simulated", "instructions": "You plan.", "input": "A trip"},
    }[endpoint] | {"stream": streamed}
    ours, theirs = (httpx.post(base + path, json=body) for base in (behind, engine[1]))
    assert ours.status_code == theirs.status_code == 200
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert _without_ids(ours.text) == _without_ids(theirs.text)


def _without_ids(text: str) -> str:
    import re

    return re.sub(r"(chatcmpl-|cmpl-|resp_)\w+", "", text)


def test_token_counts_of_a_stream_reach_a_client_only_if_it_asks(behind: str) -> None:
    for options, wanted in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        answer = httpx.post(behind + CHAT, json={**BODY, "stream": True, **options}).text
        assert ('"usage"' in answer) is wanted
        assert answer.endswith("data: [DONE]\n\n")


def test_errors_of_the_server_pass_through(engine: Any, behind: str) -> None:
    ours, theirs = (httpx.post(base + CHAT, json={**BODY, "model": "other"}) for base in (behind, engine[1]))
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content) == (404, theirs.content)


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"{", "invalid_json"), (b"[1]", "invalid_json"), (b"", "invalid_json"), (b"[" * 100_000, "invalid_json")],
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(behind: str, content: bytes, code: str) -> None:
    answer = httpx.post(behind + CHAT, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "strange",
    [
        {"messages": "no list"},
        {"messages": [1, None, {"role": 3, "content": {"a": [{}]}}]},
        {"tools": {"a": 1}, "messages": [{"role": "user", "content": "\ud800"}]},
        {"stream_options": 7, "stream": True},
        {"n": -3, "vllm_xargs": [], "metadata": "x", "app_metadata": [1]},
    ],
)  # fmt: skip
def test_strange_values_reach_the_server_as_they_came(engine: Any, behind: str, strange: dict[str, Any]) -> None:
    content = json.dumps({**BODY, **strange}).encode()
    httpx.post(behind + CHAT, content=content)
    seen = engine[0].seen[-1][0]
    assert {name: seen[name] for name in strange} == strange


def test_nothing_but_the_api_is_proxied(behind: str) -> None:
    for path in ("/v1/workflows/mode", "/reset_prefix_cache", "/v1/load_lora_adapter", "/sleep", "/docs"):
        answer = httpx.post(behind + path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


def test_a_body_over_the_limit_is_refused_and_the_rest_is_not_read(engine: Any) -> None:
    with gateway(engine[1], limits={"body_mb": 1}) as (url, _):
        answer = httpx.post(url + CHAT, content=b" " * (2**20 + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert httpx.post(url + CHAT, json=BODY).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(engine: Any) -> None:
    with gateway(engine[1], limits={"body_s": 0.2}) as (url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert b"408" in connection.recv(200)


def test_a_client_that_leaves_ends_its_request_at_the_server() -> None:
    engine = SimulatedEngine(token_s=0.05)
    with served(engine.app()) as upstream, gateway(upstream) as (url, front):
        with httpx.stream("POST", url + CHAT, json={**BODY, "stream": True, "max_tokens": 64}) as answer:
            next(answer.iter_raw())
        assert eventually(lambda: engine.aborted == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + CHAT, json={**BODY, "max_tokens": 64}, timeout=0.3)
        assert eventually(lambda: front.in_flight == 0)
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)


def test_a_server_that_cannot_be_reached_is_a_clear_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with gateway(f"http://127.0.0.1:{closed.getsockname()[1]}") as (url, _):
            answer = httpx.post(url + CHAT, json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
            assert "127.0.0.1" not in answer.text  # clients do not learn what stands behind
            assert httpx.get(url + "/v1/models").status_code == 502


def test_an_answer_that_breaks_off_is_not_passed_as_whole() -> None:
    async def breaks(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
            await asyncio.sleep(0.05)
            raise ConnectionResetError

        return StreamingResponse(parts(), media_type="text/event-stream")

    with served(Starlette(routes=[Route(CHAT, breaks, methods=["POST"])])) as upstream:
        with gateway(upstream) as (url, front), pytest.raises(httpx.RemoteProtocolError):
            httpx.post(url + CHAT, json={**BODY, "stream": True})
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)


def test_a_server_that_breaks_off_before_its_first_token_gives_its_request_to_another() -> None:
    async def breaks(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            await asyncio.sleep(0.05)
            raise ConnectionResetError
            yield b""

        return StreamingResponse(parts(), media_type="text/event-stream")

    app = Starlette(routes=[Route(CHAT, breaks, methods=["POST"])])
    engine = SimulatedEngine(token_s=0.0)
    with served(app) as dying, served(engine.app()) as alive:
        settings = {"upstream": {"models": ["simulated"]}, "routing": "round-robin"}
        with gateway(dying, alive, **settings) as (url, front):
            for _ in range(4):
                answer = httpx.post(url + CHAT, json={**BODY, "model": "simulated", "stream": True})
                assert answer.status_code == 200
                assert answer.text.endswith("data: [DONE]\n\n")
            assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)
        with gateway(dying) as (url, _):
            answer = httpx.post(url + CHAT, json={**BODY, "stream": True})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")


@pytest.mark.parametrize(
    "garbage",
    [
        b"not json at all",
        b'{"choices": 5}',
        b'{"choices":[{"index":"x"}]}',
        b"data: {\n\ndata: 7\n\n",
        b"\xff\xfe" * 999,
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_garbage_of_a_server_is_passed_on_and_harms_nothing(garbage: bytes, streamed: bool) -> None:
    kind = "text/event-stream" if streamed else "application/json"

    async def answers(_: Request) -> Response:
        return Response(garbage, media_type=kind)

    routes = [Route(CHAT, answers, methods=["POST"])]
    with served(Starlette(routes=routes)) as upstream, gateway(upstream) as (url, front):
        answer = httpx.post(url + CHAT, json={**BODY, "stream": streamed})
        assert (answer.status_code, answer.content) == (200, garbage)
        assert httpx.get(url + "/health").text == "ok\n"
        assert eventually(lambda: front.decisions.table.debug_state()["requests"] == 0)


def test_more_requests_than_the_limit_are_told_to_come_again() -> None:
    engine = SimulatedEngine(token_s=0.05)
    with (
        served(engine.app()) as upstream,
        gateway(upstream, limits={"requests": 1}) as (url, front),
        ExitStack() as stack,
    ):
        slow = httpx.stream("POST", url + CHAT, json={**BODY, "stream": True, "max_tokens": 64})
        stack.enter_context(slow)
        assert eventually(lambda: front.in_flight == 1)
        answer = httpx.post(url + CHAT, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_each_key_is_a_tenant_and_no_other_key_is_let_in(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", "alpha-key, beta-key")
    explicit = {**BODY, "vllm_xargs": {"workflow_type": "t", "workflow_id": "w", "agent": "a"}}
    with gateway(engine[1], keys_variable="GATEWAY_KEYS") as (url, front):
        assert httpx.post(url + CHAT, json=BODY).status_code == 401
        assert httpx.post(url + CHAT, json=BODY, headers={"authorization": "Bearer wrong"}).status_code == 401
        for key in ("alpha-key", "beta-key"):
            sent = {"authorization": f"Bearer {key}"}
            assert httpx.post(url + CHAT, json=explicit, headers=sent).status_code == 200
            assert "authorization" not in engine[0].seen[-1][1]  # no upstream sees a key of the gateway
        assert len(front.decisions.table) == 2  # one name, two workflows
        ended = httpx.post(url + "/v1/workflows/w/end?workflow_type=t", headers={"authorization": "Bearer beta-key"})
        assert ended.json() == {"ended": True}
        assert len(front.decisions.table) == 1


def test_a_server_gets_its_own_key_in_place_of_the_clients(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "of-the-engine")
    with gateway(engine[1], upstream={"api_key_variable": "ENGINE_KEY"}) as (url, _):
        httpx.post(url + CHAT, json=BODY, headers={"authorization": "Bearer of-the-client"})
    assert engine[0].seen[-1][1]["authorization"] == "Bearer of-the-engine"


def test_hop_by_hop_headers_stay_here_and_others_pass(engine: Any, behind: str) -> None:
    sent = {"connection": "keep-alive, x-private", "x-private": "1", "x-request-id": "r-1", "te": "trailers"}
    httpx.post(behind + CHAT, json=BODY, headers=sent)
    seen = engine[0].seen[-1][1]
    assert seen["x-request-id"] == "r-1"
    assert not {"x-private", "te"} & seen.keys()


def test_clients_cannot_claim_to_be_urgent(engine: Any, behind: str) -> None:
    httpx.post(behind + CHAT, json={**BODY, "priority": -(10**6)}, headers={"x-vllm-priority": "-5"})
    body, headers = engine[0].seen[-1]
    assert body.get("priority", 0) >= 0
    assert "x-vllm-priority" not in headers
    with gateway(engine[1], client_priority=True) as (url, _):
        httpx.post(url + CHAT, json={**BODY, "priority": -7})
    assert engine[0].seen[-1][0]["priority"] == -7


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_without_policies_the_server_gets_the_clients_own_bytes(engine: Any, mode: str) -> None:
    spaced = json.dumps({**BODY, "seed": 1}, indent=3).encode()
    with gateway(engine[1], modes={"default": mode}, upstream={"dialect": "presage"}) as (url, front):
        for _ in range(3):
            assert httpx.post(url + CHAT, content=spaced).status_code == 200
        forecast = front.decisions.counts.by_key()
    assert engine[0].seen[-1][0] == {**BODY, "seed": 1}
    assert any(key.startswith("forecast:") for key in forecast) is (mode == "shadow")


def test_a_part_that_fails_is_switched_off_and_requests_go_on(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with gateway(engine[1]) as (url, front):
        monkeypatch.setattr(front.decisions.recorder, "begun", fails, raising=False)
        monkeypatch.setattr(front.decisions.request_forecasts.outputs, "finite", fails)
        for _ in range(3):
            assert httpx.post(url + CHAT, json=BODY).status_code == 200
        assert "ZeroDivisionError" in str(front.decisions.counts.by_key())


def test_a_forecast_comes_back_in_a_header_if_it_is_asked_for(behind: str) -> None:
    assert "x-presage-forecast" not in httpx.post(behind + CHAT, json=BODY).headers
    answer = httpx.post(behind + CHAT, json=BODY, headers={"x-presage-forecast": "1"})
    told = json.loads(answer.headers["x-presage-forecast"])
    assert told["workflow_from"] == "new"
    assert told["model"] == "simulated"


def test_draining_refuses_new_requests_and_finishes_those_in_flight() -> None:
    engine = SimulatedEngine(token_s=0.02)
    found: list[bytes] = []
    with served(engine.app()) as upstream:
        with gateway(upstream) as (url, front):
            body = {**BODY, "stream": True, "max_tokens": 40}
            running = threading.Thread(target=lambda: found.append(httpx.post(url + CHAT, json=body).content))
            running.start()
            assert eventually(lambda: front.in_flight == 1)
            front.draining = True
            assert httpx.get(url + "/health").status_code == 503
            assert httpx.post(url + CHAT, json=BODY).status_code == 503
        running.join(60)
    assert found[0].endswith(b"data: [DONE]\n\n")


def test_several_servers_of_one_model_keep_each_workflow_on_its_server() -> None:
    engines = [SimulatedEngine(token_s=0.0005) for _ in range(2)]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine.app())) for engine in engines]
        url, front = stack.enter_context(gateway(*urls))
        _run_workflows(url, 4)
        assert all(engine.seen for engine in engines)
        for number in range(4):
            served_by = [any(_is_of(body, number) for body, _ in engine.seen) for engine in engines]
            assert served_by.count(True) == 1
        assert eventually(lambda: front.in_flight == 0)


def _is_of(body: dict[str, Any], number: int) -> bool:
    return body.get("vllm_xargs", {}).get("workflow_id") == f"w{number}" or f"trip {number}" in str(body)


def _run_workflows(url: str, count: int) -> None:
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"trip {number}"}]
        for step in range(3):
            answer = httpx.post(url + CHAT, json={**BODY, "messages": messages}).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {step}"}]


def test_the_status_and_the_metrics_tell_what_happened(behind: str) -> None:
    httpx.post(behind + CHAT, json=BODY)
    status = httpx.get(behind + "/v1/workflows/status").json()
    assert [one["models"] for one in status["upstreams"].values()] == [["simulated"]]
    page = httpx.get(behind + "/metrics").text
    assert "presage_gateway_answers_total" in page
    assert 'presage_policy_on{policy="annotations"} 1.0' in page
    assert "Plan a trip" not in page + json.dumps(status)
    from presage.cli.presage import app

    shown = CliRunner().invoke(app, ["status", behind])
    assert shown.exit_code == 0, shown.output
    assert "Gateway" in shown.stdout
    assert "annotations on" in shown.stdout


def test_modes_are_set_while_it_runs_by_whoever_has_the_admin_key(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from presage.cli.presage import app

    key = "a key of sixteen characters"
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", key)
    with gateway(engine[1]) as (url, front):
        wrong = httpx.post(url + "/v1/workflows/mode", json={"mode": "off"}, headers={"X-Presage-Admin-Key": "no"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "invalid_admin_key")
        assert httpx.post(url + "/v1/workflows/mode", json={"mode": "off"}).status_code == 401
        for body in ({"mode": "of"}, {"mode": ["off"]}, {"mode": "off", "policy": "eviction"}, {}):
            sent = httpx.post(url + "/v1/workflows/mode", json=body, headers={"X-Presage-Admin-Key": key})
            assert sent.status_code == 422
        assert front.decisions.modes.of("annotations", "review").word == "on"
        found = CliRunner().invoke(app, ["mode", url, "shadow", "--policy", "annotations", "--json"])
        assert found.exit_code == 0, found.output
        assert front.decisions.modes.of("annotations", "review").word == "shadow"
        assert front.decisions.modes.of("placement", "review").word == "on"
    monkeypatch.delenv("PRESAGE_ADMIN_KEY")
    with gateway(engine[1]) as (url, _):
        assert httpx.get(url + "/v1/workflows/mode").status_code == 404


def test_presage_explain_says_why_a_request_went_where_it_went(behind: str) -> None:
    named = {"vllm_xargs": {"workflow_type": "t", "workflow_id": "explained", "agent": "a"}}
    httpx.post(behind + CHAT, json={**BODY, **named})
    from presage.cli.presage import app

    found = CliRunner().invoke(app, ["explain", behind, "explained"])
    assert found.exit_code == 0, found.output
    assert "its last request went to" in found.stdout
    assert "workflow by explicit" in found.stdout
    unknown = CliRunner().invoke(app, ["explain", behind, "another"])
    assert unknown.exit_code == 2


def test_presage_explain_says_where_a_workflow_is_on_its_profile(engine: Any, tmp_path: Path) -> None:
    ProfilePredictor().fit(sequences_of(table_of(coding(100)))).save(tmp_path / "profile")
    with gateway(engine[1], forecasts={"profile": str(tmp_path / "profile")}) as (url, _):
        for agent in ("planner", "explorer"):
            named = {"vllm_xargs": {"workflow_type": "app", "workflow_id": "w", "agent": agent}}
            httpx.post(url + CHAT, json={**BODY, **named})
        (found,) = httpx.get(f"{url}/v1/workflows/w/explain?workflow_type=app").json()["engines"]
        assert (found["position"]["at"], found["position"]["on_graph"]) == (["explorer"], True)
        assert {made["source"] for made in found["forecasts"]} == {"profile"}
        assert any(told.startswith("workflows of its type run planner explorer{3,12} ") for told in found["reasons"])


def test_state_does_not_outlive_its_workflows(engine: Any) -> None:
    with gateway(engine[1]) as (url, front):
        for number in range(5):
            named = {"vllm_xargs": {"workflow_type": "t", "workflow_id": f"w{number}", "workflow_end": "true"}}
            httpx.post(url + CHAT, json={**BODY, **named})
        tables = ("workflows", "requests", "conversations")
        assert eventually(lambda: not any(front.decisions.debug_state()[name] for name in tables))


def test_a_service_objective_is_the_deadline_of_its_requests(engine: Any) -> None:
    objectives = {"workflow_types": {"chat": {"first_token_s": 2.5}}}
    named = {"vllm_xargs": {"workflow_type": "chat", "workflow_id": "due", "agent": "a"}}
    with gateway(engine[1], objectives=objectives, upstream={"dialect": "vllm-router"}) as (url, _):
        for kind, due in (("chat", 2.5), ("batch", None)):
            httpx.post(url + CHAT, json={**BODY, "vllm_xargs": {**named["vllm_xargs"], "workflow_type": kind}})
            context = json.loads(engine[0].seen[-1][0]["vllm_xargs"]["agentic_context"])
            assert context.get("deadline_seconds") == due


def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    """Servers close idle connections; whoever sends at that moment has its request on a new one."""
    listening = socket.create_server(("127.0.0.1", 0))
    answer = b'{"choices":[{"message":{"role":"assistant","content":"so"}}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
    taken: list[int] = []

    def talk(number: int, connection: socket.socket) -> None:
        """Answers one request on each connection, and closes it when the next one arrives."""
        with connection:
            for answers in (True, False):
                sent = b""
                while b"\r\n\r\n" not in sent or not sent.rstrip().endswith(b"}"):
                    part = connection.recv(65536)
                    if not part:
                        return
                    sent += part
                    if sent.startswith(b"GET"):
                        break
                if not answers:
                    return
                if sent.startswith(b"POST"):
                    taken.append(number)
                connection.sendall(head + answer)

    def accept() -> None:
        for number in range(1000):
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(number, connection), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with gateway(f"http://127.0.0.1:{listening.getsockname()[1]}", upstream={"models": ["simulated"]}) as (url, _):
        for _ in range(5):
            assert httpx.post(url + CHAT, json=BODY).status_code == 200
    listening.close()
    assert len(taken) == len(set(taken)) == 5


def test_headers_beyond_ascii_and_long_ones_pass() -> None:
    seen: list[bytes] = []

    async def answer(request: Request) -> Response:
        seen.append(dict(request.headers.raw)[b"x-user"])
        return Response(b"{}", headers={"x-long": "a" * 20_000})

    with (
        served(Starlette(routes=[Route(CHAT, answer, methods=["POST"])])) as server,
        gateway(server, upstream={"models": ["simulated"]}) as (url, _),
    ):
        passed = httpx.post(url + CHAT, json=BODY, headers=[(b"x-user", "J\u00fcrgen \u674e".encode())])
    assert seen == ["J\u00fcrgen \u674e".encode()]
    assert passed.headers["x-long"] == "a" * 20_000
