"""Does the gateway recognise applications of agent frameworks that are unchanged but for their base URL?

The applications of `framework_apps.py` run with the frameworks themselves, each in an environment that has it, against
a model server that draws its answers: it calls the tools that it is offered, fills schemas, and otherwise says four
sentences. Runs are judged by a header that the gateway does not read:

- precision and recall by pairs of requests; workflows per run; types of the workflows
- agents: recognised ones by true ones, which differ in tools, or in the first four or last two words of system prompts
- fan-out: steps that wait for several parents or have a sibling, as `presage traces describe` counts them in what the
  gateway records, and as the application has them
- confidence, right: mean confidence of continuations, and the share of them that are right

In `langgraph-resumed` one process begins the runs, and another one goes on five hours later.

    make frameworks                     # the environments, in .venv-sdk
    python benchmarks/frameworks.py [--only crew,dspy] [--runs 20] [--at-once 1,20] [--python crewai=PATH] [--engine]

Prints a Markdown table and one JSON line; an application without environment is left out. Takes fifteen minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any

import uvicorn
from framework_apps import APPLICATIONS, FAN_OUT, RUN, WORDS
from framework_engine import Event, identities
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from presage.datasets.describe import describe
from presage.datasets.read import read_traces
from presage.gateway.config import gateway_config
from presage.gateway.serve import build
from presage.gateway.simulated_engine import SimulatedEngine
from presage.serving_hooks.identity.identifier import Identity
from presage.serving_hooks.identity.request import ApiRequest

HERE = Path(__file__).resolve().parent
LATER_S = 5 * 3600.0
RESUMED = ("langgraph-resumed",)
LAST = ("transfer", "handoff", "final_answer", "finish", "submit", "approval", "SetResult")


class Model:
    """Calls each tool that it is offered once, handoffs last, and again after an error; fills schemas; says text."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self) -> str:
        said = [" ".join(self._random.choices(WORDS, k=self._random.randint(7, 12))) for _ in range(4)]
        return " ".join(f"{one.capitalize()}." for one in said)

    def __call__(self, body: Mapping[str, Any]) -> str | Mapping[str, Any]:
        messages = body.get("messages") or body.get("input") or []
        given = json.dumps(messages)
        if "Only return the role" in given:  # AutoGen's selector
            return min(("researcher", "writer", "critic"), key=lambda name: given.count(f"{name}: "))
        if "[[ ## completed ## ]]" in given:
            return self._dspy(given)
        schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        if schema:
            return json.dumps(self._filled(schema, given))
        offered = [tool.get("function") or tool for tool in body.get("tools") or ()]
        latest = json.dumps(messages[-1:])
        left = [tool for tool in offered if f'"{tool["name"]}"' not in given or "error: the" in latest]
        if body.get("tool_choice") in ("required", "any") or isinstance(body.get("tool_choice"), dict):
            left = left or offered
        if not left:
            return self.text()
        tool = min(left, key=lambda one: str(one["name"]).startswith(LAST))
        arguments = self._filled(tool.get("parameters") or tool.get("input_schema") or {}, given)
        call = {"name": tool["name"], "arguments": json.dumps(arguments)}
        made = "".join(self._random.choices("abcdefgh0123456789", k=22))
        return {"content": None, "tool_calls": [{"id": f"call_{made}7a", "type": "function", "function": call}]}

    def _filled(self, schema: Mapping[str, Any], given: str, name: str = "") -> Any:
        """A value of a JSON schema; of enumerated values the one that was used least."""
        known = {"coworker": "Writer", "to_agent": "writer", "agent_name": "right"}
        if "anyOf" in schema:
            return self._filled(schema["anyOf"][0], given, name)
        if "enum" in schema:
            last = (str(one).upper() in ("FINISH", "END") for one in schema["enum"])
            return min(
                zip(schema["enum"], last, strict=True), key=lambda one: (given.count(f'"{one[0]}"') > 0, one[1])
            )[0]
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if kind == "object":
            wanted = schema.get("properties", {})
            return {key: self._filled(value, given, key) for key, value in wanted.items()}
        if kind == "array":
            return [self._filled(schema.get("items", {}), given) for _ in range(3)]
        return {"boolean": True, "integer": 7, "number": 7.0, "null": None}.get(kind, known.get(name, self.text()[:60]))

    def _dspy(self, given: str) -> str:
        """The fields that DSPy's template asks for."""
        asked = given.rsplit("Respond with the corresponding output fields", 1)[-1]
        fields = [part.split(" ## ]]")[0] for part in asked.split("[[ ## ")[1:]]
        said = {"titles": json.dumps([" ".join(self._random.sample(WORDS, 3)) for _ in range(3)])}
        said |= {"next_tool_name": "finish" if "observation_0" in given else "search"}
        said |= {"next_tool_args": "{}" if "observation_0" in given else json.dumps({"query": self.text()[:40]})}
        return "\n\n".join(
            f"[[ ## {name} ## ]]\n{said.get(name, self.text())}" for name in fields if name != "completed"
        )


def model_server(seed: int) -> Starlette:
    """OpenAI's chat and responses, and Anthropic's messages."""
    model = Model(seed)
    engine = SimulatedEngine(token_s=0.001, prefill_s=0.0, slots=256, reply=model)

    async def messages(request: Request) -> JSONResponse:
        said = model(json.loads(await request.body()))
        await asyncio.sleep(0.03)
        if isinstance(said, str):
            content: list[Any] = [{"type": "text", "text": said}]
        else:
            [call] = said["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            content = [{"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}]
        usage = {"input_tokens": 100, "output_tokens": 40}
        reason = "end_turn" if isinstance(said, str) else "tool_use"
        whole = {"id": "msg", "type": "message", "role": "assistant", "model": "simulated", "stop_sequence": None}
        return JSONResponse({**whole, "content": content, "stop_reason": reason, "usage": usage})

    app = engine.app()
    app.router.routes.append(Route("/v1/messages", messages, methods=["POST"]))
    return app


@contextmanager
def served(app: Any) -> Iterator[str]:
    listening = socket.socket(proto=socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


class Clock:
    """Monotonic seconds, which go on by more at once."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class Seen:
    """Requests of an application: run, true agent, identity; arrivals and answers; the fan-out of its recording."""

    rows: list[tuple[str, str, Identity]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    fan_out: float = 0.0

    def figures(self) -> dict[str, float]:
        """Precision, recall, workflows per run, types, agents, and confidence with what came of it."""
        given = Counter(identity.step.workflow for _, _, identity in self.rows)
        true = Counter(run for run, _, _ in self.rows)
        both = Counter((run, identity.step.workflow) for run, _, identity in self.rows)
        pairs, ours, theirs = (sum(comb(n, 2) for n in one.values()) for one in (both, given, true))
        first: dict[tuple[str, str], str] = {}
        right, sure = list[bool](), list[float]()
        for run, _, identity in self.rows:
            if first.setdefault(identity.step.workflow, run) and identity.workflow_source == "continuation":
                right.append(first[identity.step.workflow] == run)
                sure.append(identity.workflow_confidence)
        named: dict[str, set[str]] = {}
        for _, system, identity in self.rows:
            named.setdefault(system, set()).add(identity.step.agent)
        agents = set.union(*named.values())
        return {
            "requests": len(self.rows),
            "precision": pairs / ours if ours else 1.0,
            "recall": pairs / theirs if theirs else 1.0,
            "workflows per run": len(given) / len(true),
            "types": len({identity.step.workflow_type for _, _, identity in self.rows}),
            "agents": len(agents) / len(named),
            "confidence": sum(sure) / len(sure) if sure else 1.0,
            "right": sum(right) / len(right) if right else 1.0,
        }


def seen_of(name: str, python: str, runs: int, at_once: int, seed: int) -> Seen:
    """What a gateway makes of runs of an application."""
    seen, clock = Seen(), Clock()
    with tempfile.TemporaryDirectory() as folder, served(model_server(seed)) as upstream:
        recorder = {"folder": folder}
        given = {"upstreams": [{"url": upstream}], "forecasts": {"recorder": recorder, **dict.fromkeys(MODELS)}}
        front = build(gateway_config(given, "benchmark"), clock)
        identify, answered = front.decisions.identifier.identify, front.decisions.identifier.answered

        def judged(request: ApiRequest) -> Identity:
            identity = identify(request)
            words = (request.texts[0] or "").split()
            system = " ".join([*words[:4], *words[-2:], *sorted(request.tools)])
            seen.rows.append((request.headers.get(RUN, ""), system, identity))
            seen.events.append((clock(), request, None))
            return identity

        def heard(identity: Identity, request: ApiRequest, response_id: str | None, answers: Sequence[Any]) -> None:
            seen.events.append((clock(), request, answers))
            answered(identity, request, response_id, answers)

        front.decisions.identifier.identify = judged  # type: ignore[method-assign]
        front.decisions.identifier.answered = heard  # type: ignore[method-assign]
        with served(front.app()) as url:
            line = [python, str(HERE / "framework_apps.py"), name, f"{url}/v1", "--seed", str(seed)]
            line += ["--runs", str(runs), "--at-once", str(at_once)]
            for more in ([], ["--second"]) if name in RESUMED else ([],):
                environment = {**os.environ, "FRAMEWORK_APPS": str(os.getpid())}
                ran = subprocess.run([*line, *more], capture_output=True, text=True, env=environment, check=False)
                if ran.returncode:
                    raise RuntimeError(ran.stderr[-3000:])
                clock.ahead += LATER_S
        types = describe(read_traces([Path(folder)]).table)["workflow_types"].values()
        wide = sum(one["fan_out_share"] * sum(one["agents"].values()) for one in types)
        seen.fan_out = wide / sum(sum(one["agents"].values()) for one in types)
    return seen


MODELS = ("next_agent", "remaining_length", "return_time", "profile", "reload_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(APPLICATIONS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--at-once", default="1,20")
    parser.add_argument("--python", action="append", default=[], metavar="ENVIRONMENT=PATH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", action="store_true", help="judge what an engine infers from tokens, not the gateway"
    )
    given = parser.parse_args()
    if unknown := {*given.only.split(",")} - {*APPLICATIONS}:
        parser.error(f"--only: no application {', '.join(sorted(unknown))}; there are {', '.join(APPLICATIONS)}")
    logging.disable(logging.WARNING)
    pythons = {path.name: str(path / "bin" / "python") for path in (HERE.parent / ".venv-sdk").glob("*")}
    pythons |= dict(one.split("=", 1) for one in given.python)
    columns = ("requests", "precision", "recall", "workflows per run", "types", "agents", "confidence", "right")
    recorded = () if given.engine else ("fan-out", "of it true")
    print("| application | at once |", " | ".join((*columns, *recorded)), "|")
    print("|---" * (len(columns) + len(recorded) + 2), "|", sep="")
    table = {}
    for name in given.only.split(","):
        environment, _ = APPLICATIONS[name]
        if environment not in pythons:
            print(f"{name}: no environment {environment}; make frameworks", file=sys.stderr)
            continue
        for at_once in map(int, given.at_once.split(",")):
            seen = seen_of(name, pythons[environment], given.runs, at_once, given.seed)
            if given.engine:
                inferred = zip(seen.rows, identities(seen.events), strict=True)
                figures = Seen([(run, system, identity) for (run, system, _), identity in inferred]).figures()
            else:
                figures = {**seen.figures(), "fan-out": seen.fan_out, "true fan-out": FAN_OUT.get(name, 0.0)}
            table[f"{name}, {at_once} at once"] = figures
            print(f"| {name} | {at_once} |", " | ".join(f"{value:.3g}" for value in figures.values()), "|", flush=True)
    print(json.dumps({"benchmark": "frameworks", "runs": given.runs, "table": table}))


if __name__ == "__main__":
    main()
