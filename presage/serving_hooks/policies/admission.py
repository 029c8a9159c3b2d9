"""Admission: holds workflows back, or pauses them while their tool runs, when that raises throughput.

Source: ThunderAgent, §4.3 and appendix E. Programs are paused when their contexts no longer fit the cache: those that
wait for a tool, the smallest first (least to compute again: their eq. 10), the weight of a waiting one decaying
exponentially with its wait (eq. 7; appendix E.1), and restored when there is room.

Where we depart.
- Not fitting is no reason by itself. Holding back saves recomputation and empties the decode batch. Both are computed
  (throughput.py) from measured rates, from forecast working sets, and from the share that was lost at such a load, for
  every number of workflows that might run. Some are held only if that number promises `margin` more steps a second than
  letting all run, after what the pauses cost. Without measurements nobody is held.
- Footprints are those forecast for the next step, not those of the last; the half-life of a pause is its forecast
  length where there is one.
- Restored first is who has least work left by forecast, not who has the shortest context.

None starves. A workflow's waits add up over its life, and every `patience_s` of them put it one level up; the line is
sorted by level first. So nobody is let in before one that has waited `patience_s` longer. Who was let in has HEAD_START
levels at least, and stays until it ends or another is above that: rounds in which everybody is let in for a while make
each compute its prompt again. Requests being computed are never touched, and one workflow at least may always run, so
the line moves whenever a step or a workflow ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError, InputError
from presage.serving_hooks.counts import ADMISSION_CHANGES, ADMISSION_DECISIONS, AdmissionChange, EventCounts
from presage.serving_hooks.policies.throughput import MissCurve, Rates, steps_per_s


class Phase(Enum):
    """Where a workflow is."""

    STEP = "step"  # its request is being computed
    TOOL = "tool"  # it waits for a tool
    READY = "ready"  # its request has not been started, or was preempted


@dataclass(frozen=True, slots=True)
class Workflow:
    """What a decision must know of one workflow.

    Attributes:
        id: of the workflow.
        phase: where it is.
        since: when it came there, seconds of the caller's clock.
        footprint_tokens: its working set, cache included, forecast for its next step.
        remaining_tokens: predicted output tokens of all its steps left; infinity if unknown.
        pause_s: forecast length of its present tool call, None if unknown.
    """

    id: str
    phase: Phase
    since: float
    footprint_tokens: float
    remaining_tokens: float = math.inf
    pause_s: float | None = None


PHASES: Final = tuple(Phase)
STEP, TOOL, READY = range(3)
"""Phases as numbers, in the order of PHASES."""
NUMBER: Final = {phase: number for number, phase in enumerate(PHASES)}

_FACTS: Final = np.dtype([("phase", "i1"), ("since", "f8"), ("footprint", "f8"), ("remaining", "f8"), ("pause", "f8")])
_WAITS: Final = np.dtype([("total", "f8"), ("since", "f8"), ("inside", "?")])
_NO_WAIT: Final = (0.0, math.nan, False)
_FIRST_ROOM: Final = 64


class WorkflowColumns:
    """All workflows that a decision is over, in columns: deciding over a thousand is a few operations on arrays.

    A workflow keeps its row until it ends, so what has not changed is not written again. Rows of ended ones are used
    anew.

    Attributes:
        facts: `Workflow` in columns; a pause of NaN is unknown.
        waits: how long each has been kept from running, since when it is (NaN where it is not), and whether it was let
            in by the last decision.
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

    def __iter__(self) -> Iterator[Workflow]:
        """One after the other, as they came."""
        for name, row in self._rows.items():
            phase, since, footprint, remaining, pause = self.facts[row].item()
            yield Workflow(name, PHASES[phase], since, footprint, remaining, None if math.isnan(pause) else pause)

    def row(self, name: str) -> int | None:
        """Where a workflow stands; None where it is not there."""
        return self._rows.get(name)

    def rows(self) -> NDArray[np.intp]:
        """Of all of them, as they came."""
        return np.fromiter(self._rows.values(), np.intp, len(self._rows))

    def names(self, rows: NDArray[np.intp]) -> list[Any]:
        """Who stands in these rows."""
        return [self._ids[row] for row in rows.tolist()]

    def put(
        self, name: str, phase: Phase, since: float, footprint: float, remaining: float, pause: float | None
    ) -> int:
        """What is known of a workflow now; its row."""
        row = self.place(name)
        self.facts[row] = NUMBER[phase], since, footprint, remaining, math.nan if pause is None else pause
        return row

    def place(self, name: str) -> int:
        """The row of a workflow, which may be new; what is known of it is then to be written there."""
        row = self._rows.get(name)
        return self._enter(name) if row is None else row

    def drop(self, name: str) -> None:
        """It has ended. No error if it is not there."""
        row = self._rows.pop(name, None)
        if row is not None:
            self._ids[row] = None
            self._free.append(row)

    def _enter(self, name: str) -> int:
        if not self._free:
            have = len(self._ids)
            room = max(_FIRST_ROOM, 2 * have)
            # Not by `resize`, which fails where somebody still looks at a column.
            self.facts = np.concatenate([self.facts, np.zeros(room - have, _FACTS)])
            self.waits = np.concatenate([self.waits, np.zeros(room - have, _WAITS)])
            self._ids += [None] * (room - have)
            self._free = list(range(room - 1, have - 1, -1))
        row = self._rows[name] = self._free.pop()
        self._ids[row] = name
        self.waits[row] = _NO_WAIT
        return row


FULL: Final = "the cache would lose more than the batch would gain"
PAUSED: Final = "paused while its tool runs: others need the cache more"

HEAD_START: Final = 4
"""The level at least of who was let in: to put it back for others that wait longer loses what it has in the cache."""


@dataclass(frozen=True)
class AdmissionConfig:
    """Settings.

    Attributes:
        margin: holding must promise this much more steps a second than not holding, as a share; promises that differ
            by less are alike.
        patience_s: seconds of waiting that put a workflow a level up.
        horizon_s: seconds over which a pause must earn back what it makes the engine compute again.
        half_life_s: of the weight of a workflow in a tool call of unknown length (ThunderAgent's decay).
        forget_s: how long a measured share of losses counts.
    """

    margin: float = 0.1
    patience_s: float = 60.0
    horizon_s: float = 30.0
    half_life_s: float = 10.0
    forget_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("patience_s", "horizon_s", "half_life_s", "forget_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give seconds above 0")
        if not self.margin >= 0:
            raise ConfigurationError(f"margin is {self.margin}; give 0 or more")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected if so many workflows may run: their load on the cache, the share lost, steps a second.

    Nothing measured, no steps a second.
    """

    workflows: int
    load: float
    miss_share: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Who may run and who may not.

    Attributes:
        run: those that may take their next step as soon as they like.
        held: the others, each with the reason.
        chosen: what is expected of it, once steps being computed beyond its number are over.
        everybody: what is expected of letting all run.
    """

    run: frozenset[str]
    held: Mapping[str, str]
    chosen: Outlook
    everybody: Outlook


@dataclass
class Admission:
    """Decides again and again: when a workflow comes, goes, or changes its phase, or a few times a second.

    Args:
        cache_tokens: what the cache holds.
        config: settings.

    Attributes:
        counts: decisions, those that held somebody, workflows held, paused and restored.
        load: on the cache of those that may run since the last decision.
        crowd: all workflows decided on that have not ended, and their waits.
    """

    cache_tokens: float
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    counts: EventCounts = field(default_factory=EventCounts)
    load: float = 0.0
    crowd: WorkflowColumns = field(default_factory=WorkflowColumns, repr=False)
    _curve: MissCurve = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.cache_tokens > 0:
            raise InputError(f"cache_tokens is {self.cache_tokens}; give what the cache holds, above 0")
        self._curve = MissCurve(self.config.forget_s)

    def observe(self, lost_tokens: float, reusable_tokens: float, now: float, load: float | None = None) -> None:
        """Prompts could have reused so many tokens, and so many of them were prefilled.

        Args:
            lost_tokens: that were prefilled.
            reusable_tokens: that an endless cache would have had.
            now: seconds.
            load: on the cache while they were lost; None takes that of the last decision. What a workflow lost while
                it was held says nothing of any load, and is not to be told here.
        """
        self._curve.observe(self.load if load is None else load, lost_tokens, reusable_tokens, now)

    def waited_s(self, workflow: Workflow, now: float) -> float:
        """Seconds a workflow has been kept from taking a step, over its life."""
        row = self.crowd.row(workflow.id)
        if row is None:
            return 0.0
        total, since, _ = self.crowd.waits[row].item()
        held = not math.isnan(since) and workflow.phase is Phase.READY
        return float(total + now - max(since, workflow.since) if held else total)

    def end(self, workflow: str) -> None:
        """The workflow has ended. No error if it is not there."""
        self.crowd.drop(workflow)

    def decide(self, workflows: Iterable[Workflow], rates: Rates | None, now: float) -> Decision:
        """Who of all active workflows may run from now on; all of them while `rates` are None, not yet measured.

        Args:
            workflows: all of them; `crowd`, if it was kept up to date.
            rates: as measured.
            now: seconds.
        """
        crowd = self.crowd
        if workflows is not crowd:
            rows = [
                crowd.put(w.id, w.phase, w.since, w.footprint_tokens, w.remaining_tokens, w.pause_s) for w in workflows
            ]
            line, must = self._line(np.array(rows, np.intp), now)
        else:
            line, must = self._line(crowd.rows(), now)
        if not len(line):
            nothing = Outlook(0, 0.0, 0.0, 0.0)
            return Decision(frozenset(), {}, nothing, nothing)
        count = np.arange(1, len(line) + 1, dtype=np.float64)
        load = np.cumsum(self._weights(line, now)) / self.cache_tokens
        share = self._curve.share(load, now)
        best, per_s = len(line) - 1, np.zeros(len(line))
        if rates is not None:
            per_s = steps_per_s(rates, self.cache_tokens, count, share)
            worth = per_s * np.maximum(0.0, self.config.horizon_s - self._again_s(line, now, rates))
            as_good = worth.max() / (1 + self.config.margin)
            if as_good > worth[-1]:
                best = int(np.argmax(worth >= as_good))
        running = max(best + 1, must)
        self.load = float(load[running - 1])
        self._remember(line, running, now)

        def outlook(at: int) -> Outlook:
            return Outlook(at + 1, float(load[at]), float(share[at]), float(per_s[at]))

        tool = crowd.facts["phase"][line[running:]] == TOOL
        held = {w: PAUSED if t else FULL for w, t in zip(crowd.names(line[running:]), tool.tolist(), strict=True)}
        return Decision(frozenset(crowd.names(line[:running])), held, outlook(best), outlook(len(line) - 1))

    def _line(self, rows: NDArray[np.intp], now: float) -> tuple[NDArray[np.intp], int]:
        """All workflows, who runs first first; and how many at least run: those whose request is being computed.

        Then those that were let in, since the cache has what they need: first who is ready, the least work left first,
        then who is in a tool call, large ones first, as the small are paused first. Then the others that want to run,
        the least work left first. Levels go before all that. Whoever was paused stays so while its tool runs.
        """
        facts, waits = self.crowd.facts[rows], self.crowd.waits[rows]
        phase, since = facts["phase"], facts["since"]
        step, tool, held = phase == STEP, phase == TOOL, ~np.isnan(waits["since"])
        began = np.maximum(np.where(held, waits["since"], 0.0), since)
        waited = np.where(held & (phase == READY), waits["total"] + now - began, waits["total"])
        level = np.floor(waited / self.config.patience_s)
        # One number for the first three things that decide: the group, the level, and who comes before whom in it.
        place = np.where(tool, 1.0, np.where(waits["inside"], 0.0, 2.0))
        place -= 3.0 * np.where(waits["inside"], np.maximum(level, HEAD_START), level)
        place = np.where(step, -np.inf, np.where(held & tool, np.inf, place))
        work = np.where(tool, np.where(held, 0.0, -facts["footprint"]), facts["remaining"])
        order = np.lexsort((since, work, place))
        self._settle_ties(rows, order, (place, work, since))
        return rows[order], int(np.count_nonzero(step))

    def _settle_ties(
        self, rows: NDArray[np.intp], order: NDArray[np.intp], keys: tuple[NDArray[np.float64], ...]
    ) -> None:
        """Equals go by name, so that a decision does not hang on who stands in which row."""
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

    def _weights(self, line: NDArray[np.intp], now: float) -> NDArray[np.float64]:
        facts = self.crowd.facts[line]
        half_life_s = np.where(facts["pause"] > 0, facts["pause"], self.config.half_life_s)
        decay = np.exp2(-np.maximum(0.0, now - facts["since"]) / np.maximum(half_life_s, 1e-3))
        return np.asarray(facts["footprint"] * np.where(facts["phase"] == TOOL, decay, 1.0))

    def _again_s(self, line: NDArray[np.intp], now: float, rates: Rates) -> NDArray[np.float64]:
        """Seconds to compute again what is still cached of those newly stopped, if the first 1, 2, … run.

        Of what they hold the share is cached that is not lost at the load there was until now.
        """
        facts, waits = self.crowd.facts[line], self.crowd.waits[line]
        ours = np.isnan(waits["since"]) & ((facts["phase"] == TOOL) | ((facts["phase"] == READY) & waits["inside"]))
        pauses = np.where(ours, facts["footprint"], 0.0)
        lost = self._curve.share(np.array([self.load]), now)
        return np.asarray(rates.prefill_token_s * (1 - lost) * (np.sum(pauses) - np.cumsum(pauses)))

    def _remember(self, line: NDArray[np.intp], running: int, now: float) -> None:
        facts, waits = self.crowd.facts, self.crowd.waits
        held = ~np.isnan(waits["since"][line])
        self.counts.add(ADMISSION_DECISIONS, "all")
        self.counts.add(ADMISSION_DECISIONS, "held", times=running < len(line))
        restored, stopped = line[:running][held[:running]], line[running:][~held[running:]]
        ready = restored[facts["phase"][restored] == READY]
        began = np.maximum(waits["since"][ready], facts["since"][ready])
        waits["total"][ready] = waits["total"][ready] + now - began
        waits["since"][restored] = np.nan
        waits["since"][stopped] = now
        waits["inside"] = False
        waits["inside"][line[:running]] = True
        paused = int(np.count_nonzero(facts["phase"][stopped] == TOOL))
        changes: tuple[tuple[AdmissionChange, int], ...] = (
            ("restored", len(restored)),
            ("paused", paused),
            ("held", len(stopped) - paused),
        )
        for change, times in changes:
            if times:
                self.counts.add(ADMISSION_CHANGES, change, times=times)
