"""The demo's last stage: applications that name nothing, the gateway, and a simulated engine behind it.

The gateway first only watches and records; a remaining-length predictor learns from the recording; then the same load
runs by turns with a gateway that proxies alone and with one that gives priorities from forecasts. What else loads the
machine may decide a single round, so only rounds that agree are a result.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import httpx

APPLICATIONS: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    "You answer questions of customers.": (("Look up the order.", 6), ("Answer the customer.", 10)),
    "You research a question.": (*((f"Search source {part}.", 20) for part in "abcd"), ("Write a report.", 60)),
    "You repair code.": (("Plan the repair.", 12), ("Edit the file.", 40), ("Run the tests.", 8), ("Edit again.", 40)),
}
"""System prompt, then instruction and length in words of each step."""

STARTS_S: Final = 120.0
"""Seconds for the gateway to start on a busy machine."""


async def drive(url: str, workflows: int, seed: int) -> float:
    """Mean seconds to complete a workflow, all of them begun at once; they send an OpenAI client's plain requests."""
    draw = random.Random(seed)
    kinds = [draw.choice(list(APPLICATIONS.items())) for _ in range(workflows)]
    seconds: list[float] = []

    async def run(client: httpx.AsyncClient, number: int) -> None:
        system, steps = kinds[number]
        began = time.monotonic()
        talk: list[dict[str, Any]] = [{"role": "system", "content": f"{system} Ticket {draw.randrange(10**9)}."}]
        for instruction, words in steps:
            talk.append({"role": "user", "content": f"{instruction} Case {number}-{seed}."})
            body = {"model": "simulated", "messages": talk, "max_tokens": max(2, round(words * draw.uniform(0.7, 1.3)))}
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            answer.raise_for_status()
            talk.append(answer.json()["choices"][0]["message"])
        seconds.append(time.monotonic() - began)

    async with httpx.AsyncClient(
        timeout=600, limits=httpx.Limits(max_connections=workflows), trust_env=False
    ) as client:
        await asyncio.gather(*(run(client, number) for number in range(workflows)))
    return sum(seconds) / len(seconds)


async def compare(alone: str, forecasting: str, workflows: int, rounds: int) -> list[tuple[float, float]]:
    """Mean seconds to complete a workflow behind each of two gateways, in each round of the same load at both."""
    pairs = []
    for seed in range(1, rounds + 1):
        order = (alone, forecasting) if seed % 2 else (forecasting, alone)
        seconds = {url: await drive(url, workflows, seed) for url in order}
        pairs.append((seconds[alone], seconds[forecasting]))
    return pairs


def compared(pairs: list[tuple[float, float]]) -> str:
    """The rounds of `compare` in words; that they say nothing, where they do not agree."""
    alone, forecasting = (fmean(seconds) for seconds in zip(*pairs, strict=True))
    sooner = sum(on < off for off, on in pairs)
    means = f"{forecasting:.2f} s on the mean, proxied alone in {alone:.2f} s"
    told = f"sooner in {sooner} of {len(pairs)} rounds of the same load"
    if sooner == len(pairs):
        return f"complete in {means}: {told}"
    return f"completed in {means}, but {told}: this machine was too busy to tell; run the demo again on an idle one"


@contextmanager
def running(folder: Path, environment: dict[str, str], *options: str) -> Iterator[str]:
    """The URL of `presage gateway --simulate` with these options, run in a folder until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(Path(sys.executable).with_name("presage")), "gateway", "--simulate", "--listen", address, *options]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    try:
        begun = time.monotonic()
        while not _answers(f"http://{address}/health"):
            if process.poll() is not None or time.monotonic() - begun > STARTS_S:
                raise RuntimeError(f"presage gateway did not start (exit code {process.poll()})")
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
