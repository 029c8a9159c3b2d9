"""Is a request ever lost over HTTP: on kept-alive connections, after long holds, beside clients that give up?

Sends the same workflows to `vllm serve` and to `presage serve`, one after the other, with a tiny model of random
weights on a cache that is too small: steps of chat and of completions, streamed and not, with pauses between them.
Some pauses are about as long as vLLM keeps an idle connection (5 s); clients keep theirs for 5, 15 or 90 s. Some
clients give up. With the hooks one request in a hundred is held for 6 to 20 s, by `tests/holding.py`, besides what
admission decides. vLLM runs twice: as it comes, and with the keep-alive time-out that `presage serve` sets.

A lost request is one with neither a whole answer nor a client that gave up. Its cause is the client's error, and
whether the server's log shows that the request had arrived.

    python benchmarks/soak.py [--to soak-output] [--requests 20000] [--at-once 64]
    python benchmarks/soak.py --requests 2000 --at-once 200 --pause 5    # each pause as long as vLLM's time-out

Needs vLLM; 20,000 requests take some minutes on each of the three servers. Recreates the output folder,
where the logs of servers and clients stay. Exit code 1 if the hooks lost a request or changed a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from feedback_loop import MODEL, WORDS, make_anew, make_model, started

from presage.cli.serve import KEEP_ALIVE

HERE = Path(__file__).resolve().parent
BLOCKS = 450
CLIENTS_KEEP_S = (5.0, 15.0, 90.0)
"""Of httpx and the OpenAI client, aiohttp, and Go."""
HELD_S = (6.0, 20.0)
PATIENCE_S = 600.0
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
ANSWERED, GAVE_UP = "answered", "the client gave up"
ARRIVED = re.compile(r"Received request [a-z]+-(w\d+-\d+)")
NAME, SECONDS = KEEP_ALIVE
SERVERS = {
    "vLLM alone": f"env -u {NAME} vllm serve",
    f"vLLM, {SECONDS} s": f"env {NAME}={SECONDS} vllm serve",
    "with hooks": f"env -u {NAME} PYTHONPATH={HERE.parent}{os.pathsep}{HERE / 'tests'} presage serve",
}
"""Commands by name."""
OURS = ["--scheduler-cls", "holding.HoldingScheduler", "--additional-config.presage.admission_least_gain", "0"]
"""Options of the server with hooks; without a margin admission holds at the least gain."""


@dataclass(frozen=True)
class Planned:
    """A request.

    Attributes:
        held_s: for which a server with hooks holds it.
        gives_up_s: after which its client goes; None if it stays.
        pause_s: before it, since the answer to the one before.
    """

    id: str
    path: str
    body: dict[str, Any]
    held_s: float
    gives_up_s: float | None
    pause_s: float


@dataclass
class Sent:
    """A line of the clients' log: what became of a request."""

    id: str
    streamed: bool
    held_s: float
    at: float = 0.0
    first_s: float | None = None
    took_s: float = 0.0
    outcome: str = ""
    tokens: tuple[int, ...] = ()


def workflows(requests: int, seed: int, pause_s: float | None) -> Iterator[list[Planned]]:
    """Workflows with so many requests in all."""
    number = 0
    while requests > 0:
        steps = planned(number, random.Random(f"{seed}.{number}"), pause_s)[:requests]
        requests -= len(steps)
        number += 1
        yield steps


def planned(number: int, draw: random.Random, pause_s: float | None) -> list[Planned]:
    """The steps of a workflow; each prompt begins with the one before."""
    kind, chat, count = draw.randrange(4), draw.random() < 0.5, draw.randint(1, 8)
    prompt = [(kind * 37 + word * 11) % len(WORDS) for word in range(128)] + draw.choices(range(len(WORDS)), k=96)
    steps = []
    for step in range(count):
        prompt = prompt + draw.choices(range(len(WORDS)), k=draw.randint(32, 128))
        held_s = round(draw.uniform(*HELD_S), 1) if draw.random() < 0.01 else 0.0
        agent = f"hold_{held_s}" if held_s else f"agent{step % 3}"
        sent = {"workflow_type": f"type{kind}", "workflow_id": f"w{number}", "agent": agent, "step": step}
        body = {
            "model": MODEL,
            "max_tokens": draw.randint(1, 4),
            "temperature": 0,
            "ignore_eos": True,
            "stream": draw.random() < 0.5,
            "return_token_ids": True,
            "vllm_xargs": sent | ({"workflow_end": 1} if step == count - 1 else {}),
        }
        if chat:
            body["messages"] = [{"role": "user", "content": " ".join(WORDS[word] for word in prompt)}]
        else:
            body["prompt"] = prompt
        gives_up_s = draw.choice([0.002, 0.02, 0.2, 2.0]) if draw.random() < 0.03 else None
        path = "/v1/chat/completions" if chat else "/v1/completions"
        steps.append(Planned(f"w{number}-{step}", path, body, held_s, gives_up_s, drawn_pause(draw, pause_s)))
    return steps


def drawn_pause(draw: random.Random, pause_s: float | None) -> float:
    if pause_s is not None:
        return max(0.0, draw.uniform(pause_s - 0.03, pause_s + 0.03))
    kind = draw.random()
    if kind < 0.04:
        return draw.uniform(4.9, 5.1)
    return draw.uniform(5.2, 8.0) if kind < 0.05 else draw.expovariate(20.0)


async def send(client: httpx.AsyncClient, request: Planned) -> Sent:
    """Sends a request and reads its answer to the end."""
    sent = Sent(request.id, request.body["stream"], request.held_s, at=time.time())
    begun = time.monotonic()
    try:
        async with asyncio.timeout(request.gives_up_s):
            sent.outcome = await answered(client, request, sent, begun)
    except TimeoutError:
        sent.outcome = GAVE_UP
    except (httpx.HTTPError, ValueError, LookupError) as error:
        sent.outcome = type(error).__name__
    sent.took_s = time.monotonic() - begun
    return sent


async def answered(client: httpx.AsyncClient, request: Planned, sent: Sent, begun: float) -> str:
    said = b""
    async with client.stream("POST", request.path, json=request.body, headers={"X-Request-Id": request.id}) as answer:
        async for part in answer.aiter_bytes():
            sent.first_s = sent.first_s or time.monotonic() - begun
            said += part
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    events = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: ")] if sent.streamed else [said]
    if sent.streamed and events[-1:] != [b"[DONE]"]:
        return "a stream without an end"
    choices = [choice for event in events if event != b"[DONE]" for choice in json.loads(event)["choices"]]
    sent.tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    whole = choices[-1]["finish_reason"] == "length" and len(sent.tokens) == request.body["max_tokens"]
    return ANSWERED if whole else "an answer with tokens missing"


async def soak(url: str, steps: Iterator[list[Planned]], at_once: int, log: Path) -> list[Sent]:
    """Sends all workflows in a closed loop, each line with a client of its own."""
    results: list[Sent] = []

    async def line(number: int) -> None:
        limits = httpx.Limits(keepalive_expiry=CLIENTS_KEEP_S[number % len(CLIENTS_KEEP_S)])
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            for requests in steps:
                for request in requests:
                    await asyncio.sleep(request.pause_s)
                    sent = await send(client, request)
                    results.append(sent)
                    kept.write(json.dumps(asdict(sent)) + "\n")

    with log.open("w", encoding="utf-8") as kept:
        await asyncio.gather(*(line(number) for number in range(at_once)))
    return results


def quantiles(values: Sequence[float]) -> list[float | None]:
    """The median, the 99th percentile and the maximum."""
    return [round(float(np.quantile(values, q)), 3) for q in (0.5, 0.99, 1)] if values else [None] * 3


def summary(results: Sequence[Sent], arrived: set[str], base: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The figures of a server; `base` has the tokens of vLLM alone."""
    lost = [sent for sent in results if sent.outcome not in (ANSWERED, GAVE_UP)]
    causes = Counter(f"{sent.outcome}, {'had' if sent.id in arrived else 'had not'} arrived" for sent in lost)
    whole = [sent for sent in results if sent.outcome == ANSWERED]
    compared = [sent for sent in whole if sent.id in base]
    return {
        "requests": len(results),
        "answered": len(whole),
        "gave_up": sum(sent.outcome == GAVE_UP for sent in results),
        "lost": len(lost),
        "causes": dict(causes),
        "compared": len(compared),
        "other_tokens": sum(sent.tokens != base[sent.id] for sent in compared),
        "first_token_s": quantiles([sent.first_s for sent in whole if sent.first_s and not sent.held_s]),
        "asked_to_hold_s": quantiles([sent.first_s for sent in whole if sent.first_s and sent.held_s]),
        "asked_to_hold": sum(sent.held_s > 0 for sent in results),
    }


def held(status: dict[str, Any]) -> dict[str, Any]:
    """What admission has held by its own decision."""
    times = status["admission"]["held_times"]
    up_to_s = times["up_to_s"]
    count = up_to_s["+Inf"]
    bounds = [next(bound for bound, below in up_to_s.items() if below >= q * count) for q in (0.5, 0.99)]
    return {"held": count, "held_mean_s": round(times["sum_s"] / max(1, count), 3), "held_s_below": bounds}


def table(report: dict[str, dict[str, Any]]) -> str:
    rows = [["", *report]]
    rows += [[name, *(str(found.get(name, "")) for found in report.values())] for name in list(report.values())[-1]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=Path("soak-output"))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--pause", type=float, help="seconds between all steps, in place of short and long ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = make_anew(args.to)
    make_model(folder / "model")
    report: dict[str, dict[str, Any]] = {}
    base: dict[str, tuple[int, ...]] = {}
    for number, (name, command) in enumerate(SERVERS.items()):
        own = folder / f"server{number}"
        own.mkdir()
        (own / "model").symlink_to(folder / "model")
        ours = OURS if "presage" in command else []
        options = ["--chat-template", TEMPLATE, "--enable-log-requests", *ours]
        with started(own, command, BLOCKS, *options) as server:
            begun = time.monotonic()
            steps = workflows(args.requests, args.seed, args.pause)
            results = asyncio.run(soak(server.url, steps, args.at_once, own / "client.jsonl"))
            took_s = time.monotonic() - begun
            status = server.status() if ours else None
        arrived = set(ARRIVED.findall(server.log.read_text(encoding="utf-8", errors="replace")))
        base = base or {sent.id: sent.tokens for sent in results if sent.outcome == ANSWERED}
        report[name] = summary(results, arrived, base) | {"seconds": round(took_s)} | (held(status) if status else {})
        print(json.dumps(report[name]), flush=True)
    print(f"\n{table(report)}\n\nLogs lie in {folder}.\n")
    print(json.dumps({"benchmark": "soak", "requests": args.requests, "pause": args.pause, "servers": report}))
    sys.exit(1 if report["with hooks"]["lost"] or report["with hooks"]["other_tokens"] else 0)


if __name__ == "__main__":
    main()
