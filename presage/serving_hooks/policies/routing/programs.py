"""Routing by programs: a workflow is admitted to an engine, held in a queue for all engines, or paused in a tool call.

Source: ThunderAgent, §4.3: the contexts of an engine's programs must fit its cache (eq. 6), else programs are paused
(eq. 10) and later restored (eq. 11) on any engine, since a paused program is assumed to have lost its cache.
`ThunderAgent` adds what its public code does: tokens shared by programs count once, each program counts for 100 tokens
more, programs with steps go before new ones, and the weight of a program in a tool call is 2^-t.

`ForecastPrograms` is ours:

- ThunderAgent's 2^-t has no scale: after a tool call of a second it counts half a context that comes back at once, and
  then the cache thrashes. Ours halves the weight for every `keep_s` that the program will still be away: until its
  forecast return, and once that has passed, for as long again as it has been away. It is multiplied by the probability
  that the program returns at all, which falls while it is away: most clients never say that a workflow has ended.
- A context counts as it will be `ahead` steps later, since a cache that is just full thrashes at the next step.
- The queue runs by forecast remaining work, the shortest first; every `patience_s` of waiting raises it a level. A
  program that finds no room lets others pass until it has waited that long.
- A program that is away for so long that its weight is nearly 0 gives up its place; when it returns, it goes back to
  its engine if that has room, else to the one that begins it soonest.

Ours and vllm-router's share the room between tenants and workflow types by service received (`fair_shares.py`); their
orders hold within a type, and within a tenant while no type is behind. A program that would miss its deadline if it
waited on goes before all others of its tenant, as in the engine (`wait_bounds.presses`), the earliest deadline first.
ThunderAgent's rule knows none of this.

No policy interrupts a request. An engine without programs always takes one, so the queue advances.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from presage.serving_hooks.policies.admission import Phase
from presage.serving_hooks.policies.fair_shares import FairShares
from presage.serving_hooks.policies.routing.fleet import Fleet, FleetEngine, Placement, Program, RoutingRequest
from presage.serving_hooks.policies.routing.placement import HOME, NO_ENGINE
from presage.serving_hooks.policies.wait_bounds import presses

_LOOK: Final = 32

QUEUED: Final = "queued: the contexts of running workflows fill the caches"
ROOMIEST: Final = "engine with the most room"
BACK: Final = "restored on its engine"
SOONEST: Final = "engine that begins it soonest"


class Programs:
    """What program-aware policies have in common; subclasses set the weights and orders.

    Attributes:
        buffer_tokens: added to each context.
        fair: whether room is shared between tenants and workflow types, and deadlines count.
    """

    tick_s: float | None = 5.0
    buffer_tokens = 0
    fair = True

    def __init__(self) -> None:
        # By model, then by group.
        self._queues: defaultdict[str, defaultdict[str, list[Program]]] = defaultdict(lambda: defaultdict(list))
        self._shares: dict[str, FairShares] = {}

    def weight(self, program: Program, now: float) -> float:
        """Weight of a program's context in the load of its engine, 0 to 1."""
        return 1.0

    def size(self, program: Program, fleet: Fleet) -> float:
        """Tokens of cache that a program takes, net of those that it shares."""
        return max(0.0, program.context_tokens - program.shared_tokens) + self.buffer_tokens

    def queue_key(self, program: Program, now: float) -> tuple[Any, ...]:
        """The lowest is restored first."""
        return (program.waiting[0].arrives_s, program.name)

    def pause_key(self, program: Program, now: float) -> tuple[Any, ...]:
        """The lowest is paused first: programs in a tool call, then the shortest context (eq. 10)."""
        return (program.phase is not Phase.TOOL, program.context_tokens, program.name)

    def prefers(self, program: Program, fleet: Fleet, engines: list[int]) -> Placement:
        """One of the engines that have room."""
        return Placement(max(engines, key=lambda number: (self._room(fleet.engines[number]), -number)), ROOMIEST)

    def gone(self, program: Program, now: float) -> bool:
        """Whether a program in a tool call gives up its place."""
        return False

    def passes(self, program: Program, now: float) -> bool:
        """Whether a program without room lets those behind it pass."""
        return False

    def decide(self, request: RoutingRequest, fleet: Fleet, now: float) -> Placement:
        """The engine of an admitted program; others are queued."""
        program = fleet.programs[request.program]
        home = program.engine
        if program.admitted and home is not None and fleet.engines[home].open:
            self._count(program, fleet, now)
            return Placement(home, HOME)
        program.admitted = False
        fleet.count(program, 0.0)
        program.waiting.append(request)
        if len(program.waiting) == 1:
            program.phase, program.since_s = Phase.READY, now
            queue = self._queues[program.model][program.group if self.fair else ""]
            insort(queue, program, key=lambda queued: self._order(queued, fleet, now))
        return Placement(None, QUEUED if fleet.open(request.model) else NO_ENGINE)

    def answered(self, request: tuple[int, int], program: Program, fleet: Fleet, now: float) -> None:
        """Counts its new context; a program that leaves is paused."""
        if program.admitted:
            self._charge(program)
        if program.leaving and not program.in_flight:
            self._pause(program, fleet)
        elif program.admitted:
            self._count(program, fleet, now)

    def tick(self, fleet: Fleet, now: float) -> None:
        """Weighs all programs again, and pauses programs of engines whose contexts no longer fit."""
        for engine in fleet.engines:
            for program in engine.programs.values():
                if program.admitted and program.phase is Phase.TOOL and self.gone(program, now):
                    self._pause(program, fleet)
                elif program.admitted:
                    self._count(program, fleet, now)
            excess = engine.load_tokens - engine.cache_tokens
            if excess <= 0:
                continue
            admitted = [program for program in engine.programs.values() if program.admitted and not program.leaving]
            for program in sorted(admitted, key=lambda program: self.pause_key(program, now))[: len(admitted) - 1]:
                if excess <= 0:
                    break
                excess -= program.counted_tokens
                if program.in_flight:
                    program.leaving = True
                else:
                    self._pause(program, fleet)
        for queues in self._queues.values():
            for queue in queues.values():
                queue.sort(key=lambda program: self._order(program, fleet, now))

    def release(self, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        """Restores programs in the order of the queue; looks at no more than `_LOOK` that find no room."""
        return [placed for model in self._queues for placed in self._release(model, fleet, now)]

    def _release(self, model: str, fleet: Fleet, now: float) -> list[tuple[RoutingRequest, Placement]]:
        released: list[tuple[RoutingRequest, Placement]] = []
        queues, open_ = self._queues[model], fleet.open(model)
        shares = self._sharing(model, fleet, open_)
        still: dict[str, list[Program]] = {group: [] for group in queues}
        most = self._most(fleet, open_)
        positions, looked = dict.fromkeys(queues, 0), 0
        only = next(iter(queues)) if len(queues) == 1 else None
        while looked < _LOOK:
            group = self._next(queues, positions, shares, fleet, now) if only is None else only
            if group is None or positions[group] == len(queues[group]):
                break
            program = queues[group][positions[group]]
            positions[group] += 1
            needs = self.size(program, fleet)
            if needs > most:
                still[group].append(program)
                looked += 1
                if self.passes(program, now):
                    continue
                break
            engines = [number for number in open_ if self._takes(fleet.engines[number]) >= needs]
            placement = self.prefers(program, fleet, engines)
            assert placement.engine is not None
            program.admitted, program.leaving = True, False
            program.held_s += now - program.waiting[0].arrives_s
            fleet.move(program, placement.engine)
            self._count(program, fleet, now)
            if shares is not None:
                program.charged_tokens = program.context_tokens
                shares.charge(group, program.context_tokens)
            released += [(request, placement) for request in program.waiting]
            program.waiting = []
            most = self._most(fleet, open_)
        for group, queue in list(queues.items()):
            queue[: positions[group]] = still[group]
            if not queue:
                del queues[group]
        if shares is not None:
            shares.wait(queues)
        return released

    def _sharing(self, model: str, fleet: Fleet, engines: list[int]) -> FairShares | None:
        """The counters of the groups that share a model's engines; None while there is only one, or none waits."""
        if not self.fair or len(fleet.groups) < 2 or not self._queues[model]:
            self._shares.pop(model, None)
            return None
        shares = self._shares.get(model)
        if shares is None:
            caches = sum(fleet.engines[number].cache_tokens for number in engines)
            shares = self._shares[model] = FairShares(fleet.weights, caches)
            for number in engines:
                for program in fleet.engines[number].programs.values():
                    if program.admitted:
                        program.charged_tokens = program.context_tokens
                        shares.charge(program.group, program.context_tokens)
        shares.wait(self._queues[model])
        return shares

    def _next(
        self,
        queues: Mapping[str, list[Program]],
        positions: Mapping[str, int],
        shares: FairShares | None,
        fleet: Fleet,
        now: float,
    ) -> str | None:
        """The group whose next program is looked at; None if there is none."""
        left = {group: queue[positions[group]] for group, queue in queues.items() if positions[group] < len(queue)}
        if len(left) < 2 or shares is None:
            return min(left, key=lambda group: self._order(left[group], fleet, now), default=None)
        order = sorted(((self._order(program, fleet, now), group) for group, program in left.items()))
        return shares.next({group: (key[0], key) for key, group in order})

    def _order(self, program: Program, fleet: Fleet, now: float) -> tuple[Any, ...]:
        """Whether it can wait, and what orders it: the lowest goes first."""
        if self.fair and program.deadline_at < math.inf:
            needs_s = fleet.workload.of_type(program.group).needs_s(program.steps)
            if presses(program.deadline_at - now, needs_s):
                return (False, program.deadline_at, *self.queue_key(program, now))
        return (True, 0.0, *self.queue_key(program, now))

    def _charge(self, program: Program) -> None:
        """Counts what an admitted program has grown by as service."""
        shares = self._shares.get(program.model)
        if shares is not None and program.charged_tokens is not None:
            shares.charge(program.group, max(0.0, program.context_tokens - program.charged_tokens))
            program.charged_tokens = max(program.charged_tokens, program.context_tokens)

    def _most(self, fleet: Fleet, engines: list[int]) -> float:
        return max((self._takes(fleet.engines[number]) for number in engines), default=-math.inf)

    def _takes(self, engine: FleetEngine) -> float:
        """Tokens that an engine takes; any number if no program counts on it."""
        return math.inf if engine.load_tokens < 1 else self._room(engine)

    def _room(self, engine: FleetEngine) -> float:
        return engine.cache_tokens - engine.load_tokens

    def _count(self, program: Program, fleet: Fleet, now: float) -> None:
        fleet.count(program, self.size(program, fleet) * self.weight(program, now))

    def _pause(self, program: Program, fleet: Fleet) -> None:
        program.admitted, program.leaving, program.charged_tokens = False, False, None
        fleet.count(program, 0.0)


class ProgramScheduling(Programs):
    """As vllm-router schedules programs: admitted by arrival; a program idle for `idle_s` no longer counts.

    Its progress TTL is fixed: it knows no return times.
    """

    idle_s = 30.0

    def weight(self, program: Program, now: float) -> float:
        """Whole until its time to live is over."""
        return 0.0 if program.phase is Phase.TOOL and now - program.since_s > self.idle_s else 1.0


class ThunderAgent(Programs):
    """ThunderAgent's rule with the additions of its public code."""

    buffer_tokens = 100
    fair = False

    def weight(self, program: Program, now: float) -> float:
        """2^-t in a tool call of t seconds (eq. 7)."""
        return float(2.0 ** -min(1000.0, now - program.since_s)) if program.phase is Phase.TOOL else 1.0

    def queue_key(self, program: Program, now: float) -> tuple[Any, ...]:
        """Programs with steps first, then the shortest context (eq. 11)."""
        return (not program.steps, program.context_tokens, program.name)


class ForecastPrograms(Programs):
    """Ours: forecast remaining work orders the queue, forecast return times weigh programs in tool calls.

    Attributes:
        keep_s: seconds still away that halve a weight.
        unknown_s: taken for an unknown return time.
        least_weight: below it a program gives up its place.
        patience_s: seconds of waiting that raise a program one level.
        ahead: steps whose growth is reserved.
    """

    tick_s: float | None = 1.0
    keep_s = 10.0
    unknown_s = 1.0
    least_weight = 0.1
    patience_s = 60.0
    ahead = 2.0

    def weight(self, program: Program, now: float) -> float:
        """2^(-d/keep_s), d being the seconds for which it will still be away, times the probability that it returns.

        Returns count as exponential with the forecast median for that probability.
        """
        if program.phase is not Phase.TOOL:
            return 1.0
        away_s = now - program.since_s
        return_s = self.unknown_s if math.isnan(program.return_s) else program.return_s
        left_s = return_s - away_s if away_s < return_s else away_s - return_s
        weight = 2.0 ** -min(1000.0, left_s / self.keep_s)
        if program.end:
            later = (1.0 - program.end) * 2.0 ** -min(1000.0, away_s / max(return_s, 1e-3))
            weight *= later / (later + program.end)
        return float(weight)

    def queue_key(self, program: Program, now: float) -> tuple[Any, ...]:
        """By level of waiting, then forecast remaining work, then arrival."""
        level = math.floor(self._waited_s(program, now) / self.patience_s)
        return (-level, program.remaining_tokens, program.arrived_s, program.name)

    def prefers(self, program: Program, fleet: Fleet, engines: list[int]) -> Placement:
        """Its engine if it has room; else the one that begins it soonest, and of equals the one with most room."""
        if program.engine in engines:
            return Placement(program.engine, BACK)
        soonest = min(engines, key=lambda n: (fleet.engines[n].queue_s, -self._room(fleet.engines[n]), n))
        return Placement(soonest, SOONEST)

    def size(self, program: Program, fleet: Fleet) -> float:
        """Its context `ahead` steps later."""
        return super().size(program, fleet) + self.ahead * fleet.mean_growth

    def gone(self, program: Program, now: float) -> bool:
        """Whether its weight is nearly 0."""
        return self.weight(program, now) < self.least_weight

    def passes(self, program: Program, now: float) -> bool:
        """Until it has waited a level."""
        return self._waited_s(program, now) < self.patience_s

    def _waited_s(self, program: Program, now: float) -> float:
        return program.held_s + now - program.waiting[0].arrives_s
