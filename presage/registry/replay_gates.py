"""The last gate: what a version would have done to hit rate and completion time. Figures in, gates out.

Figures come in pairs, run against run on the same workflows in the same order. Each run is a random half of the
workflows, so the spread of the differences from run to run, undivided, is the standard error of a difference on all of
them, and the interval is mean ± t · spread. Two refusals are asked of each rival, hit rate and mean completion, each of
an equally good version in at most 2.5 % of cases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from presage.registry.verdict import Gate

LEAST_RUNS: Final = 3
"""Of fewer the spread says nothing."""


@dataclass(frozen=True)
class Replayed:
    """Figures of one contender, run by run; all contenders have the same runs.

    Attributes:
        hit_rate: prompt tokens found in the cache, of all, 0 to 1.
        completion_s: mean completion of workflows, seconds.
        switched_off: policies of the hooks that failed on the way.
    """

    hit_rate: tuple[float, ...]
    completion_s: tuple[float, ...]
    switched_off: tuple[str, ...] = ()


def judge_replay(candidate: Replayed, champion: Replayed | None, stock: Replayed) -> tuple[Gate, ...]:
    """The gates of a replay.

    Args:
        candidate: with the forecasts of the version that asks for promotion.
        champion: with those of the present holder; None for the first.
        stock: vLLM alone.

    Raises:
        ValueError: contenders have different runs, or too few of them.
    """
    gates = [_ran(candidate)]
    for rival, name, whom in ((champion, "champion", "the champion's"), (stock, "stock", "vLLM's alone")):
        if rival is None:
            continue
        hits = _differences(candidate.hit_rate, rival.hit_rate)
        times = _differences(candidate.completion_s, rival.completion_s)
        low, high = _interval(hits)
        reason = f"hit rate {_mean(hits):+.4f} beside {whom}, 95 % interval {low:+.4f} to {high:+.4f}"
        gates.append(Gate(f"replay-hit-rate-{name}", high >= 0, high, 0.0, reason))
        low, high = _interval(times)
        reason = f"mean completion {_mean(times):+.3f} s beside {whom}, 95 % interval {low:+.3f} to {high:+.3f} s"
        gates.append(Gate(f"replay-completion-{name}", low <= 0, low, 0.0, reason))
    return tuple(gates)


def _ran(candidate: Replayed) -> Gate:
    off = candidate.switched_off
    reason = f"{' and '.join(off)} failed and switched off with its forecasts" if off else "no policy failed with it"
    return Gate("replay-ran", not off, float(len(off)), 0.0, reason)


def _differences(candidate: Sequence[float], rival: Sequence[float]) -> list[float]:
    if len(candidate) != len(rival) or len(candidate) < LEAST_RUNS:
        raise ValueError(
            f"{len(candidate)} and {len(rival)} runs were compared; the same of both are wanted, {LEAST_RUNS} or more"
        )
    return [mine - its for mine, its in zip(candidate, rival, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    """Of the mean difference on all workflows, from differences on random halves of them."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(differences) - 1)) * float(np.std(differences, ddof=1))
    if math.isclose(half, 0.0, abs_tol=1e-12):
        half = 0.0
    return _mean(differences) - half, _mean(differences) + half
