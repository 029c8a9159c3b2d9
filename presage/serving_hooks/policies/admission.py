"""Admission control: holds workflows back, or pauses them while their tool runs, if that raises throughput.

Source: ThunderAgent, §4.3 and appendix E: when contexts no longer fit the cache, it pauses programs that wait for a
tool, the smallest first (least to recompute: eq. 10); the weight of a waiting program decays exponentially with its
wait (eq. 7; appendix E.1). Departures from the paper:

- Holding workflows saves recomputation but shrinks the decode batch. For every number of running workflows the model of
  `throughput.py` weighs both, from measured rates, forecast working sets, and the share lost at such a load. Workflows
  are held only if that promises `margin` more steps a second than running all, net of the cost of pauses.
- Footprints are forecasts for the next step, not those of the last; the half-life of a pause is its forecast length, if
  there is a forecast.
- The workflow with the least forecast work left is restored first, not the one with the shortest context.

No request is held beyond its bound, counted from its arrival (`wait_bounds.py`): then its workflow must run, and
another is held in its place at its next step. So overload spreads over all workflows as waits of bounded length.

No workflow starves. A workflow's waits add up over its life, and every `patience_s` of waiting raises it one level; the
queue is sorted by level first. So no workflow is admitted before one that has waited `patience_s` longer. An admitted
workflow has at least level HEAD_START, and stays until it ends or another rises above: taking turns would make each
workflow recompute its prompt. Requests being computed are never interrupted, and at least one workflow may always run,
so the queue advances whenever a step or a workflow ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, AdmissionChange, EventCounts
from presage.serving_hooks.policies.throughput import MissCurve, Rates, steps_per_s


class Phase(IntEnum):
    """What a workflow is doing."""

    STEP = 0  # its request is being computed
    TOOL = 1  # it waits for a tool
    READY = 2  # its request has not started, or was preempted


_FACTS: Final = np.dtype(
    [("phase", "i1"), ("since", "f8"), ("footprint", "f8"), ("remaining", "f8"), ("pause", "f8"), ("bound", "f8")]
)
_WAITS: Final = np.dtype([("total", "f8"), ("since", "f8"), ("inside", "?")])
_NO_WAIT: Final = (0.0, math.nan, False)
_FIRST_ROOM: Final = 64


class WorkflowColumns:
    """All running workflows in columns, so that a decision takes a few array operations.

    A workflow keeps its row until it ends, so only changes are written. Rows of ended workflows are reused.

    Attributes:
        facts: the phase and since when; the footprint, forecast tokens of the working set of the next step, cached
            ones included; the remaining output tokens, infinity if unknown; the forecast seconds of the current tool
            call (pause), NaN if unknown; the seconds for which a ready request may be held (bound), NaN by default.
        waits: seconds held in all, since when it is held (NaN if it is not), and whether the last decision admitted it.
    """

    __slots__ = ("_free", "_ids", "_rows", "facts", "waits")

    def __init__(self) -> None:
        self.facts = np.zeros(0, _FACTS)
        self.waits = np.zeros(0, _WAITS)
        self._ids: list[str | None] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> NDArray[np.intp]:
        """The rows of all workflows in the order of their arrival."""
        return np.fromiter(self._rows.values(), np.intp, len(self._rows))

    def names(self, rows: NDArray[np.intp]) -> list[Any]:
        """The workflows in these rows."""
        return [self._ids[row] for row in rows.tolist()]

    def place(self, name: str) -> int:
        """The row of a workflow, allocated if new; the caller fills a new row."""
        row = self._rows.get(name)
        if row is not None:
            return row
        if not self._free:
            have = len(self._ids)
            room = max(_FIRST_ROOM, 2 * have)
            # `resize` would fail while a view of a column exists.
            self.facts = np.concatenate([self.facts, np.zeros(room - have, _FACTS)])
            self.waits = np.concatenate([self.waits, np.zeros(room - have, _WAITS)])
            self._ids += [None] * (room - have)
            self._free = list(range(room - 1, have - 1, -1))
        row = self._rows[name] = self._free.pop()
        self._ids[row] = name
        self.waits[row] = _NO_WAIT
        return row

    def drop(self, name: str) -> None:
        """Frees the row of an ended workflow. An unknown workflow is ignored."""
        row = self._rows.pop(name, None)
        if row is not None:
            self._ids[row] = None
            self._free.append(row)


FULL: Final = "the cache would lose more than the batch would gain"
PAUSED: Final = "paused while its tool runs: others need the cache more"

HEAD_START: Final = 4
"""The least level of an admitted workflow, since pausing it for others loses what it has in the cache."""


@dataclass(frozen=True)
class AdmissionConfig:
    """Settings.

    Attributes:
        margin: the share by which holding must raise steps a second over running all; smaller differences are ignored.
            0 by default, since bounded holds cost little where the difference is small.
        patience_s: seconds of waiting that raise a workflow one level.
        horizon_s: seconds within which a pause must repay the recomputation it causes.
        half_life_s: of the weight of a workflow in a tool call of unknown length (ThunderAgent's decay).
        forget_s: how long a measured lost share counts.
    """

    margin: float = 0.0
    patience_s: float = 60.0
    horizon_s: float = 30.0
    half_life_s: float = 10.0
    forget_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected load on the cache, lost share and steps a second (0 until rates are measured)."""

    workflows: int
    load: float
    miss_share: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The workflows that may run and those that are held.

    Attributes:
        held: by workflow, the reason.
        chosen: the outlook of this decision, once excess steps being computed have ended.
        everybody: the outlook of running all.
    """

    run: frozenset[str]
    held: Mapping[str, str]
    chosen: Outlook
    everybody: Outlook


@dataclass
class Admission:
    """Decides which workflows may run.

    Attributes:
        load: on the cache by the workflows that the last decision lets run.
        crowd: all running workflows and their waits; the caller keeps it up to date.
    """

    cache_tokens: float
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    counts: EventCounts = field(default_factory=EventCounts)
    load: float = 0.0
    crowd: WorkflowColumns = field(default_factory=WorkflowColumns, repr=False)
    _curve: MissCurve = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._curve = MissCurve(self.config.forget_s)

    def observe(self, lost_tokens: float, reusable_tokens: float, now: float, load: float | None = None) -> None:
        """Records that of the tokens an infinite cache would have held, prompts had to prefill some again.

        `load` is that on the cache while they were lost; None for that of the last decision. Omit what a workflow lost
        while it was held, which no load explains.
        """
        self._curve.observe(self.load if load is None else load, lost_tokens, reusable_tokens, now)

    def decide(self, rates: Rates | None, now: float, bound_s: float = math.inf) -> Decision:
        """Decides which of the workflows in `crowd` may run; all of them while `rates`, as measured, is None.

        `bound_s` is the default bound: seconds for which a ready request may be held.
        """
        crowd = self.crowd
        queue, must = self._queue(now, bound_s)
        if not len(queue):
            nothing = Outlook(0, 0.0, 0.0, 0.0)
            return Decision(frozenset(), {}, nothing, nothing)
        count = np.arange(1, len(queue) + 1, dtype=np.float64)
        load = np.cumsum(self._weights(queue, now)) / self.cache_tokens
        share = self._curve.share(load, now)
        best, per_s = len(queue) - 1, np.zeros(len(queue))
        if rates is not None:
            per_s = steps_per_s(rates, self.cache_tokens, count, share)
            worth = per_s * np.maximum(0.0, self.config.horizon_s - self._recompute_s(queue, now, rates))
            as_good = worth.max() / (1 + self.config.margin)
            if as_good > worth[-1]:
                best = int(np.argmax(worth >= as_good))
        running = max(best + 1, must)
        self.load = float(load[running - 1])
        self._update_waits(queue, running, now)

        def outlook(at: int) -> Outlook:
            return Outlook(at + 1, float(load[at]), float(share[at]), float(per_s[at]))

        tool = crowd.facts["phase"][queue[running:]] == Phase.TOOL
        held = {w: PAUSED if t else FULL for w, t in zip(crowd.names(queue[running:]), tool.tolist(), strict=True)}
        return Decision(frozenset(crowd.names(queue[:running])), held, outlook(best), outlook(len(queue) - 1))

    def _queue(self, now: float, bound_s: float) -> tuple[NDArray[np.intp], int]:
        """The rows in the order in which they may run, and how many must run.

        Workflows whose request is being computed, or has waited as long as it may, come first, and must run. Then
        admitted ones, whose tokens are cached: ready ones by rising work left, then those in a tool call, the largest
        first, as the smallest are paused first. Then other ready ones by rising work left. Levels take precedence over
        this order. A workflow paused in its tool call stays paused until the tool returns.
        """
        rows = self.crowd.rows()
        facts, waits = self.crowd.facts[rows], self.crowd.waits[rows]
        phase, since = facts["phase"], facts["since"]
        bounds = np.where(np.isnan(facts["bound"]), bound_s, facts["bound"])
        must = (phase == Phase.STEP) | ((phase == Phase.READY) & (now - since >= bounds))
        tool, held = phase == Phase.TOOL, ~np.isnan(waits["since"])
        began = np.maximum(np.where(held, waits["since"], 0.0), since)
        waited = np.where(held & (phase == Phase.READY), waits["total"] + now - began, waits["total"])
        level = np.floor(waited / self.config.patience_s)
        # One number for the first three criteria: the group, the level, and the order of phases within it.
        place = np.where(tool, 1.0, np.where(waits["inside"], 0.0, 2.0))
        place -= 3.0 * np.where(waits["inside"], np.maximum(level, HEAD_START), level)
        place = np.where(must, -np.inf, np.where(held & tool, np.inf, place))
        work = np.where(tool, np.where(held, 0.0, -facts["footprint"]), facts["remaining"])
        order = np.lexsort((since, work, place))
        self._break_ties(rows, order, (place, work, since))
        return rows[order], int(np.count_nonzero(must))

    def _break_ties(
        self, rows: NDArray[np.intp], order: NDArray[np.intp], keys: tuple[NDArray[np.float64], ...]
    ) -> None:
        """Sorts equal workflows by name, so that a decision does not depend on row numbers."""
        same = np.ones(max(0, len(order) - 1), np.bool_)
        for key in keys:
            of = key[order]
            same &= of[1:] == of[:-1]
        if not same.any():
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():
            run = order[first : last + 1]
            names = self.crowd.names(rows[run])
            order[first : last + 1] = run[sorted(range(len(names)), key=names.__getitem__)]

    def _weights(self, queue: NDArray[np.intp], now: float) -> NDArray[np.float64]:
        facts = self.crowd.facts[queue]
        half_life_s = np.where(facts["pause"] > 0, facts["pause"], self.config.half_life_s)
        decay = np.exp2(-np.maximum(0.0, now - facts["since"]) / np.maximum(half_life_s, 1e-3))
        return np.asarray(facts["footprint"] * np.where(facts["phase"] == Phase.TOOL, decay, 1.0))

    def _recompute_s(self, queue: NDArray[np.intp], now: float, rates: Rates) -> NDArray[np.float64]:
        """Seconds to recompute the cached tokens of newly stopped workflows, if the first 1, 2, … run.

        Of their tokens, the share not lost at the load of the last decision is cached.
        """
        facts, waits = self.crowd.facts[queue], self.crowd.waits[queue]
        phase = facts["phase"]
        ours = np.isnan(waits["since"]) & ((phase == Phase.TOOL) | ((phase == Phase.READY) & waits["inside"]))
        pauses = np.where(ours, facts["footprint"], 0.0)
        lost = self._curve.share(np.array([self.load]), now)
        return np.asarray(rates.prefill_token_s * (1 - lost) * (np.sum(pauses) - np.cumsum(pauses)))

    def _update_waits(self, queue: NDArray[np.intp], running: int, now: float) -> None:
        facts, waits = self.crowd.facts, self.crowd.waits
        held = ~np.isnan(waits["since"][queue])
        self.counts.add(ADMISSION_DECISIONS, "all")
        self.counts.add(ADMISSION_DECISIONS, "held", times=running < len(queue))
        restored, stopped = queue[:running][held[:running]], queue[running:][~held[running:]]
        ready = restored[facts["phase"][restored] == Phase.READY]
        began = np.maximum(waits["since"][ready], facts["since"][ready])
        waits["total"][ready] = waits["total"][ready] + now - began
        waits["since"][restored] = np.nan
        waits["since"][stopped] = now
        waits["inside"] = False
        waits["inside"][queue[:running]] = True
        paused = int(np.count_nonzero(facts["phase"][stopped] == Phase.TOOL))
        changes: tuple[tuple[AdmissionChange, int], ...] = (
            ("restored", len(restored)),
            ("paused", paused),
            ("held", len(stopped) - paused),
        )
        for change, times in changes:
            if times:
                self.counts.add(ADMISSION_CHANGES, change, times=times)
