"""Does a cost model fitted to an engine's step times predict its later steps?

Workflows with retry loops (retry_loops.py) run in a closed loop with pauses on vLLM's own engine with a small model
of random weights. The policies are off and the engine writes its step times (`step_times_file`). The cost model is
fitted to some workflows, as `presage calibrate-cost` does. Other workflows of the same kind are served at each load
and replayed in virtual time; the table compares predicted and measured time per step and per workflow. Both sets are
served in turns, so that a slow machine slows both.

    python benchmarks/cost_model.py [--workflows 40] [--at-once 6 24] [--clock cpu] [--engine-file engine.toml]

Needs vLLM 0.32. With `--clock cpu`, seconds are CPU seconds of this process and pauses take none, so other load on the
machine does not count. On a dedicated device use `--clock wall`. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real_engine import BLOCK, PAUSE_S, Served, VirtualClock, give_scheduler, serve, start
from retry_loops import TYPE, Planned, Style, Written, draw, working_set

STYLE: Style = "shared"

OFF = {"priority": False, "eviction": False, "admission": False, "next_agent": None, "remaining_length": None}


def replay(workflows: Mapping[str, Sequence[Planned]], at_once: int, engine: Any, folder: Path) -> Served:
    """The same in virtual time: vLLM's scheduler with the cost model instead of the model."""
    from presage.replay.engine import EngineLoop, ReplayEngine
    from presage.replay.metrics import VirtualClock
    from presage.replay.policies import POLICIES
    from presage.replay.prompts import PromptIds
    from presage.replay.vllm_scheduler import make_scheduler, scheduler_class
    from presage.replay.workload import PromptConvention, RecordedRequest, ReplayJob, Schedule, assemble

    convention = PromptConvention("history-first", opening_tokens=100, closing_tokens=20)
    jobs = []
    for name, steps in workflows.items():
        written, asked = Written(STYLE), []
        for number, step in enumerate(steps):
            parents = (number - 1,) if number else ()
            asked.append(
                RecordedRequest(step.agent, len(written.prompt(step)), step.answer, parents, step.pause * PAUSE_S)
            )
            written.answered(step, [0] * step.answer)
        jobs.append(ReplayJob(TYPE, name, assemble(asked, convention)))
    longest = max(step.prompt_tokens + step.output_tokens for job in jobs for step in job.steps)
    clock = VirtualClock()
    kind = scheduler_class(POLICIES["stock"], None, clock)
    first = tuple((0.0, number) for number in range(min(at_once, len(jobs))))
    player = ReplayEngine(
        jobs,
        PromptIds(jobs, convention),
        Schedule(first, tuple(range(len(first), len(jobs)))),
        [EngineLoop(make_scheduler(kind, engine, longest, None, folder), engine.cost, engine.block_tokens, clock)],
    )
    run = player.play()
    ended = {job: max(one.ended_s for one in run.asked if one.job == job) for job in range(len(jobs))}
    began = {one.job: one.came_s for one in run.asked if not one.step}
    return Served(
        prompt_tokens=sum(one.prompt_tokens for one in run.asked),
        cached_tokens=sum(one.hit_tokens for one in run.asked),
        makespan_s=run.end_s,
        completions_s={job.workflow_id: ended[number] - began[number] for number, job in enumerate(jobs)},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=40, help="served at each load, and as many to fit to")
    parser.add_argument("--at-once", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--share", type=float, default=0.5, help="of the working set at the highest load that fits")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--engine-file", type=Path, help="where to leave the engine file; nowhere if not said")
    args = parser.parse_args()
    clock = VirtualClock(args.clock)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        llm = start(folder / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size)
        # vLLM looks through all modules that are loaded when it starts, and stumbles over some.
        from presage.replay.calibrate import calibrate, read_step_times
        from presage.serving_hooks.engine_file import checked, engine_text
        from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

        known, others = draw(args.workflows, 0), draw(args.workflows, 1)
        blocks = int(max(args.at_once) * working_set(known, STYLE) * args.share / BLOCK)
        timing = type("Timing", (SyncWorkflowScheduler,), {"clock": staticmethod(clock)})

        def timed(workflows: Mapping[str, Sequence[Planned]], at_once: int, name: str) -> tuple[Served, Path]:
            path = folder / name
            give_scheduler(llm, timing, blocks, {**OFF, "step_times_file": str(path)})
            return serve(llm, workflows, STYLE, clock, at_once=at_once, plain=True), path

        timed(draw(8, 7), 4, "warm.jsonl")
        fitted_to, measured = [], {}
        for at_once in args.at_once:
            fitted_to.append(timed(known, at_once, f"fit-{at_once}.jsonl")[1])
            measured[at_once] = timed(others, at_once, f"test-{at_once}.jsonl")
        times = read_step_times(fitted_to)
        found = calibrate(times, "benchmarks/cost_model.py")
        engine = checked({**times.engine.limits(), "cost": found.cost}, "fitted")
        if args.engine_file:
            args.engine_file.write_text(engine_text(engine), encoding="utf-8")
        tell(engine.cost, found)
        loads = {}
        for at_once, (served, path) in measured.items():
            virtual = replay(others, at_once, engine, folder)
            loads[at_once] = compare(engine.cost, read_step_times([path]), served, virtual)
            print(f"{at_once:8}" + "".join(f"{value:15.3f}" for value in loads[at_once].values()), flush=True)
    result = {"device": times.engine.device, "clock": args.clock, **asdict(found), "loads": loads}
    print(json.dumps({"benchmark": "cost_model", **result}))


def tell(cost: Any, found: Any) -> None:
    """Prints the fit and the head of the table."""
    print(
        f"{1e3 * cost.iteration_s:.2f} ms an iteration; µs a token: {1e6 * cost.prefill_token_s:.1f} prefilled, "
        f"{1e6 * cost.decode_token_s:.1f} decoded, {1e6 * cost.context_token_s:.3f} attended to; median error "
        f"{found.median_error:.1%} of {found.held_out} iterations held out, all together {found.total_error:+.1%}"
    )
    head = ("step error", "all steps", "workflow error", "completion s", "predicted", "makespan s", "predicted")
    print(f"{'at once':>8}" + "".join(f"{name:>15}" for name in (*head, "hit rate", "predicted")))


def compare(cost: Any, times: Any, served: Served, virtual: Served) -> dict[str, float]:
    """Prints predicted beside measured times; errors are shares of the measured time."""
    steps = [cost.seconds(*map(int, tokens[:3]), pairs=int(tokens[3])) for tokens in times.tokens]
    took = list(map(float, times.seconds))
    pairs = [(virtual.completions_s[name], took_s) for name, took_s in served.completions_s.items()]
    return {
        "step_median_error": statistics.median(abs(p / m - 1) for p, m in zip(steps, took, strict=True)),
        "steps_total_error": sum(steps) / sum(took) - 1,
        "workflow_median_error": statistics.median(abs(p / m - 1) for p, m in pairs),
        "completion_mean_s": statistics.mean(m for _, m in pairs),
        "predicted_completion_mean_s": statistics.mean(p for p, _ in pairs),
        "makespan_s": served.makespan_s,
        "predicted_makespan_s": virtual.makespan_s,
        "hit_rate": served.hit_rate,
        "predicted_hit_rate": virtual.hit_rate,
    }


if __name__ == "__main__":
    main()
