"""Clients with different keys cannot mean each other's workflows, and only an admin changes how an engine works."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from by_name import ByName
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from presage.errors import ConfigurationError
from presage.serving_hooks.admin import SHORTEST_KEY
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts
from presage.serving_hooks.mode_names import ADMIN_KEY_HEADER as HEADER
from presage.serving_hooks.modes import Modes
from presage.serving_hooks.status import (
    AdmissionStatus,
    AgainstCountsStatus,
    AlarmStatus,
    EngineStatus,
    MonitorStatus,
    ReturnStatus,
    as_json,
    of_tenant,
    read_status,
)
from presage.serving_hooks.vllm.http import plugin
from presage.serving_hooks.vllm.http.plugin import admin_key
from presage.serving_hooks.workflows import MOST_TYPES_OF_TENANT, TENANT_SHARE, EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import MARK, Step, scoped, tenant_of, unscoped, workflow_key
from presage.serving_hooks.workflows.metadata import MISTAKES, check, read
from presage.serving_hooks.workflows.observed import REQUEST
from presage.serving_hooks.workflows.tenants import ANONYMOUS, ARGUMENT, Tenants

ADMIN = "an admin's long key"
ENDS = {"end": "workflow_ended", "pause": "workflow_paused"}


class Engine:
    """A client of an engine, which notes what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any] | None] = []
        self.called: list[tuple[Any, ...]] = []
        self.modes = Modes()
        self.engine_core = self

    async def generate(self, prompt: str, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[str]:
        sent = sampling_params.extra_args
        self.told.append(sent and {key: value for key, value in sent.items() if key != REQUEST})
        yield prompt

    async def call_utility_all_async(self, name: str, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.called.append((method, *args))
        if method == "set_mode":
            core = SimpleNamespace(scheduler=SimpleNamespace(set_mode=self.set_mode))
            return [plugin.call_scheduler(core, method, args)]
        return [args == ("t", scoped("key-1", "r1"))] if method in ENDS.values() else [{}]

    def set_mode(self, mode: str, policy: str | None, workflow_type: str | None) -> dict[str, Any]:
        self.modes.set(mode, policy, workflow_type)
        return asdict(self.modes.status())


def server(*keys: str) -> tuple[TestClient, Engine]:
    """vLLM's routes that generate, one that streams among them, and ours."""
    app, engine, routes = FastAPI(), Engine(), plugin.WorkflowRoutes()
    app.state.args = SimpleNamespace(api_key=list(keys) or None, additional_config={})

    async def answer(request: Request) -> dict[str, list[str]]:
        params = SimpleNamespace(extra_args=await request.json())
        return {"said": [part async for part in engine.generate("p", params, "r")]}

    async def stream(request: Request) -> StreamingResponse:
        params = SimpleNamespace(extra_args=await request.json())

        async def parts() -> AsyncIterator[str]:
            async for part in engine.generate("p", sampling_params=params, request_id="r"):
                yield part

        return StreamingResponse(parts())

    app.add_api_route("/v1/answer", answer, methods=["POST"])
    app.add_api_route("/v1/stream", stream, methods=["POST"])
    routes.attach_router(app)
    asyncio.run(routes.init_state(engine, app.state, app.state.args))
    return TestClient(app), engine


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("route", ["/v1/answer", "/v1/stream"])
def test_each_request_is_marked_with_its_own_key_whatever_its_client_claims(route: str) -> None:
    http, engine = server("one", "two")
    for key in ("one", "two", "three", "one"):
        assert http.post(route, json={ARGUMENT: "key-1", "agent": "a"}, headers=bearer(key)).status_code == 200
    assert engine.told == [{"agent": "a", ARGUMENT: of} for of in ("key-0", "key-1", ANONYMOUS, "key-0")]
    http.post(route, content="null", headers=bearer("two"))
    assert engine.told[-1] == {ARGUMENT: "key-1"}


def test_with_one_key_or_none_nobody_is_told_apart_and_claims_are_thrown_away() -> None:
    for keys in ((), ("one",), ("one", "one")):
        http, engine = server(*keys)
        http.post("/v1/answer", json={ARGUMENT: "key-1", "agent": "a"}, headers=bearer("one"))
        http.post("/v1/answer", json={ARGUMENT: "key-1"}, headers=bearer("one"))
        http.post("/v1/answer", content="null", headers=bearer("one"))
        assert engine.told == [{"agent": "a"}, {}, {}]
    http, engine = server()
    http.post("/v1/answer", json={"agent": "a"})
    assert engine.told == [{"agent": "a"}]


@pytest.mark.parametrize("keys", [("one",), ("one", "two")])
def test_who_has_no_key_to_a_server_that_has_some_belongs_to_no_workflow(keys: tuple[str, ...]) -> None:
    http, engine = server(*keys)
    sent = {"workflow_id": "r1", "workflow_type": "t", "workflow_end": True, ARGUMENT: "key-0"}
    http.post("/v1/answer", json=sent)
    http.post("/v1/answer", json=sent, headers=bearer("three"))
    http.post("/v1/answer", json={})  # with a session of its own
    counts = EventCounts()
    assert [read(told, "r1", counts) for told in engine.told] == [None] * 3
    assert counts.by_key() == {"workflow_id: without a key": 3}


def test_two_authorization_headers_are_nobodys() -> None:
    http, engine = server("one", "two")
    both = [("Authorization", "Bearer one"), ("Authorization", "Bearer two")]
    http.post("/v1/answer", json={}, headers=both)
    assert engine.told == [{ARGUMENT: ANONYMOUS}]
    assert Tenants(["one", "two"]).of("Basic one") == Tenants(["one", "two"]).of(None) == ANONYMOUS
    assert Tenants(["one", "two"]).of("bearer two") == "key-1"


def test_a_status_is_its_callers_and_an_admin_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", ADMIN)
    http, engine = server("one", "two")
    for headers in (bearer("one"), bearer("two"), {**bearer("two"), HEADER: ADMIN}, {**bearer("two"), HEADER: "no"}):
        assert http.get("/v1/workflows/status", headers=headers).status_code == 200
    assert engine.called == [("presage_status", tenant) for tenant in ("key-0", "key-1", "", "key-1")]


def test_no_tenant_sees_the_names_of_another_in_a_status() -> None:
    table, counts = WorkflowTable(60.0, lambda: 0.0), EventCounts()
    for tenant in ("key-0", "key-1"):
        own = {ARGUMENT: tenant, "workflow_id": "w", "workflow_type": f"type of {tenant}"}
        step = read({**own, "agent": "a"}, None, counts)
        assert step is not None
        table.arrived(tenant, step)
        check({**own, MISTAKES: {"agent": ("misspelt", f"agent-of-{tenant}")}}, None, counts)
    types = [f"type of {tenant}" for tenant in ("key-0", "key-1")]
    modes = Modes(workflow_types=dict.fromkeys(types, "shadow"))
    by_type = {of: AgainstCountsStatus(1, 0.5, 0.5, False) for of in types}
    whole = as_json(
        EngineStatus(
            modes=modes.status(),
            monitor=MonitorStatus(dict.fromkeys(types, AlarmStatus()), 0, 0, {}, by_type, by_type),
            returns=ReturnStatus({of: {} for of in types}),
            admission=AdmissionStatus(growth_over_forecast={scoped("key-1", types[1]): 1.5}),
            examples={f"{of}: {reason}": key for (of, reason), key in counts.examples.items()},
        )
    )
    for place, tenant in enumerate(("key-0", "key-1")):
        shown = of_tenant(whole, tenant, table.types_of(tenant))
        assert types[1 - place] not in json.dumps(shown)
        assert f"agent-of-{('key-1', 'key-0')[place]}" not in json.dumps(shown)
        assert list(shown["monitor"]["alarms"]) == list(shown["returns"]["workflow_types"]) == [types[place]]
        assert types[place] in [rule["workflow_type"] for rule in shown["modes"]["rules"]]
        read_status(shown)
    assert of_tenant(whole, "key-0", table.types_of("key-0"))["examples"] == {"agent: misspelt": "agent-of-key-0"}
    assert {*types} <= of_tenant(whole, "", ())["monitor"]["alarms"].keys()


def test_the_types_of_a_tenant_are_bounded() -> None:
    table = WorkflowTable(60.0, lambda: 0.0)
    for number in range(MOST_TYPES_OF_TENANT + 10):
        table.arrived(f"r{number}", Step(f"t{number}", scoped("key-0", f"w{number}"), "a"))
    assert len(table.types_of("key-0")) == MOST_TYPES_OF_TENANT
    assert table.types_of("key-1") == []


@pytest.mark.parametrize(
    ("keys", "presage", "warned"),
    [
        (("one",), {"recorder": {"folder": "/nowhere"}}, True),
        ((), {"recorder": {"folder": "/nowhere"}}, True),
        (("one", "one"), {"recorder": {"folder": "/nowhere"}}, True),
        (("one", "two"), {"recorder": {"folder": "/nowhere"}}, False),
        (("one",), {"recorder": {"folder": "/nowhere"}, "infer_workflows": False}, False),
        (("one",), {}, False),
    ],
)
def test_a_server_whose_users_may_be_joined_in_a_recording_says_so(
    caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], presage: dict[str, Any], warned: bool
) -> None:
    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=list(keys) or None, additional_config={"presage": presage})
    with caplog.at_level("WARNING", logger="presage"):
        plugin.WorkflowRoutes().attach_router(app)
    assert (plugin.JOINED in caplog.text) is warned


@pytest.mark.parametrize("what", ENDS)
def test_an_end_or_a_pause_reaches_the_workflow_of_the_client_that_says_it_and_no_other(what: str) -> None:
    http, engine = server("one", "two")
    path = f"/v1/workflows/r1/{what}?workflow_type=t"
    assert [any(http.post(path, headers=bearer(key)).json().values()) for key in ("one", "two")] == [False, True]
    assert [called[::2] for called in engine.called] == [(ENDS[what], scoped(f"key-{key}", "r1")) for key in (0, 1)]
    forged = f"/v1/workflows/key-1{MARK}r1/{what}?workflow_type=t"
    assert not any(http.post(forged, headers=bearer("one")).json().values())


def test_lists_are_those_of_the_asking_client() -> None:
    http, engine = server("one", "two")
    for path in ("/v1/workflows?first=50", "/v1/workflows/agents"):
        http.get(path, headers=bearer("two")).raise_for_status()
    assert engine.called == [("workflows", "key-1", 50, 50), ("agents", "key-1")]
    assert http.get("/v1/workflows?first=-1", headers=bearer("two")).status_code == 422


def test_one_id_of_two_tenants_is_two_workflows_and_no_name_a_client_writes_is_anothers() -> None:
    counts = EventCounts()
    one, two, none = (
        read({"workflow_id": "r1", "workflow_type": "t", **of}, None, counts)
        for of in ({ARGUMENT: "key-0"}, {ARGUMENT: "key-1"}, {})
    )
    assert one is not None
    assert two is not None
    assert none is not None
    assert len({one.workflow, two.workflow, none.workflow}) == 3
    assert (one.workflow_type, one.stats_key, none.stats_key) == ("t", scoped("key-0", "t"), "t")
    assert (tenant_of(one.workflow_id), unscoped(one.workflow_id), unscoped("r1")) == ("key-0", "r1", "r1")
    assert read({"workflow_id": f"key-1{MARK}r1"}, None, counts) is None
    nested = read({"workflow_id": "r1", "app_metadata": {ARGUMENT: "key-1"}}, None, counts)
    assert nested is not None
    assert nested.workflow == "\0r1"
    assert counts.by_key() == {"workflow_id: not printable": 1}


def test_what_one_tenant_shows_the_counts_they_do_not_tell_another() -> None:
    source = ByName(Forecaster(None, back_off=OnlineCounts(BackoffConfig(min_evidence=2))))

    def run(tenant: str, number: int, agents: list[str]) -> str:
        name = scoped(tenant, f"r{number}")
        for step, agent in enumerate(agents):
            said = source.on_prefill("t", name, agent, step=step)
            source.on_completion("t", name, output_tokens=3)
        source.close("t", name)
        return said.source

    for number in range(20):
        run("key-0", number, ["planner", "attacker"])
    assert run("key-1", 99, ["planner"]) == "none"
    assert run("key-0", 99, ["planner"]) == "back-off"


def test_a_tenant_with_types_without_end_makes_none_forget_but_itself() -> None:
    counts = OnlineCounts(BackoffConfig(types=8, min_evidence=1))
    for _ in range(3):
        counts.of_type(scoped("key-0", "t")).follow(("planner",), "coder")
    for number in range(100):
        counts.of_type(scoped("key-1", f"t{number}")).follow(("planner",), "coder")
    assert len(counts) == 8
    assert counts.next_agents(scoped("key-0", "t"), ["planner"]) is not None
    assert counts.next_agents(scoped("key-1", "t99"), ["planner"]) is not None


def test_a_tenant_can_take_no_more_than_its_share_of_workflows() -> None:
    counts = EventCounts()
    share = 8
    workflows = WorkflowTable(600.0, lambda: 0.0, counts, most=share * TENANT_SHARE)
    for number in range(share + 10):
        step = read({"workflow_id": f"w{number}", ARGUMENT: "key-1"}, None, counts)
        assert step is not None
        workflows.arrived(f"r{number}", step)
    assert len(workflows) == share
    assert counts.by_key() == {"workflows: too many of one tenant": 10}
    other = read({"workflow_id": "w", ARGUMENT: "key-0"}, None, counts)
    assert other is not None
    kept = workflows.arrived("r", other)
    assert kept is not None
    assert workflows.step("r") is kept
    assert kept.step is other
    assert workflows.end(workflow_key("", scoped("key-1", "w3")), EndReason.FINISHED)
    again = read({"workflow_id": "again", ARGUMENT: "key-1"}, None, counts)
    assert again is not None
    assert workflows.arrived("r-again", again) is not None


def test_without_an_admin_key_there_are_no_admin_routes() -> None:
    http, engine = server()
    assert http.post("/v1/workflows/mode", json={"mode": "off"}).status_code in (404, 405)
    assert http.get("/v1/workflows/mode").status_code == 404
    assert not engine.called


def test_an_admin_key_opens_them_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", ADMIN)
    http, engine = server()
    url, body = "/v1/workflows/mode", {"mode": "off"}
    assert http.post(url, json=body).status_code == 401
    for key in ("", "x", ADMIN[:-1], ADMIN + "x", ADMIN.upper()):
        assert http.post(url, json=body, headers={"X-Presage-Admin-Key": key}).status_code == 403
    assert http.post(url, json=body, headers=bearer(ADMIN)).status_code == 401
    assert not engine.called
    behind = {"X-Presage-Admin-Key": ADMIN}
    (told,) = http.post(url, json={**body, "policy": "eviction"}, headers=behind).json()["engines"]
    assert told["policies"] == {"priority": "on", "eviction": "off", "admission": "on", "prefetch": "off"}
    for bad in ({"mode": "maybe"}, {}, {"mode": "on", "policy": "all"}, {"mode": "on", "x": 1}):
        assert http.post(url, json=bad, headers=behind).status_code == 422
    assert http.get(url, headers=behind).status_code == 200


def test_more_modes_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", ADMIN)
    http, engine = server()
    for number in range(999):
        engine.modes.set("off", None, f"t{number}")
    behind = {"X-Presage-Admin-Key": ADMIN}
    refused = http.post("/v1/workflows/mode", json={"mode": "on", "workflow_type": "one more"}, headers=behind)
    assert (refused.status_code, "1000" in refused.json()["detail"]) == (400, True)


def test_a_key_that_is_too_short_is_none_and_the_variable_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(additional_config={"presage": {"admin_key_variable": "MINE"}})
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", ADMIN)
    assert admin_key(args) is None
    monkeypatch.setenv("MINE", ADMIN)
    assert admin_key(args) == ADMIN
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", "")
    assert admin_key(None) is None
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", "x" * (SHORTEST_KEY - 1))
    with pytest.raises(ConfigurationError, match="15 characters"):
        admin_key(None)
