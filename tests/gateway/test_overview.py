"""What a person looks at first: the workflows that run and ended lately, and the agents; each key sees its own."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_samples import Ran
from hypothesis import given
from hypothesis import strategies as st
from served import Seen, before, eventually
from starlette.responses import JSONResponse

from presage.cli.presage import app
from presage.cli.status import PAGE, tables
from presage.gateway.front import Front
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.listeners import overview as overviews
from presage.serving_hooks.listeners.overview import LEAST_ENDED, MOST_AGENTS, MOST_ENDED, Overview
from presage.serving_hooks.status import EngineStatus, as_json, of_tenant, read_status
from presage.serving_hooks.workflows import EndReason, Workflow, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step, scoped

TENANTS = ("", "key-0", "key-1")
SYSTEM = {"planner": "You plan trips to the sea for families.", "writer": "You write what was planned as a letter."}


def reply(_: Seen) -> JSONResponse:
    message = {"role": "assistant", "content": "Take the ferry in the morning, and the train back."}
    return JSONResponse({"id": "c", "model": "m", "choices": [{"index": 0, "message": message}], "usage": {}})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Front]]:
    monkeypatch.setenv("GATEWAY_KEYS", "one,two")
    with before(reply, keys_variable="GATEWAY_KEYS", workflow_type="trips") as (url, _, front):
        yield url, front


def ask(url: str, role: str, question: str, key: str = "one") -> None:
    messages = [{"role": "system", "content": SYSTEM[role]}, {"role": "user", "content": question}]
    httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "m", "messages": messages},
        headers={"authorization": f"Bearer {key}"},
        trust_env=False,
    ).raise_for_status()


def listed(url: str, key: str, *more: object) -> dict[str, Any]:
    (engine,) = Ran(app, "status", url, "--workflows", "--api-key", key, "--json", *more).json["engines"]
    found: dict[str, Any] = engine
    return found


def test_workflows_are_listed_by_page_stay_when_they_end_and_can_be_explained(served: tuple[str, Front]) -> None:
    url, front = served
    for number in range(PAGE + 1):
        ask(url, "planner", f"Where do family {number} go in summer?")
    ask(url, "writer", "Write to the family in the north.", key="two")
    first, second = listed(url, "one"), listed(url, "one", "--page", 2)
    assert (first["running"], len(first["workflows"]), len(second["workflows"])) == (PAGE + 1, PAGE, 1)
    ids = [workflow["workflow_id"] for workflow in (*first["workflows"], *second["workflows"])]
    assert len(set(ids)) == PAGE + 1
    assert len(listed(url, "two")["workflows"]) == 1
    assert eventually(lambda: not front.in_flight)
    oldest = listed(url, "one", "--page", 2)["workflows"][0]
    assert (oldest["workflow_type"], oldest["steps"], oldest["state"]) == ("trips", 1, "away")
    for what in ("pause", "end"):
        path = f"{url}/v1/workflows/{oldest['workflow_id']}/{what}?workflow_type=trips"
        httpx.post(path, headers={"authorization": "Bearer one"}, trust_env=False).raise_for_status()
        state = {"pause": "paused", "end": "finished"}[what]
        assert listed(url, "one", "--page", 2)["workflows"][0]["state"] == state
    shown = Ran(app, "status", url, "--workflows", "--api-key", "one", "--page", 2)
    explain = next(line for line in shown.out.splitlines() if "presage explain" in line).split("presage ")[1]
    assert oldest["workflow_id"] in explain
    assert Ran(app, *explain.split(), "--api-key", "one").code == 0
    assert Ran(app, *explain.split(), "--api-key", "two").code == 2
    assert front.decisions.overview.switch.on


def test_agents_are_listed_with_what_is_known_of_them(served: tuple[str, Front]) -> None:
    url, front = served
    for number in range(3):
        ask(url, "planner", f"Where do family {number} go in winter?")
    ask(url, "writer", "Write to the family in the north.", key="two")
    assert eventually(lambda: not front.in_flight)  # a step counts once its answer has been sent
    (planner,) = Ran(app, "agents", "list", url.removeprefix("http://"), "--api-key", "one", "--json").json["agents"]
    assert (planner["workflow_type"], planner["steps"], planner["model"]) == ("trips", 3, "m")
    shown = Ran(app, "agents", "list", url, "--api-key", "one").out
    assert f"presage agents name {planner['agent']}=NAME" in shown


def test_a_bad_page_is_refused(served: tuple[str, Front]) -> None:
    url, _ = served
    for query in ("first=-1", "most=x", "first=٣"):
        answer = httpx.get(f"{url}/v1/workflows?{query}", headers={"authorization": "Bearer one"}, trust_env=False)
        assert answer.status_code == 400
    assert "--watch" in Ran(app, "status", url, "--workflows", "--watch", "1").complaint


def test_what_is_shown_is_bounded() -> None:
    table = WorkflowTable(60.0, lambda: 0.0)
    overview = Overview(table, EventCounts(), lambda _: "m", lambda: 0.0)
    table.subscribe(overview.workflow_ended)
    for number in range(MOST_AGENTS + 9):
        step = table.arrived(f"r{number}", Step("t", f"w{number}", f"a{number}"))
        overview.request_finished(None, step, LeftStep(f"r{number}", True, 1, "stop"))
        table.finished(f"r{number}")
        table.end(f"t\0w{number}", EndReason.FINISHED)
    assert (overview.workflows("", 0, 1)["ended"], len(overview.agents("")["agents"])) == (MOST_ENDED, MOST_AGENTS)


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "key-0", "key-1"]), st.integers(0, 2), st.sampled_from("abcd")), max_size=60
    ),
    st.integers(1, 9),
)
def test_who_follows_whom_is_counted_by_tenant_and_bounded(steps: list[tuple[str, int, str]], most: int) -> None:
    table = WorkflowTable(60.0, lambda: 0.0)
    overview = Overview(table, EventCounts(), lambda _: "m", lambda: 0.0)
    expected: Counter[tuple[str, str, str]] = Counter()
    latest: dict[tuple[str, int], str] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overviews, "MOST_CALLS", most)
        for number, (tenant, run, agent) in enumerate(steps):
            step = table.arrived(f"r{number}", Step("t", scoped(tenant, f"w{run}"), agent))
            overview.request_arrived(None, step)
            table.finished(f"r{number}")
            overview.request_finished(None, step, LeftStep(f"r{number}", True, 1, "stop"))
            if (before := latest.get((tenant, run))) is not None:
                expected[tenant, before, agent] += 1
            latest[tenant, run] = agent
    shown = {
        (tenant, call["agent"], call["next"]): call["times"]
        for tenant in TENANTS
        for call in overview.agents(tenant)["calls"]
    }
    assert len(shown) == min(len(expected), most)
    assert shown.keys() <= expected.keys()
    assert all(times <= expected[call] for call, times in shown.items())
    if len(expected) <= most:
        assert shown == expected


def test_agents_that_run_beside_each_other_follow_the_one_before_them() -> None:
    table = WorkflowTable(60.0, lambda: 0.0)
    overview = Overview(table, EventCounts(), lambda _: "m", lambda: 0.0)
    for together in (["planner"], ["reader", "checker"], ["writer"]):
        steps = [table.arrived(agent, Step("t", "w", agent)) for agent in together]
        for step in steps:
            overview.request_arrived(None, step)
        for agent, step in zip(together, steps, strict=True):
            table.finished(agent)
            overview.request_finished(None, step, LeftStep(agent, True, 1, "stop"))
    calls = {(call["agent"], call["next"]) for call in overview.agents("")["calls"]}
    assert calls == {("planner", "reader"), ("planner", "checker"), ("checker", "writer")}


def test_names_that_are_given_once_hold_in_the_past_and_in_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"workflow_type": "app-0a1b2c3d", "workflow_id": "w", "model": "m"}
    agents = {"agent-0a1b2c3d": SYSTEM["planner"], "agent-4e5f6071": SYSTEM["writer"] * 9, "critic": None}
    rows = [
        {**columns, "step": step, "agent": agent, "system_prompt": text, "output_tokens": 3, "input_tokens": 3}
        for step, (agent, text) in enumerate(agents.items())
    ]
    Path("steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = Ran(app, "agents", "list", "steps.jsonl").out
    assert SYSTEM["planner"] in shown
    assert f"{(SYSTEM['writer'] * 9)[:59]}…" in shown
    given = ("agent-0a1b2c3d=planner", "agent-4e5f6071=writer", "--workflow-type", "trips", "--in", "agents.json")
    assert Ran(app, "agents", "name", *given).code == 0
    assert Ran(app, "traces", "ingest", "steps.jsonl", "--names", "agents.json", "--to", "named").code == 0
    found = Ran(app, "agents", "list", "named", "--json").json["agents"]
    assert [(agent["workflow_type"], agent["agent"]) for agent in found] == [
        ("trips", name) for name in ("critic", "planner", "writer")
    ]
    Path("bad.json").write_text('{"format": "presage-agent-names", "ids": {"agent-0a1b2c3d": 3}}')
    complaint = Ran(app, "traces", "ingest", "steps.jsonl", "--names", "bad.json", "--to", "other").complaint
    assert "--names bad.json: no agents by their ids" in complaint


def test_a_type_whose_runs_are_not_recognised_as_workflows_is_a_problem() -> None:
    overview = Overview(WorkflowTable(60.0, lambda: 0.0), EventCounts(), str, lambda: 0.0)
    for number in range(LEAST_ENDED):
        for step in (Step("app-1", f"auto-x-{number}", "planner"), Step("named", f"run-{number}", "planner")):
            overview.workflow_ended(Workflow(step, 0.0, latest=0), EndReason.EXPIRED)
    assert overview.one_step() == {"app-1": 1.0}
    told = as_json(EngineStatus(one_step={**overview.one_step(), scoped("b", "app-2"): 0.9}))
    assert of_tenant(told, "a", ["app-1"])["one_step"] == {"app-1": 1.0}
    (problems,) = (
        shown for shown in tables("Gateway", read_status(told) or EngineStatus()) if "Problems" in str(shown.title)
    )
    assert problems.row_count == 2
