"""smolagents: a tool-calling agent with a managed agent."""

from __future__ import annotations

from typing import Any

from openinference.instrumentation import using_session
from openinference.instrumentation.smolagents import SmolagentsInstrumentor
from scripted import MODEL, Answer, World, run_all
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

world = World()
SmolagentsInstrumentor().instrument(tracer_provider=world.provider)


def model() -> Any:
    return OpenAIServerModel(model_id=MODEL, api_base=world.url, api_key="none")


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: what for
    """
    world.tool("search")
    return "found"


@tool
def read(page: str) -> str:
    """Read.

    Args:
        page: which
    """
    world.tool("read")
    return "text"


def agent(name: str, *tools: Any, **more: Any) -> Any:
    return ToolCallingAgent(
        tools=list(tools), model=model(), name=name, description=name, max_steps=4, verbosity_level=0, **more
    )


FINAL = (("final_answer", {"answer": "done"}),)


def managed(world: World) -> None:
    world.script(
        Answer("planner", calls=(("search", {"query": "x"}), ("read", {"page": "y"})), cached=512),
        Answer("planner", calls=(("coder", {"task": "z"}),)),
        Answer("coder", calls=(("search", {"query": "z"}),)),
        Answer("coder", calls=FINAL),
        Answer("planner", calls=FINAL),
    )
    agent("planner", search, read, managed_agents=[agent("coder", search)]).run("what is it?")


def retry(world: World) -> None:
    world.script(Answer("planner", status=500), Answer("planner", calls=FINAL))
    agent("planner").run("what is it?")


def stream(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),), cached=128), Answer("planner", calls=FINAL))
    for _ in agent("planner", search, stream_outputs=True).run("what is it?", stream=True):
        pass


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", calls=FINAL))
        with using_session("conversation-1"):
            agent("planner").run("what is it?")


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", calls=FINAL))
        agent("planner").run("what is it?")


def gives_up(world: World) -> None:
    world.script(*[Answer("planner", status=500)] * 40)
    try:
        agent("planner").run("what is it?")
    finally:
        world.answers.clear()


run_all(
    {
        "managed": managed,
        "retry": retry,
        "stream": stream,
        "session": session,
        "two_runs": two_runs,
        "gives_up": gives_up,
    },
    world,
)
