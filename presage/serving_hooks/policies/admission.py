"""Who may run: workflows are held back, or paused while their tool runs, when that pays.

Source: ThunderAgent, §4.3 and appendix E. Programs are paused when their contexts no longer fit the cache: those that
wait for a tool, the smallest first (least to compute again: their eq. 10), the weight of a waiting one decaying
exponentially with its wait (eq. 7; appendix E.1), and restored when there is room.

Where we depart.
- Not fitting is no reason by itself. Holding back saves recomputation and empties the decode batch. Both are computed
  (throughput.py) from measured rates, from forecast working sets, and from the share that was lost at such a load
  (miss_curve.py), for every number of workflows that might run. Some are held only if that number promises `margin`
  more steps a second than letting all run, after what the pauses cost. Without measurements nobody is held.
- Footprints are those forecast for the next step, not those of the last; the half-life of a pause is its forecast
  length where there is one.
- Restored first is who has least work left by forecast, not who has the shortest context.

None starves. A workflow's waits add up over its life, and every `patience_s` of them put it one level up; the line is
sorted by level first. So nobody is let in, or kept running through a tool call, before one that has waited `patience_s`
longer. Requests being computed are never touched, and one workflow at least may always run, so the line moves
whenever a step or a workflow ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError, InputError
from presage.serving_hooks.policies.miss_curve import MissCurve
from presage.serving_hooks.policies.throughput import Rates, steps_per_s

FULL: Final = "the cache would lose more than the batch would gain"
PAUSED: Final = "paused while its tool runs: others need the cache more"


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


@dataclass(frozen=True)
class AdmissionConfig:
    """Settings.

    Attributes:
        margin: holding must promise this much more steps a second than not holding, as a share.
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


@dataclass(slots=True)
class _Wait:
    """How long a workflow has been kept from running, and since when it is."""

    total_s: float = 0.0
    since: float | None = None

    def seconds(self, workflow: Workflow, now: float) -> float:
        """A wait begins when the workflow is ready and held; while its tool runs it loses nothing."""
        if self.since is None or workflow.phase is not Phase.READY:
            return self.total_s
        return self.total_s + now - max(self.since, workflow.since)


@dataclass
class Admission:
    """Decides again and again: when a workflow comes, goes, or changes its phase, or a few times a second.

    Args:
        cache_tokens: what the cache holds.
        config: settings.

    Attributes:
        counts: decisions, those that held somebody, workflows held, paused and restored.
        load: on the cache of those that may run since the last decision.
    """

    cache_tokens: float
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    counts: Counter[str] = field(default_factory=Counter)
    load: float = 0.0
    _waits: dict[str, _Wait] = field(default_factory=dict, repr=False)
    _inside: frozenset[str] = field(default=frozenset(), repr=False)
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
        wait = self._waits.get(workflow.id)
        return wait.seconds(workflow, now) if wait else 0.0

    def end(self, workflow: str) -> None:
        """The workflow has ended. No error if it is not there."""
        self._waits.pop(workflow, None)

    def decide(self, workflows: Iterable[Workflow], rates: Rates | None, now: float) -> Decision:
        """Who of all active workflows may run from now on; all of them while `rates` are None, not yet measured."""
        line, must = self._line(workflows, now)
        if not line:
            nothing = Outlook(0, 0.0, 0.0, 0.0)
            return Decision(frozenset(), {}, nothing, nothing)
        count = np.arange(1, len(line) + 1, dtype=np.float64)
        load = np.cumsum([self._weight(workflow, now) for workflow in line]) / self.cache_tokens
        share = self._curve.share(load, now)
        best, per_s = len(line) - 1, np.zeros(len(line))
        if rates is not None:
            per_s = steps_per_s(rates, self.cache_tokens, count, share)
            worth = per_s * np.maximum(0.0, self.config.horizon_s - self._again_s(line, share, rates))
            if worth.max() > worth[-1] * (1 + self.config.margin):
                best = int(np.argmax(worth))
        running = max(best + 1, must)
        self.load = float(load[running - 1])
        self._remember(line, running, now)

        def outlook(at: int) -> Outlook:
            return Outlook(at + 1, float(load[at]), float(share[at]), float(per_s[at]))

        held = {w.id: PAUSED if w.phase is Phase.TOOL else FULL for w in line[running:]}
        self._inside = frozenset(w.id for w in line[:running])
        return Decision(self._inside, held, outlook(best), outlook(len(line) - 1))

    def _line(self, workflows: Iterable[Workflow], now: float) -> tuple[list[Workflow], int]:
        """All workflows, who runs first first; and how many at least run: those whose request is being computed.

        Then those that were let in, since the cache has what they need: first who is ready, the least work left first,
        then who is in a tool call, large ones first, as the small are paused first. Then the others that want to run,
        the least work left first. Whoever was paused stays so while its tool runs.
        """

        def place(w: Workflow) -> tuple[float, ...]:
            if w.phase is Phase.STEP:
                return 0, 0, 0, w.remaining_tokens
            held = self._is_held(w.id)
            if held and w.phase is Phase.TOOL:
                return 2, 0, 0, 0.0
            level = math.floor(self.waited_s(w, now) / self.config.patience_s)
            if w.phase is Phase.TOOL:
                return 1, -level, 1, -w.footprint_tokens
            return 1, -level, 0 if w.id in self._inside else 2, w.remaining_tokens

        line = sorted(workflows, key=lambda w: (place(w), w.since, w.id))
        return line, sum(w.phase is Phase.STEP for w in line)

    def _weight(self, workflow: Workflow, now: float) -> float:
        if workflow.phase is not Phase.TOOL:
            return workflow.footprint_tokens
        half_life_s = max(workflow.pause_s or self.config.half_life_s, 1e-3)
        return workflow.footprint_tokens * math.exp2(-max(0.0, now - workflow.since) / half_life_s)

    def _again_s(self, line: Sequence[Workflow], share: NDArray[np.float64], rates: Rates) -> NDArray[np.float64]:
        """Seconds to compute again what is still cached of newly paused workflows, if the first 1, 2, … run."""
        pauses = [w.footprint_tokens if w.phase is Phase.TOOL and not self._is_held(w.id) else 0.0 for w in line]
        after = np.sum(pauses) - np.cumsum(pauses)
        return np.asarray(rates.prefill_token_s * (1 - share) * after)

    def _is_held(self, workflow: str) -> bool:
        wait = self._waits.get(workflow)
        return wait is not None and wait.since is not None

    def _remember(self, line: Sequence[Workflow], running: int, now: float) -> None:
        self.counts["decisions"] += 1
        self.counts["decisions that held somebody"] += running < len(line)
        for workflow in line[:running]:
            if self._is_held(workflow.id):
                wait = self._waits[workflow.id]
                wait.total_s, wait.since = wait.seconds(workflow, now), None
                self.counts["restored"] += 1
        for workflow in line[running:]:
            wait = self._waits.setdefault(workflow.id, _Wait())
            if wait.since is None:
                wait.since = now
                self.counts["paused" if workflow.phase is Phase.TOOL else "held"] += 1
