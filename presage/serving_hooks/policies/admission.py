"""Admission control: how many workflows may be open, and which; the others wait at the door or pause.

Where the contexts of all workflows exceed the cache, vLLM computes them again and again, and stays so: thrashing has a
steady state of its own. `steady_state.py` tells for every number of open workflows where the engine would settle, from
measured costs, pauses and losses, and from the contexts that workflows are expected to grow to. The policy opens as
many as give the most steps a second, and nobody waits unless that gains more than `least_gain`.

ThunderAgent (§4.3) pauses programs once contexts no longer fit, the smallest first. Departures: load is what settles,
not the sum of present contexts, which thrashing itself makes look busy; new workflows wait before any that has begun is
paused; those that have begun are paused only where the engine is far from its best, between two steps, the one that
began last first; and a paused one is restored before a new one starts. New ones begin by their expected contexts in
powers of two, the smallest first; of like size, and of those that have begun, the first that came goes first; where all
would thrash, the smallest of those that have begun. Where tenants or workflow types compete, whose workflow is next
follows from the service that they have received (`fair_shares.py`), and these orders hold within it.

A workflow that would miss its deadline if it waited on goes before all others of its tenant, the earliest deadline
first, and no longer once it has missed it. That is assumed from twice the seconds on that it is expected to take.

A workflow waits for as long over its life as its bound says (`wait_bounds.py`), not longer, unless the engine spends
more than `DOMINATES` of its time on lost contexts, or would if all ran. Whoever is overdue then goes before all others
of its tenant, so nobody starves: what is ahead of it only shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, AdmissionChange, EventCounts
from presage.serving_hooks.policies.fair_shares import FairShares, Weights
from presage.serving_hooks.policies.steady_state import Rates, settle
from presage.serving_hooks.policies.wait_bounds import presses
from presage.serving_hooks.policies.workload import MOST_WRONG


class Phase(IntEnum):
    """What a workflow is doing."""

    STEP = 0  # its request is being computed
    TOOL = 1  # it waits for a tool
    READY = 2  # its request has not started, or was preempted


_FACTS: Final = np.dtype(
    [
        *(("phase", "i1"), ("since", "f8"), ("begun", "?"), ("own", "f8"), ("context", "f8"), ("bound", "f8")),
        *(("deadline", "f8"), ("needs", "f8"), ("silent", "f8")),
    ]
)
_WAITS: Final = np.dtype([("total", "f8"), ("since", "f8"), ("inside", "?"), ("charged", "f8"), ("group", "i8")])
_NO_WAIT: Final = (0.0, math.nan, False, 0.0)
_FIRST_ROOM: Final = 64


class WorkflowColumns:
    """All running workflows in columns, so that a decision takes a few array operations.

    Any hashable object may stand for a workflow. It keeps its row until it ends, so only changes are written. Rows of
    ended workflows are reused.

    Attributes:
        facts: the phase and since when; whether a step of it has begun; its own tokens, which no other workflow has;
            how many it will have in the mean over what is left of it (context); the seconds for which it may wait over
            its life (bound); when it has to have ended (deadline, infinity without), the seconds that it is expected
            to take if it does not wait (needs); and the probability that nobody will tell its end (silent).
        waits: seconds held in all, since when it is held (NaN if it is not), whether the last decision admitted it, its
            tokens that count as received service since then (charged), and the number of its group.
        groups: names by number: tenant and workflow type, between which service is shared.
    """

    __slots__ = ("_free", "_numbers", "_rows", "_sizes", "_workflows", "facts", "groups", "waits")

    def __init__(self) -> None:
        self.facts = np.zeros(0, _FACTS)
        self.waits = np.zeros(0, _WAITS)
        self._workflows: list[Any] = []
        self._rows: dict[Any, int] = {}
        self._free: list[int] = []
        self.groups: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        """The workflows in the order of their arrival."""
        return iter(self._rows)

    def rows(self) -> NDArray[np.intp]:
        """The rows of all workflows in the order of their arrival."""
        return np.fromiter(self._rows.values(), np.intp, len(self._rows))

    def at(self, rows: NDArray[np.intp]) -> list[Any]:
        """The workflows in these rows."""
        return [self._workflows[row] for row in rows.tolist()]

    def place(self, workflow: Any, group: str = "") -> int:
        """The row of a workflow, allocated if new; the caller fills a new row. Its group stays the first one given."""
        row = self._rows.get(workflow)
        if row is not None:
            return row
        if not self._free:
            have = len(self._workflows)
            room = max(_FIRST_ROOM, 2 * have)
            # `resize` would fail while a view of a column exists.
            self.facts = np.concatenate([self.facts, np.zeros(room - have, _FACTS)])
            self.waits = np.concatenate([self.waits, np.zeros(room - have, _WAITS)])
            self._workflows += [None] * (room - have)
            self._free = list(range(room - 1, have - 1, -1))
        row = self._rows[workflow] = self._free.pop()
        self._workflows[row] = workflow
        number = self._numbers.get(group)
        if number is None:
            number = self._numbers[group] = max(self.groups, default=-1) + 1
            self.groups[number] = group
        self._sizes[number] = self._sizes.get(number, 0) + 1
        self.waits[row] = *_NO_WAIT, number
        return row

    def clear(self) -> None:
        """Frees all rows."""
        self.__init__()  # type: ignore[misc]

    def drop(self, workflow: Any) -> None:
        """Frees the row of an ended workflow. An unknown workflow is ignored."""
        row = self._rows.pop(workflow, None)
        if row is not None:
            self._workflows[row] = None
            self._free.append(row)
            number = int(self.waits["group"][row])
            self._sizes[number] -= 1
            if not self._sizes[number]:
                del self._sizes[number], self._numbers[self.groups.pop(number)]


FULL: Final = "the cache would lose more than the batch would gain"
PAUSED: Final = "paused between two steps: the engine computes lost contexts again and again"
AWAY: Final = "away for longer than its place is worth to others"
_WHY: Final = (FULL, PAUSED, AWAY)

_AS_GOOD: Final = 0.02
"""Of the numbers of open workflows whose steps a second are within this share of the best, the largest is chosen."""
_STAY: Final = 0.1
"""The last choice stays while it is within this share of the best: workflows in turn cost a context each."""
_EVIDENCE: Final = 0.1
"""Share of the engine's seconds spent on lost contexts from which workflows begin to wait: where less is lost, the
most that waiting could gain is about as much, whatever the model promises."""
_CONTEXTS: Final = np.array([0.8, 1.0, 1.25, 1.5])
"""Factors by which the expected context may be wrong; steps a second are the mean over them."""
_NUMBERS: Final = 32
_UNEXPECTED: Final = 0.2
"""Difference between the lost share and the expected one from which contexts count otherwise."""
_LEARN_PER_S: Final = 0.05
"""By how much, times that difference."""
_FORGET_S: Final = 120.0
"""Half-life of that."""
DOMINATES: Final = 0.25
"""Share of the engine's seconds spent on lost contexts, now or if all ran, from which bounds on waits are suspended."""
_THRASHING: Final = 0.4
"""The share if all ran from which those that have begun go on by the size of their contexts."""
_HOPELESS: Final = 0.5
"""The share, while some are held, from which the open ones are taken for longer than most."""
_OLDER: Final = 2.0
"""Times the mean context that those of the open ones must then have: what is far above it is no spread of sizes."""
_KEEPS: Final = np.array([0.5, 0.75, 0.9, 0.95, 1.0])
"""Quantiles of the latest pauses, of which one is chosen: who is away for longer gives up its place."""
_UNMEASURED_S: Final = 30.0
"""Seconds after which a workflow that is away counts as gone, before pauses are measured."""
_LAG: Final = 1.0
"""Caches by which a workflow type may be behind others of its tenant; see `FairShares`."""
_LEAST_CACHE: Final = 0.2
"""Share of the cache that counts as left if shared blocks seem to take more."""


@dataclass(frozen=True)
class AdmissionConfig:
    """Settings.

    Attributes:
        least_gain: the share by which waiting must raise steps a second; below it nobody waits.
        every_s: seconds between two choices of the number of open workflows.
        weights: shares of tenants and workflow types.
    """

    least_gain: float = 0.15
    every_s: float = 2.0
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where so many open workflows settle: contexts by cache, share lost, steps a second, seconds a context stays.

    All are 0 until rates are measured. A workflow that is away for longer than `keeps_s` gives up its place.
    """

    workflows: int
    load: float = 0.0
    miss_share: float = 0.0
    steps_per_s: float = 0.0
    stays_s: float = 0.0
    keeps_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The workflows that may run and those that are held.

    Attributes:
        held: by workflow, the reason.
        overdue: of these, those that have waited for as long as they may, but bounds are suspended.
        pressed: of these, those that would miss their deadline if they waited on.
        chosen: the outlook of the number that was chosen.
        everybody: the outlook of letting all run.
    """

    run: frozenset[Any]
    held: Mapping[Any, str]
    overdue: int
    pressed: int
    chosen: Outlook
    everybody: Outlook


@dataclass
class Admission:
    """Decides which workflows may run.

    Attributes:
        workflows: all running workflows and their waits; the caller keeps it up to date.
        limit: how many may be open; infinity while nobody needs to wait.
        keeps_s: seconds after which a workflow that is away gives up its place.
        opened: how many the last decision let run, less those that have ended without a word, in the mean.
        longer: factor by which contexts seem to be longer, or shorter, than counted.
    """

    cache_tokens: float
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    counts: EventCounts = field(default_factory=EventCounts)
    workflows: WorkflowColumns = field(default_factory=WorkflowColumns, repr=False)
    limit: float = math.inf
    keeps_s: float = math.inf
    opened: float = 0.0
    longer: float = 1.0
    _far: bool = False
    _rates: Rates | None = None
    _recomputing_share: float = 0.0
    _would_lose: float = 0.0
    _shown: bool = False
    _learnt_s: float = math.inf
    _longest_s: float = math.inf
    _next_s: float = -math.inf
    _outlooks: tuple[Outlook, Outlook] = (Outlook(0), Outlook(0))
    _shares: FairShares = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._shares = FairShares(self.config.weights, _LAG * self.cache_tokens)

    @property
    def is_full(self) -> bool:
        """Whether a workflow that comes now has to wait for the next decision."""
        return self.opened >= self.limit

    def is_due(self, now: float) -> bool:
        """Whether it is time to choose again how many may be open."""
        return now >= self._next_s

    def choose(
        self, rates: Rates | None, recomputing_share: float, shared_tokens: float, now: float, known: bool = False
    ) -> None:
        """Chooses how many of the workflows in `workflows` may be open.

        While `rates` is None, as many as fit the cache if it is `known` what they grow to, else all of them.
        `recomputing_share` is that of the engine's seconds spent on lost contexts lately; `shared_tokens` are those of
        the cache that several workflows use, each once.
        """
        self._rates, self._recomputing_share = rates, recomputing_share
        self._next_s = now + self.config.every_s
        rows = self.workflows.rows()
        facts, inside = self.workflows.facts[rows], self.workflows.waits["inside"][rows]
        self._longest_s = _UNMEASURED_S if rates is None else float(rates.pauses_s[-1])
        # Whoever is away for longer than all lately is not counted, whatever its client tells of ends.
        here = _here(facts, rates, now) * ~_away(facts, self._longest_s, now)
        opened = here * ((inside & ~_away(facts, self.keeps_s, now)) | (facts["phase"] == Phase.STEP))
        everybody, at_present = math.ceil(here.sum()), math.ceil(opened.sum())
        cache = max(_LEAST_CACHE * self.cache_tokens, self.cache_tokens - shared_tokens)
        before, kept_s = self.limit, self.keeps_s
        self.limit, self.keeps_s, self._far, self._would_lose = math.inf, self._longest_s, False, 0.0
        self._outlooks = Outlook(everybody), Outlook(everybody)
        if rates is None and known and everybody:
            self.limit = max(1.0, cache // _mean(facts["context"], here))
        if rates is None or not everybody:
            return
        context = _mean(facts["context"], here) * self.longer
        own = _mean(facts["own"], opened) * self.longer if at_present else context
        of_open = context
        if at_present and before < math.inf and recomputing_share >= _HOPELESS:
            # Those that are held do not help, so the open ones are longer than most will be: where all were submitted
            # together they are of one age, while those that wait have hardly begun.
            of_open = _mean(facts["context"], opened) * self.longer
            of_open = of_open if of_open >= _OLDER * context else context
        # Two outlooks: the expected contexts with all open, and the present ones with those that are.
        expected = settle(
            rates,
            cache,
            np.repeat([float(everybody), float(max(1, at_present))], len(_CONTEXTS)),
            np.concatenate([context * _CONTEXTS, own * _CONTEXTS]),
            np.repeat([math.inf, kept_s], len(_CONTEXTS)),
        )
        lost, steps_per_s, stays_s, recomputing = (
            figure.reshape(2, -1).mean(axis=1)
            for figure in (expected.miss_share, expected.steps_per_s, expected.stays_s, expected.recomputing)
        )
        if at_present:
            self._learn(rates.miss_share - float(lost[1]), now)
        load = everybody * context / cache
        all_run = Outlook(everybody, load, float(lost[0]), float(steps_per_s[0]), float(stays_s[0]), self._longest_s)
        self._outlooks = all_run, all_run
        self._would_lose = float(recomputing[0])
        if recomputing[0] <= self.config.least_gain / (1 + self.config.least_gain):
            return  # even if nothing was lost, the gain would be less
        most = max(2 * _NUMBERS, 2 * everybody)
        numbers = np.unique(np.round(np.geomspace(1, most, _NUMBERS)).astype(int)).astype(np.float64)
        keeps = np.unique(np.quantile(rates.pauses_s, _KEEPS))
        grid = np.meshgrid(keeps, numbers, of_open * _CONTEXTS, indexing="ij")
        settled = settle(rates, cache, grid[1].ravel(), grid[2].ravel(), grid[0].ravel())
        # Workflows that are away give up places, but there are only so many to take them.
        cycle_s = float(rates.pauses_s.mean()) + settled.served_s
        per_s = np.minimum(settled.steps_per_s, everybody / cycle_s).reshape(grid[0].shape).mean(axis=2)
        best = float(per_s.max())
        row = int(np.flatnonzero(per_s.max(axis=1) >= best / (1 + _AS_GOOD))[-1])
        chosen = float(numbers[np.flatnonzero(per_s[row] >= best / (1 + _AS_GOOD))[-1]])
        if before < most:
            was = int(np.argmin(np.abs(keeps - kept_s)))
            if np.interp(before, numbers, per_s[was]) >= best / (1 + _STAY):
                row, chosen = was, before
        enough = best / (1 + self.config.least_gain)
        # While some are held the loss that this prevents does not show; what was held before any loss showed, since it
        # is known what contexts grow to, has to promise more.
        self._shown = recomputing_share >= _EVIDENCE or (before < math.inf and self._shown)
        believed = self._shown or (before < math.inf and self._would_lose >= _THRASHING)
        if believed and chosen < most and all_run.steps_per_s < enough:
            self.limit, self.keeps_s = chosen, float(keeps[row])
            self._far = at_present > chosen and float(np.interp(at_present, numbers, per_s[row])) < enough
            lost_then, steps_then, stays_then = (
                float(np.interp(chosen, numbers, figure.reshape(grid[0].shape)[row].mean(axis=1)))
                for figure in (settled.miss_share, settled.steps_per_s, settled.stays_s)
            )
            few = Outlook(int(chosen), chosen * of_open / cache, lost_then, steps_then, stays_then, self.keeps_s)
            self._outlooks = few, all_run

    def _learn(self, unexpected: float, now: float) -> None:
        """Contexts count as longer while prompts lose more than the open workflows should, and as shorter while less.

        Whatever is wrong, contexts, pauses or costs, shows as a difference in lost tokens.
        """
        passed_s = max(0.0, min(now - self._learnt_s, 5 * self.config.every_s))
        self._learnt_s = now
        self.longer **= 0.5 ** (passed_s / _FORGET_S)
        if abs(unexpected) > _UNEXPECTED:
            self.longer *= 1.0 + _LEARN_PER_S * passed_s * unexpected
            self.longer = min(max(self.longer, 1 / MOST_WRONG), MOST_WRONG)

    def decide(self, now: float) -> Decision:
        """Decides which of the workflows in `workflows` may run."""
        rows = self.workflows.rows()
        facts, waits = self.workflows.facts[rows], self.workflows.waits[rows]
        phase, begun = facts["phase"], facts["begun"]
        began = np.maximum(waits["since"], facts["since"])
        waited = waits["total"] + np.where(np.isnan(waits["since"]), 0.0, now - began)
        overdue = (phase == Phase.READY) & (waited >= facts["bound"])
        left_s = facts["deadline"] - now
        pressed = (phase == Phase.READY) & presses(left_s, facts["needs"])
        must = phase == Phase.STEP
        if max(self._recomputing_share, self._would_lose) < DOMINATES:
            must |= overdue
        away = _away(facts, self.keeps_s, now)
        inside = must | (waits["inside"] & ~away)
        here = _here(facts, self._rates, now)
        room = self.limit - here[inside].sum()
        if self.limit == math.inf:
            inside[:] = True
        elif room > 0:
            waiting = ~inside & (phase == Phase.READY)
            first = overdue | pressed
            late, hurry, old, new = map(
                np.flatnonzero,
                (waiting & overdue, waiting & pressed & ~overdue, waiting & ~first & begun, waiting & ~first & ~begun),
            )
            hurry = hurry[np.argsort(left_s[hurry], kind="stable")]
            if self._would_lose >= _THRASHING:
                old = old[np.argsort(facts["own"][old], kind="stable")]
            sizes = np.round(np.log2(np.maximum(1.0, facts["context"][new])))  # of like size: the first that came
            new = new[np.argsort(sizes, kind="stable")]
            in_order = np.concatenate([late, hurry, old, new])
            inside[self._fairly(in_order, len(late) + len(hurry), rows, int(room))] = True
        elif room < 0 and self._far:
            can = np.flatnonzero(inside & ~must)
            inside[can[max(0, len(can) + int(room)) :]] = False
        self.opened = float(here[inside].sum())
        self._count_service(rows, inside, phase)
        self._update_waits(rows[inside], rows[~inside], now)
        why = np.where(away, 2, begun)[~inside].tolist()  # numbers: arrays of texts take a millisecond
        held = {workflow: _WHY[reason] for workflow, reason in zip(self.workflows.at(rows[~inside]), why, strict=True)}
        run = frozenset(self.workflows.at(rows[inside]))
        outside = np.count_nonzero(overdue & ~inside), np.count_nonzero(pressed & ~inside)
        return Decision(run, held, int(outside[0]), int(outside[1]), *self._outlooks)

    def _fairly(
        self, in_order: NDArray[np.intp], cannot_wait: int, rows: NDArray[np.intp], room: int
    ) -> NDArray[np.intp]:
        """The first `room` of these workflows, by what their groups have received, in this order within each.

        The first `cannot_wait` of them go before all others of their tenant.
        """
        waits = self.workflows.waits
        group = waits["group"][rows[in_order]]
        if len(in_order) <= room or len(self.workflows.groups) < 2:
            return in_order[:room]
        by_group = np.argsort(group, kind="stable")
        numbers, starts = np.unique(group[by_group], return_index=True)
        names = [self.workflows.groups[number] for number in numbers.tolist()]
        lines = {name: iter(line.tolist()) for name, line in zip(names, np.split(by_group, starts[1:]), strict=True)}
        self._charge(rows)
        self._shares.wait(names)
        own = self.workflows.facts["own"][rows]
        places = {name: next(line) for name, line in lines.items()}
        heads = {
            name: (place >= cannot_wait, place)
            for name, place in sorted(places.items(), key=lambda name_and_place: name_and_place[1])
        }
        chosen: list[int] = []
        while len(chosen) < room:
            name = self._shares.next(heads)
            index = int(in_order[heads[name][1]])
            chosen.append(index)
            self._shares.charge(name, float(own[index]))
            waits["charged"][rows[index]] = own[index]
            place = next(lines[name], None)
            if place is None:
                del heads[name]
            else:
                heads[name] = place >= cannot_wait, place
        return np.array(chosen, np.intp)

    def _charge(self, rows: NDArray[np.intp]) -> None:
        """Counts what open workflows have grown by as service."""
        waits, own = self.workflows.waits, self.workflows.facts["own"]
        inside = rows[waits["inside"][rows]]
        grown = np.maximum(0.0, own[inside] - waits["charged"][inside])
        waits["charged"][inside] += grown
        groups, index = np.unique(waits["group"][inside], return_inverse=True)
        for number, tokens in zip(groups.tolist(), np.bincount(index, grown, len(groups)).tolist(), strict=True):
            self._shares.charge(self.workflows.groups[number], tokens)

    def _count_service(self, rows: NDArray[np.intp], inside: NDArray[np.bool_], phase: NDArray[Any]) -> None:
        """Counts service while groups compete; a workflow that gives up its place counts from nothing again."""
        waits = self.workflows.waits
        waiting = rows[~inside & (phase == Phase.READY)]
        if len(waiting) and len(self.workflows.groups) > 1:
            self._charge(rows)
            self._shares.wait([self.workflows.groups[group] for group in np.unique(waits["group"][waiting]).tolist()])
            waits["charged"][rows[~inside]] = 0.0
        elif self._shares.counting:
            self._shares.wait(())
            waits["charged"] = 0.0

    def _update_waits(self, running: NDArray[np.intp], stopped: NDArray[np.intp], now: float) -> None:
        facts, waits = self.workflows.facts, self.workflows.waits
        self.counts.add(ADMISSION_DECISIONS, "all")
        self.counts.add(ADMISSION_DECISIONS, "held", times=len(stopped) > 0)
        restored = running[~np.isnan(waits["since"][running])]
        stopped = stopped[np.isnan(waits["since"][stopped])]
        ready = restored[facts["phase"][restored] == Phase.READY]
        began = np.maximum(waits["since"][ready], facts["since"][ready])
        waits["total"][ready] = waits["total"][ready] + now - began
        waits["since"][restored] = np.nan
        waits["since"][stopped] = now
        waits["inside"] = False
        waits["inside"][running] = True
        paused = int(np.count_nonzero(facts["begun"][stopped]))
        changes: tuple[tuple[AdmissionChange, int], ...] = (
            ("restored", len(restored)),
            ("paused", paused),
            ("held", len(stopped) - paused),
        )
        for change, times in changes:
            if times:
                self.counts.add(ADMISSION_CHANGES, change, times=times)


def _away(facts: NDArray[Any], seconds: float, now: float) -> NDArray[np.bool_]:
    """Workflows that have had no request for longer."""
    return np.asarray((facts["phase"] == Phase.TOOL) & (now - facts["since"] > seconds))


def _here(facts: NDArray[Any], rates: Rates | None, now: float) -> NDArray[np.float64]:
    """The probability that each workflow has not ended without a word.

    Of those that go on the pauses tell how many are away for so long, of those that have ended all are: Bayes' theorem.
    """
    here = np.ones(len(facts))
    if rates is not None:
        away = np.flatnonzero((facts["phase"] == Phase.TOOL) & (facts["silent"] > 0))
        longer = 1.0 - np.searchsorted(rates.pauses_s, now - facts["since"][away]) / len(rates.pauses_s)
        goes_on = (1.0 - rates.end) * longer
        here[away] = goes_on / np.maximum(goes_on + rates.end * facts["silent"][away], np.finfo(np.float64).tiny)
    return here


def _mean(contexts: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The weighted mean of contexts, 1 token or more."""
    return max(1.0, float(contexts @ weights / weights.sum()))
