"""Strands Agents and its own instrumentation: tools, an agent as a tool, a graph of agents."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import set_tracer_provider
from scripted import MODEL, Answer, World, run_all

world = World()
set_tracer_provider(world.provider)
from strands import Agent, tool  # noqa: E402
from strands.models.openai import OpenAIModel  # noqa: E402
from strands.multiagent import GraphBuilder, Swarm  # noqa: E402


def model() -> Any:
    return OpenAIModel(client_args={"base_url": world.url, "api_key": "none"}, model_id=MODEL)


@tool
def search(query: str) -> str:
    """Search."""
    world.tool("search")
    return "found"


@tool
def read(page: str) -> str:
    """Read."""
    world.tool("read")
    return "text"


def agent(name: str, *tools: Any, **more: Any) -> Any:
    return Agent(
        name=name, model=model(), system_prompt=f"You are {name}", tools=list(tools), callback_handler=None, **more
    )


def tools(world: World) -> None:
    world.script(
        Answer("planner", calls=(("search", {"query": "x"}), ("read", {"page": "y"})), cached=512),
        Answer("planner", calls=(("ask_coder", {"question": "z"}),)),
        Answer("coder", calls=(("search", {"query": "z"}),)),
        Answer("coder", "done"),
        Answer("planner", "done"),
    )
    coder = agent("coder", search)

    @tool
    def ask_coder(question: str) -> str:
        """Ask."""
        return str(coder(question))

    agent("planner", search, read, ask_coder)("what is it?")


def graph(world: World) -> None:
    world.script(
        Answer("planner", "plan"),
        Answer("left", "one", when="You are left"),
        Answer("right", "two", when="You are right"),
        Answer("writer", "three"),
    )
    builder = GraphBuilder()
    for name in ("planner", "left", "right", "writer"):
        builder.add_node(agent(name), name)
    for one, other in (("planner", "left"), ("planner", "right"), ("left", "writer"), ("right", "writer")):
        builder.add_edge(one, other)
    builder.set_entry_point("planner")
    builder.build()("what is it?")


def swarm(world: World) -> None:
    world.script(
        Answer("planner", calls=(("handoff_to_agent", {"agent_name": "coder", "message": "x"}),)),
        Answer("planner", "done"),
        Answer("coder", "done"),
    )
    Swarm([agent("planner"), agent("coder")])("what is it?")


def retry(world: World) -> None:
    world.script(Answer("planner", status=500), Answer("planner", "done"))
    agent("planner")("what is it?")


def no_usage(world: World) -> None:
    world.script(Answer("planner", "done", usage=False))
    agent("planner")("what is it?")


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", "done"))
        agent("planner", trace_attributes={"session.id": "conversation-1"})("what is it?")


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", "done"))
        agent("planner")("what is it?")


def gives_up(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),)), *[Answer("planner", status=500)] * 3)
    agent("planner", search)("what is it?")


run_all(
    {
        "tools": tools,
        "graph": graph,
        "swarm": swarm,
        "retry": retry,
        "no_usage": no_usage,
        "session": session,
        "two_runs": two_runs,
        "gives_up": gives_up,
    },
    world,
)
