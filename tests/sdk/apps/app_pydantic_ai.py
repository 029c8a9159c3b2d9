"""pydantic-ai, from 0.1 to the newest, and its own instrumentation: delegation by a tool, streams, retries."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

from opentelemetry.trace import get_tracer
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models import openai as models
from pydantic_ai.models.instrumented import InstrumentationSettings
from pydantic_ai.providers.openai import OpenAIProvider
from scripted import MODEL, Answer, World, run_all

world = World()
INSTRUMENTATION = sys.argv[2]  # "otel", "otel-2" for a version of the format, or "logfire"
settings: Any = True
if INSTRUMENTATION.startswith("otel"):
    version = {"version": int(INSTRUMENTATION[5:])} if "-" in INSTRUMENTATION else {}
    settings = InstrumentationSettings(tracer_provider=world.provider, **version)
    Agent.instrument_all(settings)
    tracer = world.provider.get_tracer("app")
else:
    import logfire

    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[world.processor])
    logfire.instrument_pydantic_ai()
    tracer = get_tracer("app")

Chat = getattr(models, "OpenAIChatModel", None) or models.OpenAIModel


def model(responses: bool = False) -> Any:
    provider = OpenAIProvider(base_url=world.url, api_key="none")
    return (models.OpenAIResponsesModel if responses else Chat)(MODEL, provider=provider)


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


async def broken(page: str) -> str:
    """Fail."""
    world.tool("broken")
    raise ValueError("scripted failure of a tool")


def retried() -> Any:
    calls = []

    async def unsure(page: str) -> str:
        """Ask again."""
        world.tool("unsure")
        calls.append(page)
        if len(calls) == 1:
            raise ModelRetry("again")
        return "text"

    return unsure


def agent(name: str, *tools: Any, responses: bool = False, **more: Any) -> Any:
    return Agent(model(responses), name=name, system_prompt=f"You are {name}", tools=list(tools), **more)


def delegate(responses: bool) -> Any:
    def scenario(world: World) -> None:
        world.script(
            Answer("planner", calls=(("search", {"query": "x"}), ("read", {"page": "y"})), cached=512),
            Answer("planner", calls=(("ask_coder", {"question": "x"}),)),
            Answer("coder", calls=(("search", {"query": "z"}),)),
            Answer("coder", "done"),
            Answer("planner", "done"),
        )
        coder = agent("coder", search, responses=responses)

        async def ask_coder(question: str) -> str:
            """Ask."""
            return str(getattr(await coder.run(question), "output", ""))

        agent("planner", search, read, ask_coder, responses=responses).run_sync("what is it?")

    return scenario


def handoff(world: World) -> None:
    world.script(Answer("planner", "plan"), Answer("coder", "done"))
    attributes = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "support"}
    with tracer.start_as_current_span("support", attributes=attributes):
        agent("planner").run_sync("what is it?")
        agent("coder").run_sync("do it")


def retry(world: World) -> None:
    world.script(Answer("planner", status=500), Answer("planner", "done"))
    agent("planner").run_sync("what is it?")


def tool_retry(world: World) -> None:
    world.script(
        Answer("planner", calls=(("unsure", {"page": "x"}),)),
        Answer("planner", calls=(("unsure", {"page": "x"}),)),
        Answer("planner", "done"),
    )
    agent("planner", retried()).run_sync("what is it?")


def structured(world: World) -> None:
    """The answer is a call of a tool that is none."""
    world.script(Answer("planner", calls=(("final_result", {"response": 3}),)))
    agent("planner", **{"output_type": int}).run_sync("what is it?")


def streamed(responses: bool) -> Any:
    def scenario(world: World) -> None:
        world.script(
            Answer("planner", calls=(("search", {"query": "x"}),), cached=128),
            Answer("planner", "a b c", usage=False),
        )

        async def go() -> None:
            async with agent("planner", search, responses=responses).run_stream("hello") as result:
                async for _ in result.stream_text() if hasattr(result, "stream_text") else result.stream():
                    pass

        asyncio.run(go())

    return scenario


def no_usage(world: World) -> None:
    world.script(Answer("planner", "done", usage=False))
    agent("planner").run_sync("what is it?")


def session(world: World) -> None:
    for _ in range(2):
        world.script(Answer("planner", "done"))
        accepted = "conversation_id" in inspect.signature(Agent.run_sync).parameters
        more = {"conversation_id": "conversation-1"} if accepted else {}
        with tracer.start_as_current_span("support", attributes={"session.id": "conversation-1"}):
            agent("planner").run_sync("what is it?", **more)


def two_runs(world: World) -> None:
    for number in range(2):
        world.workflow = number
        world.script(Answer("planner", calls=(("search", {"query": "x"}),)), Answer("planner", "done"))
        agent("planner", search).run_sync("what is it?")


def fails(world: World) -> None:
    world.script(Answer("planner", calls=(("broken", {"page": "x"}),)))
    agent("planner", broken).run_sync("what is it?")


def gives_up(world: World) -> None:
    world.script(Answer("planner", calls=(("search", {"query": "x"}),)), *[Answer("planner", status=500)] * 3)
    agent("planner", search).run_sync("what is it?")


run_all(
    {
        "delegate_chat": delegate(False),
        "delegate_responses": delegate(True),
        "handoff": handoff,
        "retry": retry,
        "tool_retry": tool_retry,
        "structured": structured,
        "stream_chat": streamed(False),
        "stream_responses": streamed(True),
        "no_usage": no_usage,
        "session": session,
        "two_runs": two_runs,
        "fails": fails,
        "gives_up": gives_up,
    },
    world,
)
