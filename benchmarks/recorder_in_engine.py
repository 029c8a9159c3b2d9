"""What does recording add to vLLM's scheduler, with hidden states, and what does it take from a real engine's speed?

First vLLM's own scheduler and KV-cache manager without a model, under the load of vllm_overhead.py: 64 requests
running, workflows of five steps, policies on. Two of them take turns, some iterations each, one with a recorder and one
without; a recorder changes no decision, so both do the same. The worker's end of the connector is played with rows of
`--size` numbers. "a step" is the time inside the recorder's calls, those of the tap among them, less what the same
calls take without a recorder, by the steps of workflows that ended meanwhile, µs; the JSON line has it by call. "× the
copy" is the same against copying the two states of a step as late as this and between the same other things. "beside"
is what the median iteration took more than without, CPU time, in which the machine's other work is too. "worker" is
what picking the rows takes on a CPU, in an iteration: where the engine has one worker that is the same thread. On a GPU
it is the launch of a few kernels.

Then, unless `--turns 0`, two real engines (`presage serve`, a model of random weights with states of `--size` numbers)
side by side: the same workflows to one and to the other in turns, output tokens a second of each turn. The first of
two turns changes, and the ratio is taken turn by turn.

    python benchmarks/recorder_in_engine.py [--iterations 2000] [--size 2560] [--turns 10] [--states off|prefill|both]

Needs vLLM 0.32. Prints two tables, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from vllm_overhead import BUDGET, OUTPUT, SEQS, TURN, Hooked, Load, Run, Timed

VARIANTS = {"ids and forecasts": "off", "and prefill states": "prefill", "and both states": "both"}
BLOCKS, WARM = 5000, 400
FEW = 24
"""Workflows of one turn."""


class Within:
    """Time inside some calls, in the outermost of them, by name; nanoseconds."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = {}
        self._deep = False

    def watch(self, of: Any, *methods: str) -> None:
        """These methods of an object count from here on."""
        for method in methods:
            setattr(of, method, self._timed(getattr(of, method), self.taken.setdefault(method, [])))

    def _timed(self, call: Any, taken: list[int]) -> Any:
        def timed(*args: Any, **more: Any) -> Any:
            if self._deep:
                return call(*args, **more)
            self._deep, begun = True, time.perf_counter_ns()
            try:
                return call(*args, **more)
            finally:
                taken.append(time.perf_counter_ns() - begun)
                self._deep = False

        return timed

    def total_us(self) -> dict[str, float]:
        """All of each, but for the timer itself; what took longer than 98 % of its kind counts as those did."""
        timer = self._own()
        found = {name: np.minimum(of, np.quantile(of, 0.98)) - timer for name, of in self.taken.items() if of}
        return {name: float(of.sum()) / 1000 for name, of in found.items()}

    def _own(self) -> float:
        nothing: list[int] = []
        timed = self._timed(lambda: None, nothing)
        for _ in range(2000):
            timed()
        return float(np.median(nothing))


class Recorded(Run):
    """A scheduler under load, with the worker's end of the tap.

    Args:
        folder: for the configuration of a model, and the recording.
        states: that are recorded; None for no recorder.
        size: numbers of a row.
    """

    def __init__(self, folder: Path, states: str | None, size: int) -> None:
        import torch
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from presage.serving_hooks.vllm.start.multi_connector import ALONE
        from presage.testing.engine import ScriptedEngine, build

        recorder = {"recorder": {"folder": str(folder / "recording"), "states": states, "max_mb": 2**20}}
        presage = {"admission": False, **(recorder if states is not None else {})}
        self.scheduler = build(
            folder, Hooked, blocks=BLOCKS, presage=presage, seqs=SEQS, tokens=BUDGET, connector=ALONE
        )
        within = Within()
        within.watch(self.scheduler._observing, "request_scheduled", "request_finished", "forecast", "states")
        within.watch(self.scheduler._observing._records, "ended")
        within.watch(self.scheduler._states, "read", "request_finished")
        within.watch(self.scheduler.connector, "build_connector_meta")
        self.timed, self.worker, self.within = Timed(self.scheduler), list[int](), within
        rows, times = torch.randn(SEQS, size), self.worker
        self.copied, states_here = list[int](), np.zeros((2, size), np.float16)
        copied = self.copied

        class Tapped(ScriptedEngine):
            """Rows of chance, made beforehand; notes what the worker's end takes."""

            def __init__(self, scheduler: Any, ahead: bool) -> None:
                super().__init__(scheduler, ahead)
                self.worker = KVConnectorFactory.create_connector(
                    config=scheduler.vllm_config,
                    role=KVConnectorRole.WORKER,
                    kv_cache_config=scheduler.kv_cache_config,
                )

            def _computed(self, output: Any) -> Any:
                from vllm.v1.outputs import KVConnectorOutput

                computed = super()._computed(output)
                here = rows[: len(computed.req_ids)]
                copied.append(_copying(states_here))
                begun = time.thread_time_ns()
                self.worker.bind_connector_metadata(output.kv_connector_metadata)
                meta = self.worker.build_connector_worker_meta()
                self.worker.captured(computed.req_ids, lambda: here)
                times.append(time.thread_time_ns() - begun)
                computed.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=meta)
                return computed

        self.engine = Tapped(self.scheduler, ahead=True)
        self._load, self._waiting = Load(self.scheduler, SEQS, OUTPUT), 0
        self._done, self._before = 0, (0, 0)

    def count(self) -> None:
        """From here on."""
        super().count()
        self.worker.clear()
        self.copied.clear()
        for taken in self.within.taken.values():
            taken.clear()


def _copying(states: Any) -> int:
    """Nanoseconds that copying both takes."""
    begun = time.perf_counter_ns()
    _ = states[0].copy(), states[1].copy()
    return time.perf_counter_ns() - begun


def added(folder: Path, states: str, size: int, iterations: int) -> dict[str, float]:
    """What a recorder of these states adds, microseconds."""
    both = [Recorded(folder / str(of), of, size) for of in (None, states)]
    gc.collect()
    gc.freeze()  # as vLLM does when its engine has started
    for run in both:
        run.go(WARM)
        run.count()
    for turn in range(iterations // TURN):
        for run in both if turn % 2 else both[::-1]:
            run.go(TURN)
    gc.unfreeze()
    without, own = both
    events = own.a_step()
    counts = own.scheduler.presage_status()["recorder"]["counts"]
    ended = events["ends"] * len(own.timed.taken["step"])
    nothing = without.within.total_us()  # the same calls where there is no recorder: they are the hooks'
    within = {name: of - nothing.get(name, 0.0) for name, of in own.within.total_us().items()}
    took = [statistics.median(run.timed.taken["step"]) / 1000 for run in both]
    worker = np.median(own.worker) - np.median(without.worker)
    for run in both:
        run.scheduler.shutdown()
    if lost := {name: count for name, count in counts.items() if not name.startswith("written")}:
        print(f"not all was recorded: {lost}")
    a_step = sum(within.values()) / ended
    return {
        "a_step": round(a_step, 1),
        "times_the_copy": round(1000 * a_step / statistics.median(own.copied), 1),
        **{name: round(of / ended, 1) for name, of in within.items()},
        "beside": round(took[1] - took[0], 1),
        "iteration_without": round(took[0], 1),
        "worker": round(float(worker) / 1000, 1),
        "steps_an_iteration": events["ends"],
    }


def speeds(folder: Path, states: str, size: int, turns: int) -> dict[str, Any]:
    """Output tokens a second of real engines without and with a recorder, turn by turn."""
    from feedback_loop import LENGTH, make_anew, make_model, started
    from retry_loops import draw
    from served_loops import serve

    from presage.testing.models import save_qwen

    at = make_anew(folder / "engines")
    make_model(at / "model")
    save_qwen(at / "model", hidden_size=size, inner=128, length=LENGTH, spread=0.02)
    told: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        servers = {}
        for name in told:
            recorder = {"recorder": {"folder": "recording", "states": states}} if name == "with" else {}
            more = ["--additional-config", json.dumps({"presage": {**recorder, "next_agent": None}})]
            servers[name] = stack.enter_context(started(at, "presage serve", 2000, *more))
        for turn in range(turns + 1):
            for name in list(told) if turn % 2 else list(told)[::-1]:
                workflows, begun = draw(FEW, 1000 + turn), time.monotonic()
                served = serve(servers[name].url, "tiny", workflows, at_once=FEW)
                took = time.monotonic() - begun
                if turn:  # the first warms up
                    told[name].append(sum(map(len, served.answers.values())) / took)
        recorder = servers["with"].status()["recorder"]
    ratios = [one / other for one, other in zip(told["with"], told["without"], strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else float("nan")
    return {
        **{f"tokens_s_{name}": round(statistics.median(of), 1) for name, of in told.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_mean": round(statistics.mean(ratios), 3),
        "ratio_standard_error": round(spread / len(ratios) ** 0.5, 3),
        "recorded": states,
        "states": recorder["states"],
        "counts": recorder["counts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--size", type=int, default=2560, help="numbers of a state")
    parser.add_argument("--turns", type=int, default=10, help="of each real engine; 0 starts none")
    parser.add_argument("--states", choices=("off", "prefill", "both"), default="both", help="that the engine records")
    chosen = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            "| recorded | µs a step | × the copy | beside | an iteration without | worker |\n|---|---|---|---|---|---|"
        )
        for number, (variant, states) in enumerate(VARIANTS.items()):
            (folder / str(number)).mkdir()
            of = report[variant] = added(folder / str(number), states, chosen.size, chosen.iterations)
            cells = (of[key] for key in ("a_step", "times_the_copy", "beside", "iteration_without", "worker"))
            print(f"| {variant} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)
        if chosen.turns:
            report["engines"] = of = speeds(folder, chosen.states, chosen.size, chosen.turns)
            print("\n| output tokens/s | without | with | ratio | standard error |\n|---|---|---|---|---|")
            print(
                f"| states: {of['recorded']} ({of['states']}) | {of['tokens_s_without']} | {of['tokens_s_with']} "
                f"| {of['ratio']} | {of['ratio_standard_error']} |"
            )
    print(json.dumps({"benchmark": "recorder_in_engine", "size": chosen.size, **report}))


if __name__ == "__main__":
    main()
