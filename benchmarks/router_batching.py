"""What does answering requests in batches gain, and what does lower precision cost?

A ModernBERT of a third of a million parameters is trained on prompts with a planted rule, then asked by 16 callers at
once, each waiting for its answer before it asks again, next to the same prompts asked one by one. One torch thread;
medians over rounds that take turns, so that a busy machine disturbs all alike. "loop late" is how much later than asked
the event loop wakes a sleeper, at the 99th percentile: what the worker takes away from a scheduler in the same process.
On one CPU thread a batch saves what a call costs beside the arithmetic, so short prompts gain most; the stand-in, which
sleeps 5 ms whatever the batch, has nothing but such costs and shows what the service itself adds.

Then the precisions: how they rank 400 fresh prompts (macro mean average precision), how far probabilities move, and how
long 1 and 64 prompts take. `--base` adds the speed of ModernBERT-base's shape with random weights (600 MB).

    python benchmarks/router_batching.py [--rounds 7] [--base]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from scipy.special import expit
from tiny_encoder import MODELS, planted, save_encoder

from presage.predictors.artefact import read_artefact, write_artefact
from presage.predictors.routing.transformer import TransformerScorer
from presage.predictors.routing.transformer_model import Precision
from presage.serving_hooks.routing.batching import BatchingService
from presage.training.router.finetune import FinetuneConfig, Labelled, finetune
from presage.training.router.metrics import measure

CALLERS = 16
ASKS = 12
NOISE = 0.15  # of the training labels: probabilities of 0 and 1 would hide what precision costs
WORDS = {"4 to 8 words": (4, 9), "30 to 90 words": (30, 90)}
STAND_IN = "the stand-in"
KEPT = {"head_tokens": 64, "tail_tokens": 64}

_loaded: list[TransformerScorer] = []


def load(folder: str) -> None:
    """In the worker process: the scorer it answers with."""
    import torch

    torch.set_num_threads(1)
    artefact = read_artefact(Path(folder))
    _loaded[:] = [TransformerScorer.from_artefact(artefact.config, artefact.tensors, Path(folder))]


def run_loaded(prompts: Sequence[str]) -> Any:
    return _loaded[0].logits(prompts)


def stand_in(prompts: Sequence[str]) -> list[str]:
    time.sleep(0.005)
    return list(prompts)


def trained(folder: Path) -> TransformerScorer:
    encoder = save_encoder(folder / "encoder")
    scorer = TransformerScorer.from_encoder(str(encoder), models=MODELS, **KEPT)
    prompts, correct = planted(2000, 0)
    flipped = np.random.default_rng(0).random(correct.shape) < NOISE
    train = Labelled(prompts, np.where(flipped, 1 - correct, correct).astype(np.float32))
    config = FinetuneConfig(epochs=1, learning_rate=1e-3)
    return finetune(scorer, train, None, config, checkpoints=folder / "checkpoints").scorer


async def lateness_ms(stop: asyncio.Event) -> list[float]:
    late = []
    while not stop.is_set():
        begun = time.perf_counter()
        await asyncio.sleep(0.002)
        late.append((time.perf_counter() - begun) * 1000 - 2)
    return late


async def asked_at_once(run: Callable[[Sequence[str]], Any], prompts: list[str], **options: Any) -> dict[str, float]:
    taken: list[float] = []

    async def caller(service: BatchingService[str, Any], first: int) -> None:
        for place in range(first, len(prompts), CALLERS):
            begun = time.perf_counter()
            answer = await service.ask(prompts[place])
            taken.append((time.perf_counter() - begun) * 1000)
            assert answer.source == "model", answer.reason

    async with BatchingService(run, **options) as service:
        stop = asyncio.Event()
        watching = asyncio.create_task(lateness_ms(stop))
        begun = time.perf_counter()
        await asyncio.gather(*(caller(service, first) for first in range(CALLERS)))
        seconds = time.perf_counter() - begun
        stop.set()
        late = await watching
    return {
        "per_s": len(prompts) / seconds,
        "p50_ms": float(np.median(taken)),
        "p99_ms": float(np.quantile(taken, 0.99)),
        "late_p99_ms": float(np.quantile(late, 0.99)),
    }


def one_by_one(run: Callable[[Sequence[str]], Any], prompts: list[str]) -> dict[str, float]:
    taken = []
    for prompt in prompts:
        begun = time.perf_counter()
        run([prompt])
        taken.append((time.perf_counter() - begun) * 1000)
    return {
        "per_s": 1000 * len(taken) / sum(taken),
        "p50_ms": float(np.median(taken)),
        "p99_ms": float(np.quantile(taken, 0.99)),
    }


def batching(scorer: TransformerScorer, folder: Path, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    write_artefact(
        folder / "model",
        kind="router",
        config=scorer.to_config(),
        tensors=scorer.to_tensors(),
        training_data={},
        files=scorer.to_files(),
    )
    process: Executor = ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=load, initargs=(str(folder / "model"),)
    )
    at_once: dict[str, dict[str, Any]] = {
        "16 callers, batches of 1": {"run": scorer.logits, "max_batch": 1, "max_wait_ms": 0},
        "16 callers, thread, wait 0 ms": {"run": scorer.logits, "max_wait_ms": 0},
        "16 callers, thread, wait 2 ms": {"run": scorer.logits, "max_wait_ms": 2},
        "16 callers, process, wait 0 ms": {"run": run_loaded, "max_wait_ms": 0, "executor": process},
    }
    served = {}
    with process:
        process.submit(run_loaded, ["word1"]).result()
        for length, words in WORDS.items():
            prompts = planted(CALLERS * ASKS, 3, words=words)[0]
            served[length] = in_turns(scorer.logits, at_once, prompts, rounds)
    served[STAND_IN] = in_turns(stand_in, {"16 callers, thread, wait 0 ms": {"run": stand_in}}, prompts, rounds)
    return served


def in_turns(
    run: Callable[[Sequence[str]], Any], at_once: dict[str, dict[str, Any]], prompts: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every way has its turn, and ratios to one by one."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ("one by one", *at_once)}
    for turn in range(rounds + 1):  # the first one warms up
        found = {"one by one": one_by_one(run, prompts)}
        found |= {name: asyncio.run(asked_at_once(prompts=prompts, **how)) for name, how in at_once.items()}
        for name, figures in found.items():
            seen[name] += [figures] if turn else []
    medians = {name: {key: float(np.median([r[key] for r in of])) for key in of[0]} for name, of in seen.items()}
    single = medians["one by one"]
    for of in medians.values():
        of |= {"gain": of["per_s"] / single["per_s"], "latency": of["p50_ms"] / single["p50_ms"]}
    return medians


def median_ms(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1000)
    return float(np.median(taken))


def precisions(scorer: TransformerScorer, rounds: int) -> dict[str, dict[str, float]]:
    prompts, correct = planted(400, 4, unknown=0.0)
    exact = expit(scorer.logits(prompts))
    rows: dict[str, dict[str, float]] = {}
    for precision in get_args(Precision):
        lower = scorer.at_precision(precision)
        said = expit(lower.logits(prompts))
        figures = measure(said, correct, MODELS, seed=0, resamples=0)
        rows[precision] = {
            "macro_map": figures.macro_map,
            "brier": figures.brier,
            "largest_move": float(np.abs(said - exact).max()),
            "one_ms": median_ms(lambda of=lower: of.logits(prompts[:1]), 10 * rounds),
            "of_64_ms": median_ms(lambda of=lower: of.logits(prompts[:64]), rounds),
        }
    return rows


def base_shape(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """ModernBERT-base as transformers' defaults have it, on one prompt of 128 and one of 512 tokens."""
    from transformers import ModernBertConfig, ModernBertModel

    encoder = save_encoder(folder / "base", longest=1024)
    special = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    ModernBertModel(ModernBertConfig(**special)).save_pretrained(encoder)
    scorer = TransformerScorer.from_encoder(str(encoder), models=MODELS, head_tokens=255, tail_tokens=255)
    rows = {}
    for precision in get_args(Precision):
        lower = scorer.at_precision(precision)
        rows[precision] = {
            f"tokens_{tokens}_ms": median_ms(lambda of=lower, n=tokens: of.logits(["word1 " * (n - 2)]), max(3, rounds))
            for tokens in (128, 512)
        }
    return rows


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        scorer = trained(Path(name))
        served = batching(scorer, Path(name), chosen.rounds)
        lower = precisions(scorer, chosen.rounds)
        base = base_shape(Path(name), chosen.rounds) if chosen.base else {}
    print("| prompts | how | requests/s | × one by one | p50 ms | × one call | p99 ms | loop late p99 ms |")
    print("|---|---|---|---|---|---|---|---|")
    for length, rows in served.items():
        for name, of in rows.items():
            late = f"{of['late_p99_ms']:.1f}" if "late_p99_ms" in of else "–"
            print(
                f"| {length} | {name} | {of['per_s']:.0f} | {of['gain']:.1f} | {of['p50_ms']:.1f} | "
                f"{of['latency']:.1f} | {of['p99_ms']:.1f} | {late} |"
            )
    print("\n| precision | macro mAP | Brier | largest move of a probability | 1 prompt ms | 64 prompts ms |")
    print("|---|---|---|---|---|---|")
    for name, of in lower.items():
        print(
            f"| {name} | {of['macro_map']:.4f} | {of['brier']:.4f} | {of['largest_move']:.4f} | "
            f"{of['one_ms']:.1f} | {of['of_64_ms']:.1f} |"
        )
    if base:
        print("\n| ModernBERT-base's shape | 128 tokens ms | 512 tokens ms |\n|---|---|---|")
        for name, of in base.items():
            print(f"| {name} | {of['tokens_128_ms']:.0f} | {of['tokens_512_ms']:.0f} |")
    print(json.dumps({"benchmark": "router_batching", "served": served, "precisions": lower, "base": base}))


if __name__ == "__main__":
    main()
