"""What does it cost the gateway to choose a model, and how long does a request wait for it?

A router with the linear head, trained on the spot, forecasts short and long prompts: in its own process, as the gateway
runs it, and beside that in the caller's thread, as it does not. `rule` is a choice with the probabilities at hand: the
rows of all upstreams and the arithmetic. `busy µs` is the CPU time of the gateway's thread for one choice, in which no
other request advances; `waits µs` is from asking to answer. Median and 99th percentile; `at once` requests ask
together, and their answers come in batches.

Then a transformer, an untrained ModernBERT of a third of a million parameters, with prompts of 25 words that come 16 at
once, or one by one at random: how many answers of it arrive together, how long a request waits, and how often the
linear head answers in its place because it is late, or nothing does.

    .venv/bin/python benchmarks/gateway_choice.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from presage.datasets.outcomes.split import split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.gateway.models.model_choice import AUTO, TOO_FAR, ModelChooser, Pool
from presage.gateway.models.router_client import RouterAnswer, RouterClient
from presage.gateway.monitor.fleet_monitor import FleetMonitor, FleetUpstream
from presage.predictors.common.artefact import artefact_digest
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.predictors.router.transformer import TransformerScorer
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.policies.routing.chimera import WORTH
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.testing.models import MODELS, planted, save_encoder

SAME_BATCH_S = 0.0005
"""Answers of a batch arrive together."""

Cells = dict[str, dict[str, float]]


class AtHand:
    """A router that has the answer."""

    def __init__(self, models: tuple[str, ...]) -> None:
        self._answer = RouterAnswer({model: 1 / (2 + at) for at, model in enumerate(models)}, far=False)

    async def forecast(self, prompt: str) -> RouterAnswer:
        """The answer."""
        return self._answer


class Inline:
    """A router in the caller's thread."""

    def __init__(self, router: RouterPredictor) -> None:
        self._router = router

    async def forecast(self, prompt: str) -> RouterAnswer:
        """The answer, computed here."""
        of = self._router.forecast(prompt)
        return RouterAnswer(of.probabilities, of.source == "back-off")


def trained() -> RouterPredictor:
    train, calibration = split_outcomes(generate_outcomes(1200, 0).outcomes, 0.25, 0)
    return RouterPredictor().fit(
        train.prompts, train.correct, calibration.prompts, calibration.correct, models=train.models
    )


def prompts_of(characters: int, count: int) -> list[str]:
    rng, found = random.Random(0), []
    drawn = generate_outcomes(400, 7).outcomes.prompts
    for _ in range(count):
        text = ""
        while len(text) < characters:
            text += rng.choice(drawn) + " "
        found.append(text[:characters])
    return found


async def measured(one: Callable[[int], Awaitable[object]], choices: int, at_once: int) -> dict[str, float]:
    """Microseconds of a choice."""
    busy, waits = [], []

    async def timed(number: int) -> None:
        begun = time.perf_counter_ns()
        await one(number)
        waits.append(time.perf_counter_ns() - begun)

    for start in range(-at_once * 10, choices, at_once):  # the first ones are not counted
        begun = time.thread_time_ns()
        await asyncio.gather(*(timed(start + offset) for offset in range(at_once)))
        if start >= 0:
            busy.append((time.thread_time_ns() - begun) / at_once)
        else:
            waits.clear()
    percentiles = {"": 50, "_p99": 99}
    found = {f"busy{name}_us": float(np.percentile(busy, at)) / 1e3 for name, at in percentiles.items()}
    return found | {f"waits{name}_us": float(np.percentile(waits, at)) / 1e3 for name, at in percentiles.items()}


def beside_a_transformer(encoder: Path) -> RouterPredictor:
    texts, correct = planted(2000, seed=0)
    scorer = TransformerScorer.from_encoder(str(save_encoder(encoder)), models=MODELS, head_tokens=128, tail_tokens=120)
    parts = texts[:1000], correct[:1000], texts[1000:], correct[1000:]
    return RouterPredictor(RouterConfig(head="transformer")).fit(*parts, models=MODELS, scorer=scorer)


async def batched(folder: Path, rate: float, requests: int, within_s: float) -> dict[str, float]:
    """Requests that come one by one, or all at once: sizes of batches, waits and shares."""
    client = RouterClient(time.monotonic, deadline_s=within_s)
    await client.load(str(folder), artefact_digest(folder))
    rng, prompts = random.Random(0), planted(200, seed=9, words=(20, 25))[0]
    done: list[tuple[float, float, RouterAnswer | str]] = []

    async def one(number: int) -> None:
        begun = time.perf_counter()
        found = await client.forecast(prompts[number % len(prompts)])
        done.append((time.perf_counter(), time.perf_counter() - begun, found))

    for start in range(0, 160, 16):
        await asyncio.gather(*(one(start + at) for at in range(16)))
    done.clear()
    tasks = []
    for number in range(requests):
        tasks.append(asyncio.create_task(one(number)))
        if math.isfinite(rate):
            await asyncio.sleep(rng.expovariate(rate))
        elif number % 16 == 15:
            await asyncio.gather(*tasks)
    await asyncio.gather(*tasks)
    await client.close()
    whole = [at for at, _, found in done if isinstance(found, RouterAnswer) and not found.fallback]
    batches = 1 + sum(later - sooner > SAME_BATCH_S for sooner, later in pairwise(whole))
    waits = [1e3 * wait for _, wait, _ in done]
    return {
        "batch": len(whole) / batches,
        "waits_ms": float(np.median(waits)),
        "waits_p99_ms": float(np.percentile(waits, 99)),
        "linear": sum(isinstance(found, RouterAnswer) and found.fallback for *_, found in done) / requests,
        "nothing": sum(isinstance(found, str) for *_, found in done) / requests,
    }


async def compared(router: RouterPredictor, folder: Path, upstreams: int, choices: int) -> Cells:
    models = router.models
    monitor = FleetMonitor(
        [FleetUpstream(f"u{n}", "http://127.0.0.1", (models[n % len(models)],)) for n in range(upstreams)],
        time.monotonic,
    )
    for number in range(20 * upstreams):
        monitor.sent(f"u{number % upstreams}", number, 2000)
    pool = Pool(AUTO, models, models[0])
    client = RouterClient(time.monotonic, deadline_s=5.0)
    await client.load(str(folder), artefact_digest(folder))
    found: Cells = {}
    cases = [
        ("rule", AtHand(models), 140, 1),
        ("inline, 140 characters", Inline(router), 140, 1),
        ("inline, 4,000 characters", Inline(router), 4_000, 1),
        ("process, 140 characters", client, 140, 1),
        ("process, 4,000 characters", client, 4_000, 1),
        ("process, 100,000 characters", client, 100_000, 1),
        ("process, 140 characters, 16 at once", client, 140, 16),
    ]
    for name, source, characters, at_once in cases:
        chooser = ModelChooser(monitor, source)
        workflows = [Workflow(Step("application", f"run-{number}", "agent")) for number in range(1000)]
        requests = [
            ApiRequest("chat", {"messages": [{"role": "user", "content": prompt}]})
            for prompt in prompts_of(characters, 200)
        ]
        for request in requests:
            _ = request.texts  # read before, for the identity of the workflow
        found[name] = await measured(
            lambda number, chooser=chooser, requests=requests, workflows=workflows: chooser.choose(
                requests[number % len(requests)], pool, workflows[number % 1000]
            ),
            choices,
            at_once,
        )
        skipped = {reason for _, _, reason in chooser.counts} - {WORTH, TOO_FAR}
        assert not skipped, skipped
    await client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstreams", type=int, default=8)
    parser.add_argument("--choices", type=int, default=2_000)
    args = parser.parse_args()
    router = trained()
    with tempfile.TemporaryDirectory() as folder:
        router.save(Path(folder) / "router")
        found = asyncio.run(compared(router, Path(folder) / "router", args.upstreams, args.choices))
        beside_a_transformer(Path(folder) / "encoder").save(Path(folder) / "transformer")
        rows = {
            f"{name}, within {within_s * 1e3:g} ms": asyncio.run(
                batched(Path(folder) / "transformer", rate, args.choices, within_s)
            )
            for name, rate in (("16 at once", math.inf), ("200 a second", 200.0), ("1,000 a second", 1000.0))
            for within_s in (0.05, 0.005)
        }
    print(f"{'':37}{'busy µs':>8}{'p99':>8}{'waits µs':>10}{'p99':>8}")
    for name, of in found.items():
        print(f"{name:37}{of['busy_us']:8.0f}{of['busy_p99_us']:8.0f}{of['waits_us']:10.0f}{of['waits_p99_us']:8.0f}")
    print(f"\n{'transformer':37}{'a batch':>8}{'waits ms':>10}{'p99':>8}{'linear':>8}{'nothing':>9}")
    for name, of in rows.items():
        print(f"{name:37}{of['batch']:8.1f}{of['waits_ms']:10.1f}{of['waits_p99_ms']:8.1f}", end="")
        print(f"{of['linear']:8.1%}{of['nothing']:9.1%}")
    results = {"upstreams": args.upstreams, "choices": found, "transformer": rows}
    print(json.dumps({"benchmark": "gateway_choice", **results}))


if __name__ == "__main__":
    main()
