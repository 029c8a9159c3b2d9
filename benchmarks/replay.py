"""What do eviction and admission do to workflows with retry loops, and how long does a replay take?

A planner, rounds of retriever, reader and verifier, and a writer; 60-400 new tokens a step, tool pauses of 1.5 s, in a
closed loop. "history-first": every prompt is an opening of 300 tokens, the common history, and an instruction of 40.
"own-conversation": every agent has a system prompt of 500 tokens and its own conversation. The costs of iterations are
invented (engine `invented`), forecasts are the truth, one seed.

    python benchmarks/replay.py [--workflows 200] [--cache-tokens 64000] [--concurrency 72,32]
                                [--policies stock,lifecycle,oracle] [--prompts history-first,own-conversation]

Needs vLLM 0.32. `full_s` is the CPU time of the same run without the short way, where --step-by-step asks for it.
Prints a table and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from presage.replay.policies import named
from presage.replay.runs import Done, Setting, check_vllm, run_one
from presage.replay.workload import (
    Arrivals,
    PromptConvention,
    RecordedRequest,
    ReplayJob,
    assemble,
)
from presage.serving_hooks.engine_file import read_engine

CONVENTIONS = {
    "history-first": PromptConvention("history-first", opening_tokens=300, closing_tokens=40),
    "own-conversation": PromptConvention("own-conversation", opening_tokens=500),
}
SHOWN = ("hit_rate", "makespan_s", "completion_mean_s", "ttft_mean_s", "preemptions", "recomputed_tokens")


def draw(workflows: int, convention: PromptConvention, seed: int = 0) -> tuple[ReplayJob, ...]:
    """Workflows with retry loops; sizes are the same under both conventions but for what prompts repeat."""
    rng = random.Random(seed)
    jobs = []
    for number in range(workflows):
        agents, again = ["planner", "retriever", "reader", "verifier"], rng.choice([0.25, 0.55, 0.75])
        while rng.random() < again and len(agents) < 16:
            agents += ["retriever", "reader", "verifier"]
        said: dict[str, int] = {}
        asked = []
        for step, agent in enumerate([*agents, "writer"]):
            whose = "" if convention.prompts == "history-first" else agent
            new, output = rng.randint(60, 400), min(600, int(rng.lognormvariate(4.6, 0.6)) + 8)
            tokens = convention.opening_tokens + said.get(whose, 0) + new + convention.closing_tokens
            asked.append(RecordedRequest(agent, tokens, output, (step - 1,) if step else (), rng.expovariate(1 / 1.5)))
            said[whose] = said.get(whose, 0) + new + output
        jobs.append(ReplayJob("retry", f"w{number}", assemble(asked, convention)))
    return tuple(jobs)


def timed(setting: Setting, policy: str, quick: bool = True) -> tuple[Done, float]:
    """One run and the CPU time it took."""
    begun = time.process_time()
    done = run_one(setting, named(policy)[0], 0, quick)
    return done, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workflows", type=int, default=200)
    parser.add_argument("--cache-tokens", type=int, default=64_000)
    parser.add_argument("--concurrency", default="72,32")
    parser.add_argument("--policies", default="stock,lifecycle,oracle")
    parser.add_argument("--prompts", default=",".join(CONVENTIONS))
    parser.add_argument("--step-by-step", action="store_true")
    args = parser.parse_args()
    check_vllm()
    timed(
        Setting(
            draw(1, CONVENTIONS["history-first"]),
            CONVENTIONS["history-first"],
            Arrivals(1),
            read_engine("invented"),
            "oracle",
        ),
        "stock",
    )
    found = []
    print(
        f"{'prompts':18}{'at once':>8}  {'policy':14}" + "".join(f"{name:>19}" for name in (*SHOWN, "cpu_s", "full_s"))
    )
    for prompts in args.prompts.split(","):
        jobs = draw(args.workflows, CONVENTIONS[prompts])
        for concurrency in map(int, args.concurrency.split(",")):
            engine = read_engine("invented", args.cache_tokens)
            setting = Setting(jobs, CONVENTIONS[prompts], Arrivals(concurrency), engine, "oracle", with_pauses=True)
            for policy in args.policies.split(","):
                done, cpu_s = timed(setting, policy)
                row = {name: round(done.figures[name], 3) for name in SHOWN} | {"cpu_s": round(cpu_s, 2)}
                row["full_s"] = round(timed(setting, policy, quick=False)[1], 2) if args.step_by_step else None
                print(
                    f"{prompts:18}{concurrency:8}  {policy:14}" + "".join(f"{value!s:>19}" for value in row.values()),
                    flush=True,
                )
                found.append({"prompts": prompts, "concurrency": concurrency, "policy": policy, **row})
    print(json.dumps({"benchmark": "replay", "workflows": args.workflows, "cache": args.cache_tokens, "runs": found}))


if __name__ == "__main__":
    main()
