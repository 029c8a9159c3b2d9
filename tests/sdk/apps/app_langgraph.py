"""LangGraph: two agents of which one is a ready-made agent with tools, a fan-out, a retry, a stream, a session."""

from __future__ import annotations

import operator
import os
import sys
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from scripted import MODEL, Answer, World, run_all

world = World()
INSTRUMENTATION = sys.argv[2]
CALLBACKS: list[Any] = []
if INSTRUMENTATION == "openinference":
    from openinference.instrumentation.langchain import LangChainInstrumentor

    LangChainInstrumentor().instrument(tracer_provider=world.provider)
elif INSTRUMENTATION == "openllmetry":
    from opentelemetry.instrumentation.langchain import LangchainInstrumentor

    LangchainInstrumentor().instrument(tracer_provider=world.provider)
elif INSTRUMENTATION == "langfuse":
    from langfuse import Langfuse
    from langfuse.langchain import CallbackHandler

    Langfuse(public_key="pk", secret_key="sk", base_url=world.url, tracer_provider=world.provider)
    CALLBACKS.append(CallbackHandler())
else:  # LangSmith
    os.environ.update(LANGSMITH_TRACING="true", LANGSMITH_OTEL_ENABLED="true", LANGSMITH_OTEL_ONLY="true")
    os.environ.update(LANGSMITH_API_KEY="none", LANGSMITH_ENDPOINT=world.url)
    from langchain_core.tracers.langchain import wait_for_all_tracers
    from opentelemetry import trace

    trace.set_tracer_provider(world.provider)
    world.flush = wait_for_all_tracers


class State(TypedDict):
    messages: Annotated[list[Any], operator.add]


@tool
def search(query: str) -> str:
    """Search."""
    world.tool("search")
    return "found"


@tool
def read(page: str) -> str:
    """Read a page."""
    world.tool("read")
    return "text"


@tool
def broken(page: str) -> str:
    """Fail."""
    world.tool("broken")
    raise ValueError("scripted failure of a tool")


def model(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=world.url, api_key="none", max_retries=2, **more)


def ask(state: State) -> dict[str, Any]:
    return {"messages": [model().invoke([("system", "You are one of them"), *state["messages"]])]}


def graph(tools: list[Any], *, name: str = "support") -> Any:
    built = StateGraph(State)
    built.add_node("planner", ask)
    built.add_node("researcher", create_agent(model(), tools))
    built.add_edge(START, "planner")
    built.add_edge("planner", "researcher")
    built.add_edge("researcher", END)
    return built.compile(name=name)


def start(session: str | None = None) -> dict[str, Any]:
    metadata = {"langfuse_session_id" if INSTRUMENTATION == "langfuse" else "session_id": session} if session else {}
    return {"metadata": metadata, "callbacks": CALLBACKS}


QUESTION = {"messages": [("user", "what is it?")]}


def agents_and_tools(world: World) -> None:
    world.script(
        Answer("planner", "plan", cached=512),
        Answer("researcher", calls=(("search", {"query": "x"}), ("read", {"page": "y"}))),
        Answer("researcher", calls=(("search", {"query": "z"}),)),
        Answer("researcher", "done"),
    )
    graph([search, read]).invoke(QUESTION, start())


def fan_out(world: World) -> None:
    world.script(
        Answer("planner", "plan"),
        Answer("left", "one", when="You are left"),
        Answer("right", "two", when="You are right"),
        Answer("writer", "three"),
    )
    built = StateGraph(State)
    built.add_node("planner", ask)
    for name in ("left", "right"):
        built.add_node(name, lambda state, name=name: {"messages": [model().invoke(f"You are {name}")]})
    built.add_node("writer", ask)
    built.add_edge(START, "planner")
    built.add_edge("planner", "left")
    built.add_edge("planner", "right")
    built.add_edge(["left", "right"], "writer")
    built.compile(name="support").invoke(QUESTION, start())


def retry(world: World) -> None:
    world.script(
        Answer("planner", status=500),
        Answer("planner", "plan"),
        Answer("researcher", "done"),
    )
    graph([search]).invoke(QUESTION, start())


def stream(world: World) -> None:
    world.script(Answer("planner", "a b c", cached=128), Answer("planner", "d e f", usage=False))

    def streamed(state: State) -> dict[str, Any]:
        text = "".join(str(chunk.content) for chunk in model(stream_usage=True).stream("hello"))
        text += "".join(str(chunk.content) for chunk in model(stream_usage=False).stream("again"))
        return {"messages": [("assistant", text)]}

    built = StateGraph(State)
    built.add_node("planner", streamed)
    built.add_edge(START, "planner")
    built.add_edge("planner", END)
    list(built.compile(name="support").stream(QUESTION, start()))


def responses(world: World) -> None:
    world.script(Answer("planner", "plan", cached=256), Answer("planner", "again", cached=128))

    def both(state: State) -> dict[str, Any]:
        one = model(use_responses_api=True).invoke("hello")
        for _ in model(use_responses_api=True).stream("again"):
            pass
        return {"messages": [one]}

    built = StateGraph(State)
    built.add_node("planner", both)
    built.add_edge(START, "planner")
    built.add_edge("planner", END)
    built.compile(name="support").invoke(QUESTION, start())


def session(world: World) -> None:
    for turn in range(2):
        world.script(Answer("planner", "plan"), Answer("researcher", "done"))
        graph([search]).invoke({"messages": [("user", f"turn {turn}")]}, start("conversation-1"))


def two_runs(world: World) -> None:
    for turn in range(2):
        world.workflow = turn
        world.script(Answer("planner", "plan"), Answer("researcher", "done"))
        graph([search]).invoke({"messages": [("user", f"run {turn}")]}, start())


def fails(world: World) -> None:
    world.script(
        Answer("planner", "plan"),
        Answer("researcher", calls=(("broken", {"page": "x"}),)),
    )
    graph([broken]).invoke(QUESTION, start())


run_all(
    {
        "agents_and_tools": agents_and_tools,
        "fan_out": fan_out,
        "retry": retry,
        "stream": stream,
        "responses": responses,
        "session": session,
        "two_runs": two_runs,
        "fails": fails,
    },
    world,
)
