"""What happens to workflows at a gateway reaches subscribers and a receiver of webhooks, in order and without texts."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from receiving_server import ReceivingServer
from served import gateway, served
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from presage.errors import ConfigurationError
from presage.gateway.config import gateway_config
from presage.gateway.serve import build
from presage.gateway.simulated_engine import SimulatedEngine
from presage.serving_hooks.lifecycle.event import LifecycleEvent

CHAT = "/v1/chat/completions"
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
PRIVATE = "the patient's name is Quigley"


def until(reached: Callable[[], bool]) -> None:
    for _ in range(3000):
        if reached():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to that within half a minute")


def ask(url: str, workflow: str, agent: str, end: bool = False, timeout_s: float = 60) -> None:
    names = {"workflow_type": "letters", "workflow_id": workflow, "agent": agent, "workflow_end": end}
    messages = [{"role": "system", "content": f"You are {agent}. {PRIVATE}"}, {"role": "user", "content": PRIVATE}]
    body = {"model": "simulated", "messages": messages, "max_tokens": 5, "vllm_xargs": names}
    assert httpx.post(url + CHAT, json=body, timeout=timeout_s).status_code == 200


def run(url: str, workflow: str, agents: tuple[str, ...] = ("planner", "writer"), end: bool = True) -> None:
    for place, agent in enumerate(agents, 1):
        ask(url, workflow, agent, end and place == len(agents))


def test_a_workflow_is_told_from_its_start_to_its_end_in_process_and_by_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    file = tmp_path / "events.sqlite"
    engine = served(SimulatedEngine(token_s=0.0).app())
    with ReceivingServer(SECRET) as receiver, engine as upstream:
        webhook = {"url": receiver.url, "file": str(file), "secret_variable": "HOOK_SECRET"}
        with gateway(upstream, webhook=webhook) as (url, front):
            heard: list[LifecycleEvent] = []
            front.decisions.lifecycle.subscribe(heard.append)
            for number in range(12):  # counts forecast after some
                run(url, f"w{number}")
            until(lambda: heard[-1].kind == "ended" and heard[-1].workflow_id == "w11")
            told = [event for event in heard if event.workflow_id == "w11"]
            assert [(one.kind, one.step, one.agent) for one in told] == [
                ("workflow.started", 0, "planner"),
                ("step.started", 0, "planner"),
                ("step.finished", 0, "planner"),
                ("expected", 0, "planner"),
                ("step.started", 1, "writer"),
                ("step.finished", 1, "writer"),
                ("ended", 1, "writer"),
            ]
            assert [one.sequence for one in told] == list(range(7))
            assert {(one.workflow_type, one.tenant, one.source) for one in told} == {("letters", "", heard[0].source)}
            assert (told[2].finish_reason, told[2].output_tokens) == ("stop", 5)
            assert told[3].next_agents is not None
            assert max(told[3].next_agents, key=told[3].next_agents.__getitem__) == "writer"
            assert told[3].end is not None
            assert told[3].return_s is not None
            assert 0 < told[3].return_s["0.5"] < 5
            assert told[-1].reason == "finished"
            until(lambda: len(receiver.events) == len(heard))
            assert receiver.events == heard
            assert len({one.id for one in heard}) == len(heard)
            sent = f'presage_webhook_events_total{{outcome="sent"}} {len(heard)}.0'
            until(lambda: sent in httpx.get(url + "/metrics").text)
            page = httpx.get(url + "/metrics").text
            status = httpx.get(url + "/v1/workflows/status").json()["engines"][0]["webhook"]
            assert "presage_webhook_waiting" in page
            assert status["dropped"] == 0
            assert "Quigley" not in repr(heard) + page


def test_what_is_not_delivered_when_the_gateway_stops_is_delivered_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    receiver = ReceivingServer(SECRET)
    with receiver:
        pass
    webhook = {"url": receiver.url, "file": str(tmp_path / "events.sqlite"), "longest_retry_s": 0.2}
    with served(SimulatedEngine(token_s=0.0).app()) as upstream:
        with gateway(upstream, webhook=webhook) as (url, _):
            run(url, "before")
        with receiver, gateway(upstream, webhook=webhook) as (url, _):
            run(url, "after")
            until(lambda: [one.kind for one in receiver.events].count("ended") == 2)
    assert {one.workflow_id for one in receiver.events} == {"before", "after"}
    assert len({one.source for one in receiver.events}) == 2


def test_an_expired_workflow_and_one_ended_over_http_say_why(tmp_path: Path) -> None:
    engine = served(SimulatedEngine(token_s=0.0).app())
    with engine as upstream, gateway(upstream, forecasts={"time_to_live_s": 0.5}) as (url, front):
        heard: list[LifecycleEvent] = []
        front.decisions.lifecycle.subscribe(heard.append)
        run(url, "silent", end=False)
        run(url, "told", end=False)
        assert httpx.post(url + "/v1/workflows/told/end?workflow_type=letters").json() == {"ended": True}
        until(lambda: len([one for one in heard if one.kind == "ended"]) == 2)
    assert {one.workflow_id: one.reason for one in heard if one.kind == "ended"} == {
        "silent": "expired", "told": "finished",
    }  # fmt: skip


def test_a_subscriber_that_fails_is_called_no_more_and_requests_go_on() -> None:
    engine = served(SimulatedEngine(token_s=0.0).app())
    with engine as upstream, gateway(upstream) as (url, front):
        calls, heard = [], []

        def fails(event: LifecycleEvent) -> None:
            calls.append(event)
            raise RuntimeError(PRIVATE)

        front.decisions.lifecycle.subscribe(fails)
        front.decisions.lifecycle.subscribe(heard.append)
        run(url, "w")
        until(lambda: [one.kind for one in heard].count("ended") == 1)
        assert len(calls) == 1
        assert (
            'presage_errors_total{reason="RuntimeError",what="lifecycle events"} 1.0'
            in httpx.get(url + "/metrics").text
        )


PAGE = (
    'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1"} 1\n'  # two programs fit
)


@contextmanager
def small_engines(token_s: float) -> Iterator[tuple[str, list[LifecycleEvent]]]:
    """A gateway that holds what does not fit into the caches of two engines, and the events of it."""

    def small() -> Starlette:
        metrics = Route("/metrics", lambda _: PlainTextResponse(PAGE))
        return Starlette(routes=[metrics, Mount("/", SimulatedEngine(token_s=token_s).app())])

    heard: list[LifecycleEvent] = []
    with (
        served(small()) as one,
        served(small()) as two,
        gateway(one, two, routing="program-scheduling") as (url, front),
    ):
        until(lambda: all(of["cache_usage"] == 0.5 for of in front.upstreams.monitor.status().values()))
        front.decisions.lifecycle.subscribe(heard.append)
        yield url, heard


def kinds(heard: list[LifecycleEvent], workflow: str) -> list[str]:
    return [one.kind for one in heard if one.workflow_id == workflow]


def test_a_request_that_waits_for_a_server_is_held_until_it_gets_one() -> None:
    with small_engines(0.02) as (url, heard):
        with ThreadPoolExecutor(12) as clients:
            list(clients.map(lambda number: ask(url, f"w{number}", "a", True), range(12)))
        until(lambda: len([one for one in heard if one.kind == "ended"]) == 12)
    held = {one.workflow_id for one in heard if one.kind == "held"}
    assert held
    for workflow in held:
        assert kinds(heard, workflow) == [
            "workflow.started", "step.started", "held", "resumed", "step.finished", "ended",
        ]  # fmt: skip


def test_a_client_that_leaves_while_it_is_held_makes_room() -> None:
    with small_engines(0.1) as (url, heard), ThreadPoolExecutor(12) as clients:
        first = [clients.submit(ask, url, f"first{number}", "a", True) for number in range(12)]
        until(lambda: any(one.kind == "held" for one in heard))
        with pytest.raises(httpx.ReadTimeout):
            ask(url, "leaves", "a", timeout_s=0.2)
        for one in first:
            one.result()
        ask(url, "last", "a", True)
        until(lambda: kinds(heard, "last")[-1] == "ended")
        assert kinds(heard, "leaves")[:5] == ["workflow.started", "step.started", "held", "resumed", "step.finished"]
        assert "presage_gateway_errors_total{" not in httpx.get(url + "/metrics").text


@pytest.mark.parametrize(
    ("webhook", "message"),
    [
        ({"url": "ftp://x"}, "webhook.url: give an address such as"),
        ({"url": "http://x", "kinds": ["begun"]}, r"webhook.kinds.0: Input should be 'workflow.started'"),
        ({}, "webhook.url: Field required"),
    ],
)
def test_a_wrong_webhook_in_a_gateway_file_is_named(webhook: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gateway_config({"upstreams": [{"url": "http://x"}], "webhook": webhook}, "gateway.toml")


def test_a_gateway_without_the_secret_of_its_webhook_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRESAGE_WEBHOOK_SECRET", raising=False)
    settings = {"url": "http://127.0.0.1:9", "file": str(tmp_path / "events.sqlite")}
    config = gateway_config({"upstreams": [{"url": "http://127.0.0.1:9"}], "webhook": settings}, "gateway.toml")
    with pytest.raises(ConfigurationError, match="PRESAGE_WEBHOOK_SECRET"):
        build(config)
