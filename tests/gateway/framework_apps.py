"""Small applications of CrewAI and AutoGen, for a Python of their own: both pin much, so no environment has all.

    python framework_apps.py crew http://127.0.0.1:8100/v1 --runs 20 --at-once 8

Each run marks its requests with the header `x-test-run`, which the gateway does not read. With `--traced` the libraries
are instrumented with OpenTelemetry as their documents say: CrewAI's instrumentation opens a span for each crew, and an
AutoGen team is of one trace only if the application opens a span around its run. Nothing is exported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

QUESTION = "What should a family with two small children see in Lisbon in one day?"
DIFFERS = "one day"

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "CREWAI_TESTING": "true"}


def crew(url: str, run: str, *, managed: bool = False) -> Any:
    """CrewAI: a researcher with a tool, a writer and an editor, one after the other or under a manager."""
    from crewai import LLM, Agent, Crew, Process, Task
    from crewai.tools import tool

    @tool("search")
    def search(query: str) -> str:
        """Searches the archive."""
        return f"Three articles of the archive mention {query}"

    model = LLM(model="openai/simulated", base_url=url, api_key="none", default_headers={"x-test-run": run})

    def agent(role: str, goal: str, backstory: str, **more: Any) -> Any:
        return Agent(role=role, goal=goal, backstory=backstory, llm=model, **more)

    team = [
        agent("Researcher", "Find what the archive says", "You have read the archive for years.", tools=[search]),
        agent("Writer", "Write a short report", "You write for a newspaper, in plain words."),
        agent("Editor", "Polish the report", "You have an eye for claims without a source."),
    ]
    tasks = [
        ("Collect what is known: {question}", "Notes with sources"),
        ("Write a report from the notes.", "Three paragraphs"),
        ("Polish the report for print.", "The final text"),
    ]
    work = [
        Task(description=description, expected_output=wanted, **({} if managed else {"agent": who}))
        for (description, wanted), who in zip(tasks, team, strict=True)
    ]
    how = {"process": Process.hierarchical, "manager_llm": model} if managed else {"process": Process.sequential}
    return Crew(agents=team, tasks=work, **how)


def managed_crew(url: str, run: str) -> Any:
    return crew(url, run, managed=True)


def openai_client(url: str, run: str) -> Any:
    """AutoGen's client."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    return OpenAIChatCompletionClient(
        model="simulated",
        base_url=url,
        api_key="none",
        default_headers={"x-test-run": run},
        model_info={**able, "family": "unknown"},
    )


def group_chat(url: str, run: str) -> Any:
    """AutoGen: a researcher with a tool, a writer and a critic, who speak in turn over one history."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat

    return RoundRobinGroupChat(
        _team(AssistantAgent, openai_client(url, run)), termination_condition=MaxMessageTermination(9)
    )


def selected(url: str, run: str) -> Any:
    """AutoGen: the same team; a model selects who speaks."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import SelectorGroupChat

    client = openai_client(url, run)
    return SelectorGroupChat(_team(AssistantAgent, client), client, termination_condition=MaxMessageTermination(9))


def swarm(url: str, run: str) -> Any:
    """AutoGen: triage looks up an order and hands off to refunds."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination, TextMessageTermination
    from autogen_agentchat.teams import Swarm

    client = openai_client(url, run)
    triage = AssistantAgent(
        "triage",
        client,
        tools=[search],
        handoffs=["refunds"],
        system_message="You are the first to speak with a customer; find out what is wrong, then hand off.",
    )
    refunds = AssistantAgent("refunds", client, system_message="You settle refunds. Be brief and kind.")
    return Swarm([triage, refunds], termination_condition=MaxMessageTermination(12) | TextMessageTermination("refunds"))


async def search(query: str) -> str:
    """Searches the archive."""
    return f"Three articles of the archive mention {query}"


def _team(of: Any, client: Any) -> list[Any]:
    says = {
        "researcher": "You are a researcher. Look things up before you answer, and cite what you found.",
        "writer": "You write the report. Keep to short paragraphs and to what the others found.",
        "critic": "Act as a strict critic: list every claim of the report that has no source.",
    }
    tools = {"researcher": [search]}
    return [
        of(name, client, description=said, system_message=said, tools=tools.get(name, []))
        for name, said in says.items()
    ]


CREWS: dict[str, Callable[[str, str], Any]] = {"crew": crew, "managed-crew": managed_crew}
TEAMS: dict[str, Callable[[str, str], Any]] = {"group-chat": group_chat, "selected": selected, "swarm": swarm}


def instrument(application: str) -> None:
    """Traces as users of the library set them up."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    OpenAIInstrumentor().instrument()
    if application in CREWS:  # its openai is of version 2, on httpx; AutoGen takes version 3, on httpx2
        from opentelemetry.instrumentation.crewai import CrewAIInstrumentor
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor as Http

        CrewAIInstrumentor().instrument()
    else:
        from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor as Http
    Http().instrument()


def span() -> AbstractContextManager[Any]:
    from opentelemetry import trace

    return trace.get_tracer("application").start_as_current_span("run")


def question(number: int, same: bool) -> str:
    return QUESTION if same else QUESTION.replace(DIFFERS, f"{number + 2} days")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("application", choices=[*CREWS, *TEAMS])
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--same", action="store_true", help="all runs ask one question")
    parser.add_argument("--traced", action="store_true")
    given = parser.parse_args()
    if given.traced:
        instrument(given.application)
    if given.application in CREWS:

        def one(number: int) -> None:
            made = CREWS[given.application](given.url, f"run {number}")
            made.kickoff(inputs={"question": question(number, given.same)})

        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(one, range(given.runs)))
        return

    async def all_runs() -> None:
        places = asyncio.Semaphore(given.at_once)

        async def one(number: int) -> None:
            async with places:
                team = TEAMS[given.application](given.url, f"run {number}")
                with span() if given.traced else nullcontext():
                    await team.run(task=question(number, given.same))

        await asyncio.gather(*map(one, range(given.runs)))

    asyncio.run(all_runs())


if __name__ == "__main__":
    main()
