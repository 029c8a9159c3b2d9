"""How much sooner does a step begin whose prompt was prefilled while the tool ran, and what is wasted?

One ordinary `vllm serve` with a model of random weights, the gateway before it, and two applications:

    code    planner coder tester, then the reviewer, or in one of six the coder once more. The tester and the
            reviewer get the task, which is long, and the latest answers; the tester also what its tool printed, which
            nobody knows
    desk    triage researcher writer critic: each has a system prompt of its own and all that was said

So the texts that a step copies are not in the server's prefix cache: another system prompt stands before them. First
the gateway records workflows with short tasks; ingestion and `train-predictor profile` make the profile. Then the same
workflows, other ones in each run, go through a gateway without and one with prefill ahead, in random order, with an
empty cache, at temperature 0 and with pauses between their steps. A step was prefilled if the gateway says so in its
answer's header. Needs vLLM.

    .venv-vllm/bin/python benchmarks/prefill_ahead.py [--runs 3]

Prints a line for each way and run, then the ratios, then one JSON line. Tokens "computed" are prompt tokens that were
not in the cache, of requests and prefills together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
import numpy as np
from gateway_engines import PRESAGE, ROOT, TRAIN, command, process, wait_for, words

from presage.testing.models import WORDS, save_qwen, save_tokenizer
from presage.testing.servers import free_port

TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
LENGTH: Final = 8192
AGAIN: Final = 1 / 6
"""Share of the code workflows in which the coder runs twice."""
FORECAST: Final = "x-presage-forecast"
OF_USE: Final = ("used", "late")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Asked:
    """A step as its client saw it."""

    key: tuple[str, int]
    agent: str
    first_s: float
    rest_s: float
    answer: str
    prompt_tokens: int
    cached_tokens: int
    outcome: str


class Client:
    """Workflows through one gateway."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        task_words: int,
        answer: int,
        pauses: float,
        changed: float = 0.0,
    ) -> None:
        self.changed = changed
        self.session, self.url, self.asked = session, url, list[Asked]()
        self.task_words, self.answer, self.pauses, self.temperature = task_words, answer, pauses, 0.0

    async def step(self, kind: str, name: str, number: int, agent: str, messages: Messages, last: bool = False) -> str:
        """One request, streamed, and the tool after it."""
        if number and random.Random(f"changed {name} {number}").random() < self.changed:
            opening = messages[0]
            messages = [{**opening, "content": f"{words(20, name, number)}\n{opening['content']}"}, *messages[1:]]
        named = {"workflow_type": kind, "workflow_id": name, "agent": agent} | (
            {"workflow_end": "true"} if last else {}
        )
        body = {
            "model": "tiny", "messages": [{"role": "system", "content": words(60, "role", agent)}, *messages],
            "max_tokens": self.answer, "temperature": self.temperature, "ignore_eos": True, "vllm_xargs": named,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, first, said, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
        headers = {"X-Presage-Forecast": "1"}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise SystemExit(f"status {answer.status}: {(await answer.text())[:300]}")
            outcome = json.loads(answer.headers.get(FORECAST, "{}")).get("prefilled_ahead", "")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    first = first or time.perf_counter() - began
                    said += [one["delta"].get("content") or "" for one in chunk["choices"]]
                    usage = chunk.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text, rest = "".join(said), time.perf_counter() - began - first
        self.asked.append(Asked((name, number), agent, first, rest, text, usage["prompt_tokens"], cached, outcome))
        if not last and self.pauses:
            await asyncio.sleep(self.pauses * random.Random(f"{name} {number}").uniform(0.75, 1.5))
        return text

    async def code(self, name: str) -> None:
        task, again = words(self.task_words, name), random.Random(name).random() < AGAIN
        plan = await self.step("code", name, 0, "planner", [_user(task)])
        talk = [_user(f"{task}\nThe plan\n{plan}")]
        for number in (1, 3)[: 1 + again]:
            code = await self.step("code", name, number, "coder", talk)
            printed = words(40, name, number)
            tested = f"Of the task\n{task}\nthe code\n{code}\nprinted\n{printed}"
            verdict = await self.step("code", name, number + 1, "tester", [_user(tested)])
            talk += [_assistant(code), _user(verdict)]
        reviewed = f"Review what was done\n{task}\ncode\n{code}\nverdict\n{verdict}"
        await self.step("code", name, 5, "reviewer", [_user(reviewed)], last=True)

    async def desk(self, name: str) -> None:
        talk = [_user(words(self.task_words, name))]
        agents = ("triage", "researcher", "writer", "critic")
        for number, agent in enumerate(agents):
            talk.append(_assistant(await self.step("desk", name, number, agent, talk, last=agent == agents[-1])))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def served(url: str, names: Sequence[str], at_once: int, **given: Any) -> list[Asked]:
    """All steps of workflows of both applications, so many workflows at once."""

    async def run() -> list[Asked]:
        temperature = given.pop("temperature", 0.0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            client, slots = Client(session, url, **given), asyncio.Semaphore(at_once)
            client.temperature = temperature

            async def one(name: str) -> None:
                async with slots:
                    await (client.code(name) if name.startswith("code") else client.desk(name))

            await asyncio.gather(*map(one, names))
            return client.asked

    return asyncio.run(run())


def drawn(count: int, *seed: object) -> list[str]:
    """Names of workflows, which decide on all that is in them; half of each application."""
    return [f"{('code', 'desk')[at % 2]} {at} {' '.join(map(str, seed))}" for at in range(count)]


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    """An ordinary vLLM."""
    port = free_port()
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model"), "--port", str(port)]
    line += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    line += ["--chat-template", TEMPLATE, "--max-model-len", str(LENGTH), "--block-size", "32", "--max-num-seqs", "16"]
    line += ["--scheduling-policy", "priority", "--enable-prompt-tokens-details", "--no-async-scheduling"]
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment = {**given, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with process(line, folder / "engine.log", **environment):
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gateway(folder: Path, url: str, name: str, profile: Path | None, ahead: bool) -> Iterator[str]:
    """A gateway before the engine; without a profile it records."""
    port, file = free_port(), folder / f"gateway-{name}.toml"
    lines = [f'listen = "127.0.0.1:{port}"', "[forecasts]", "reload_s = 1e9"]
    if profile is None:
        lines += ["[forecasts.recorder]", f"folder = {json.dumps(str(folder / 'served'))}", 'text = "on"']
    else:
        lines.insert(2, f"profile = {json.dumps(str(profile))}")
    lines += ["[[upstreams]]", f'url = "{url}"', 'models = ["tiny"]']
    if ahead:
        lines += ["[prefill_ahead]"]
    file.write_text("\n".join(lines) + "\n")
    with process(
        [sys.executable, "-c", PRESAGE, "gateway", "--config", str(file)],
        folder / f"gateway-{name}.log",
        PYTHONPATH=str(ROOT),
    ):
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def counters(url: str) -> Counter[str]:
    """The counters of prefills, by name and last label."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(("presage_gateway_prefill", "presage_errors")) and "_created" not in line and "{" in line:
            labels, value = line.rsplit(" ", 1)
            found[f"{labels.partition('{')[0].removeprefix('presage_gateway_')} {labels.split(chr(34))[-2]}"] += int(
                float(value)
            )
    return found


def first_s(asked: Sequence[Asked]) -> dict[str, float]:
    """Median and 95th percentile of the time to the first token, seconds."""
    values = [one.first_s for one in asked] or [float("nan")]
    return {"median_s": float(np.median(values)), "p95_s": float(np.percentile(values, 95))}


def compared(off: Sequence[Asked], on: Sequence[Asked], counted: Mapping[str, int]) -> dict[str, Any]:
    """One pair of runs over the same workflows."""
    before = {one.key: one for one in off}
    later = [one for one in on if one.key[1]]
    told = [one for one in on if one.outcome in OF_USE]
    pairs = [before[one.key] for one in told]
    used, lost = counted.get("prefilled_tokens_total yes", 0), counted.get("prefilled_tokens_total no", 0)
    computed = [sum(one.prompt_tokens - one.cached_tokens for one in of) for of in (off, on)]
    return {
        "prefilled": {"off": first_s(pairs), "on": first_s(told)},
        "all_later": {"off": first_s([before[one.key] for one in later]), "on": first_s(later)},
        "ratio": first_s(pairs)["median_s"] / first_s(told)["median_s"],
        "ratio_p95": first_s(pairs)["p95_s"] / first_s(told)["p95_s"],
        "ratio_later": first_s([before[one.key] for one in later])["median_s"] / first_s(later)["median_s"],
        "prefilled_share": len(told) / len(later),
        "outcomes": dict(Counter(one.outcome for one in later)),
        "tokens_ahead": used + lost,
        "wasted": lost / (used + lost) if used + lost else 0.0,
        "computed": {"off": computed[0], "on": computed[1] + used + lost},
        "computed_ratio": (computed[1] + used + lost) / computed[0],
        "rest_ratio": float(np.mean([one.rest_s for one in on]) / np.mean([one.rest_s for one in off])),
        "tokens_equal": {one.key: one.answer for one in on} == {one.key: one.answer for one in off},
    }


def without_nan(value: Any) -> Any:
    """As JSON has it: null for a figure of nothing."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workflows", type=int, default=8, help="of a run; half of each application")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--learn", type=int, default=100, help="workflows that are recorded")
    parser.add_argument("--task-words", type=int, default=1500, help="tokens of a task")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument(
        "--pause", type=float, default=1.2, help="seconds of a tool, of which three quarters to one and a half"
    )
    parser.add_argument("--changed", type=float, default=0.0, help="share of prompts that begin with what nobody knows")
    parser.add_argument("--hidden-size", type=int, default=768, help="of the model that is made")
    parser.add_argument("--folder", type=Path, help="keeps the model and the profile, and uses them again")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    if not (folder / "model").exists():
        save_qwen(folder / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size, length=LENGTH)
        save_tokenizer(folder / "model", [" ".join((*WORDS, "system", "user", "assistant"))])
    with engine(folder) as url:
        if not (folder / "profile").exists():
            given = {"task_words": 60, "answer": 12, "pauses": 0.0, "temperature": 1.0}
            with gateway(folder, url, "records", None, False) as front:
                served(front, drawn(args.learn, "learn"), 8, **given)
            command(PRESAGE, "traces", "ingest", str(folder / "served"), "--to", str(folder / "traces"))
            command(TRAIN, "profile", str(folder / "traces"), "--out", str(folder / "profile"), "--no-register")
            print(f"recorded and trained after {time.perf_counter() - began:.0f} s", flush=True)
        found: list[dict[str, Any]] = []
        given = {"task_words": args.task_words, "answer": args.answer, "pauses": args.pause, "changed": args.changed}
        with (
            gateway(folder, url, "off", folder / "profile", False) as off,
            gateway(folder, url, "on", folder / "profile", True) as on,
        ):
            fronts = {"off": off, "on": on}
            for front in fronts.values():
                served(front, drawn(8, "warm"), 4, task_words=60, answer=8, pauses=0.0)
            for run in range(args.runs):
                names = drawn(args.workflows, run)
                before = counters(on)
                asked: dict[str, list[Asked]] = {}
                for way in random.Random(run).sample(list(fronts), 2):
                    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
                    asked[way] = served(fronts[way], names, args.at_once, **given)
                found.append(compared(asked["off"], asked["on"], counters(on) - before))
                print(f"run {run} {json.dumps(without_nan(found[-1]))}", flush=True)
            told = counters(on)
    for name, what in (
        ("ratio", "time to first token of prefilled steps, without / with, median"),
        ("ratio_p95", "the same, 95th percentile"),
        ("ratio_later", "all steps but a workflow's first, median"),
        ("prefilled_share", "share of these that were prefilled"),
        ("wasted", "share of prefilled tokens that were wasted"),
        ("computed_ratio", "prompt tokens computed, with / without"),
        ("rest_ratio", "seconds from the first token to the last, with / without, mean"),
    ):
        print(f"{what}: {', '.join(f'{one[name]:.2f}' for one in found)}")
    print(f"tokens equal: {'yes' if all(one['tokens_equal'] for one in found) else 'NO'}")
    print(f"{time.perf_counter() - began:.0f} s")
    print(json.dumps({"benchmark": "prefill_ahead", "runs": without_nan(found), "counters": dict(told)}))


if __name__ == "__main__":
    main()
