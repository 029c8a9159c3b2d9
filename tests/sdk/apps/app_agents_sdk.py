"""The OpenAI Agents SDK: a handoff, tools, a stream, a retry, a session, on both of OpenAI's interfaces."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import nullcontext
from typing import Any

from scripted import MODEL, Answer, World, run_all

os.environ["OPENAI_API_KEY"] = "none"
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_trace_processors,
    trace,
)
from openai import AsyncOpenAI

world = World()
set_trace_processors([])
INSTRUMENTATION = sys.argv[2]
if INSTRUMENTATION == "openinference":
    from openinference.instrumentation import using_session
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(tracer_provider=world.provider)
elif INSTRUMENTATION == "openllmetry":
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(tracer_provider=world.provider)
    OpenAIInstrumentor().instrument(tracer_provider=world.provider)
else:
    import logfire

    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[world.processor])
    logfire.instrument_openai_agents()


def model(responses: bool = True, **more: Any) -> Any:
    client = AsyncOpenAI(base_url=world.url, api_key="none", max_retries=2)
    return (OpenAIResponsesModel if responses else OpenAIChatCompletionsModel)(MODEL, client)


@function_tool
async def search(query: str) -> str:
    """Search."""
    world.tool("search")
    await asyncio.sleep(0.005)
    return "found"


@function_tool
async def read(page: str) -> str:
    """Read."""
    world.tool("read")
    await asyncio.sleep(0.005)
    return "text"


@function_tool(failure_error_function=None)
async def broken(page: str) -> str:
    """Fail."""
    world.tool("broken")
    raise ValueError("scripted failure of a tool")


def agents(responses: bool, *tools: Any) -> Any:
    coder = Agent(name="coder", instructions="You are coder", model=model(responses), tools=list(tools))
    return Agent(
        name="planner", instructions="You are planner", model=model(responses), tools=list(tools), handoffs=[coder]
    )


CONFIG = RunConfig(workflow_name="support")


def run(agent: Any, **more: Any) -> Any:
    return Runner.run_sync(agent, "what is it?", run_config=RunConfig(workflow_name="support", **more))


def handoff(responses: bool) -> Any:
    def scenario(world: World) -> None:
        world.script(
            Answer("planner", calls=(("search", {"query": "x"}), ("read", {"page": "y"})), cached=512),
            Answer("planner", calls=(("transfer_to_coder", {}),)),
            Answer("coder", calls=(("search", {"query": "x"}),)),
            Answer("coder", "done"),
        )
        run(agents(responses, search, read))

    return scenario


def agent_as_tool(world: World) -> None:
    world.script(
        Answer("planner", calls=(("ask_coder", {"input": "x"}),)),
        Answer("coder", "done"),
        Answer("planner", "done"),
    )
    coder = Agent(name="coder", instructions="You are coder", model=model())
    tool = coder.as_tool("ask_coder", "Ask.")
    run(Agent(name="planner", instructions="You are planner", model=model(), tools=[tool]))


def retry(responses: bool) -> Any:
    def scenario(world: World) -> None:
        world.script(Answer("planner", status=500), Answer("planner", "done"))
        run(agents(responses))

    return scenario


def streamed(responses: bool) -> Any:
    def scenario(world: World) -> None:
        world.script(
            Answer("planner", calls=(("search", {"query": "x"}),), cached=128),
            Answer("planner", "a b c", usage=responses),
        )

        async def go() -> None:
            result = Runner.run_streamed(agents(responses, search), "hello", run_config=CONFIG)
            async for _ in result.stream_events():
                pass

        asyncio.run(go())

    return scenario


def no_usage(world: World) -> None:
    world.script(Answer("planner", "done", usage=False))
    run(agents(False))


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", "done"))
        with using_session("conversation-1") if INSTRUMENTATION == "openinference" else nullcontext():
            run(agents(True), group_id="conversation-1")


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", "done"), Answer("planner", "done"))
        with trace("support"):
            run(agents(True))
            run(agents(True))


def fails(world: World) -> None:
    world.script(Answer("planner", calls=(("broken", {"page": "x"}),)))
    run(agents(True, broken))


def gives_up(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),)), *[Answer("planner", status=500)] * 3)
    run(agents(True, search))


run_all(
    {
        "handoff_responses": handoff(True),
        "handoff_chat": handoff(False),
        "agent_as_tool": agent_as_tool,
        "retry_responses": retry(True),
        "retry_chat": retry(False),
        "stream_responses": streamed(True),
        "stream_chat": streamed(False),
        "no_usage": no_usage,
        "session": session,
        "two_runs": two_runs,
        "fails": fails,
        "gives_up": gives_up,
    },
    world,
)
