"""AutoGen AgentChat: two agents in turns, tools, a team as an agent, retries and streams."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openinference.instrumentation import using_session
from openinference.instrumentation.autogen_agentchat import AutogenAgentChatInstrumentor
from scripted import MODEL, Answer, World, run_all

logging.disable(logging.CRITICAL)
world = World()
AutogenAgentChatInstrumentor().instrument(tracer_provider=world.provider)


def model(**more: Any) -> Any:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    return OpenAIChatCompletionClient(model=MODEL, base_url=world.url, api_key="none", model_info=info, **more)


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
    return AssistantAgent(
        name, model(), tools=list(tools) or None, system_message=f"You are {name}", description=name, **more
    )


def run(team: Any) -> Any:
    return asyncio.run(team.run(task="what is it?"))


def team(world: World) -> None:
    world.script(
        Answer("planner", "plan", cached=512),
        Answer("coder", calls=(("search", {"query": "x"}), ("read", {"page": "y"}))),
        Answer("coder", "done"),
    )
    two = [agent("planner"), agent("coder", search, read, reflect_on_tool_use=True)]
    run(RoundRobinGroupChat(two, termination_condition=MaxMessageTermination(3)))


def handoff(world: World) -> None:
    world.script(
        Answer("planner", calls=(("transfer_to_coder", {}),)),
        Answer("coder", calls=(("search", {"query": "x"}),)),
        Answer("coder", "done"),
    )
    two = [agent("planner", handoffs=["coder"]), agent("coder", search, reflect_on_tool_use=True)]
    run(Swarm(two, termination_condition=MaxMessageTermination(3)))


def retry(world: World) -> None:
    world.script(Answer("planner", status=500), Answer("planner", "done"))
    run(agent("planner"))


def stream(world: World) -> None:
    world.script(Answer("planner", "a b c", cached=128), Answer("planner", "a b c", usage=False))

    async def go() -> None:
        one = agent("planner", model_client_stream=True)
        for number in range(2):
            world.workflow = number
            async for _ in one.run_stream(task="hello"):
                pass

    asyncio.run(go())


def no_usage(world: World) -> None:
    world.script(Answer("planner", "done", usage=False))
    run(agent("planner"))


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", "done"))
        with using_session("conversation-1"):
            run(agent("planner"))


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", "plan"), Answer("coder", "done"))
        run(RoundRobinGroupChat([agent("planner"), agent("coder")], termination_condition=MaxMessageTermination(3)))


def gives_up(world: World) -> None:
    world.script(Answer("planner", "plan"), *[Answer("coder", status=500)] * 3)
    run(RoundRobinGroupChat([agent("planner"), agent("coder")], termination_condition=MaxMessageTermination(3)))


run_all(
    {
        "team": team,
        "handoff": handoff,
        "retry": retry,
        "stream": stream,
        "no_usage": no_usage,
        "session": session,
        "two_runs": two_runs,
        "gives_up": gives_up,
    },
    world,
)
