"""On a real engine with too little cache: how many prompt tokens do the hooks find in it, beside vLLM alone?

vLLM's own engine with a tiny model of random weights, on any device. 72 concurrent workflows with retry loops
(retry_loops.py); the cache holds a third of what they reuse. All schedulers get the same requests; answers are greedy
and compared. A pause between two steps is counted in iterations, so the speed of the machine does not matter. The
engine starts once and gets a new scheduler and an empty cache for each run: vLLM's own, or with the hooks and
forecasts of three kinds: "none"; "learned" by a next-agent predictor from other workflows drawn in the same way, with
lengths from online counts; "oracle", which knows the draws.

    python benchmarks/real_engine.py [--workflows 110] [--seeds 0 1] [--styles shared own]
                                    [--settings '{"eviction_rule": "pbkv"}']

`--settings` is the object of `--additional-config '{"presage": …}'`. A prompt costs the tiny model almost nothing, so
seconds mean nothing and admission, which weighs seconds, gains nothing. With `--hidden-size 512`, 2,048 prompt tokens
cost about ten decode steps, as with a real model on a GPU. Needs vLLM 0.32. Prints a table of cached prompt tokens,
ratios to stock and seconds, and one JSON line.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the engine can be given another scheduler
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import heapq
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving_hooks" / "in_vllm"))

from retry_loops import TYPE, Planned, Style, Written, draw, working_set
from tiny_qwen import save_qwen

BLOCK, MOST_BLOCKS, MODEL_LENGTH = 32, 4096, 4096


@dataclass
class Ran:
    """The result of one scheduler."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    iterations: int = 0
    seconds: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    answers: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)


def start(folder: Path, **model: Any) -> Any:
    """Starts an engine with a model of random weights; `sizes` override those of the tiny model."""
    from vllm import LLM

    save_qwen(folder, length=MODEL_LENGTH, **model)
    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        block_size=BLOCK,
        num_gpu_blocks_override=MOST_BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        async_scheduling=False,
        seed=0,
    )


def give_scheduler(llm: Any, kind: type[Any], blocks: int, settings: Mapping[str, Any]) -> Any:
    """Gives the engine a new scheduler with an empty cache of this many blocks."""
    core = llm.llm_engine.engine_core.engine_core
    old = core.scheduler
    while old.has_requests():  # the worker has to hear who has finished
        llm.llm_engine.step()
    old.vllm_config.additional_config = {"presage": dict(settings)}
    core.scheduler = kind(
        vllm_config=old.vllm_config,
        kv_cache_config=replace(old.kv_cache_config, num_blocks=blocks),
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    return core.scheduler


def serve(llm: Any, workflows: Mapping[str, Sequence[Planned]], style: Style, at_once: int) -> Ran:
    """Serves all workflows in a closed loop with `at_once` at a time."""
    from vllm import SamplingParams

    engine, ran, now = llm.llm_engine, Ran(), 0
    written = {name: Written(style) for name in workflows}
    coming = iter(workflows)
    wakes: list[tuple[int, int, str, int]] = []
    turn = itertools.count()
    running: dict[str, tuple[str, int]] = {}

    def send(name: str, number: int) -> None:
        step, last = workflows[name][number], number == len(workflows[name]) - 1
        sent = {"workflow_type": TYPE, "workflow_id": name, "agent": step.agent, "step": number, "workflow_end": last}
        wanted = SamplingParams(
            temperature=0.0, max_tokens=step.answer, ignore_eos=True, detokenize=False, extra_args=sent
        )
        prompt = written[name].prompt(step)
        ran.prompt_tokens += len(prompt)
        running[f"{name}.{number}"] = name, number
        engine.add_request(f"{name}.{number}", {"prompt_token_ids": prompt}, wanted)

    def ended(answer: Any) -> None:
        name, number = running.pop(answer.request_id)
        tokens, step = tuple(answer.outputs[0].token_ids), workflows[name][number]
        ran.cached_tokens += answer.num_cached_tokens
        ran.answers[name, number] = tokens
        written[name].answered(step, tokens)
        if number + 1 < len(workflows[name]):
            heapq.heappush(wakes, (now + step.pause, next(turn), name, number + 1))
        elif (after := next(coming, None)) is not None:
            heapq.heappush(wakes, (now, next(turn), after, 0))

    for place, name in enumerate(itertools.islice(coming, at_once)):
        heapq.heappush(wakes, (2 * place, next(turn), name, 0))
    begun = time.monotonic()
    while wakes or running:
        if not running:
            now = max(now, wakes[0][0])
        while wakes and wakes[0][0] <= now:
            send(*heapq.heappop(wakes)[2:])
        for answer in engine.step():
            if answer.finished:
                ended(answer)
        now += 1
        ran.iterations += 1
    ran.seconds = time.monotonic() - begun
    return ran


def held(status: Mapping[str, Any]) -> int:
    """How many times admission held a workflow."""
    counts = (status.get("admission") or {}).get("decisions", {})
    return int(counts.get("held", 0)) + int(counts.get("paused", 0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=110)
    parser.add_argument("--at-once", type=int, default=72)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the working set that fits the cache")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--styles", nargs="+", default=["shared", "own"], choices=["shared", "own"])
    parser.add_argument(
        "--forecasts", nargs="+", default=["none", "learned", "oracle"], choices=["none", "learned", "oracle"]
    )
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--hidden-size", type=int, default=64, help="of the model that is made")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        llm = start(Path(folder) / "model", hidden_size=args.hidden_size, inner=2 * args.hidden_size)
        # vLLM looks through all modules that are loaded when it starts, and stumbles over some.
        from loop_forecasts import hooked, learn, told
        from vllm.v1.core.sched.scheduler import Scheduler

        print(
            f"{'':24}{'blocks':>8}{'prompt':>10}{'cached':>10}{'share':>8}{'x stock':>9}{'iterations':>12}"
            f"{'s':>8}{'paused':>8}"
        )
        for style in args.styles:
            predictor = learn(style, Path(folder) / style) if "learned" in args.forecasts else None
            ratios: dict[str, list[float]] = {kind: [] for kind in args.forecasts}
            report[style] = {"seeds": {}, "times": {}}
            for seed in args.seeds:
                workflows = draw(args.workflows, seed)
                blocks = int(args.at_once * working_set(workflows, style) * args.share / BLOCK)
                rows: dict[str, Ran] = {}
                for kind in ("stock", *args.forecasts):
                    scheduler: Any = Scheduler if kind == "stock" else hooked(told(kind, workflows, predictor))
                    given = give_scheduler(llm, scheduler, blocks, args.settings)
                    ran = rows[kind] = serve(llm, workflows, style, args.at_once)
                    if kind != "stock":
                        ran.status = given.presage_status()
                        ratios[kind].append(ran.cached_tokens / rows["stock"].cached_tokens)
                    print(
                        f"{style:8}{f'seed {seed}':8}{kind:8}{blocks:8}{ran.prompt_tokens:10}{ran.cached_tokens:10}"
                        f"{ran.cached_tokens / ran.prompt_tokens:8.3f}"
                        f"{ran.cached_tokens / rows['stock'].cached_tokens:9.2f}{ran.iterations:12}"
                        f"{ran.seconds:8.1f}{held(ran.status):8}",
                        flush=True,
                    )
                report[style]["seeds"][seed] = {
                    kind: {
                        "prompt_tokens": ran.prompt_tokens,
                        "cached_tokens": ran.cached_tokens,
                        "iterations": ran.iterations,
                        "seconds": round(ran.seconds, 1),
                        "other_answers": sum(ran.answers[at] != said for at, said in rows["stock"].answers.items()),
                        "status": ran.status,
                    }
                    for kind, ran in rows.items()
                }
            report[style]["times"] = {kind: round(statistics.mean(of), 3) for kind, of in ratios.items()}
    print(json.dumps({"benchmark": "real_engine", "settings": args.settings, **report}))


if __name__ == "__main__":
    main()
