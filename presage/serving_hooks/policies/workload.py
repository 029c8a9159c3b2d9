"""Measurements for admission: the cost of an iteration, running means of steps, and the tool times of each agent.

The means decay: each step replaces one part in `_FORGET`. Pauses are kept by workflow type and agent, since tools
differ a hundredfold; clients choose the names, so the table is bounded.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.throughput import Rates

ENOUGH: Final = 64
"""Iterations that a fit needs."""

ENOUGH_PREFILLS: Final = 16
"""Iterations with a prefill that a fit needs."""

WINDOW: Final = 512

_ROUNDS: Final = 8
_PULL: Final = 1e-4
_PATTERNS: Final = [list(s) for n in (3, 2, 1) for s in itertools.combinations(range(3), n)]


class IterationCosts(NamedTuple):
    """Seconds: of any iteration, and what each decoded and each prefilled token adds."""

    iteration_s: float
    decode_token_s: float
    prefill_token_s: float


class IterationCost:
    """What an iteration costs: c0 + c1 · tokens decoded + c_p · tokens prefilled, fitted to the last iterations.

    Least absolute deviations over the last `window` iterations, by least squares with weights 1 / |residual|
    (Schlossmacher 1973): a compilation, a pause of the machine or a collection of garbage is one large residual, and
    does not move a median. No cost is negative: of the sign patterns the best feasible one is taken, which for three
    coefficients are seven small systems. The oldest iteration is forgotten when a new one comes, so the fit follows the
    engine.

    Where iterations differ little the three cannot be told apart. A slight pull of c1 and c_p towards 0 then leaves the
    cost with c0, which makes an emptier batch look dear: the mistake that holds nobody back.

    Args:
        window: how many are remembered.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._last: deque[tuple[int, int, float]] = deque(maxlen=window)

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Counts an iteration; one without tokens or time is ignored."""
        if seconds > 0 and decode_tokens + prefill_tokens > 0:
            self._last.append((decode_tokens, prefill_tokens, seconds))

    def fit(self) -> IterationCosts | None:
        """The fitted costs; None while there are too few iterations."""
        if len(self._last) < ENOUGH:
            return None
        last = np.array(self._last)
        if np.count_nonzero(last[:, 1]) < ENOUGH_PREFILLS:
            return None
        seen, times = np.column_stack([np.ones(len(last)), last[:, :2]]), last[:, 2]
        weights = np.ones(len(times))
        floor = 1e-3 * float(np.median(times))
        said, found = np.zeros(len(times)), np.zeros(3)
        for _ in range(_ROUNDS):
            before, found = said, np.array(_not_negative(seen, times, weights))
            said = seen @ found
            if (np.abs(said - before) <= 1e-3 * said).all():
                break
            weights = 1.0 / np.maximum(np.abs(times - said), floor)
        if not found[0] > 0:
            found[0] = floor  # an iteration costs something
        return IterationCosts(*map(float, found))


def _not_negative(seen: NDArray[np.float64], times: NDArray[np.float64], weights: NDArray[np.float64]) -> list[float]:
    """The weighted least squares over all coefficients ≥ 0, 3 numbers; seen float64 [n, 3], the others [n].

    The systems are too small for NumPy: what it takes to call it is most of what it takes to solve them.
    """
    weighted = seen * weights[:, None]
    normal, target = (weighted.T @ seen).tolist(), (weighted.T @ times).tolist()
    for i in (1, 2):
        normal[i][i] *= 1 + _PULL
    best, least = [0.0] * 3, 0.0
    for kept in _PATTERNS:
        part = _solve([[normal[i][j] for j in kept] for i in kept], [target[i] for i in kept])
        if part is None or min(part) < 0:
            continue
        loss = -sum(x * target[i] for i, x in zip(kept, part, strict=True))  # at the minimum of its own pattern
        if loss < least:
            least, best = loss, [0.0] * 3
            for i, x in zip(kept, part, strict=True):
                best[i] = x
        if len(kept) == 3:
            break  # the unconstrained minimum is feasible
    return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """A positive definite system, by Gauss's elimination; None where it is not, to rounding."""
    rows = [[*row, wanted] for row, wanted in zip(matrix, target, strict=True)]
    for i, row in enumerate(rows):
        if not row[i] > 1e-12 * matrix[i][i]:
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[i:] = [b - factor * a for a, b in zip(row[i:], below[i:], strict=True)]
    found: list[float] = []
    for i in reversed(range(len(rows))):
        known = sum(a * x for a, x in zip(rows[i][i + 1 : -1], found, strict=True))
        found.insert(0, (rows[i][-1] - known) / rows[i][i])
    return found


ENOUGH_STEPS: Final = 32
"""Steps, and pauses, that `rates` needs."""

MOST_AGENTS: Final = 10_000
"""Agents, over all workflow types, whose pauses are kept."""

_FORGET: Final = 50


class RunningMean:
    """A mean: of all so far, and once there are more than `_FORGET`, mostly of the last ones.

    Attributes:
        count: numbers seen.
        mean: of them.
    """

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def observe(self, number: float) -> None:
        """One more."""
        self.count += 1
        self.mean += (number - self.mean) / min(self.count, _FORGET)


class WorkloadMeans:
    """Running means over all workflows, and of each agent's pauses."""

    def __init__(self) -> None:
        self._new, self._reusable, self._outputs = RunningMean(), RunningMean(), RunningMean()
        self._pauses = RunningMean()
        self._agents: dict[tuple[str, str], int] = {}
        self._by_agent: list[RunningMean] = []
        self._pause_s = np.full(1, np.nan)  # of each agent, NaN where none was seen; of nobody at the end

    @property
    def new_tokens(self) -> float:
        """Prompt tokens of a step that its workflow had not computed before."""
        return self._new.mean

    @property
    def output_tokens(self) -> float:
        """Output tokens of a step."""
        return self._outputs.mean

    def begins(self, new_tokens: int, reusable_tokens: int) -> None:
        """A step begins, with so many prompt tokens of each kind."""
        self._new.observe(new_tokens)
        self._reusable.observe(reusable_tokens)

    def completes(self, output_tokens: int) -> None:
        """A step has had its last token."""
        self._outputs.observe(output_tokens)

    def agent(self, workflow_type: str, agent: str) -> int:
        """The number of an agent among `pauses_s`; −1 where there are too many."""
        key = workflow_type, agent
        number = self._agents.get(key)
        if number is None:
            if len(self._by_agent) == MOST_AGENTS:
                return -1
            number = self._agents[key] = len(self._by_agent)
            self._by_agent.append(RunningMean())
            if number + 1 == len(self._pause_s):
                self._pause_s = np.concatenate([self._pause_s, np.full(len(self._pause_s), np.nan)])
        return number

    def paused(self, workflow_type: str, agent: str, seconds: float) -> None:
        """So long after a step of `agent` its workflow sent the next."""
        self._pauses.observe(seconds)
        number = self.agent(workflow_type, agent)
        if number >= 0:
            known = self._by_agent[number]
            known.observe(seconds)
            self._pause_s[number] = known.mean

    def pauses_s(self) -> NDArray[np.float64]:
        """How long the pause after a step of each agent is, by number: its own mean, else that of all, else NaN."""
        mean = self._pauses.mean if self._pauses.count else np.nan
        return np.where(np.isnan(self._pause_s), mean, self._pause_s)

    def rates(self, costs: IterationCosts | None, most_decoding: int) -> Rates | None:
        """All a decision needs; None while too little was seen of any of it."""
        few = min(self._new.count, self._outputs.count, self._pauses.count) < ENOUGH_STEPS
        if costs is None or few or not self.output_tokens > 0:
            return None
        return Rates(*costs, self.output_tokens, self._new.mean, self._reusable.mean, self._pauses.mean, most_decoding)
