"""Does prefetch gain anything by itself? The same replays with and without it, with and without a host tier.

`presage replay` itself never prefetches: it reports iterations to the hooks after their end, so the hooks measure no
pace, and it skips idle time. Here both arms get the order of calls of vLLM's engine core (the hooks are called while
the model runs), and idle engines are asked whether they want to work.

    python benchmarks/prefetch_alone.py STORE [--seeds 5] [--forecasts oracle,counts] [--engine h100-8b-datasheet] ...

Needs vLLM. Prints a table of differences with 95 % intervals over seeds (Student's t), and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from presage.datasets.read import read_traces
from presage.replay.metrics import gained
from presage.replay.policies import POLICIES
from presage.replay.runs import Setting, check_vllm, swept
from presage.replay.workload import Arrivals, PromptConvention, check_fits, workload
from presage.serving_hooks.engine_file import read_engine

SHOWN = {"hit_rate": 1e2, "ttft_mean_s": 1e3, "completion_mean_s": 1e3}
"""Figures of the table, and their factors."""


def as_served(hooked: type[Any]) -> type[Any]:
    """The hooked scheduler, called as vLLM's engine core calls it."""

    class AsServed(hooked):  # type: ignore[misc]
        def schedule(self, throttle_prefills: bool = False) -> Any:
            output = super().schedule(throttle_prefills)
            self.get_grammar_bitmask(output)
            return output

        def has_unfinished_requests(self) -> bool:
            return bool(super().has_unfinished_requests() or (self._prefetch is not None and self._prefetch.wants()))

        def may_fast_forward(self) -> bool:
            return False

    return AsServed


def _cell(gain: dict[str, Any], without: list[float], scale: float) -> str:
    half = gain["ci95"][1] - gain["mean"]
    return f"{gain['mean'] * scale:+.2f} ± {half * scale:.2f} (of {sum(without) / len(without) * scale:,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--forecasts", default="oracle,counts")
    parser.add_argument("--policies", default="next-use,full", help="their prefetch is switched on and off")
    parser.add_argument("--prompts", default="own-conversation")
    parser.add_argument("--opening-tokens", type=int, default=300)
    parser.add_argument("--engine", default="h100-8b-datasheet")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--cache-tokens", type=int, default=64_000)
    parser.add_argument("--host-cache-tokens", default="0,640000")
    chosen = parser.parse_args()
    check_vllm()
    convention = PromptConvention(chosen.prompts, chosen.opening_tokens)
    jobs = workload(read_traces([chosen.store]).table, convention).jobs
    points = {}
    for host in map(int, chosen.host_cache_tokens.split(",")):
        engine = read_engine(chosen.engine, chosen.cache_tokens, host)
        check_fits(jobs, engine)
        for forecasts in chosen.forecasts.split(","):
            setting = Setting(jobs, convention, Arrivals(chosen.concurrency), engine, forecasts, with_pauses=True)
            for name in chosen.policies.split(","):
                policy = POLICIES[name]
                settings = (policy.settings or frozenset()) - {"prefetch"}
                for on, switches in ((False, settings), (True, settings | {"prefetch"})):
                    arm = replace(policy, settings=switches, scheduler=as_served)
                    points[host, forecasts, name, on] = setting, arm
    found = swept(points, range(chosen.seeds), chosen.processes)
    rows = []
    print(
        "| host tokens | forecasts | policy | hit rate, points | TTFT, ms | completion, ms |\n|---|---|---|---|---|---|"
    )
    for host, forecasts, name, on in points:
        if on:
            without = found[host, forecasts, name, False]
            gains = gained(found[host, forecasts, name, True], without)
            rows.append({"host": host, "forecasts": forecasts, "policy": name, "without": without, "gains": gains})
            cells = [_cell(gains[figure], [run[figure] for run in without], scale) for figure, scale in SHOWN.items()]
            print(f"| {host:,} | {forecasts} | {name} | {' | '.join(cells)} |", flush=True)
    print(json.dumps({"benchmark": "prefetch_alone", "workflows": len(jobs), "seeds": chosen.seeds, "rows": rows}))


if __name__ == "__main__":
    main()
