"""Does a cost model fitted to an engine's step times foretell what the engine does next?

vLLM's own engine with a small model of random weights, on whatever device it runs on. Workflows with retry loops
(retry_loops.py) run in a closed loop, in real time, with real pauses; the scheduler is vLLM's order with every policy
of ours off, and writes its step times to a file, as `step_times_file` makes any engine do. The cost model is fitted to
those of some workflows (`presage calibrate-cost` does the same). Then others of the same kind are served, at each load,
and replayed in virtual time: predicted against measured time of each step, and of each workflow from its arrival to
its end.

    python benchmarks/cost_model.py [--workflows 60] [--at-once 6 24] [--share 0.5] [--engine-file engine.toml]

Needs vLLM 0.32. Other work on the machine stands in the figures as noise: `noise` is the median difference between step
times and the fit on what it was fitted to. Prints a table and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks" / "in_vllm"))

from real_engine import BLOCK, give_scheduler, start
from retry_loops import TYPE, Planned, Written, draw, working_set

STYLE = "shared"
PAUSE_S = 0.02
"""Of a pause that is drawn in iterations."""

OFF = {"priority": False, "eviction": False, "admission": False, "next_agent": None, "remaining_length": None}


@dataclass
class Served:
    """What an engine, real or replayed, made of some workflows; times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completions_s: dict[str, float] = field(default_factory=dict)
    makespan_s: float = 0.0


def serve(llm: Any, workflows: Mapping[str, Sequence[Planned]], at_once: int) -> Served:
    """All workflows in real time, so many at once; when one ends the next comes."""
    from vllm import SamplingParams

    engine, served = llm.llm_engine, Served()
    written = {name: Written(STYLE) for name in workflows}
    coming, turn = iter(workflows), itertools.count()
    came: dict[str, float] = {}
    wakes: list[tuple[float, int, str, int]] = []
    running: dict[str, tuple[str, int]] = {}

    def send(at_s: float, name: str, number: int) -> None:
        step = workflows[name][number]
        came.setdefault(name, at_s)
        prompt = written[name].prompt(step)
        served.prompt_tokens += len(prompt)
        wanted = SamplingParams(temperature=0.0, max_tokens=step.answer, ignore_eos=True, detokenize=False)
        running[f"{name}.{number}"] = name, number
        engine.add_request(f"{name}.{number}", {"prompt_token_ids": prompt}, wanted)

    def ended(answer: Any, now: float) -> None:
        name, number = running.pop(answer.request_id)
        step = workflows[name][number]
        served.cached_tokens += answer.num_cached_tokens
        written[name].answered(step, answer.outputs[0].token_ids)
        if number + 1 < len(workflows[name]):
            pause_s = workflows[name][number + 1].pause * PAUSE_S
            heapq.heappush(wakes, (now + pause_s, next(turn), name, number + 1))
            return
        served.completions_s[name] = now - came[name]
        if (after := next(coming, None)) is not None:
            heapq.heappush(wakes, (now, next(turn), after, 0))

    begun = time.monotonic()
    for name in itertools.islice(coming, at_once):
        heapq.heappush(wakes, (begun, next(turn), name, 0))
    while wakes or running:
        if not running:
            time.sleep(max(0.0, wakes[0][0] - time.monotonic()))
        while wakes and wakes[0][0] <= time.monotonic():
            at_s, _, name, number = heapq.heappop(wakes)
            send(at_s, name, number)
        answers = engine.step() if running else []
        now = time.monotonic()
        for answer in answers:
            if answer.finished:
                ended(answer, now)
    served.makespan_s = time.monotonic() - begun
    return served


def replay(workflows: Mapping[str, Sequence[Planned]], at_once: int, engine: Any, folder: Path) -> Served:
    """The same in virtual time: vLLM's scheduler, and the cost model in the place of the model."""
    from presage.serving_hooks.replay import vllm_scheduler
    from presage.serving_hooks.replay.arrivals import Schedule
    from presage.serving_hooks.replay.engine import Clock, Engine
    from presage.serving_hooks.replay.policies import POLICIES
    from presage.serving_hooks.replay.prompts import Prompts
    from presage.serving_hooks.replay.vllm_policies import scheduler_class
    from presage.serving_hooks.replay.workload import Asked, Convention, Job, assemble

    convention = Convention("history-first", opening_tokens=100, closing_tokens=20)
    jobs = []
    for name, steps in workflows.items():
        written, asked = Written(STYLE), []
        for number, step in enumerate(steps):
            parents = (number - 1,) if number else ()
            asked.append(Asked(step.agent, len(written.prompt(step)), step.answer, parents, step.pause * PAUSE_S))
            written.answered(step, [0] * step.answer)
        jobs.append(Job(TYPE, name, assemble(asked, convention)))
    longest = max(step.prompt_tokens + step.output_tokens for job in jobs for step in job.steps)
    clock = Clock()
    kind = scheduler_class(POLICIES["stock"], None, clock)
    first = tuple((0.0, number) for number in range(min(at_once, len(jobs))))
    player = Engine(
        jobs,
        Prompts(jobs, convention),
        Schedule(first, tuple(range(len(first), len(jobs)))),
        vllm_scheduler.scheduler(kind, engine, longest, None, folder),
        vllm_scheduler,
        engine.costs(),
        engine.block_tokens,
        clock,
    )
    run = player.play()
    ended = {job: max(one.ended_s for one in run.asked if one.job == job) for job in range(len(jobs))}
    began = {one.job: one.came_s for one in run.asked if not one.step}
    return Served(
        sum(one.prompt_tokens for one in run.asked),
        sum(one.hit_tokens for one in run.asked),
        {job.workflow_id: ended[number] - began[number] for number, job in enumerate(jobs)},
        run.end_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=60, help="served at each load, and as many to fit to")
    parser.add_argument("--at-once", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--share", type=float, default=0.5, help="of the working set at the highest load that fits")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--engine-file", type=Path, help="where to leave the engine file; nowhere if not said")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        llm = start(folder / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size)
        # vLLM looks through all modules that are loaded when it starts, and stumbles over some.
        import numpy as np

        from presage.serving_hooks.replay.calibrate import calibrate, predict
        from presage.serving_hooks.replay.engine_file import checked, engine_text
        from presage.serving_hooks.replay.step_times import read_step_times
        from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

        known = draw(args.workflows, 0)
        blocks = int(max(args.at_once) * working_set(known, STYLE) * args.share / BLOCK)

        def timed(workflows: Mapping[str, Sequence[Planned]], at_once: int, name: str) -> tuple[Served, Path]:
            path = folder / name
            give_scheduler(llm, SyncWorkflowScheduler, blocks, {**OFF, "step_times_file": str(path)})
            return serve(llm, workflows, at_once), path

        timed(draw(8, 7), 4, "warm.jsonl")
        fitted_to = [timed(known, at_once, f"fit-{at_once}.jsonl")[1] for at_once in args.at_once]
        give_scheduler(llm, SyncWorkflowScheduler, blocks, OFF)  # the one before has written all it had
        times = read_step_times(fitted_to)
        found = calibrate(times, "benchmarks/cost_model.py")
        engine = checked({**times.engine.limits(), "cost": asdict(found.cost)}, "fitted")
        if args.engine_file:
            args.engine_file.write_text(engine_text(engine), encoding="utf-8")
        cost = found.cost
        coefficients = np.asarray(
            [cost.iteration_s, cost.prefill_token_s, cost.decode_token_s, cost.context_token_s], np.float64
        )
        noise = float(np.median(np.abs(predict(coefficients, times.tokens) / times.seconds - 1)))
        print(
            f"{1e3 * cost.iteration_s:.2f} ms an iteration; µs a token: {1e6 * cost.prefill_token_s:.1f} prefilled, "
            f"{1e6 * cost.decode_token_s:.1f} decoded, {1e6 * cost.context_token_s:.3f} attended to; median error "
            f"{found.median_error:.1%} held out, {noise:.1%} on all"
        )
        head = (
            "steps",
            "step error",
            "all steps",
            "workflow error",
            "completion",
            "predicted",
            "hit rate",
            "predicted",
        )
        print(f"{'at once':>8}" + "".join(f"{name:>15}" for name in head))
        loads = {}
        for at_once in args.at_once:
            workflows = draw(args.workflows, 1)
            measured, path = timed(workflows, at_once, f"test-{at_once}.jsonl")
            give_scheduler(llm, SyncWorkflowScheduler, blocks, OFF)
            of = read_step_times([path])
            steps = predict(coefficients, of.tokens)
            virtual = replay(workflows, at_once, engine, folder)
            ratios = [virtual.completions_s[name] / took_s for name, took_s in measured.completions_s.items()]
            loads[at_once] = row = {
                "steps": len(of.seconds),
                "step_median_error": float(np.median(np.abs(steps / of.seconds - 1))),
                "steps_total_error": float(steps.sum() / of.seconds.sum() - 1),
                "workflow_median_error": float(np.median(np.abs(np.asarray(ratios) - 1))),
                "completion_mean_s": float(np.mean(list(measured.completions_s.values()))),
                "predicted_completion_mean_s": float(np.mean(list(virtual.completions_s.values()))),
                "hit_rate": measured.cached_tokens / measured.prompt_tokens,
                "predicted_hit_rate": virtual.cached_tokens / virtual.prompt_tokens,
                "makespan_s": measured.makespan_s,
                "predicted_makespan_s": virtual.makespan_s,
            }
            print(
                f"{at_once:8}{row['steps']:15}{row['step_median_error']:15.1%}{row['steps_total_error']:+15.1%}"
                f"{row['workflow_median_error']:15.1%}{row['completion_mean_s']:15.2f}"
                f"{row['predicted_completion_mean_s']:15.2f}{row['hit_rate']:15.3f}{row['predicted_hit_rate']:15.3f}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "benchmark": "cost_model",
                "device": times.engine.device,
                "cost": asdict(cost),
                "held_out_median_error": found.median_error,
                "noise": noise,
                "loads": loads,
            }
        )
    )


if __name__ == "__main__":
    main()
