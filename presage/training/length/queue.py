"""Mean completion time of workflows in a single-server queue, ordered by predicted length.

The server runs one step at a time without preemption; its service time is the step's output tokens. A workflow submits
its next step when the previous one ends, so it has at most one waiting step. A free server takes the waiting step with
the lowest key, as vLLM does; ties go to the one waiting longest.

This is a simplified model without batching, prefill or cache, and parallel steps run one after the other. It compares
orders; use `presage replay` to estimate the seconds that a deployment saves.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.rows import LabelledRows

FIRST_COME: Final = "first come"
SHORTEST_STEP: Final = "shortest step, known exactly"
ORACLE: Final = "shortest total, known exactly"

LOAD: Final = 0.9
"""Share of the time the server is busy, on the mean."""

DRAWS: Final = 5
"""Number of draws of arrival times, shared by all policies."""


@dataclass(frozen=True)
class QueueFigures:
    """Mean completion by policy: service in tokens from a workflow's arrival to its end, mean over workflows and draws.

    `load` is the share of the time the server is busy.
    """

    completion: Mapping[str, float]
    workflows: int
    load: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values; "saved" is the share by which a policy shortens the mean completion under first come."""
        first = self.completion[FIRST_COME]
        return {
            "workflows": self.workflows,
            "load": self.load,
            "completion_tokens": dict(self.completion),
            "saved": {name: 1 - value / first if first else 0.0 for name, value in self.completion.items()},
        }


def completions(
    work: NDArray[np.floating],
    keys: NDArray[np.floating],
    offsets: NDArray[np.int64],
    arrivals: NDArray[np.floating],
) -> NDArray[np.float64]:
    """When each workflow is done, float64 [W], in units of service.

    Args:
        work: [n], service of each step.
        keys: [n], priority of each step, lower first.
        offsets: int64 [W+1], workflow w has the steps offsets[w]:offsets[w+1], at least one.
        arrivals: [W], when each workflow comes.
    """
    service, key = work.tolist(), keys.tolist()
    step, last = offsets[:-1].tolist(), (offsets[1:] - 1).tolist()
    coming = sorted(zip(arrivals.tolist(), range(len(arrivals)), strict=True), reverse=True)
    waiting: list[tuple[float, float, int]] = []
    done = np.zeros(len(arrivals), np.float64)
    now = 0.0

    def admit() -> None:
        while coming and coming[-1][0] <= now:
            came, w = coming.pop()
            heapq.heappush(waiting, (key[step[w]], came, w))

    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        admit()
        _, _, w = heapq.heappop(waiting)
        now += service[step[w]]
        if step[w] == last[w]:
            done[w] = now
            continue
        admit()  # workflows that arrived during the step have waited longer than the step that starts to wait now
        step[w] += 1
        heapq.heappush(waiting, (key[step[w]], now, w))
    return done


def compare(
    work: NDArray[np.floating],
    predicted: Mapping[str, NDArray[np.floating]],
    offsets: NDArray[np.int64],
    seed: int,
    *,
    load: float = LOAD,
    draws: int = DRAWS,
) -> QueueFigures:
    """Mean completion of the same workflows under each policy.

    Args:
        work: [n], output tokens of each step.
        predicted: by name of the policy, the key a scheduler would sort by: the median forecast at each step, [n].
        offsets: int64 [W+1], the steps of each workflow, W > 0.
        load: share of the time the server is busy; workflows come at random (Poisson) at the rate that makes it so.
    """
    workflows = len(offsets) - 1
    total = np.add.reduceat(work.astype(np.float64), offsets[:-1])
    before = np.cumsum(work, dtype=np.float64) - work
    left = np.repeat(total + before[offsets[:-1]], np.diff(offsets)) - before
    policies = {FIRST_COME: np.zeros(len(work)), SHORTEST_STEP: work, **predicted, ORACLE: left}
    rng = np.random.default_rng(seed)
    sums = dict.fromkeys(policies, 0.0)
    for _ in range(draws):
        arrivals = np.cumsum(rng.exponential(max(total.mean(), 1e-9) / load, workflows))
        order = rng.permutation(workflows)  # traces are in the order of their names
        arrivals = arrivals[order]
        for name, keys in policies.items():
            sums[name] += float((completions(work, keys, offsets, arrivals) - arrivals).mean())
    return QueueFigures({name: value / draws for name, value in sums.items()}, workflows, load)


@dataclass(frozen=True)
class Queued:
    """The workflows that can be queued: those whose every step has a known length.

    Attributes:
        taken: bool [n], the rows that take part, m of them.
        work: float64 [m], output tokens of each step.
        offsets: int64 [W+1], the steps of each workflow.
    """

    taken: NDArray[np.bool_]
    work: NDArray[np.float64]
    offsets: NDArray[np.int64]


def queued(rows: LabelledRows) -> Queued | None:
    """The workflows of rows whose every step is known; None where there is none."""
    whole = np.ones(int(rows.workflow.max()) + 1, bool)
    whole[rows.workflow[~rows.labelled]] = False
    taken = whole[rows.workflow]
    if not taken.any():
        return None
    workflow, label = rows.workflow[taken], rows.label[taken].astype(np.float64)
    work = label
    if rows.target == "remaining":
        last = np.diff(workflow, append=-1) != 0
        # Labels are float32 sums: their differences may miss 0 by a little.
        work = np.maximum(np.where(last, label, label - np.append(label[1:], 0.0)), 0.0)
    offsets = np.append(np.flatnonzero(np.diff(workflow, prepend=-1)), len(workflow)).astype(np.int64)
    return Queued(taken, work, offsets)
