"""LlamaIndex: an agent workflow of two agents with a handoff."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from openinference.instrumentation import using_session
from openinference.instrumentation.llama_index import LlamaIndexInstrumentor
from scripted import MODEL, Answer, World, run_all

world = World()
LlamaIndexInstrumentor().instrument(tracer_provider=world.provider)


def model() -> Any:
    return OpenAILike(
        model=MODEL,
        api_base=world.url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=2,
    )


async def search(query: str) -> str:
    """Search."""
    world.tool("search")
    await asyncio.sleep(0.005)
    return "found"


async def read(page: str) -> str:
    """Read."""
    world.tool("read")
    await asyncio.sleep(0.005)
    return "text"


def agent(name: str, *tools: Any, **more: Any) -> Any:
    return FunctionAgent(
        name=name, description=name, system_prompt=f"You are {name}", tools=list(tools), llm=model(), **more
    )


def run(*agents: Any) -> Any:
    async def go() -> Any:
        return await AgentWorkflow(agents=list(agents), root_agent=agents[0].name).run(user_msg="what is it?")

    return asyncio.run(go())


def handoff(world: World) -> None:
    world.script(
        Answer("planner", calls=(("search", {"query": "x"}), ("read", {"page": "y"}))),
        Answer("planner", calls=(("handoff", {"to_agent": "coder", "reason": "x"}),)),
        Answer("coder", calls=(("search", {"query": "z"}),)),
        Answer("coder", "done"),
    )
    run(
        agent("planner", search, read, can_handoff_to=["coder"], streaming=False),
        agent("coder", search, streaming=False),
    )


def retry(world: World) -> None:
    world.script(Answer("planner", status=500), Answer("planner", "done"))
    run(agent("planner", streaming=False))


def stream(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),), cached=128), Answer("planner", "a b c"))
    run(agent("planner", search))


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", "done"))
        with using_session("conversation-1"):
            run(agent("planner", streaming=False))


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", "done"))
        run(agent("planner", streaming=False))


def gives_up(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),)), *[Answer("planner", status=500)] * 20)
    try:
        run(agent("planner", search, streaming=False))
    finally:
        world.answers.clear()


run_all(
    {
        "handoff": handoff,
        "retry": retry,
        "stream": stream,
        "session": session,
        "two_runs": two_runs,
        "gives_up": gives_up,
    },
    world,
)
