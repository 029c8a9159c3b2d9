"""Does the order of a batch's calls show on a real engine, and do its answers stay the same?

`vllm serve` with a model of random weights on the CPU, and a cache that holds a third of what the rows keep. Three
plans (debate, reflection, refinement) over the same rows, in pairs, in random order, each with an empty cache:

    as they come   every call is sent once what it reads is there, and all rows at once
    presage        `presage batch run` as it is: order, rows and calls at a time from the plan and the engine's metrics

    .venv-vllm/bin/python benchmarks/batch_engine.py [--rows 24] [--pairs 5]

Ten minutes. Seconds by the wall's clock: other load on the machine counts. Prints a table of medians and ratios, with
the smallest and the largest, and a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from gateway_engines import ROOT, TEMPLATE, process, wait_for, words

from presage.batch import Plan, call, given, join, template
from presage.batch.operators import Operator
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.run import BatchRun, RunReport, RunSettings
from presage.batch.schedule import soft_order
from presage.testing.models import WORDS, save_qwen, save_tokenizer
from presage.testing.servers import free_port

BLOCK, CACHE_TOKENS, LENGTH, ANSWER = 32, 12_000, 4096, 24
ALL = 100_000
COMES, OURS = "as they come", "presage"


def debate() -> Plan:
    text = given("text")
    talks: list[list[tuple[str, Operator]]] = [[], [], []]
    prompts: list[Operator] = [text] * 3
    said: list[Operator] = []
    for _ in range(3):
        said = [
            call(f"agent {n}", prompts[n], system=words(40, "debate", n), history=talks[n], max_tokens=ANSWER)
            for n in range(3)
        ]
        for n in range(3):
            talks[n] += [("user", prompts[n]), ("assistant", said[n])]
            prompts[n] = join([said[other] for other in range(3) if other != n], " ")
    return Plan("debate", out=join(said))


def reflection() -> Plan:
    text, system = given("text"), words(40, "reflection")
    talk: list[tuple[str, Operator]] = []
    prompt, answer = text, text
    for _ in range(3):
        answer = call("expert", prompt, system=system, history=talk, max_tokens=ANSWER)
        critics = [
            call(f"critic {n}", template("{t} {a} {w}", t=text, a=answer, w=WORDS[n]), system=system, max_tokens=ANSWER)
            for n in range(2)
        ]
        talk = [*talk, ("user", prompt), ("assistant", answer)]
        prompt = join(critics, " ")
    return Plan("reflection", out=answer)


def refinement() -> Plan:
    """Nothing of a row is read again: there is nothing to gain."""
    summary: Operator | None = None
    for n in range(3):
        read = join([summary, given(f"chunk{n}")], " ") if summary else given(f"chunk{n}")
        summary = call("summariser", read, system=words(40, "refinement"), max_tokens=ANSWER)
    assert summary is not None
    return Plan("refinement", out=summary)


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--chat-template", TEMPLATE, "--max-model-len", str(LENGTH)]
    command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(CACHE_TOKENS // BLOCK)]
    command += ["--enable-prompt-tokens-details", "--max-num-seqs", "64"]
    given_ = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment = {**given_, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with process(command, folder / "engine.log", **environment):
        url = f"http://127.0.0.1:{port}"
        wait_for(url)
        yield url


def served(plan: Plan, rows: list[dict[str, str]], url: str, way: str, folder: Path) -> tuple[float, RunReport, Any]:
    """Seconds, report and results."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    order = soft_order(plan, tree_of(plan, field_tokens(plan, rows)), rows) if way == OURS else None
    settings = RunSettings() if way == OURS else RunSettings(concurrency=ALL, open_rows=ALL)
    run = BatchRun(plan, rows, [url], folder, order=order, settings=settings)
    begun = time.perf_counter()
    report = asyncio.run(run.run())
    seconds = time.perf_counter() - begun
    results = list(run.results())
    run.close()
    if report.failed:
        raise SystemExit(f"{report.failed} rows failed: {results[0]['error']}")
    return seconds, report, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    args = parser.parse_args()
    os.environ.pop("OPENAI_API_KEY", None)
    report: dict[str, Any] = {"benchmark": "batch_engine", **vars(args), "plans": {}}
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_qwen(folder / "model", hidden_size=args.hidden_size, inner=4 * args.hidden_size, length=LENGTH)
        save_tokenizer(folder / "model", [" ".join(WORDS)])
        with engine(folder) as url:
            print(f"{'':28}{'as they come, s':>16}{'presage, s':>12}{'ratio':>8}{'range':>16}{'from cache':>18}")
            for plan in (debate(), reflection(), refinement()):
                ratios, seconds, cached, same = [], {COMES: [], OURS: []}, {}, True
                for pair in range(args.pairs + 1):  # the first one warms up
                    rows = [
                        {field: words(400, plan.name, pair, row, field) for field in plan.fields}
                        for row in range(args.rows)
                    ]
                    found: dict[str, Any] = {}
                    for way in draw.sample((COMES, OURS), 2):
                        took, done, found[way] = served(plan, rows, url, way, folder / f"{plan.name} {pair} {way}")
                        if pair:
                            seconds[way].append(took)
                            cached[way] = done.cached_tokens / done.prompt_tokens
                    same = same and found[COMES] == found[OURS]
                    if pair:
                        ratios.append(seconds[OURS][-1] / seconds[COMES][-1])
                medians = {way: statistics.median(of) for way, of in seconds.items()}
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                shares = f"{cached[COMES]:.0%} and {cached[OURS]:.0%}"
                ratio = statistics.median(ratios)
                print(f"{plan.name:28}{medians[COMES]:16.1f}{medians[OURS]:12.1f}{ratio:8.2f}{spread:>16}{shares:>18}")
                print(f"{'':28}answers {'are the same' if same else 'DIFFER'}")
                report["plans"][plan.name] = {"ratio": round(ratio, 3), "ratios": [round(one, 3) for one in ratios]}
                report["plans"][plan.name] |= {"same_answers": same, "cached": cached}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
