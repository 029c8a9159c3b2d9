"""How much longer does a step become while newer models are looked for, loaded, tried and taken over?

vLLM's own scheduler and KV-cache manager without a model, 64 workflows at once, a registry on SQLite. A sleep between
scheduling and output stands for the model; it lets other threads run, as waiting for a device does. "step" is the wall
time of the hooks' and vLLM's own work from one iteration to the next (`add_request`, `schedule`, `update_from_output`),
without that sleep. Four kinds of spells take turns, so that a busy machine slows all alike:

    alone       nobody looks
    looking     the registry is asked every 0.2 s, and has nothing new
    reloading   what is held is given out as another version before every look, so both models are loaded, tried and
                taken over, every 0.2 s or as fast as it goes
    refusing    the aliases stand at a version of which the trial fails, which is forgotten before every look

"added" is against "alone" of the same round. "take-over" is what the engine's thread itself does for one. An engine
looks every 30 s, not every 0.2: these spells are mostly reload, and its hours are not.

    python benchmarks/reload.py [--rounds 3] [--seconds 4] [--model-ms 5]

Needs vLLM 0.32. Prints a table of milliseconds, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks" / "in_vllm"))

from serving_samples import lengths_of
from vllm_samples import Engine, ask, build

from presage.datasets.law import generate
from presage.datasets.store import append
from presage.predictors.artefact import read_artefact, write_artefact
from presage.predictors.boosting import BoostingConfig
from presage.predictors.network_weights import NetworkConfig
from presage.predictors.parts import NextAgentConfig
from presage.registry.connect import Registry, open_registry
from presage.registry.package import register
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.training.next_agent import train

SPELLS = ("alone", "looking", "reloading", "refusing")
AGENTS = ("planner", "coder", "tester", "coder", "tester")
AT_ONCE, LOOK_S, BOUND_MS = 64, 0.2, 50.0
GOOD, BROKEN = 1, 2


def registered(root: Path) -> Registry:
    """Both models; version 2 of the next agents wants a text encoder that is not there."""
    table = generate("retry", 80, 0, state_size=16).table
    append(table, root / "store")
    small = NextAgentConfig(network=NetworkConfig(epochs=3), boosting=BoostingConfig(rounds=5))
    train(table, None, small, baselines=(), name="reload").save(root / "agents")
    lengths_of(root / "store").save(root / "lengths")
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
    """Workflows of five steps, so many at once, without end."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done, self.begun = engine, 0, 0
        self.at: dict[str, tuple[int, int]] = {}

    def arrive(self) -> None:
        """The next step of each workflow of which one has ended, and new ones in the place of those that are over."""
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


def spell(kind: str, load: Load, registry: Registry, seconds: float, model_s: float) -> list[float]:
    """Milliseconds of each step."""
    scheduler, taken = load.engine.scheduler, []
    registry.client.set_registered_model_alias("next-agent", "champion", str(BROKEN if kind == "refusing" else GOOD))
    reload = scheduler._upkeep._reload
    asked = reload.look

    def look() -> None:
        if kind in ("reloading", "refusing"):
            reload.refused.clear()
            reload._held = {name: replace(held, version=99) for name, held in reload._held.items()}
        asked()

    reload.look = look
    reload._stop.clear()
    if kind != "alone":
        reload.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.perf_counter()
        load.arrive()
        load.engine.schedule()
        worked = time.perf_counter() - begun
        time.sleep(model_s)
        begun = time.perf_counter()
        load.engine.drain()
        taken.append(1000 * (worked + time.perf_counter() - begun))
        load.engine.log.clear()
    reload.close()
    reload.look = asked
    while any(thread.name == "presage-reload" for thread in threading.enumerate()):
        time.sleep(0.05)
    return taken


def timed(scheduler: Any, took: list[float]) -> None:
    """Keeps the time of each take-over, milliseconds."""
    renew = scheduler._renew

    def timing() -> None:
        before, begun = scheduler._upkeep._renewed, time.perf_counter()
        renew()
        if scheduler._upkeep._renewed > before:
            took.append(1000 * (time.perf_counter() - begun))

    scheduler._renew = timing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--model-ms", type=float, default=5.0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        registry = registered(root)
        registry.client.set_registered_model_alias("next-agent", "champion", str(GOOD))
        settings = {"registry": registry.uri, "reload_s": LOOK_S}
        scheduler = build(root / "m", SyncWorkflowScheduler, blocks=4000, presage=settings, seqs=AT_ONCE, tokens=2048)
        scheduler._upkeep.close()
        timed(scheduler, took)
        load = Load(Engine(scheduler))
        spell("alone", load, registry, 1.0, args.model_ms / 1000)
        for _, kind in itertools.product(range(args.rounds), SPELLS):
            rounds[kind].append(spell(kind, load, registry, args.seconds, args.model_ms / 1000))
        status = scheduler.presage_status()
        served = len(load.engine.ended)
    report: dict[str, Any] = {}
    print(f"{'':12}{'steps':>8}{'median':>9}{'p99':>9}{'worst':>9}{'added p99':>11}{'added worst':>13}{'over 50':>9}")
    for kind in SPELLS:
        figures = [(statistics.median(of), sorted(of)[int(0.99 * len(of))], max(of)) for of in rounds[kind]]
        alone = [(sorted(of)[int(0.99 * len(of))], max(of)) for of in rounds["alone"]]
        added = [(own[1] - p99, own[2] - worst) for own, (p99, worst) in zip(figures, alone, strict=True)]
        of = {
            "steps": sum(map(len, rounds[kind])),
            **{
                name: round(statistics.median(values), 2)
                for name, values in zip(("ms", "p99_ms"), zip(*[f[:2] for f in figures], strict=True), strict=True)
            },
            "worst_ms": round(max(f[2] for f in figures), 2),
            "added_p99_ms": round(statistics.median(a[0] for a in added), 2),
            "added_worst_ms": round(statistics.median(a[1] for a in added), 2),
            "over_50_ms": sum(step > BOUND_MS for taken in rounds[kind] for step in taken),
        }
        print(
            f"{kind:12}{of['steps']:8}{of['ms']:9.2f}{of['p99_ms']:9.2f}{of['worst_ms']:9.2f}"
            f"{of['added_p99_ms']:11.2f}{of['added_worst_ms']:13.2f}{of['over_50_ms']:9}"
        )
        report[kind] = of
    taking = {"number": len(took), "ms": round(statistics.median(took), 3), "worst_ms": round(max(took), 3)}
    print(f"take-overs: {taking['number']}, median {taking['ms']} ms, worst {taking['worst_ms']} ms")
    print(f"requests served: {served}; forecasts: {status['counts'].get('forecast: champion', 0)} by a champion")
    print(json.dumps({"benchmark": "reload", **vars(args), **report, "take_over": taking, "served": served}))


if __name__ == "__main__":
    main()
