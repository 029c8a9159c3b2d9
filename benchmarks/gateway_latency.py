"""What does the gateway add to a request, beside a plain proxy?

A simulated engine, plain proxies (starlette, uvicorn, and httpx or aiohttp), and the gateway with online counts, each
in a process of its own; the proxies have one core, and the engine and the client another. Requests come at a fixed
rate over kept connections, half of them streamed; each belongs to a workflow whose conversation grows, and names
nothing, so the gateway recognises it. The ways take turns of a few seconds, so a busy machine slows all of them alike.
Added: a way's latency less the direct one's, at the same quantile. CPU: of the way's process, for each request.

    .venv/bin/python benchmarks/gateway_latency.py --rate 200 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import aiohttp
import httpx
import numpy as np
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from presage.gateway.config import gateway_config
from presage.gateway.serve import serve
from presage.gateway.simulated_engine import SimulatedEngine

PATH: Final = "/v1/chat/completions"
HOP: Final = frozenset(("host", "content-length", "connection", "transfer-encoding"))
SYSTEM: Final = "You are a careful engineer. " * 40
STEPS: Final = 8


def over_httpx(upstream: str) -> Starlette:
    """A proxy that only proxies."""
    client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=2048, max_keepalive_connections=2048))

    async def forward(request: Request) -> StreamingResponse:
        body = await request.body()
        sent = client.build_request("POST", upstream + request.url.path, headers=kept(request.headers), content=body)
        answer = await client.send(sent, stream=True)
        parts = StreamingResponse(answer.aiter_raw(), answer.status_code, kept(answer.headers))
        parts.background = BackgroundTask(answer.aclose)
        return parts

    return Starlette(routes=[Route(PATH, forward, methods=["POST"])])


def over_aiohttp(upstream: str) -> Starlette:
    """A proxy that only proxies, with the gateway's libraries."""
    made: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> StreamingResponse:
        if not made:
            made.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2048), auto_decompress=False))
        body = await request.body()
        answer = await made[0].post(upstream + request.url.path, headers=kept(request.headers), data=body)
        parts = StreamingResponse(answer.content.iter_any(), answer.status, kept(answer.headers))
        parts.background = BackgroundTask(answer.close)
        return parts

    return Starlette(routes=[Route(PATH, forward, methods=["POST"])])


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that a proxy passes on."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP}


PROXIES: Final = {"httpx": over_httpx, "aiohttp": over_aiohttp}


def run(kind: str, port: int, *upstream: str, token_s: float = 0.0) -> None:
    """Serves one application until it is terminated; a gateway before each of the upstreams."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if kind == "engine" else cores[0]})
    if kind == "gateway":
        forecasts = {
            "next_agent": None,
            "remaining_length": None,
            "return_time": None,
            "profile": None,
            "reload_s": None,
        }
        upstreams = [{"url": url, "dialect": "presage", "models": ["simulated"]} for url in upstream]
        given = {"listen": f"127.0.0.1:{port}", "upstreams": upstreams, "forecasts": forecasts}
        serve(gateway_config(given, ""))
        return
    app = (
        SimulatedEngine(slots=10_000, token_s=token_s, prefill_s=0.0).app()
        if kind == "engine"
        else PROXIES[kind](*upstream)
    )
    uvicorn.run(app, port=port, log_level="error", access_log=False)


class Connection:
    """A kept HTTP/1.1 connection; a client library would cost more than what is measured."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> tuple[float, bytes]:
        """Seconds to the first part of the answer's body, and the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        began = time.perf_counter()
        writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" % PATH.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head:
            raise ConnectionError(head[:40])
        if b"content-length:" in head:
            answer = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            return time.perf_counter() - began, answer
        first, answer = 0.0, b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            first = first or time.perf_counter() - began
            answer += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return first, answer


async def measure(url: str, rate: float, seconds: float, streams: int) -> tuple[list[float], Counter[str]]:
    """Latencies of one way, milliseconds to the first part, and failed requests by the name of their errors."""
    found: list[float] = []
    failed = Counter[str]()

    async def talk(number: int) -> None:
        """One conversation after the other, a request every `streams` / `rate` seconds."""
        connection, step = Connection(url), 0
        due = began + number / rate
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if step % STEPS == 0:
                messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
            messages.append({"role": "user", "content": f"Question {step} of talk {number} at {began}: what is next?"})
            body = {"model": "simulated", "messages": messages, "stream": step % 2 == 1, "max_tokens": 16}
            try:
                first, answer = await asyncio.wait_for(connection.ask(json.dumps(body).encode()), 30)
                found.append(1e3 * first)
                said = answer if step % 2 == 0 else b'{"choices":[{"message":{"role":"assistant","content":"so"}}]}'
                messages.append(json.loads(said)["choices"][0]["message"])
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                failed[type(error).__name__] += 1
                connection = Connection(url)
            step += 1
            due += streams / rate

    began = time.perf_counter() + 0.1
    await asyncio.gather(*(talk(number) for number in range(streams)))
    return found, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200, help="requests a second")
    parser.add_argument("--streams", type=int, default=64, help="conversations at once")
    parser.add_argument("--seconds", type=float, default=60, help="of each way")
    parser.add_argument("--turn", type=float, default=5, help="seconds of a turn")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    urls: dict[str, str] = {}
    processes = []
    for kind in ("engine", *PROXIES, "gateway"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        urls[kind] = f"http://127.0.0.1:{port}"
        processes.append(spawn.Process(target=run, args=(kind, port, urls["engine"]), daemon=True))
        processes[-1].start()
    for url in urls.values():
        for _ in range(600):
            try:
                httpx.get(url + "/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    used = {way: psutil.Process(process.pid) for way, process in zip(urls, processes, strict=True)}
    found: dict[str, list[float]] = {way: [] for way in urls}
    cpu_s = dict.fromkeys(urls, 0.0)
    failed = 0
    for turn in range(-1, max(1, round(args.seconds / args.turn))):  # the first one warms
        for way, url in urls.items():
            before_s = sum(used[way].cpu_times()[:2])
            times, lost = asyncio.run(measure(url, args.rate, args.turn, args.streams))
            if turn >= 0:
                cpu_s[way] += sum(used[way].cpu_times()[:2]) - before_s
                found[way] += times
                failed += lost.total()
    for process in processes:
        process.terminate()
        process.join(20)
    table = {way: [float(np.percentile(values, q)) for q in (50, 99)] for way, values in found.items()}
    print(f"{'':10}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}{'added p50':>11}{'added p99':>11}{'CPU ms':>9}")
    cpu_ms = {way: 1e3 * cpu_s[way] / max(1, len(found[way])) for way in urls}
    for way, (p50, p99) in table.items():
        added = [p50 - table["engine"][0], p99 - table["engine"][1]]
        print(f"{way:10}{len(found[way]):9}{p50:9.2f}{p99:9.2f}{added[0]:11.2f}{added[1]:11.2f}{cpu_ms[way]:9.2f}")
    added = {way: table[way][0] - table["engine"][0] for way in (*PROXIES, "gateway")}
    print(
        json.dumps(
            {
                "benchmark": "gateway_latency",
                "rate": args.rate,
                "streams": args.streams,
                "failed": failed,
                "ms": table,
                "cpu_ms": cpu_ms,
                "ratio_cpu": {way: cpu_ms["gateway"] / cpu_ms[way] for way in PROXIES},
                "added_p50_ms": added["gateway"],
                "added_p99_ms": table["gateway"][1] - table["engine"][1],
                "ratio_p50": {way: table["gateway"][0] / table[way][0] for way in PROXIES},
                "ratio_p99": {way: table["gateway"][1] / table[way][1] for way in PROXIES},
                "ratio_added_p50": {way: added["gateway"] / added[way] for way in PROXIES},
            }
        )
    )


if __name__ == "__main__":
    main()
