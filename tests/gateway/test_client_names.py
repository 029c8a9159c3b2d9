"""Clients that name their workflows and agents with `presage.client`: what the gateway and the server behind it get."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_apps import Behind, Model, behind_gateway, chat_model, desk_graph, desk_reply, report_graph, triage
from test_front import eventually

from presage import client as presage_client
from presage.client import add_names, agent, names, workflow
from presage.serving_hooks.workflows import EndReason

openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
MESSAGES = [{"role": "user", "content": "Plan a trip to the sea."}]


@pytest.fixture
def behind() -> Iterator[Behind]:
    with behind_gateway(desk_reply(Model())) as found:
        yield found


def named(behind: Behind) -> list[tuple[str, str, str]]:
    """(workflow type, workflow id, agent) of each request; all sent by the client."""
    assert {(one.workflow_source, one.agent_source) for *_, one in behind.sent.found} == {("explicit", "explicit")}
    steps = [one.step for *_, one in behind.sent.found]
    return [(step.workflow_type, step.workflow_id, step.agent) for step in steps]


def test_names_of_workflow_and_agent_reach_the_gateway_and_go_no_further() -> None:
    with behind_gateway() as behind:
        client = openai.OpenAI(base_url=behind.url, api_key="none", http_client=presage_client.http_client())
        ask = client.chat.completions.with_raw_response.create
        with workflow("Bericht für Zoë", agent="planner") as workflow_id:
            ask(model="simulated", messages=MESSAGES)
            with agent("100 %, écrivain"):
                ask(model="simulated", messages=MESSAGES)
        kind = "Bericht für Zoë"
        assert named(behind) == [(kind, workflow_id, "planner"), (kind, workflow_id, "100 %, écrivain")]
        assert not any(name.startswith("x-presage") for _, headers in behind.engine.seen for name in headers)
        assert eventually(lambda: not len(behind.front.decisions.table))  # it has ended
        behind.sent.found.clear()
        ask(model="simulated", messages=MESSAGES)
        assert behind.sent.found[0][2].workflow_source == "new"


def test_asynchronous_workflows_at_the_same_time_are_told_apart() -> None:
    async def one(client: Any, name: str) -> None:
        with workflow("batch", name):
            await asyncio.gather(*(client.chat.completions.create(model="simulated", messages=MESSAGES) for _ in "ab"))

    async def both(url: str) -> None:
        http = presage_client.async_http_client()
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
            await asyncio.gather(one(client, "first"), one(client, "second"))

    with behind_gateway() as behind:
        asyncio.run(both(behind.url))
        found = [identity.step.workflow_id for *_, identity in behind.sent.found]
        assert sorted(found) == ["first", "first", "second", "second"]


def test_a_workflow_that_fails_ends_too_and_no_gateway_is_no_error() -> None:
    with behind_gateway() as behind:
        client = openai.OpenAI(base_url=behind.url, api_key="none", http_client=presage_client.http_client())
        with pytest.raises(openai.NotFoundError), workflow("fails"):
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert eventually(lambda: not len(behind.front.decisions.table))
    with workflow("alone"), pytest.raises(openai.APIConnectionError):
        client.with_options(max_retries=0).chat.completions.create(model="simulated", messages=MESSAGES)
    assert names() == {}


def test_the_hook_serves_httpx_and_keeps_the_hooks_of_the_application(behind: Behind) -> None:
    import httpx

    with workflow("plain", "w-1"), httpx.Client(event_hooks={"request": [add_names]}) as client:
        body = {"model": "simulated", "messages": [{"role": "system", "content": ""}, *MESSAGES]}
        assert client.post(f"{behind.url}/chat/completions", json=body).status_code == 200
    assert behind.sent.found[0][2].step.workflow_id == "w-1"
    seen: list[Any] = []
    with presage_client.http_client(event_hooks={"request": [seen.append]}) as client:
        client.get(f"{behind.url}/models")
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["invoke", "stream", "ainvoke"])
def test_a_graph_names_its_nodes_and_ends_its_workflow(behind: Behind, how: str) -> None:
    pytest.importorskip("langgraph", reason="the extra `clients` is not installed")
    pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    http = {"http_client": presage_client.http_client(), "http_async_client": presage_client.async_http_client()}
    graph = desk_graph(chat_model(behind.url, **http))
    given, config = {"question": "Where is my parcel?"}, {"callbacks": [presage_client.langchain_handler()]}
    for _ in range(2):
        if how == "ainvoke":
            asyncio.run(graph.ainvoke(given, config))
        else:
            list(getattr(graph, how)(given, config))
    found = named(behind)
    assert [(kind, role) for kind, _, role in found] == [("desk", "router"), ("desk", "shipping")] * 2
    assert [found[0][1], found[2][1]] == [found[1][1], found[3][1]]
    assert found[0][1] != found[2][1]
    assert eventually(lambda: not len(behind.front.decisions.table))
    assert names() == {}


def test_a_graph_that_a_human_interrupts_is_one_workflow_with_one_end_in_any_process(tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="the extra `clients` is not installed")
    with behind_gateway() as behind:
        from approval_app import __file__ as script
        from approval_app import answers

        table, checkpoints = behind.front.decisions.table, tmp_path / "checkpoints"
        assert answers(behind.url, checkpoints, "begin") == ["asks", "asks"]
        assert eventually(lambda: all(workflow.paused_until for workflow in list(table)))
        assert (len(table), sum(table.ends.values())) == (2, 0)
        command = [sys.executable, script, behind.url, str(checkpoints), "yes"]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "['done', 'done']\n"
        threads = [("approval", f"thread-{number}") for number in (0, 1)]
        steps = [(kind, name, role) for kind, name, role in named(behind) if (kind, name) == threads[0]]
        assert [role for *_, role in steps] == ["planner", "writer"]
        assert {(kind, name) for kind, name, _ in named(behind)} == set(threads)
        assert eventually(lambda: not len(table))
        assert table.ends == {EndReason.FINISHED: 2}


def test_a_run_that_goes_on_without_a_request_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with behind_gateway() as behind:
        client = openai.OpenAI(base_url=behind.url, api_key="none", http_client=presage_client.http_client())
        with workflow("report", "r-1"):
            client.chat.completions.create(model="simulated", messages=MESSAGES)
            presage_client.pause()
        table = behind.front.decisions.table
        assert eventually(lambda: all(paused.paused_until for paused in list(table)))
        monkeypatch.setattr(presage_client, "_LATEST", {})  # as in another process
        monkeypatch.setenv("OPENAI_BASE_URL", behind.url)
        with workflow("report", "r-1"):  # the human says no
            pass
        assert eventually(lambda: not len(table))
        assert table.ends == {EndReason.FINISHED: 1}


def test_a_graph_and_a_model_alone_stay_in_the_workflow_around_them() -> None:
    pytest.importorskip("langgraph", reason="the extra `clients` is not installed")
    pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    with behind_gateway() as behind:
        model = chat_model(behind.url, http_client=presage_client.http_client())
        config = {"callbacks": [presage_client.langchain_handler("given")]}
        with workflow("outer", "w-1"):
            report_graph(model).invoke({"question": "Where is my parcel?"}, config)
            model.invoke("And now?", config)
        model.invoke("Another one", config)
        assert [(kind, name == "w-1") for kind, name, _ in map(_step, behind.sent.found)] == [
            *[("outer", True)] * 4,
            ("given", False),
        ]
        assert eventually(lambda: not len(behind.front.decisions.table))


def _step(found: Any) -> tuple[str, str, str]:
    step = found[2].step
    return step.workflow_type, step.workflow_id, step.agent


def test_run_hooks_name_the_agents_of_the_agents_sdk() -> None:
    agents = pytest.importorskip("agents", reason="the extra `clients` is not installed")

    async def run(url: str) -> None:
        http = presage_client.async_http_client()
        client = openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http)
        with workflow("support"):
            await agents.Runner.run(
                triage(url, "chat", client=client), "My parcel is late.", hooks=presage_client.agents_hooks()
            )

    with behind_gateway() as behind:
        asyncio.run(run(behind.url))
        assert [(kind, role) for kind, _, role in named(behind)] == [
            ("support", "triage"),
            ("support", "triage"),
            ("support", "refunds"),
        ]
        assert eventually(lambda: not len(behind.front.decisions.table))


def test_importing_it_loads_no_client_library() -> None:
    code = (
        "import sys, presage.client; "
        "sys.exit(any(m in sys.modules for m in ('openai', 'httpx', 'langchain_core', 'agents', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
