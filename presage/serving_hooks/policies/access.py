"""Which agents of which workflows touch which blocks: A_w(c) of PBKV (§4.2.2), for groups of blocks.

Blocks with the same access map form one group and are scored once. A touch moves blocks to the group of their new map.
Ours also tells the blocks that an agent's latest step touched from those that only earlier steps of it did
(`score.STALE`): a compacted or abandoned conversation is not read again, whoever comes next.

Within one workflow, groups of equal maps are merged. A group of several workflows is split if an agent touches only a
part of it, and never merged again. Methods return the groups whose place in the eviction order may have changed. Block
ids must be distinct within a call. Most running workflows are idle, so small collections are kept without a dict.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from presage.serving_hooks.policies.next_use import ReturnCurve, Stage
from presage.serving_hooks.policies.score import STALE, UNKNOWN, Lookahead

NO_AGENTS: Final[frozenset[str]] = frozenset()


class Use(NamedTuple):
    """An active workflow's use of a group: the agents that touch it, and what it adds to the score; see `Worth`."""

    agents: frozenset[str]
    score: int


NOT_KNOWN: Final = -1
"""The score of a use by a workflow without forecasts."""

PER_S: Final = 2**40
"""The score of one expected use a second, as an integer: sums stay exact, and waits of decades differ."""

_NO_STAGE: Final = Stage(0.0, 0.0, math.inf)

FEW: Final = 5
"""Up to so many free blocks of a group are kept in a tuple: the smallest dict takes three times the memory."""

_NO_USES: Final[dict[str, Use]] = {}
_NO_GROUPS: Final[dict[int, Group]] = {}


@dataclass(slots=True, eq=False)
class Group:
    """Blocks with one access map.

    Nearly all groups have at most one active workflow, whose use is stored in the group itself.

    Attributes:
        id: rises with creation.
        users: number of workflows that ever touched it, ended ones included.
        sole: its only active workflow; None if it has none or several.
        agents: of `sole` that touch it.
        many: use by each of several active workflows; else empty and read-only.
        score: that of `sole`, or the sum over `many` without unknown ones; see `AccessIndex.worth`.
        free: its free blocks, the first freed first; change them through `unpacked`.
        stale: whether `sole` has had a new forecast since the group was scored; see `AccessIndex.score`.
        holes: blocks evicted from the front of `free` since it was last rebuilt.
        last_use, freed_at: stamp and time of the last time blocks of it were freed.
        due: when its next use is expected, seconds of the caller's clock, if it has a valid entry by that.
        entry: its valid entry in an eviction order, or None.
    """

    id: int
    users: int = 0
    size: int = 0
    sole: str | None = None
    agents: frozenset[str] = NO_AGENTS
    many: dict[str, Use] = field(default_factory=lambda: _NO_USES)
    score: int = 0
    free: dict[int, None] | tuple[int, ...] = ()
    stale: bool = False
    holes: int = 0
    last_use: int = 0
    freed_at: float = 0.0
    due: float = 0.0
    entry: bytes | None = None

    @property
    def workflows(self) -> Collection[str]:
        """Its active workflows."""
        return self.many if self.sole is None else (self.sole,)

    def agents_of(self, workflow: str) -> frozenset[str] | None:
        """The agents of a workflow that touch it; None if none ever did, or the workflow has ended."""
        if workflow == self.sole:
            return self.agents
        use = self.many.get(workflow)
        return None if use is None else use.agents

    def put(self, workflow: str, agents: frozenset[str], score: int) -> None:
        """Sets the use of an active workflow."""
        if self.sole == workflow or (self.sole is None and not self.many):
            self.sole, self.agents, self.score = workflow, agents, score
            return
        if self.sole is not None:
            self.many = {self.sole: Use(self.agents, self.score)}
            self.sole, self.agents, self.score = None, NO_AGENTS, max(0, self.score)
        before = self.many.get(workflow)
        self.score += max(0, score) - (0 if before is None else max(0, before.score))
        self.many[workflow] = Use(agents, score)

    def leave(self, workflow: str) -> None:
        """Removes an active workflow that has ended."""
        if workflow == self.sole:
            self.sole, self.agents, self.score, self.stale = None, NO_AGENTS, 0, False
            return
        self.score -= max(0, self.many.pop(workflow).score)
        if len(self.many) == 1:
            ((self.sole, (self.agents, self.score)),) = self.many.items()
            self.many = _NO_USES

    def unpacked(self) -> dict[int, None]:
        """`free` as a mutable dict; it is packed again when blocks are freed."""
        if isinstance(self.free, tuple):
            self.free, self.holes = dict.fromkeys(self.free), 0
        return self.free

    def pack(self) -> None:
        """Turns a small `free` into a tuple."""
        if len(self.free) <= FEW:
            self.free = tuple(self.free)


@dataclass(slots=True, eq=False)
class ActiveWorkflow:
    """An active workflow: its groups and its forecasts.

    Attributes:
        lookahead: of its next agents.
        curve: of its return time from `since`, seconds of the caller's clock; None if unknown.
        stage: of the curve; the latest that has begun.
        step_s: expected seconds from one of its steps to the next.
        uses: by agents what the lookahead expects of blocks that they touch; see `AccessIndex.worth`.
        rated: changes of the learnt rates by which `uses` was computed.
        turns: stages begun, over all its curves.
        private: groups that no other workflow ever touched, one for each set of agents that touch them; few.
        shared: the other groups by id; read-only if empty.
        written: the group of the last new blocks.
    """

    lookahead: Lookahead = UNKNOWN
    curve: ReturnCurve | None = None
    since: float = 0.0
    stage: Stage = _NO_STAGE
    step_s: float = 0.0
    uses: dict[frozenset[str], tuple[float, float]] = field(default_factory=dict)
    rated: int = 0
    turns: int = 0
    private: tuple[Group, ...] = ()
    shared: dict[int, Group] = field(default_factory=lambda: _NO_GROUPS)
    written: Group | None = None

    @property
    def groups(self) -> Sequence[Group]:
        """Private and shared groups."""
        return (*self.private, *self.shared.values()) if self.shared else self.private

    def own(self, agents: frozenset[str]) -> Group | None:
        """The private group that exactly these agents touch, or None."""
        for group in self.private:
            if group.agents == agents:
                return group
        return None

    def add(self, group: Group) -> None:
        """Adds a group that the workflow touches; no change if it has it."""
        if group.users > 1:
            if not self.shared:
                self.shared = {}
            self.shared[group.id] = group
        elif group not in self.private:
            self.private = (*self.private, group)

    def remove(self, group: Group) -> None:
        """Removes a group, from either collection."""
        if self.shared.pop(group.id, None) is None:
            self.private = tuple(other for other in self.private if other is not group)


Parts = Mapping[Group | None, list[int]]
"""Block ids by group; None for blocks without one."""


@lru_cache(maxsize=4096)  # workflows of one type have the same few sets, of 216 bytes or more each
def _joined(agents: frozenset[str], agent: str) -> frozenset[str]:
    """The union, cached so that groups share one copy."""
    return agents - {agent + STALE} | {agent}


@lru_cache(maxsize=4096)
def _stale(agents: frozenset[str], agent: str) -> frozenset[str]:
    return agents - {agent} | {agent + STALE}


def _coarse(probability: float) -> float:
    """A probability, rounded up to a power of √2.

    A block is useless without those before it in its prompt. Within a workflow, small differences must not evict the
    beginning of a prompt before its end; where probabilities are equal, the blocks freed first go first.
    """
    return math.sqrt(2.0) ** math.ceil(2.0 * math.log2(probability) - 1e-9)


class Touched(NamedTuple):
    """Of the blocks of a workflow, how many a step of an agent finds, and of how many: those that the agent's latest
    step touched, those that only earlier ones did, and the others."""

    latest_found: int
    latest: int
    earlier_found: int
    earlier: int
    others_found: int
    others: int


class AccessIndex:
    """Groups of a cache of `blocks` blocks.

    Args:
        by_score: whether the score is eq. 2 of PBKV; else that of the expected wait for a use.

    Attributes:
        group_of: the group of each block id; None for an empty or untouched block.
    """

    def __init__(self, blocks: int, by_score: bool) -> None:
        self.by_score = by_score
        self.group_of: list[Group | None] = [None] * blocks
        self.running: dict[str, ActiveWorkflow] = {}
        self.by_id: dict[int, Group] = {}
        self._next = 0

    def by_group(self, blocks: Sequence[int]) -> Parts:
        """These blocks by group, as `touch` and `untouched` take them; valid until the next change."""
        parts: dict[Group | None, list[int]] = {}
        for group, run in groupby(blocks, self.group_of.__getitem__):
            parts.setdefault(group, []).extend(run)
        return parts

    def write(self, workflow: str, agent: str, blocks: Sequence[int]) -> bool:
        """A fast path of `touch`: `agent` continues to write new blocks, and no group changes its place.

        False, without a change, if the blocks are not new or the last written group has other users.
        """
        running = self.running.get(workflow)
        group = running.written if running is not None else None
        if group is None or group.sole != workflow or group.users != 1:
            return False
        if len(group.agents) != 1 or agent not in group.agents:
            return False
        group_of = self.group_of
        for block in blocks:
            if group_of[block] is not None:
                return False
        for block in blocks:
            group_of[block] = group
        group.size += len(blocks)
        return True

    def touch(self, workflow: str, agent: str, parts: Parts) -> list[Group]:
        """Records that `agent` of `workflow` reads or has written these blocks. Free blocks stay free."""
        running = self.running.get(workflow)
        if running is None:
            running = self.running[workflow] = ActiveWorkflow()
        changed = []
        for group, part in parts.items():
            before = group.agents_of(workflow) if group is not None else None
            if before is not None and agent in before:
                continue
            agents = _joined(NO_AGENTS if before is None else before, agent)
            alone = group is None or (group.users == 1 and before is not None)
            target = running.own(agents) if alone else None
            if target is None:
                if group is not None:
                    target = group if len(part) == group.size else self._split(group)
                else:
                    target = self._new()
                self._relabel(workflow, running, target, agents)
            if group is None:
                running.written = target
            if target is not group:
                self._move(part, group, target)
                changed.append(target)
            if group is not None:
                changed.append(group)
        return changed

    def touched(self, workflow: str, agent: str, parts: Parts) -> Touched:
        """How many blocks of `workflow` a step of `agent` finds (`parts`), and of how many."""
        counts, running = [0] * 6, self.running.get(workflow)
        for group in running.groups if running is not None else ():
            agents = group.agents_of(workflow) or NO_AGENTS
            place = 0 if agent in agents else 2 if agent + STALE in agents else 4
            counts[place] += len(parts[group]) if group in parts else 0
            counts[place + 1] += group.size
        return Touched(*counts)

    def begin(self, workflow: str, agent: str, parts: Parts) -> list[Group]:
        """A step of `agent` begins with these blocks of its prompt: records the touch, and which blocks it left out.

        Those are free: an engine has taken the blocks of a prompt out of the free ones before.
        """
        running, left = self.running.get(workflow), []
        for group in running.private if running is not None else ():
            if agent in group.agents and group.free and group.sole == workflow:
                left.append(group)
        changed = self.touch(workflow, agent, parts)
        for group in left:
            assert running is not None
            agents = _stale(group.agents, agent)
            target = running.own(agents)
            if target is None:
                target = group if len(group.free) == group.size else self._split(group)
                self._relabel(workflow, running, target, agents)
            if target is not group:
                self._move(list(group.free), group, target)
                changed.append(group)
            changed.append(target)
        return changed

    def forecast(
        self, workflow: str, lookahead: Lookahead, curve: ReturnCurve | None, since: float, step_s: float, now: float
    ) -> Iterable[Group]:
        """Stores a new forecast of a workflow; returns its groups, which it scores again."""
        running = self.running.get(workflow)
        if running is None:
            running = self.running[workflow] = ActiveWorkflow()
        running.lookahead, running.curve, running.since, running.step_s = lookahead, curve, since, step_s
        running.uses = {}
        return self.advance(workflow, running, now)

    def advance(self, workflow: str, running: ActiveWorkflow, now: float) -> Iterable[Group]:
        """Moves the return time of a workflow to its present stage; returns its groups, which it scores again."""
        running.turns += 1
        running.stage = _NO_STAGE if running.curve is None else running.curve.at(max(0.0, now - running.since))
        worth_of: dict[frozenset[str], int] = {}  # shared groups may have equal agents
        groups = running.groups
        for group in groups:
            alone = group.sole is not None
            if alone and not group.free:
                group.stale = True  # no free block: score it when one is freed
                continue
            agents = group.agents if alone else group.many[workflow].agents
            worth = worth_of.get(agents)
            if worth is None:
                worth = worth_of[agents] = self.worth(running, agents)
            group.put(workflow, agents, worth)
            group.stale = False
        return groups

    def worth(self, running: ActiveWorkflow, agents: frozenset[str]) -> int:
        """What a workflow adds to the score of blocks that `agents` touch.

        Eq. 2 in 1 / UNIT; or PER_S / the expected wait for a use, 0 if none is expected, NOT_KNOWN without a forecast.
        """
        if self.by_score:
            return running.lookahead.score(agents)
        if running.rated != running.lookahead.changes:
            running.uses, running.rated = {}, running.lookahead.changes
        scale_and_delay = running.uses.get(agents)
        if scale_and_delay is None:
            use = running.lookahead.first_use(agents)
            scale = PER_S * _coarse(use.probability) if use.probability else 0.0
            scale_and_delay = running.uses[agents] = scale, (round(2.0 * use.step) / 2.0 - 1.0) * running.step_s
        scale, later_s = scale_and_delay
        if not scale:
            return 0
        if running.curve is None:
            return NOT_KNOWN
        return max(1, round(scale / (running.stage.wait_s + later_s)))

    def score(self, group: Group) -> int:
        """The score of a group by current forecasts; a stale one is computed again."""
        if group.stale and group.sole is not None:
            group.stale = False
            group.score = self.worth(self.running[group.sole], group.agents)
        return group.score

    def end(self, workflow: str) -> Iterable[Group]:
        """Removes an ended workflow from its groups, which it returns. An unknown workflow is ignored."""
        running = self.running.pop(workflow, None)
        if running is None:
            return ()
        groups = running.groups
        for group in groups:
            group.leave(workflow)
        return groups

    def forget(self, group: Group, blocks: Sequence[int]) -> None:
        """Removes blocks whose content is lost from `group`; they must not be free."""
        group_of = self.group_of
        for block in blocks:
            group_of[block] = None
        group.size -= len(blocks)
        if not group.size:
            self._drop(group)

    def kind(self, group: Group) -> str:
        """The class of a group's blocks, one of `eviction.CLASSES`."""
        if group.sole is None and not group.many:
            return "retired"
        if self.by_score:
            workflows = group.many if group.sole is None else (group.sole,)
            if any(self.running[workflow].lookahead.has_forecast for workflow in workflows):
                return "forecast"
            return "unknown" if group.score else "unowned"
        if group.score > 0:
            return "forecast"
        unknown = group.score < 0 or any(use.score < 0 for use in group.many.values())
        return "unknown" if unknown else "unowned"

    def due(self, group: Group, now: float) -> float:
        """When the next use of a group with a score above 0 is expected, seconds of the caller's clock.

        The uses of a second by several workflows add up.
        """
        wait_s = PER_S / group.score
        if group.sole is None:
            return now + wait_s
        running = self.running[group.sole]
        return running.since + running.stage.began_s + wait_s

    def _new(self) -> Group:
        self._next += 1
        group = self.by_id[self._next] = Group(self._next)
        return group

    def _split(self, group: Group) -> Group:
        """A new empty group with the same map."""
        target = self._new()
        target.users, target.score, target.last_use, target.freed_at, target.stale = (
            group.users,
            group.score,
            group.last_use,
            group.freed_at,
            group.stale,
        )
        target.sole, target.agents = group.sole, group.agents
        if group.many:
            target.many = dict(group.many)
        for workflow in group.workflows:
            self.running[workflow].add(target)
        return target

    def _relabel(self, workflow: str, running: ActiveWorkflow, group: Group, agents: frozenset[str]) -> None:
        """Sets the agents of one workflow that touch a group; updates its score and number of users."""
        self.score(group)
        if group.agents_of(workflow) is None:
            group.users += 1
            if group.users == 2:  # it becomes shared; its workflow may have ended
                for other in group.workflows:
                    self.running[other].remove(group)
                    self.running[other].add(group)
        group.put(workflow, agents, self.worth(running, agents))
        running.add(group)

    def _move(self, part: list[int], group: Group | None, target: Group) -> None:
        group_of = self.group_of
        for block in part:
            group_of[block] = target
        target.size += len(part)
        if group is None:
            return
        group.size -= len(part)
        if group.free:
            ours, theirs = group.unpacked(), target.unpacked()
            for block in part:
                if block in ours:
                    del ours[block]
                    theirs[block] = None
            group.pack()
            target.pack()
        if not group.size:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        for workflow in group.workflows:
            self.running[workflow].remove(group)
        group.sole, group.many, group.entry = None, {}, None
        del self.by_id[group.id]
