"""Graphs of LangGraph over many rows: unchanged, on the run's engines, each answer asked for once."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from batch_samples import ENGINE, Echo
from langchain_core.language_models import FakeListChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import interrupt
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from presage.batch import Plan, function, given
from presage.batch.langgraph import plan_of_graph, run_graph
from presage.batch.prefix_tree import tree_of
from presage.batch.run import BatchRun, RunReport, RunSettings
from presage.batch.schedule import soft_order
from presage.errors import ConfigurationError, EngineError

SOMEWHERE = "http://127.0.0.1:9/v1"  # nobody is there: what is answered was answered by the run


class Verdict(BaseModel):
    good: bool


class Judged(MessagesState):
    verdict: Verdict


class Named(TypedDict):
    name: str
    error: str


def model(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": "tiny", "base_url": SOMEWHERE, "api_key": "none", "max_retries": 1, **more})


class State(TypedDict):
    question: str
    notes: Annotated[list[str], operator.add]
    answer: str


def research(temperature: float | None = 0) -> Any:
    """Two experts at once, an asynchronous and a synchronous one, and a writer that goes round until three notes."""
    asked = model(temperature=temperature)

    async def lawyer(state: State) -> dict[str, Any]:
        said = await asked.ainvoke([("system", "You are a lawyer."), ("user", state["question"])])
        return {"notes": [said.text]}

    def doctor(state: State) -> dict[str, Any]:
        return {"notes": [asked.invoke([("system", "You are a doctor."), ("user", state["question"])]).text]}

    def writer(state: State) -> dict[str, Any]:
        return {"answer": asked.invoke("write: " + " ".join(sorted(state["notes"]))).text}

    built = StateGraph(State)
    for node in (lawyer, doctor, writer):
        built.add_node(node.__name__, node)
    built.add_edge(START, "lawyer")
    built.add_edge(START, "doctor")
    built.add_edge("lawyer", "writer")
    built.add_edge("doctor", "writer")
    built.add_conditional_edges("writer", lambda state: "lawyer" if len(state["notes"]) < 3 else END, ["lawyer", END])
    return built.compile(name="research", checkpointer=InMemorySaver())


def one_node(node: Any, state: Any = MessagesState) -> Any:
    built = StateGraph(state)
    built.add_node("node", node)
    built.add_edge(START, "node")
    return built.compile(name="one")


def ran(
    graph: Any, rows: Sequence[dict[str, Any]], folder: Path, server: Echo, **settings: Any
) -> tuple[RunReport, list[dict[str, Any]]]:
    plan = graph if isinstance(graph, Plan) else plan_of_graph(graph, list(rows[0]), "graph")
    chosen = RunSettings(**{"attempts": 1, **settings})
    order = soft_order(plan, tree_of(plan, {}), rows)
    run = BatchRun(plan, rows, [ENGINE], folder, order=order, settings=chosen, transport=server)
    try:
        return asyncio.run(run.run()), list(run.results())
    finally:
        run.close()


def test_rows_go_through_an_unchanged_graph_and_its_nodes_are_the_agents(tmp_path: Path) -> None:
    server = Echo(delay_s=0.005)
    rows = [{"id": f"r{n}", "question": f"why {n}"} for n in range(5)]
    report, results = ran(research(), rows, tmp_path / "run", server)
    assert [row["id"] for row in results] == [f"r{n}" for n in range(5)]
    assert results[3]["answer"] == "<write: <why 3> <why >"
    assert sorted(results[3]["notes"]) == ["<why 3>"] * 3
    assert not any(row["error"] for row in results)
    assert {agent for _, _, agent in server.names} == {"lawyer", "doctor", "writer"}
    assert {(kind, name) for kind, name, _ in server.names} == {("research", f"run%2Fr{n}") for n in range(5)}
    assert len(server.ended) == 5
    assert server.most > 3  # rows wait for each other no more than calls of a plan do
    assert report.asked == len(server.asked)
    again = Echo()
    assert ran(research(), rows, tmp_path / "run", again)[1] == results
    assert not again.asked


def test_no_more_calls_are_under_way_than_the_engine_may_have(tmp_path: Path) -> None:
    server = Echo(delay_s=0.002)
    rows = [{"question": f"why {n}"} for n in range(12)]
    ran(research(), rows, tmp_path / "run", server, concurrency=2)
    assert server.most == 2


def test_equal_prompts_at_temperature_0_are_asked_once_and_samples_each(tmp_path: Path) -> None:
    rows = [{"question": "why"}] * 4
    server = Echo(delay_s=0.005)
    report, _ = ran(research(), rows, tmp_path / "zero", server)
    assert report.asked == 4  # lawyer, doctor, and the writer of two notes and of three
    for temperature in (None, 0.7):
        server = Echo(delay_s=0.005)
        ran(research(temperature), rows, tmp_path / f"{temperature}", server)
        assert len(server.asked) == 4 * 5
        again = Echo()
        ran(research(temperature), rows, tmp_path / f"{temperature}", again)
        assert not again.asked


def test_tools_structured_answers_and_streams_are_those_of_the_engine(tmp_path: Path) -> None:
    @tool
    def search(query: str) -> str:
        """Search."""
        return f"found {query}"

    def says(messages: list[dict[str, str]]) -> str | dict[str, Any]:
        if "judge" in messages[-1]["content"]:
            return '{"good": true}'
        if messages[-1]["role"] == "tool":
            return f"It is {messages[-1]['content']}."
        call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
        return {"content": None, "tool_calls": [call]}

    async def agent(state: Judged) -> dict[str, Any]:
        whole: Any = None
        async for chunk in model(temperature=0, stream_usage=True).bind_tools([search]).astream(state["messages"]):
            whole = chunk if whole is None else whole + chunk
        assert whole.usage_metadata["output_tokens"] == 5
        return {"messages": [whole]}

    async def judge(state: Judged) -> dict[str, Any]:
        return {"verdict": await model(temperature=0).with_structured_output(Verdict).ainvoke("judge it")}

    built = StateGraph(Judged)
    built.add_node("agent", agent)
    built.add_node("tools", ToolNode([search]))
    built.add_node("judge", judge)
    built.add_edge(START, "agent")
    built.add_conditional_edges("agent", tools_condition, {"tools": "tools", END: "judge"})
    built.add_edge("tools", "agent")
    server = Echo(says)
    rows = [{"messages": [{"role": "user", "content": "what is x?"}]}]
    _, results = ran(built.compile(), rows, tmp_path / "run", server)
    assert results[0]["error"] is None
    assert [message["role"] for message in results[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert results[0]["messages"][-1]["content"] == "It is found x."
    assert results[0]["verdict"] == {"good": True}
    assert [len(body.get("tools", ())) for body in server.asked] == [1, 1, 0]
    assert not any(body.get("stream") for body in server.asked)


def test_a_graph_is_an_operator_among_others_and_plain_clients_are_answered_too(tmp_path: Path) -> None:
    def ask(state: State) -> dict[str, Any]:
        client = OpenAI(base_url=SOMEWHERE, api_key="none")
        said = client.chat.completions.create(
            model="tiny", temperature=0, messages=[{"role": "user", "content": state["question"]}]
        )
        return {"answer": said.choices[0].message.content}

    state = run_graph(one_node(ask, State), question=function(str.upper, given("q")))
    server = Echo()
    _, results = ran(Plan("p", size=function(len, state), state=state), [{"q": "why"}], tmp_path / "run", server)
    assert results[0]["state"]["answer"] == "<WHY>"
    assert server.names[0][2] == "node"


def test_what_a_graph_does_wrong_is_the_error_of_its_row(tmp_path: Path) -> None:
    async def bad(state: State) -> dict[str, Any]:
        kind = state["question"]
        if kind == "raises":
            raise KeyError("private text of a row")
        if kind == "responses":
            await model(use_responses_api=True).ainvoke("x")
        if kind == "blocks":
            model().invoke("x")
        if kind == "asks a person":
            interrupt("may I?")
        if kind == "no JSON":
            return {"answer": object()}
        return {"answer": (await model().ainvoke(kind)).text}

    server = Echo(lambda messages: 400 if messages[-1]["content"] == "refused" else "fine")
    kinds = ["raises", "responses", "blocks", "asks a person", "no JSON", "refused", "fine"]
    report, results = ran(one_node(bad, State), [{"question": kind} for kind in kinds], tmp_path / "run", server)
    errors = {kind: str(row["error"]) for kind, row in zip(kinds, results, strict=True)}
    assert errors["raises"].startswith("graph one: node node raised KeyError: 'private text of a row' (test_batch_lang")
    assert report.failures["graph one: node node raised KeyError"] == 1  # what the terminal shows
    assert "use_responses_api=False" in errors["responses"]
    assert "await model.ainvoke" in errors["blocks"]
    assert "person" in errors["asks a person"]
    assert errors["no JSON"].startswith("an output is no JSON value")
    assert errors["refused"].endswith("(call of node: HTTP 400: no)")
    assert results[-1]["answer"] == "fine"
    assert report.failed == 6


def test_a_graph_that_handles_a_refusal_goes_on_and_one_that_never_ends_fails(tmp_path: Path) -> None:
    async def careful(state: State) -> dict[str, Any]:
        try:
            return {"answer": (await model().ainvoke(state["question"])).text}
        except BadRequestError:
            return {"answer": (await model().ainvoke("shorter")).text}

    server = Echo(lambda messages: 400 if messages[-1]["content"] == "long" else "fine")
    assert ran(one_node(careful, State), [{"question": "long"}], tmp_path / "a", server)[1][0]["answer"] == "fine"
    built = StateGraph(State)
    built.add_node("node", careful)
    built.add_edge(START, "node")
    built.add_edge("node", "node")
    endless = built.compile(name="endless").with_config(recursion_limit=4)
    _, results = ran(endless, [{"question": "why"}], tmp_path / "b", Echo())
    assert results[0]["error"] == "graph endless: it reached its recursion limit before its end"


def test_what_concerns_every_row_ends_the_run(tmp_path: Path) -> None:
    def large(state: State) -> dict[str, Any]:
        try:
            return {"answer": model(model="large").invoke("x").text}
        except Exception:
            return {"answer": "the graph hides it"}

    with pytest.raises(EngineError, match=r"node asks 'large'; it serves tiny"):
        ran(one_node(large, State), [{"question": "why"}], tmp_path / "a", Echo())

    def fake(state: State) -> dict[str, Any]:
        return {"answer": FakeListChatModel(responses=["made up"]).invoke("x").text}

    with pytest.raises(EngineError, match="node asked a model past the batch"):
        ran(one_node(fake, State), [{"question": "why"}], tmp_path / "b", Echo())

    class Gone(Echo):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/chat/completions":
                raise httpx.ConnectError("gone")
            return await super().handle_async_request(request)

    with pytest.raises(EngineError, match="it does not answer"):
        ran(research(), [{"question": "why"}], tmp_path / "c", Gone())


def test_threads_that_wait_for_answers_end_with_the_run(tmp_path: Path) -> None:
    def patient(state: State) -> dict[str, Any]:
        return {"answer": model(model=state["question"]).invoke(state["answer"]).text}

    rows = [{"question": "tiny", "answer": f"{n}"} for n in range(8)] + [{"question": "large", "answer": ""}]
    with pytest.raises(EngineError, match="asks 'large'"):
        ran(one_node(patient, State), rows, tmp_path / "run", Echo(delay_s=600), concurrency=16)


def test_graphs_and_rows_that_do_not_fit_are_refused() -> None:
    async def node(state: State) -> dict[str, Any]:
        return {}

    built = StateGraph(State)
    built.add_node("node", node)
    built.add_edge(START, "node")
    with pytest.raises(ConfigurationError, match="a graph that is not compiled"):
        plan_of_graph(built, ["question"], "g")
    with pytest.raises(ConfigurationError, match="a dict; a compiled graph of LangGraph is wanted"):
        run_graph({}, question="why")
    with pytest.raises(ConfigurationError, match="stops for a person before or after node"):
        run_graph(built.compile(checkpointer=InMemorySaver(), interrupt_before=["node"]), question="why")
    with pytest.raises(ConfigurationError, match="no input 'query'; it has question, notes, answer"):
        run_graph(built.compile(), query="why")
    with pytest.raises(ConfigurationError, match="the rows have none of these but id, q"):
        plan_of_graph(built.compile(), ["id", "q"], "g")


def test_fields_named_as_columns_of_results_have_another_name() -> None:
    async def node(state: Named) -> dict[str, Any]:
        return {}

    assert list(plan_of_graph(one_node(node, Named), ["name"], "g").outputs) == ["name", "state_error"]


def test_first_rows_show_how_many_fit_the_engines_cache(tmp_path: Path) -> None:
    async def talk(state: State) -> dict[str, Any]:
        said = [("user", state["question"])]
        for _ in range(3):
            said += [("assistant", (await model(temperature=0).ainvoke(said)).text), ("user", "and then?")]
        return {"answer": "done"}

    rows = [{"question": f"{n} {'word ' * 1000}"} for n in range(40)]  # 1,250 tokens, read three times
    for cache, most in ((0, 40), (20_000, 11)):
        server = Echo(delay_s=0.5 if cache else 0.02, cache_tokens=cache)  # long beside what a busy machine takes
        late: list[int] = []

        def says(messages: list[dict[str, str]], server: Echo = server, late: list[int] = late) -> str:
            if len(server.asked) > 45:
                late.append(server.now + 1)
            return "go on"

        server.says = says
        ran(one_node(talk, State), rows, tmp_path / str(cache), server)
        assert max(late) <= most
        assert server.most <= max(most, 8)
        assert cache == 0 or max(late) >= most - 1


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from batch_samples import Echo
from test_batch_langgraph import ran, research
asked = open({log!r}, "a", buffering=1)
def says(messages):
    asked.write(repr(messages) + "\\n")
    return "<" + messages[-1]["content"][:20] + ">"
rows = [{{"question": f"why {{n}} then"}} for n in range(30)]
ran(research(), rows, Path({folder!r}), Echo(says, delay_s=0.005), concurrency=4)
"""


@pytest.mark.slow
def test_killed_again_and_again_a_graph_has_every_result_once_and_asks_little_twice(tmp_path: Path) -> None:
    folder, log = tmp_path / "r", tmp_path / "asked"
    code = KILLED.format(tests=str(Path(__file__).parent), log=str(log), folder=str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        before = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if log.exists() and log.stat().st_size > before + 2000:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = [{"question": f"why {n} then"} for n in range(30)]
    again = Echo()
    report, results = ran(research(), rows, folder, again)
    assert report.failed == 0
    whole, expected = ran(research(), rows, tmp_path / "whole", Echo())
    assert [{**row, "notes": sorted(row["notes"])} for row in results] == [
        {**row, "notes": sorted(row["notes"])} for row in expected
    ]
    asked = log.read_text().splitlines() + [repr(body["messages"]) for body in again.asked]
    assert len(set(asked)) == whole.asked
    assert len(asked) <= whole.asked + 3 * 4  # what was under way at each kill
    assert len(again.asked) < whole.asked
    assert json.loads(json.dumps(results)) == results
