"""Does a promoted model keep its promise in an engine, for an application whose traces are as messy as real ones?

A made-up application writes its own traces: rows of the tools that answers call (in four of five cases the tool names
the next agent), token counts missing in a share of the steps, workflows that fail midway, and requests that its client
gives up and sends again. vLLM's engine serves its LLM steps through the chat API and sees no tool but in the answers
that it parses; a parser of our own has each answer call the tools that the request offers, since a tiny model of random
weights cannot choose one.

1. `presage serve` without a model serves workflows; `presage traces ingest`, `train-predictor next-agent` and
   `presage promote` learn from the application's own traces.
2. The running engine loads the champion and serves more workflows. Is the live accuracy the promised one?
3. The application renames an agent. The engine must raise the alarm and name the cause.

    python benchmarks/messy_loop.py [--to messy-loop-output] [--workflows 150] [--training OPTIONS]

Needs vLLM 0.32; takes some minutes. Recreates the output folder and prints a table and one JSON line. Exit code 1 if a
step fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import hypot
from pathlib import Path
from typing import Any

from feedback_loop import MODEL, WORDS, Server, failed, make_anew, make_model, say, shell, started, version
from openai import APITimeoutError, AsyncOpenAI, omit

TYPE, AT_ONCE, BLOCKS = "desk", 16, 600
TOOLS = ("search", "read", "run")
TELLING, MISSING, GIVEN_UP, FAILED = 0.8, 0.12, 0.05, 0.08
"""Shares: of tools that name the next agent, of steps without token counts, of requests whose client gives up and sends
them again, and of workflows that fail midway."""
TRAINING, HELD_OUT, LIVE, RENAMED = 1, 2, 3, 4
"""Seeds that workflows are drawn by."""
PARSER = '''\
"""Answers call the tools that their request offers."""

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("obliging")
class Obliging(ToolParser):
    def extract_tool_calls(self, model_output, request):
        calls = [
            ToolCall(type="function", function=FunctionCall(name=tool.function.name, arguments="{}"))
            for tool in request.tools or ()
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=model_output)
'''
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True)
class Step:
    """One LLM step: its agent, the words of its prompt, the tokens of its answer, and the tools that it calls."""

    agent: str
    words: str
    answer: int
    tools: tuple[str, ...]


@dataclass(frozen=True)
class Workflow:
    """Its steps; whether it fails, and ends without a word, after them."""

    steps: tuple[Step, ...]
    fails: bool


def draw(count: int, seed: int) -> dict[str, Workflow]:
    """Workflows by id: a planner, rounds of a coder and a tester or a reader, and a reviewer."""
    rng = random.Random(seed)
    drawn = {}
    for number in range(count):
        agents = ["planner"]
        while len(agents) < 4 or rng.random() < 0.6:
            agents += ["coder", rng.choice(["tester", "reader"])]
        agents.append("reviewer")
        steps = [
            Step(
                agent,
                " ".join(rng.choices(WORDS, k=rng.randint(20, 80))),
                rng.randint(4, 24),
                _tools(rng, later),
            )
            for agent, later in zip(agents, [*agents[1:], None], strict=True)
        ]
        fails = rng.random() < FAILED
        drawn[f"m{seed}-{number}"] = Workflow(tuple(steps[: rng.randint(1, len(steps) - 1)] if fails else steps), fails)
    return drawn


def _tools(rng: random.Random, later: str | None) -> tuple[str, ...]:
    if later is None:
        return ()
    return (f"for_{later}" if rng.random() < TELLING else rng.choice(TOOLS),)


def renamed(workflows: Mapping[str, Workflow]) -> dict[str, Workflow]:
    """The workflows with the coder under another name."""
    return {
        name: Workflow(
            tuple(
                Step("engineer" if step.agent == "coder" else step.agent, step.words, step.answer, step.tools)
                for step in of.steps
            ),
            of.fails,
        )
        for name, of in workflows.items()
    }


def serve(server: Server, workflows: Mapping[str, Workflow], seed: int) -> list[dict[str, Any]]:
    """Sends all workflows; returns the rows of the application's own trace."""
    rows = asyncio.run(_serve(server, workflows, random.Random(seed)))
    steps = sum(row["kind"] == "llm" for row in rows)
    print(f"{len(workflows)} workflows, {steps} LLM steps, {len(rows) - steps} tool calls", flush=True)
    return rows


async def _serve(server: Server, workflows: Mapping[str, Workflow], rng: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    coming = iter(workflows.items())
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=600, max_retries=0) as client:

        async def ask(sent: Mapping[str, Any], step: Step, timeout: float) -> Any:
            offered = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in step.tools]
            return await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": step.words}],
                max_tokens=step.answer,
                temperature=0,
                tools=offered or omit,  # type: ignore[arg-type]
                extra_body={"ignore_eos": True, "vllm_xargs": sent},
                timeout=timeout,
            )

        async def line() -> None:
            for name, of in coming:
                place = 0
                for number, step in enumerate(of.steps):
                    last = number == len(of.steps) - 1 and not of.fails
                    sent = {"workflow_type": TYPE, "workflow_id": name, "agent": step.agent, "step": number}
                    sent |= {"workflow_end": 1} if last else {}
                    began = datetime.now(UTC)
                    if rng.random() < GIVEN_UP:
                        with suppress(APITimeoutError):
                            await ask(sent, step, 0.02)
                    answer = await ask(sent, step, 600)
                    called = [call.function.name for call in answer.choices[0].message.tool_calls or ()]
                    if called != list(step.tools):
                        raise failed(f"the server parsed {called}, where {step.tools} were called")
                    counts = rng.random() >= MISSING
                    shared = {"workflow_type": TYPE, "workflow_id": name, "complete": not of.fails}
                    rows.append(
                        {
                            **shared,
                            "step": place,
                            "agent": step.agent,
                            "kind": "llm",
                            "input_tokens": answer.usage.prompt_tokens if counts else None,
                            "output_tokens": answer.usage.completion_tokens if counts else None,
                            "started_at": began.isoformat(),
                            "ended_at": datetime.now(UTC).isoformat(),
                        }
                    )
                    for tool in called:
                        begins = datetime.now(UTC)
                        await asyncio.sleep(rng.random() * 0.02)
                        times = {"started_at": begins.isoformat(), "ended_at": datetime.now(UTC).isoformat()}
                        rows.append({**shared, "step": place + 1, "agent": tool, "kind": "tool", **times})
                    place += 1 + len(called)

        await asyncio.gather(*(line() for _ in range(AT_ONCE)))
    return rows


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """The rows of a trace as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def compared(promise: Mapping[str, Any]) -> dict[str, Any]:
    """Promised and live figures by name, with the difference and the half-width of its interval."""
    found = {}
    for name, of in promise["figures"].items():
        (was, *_, high), (live, *_, live_high) = of["promised"], of["live"]
        found[name] = {**of, "difference": live - was, "within": hypot(high - was, live_high - live)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("messy-loop-output"))
    parser.add_argument("--workflows", type=int, default=150, help="of each part")
    parser.add_argument("--training", default="", metavar="OPTIONS", help="of train-predictor next-agent")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server stays behind
    begun, folder = time.monotonic(), make_anew(args.to)
    make_model(folder / "model")
    (folder / "obliging.py").write_text(PARSER, encoding="utf-8")
    options = ["--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "obliging"]
    options += ["--tool-parser-plugin", str(folder / "obliging.py")]
    options += ["--additional-config", json.dumps({"presage": {"reload_s": 1}})]
    report: dict[str, Any] = {"benchmark": "messy_loop", "workflows": args.workflows}

    say("An engine without a model; the application writes its own traces.")
    with started(folder, "presage serve", BLOCKS, *options) as server:
        write(serve(server, draw(args.workflows, TRAINING), TRAINING), folder / "training.jsonl")
        write(serve(server, draw(args.workflows, HELD_OUT), HELD_OUT), folder / "held-out.jsonl")

        say("A version learns from these traces, and is promoted.")
        shell(folder, "presage traces ingest training.jsonl --to traces")
        shell(folder, f"train-predictor next-agent traces {args.training}")
        shell(folder, "presage traces ingest held-out.jsonl --to held-out")
        shell(folder, "presage promote next-agent --version 1 --traces held-out")
        server.until(version(1), "the promoted version goes live")

        say("It forecasts what the engine serves.")
        serve(server, draw(args.workflows, LIVE), LIVE)
        promise = server.status()["monitor"]["promised"].get(TYPE)
        if promise is None:
            raise failed("nothing was promised, or no workflow was judged")
        report["promised"] = compared(promise)
        report["kept"] = promise["kept"]
        shell(folder, f"presage models --url {server.url}")

        say("The application renames an agent.")
        for part in range(4):
            serve(server, renamed(draw(args.workflows, RENAMED + part)), RENAMED + part)
            told = server.status()["monitor"]
            if TYPE in told["alarms"]:
                break
        if TYPE not in told["alarms"]:
            raise failed("the rename raised no alarm")
        report["alarm"] = told["alarms"][TYPE]["workflows"]
        report["causes"] = [cause["text"] for cause in told["promised"][TYPE]["causes"]]
        report["against_counts"] = told["against_counts"].get(TYPE)
    report["seconds"] = round(time.monotonic() - begun, 1)
    print(f"\n{'figure':26} {'promised':24} {'live':24} difference")
    for name, of in report["promised"].items():
        was, live = ("{:.3f} [{:.3f}, {:.3f}]".format(*of[which]) for which in ("promised", "live"))
        print(f"{name:26} {was:24} {live:24} {of['difference']:+.3f}, within {of['within']:.3f}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
