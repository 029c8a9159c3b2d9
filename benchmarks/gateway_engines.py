"""Two real engines under overload: what does the gateway bring over vllm-router, and did the fleet replay predict it?

Two ordinary `vllm serve` processes with a model of random weights, and workflows that arrive by themselves, faster than
the engines serve them: three of five are short questions of a desk with two agents, the others have retry loops
(retry_loops.py). With `--loops 1` all have loops: what is left of those does not depend on what was done, so no order
can gain. Each agent continues a conversation of its own and gets the answer of the agent before it; clients name no
workflow. Each run draws other workflows, and every way serves the same ones with empty caches, in random order:

    vllm-router …              vllm-router with this policy
    presage, session-affinity… `presage gateway` with this routing, dialect "vllm"

First the gateway stands in shadow before two engines that write their step times; its recording trains the models, and
the step times give the costs of the replay. Completion: from a workflow's first request to its last answer, without its
pauses. Needs vLLM; vllm-router (`pip install vllm-router`) in an environment of its own.

    .venv-vllm/bin/python benchmarks/gateway_engines.py --router PATH/vllm-router --workflows 300 --rate 40 \
        --hidden-size 64 --device "20 0.06"

Fifteen minutes. On a machine of few cores take `--device`: the engines then do not wait for each other's arithmetic.
Prints a line for each way and run, then the ratios, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
import numpy as np
from retry_loops import Planned, draw, traced

from presage.testing.models import WORDS, save_qwen, save_tokenizer
from presage.testing.servers import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
ROUTERS: Final = {"vllm-router round-robin": "round_robin", "vllm-router cache-aware": "cache_aware"}
BLOCK, LENGTH, SEQS = 32, 4096, 16
PAUSE_S: Final = 0.05
DESK: Final = ("desk triage", "desk clerk")
TEMPLATE: Final = "{% for message in messages %}{{ message.content }} {% endfor %}"
PRESAGE: Final = "from presage.cli.presage import main; main()"
TRAIN: Final = "from presage.cli.train_predictor import main; main()"


def drawn(count: int, seed: int, loops: float) -> dict[str, list[Planned]]:
    """Workflows by id, this share of them with retry loops."""
    rng = random.Random(seed)
    found: dict[str, list[Planned]] = {}
    for name, steps in draw(count, seed).items():
        desk = [Planned(agent, steps[0].new[:40], rng.randint(8, 24), 0) for agent in DESK]
        found[name] = steps if rng.random() < loops else desk
    return found


def words(count: int, *seed: object) -> str:
    """So many words, which are so many tokens."""
    rng = random.Random(repr(seed))
    return " ".join(rng.choice(WORDS) for _ in range(count))


@contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[None]:
    """A process and all that it starts, ended at the end."""
    with log.open("w") as said:
        started = subprocess.Popen(
            list(command), env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(started.pid, how)
                started.wait(30)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def wait_for(url: str, path: str = "/health") -> None:
    """Until a server answers."""
    for _ in range(1200):
        try:
            if httpx.get(url + path, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} does not answer")


@contextmanager
def engines(folder: Path, blocks: int, device: str, step_times: bool) -> Iterator[list[str]]:
    """Two engines; with step times they are `presage serve` with all policies off, else `vllm serve`.

    `device`: as TIMED_EXECUTOR; "" leaves an iteration as long as it takes.
    """
    with ExitStack() as stack:
        urls = []
        for number in range(2):
            port = free_port()
            front = (
                [sys.executable, "-c", PRESAGE] if step_times else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
            )
            command = [*front, "serve", str(folder / "model"), "--served-model-name", "tiny", "--port", str(port)]
            command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--chat-template", TEMPLATE]
            command += ["--max-model-len", str(LENGTH), "--block-size", str(BLOCK), "--max-num-seqs", str(SEQS)]
            command += ["--num-gpu-blocks-override", str(blocks), "--scheduling-policy", "priority"]
            command += ["--enable-prompt-tokens-details", "--no-async-scheduling"]
            if step_times:
                command += ["--additional-config.presage.step_times_file", str(folder / f"steps-{number}.jsonl")]
                command += ["--additional-config.presage.mode", "off"]
            if device:
                command += ["--distributed-executor-backend", "timed_executor.TimedExecutor"]
            given = {
                "TIMED_EXECUTOR": device,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_SERVER_DEV_MODE": "1",
            }
            given["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"  # after 5 s vllm-router meets connections that were closed
            path = f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"
            environment = {**given, "PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            stack.enter_context(process(command, folder / f"engine-{number}-{step_times}.log", **environment))
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            wait_for(url)
        yield urls


@contextmanager
def gateway(
    folder: Path, urls: Sequence[str], forecasts: Mapping[str, Any], mode: str, routing: str = "session-affinity"
) -> Iterator[str]:
    """The gateway before the engines."""
    port, file = free_port(), folder / f"gateway-{mode}.toml"
    settings = {"time_to_live_s": 20.0, "reload_s": None, **forecasts}
    lines = [f'listen = "127.0.0.1:{port}"', f'routing = "{routing}"', "[modes]", f'default = "{mode}"', "[forecasts]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items() if value is not None]
    if mode == "shadow":
        lines += ["[forecasts.recorder]", f"folder = {json.dumps(str(folder / 'served'))}"]
    for url in urls:
        lines += ["[[upstreams]]", f'url = "{url}"', 'models = ["tiny"]']
    file.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-c", PRESAGE, "gateway", "--config", str(file)]
    with process(command, folder / f"gateway-{mode}.log", PYTHONPATH=str(ROOT)):
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def vllm_router(program: str, folder: Path, urls: Sequence[str], policy: str) -> Iterator[str]:
    """vllm-router before the engines."""
    port = free_port()
    command = [program, "--worker-urls", *urls, "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    with process(command, folder / f"router-{policy}.log"):
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def serve(url: str, workflows: Mapping[str, Sequence[Planned]], arrivals: Sequence[float]) -> dict[str, float]:
    """Mean and 95th percentile of completion times, seconds; share of prompt tokens found in a cache."""
    return asyncio.run(_serve(url, workflows, arrivals))


async def _serve(url: str, workflows: Mapping[str, Sequence[Planned]], arrivals: Sequence[float]) -> dict[str, float]:
    took: list[float] = []
    prompt = cached = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def run(name: str, steps: Sequence[Planned], at: float) -> None:
            nonlocal prompt, cached
            await asyncio.sleep(at)
            spent, before = 0.0, ""
            conversations: dict[str, list[dict[str, str]]] = {}
            for number, step in enumerate(steps):
                system = {"role": "system", "content": words(60, "base") + " " + words(100, step.agent)}
                messages = conversations.setdefault(step.agent, [system])
                new = words(len(step.new), name, number)
                messages.append({"role": "user", "content": f"{before}\n{new}".strip()})
                body = {"model": "tiny", "messages": messages, "max_tokens": step.answer, "temperature": 1.0}
                began = time.perf_counter()
                sent = {**body, "ignore_eos": True}  # without a seed, which ends vLLM 0.32 on CPUs after a preemption
                async with client.post(f"{url}/v1/chat/completions", json=sent) as answer:
                    if answer.status != 200:
                        raise SystemExit(f"status {answer.status}: {(await answer.text())[:300]}")
                    found = await answer.json()
                spent += time.perf_counter() - began
                prompt += found["usage"]["prompt_tokens"]
                cached += (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                before = found["choices"][0]["message"]["content"] or ""
                messages.append({"role": "assistant", "content": before})
                if number < len(steps) - 1:
                    await asyncio.sleep(step.pause * PAUSE_S)
            took.append(spent)

        pairs = zip(workflows.items(), arrivals, strict=True)
        await asyncio.gather(*(run(name, steps, at) for (name, steps), at in pairs))
    return {"mean_s": float(np.mean(took)), "p95_s": float(np.percentile(took, 95)), "hit_rate": cached / prompt}


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times, seconds."""
    rng = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        found.append(at)
        at += rng.expovariate(rate)
    return found


def command(code: str, *arguments: str) -> str:
    """Runs one of our commands; its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{arguments[0]}: {done.stderr[-2000:]}")
    return done.stdout


def learn(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Records and trains; the models by setting. Leaves step times for the costs."""
    blocks, count = args.blocks, args.workflows
    with engines(folder, blocks, args.device, step_times=True) as urls, gateway(folder, urls, {}, "shadow") as front:
        found = serve(front, drawn(count, 1000, args.loops), poisson(count, args.rate, 1000))
        print(f"learning: {found}", flush=True)
        time.sleep(25)  # the last workflows expire
    command(PRESAGE, "traces", "ingest", str(folder / "served"), "--to", str(folder / "traces"))
    models = {}
    for kind in ("remaining-length", "next-agent", "return-time"):
        out = folder / kind
        command(TRAIN, kind, str(folder / "traces"), "--out", str(out), "--no-register")
        models[kind.replace("-", "_")] = str(out)
    steps = [str(folder / f"steps-{number}.jsonl") for number in range(2)]
    command(PRESAGE, "calibrate-cost", *steps, "--to", str(folder / "engine.toml"))
    return models


def replayed(
    folder: Path, workflows: Mapping[str, Sequence[Planned]], arrivals: Sequence[float], blocks: int
) -> dict[str, float]:
    """Mean completion times that the fleet replay predicts: engines first come, first served, and by the gateway's
    priorities (shortest remaining job first)."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    at = {name: timedelta(seconds=seconds) for name, seconds in zip(workflows, arrivals, strict=True)}
    rows = []
    for row in traced(workflows, "own", PAUSE_S):
        moved = {key: (row[key] + at[row["workflow_id"]]).isoformat() for key in ("started_at", "ended_at")}
        rows.append({**row, **moved})
    assert all(row["started_at"] >= begun.isoformat() for row in rows)
    trace = folder / "plan.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for routing, scheduler in (("round-robin", "fcfs"), ("longest-prefix", "fcfs"), ("session-affinity", "stjf")):
        (folder / "fleet.toml").write_text(
            f'[[engines]]\ncount = 2\nname = "e"\nengine = "engine.toml"\ncache_tokens = {blocks * BLOCK}\n'
            f'scheduler = "{scheduler}"\n'
        )
        told = command(
            PRESAGE, "replay", str(trace), "--fleet", str(folder / "fleet.toml"), "--as-recorded",
            "--policy", routing, "--prompts", "own-conversation", "--opening-tokens", "160",
            "--lengths", str(folder / "remaining-length"), "--json",
        )  # fmt: skip
        figures = json.loads(told)["policies"][routing]
        found[f"{routing}, {scheduler}"] = figures["completion_mean_s"]["mean"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default=shutil.which("vllm-router"), help="the program vllm-router")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workflows", type=int, default=60)
    parser.add_argument("--rate", type=float, default=2.0, help="workflows a second")
    parser.add_argument("--blocks", type=int, default=250, help="of 32 tokens, in each engine's cache")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model that is made")
    parser.add_argument("--loops", type=float, default=0.4, help="share of workflows with retry loops")
    parser.add_argument("--device", default="", help="as TIMED_EXECUTOR (timed_executor.py); default: as it takes")
    parser.add_argument("--routing", default="session-affinity", help="the gateway's policies, separated by commas")
    parser.add_argument("--folder", type=Path, help="keeps what was learnt, and uses it again")
    args = parser.parse_args()
    if not args.router:
        raise SystemExit("give --router, the program vllm-router: pip install vllm-router in its own environment")
    folder = args.folder or Path(tempfile.mkdtemp())
    if not (folder / "engine.toml").exists():
        folder.mkdir(exist_ok=True)
        save_qwen(
            folder / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size, length=LENGTH, spread=0.02
        )
        save_tokenizer(folder / "model", [" ".join(WORDS)])
        learn(folder, args)
    models = {kind.replace("-", "_"): str(folder / kind) for kind in ("remaining-length", "next-agent", "return-time")}
    ours = args.routing.split(",")
    ways = [*ROUTERS, *ours]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    predicted = []
    for run in range(args.runs):
        workflows = drawn(args.workflows, run, args.loops)
        predicted.append(replayed(folder, workflows, poisson(args.workflows, args.rate, run), args.blocks))
        print(f"run {run} replay      {json.dumps(predicted[-1])}", flush=True)
    with engines(folder, args.blocks, args.device, step_times=False) as urls:
        for run in range(args.runs):
            workflows = drawn(args.workflows, run, args.loops)
            arrivals = poisson(args.workflows, args.rate, run)
            for way in random.Random(run).sample(ways, len(ways)):
                for url in urls:
                    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
                if way in ROUTERS:
                    front = vllm_router(args.router, folder, urls, ROUTERS[way])
                else:
                    front = gateway(folder, urls, models, "on", way)
                with front as url:
                    found[way].append(serve(url, workflows, arrivals))
                print(f"run {run} {way:24} {json.dumps(found[way][-1])}", flush=True)
    means = {way: np.array([one["mean_s"] for one in values]) for way, values in found.items()}
    ratios = {f"{way} / {own}": list(means[way] / means[own]) for own in ours for way in ROUTERS}
    for pair, values in ratios.items():
        print(f"mean completion, {pair}: {', '.join(f'{value:.2f}' for value in values)}")
    print(json.dumps({"benchmark": "gateway_engines", "ways": found, "ratios": ratios, "predicted": predicted}))


if __name__ == "__main__":
    main()
