"""Autoscaling: engines of each model for the demand at the time at which an engine asked for now would be ready.

Source: Pythia, §4.2.3 and algorithm 4. Demand counts requests in flight. That of a model H seconds ahead is the sum of

- requests in flight now that will still be: by the service times of their agent, beyond their age;
- requests that running workflows will have made: by what followed when earlier workflows had been as long in the same
  phase, weighed by the forecast of the next agent where a model makes one;
- requests of workflows that will have begun: by their rate, and by what earlier workflows did after their beginning.

Departures: the paper projects a graph by steps, ours projects times in seconds, so that H is the load time plus a tick,
and fan-out, loops and joins are those seen; the number of engines follows an upper quantile of the demand, by the
errors of earlier forecasts (split conformal prediction over the latest ones); engines are kept as long as any moment
until H needs them. A workflow in an unknown phase counts as it is now, and no forecast is made before workflows have
ended: then an engine follows the demand of now, as reactive autoscalers do. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from presage.serving_hooks.policies.routing.fleet import Fleet

_LATEST: Final = 64
"""Phases and service times kept of each kind."""

_ERRORS: Final = 300
_FEWEST_ERRORS: Final = 30
"""Errors of forecasts from which an interval is made, at most and at least."""

_GRID: Final = 5
_STEPS: Final = 5
"""Moments from now until H that are forecast, and steps between two in which workflows begin."""

_MOST_REQUESTS: Final = 512
"""Requests and phases of a workflow that are learnt from, the first ones."""

_MOST_VISITS: Final = 8
"""Visits of an agent that are told apart."""

_MOST_GROUPS: Final = 4096
"""Phases, agents and workflow types that are remembered, the latest ones."""

Array = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


class ScalingConfig(BaseModel):
    """How engines are added and drained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["forecast", "last-window", "reactive"] = "forecast"
    load_s: _Seconds = Field(30.0, description="from asking for an engine until it takes requests")
    tick_s: float = Field(1.0, gt=0, le=60, allow_inf_nan=False, description="between two decisions")
    requests_per_engine: float = Field(gt=0, allow_inf_nan=False, description="demand that one engine serves")
    keep_s: _Seconds = Field(60.0, description="an engine is drained when it was not needed for so long")
    quantile: float = Field(0.9, gt=0.5, lt=1, description="of the demand; policy forecast")
    window_s: float = Field(30.0, gt=0, le=3600, allow_inf_nan=False, description="policy last-window: its mean")
    rate_s: float = Field(300.0, gt=0, le=86_400, allow_inf_nan=False, description="rate of arrivals: over so long")
    least: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict, description="engines by model, else 1")
    min_evidence: int = Field(5, ge=1, description="cases that a forecast needs")


class ScalingTick(NamedTuple):
    """What an autoscaler saw and did; a tuple has an entry for each model.

    Attributes:
        demand: requests in flight, held ones included.
        mean, low, high: demand forecast for `for_s`; NaN without a forecast.
        engines: open or draining.
        loading: asked for and not open yet.
    """

    now: float
    for_s: float
    demand: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    engines: tuple[int, ...]
    loading: tuple[int, ...]


class _Phase(NamedTuple):
    """What a workflow does: the agent that began last, whether a request is in flight, and how often it has begun.

    `visit` is 0 for any.
    """

    agent: str
    running: bool
    visit: int


class _Case(NamedTuple):
    """A phase of an ended workflow: its length, the next agent, and the later requests, times from its beginning."""

    lasted_s: float
    then: str
    model: list[int]
    came_s: list[float]
    ended_s: list[float]


class _Cases:
    """The latest cases of a phase."""

    def __init__(self, horizons: Array, models: int) -> None:
        self._horizons, self._models = horizons, models
        self.cases: deque[_Case] = deque(maxlen=_LATEST)
        self._known: dict[float, dict[str, tuple[int, Array, Array]]] = {}
        self._arrays: tuple[Array, Array, Array, Array] | None = None

    def add(self, case: _Case) -> None:
        self.cases.append(case)
        self._known.clear()
        self._arrays = None

    def after(self, age_s: float) -> dict[str, tuple[int, Array, Array]]:
        """Requests in flight that came after a phase was `age_s` old: cases, mean and mean square by next agent.

        A phase that is older than all cases were is taken to be about to end.
        """
        age_s = min(age_s, max(case.lasted_s for case in self.cases) - 1.0)
        by_next = self._known.get(age_s)
        if by_next is None:
            lasted, came, ended, model = self._arrays = self._arrays or self._stacked()
            ages_s = (age_s + self._horizons)[:, None, None]
            there = ((came > age_s) & (came <= ages_s) & (ages_s < ended)).astype(np.float64)
            counts = np.einsum("hcr,crm->chm", there, model)
            numbers_by_next: defaultdict[str, list[int]] = defaultdict(list)
            for number, case in enumerate(self.cases):
                if lasted[number] > age_s:
                    numbers_by_next[case.then].append(number)
            by_next = self._known[age_s] = {
                then: (len(those), counts[those].mean(0), np.square(counts[those]).mean(0))
                for then, those in numbers_by_next.items()
            }
        return by_next

    def _stacked(self) -> tuple[Array, Array, Array, Array]:
        cases, most = self.cases, max(len(case.model) for case in self.cases)
        came, ended = np.full((2, len(cases), most), math.inf)
        model = np.zeros((len(cases), most, self._models))
        for number, case in enumerate(cases):
            size = len(case.model)
            came[number, :size], ended[number, :size] = case.came_s, case.ended_s
            model[number, np.arange(size), case.model] = 1.0
        return np.array([case.lasted_s for case in cases]), came, ended, model


@dataclass(slots=True)
class _Request:
    agent: str
    model: int
    came_s: float
    ended_s: float = math.inf


@dataclass(slots=True)
class _Workflow:
    """A running workflow: its requests, its phases, the seconds at which they began, and the requests before them."""

    kind: str
    requests: list[_Request] = field(default_factory=list)
    in_flight: dict[Hashable, _Request] = field(default_factory=dict)
    phases: list[tuple[_Phase, float, int]] = field(default_factory=list)
    visits: Counter[str] = field(default_factory=Counter)
    chances: Mapping[str, float] = field(default_factory=dict)

    def enter(self, agent: str, running: bool, now: float) -> None:
        if len(self.phases) == _MOST_REQUESTS:
            self.phases.pop()
        self.visits[agent] += running
        phase = _Phase(agent, running, min(self.visits[agent], _MOST_VISITS))
        self.phases.append((phase, now, len(self.requests)))


_BEGINNING: Final = _Phase("", False, 0)
END: Final = ""
"""Stands for the end of a workflow among next agents."""


def _latest(table: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of a key, made if it is new; the least recently used one is dropped beyond `_MOST_GROUPS`."""
    if key not in table:
        table[key] = make()
        if len(table) > _MOST_GROUPS:
            table.popitem(last=False)
    table.move_to_end(key)
    return table[key]


class DemandForecast:
    """Demand of every model ahead of time, learnt while workflows run.

    Args:
        models: by name.
        ahead_s: H.
        rate_s: seconds over which the rate of arrivals is measured.
        min_evidence: cases that a forecast needs.

    Attributes:
        horizons: seconds from now, [horizons].
        now: requests in flight, [models].
    """

    def __init__(self, models: Sequence[str], ahead_s: float, rate_s: float, min_evidence: int) -> None:
        self.horizons = np.linspace(0.0, ahead_s, _GRID)
        self._fine = np.linspace(0.0, ahead_s, _STEPS * (_GRID - 1) + 1)
        self.now = np.zeros(len(models))
        self._columns = {model: column for column, model in enumerate(models)}
        self._models, self._rate_s, self._min_evidence = len(models), rate_s, min_evidence
        self._workflows: dict[str, _Workflow] = {}
        self._cases: OrderedDict[tuple[str, _Phase], _Cases] = OrderedDict()
        self._service_s: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._begun: OrderedDict[str, deque[float]] = OrderedDict()
        self._since_s: float | None = None

    def arrived(self, workflow: str, kind: str, agent: str, model: str, request: Hashable, now: float) -> None:
        """A request of a workflow of type `kind` has arrived."""
        running = self._workflows.get(workflow)
        self._since_s = now if self._since_s is None else self._since_s
        if running is None:
            running = self._workflows[workflow] = _Workflow(kind)
            running.enter(END, False, math.nextafter(now, -math.inf))  # just before its first request
            _latest(self._begun, kind, deque).append(now)
        if not running.in_flight or running.phases[-1][0].agent != agent:
            running.enter(agent, True, now)
        record = running.in_flight[request] = _Request(agent, self._columns[model], now)
        if len(running.requests) < _MOST_REQUESTS:
            running.requests.append(record)
        self.now[record.model] += 1

    def expect(self, workflow: str, chances: Mapping[str, float]) -> None:
        """The forecast of a workflow's next agent: probabilities by name, that of its end by an empty name."""
        self._workflows[workflow].chances = chances

    def __len__(self) -> int:
        """Running workflows."""
        return len(self._workflows)

    def in_flight(self, workflow: str) -> Collection[Hashable] | None:
        """The requests of a workflow that are in flight; None for one that does not run."""
        running = self._workflows.get(workflow)
        return None if running is None else running.in_flight

    def answered(self, workflow: str, request: Hashable, now: float) -> None:
        """A request has its last token."""
        running = self._workflows[workflow]
        record = running.in_flight.pop(request)
        record.ended_s = now
        self.now[record.model] -= 1
        _latest(self._service_s, (running.kind, record.agent), lambda: deque(maxlen=2 * _LATEST)).append(
            now - record.came_s
        )
        if not running.in_flight:
            running.enter(running.phases[-1][0].agent, False, now)

    def ended(self, workflow: str, now: float) -> None:
        """A workflow has ended, without a request in flight: its phases are learnt."""
        running, far_s = self._workflows.pop(workflow), float(self.horizons[-1])
        untils = [since for _, since, _ in running.phases[1:]] + [now]
        for (phase, since, before), until in list(zip(running.phases, untils, strict=True))[: _MOST_REQUESTS - 2]:
            until = math.inf if phase == _BEGINNING else until
            later = running.requests[before:]
            then = next((request.agent for request in later if request.came_s >= until), END)
            near = [request for request in later if request.came_s <= min(until, now) + far_s]
            case = _Case(
                until - since,
                then,
                [request.model for request in near],
                [request.came_s - since for request in near],
                [request.ended_s - since for request in near],
            )
            horizons = self._fine if phase == _BEGINNING else self.horizons
            for key in dict.fromkeys((phase, phase._replace(visit=0))):
                _latest(self._cases, (running.kind, key), partial(_Cases, horizons, self._models)).add(case)

    def ahead(self, now: float) -> tuple[Array, Array] | None:
        """Mean and variance of the demand at each horizon, [horizons, models]; None without evidence of a type."""
        kinds = {running.kind for running in self._workflows.values()}
        if not all(self._known(kind, _BEGINNING) for kind in kinds or self._begun.keys()):
            return None
        mean, variance = np.zeros((2, _GRID, self._models))
        stays: dict[tuple[str, str, int], Array] = {}
        for running in self._workflows.values():
            phase, since, _ = running.phases[-1]
            later = self._after(running, phase, now - since)
            for request in running.in_flight.values():
                key = running.kind, request.agent, round(now - request.came_s)
                if key not in stays:
                    stays[key] = self._stays(*key)
                p = stays[key] if later is not None else np.ones(_GRID)
                mean[:, request.model] += p
                variance[:, request.model] += p * (1 - p)
            if later is not None:
                mean += later[0]
                variance += np.maximum(0.0, later[1] - later[0] ** 2)
        for kind, begun in self._begun.items():
            self._add_new(kind, begun, now, mean, variance)
        return mean, variance

    def _known(self, kind: str, phase: _Phase) -> bool:
        learnt = self._cases.get((kind, phase))
        return learnt is not None and len(learnt.cases) >= self._min_evidence

    def _after(self, running: _Workflow, phase: _Phase, age_s: float) -> tuple[Array, Array] | None:
        """Mean and mean square of a workflow's later requests in flight; None if the phase is unknown."""
        learnt = next(
            (candidate for candidate in (phase, phase._replace(visit=0)) if self._known(running.kind, candidate)), None
        )
        if learnt is None:
            return None
        by_next = self._cases[running.kind, learnt].after(round(age_s))
        weights = np.array([running.chances.get(then, 0.0) for then in by_next])
        if weights.sum() <= 0:
            weights = np.array([float(cases) for cases, _, _ in by_next.values()])
        weights /= weights.sum()
        first, second = (np.tensordot(weights, [moments[row] for moments in by_next.values()], 1) for row in (1, 2))
        return first, second

    def _stays(self, kind: str, agent: str, age_s: int) -> Array:
        """Probability that a request is in flight at each horizon; 1 if none took that long."""
        took = np.asarray(self._service_s.get((kind, agent), ()))
        took = took[took > age_s]
        if len(took) < self._min_evidence:
            return np.ones(_GRID)
        stay: Array = (took[None, :] > age_s + self.horizons[:, None]).mean(1)
        return stay

    def _add_new(self, kind: str, begun: deque[float], now: float, mean: Array, variance: Array) -> None:
        """Requests of workflows that begin after now, a Poisson process."""
        while begun and begun[0] < now - self._rate_s:
            begun.popleft()
        if not begun or not self._known(kind, _BEGINNING):
            return
        over_s = min(self._rate_s, max(now - (self._since_s or 0.0), self.horizons[-1]))
        ((_, *counts),) = self._cases[kind, _BEGINNING].after(0).values()
        first, second = (np.cumsum(moment, axis=0)[::_STEPS] for moment in counts)
        rate = len(begun) / over_s * float(self.horizons[1]) / _STEPS
        mean += rate * first
        variance += rate * second + rate**2 / len(begun) * first**2


class Autoscaler:
    """Opens and drains the engines of a fleet; tell `demand` of all requests, and call `tick` every `tick_s`.

    Attributes:
        ticks: what it saw and did.
        starts: engines asked for.
        errors: absolute errors of the forecast, of the last window and of the interval (1 outside), by tick and model.
    """

    def __init__(self, config: ScalingConfig, fleet: Fleet) -> None:
        self.config = config
        self.models = list(dict.fromkeys(engine.model for engine in fleet.engines))
        self.demand = DemandForecast(self.models, config.load_s + config.tick_s, config.rate_s, config.min_evidence)
        self.ticks: list[ScalingTick] = []
        self._engine_s = [0.0] * len(fleet.engines)
        self.starts = 0
        self.errors: list[tuple[float, float, float]] = []
        self._asked_s: dict[int, float] = {}
        self._ready_s: dict[int, float] = {}
        self._draining: set[int] = set()
        self._window: deque[tuple[float, ...]] = deque(maxlen=max(1, round(config.window_s / config.tick_s)))
        self._needed: deque[tuple[float, list[int]]] = deque()
        self._due: deque[tuple[float, Array, Array, Array, Array, Array]] = deque()
        self._scores: list[deque[float]] = [deque(maxlen=_ERRORS) for _ in self.models]
        for engine in fleet.engines:
            engine.open = False
        for model in self.models:
            for number in self._of(fleet, model)[: config.least.get(model, 1)]:
                self._asked_s[number], fleet.engines[number].open = 0.0, True

    def tick(self, fleet: Fleet, now: float) -> list[int]:
        """Decides for every model; returns the engines that open now, with empty caches."""
        opened = [number for number, ready_s in self._ready_s.items() if ready_s <= now]
        for number in opened:
            del self._ready_s[number]
            fleet.engines[number].open = True
        for number in [engine for engine in sorted(self._draining) if not fleet.engines[engine].requests]:
            self._close(number, now)
        demand = tuple(self.demand.now.tolist())
        self._window.append(demand)
        self._judge(now)
        up, keep, shown = self._wanted(now, demand)
        self._needed.append((now, [max(pair) for pair in zip(up, keep, strict=True)]))
        while self._needed[0][0] < now - self.config.keep_s:
            self._needed.popleft()
        for index, model in enumerate(self.models):
            numbers = self._of(fleet, model)
            least, most = min(len(numbers), self.config.least.get(model, 1)), len(numbers)
            active = [number for number in numbers if number in self._asked_s and number not in self._draining]
            needed = max(needs[index] for _, needs in self._needed)
            if up[index] > len(active):
                opened += self._more(fleet, numbers, min(up[index], most) - len(active), now)
            elif needed < len(active):
                self._fewer(fleet, active, len(active) - max(needed, least), now)
        count = [[number for number in self._of(fleet, model) if number in self._asked_s] for model in self.models]
        loading = tuple(sum(number in self._ready_s for number in asked) for asked in count)
        engines = tuple(len(asked) - wait for asked, wait in zip(count, loading, strict=True))
        self.ticks.append(
            ScalingTick(
                now, now + float(self.demand.horizons[-1]), demand, shown[0], shown[1], shown[2], engines, loading
            )
        )
        return opened

    def finish(self, now: float) -> list[float]:
        """Closes all engines; returns the seconds of each, from asking for it until it was empty."""
        for number in list(self._asked_s):
            self._close(number, now)
        return self._engine_s

    def _of(self, fleet: Fleet, model: str) -> list[int]:
        return [number for number, engine in enumerate(fleet.engines) if engine.model == model]

    def _wanted(self, now: float, demand: tuple[float, ...]) -> tuple[list[int], list[int], list[tuple[float, ...]]]:
        """Engines to have at H, engines to keep until then, and mean, low and high demand at H."""
        policy, none = self.config.policy, (math.nan,) * len(demand)
        if policy == "last-window":
            demand = tuple(np.mean(self._window, axis=0).tolist())
        wanted = [self._engines(requests) for requests in demand]
        made = self.demand.ahead(now) if policy == "forecast" else None
        if made is None:
            return wanted, wanted, [none] * 3
        mean, spread = made[0], np.sqrt(made[1] + 1.0)
        low, high = (mean + spread * self._factors(q) for q in (1 - self.config.quantile, self.config.quantile))
        low, high = np.maximum(low, 0.0), np.maximum(high, 0.0)
        due_s, window = now + float(self.demand.horizons[-1]), np.mean(self._window, axis=0)
        self._due.append((due_s, mean[-1], spread[-1], low[-1], high[-1], window))
        keep = [
            max(now_, *(self._engines(requests) for requests in high[1:, index])) for index, now_ in enumerate(wanted)
        ]
        return (
            [self._engines(requests) for requests in high[-1]],
            keep,
            [tuple(forecast[-1].tolist()) for forecast in (mean, low, high)],
        )

    def _engines(self, demand: float) -> int:
        return math.ceil(demand / self.config.requests_per_engine - 1e-9)

    def _factors(self, quantile: float) -> Array:
        """By model: standard deviations from the mean, by the latest errors; by the normal distribution before."""
        plain = NormalDist().inv_cdf(quantile)
        return np.array(
            [np.quantile(scores, quantile) if len(scores) >= _FEWEST_ERRORS else plain for scores in self._scores]
        )

    def _judge(self, now: float) -> None:
        """Compares forecasts that are due with the demand of now."""
        while self._due and self._due[0][0] <= now + 1e-9:
            _, mean, spread, low, high, window = self._due.popleft()
            for index, true in enumerate(self.demand.now.tolist()):
                self._scores[index].append((true - mean[index]) / spread[index])
                outside = not low[index] <= true <= high[index]
                self.errors.append((abs(true - mean[index]), abs(true - window[index]), float(outside)))

    def _more(self, fleet: Fleet, numbers: Sequence[int], more: int, now: float) -> list[int]:
        """Takes draining engines back, then asks for others; returns those that open at once."""
        opened = []
        for number in [engine for engine in numbers if engine in self._draining][:more]:
            self._draining.remove(number)
            fleet.engines[number].open, more = True, more - 1
        for number in [engine for engine in numbers if engine not in self._asked_s][:more]:
            self.starts += 1
            self._asked_s[number] = now
            if self.config.load_s:
                self._ready_s[number] = now + self.config.load_s
            else:
                fleet.engines[number].open = True
                opened.append(number)
        return opened

    def _fewer(self, fleet: Fleet, active: Sequence[int], fewer: int, now: float) -> None:
        """Stops loading engines, the latest first, then drains those with the fewest requests."""
        order = sorted(
            active, key=lambda engine: (-self._ready_s.get(engine, -1.0), fleet.engines[engine].requests, -engine)
        )
        for number in order[: max(0, fewer)]:
            fleet.engines[number].open = False
            if number in self._ready_s or not fleet.engines[number].requests:
                self._close(number, now)
            else:
                self._draining.add(number)

    def _close(self, number: int, now: float) -> None:
        self._engine_s[number] += now - self._asked_s.pop(number)
        self._ready_s.pop(number, None)
        self._draining.discard(number)
