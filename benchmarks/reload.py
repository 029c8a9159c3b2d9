"""How much longer do steps become while new versions are fetched, validated and loaded?

vLLM's own scheduler and KV-cache manager without a model, 64 concurrent workflows, a registry on SQLite. A sleep
between scheduling and output stands for the model and lets other threads run. "step" is the wall time of the hooks'
and vLLM's work from one iteration to the next (`add_request`, `schedule`, `update_from_output`) without that sleep.
Five kinds of phases take turns, so that a busy machine slows all alike:

    alone       no registry checks
    looking     the registry is asked every 0.2 s and has nothing new
    reloading   the loaded version is presented as a new one before every check, so both models are validated in the
                process beside the engine, loaded here and swapped in, as fast as possible
    refusing    the aliases point to a version that fails validation, which is forgotten before every check
    within      as reloading, but registry and validation run in a thread of this process

"cpu" is the CPU time of all threads of this process in one step, which a busy machine does not lengthen. "added" is
relative to "alone" of the same round. "take-over" is the engine's own thread during one swap.

Last, without load, the longest time that a check holds the interpreter's lock, measured from a thread that waits for
it. An engine checks every 30 s, not every 0.2 s, so it reloads far less often than these phases.

    python benchmarks/reload.py [--rounds 3] [--seconds 4] [--looks 2] [--model-ms 5]

Needs vLLM 0.32. Prints a table of milliseconds and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from presage.datasets.ingest import append
from presage.datasets.store import read_store
from presage.datasets.synthetic.workflows import generate
from presage.features.lengths import LengthEncoder, length_rows
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.quantiles.choice import QuantileConfig
from presage.registry.connect import Registry, open_registry
from presage.registry.package import register
from presage.serving_hooks.forecasting.registry_process import version_of
from presage.serving_hooks.forecasting.reload import Reload
from presage.serving_hooks.forecasting.sources import Held, load
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.testing.engine import ScriptedEngine as Engine
from presage.testing.engine import ask, build
from presage.training.length.train import LengthTexts
from presage.training.next_agent.train import train

SPELLS = ("alone", "looking", "reloading", "refusing", "within")
AGENTS = ("planner", "coder", "tester", "coder", "tester")
AT_ONCE, LOOK_S, BOUND_MS = 64, 0.2, 50.0
GOOD, BROKEN = 1, 2


def lengths_of(table: pa.Table) -> RemainingLengthPredictor:
    """A small forest with texts."""
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    encoder, rows = texts.fit(encoder, relevant=False, seed=0, size=4)
    held = rows.task % 5 == 0
    config = QuantileConfig(estimator="forest", refit=False)
    return RemainingLengthPredictor(config, 0).fit(rows.take(~held), rows.take(held), encoder=encoder)


def registered(root: Path) -> Registry:
    """Registers both models; version 2 of next-agent needs a text encoder that is missing."""
    table = generate("retry", 80, 0, state_size=16).table
    append(table, root / "store")
    small = NextAgentConfig(network=NetworkConfig(epochs=3), boosting=BoostingConfig(rounds=5))
    train(table, None, small, baselines=(), name="reload").save(root / "agents")
    lengths_of(read_store(root / "store")).save(root / "lengths")
    artefact = read_artefact(root / "agents")
    states = {"kind": "encoder", "sizes": {"prefill": 16, "completion": 16}}
    states |= {"encoder": str(root / "gone"), "encoder_digest": "sha256:0"}
    config = artefact.config | {"states": states}
    write_artefact(root / "broken", kind="next-agent", config=config, tensors=artefact.tensors, training_data={})
    registry = open_registry(f"sqlite:///{root / 'mlflow.db'}")
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    for kind, folder in (("next-agent", "agents"), ("next-agent", "broken"), ("remaining-length", "lengths")):
        register(registry, root / folder, name=kind, metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("remaining-length", "champion", "1")
    return registry


class Load:
    """An endless load of workflows of five steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done, self.begun = engine, 0, 0
        self.at: dict[str, tuple[int, int]] = {}

    def arrive(self) -> None:
        """Sends the next step of each workflow whose step ended, and new workflows for those that ended."""
        for name in self.engine.ended[self.done :]:
            number, step = self.at.pop(name)
            if step + 1 < len(AGENTS):
                self.send(number, step + 1)
        self.done = len(self.engine.ended)
        while len(self.at) < AT_ONCE:
            self.begun += 1
            self.send(self.begun, 0)

    def send(self, number: int, step: int) -> None:
        """One request."""
        name, start = f"w{number}.{step}", number % 97
        prompt = [(start + i) % 500 for i in range(60 + 40 * step)]
        said = {"workflow_type": "retry", "workflow_id": f"w{number}", "agent": AGENTS[step], "step": step}
        self.at[name] = number, step
        self.engine.scheduler.add_request(
            ask(name, prompt, 10 + (7 * number + 13 * step) % 40, workflow_end=step == len(AGENTS) - 1, **said)
        )


class Within:
    """Asks the registry and validates versions in the serving process."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def versions(self, references: Mapping[str, str]) -> dict[str, int | None]:
        """As `RegistryClient.versions`."""
        return {kind: version_of(reference, self.registry) for kind, reference in references.items()}

    def trial(self, kind: str, reference: str) -> Held:
        """As `RegistryClient.trial`."""
        sys.setswitchinterval(0.0002)
        held = load(kind, reference, lambda: self.registry)
        sys.setswitchinterval(0.005)
        return replace(held, predictor=None)

    def rest(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""


def look(reload: Reload, kind: str) -> None:
    """One registry check, which finds a new version in the kinds that have one."""
    if kind != "looking":
        reload.refused.clear()
        reload._held = {name: replace(held, version=99) for name, held in reload._held.items()}
    reload.look()


def spell(
    kind: str, load: Load, registry: Registry, seconds: float, looks: int, model_s: float
) -> list[tuple[float, float]]:
    """Wall and CPU milliseconds per step of one phase."""
    reload, taken, looked, over = load.engine.scheduler.upkeep.reload, [], [], threading.Event()
    registry.client.set_registered_model_alias("next-agent", "champion", str(BROKEN if kind == "refusing" else GOOD))
    beside = reload._registry
    if kind == "within":
        reload._registry = Within(registry)

    def keep_looking() -> None:
        while not over.is_set():
            look(reload, kind)
            looked.append(kind)
            over.wait(LOOK_S)

    thread = threading.Thread(target=keep_looking, name="presage-reload")
    if kind == "alone":
        looked = [kind] * looks
    else:
        thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(looked) < looks:
        begun, cpu = time.perf_counter(), time.process_time()
        load.arrive()
        load.engine.schedule()
        worked, cpu_worked = time.perf_counter() - begun, time.process_time() - cpu
        time.sleep(model_s)
        begun, cpu = time.perf_counter(), time.process_time()
        load.engine.drain()
        step_s = worked + time.perf_counter() - begun
        taken.append((1000 * step_s, 1000 * (cpu_worked + time.process_time() - cpu)))
        load.engine.log.clear()
    over.set()
    if kind != "alone":
        thread.join()
    reload._registry = beside
    return taken


def longest_hold(reload: Reload, registry: Registry, kind: str, looks: int) -> dict[str, float]:
    """Longest hold of the interpreter's lock during checks, and CPU time of a check, milliseconds."""
    beside, longest, cpu = reload._registry, [], []
    if kind == "within":
        reload._registry = Within(registry)
    for _ in range(looks):
        done: list[float] = []

        def looking(done: list[float] = done) -> None:
            look(reload, kind)
            done.append(1000 * time.thread_time())

        thread = threading.Thread(target=looking)
        thread.start()
        most, last = 0.0, time.process_time() - time.thread_time()
        while not done:
            now = time.process_time() - time.thread_time()
            most, last = max(most, now - last), now
            time.sleep(0.0001)
        thread.join()
        longest.append(1000 * most)
        cpu.append(done[0])
    reload._registry = beside
    return {"worst_ms": round(max(longest), 2), "look_ms": round(statistics.median(cpu), 2)}


def timed(scheduler: Any, took: list[float]) -> None:
    """Records the time of each swap, milliseconds."""
    renew = scheduler._renew

    def timing() -> None:
        before, begun = scheduler.upkeep._renewed, time.perf_counter()
        renew()
        if scheduler.upkeep._renewed > before:
            took.append(1000 * (time.perf_counter() - begun))

    scheduler._renew = timing


def figures(rounds: dict[str, list[list[tuple[float, float]]]], kind: str, which: int) -> dict[str, float]:
    """Figures of wall times (0) or CPU times (1)."""
    own, alone = ([sorted(step[which] for step in taken) for taken in rounds[name]] for name in (kind, "alone"))
    p99 = [of[int(0.99 * len(of))] for of in own]
    added = [of[-1] - control[-1] for of, control in zip(own, alone, strict=True)]
    return {
        "ms": round(statistics.median(map(statistics.median, own)), 2),
        "p99_ms": round(statistics.median(p99), 2),
        "worst_ms": round(max(of[-1] for of in own), 2),
        "added_worst_ms": round(statistics.median(added), 2),
        "most_added_ms": round(max(added), 2),
        "over_50_of_1000": round(1000 * sum(s > BOUND_MS for of in own for s in of) / sum(map(len, own)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--looks", type=int, default=2)
    parser.add_argument("--model-ms", type=float, default=5.0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rounds: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        registry = registered(root)
        registry.client.set_registered_model_alias("next-agent", "champion", str(GOOD))
        settings = {"registry": registry.uri, "reload_s": 1e6}
        scheduler = build(root / "m", SyncWorkflowScheduler, blocks=4000, presage=settings, seqs=AT_ONCE, tokens=2048)
        timed(scheduler, took)
        load, model_s = Load(Engine(scheduler)), args.model_ms / 1000
        spell("alone", load, registry, 1.0, 0, model_s)
        gc.collect()
        gc.freeze()  # as vLLM does when its engine has started
        for _, kind in itertools.product(range(args.rounds), SPELLS):
            rounds[kind].append(spell(kind, load, registry, args.seconds, args.looks, model_s))
        status = scheduler.presage_status()
        served = len(load.engine.ended)
        held, reload = {}, scheduler.upkeep.reload
        for kind in ("looking", "reloading", "within"):
            registry.client.set_registered_model_alias("next-agent", "champion", str(GOOD))
            held[kind] = longest_hold(reload, registry, kind, 1 + args.looks)
        scheduler.shutdown()
    report: dict[str, Any] = {}
    heads = f"{'median':>8}{'p99':>8}{'worst':>9}{'added worst':>13}{'most':>9}{'over 50, of 1000':>18}"
    print(f"{'':11}{'steps':>7}{'':6}{heads}")
    for kind in SPELLS:
        report[kind] = {"steps": sum(map(len, rounds[kind]))}
        for which, clock in enumerate(("wall", "cpu")):
            of = report[kind][clock] = figures(rounds, kind, which)
            steps = report[kind]["steps"]
            print(
                f"{kind if not which else '':11}{'' if which else steps:>7}{clock:>6}{of['ms']:8.2f}{of['p99_ms']:8.2f}"
                f"{of['worst_ms']:9.2f}{of['added_worst_ms']:13.2f}{of['most_added_ms']:9.2f}{of['over_50_of_1000']:18.1f}"
            )
    taking = {"number": len(took), "ms": round(statistics.median(took), 3), "worst_ms": round(max(took), 3)}
    print(f"take-overs: {taking['number']}, median {taking['ms']} ms, worst {taking['worst_ms']} ms")
    for kind, of in held.items():
        print(f"{kind}: the lock held for {of['worst_ms']} ms at most; a look takes {of['look_ms']} ms of its thread")
    print(f"requests served: {served}; forecasts: {status['counts'].get('forecast: champion', 0)} by a champion")
    told = {"benchmark": "reload", **vars(args), **report, "take_over": taking, "lock": held, "served": served}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
