"""What does a call through the circuit breaker cost, which can abandon a call that hangs?

Three lengths of calls: "watched" on the breaker's own thread, "unwatched" (`hang_s` None) on the caller's thread, and
without a breaker. One machine, in turns, medians and 99th percentiles in microseconds. Most of the difference is the
operating system waking two threads, so it depends on the machine.

    python benchmarks/circuit_breaker.py [--calls 5000]

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker

WORK = {"no work": 0, "a short call": 300, "a long call": 3000}


def timed(call: Callable[[], object], taken: list[int]) -> None:
    begun = time.perf_counter_ns()
    call()
    taken.append(time.perf_counter_ns() - begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=5000)
    args = parser.parse_args()
    watched = CircuitBreaker("watched", Budget(deadline_s=1.0), time.monotonic)
    unwatched = CircuitBreaker("unwatched", Budget(deadline_s=1.0, hang_s=None), time.monotonic)
    report: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':14}" + "".join(f"{name:>12}{'p99':>8}" for name in ("alone", "unwatched", "watched")))
    for name, size in WORK.items():
        work = partial(sum, range(size))
        ways = {"alone": work, "unwatched": partial(unwatched.call, work), "watched": partial(watched.call, work)}
        taken: dict[str, list[int]] = {way: [] for way in ways}
        for _ in range(args.calls):
            for way, call in ways.items():
                timed(call, taken[way])
        report[name] = {}
        for way, times in taken.items():
            times.sort()
            median, p99 = times[len(times) // 2] / 1000, times[len(times) * 99 // 100] / 1000
            report[name][way] = {"us": round(median, 1), "p99_us": round(p99, 1)}
        print(f"{name:14}" + "".join(f"{of['us']:12.1f}{of['p99_us']:8.1f}" for of in report[name].values()))
    print(json.dumps({"benchmark": "circuit_breaker", "calls": args.calls, **report}))


if __name__ == "__main__":
    main()
