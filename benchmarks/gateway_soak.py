"""Does the gateway run for an hour without a failed request, and with thousands of connections?

The gateway (`presage gateway` before a simulated engine) in a process of its own. First so many clients connect at
once, each sends a request, and all stay connected. Then conversations go on for an hour; half of the answers are
streamed.
A request fails if its status is not 200, its answer breaks off, or it takes more than 30 s.

    .venv/bin/python benchmarks/gateway_soak.py [--seconds 3600] [--rate 20] [--connections 10000]

Prints failures, the gateway's memory and its running workflows each minute, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gateway_latency import Connection, measure, run


async def connect(url: str, count: int) -> int:
    """Connects so many clients, which all stay; returns how many got no answer."""
    body = json.dumps({"model": "simulated", "messages": [{"role": "user", "content": "Hello."}]}).encode()
    clients = [Connection(url) for _ in range(count)]
    opening = asyncio.Semaphore(200)

    async def one(client: Connection) -> bool:
        async with opening:
            try:
                return not (await asyncio.wait_for(client.ask(body), 60))[1]
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                return True

    return sum(await asyncio.gather(*map(one, clients)))


def mib(pid: int | None) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=float, default=20, help="requests a second")
    parser.add_argument("--streams", type=int, default=64, help="conversations at once")
    parser.add_argument("--connections", type=int, default=10_000)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    urls: dict[str, str] = {}
    processes: dict[str, Any] = {}
    for kind in ("engine", "gateway"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        urls[kind] = f"http://127.0.0.1:{port}"
        processes[kind] = spawn.Process(target=run, args=(kind, port, urls["engine"]), daemon=True)
        processes[kind].start()
        for _ in range(600):
            try:
                httpx.get(urls[kind] + "/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
    began, pid = time.monotonic(), processes["gateway"].pid
    refused = asyncio.run(connect(urls["gateway"], args.connections))
    connected_s = time.monotonic() - began
    print(f"{args.connections} connections in {connected_s:.0f} s: {refused} without an answer", flush=True)
    failed = sent = 0
    memory, times = [], []
    while time.monotonic() - began < args.seconds:
        turn = min(60.0, args.seconds)
        found, lost = asyncio.run(measure(urls["gateway"], args.rate, turn, args.streams))
        failed, sent = failed + lost, sent + len(found) + lost
        memory.append(mib(pid))
        times += found
        status = httpx.get(urls["gateway"] + "/v1/workflows/status", timeout=60).json()["engines"][0]
        ended = sum(status["ended"].values())
        print(
            f"{sent} sent, {failed} failed, {memory[-1]:.0f} MiB, {status['workflows']} run, {ended} ended", flush=True
        )
    for process in processes.values():
        process.terminate()
        process.join(20)
    result = {"seconds": args.seconds, "sent": sent, "failed": failed, "p50_ms": float(np.percentile(times, 50))}
    more = {"connections": args.connections, "without_an_answer": refused, "connected_s": connected_s}
    print(json.dumps({"benchmark": "gateway_soak", **result, **more, "mib": memory}))


if __name__ == "__main__":
    main()
