"""Measurements for admission: the cost of an iteration, running means of steps, and a sample of pauses.

The means decay: each new value has a weight of at least one over the window of its mean. Steps of a workflow and the
tokens that each adds are kept by workflow type; clients choose the names, so the table is bounded.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.policies.steady_state import Rates

ENOUGH: Final = 64
"""Least number of iterations for a fit."""

ENOUGH_PREFILLS: Final = 16
"""Least number of iterations with a prefill for a fit."""

WINDOW: Final = 512

_ROUNDS: Final = 8
_PULL: Final = 1e-4
_PATTERNS: Final = [list(s) for n in (3, 2, 1) for s in itertools.combinations(range(3), n)]


def attention_pairs(prefilled: int, computed: int) -> int:
    """Pairs of a prefilled token and a token up to it; `computed` tokens of the request are in the cache afterwards."""
    return prefilled * computed - prefilled * (prefilled - 1) // 2


class IterationCosts(NamedTuple):
    """Seconds of an empty iteration, and those that each decoded and each prefilled token adds."""

    iteration_s: float
    decode_token_s: float
    prefill_token_s: float


class IterationCost:
    """What an iteration costs: c0 + c1 · tokens decoded + c_p · tokens prefilled, fitted to the last iterations.

    Least absolute deviations over the last `window` iterations, by least squares with weights 1 / |residual|
    (Schlossmacher 1973): a compilation or a pause of the machine is one large residual, which does not move a median.
    Costs are not negative: the fit takes the best feasible subset of positive coefficients, from seven small systems.

    If iterations differ little, the three costs cannot be separated. A slight regularisation of c1 and c_p towards 0
    then attributes the cost to c0, which makes small batches look expensive: an error that holds no workflow back.
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
        fitted, costs = np.zeros(len(times)), np.zeros(3)
        for _ in range(_ROUNDS):
            before, costs = fitted, np.array(_not_negative(seen, times, weights))
            fitted = seen @ costs
            if (np.abs(fitted - before) <= 1e-3 * fitted).all():
                break
            weights = 1.0 / np.maximum(np.abs(times - fitted), floor)
        if not costs[0] > 0:
            costs[0] = floor  # an iteration costs something
        return IterationCosts(*map(float, costs))


def _not_negative(seen: NDArray[np.float64], times: NDArray[np.float64], weights: NDArray[np.float64]) -> list[float]:
    """Weighted least squares over coefficients ≥ 0, 3 numbers; seen float64 [n, 3], the others [n].

    In plain Python: for systems this small, calling NumPy costs more than solving them.
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
    """Solves a system by Gaussian elimination; None if it is not positive definite, up to rounding."""
    rows = [[*row, wanted] for row, wanted in zip(matrix, target, strict=True)]
    for i, row in enumerate(rows):
        if not row[i] > 1e-12 * matrix[i][i]:
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[i:] = [b - factor * a for a, b in zip(row[i:], below[i:], strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(rows))):
        solved = sum(a * x for a, x in zip(rows[i][i + 1 : -1], solution, strict=True))
        solution.insert(0, (rows[i][-1] - solved) / rows[i][i])
    return solution


ENOUGH_STEPS: Final = 32
"""Least number of steps and of pauses for `rates`."""

_FORGET: Final = 50


class RunningMean:
    """The mean of the first `window` numbers, 0 before the first; beyond them an exponentially weighted mean.

    It may begin with a `mean` that counts as `count` numbers.
    """

    __slots__ = ("_window", "count", "mean")

    def __init__(self, window: int = _FORGET, mean: float = 0.0, count: int = 0) -> None:
        self.count, self.mean, self._window = count, mean, window

    def observe(self, number: float) -> None:
        """Adds a number."""
        self.count += 1
        self.mean += (number - self.mean) / min(self.count, self._window)


_HALF_LIFE_S: Final = 60.0


class RecomputingShare:
    """Share of the engine's seconds that it spends on tokens which it had computed before; recent ones count most.

    What came before counts half after `_HALF_LIFE_S` seconds in which the engine computed.
    """

    def __init__(self) -> None:
        self._busy_s = self._lost = 0.0

    def loses(self, tokens: float) -> None:
        """A prompt has so many tokens that its workflow had computed and the cache has lost."""
        self._lost += tokens

    def computes(self, seconds: float) -> None:
        """An iteration has taken so long."""
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self._busy_s, self._lost = (self._busy_s + seconds) * keep, self._lost * keep

    def share(self, costs: IterationCosts | None) -> float:
        """0 to 1; 0 until costs are measured."""
        if costs is None or self._busy_s <= 0:
            return 0.0
        return min(1.0, self._lost * costs.prefill_token_s / self._busy_s)


LATEST: Final = 600
"""Pauses in the sample, and the window of the means of contexts."""

MOST_TYPES: Final = 1000
"""Workflow types whose means are kept; the least recently used one is dropped."""


_EARLIER: Final = 8
"""Workflows that the means of earlier traces count as: few, since what runs here may differ."""

MOST_WRONG: Final = 3.0
"""Factor by which contexts, or forecasts of their growth, are corrected at most."""

Earlier = Callable[[str], "tuple[float, float] | None"]
"""Mean steps and growth of a workflow type in earlier traces, None if unknown."""


class ForecastGrowth:
    """By how many times as much as forecast contexts really grow; the latest steps count most.

    From one step to the next a context grows, and its forecast growth should shrink by as much; what is still forecast
    when a workflow ends never came. Unlike totals of ended workflows, of which the short ones come first, such a
    comparison is right from the first step on: a forecast that is a mean is a martingale with what has grown so far.
    """

    __slots__ = ("_first", "_foreseen", "_grown")

    def __init__(self) -> None:
        self._first = RunningMean()
        self._grown = self._foreseen = 0.0

    def begins(self, foreseen: float) -> None:
        """A workflow begins with such a forecast."""
        self._first.observe(foreseen)

    def observe(self, grown: float, foreseen: float) -> None:
        """A context has grown by so much while its forecast shrank by so much."""
        keep = 1.0 - 1.0 / LATEST
        self._grown, self._foreseen = self._grown * keep + grown, self._foreseen * keep + foreseen

    @property
    def counts(self) -> bool:
        """Whether there was a forecast."""
        return self._first.count > 0

    def ratio(self, elsewhere: float = 1.0) -> float:
        """That ratio, as if `_EARLIER` workflows had had the one `elsewhere`."""
        believed = _EARLIER * self._first.mean
        if believed <= 0:
            return elsewhere
        ratio = (max(0.0, self._grown) + believed * elsewhere) / (max(0.0, self._foreseen) + believed)
        return min(max(ratio, 1 / MOST_WRONG), MOST_WRONG)


class TypeMeans:
    """Means of a workflow type: steps of a workflow that has ended, tokens that a step adds to its own context, seconds
    from the beginning of a step until the next one arrives (`step_s`), and the share of workflows whose end nobody told
    (`silent`).

    They begin with those of earlier traces, where these are known (`foreseen`). `forecast_growth` compares forecasts of
    a model with what came.
    """

    __slots__ = ("forecast_growth", "foreseen", "growth", "silent", "step_s", "steps")

    def __init__(self, earlier: tuple[float, float] | None) -> None:
        self.foreseen, self.forecast_growth = earlier is not None, ForecastGrowth()
        steps, growth = earlier or (0.0, 0.0)
        self.steps = RunningMean(mean=steps, count=_EARLIER if self.foreseen else 0)
        self.growth = RunningMean(LATEST, growth, round(_EARLIER * steps))
        self.step_s = RunningMean(LATEST)
        self.silent = RunningMean(count=_EARLIER)

    def expected_steps(self, steps: int) -> float:
        """Steps that a workflow takes in all, after so many."""
        if not self.steps.count:
            return max(4.0, 2.0 * steps)
        mean = self.steps.mean
        return steps + 0.5 * mean if steps > mean else mean

    def needs_s(self, steps: int) -> float:
        """Seconds that a workflow takes after so many steps if it does not wait; 0 before any is measured."""
        return max(0.0, self.expected_steps(steps) - steps) * self.step_s.mean


class WorkloadMeans:
    """Running means over all workflows and of each type.

    Args:
        earlier: what the means of a workflow type begin with.

    Attributes:
        new_tokens: prompt tokens of a step that its workflow had not computed before.
        output_tokens: of a step.
        read_tokens: prompt tokens of a step that its workflow shares with no other.
        own_tokens: of the context of its workflow then.
        pauses_s: the latest.
    """

    def __init__(self, earlier: Earlier = lambda _: None) -> None:
        self._earlier = earlier
        self.new_tokens, self.output_tokens = RunningMean(), RunningMean()
        self.read_tokens, self.own_tokens = RunningMean(LATEST), RunningMean(LATEST)
        self._again, self._earlier_used, self._waited = (RunningMean(LATEST) for _ in range(3))
        self.pauses_s: deque[float] = deque(maxlen=LATEST)
        self._types: OrderedDict[str, TypeMeans] = OrderedDict()
        self._reused = self._lost = 0.0
        self._forecast_growth = ForecastGrowth()

    def of_type(self, workflow_type: str) -> TypeMeans:
        """The means of a workflow type, to count on."""
        means = self._types.get(workflow_type)
        if means is None:
            means = self._types[workflow_type] = TypeMeans(self._earlier(workflow_type))
            if len(self._types) > MOST_TYPES:
                self._types.popitem(last=False)
        self._types.move_to_end(workflow_type)
        return means

    def forecast_growth(self) -> dict[str, float]:
        """By workflow type, how many times as much as forecast contexts grow; types without a forecast left out."""
        names = [name for name, means in self._types.items() if means.forecast_growth.counts]
        return {name: self.growth_ratio(name) for name in names}

    def foresaw(self, workflow_type: str, grown: float, foreseen: float) -> None:
        """See `ForecastGrowth.observe`."""
        for growth in (self._forecast_growth, self.of_type(workflow_type).forecast_growth):
            growth.observe(grown, foreseen)

    def foresees_growth(self, workflow_type: str, foreseen: float) -> None:
        """See `ForecastGrowth.begins`."""
        for growth in (self._forecast_growth, self.of_type(workflow_type).forecast_growth):
            growth.begins(foreseen)

    def growth_ratio(self, workflow_type: str) -> float:
        """How many times as much as forecast the contexts of a workflow type grow, by its own and all workflows."""
        return self.of_type(workflow_type).forecast_growth.ratio(self._forecast_growth.ratio())

    def foresees(self, workflow_types: Iterable[str]) -> bool:
        """Whether contexts of these types are known from earlier traces while few steps are measured."""
        few = self.output_tokens.count < 2 * ENOUGH_STEPS
        return few and all(self.of_type(workflow_type).foreseen for workflow_type in workflow_types)

    def reuses(self, tokens: float, lost_tokens: float, cache_tokens: float) -> None:
        """A prompt has tokens that its workflow had computed, and of these the cache has lost some.

        What came before counts half once prompts have reused a whole cache since.
        """
        keep = 0.5 ** (tokens / cache_tokens)
        self._reused, self._lost = (self._reused + tokens) * keep, (self._lost + lost_tokens) * keep

    def returns(self, tokens: float, steps: int) -> None:
        """A prompt reads tokens of its workflow's own context that were used so many steps ago."""
        self._again.observe(tokens)
        earlier = tokens if steps > 1 else 0.0
        self._earlier_used.observe(earlier)
        self._waited.observe(earlier * steps)

    @property
    def latest_share(self) -> float:
        """Of the tokens that prompts read again, the share that was used in the step before."""
        return max(0.0, 1.0 - self._earlier_used.mean / self._again.mean) if self._again.mean else 1.0

    @property
    def apart(self) -> float:
        """Steps since the others were used, 2 or more."""
        return max(2.0, self._waited.mean / self._earlier_used.mean) if self._earlier_used.mean else 2.0

    @property
    def miss_share(self) -> float:
        """Share of their own contexts that prompts have lost lately."""
        return min(1.0, self._lost / self._reused) if self._reused else 0.0

    def rates(self, costs: IterationCosts | None, most_decoding: int, expected_steps: float) -> Rates | None:
        """The rates that a choice needs; None until enough of each is measured.

        `expected_steps` are those of a workflow in the mean over all that are running.
        """
        new, output = self.new_tokens, self.output_tokens
        few = min(new.count, output.count, len(self.pauses_s)) < ENOUGH_STEPS
        if costs is None or few or not (output.mean > 0 and self.own_tokens.mean > 0):
            return None
        read_share = min(1.0, max(self.read_tokens.mean, 1.0) / self.own_tokens.mean)
        end = 1.0 / max(1.0, expected_steps)
        pauses_s = np.sort(np.array(self.pauses_s))
        return Rates(
            *costs,
            output.mean,
            new.mean,
            most_decoding,
            pauses_s,
            end,
            self.miss_share,
            read_share,
            self.latest_share,
            self.apart,
        )
