"""Does the gateway run for an hour without a failed request, with thousands of connections, while engines die?

The gateway (`presage gateway` before two simulated engines, 2 ms a token) in a process of its own. First so many
clients connect at once, each sends a request, and all stay connected. Then conversations go on for an hour; half of the
answers are streamed. With `--kill-every` the engines are killed in turn (SIGKILL) and started again on the same port.
A request fails if its status is not 200 or it takes more than 30 s. A stream of which a part was passed on cannot be
asked for again when its engine dies: these are counted apart, as broken.

    .venv/bin/python benchmarks/gateway_soak.py [--seconds 3600] [--rate 20] [--connections 10000] [--kill-every 20]

Prints failures, the gateway's memory and its running workflows each minute, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import threading
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


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def started(kind: str, port: int, *upstreams: str) -> Any:
    """The process of an engine or a gateway that answers."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=run, args=(kind, port, *upstreams), kwargs={"token_s": 0.002}, daemon=True)
    process.start()
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    return process


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
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0 kills none")
    args = parser.parse_args()
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    url = urls[2]
    engines = [started("engine", port) for port in ports[:2]]
    front = started("gateway", ports[2], *urls[:2])
    stop, kills = threading.Event(), [0]

    def kill() -> None:
        while args.kill_every and not stop.wait(args.kill_every):
            which = kills[0] % 2
            engines[which].kill()
            engines[which].join(20)
            stop.wait(min(2.0, args.kill_every / 4))
            engines[which] = started("engine", ports[which])
            kills[0] += 1

    began, pid = time.monotonic(), front.pid
    refused = asyncio.run(connect(url, args.connections))
    connected_s = time.monotonic() - began
    print(f"{args.connections} connections in {connected_s:.0f} s: {refused} without an answer", flush=True)
    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    failed = sent = broken = 0
    memory, times = [], []
    while time.monotonic() - began < args.seconds:
        turn = min(60.0, args.seconds)
        found, lost = asyncio.run(measure(url, args.rate, turn, args.streams))
        sent += len(found) + lost.total()
        broken += lost["IncompleteReadError"]
        failed += lost.total() - lost["IncompleteReadError"]
        if lost:
            print(dict(lost))
        memory.append(mib(pid))
        times += found
        status = httpx.get(url + "/v1/workflows/status", timeout=60).json()["engines"][0]
        ended = sum(status["ended"].values())
        print(
            f"{sent} sent, {failed} failed, {broken} broken, {kills[0]} kills, {memory[-1]:.0f} MiB, "
            f"{status['workflows']} run, {ended} ended",
            flush=True,
        )
    stop.set()
    killing.join()
    for process in (front, *engines):
        process.terminate()
        process.join(20)
    result = {
        "seconds": args.seconds,
        "sent": sent,
        "failed": failed,
        "broken": broken,
        "kills": kills[0],
        "p50_ms": float(np.percentile(times, 50)),
    }
    more = {"connections": args.connections, "without_an_answer": refused, "connected_s": connected_s}
    print(json.dumps({"benchmark": "gateway_soak", **result, **more, "mib": memory}))


if __name__ == "__main__":
    main()
