"""The best fixed number of workflows at once, found by trying: what a careful operator could set by hand, knowing all.

Numbers rise by a quarter each; the best has the shortest mean completion from arrival, waiting included, with one seed.
The other seeds then run with it. So the number is chosen on the same workload that it is judged on: a bound, and
no policy anybody could run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from presage.serving_hooks.replay.metrics import Figures
from presage.serving_hooks.replay.policies import Policy

_FIRST: Final = 4


def tried(policy: Policy, most: int) -> list[Policy]:
    """The policy with each number of workflows at once that is tried.

    Args:
        policy: to be limited.
        most: workflows that can be under way at once.
    """
    numbers, number = [most], _FIRST
    while number < most:
        numbers.append(number)
        number += max(1, number // 4)
    return [replace(policy, at_once=number) for number in sorted(numbers)]


def best(runs: Mapping[int, Figures]) -> int:
    """The number whose workflows completed soonest in the mean; the smaller of equals.

    Args:
        runs: figures by number of workflows at once.
    """
    return min(runs, key=lambda number: (runs[number]["completion_mean_s"], number))


def most_at_once(arrivals_at_once: int | None, most_requests: int, jobs: Sequence[object]) -> int:
    """Workflows that can be under way at once: those of a closed loop, else as many as an iteration has requests.

    A workflow in a tool call has no request, so under random arrivals twice as many are tried as run at once.
    """
    return min(arrivals_at_once or 2 * most_requests, len(jobs))
