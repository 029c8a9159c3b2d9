"""Which workflow's which agents touch which blocks: the A_w(c) of PBKV (§4.2.2), for groups of blocks.

Blocks with the same access map are one group and are judged once. A touch moves blocks to the group of their new map:
within one workflow groups of equal maps are one (a prompt of twelve steps and three agents leaves a handful of groups,
not twelve); a group used by several workflows is split where only a part is touched, and never joined again.

Every group carries its score, the sum of what its active workflows add, and is corrected by the difference when one of
them changes. Methods answer with the groups whose place in an eviction order may have changed. Blocks are given by id
and must be distinct within a call. This file knows neither an order nor which blocks are free beyond carrying them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from presage.serving_hooks.policies.score import UNKNOWN, Lookahead

NOBODY: Final[frozenset[str]] = frozenset()

Parts = Mapping["Group | None", list[int]]
"""Blocks by the group they are in."""


@lru_cache(maxsize=4096)  # workflows of one type have the same few sets, of 216 bytes or more each
def _joined(agents: frozenset[str], agent: str) -> frozenset[str]:
    """These agents and this one: one copy for all groups."""
    return agents | {agent}


class Use(NamedTuple):
    """What one active workflow does with a group: the agents that touch it, and what that adds, in 1 / UNIT."""

    agents: frozenset[str]
    score: int
    moment: int


class Group:
    """Blocks with one access map.

    Attributes:
        id: rises with creation.
        users: workflows that ever touched it, ended ones included.
        uses: of each active workflow.
        size: blocks in it.
        score: Σ of its uses, in 1 / UNIT.
        free: those of its blocks that are free, the first freed first.
        stale: its one workflow has had a new forecast since it was scored; see `AccessIndex.score`.
        holes: blocks given up from the front of `free` since it was last rebuilt.
        last_use: stamp of the last time blocks of it were freed.
        entry: its valid entry in an eviction order, or None.
    """

    __slots__ = ("entry", "free", "holes", "id", "last_use", "score", "size", "stale", "users", "uses")

    def __init__(self, number: int, users: int, uses: dict[str, Use], score: int) -> None:
        self.id = number
        self.users = users
        self.uses = uses
        self.size = 0
        self.score = score
        self.stale = False
        self.free: dict[int, None] = {}
        self.holes = 0
        self.last_use = 0
        self.entry: bytes | None = None


class Running:
    """An active workflow: its groups, what its forecast adds to them, and when its next step is due.

    Attributes:
        lookahead: its forecast as scores.
        next_step_at: when its next step is expected to start, seconds of the caller's clock; 0 if unknown.
        step_s: expected seconds from one of its steps to the next.
        groups: by id.
        private: groups no other workflow ever touched, one for each set of agents that touch them; few, so a list.
        written: where the last new blocks went.
    """

    __slots__ = ("groups", "lookahead", "next_step_at", "private", "step_s", "written")

    def __init__(self) -> None:
        self.lookahead: Lookahead = UNKNOWN
        self.next_step_at = 0.0
        self.step_s = 0.0
        self.groups: dict[int, Group] = {}
        self.private: list[Group] = []
        self.written: Group | None = None

    def own(self, workflow: str, agents: frozenset[str]) -> Group | None:
        """The private group that these agents touch."""
        for group in self.private:
            if group.uses[workflow].agents == agents:
                return group
        return None


class AccessIndex:
    """Groups of a cache of `blocks` blocks.

    Attributes:
        group_of: of each block id; None for a block that holds nothing anybody touched.
        running: active workflows.
        by_id: the groups there are.
    """

    def __init__(self, blocks: int) -> None:
        self.group_of: list[Group | None] = [None] * blocks
        self.running: dict[str, Running] = {}
        self.by_id: dict[int, Group] = {}
        self._next = 0

    @property
    def groups(self) -> int:
        """How many there are."""
        return len(self.by_id)

    def by_group(self, blocks: Sequence[int]) -> Parts:
        """These blocks by group, to be handed to the next two before anything changes."""
        group_of = self.group_of
        if len(blocks) == 1:
            return {group_of[blocks[0]]: [blocks[0]]}
        parts: dict[Group | None, list[int]] = {}
        part: list[int] = []
        last: Group | int | None = 0  # no group
        for block in blocks:
            group = group_of[block]
            if group is not last:
                last, known = group, parts.get(group)
                if known is None:
                    known = parts[group] = []
                part = known
            part.append(block)
        return parts

    def write(self, workflow: str, agent: str, blocks: Sequence[int]) -> bool:
        """`agent` of `workflow` has written these blocks, nobody's so far, after others; False where that is not so.

        As `touch`, for what happens most: a step goes on to write, and nothing changes its place.
        """
        running = self.running.get(workflow)
        group = running.written if running is not None else None
        use = group.uses.get(workflow) if group is not None else None
        if group is None or use is None or group.users != 1 or len(use.agents) != 1 or agent not in use.agents:
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
        """`agent` of `workflow` reads or has written these blocks. A free block stays free."""
        running = self.running.get(workflow)
        if running is None:
            running = self.running[workflow] = Running()
        changed = []
        for group, part in parts.items():
            use = group.uses.get(workflow) if group is not None else None
            if use is not None and agent in use.agents:
                continue
            agents = _joined(NOBODY if use is None else use.agents, agent)
            alone = group is None or (group.users == 1 and use is not None)
            target = running.own(workflow, agents) if alone else None
            if target is None:
                if group is None:
                    target = self._new(0, {}, 0)
                else:
                    target = group if len(part) == group.size else self._split(group)
                self._relabel(workflow, running, target, agents)
            if group is None:
                running.written = target
            if target is not group:
                self._move(part, group, target)
                changed.append(target)
            if group is not None:
                changed.append(group)
        return changed

    def untouched(self, workflow: str, agent: str, parts: Parts) -> tuple[int, int]:
        """Blocks of `workflow` that `agent` has not touched: how many are among these, how many there are."""
        running = self.running.get(workflow)
        if running is None:
            return 0, 0
        found = others = 0
        for group in running.groups.values():
            if agent not in group.uses[workflow].agents:
                others += group.size
                if group in parts:
                    found += len(parts[group])
        return found, others

    def forecast(self, workflow: str, lookahead: Lookahead, next_step_at: float, step_s: float) -> Iterable[Group]:
        """A new forecast: the groups of the workflow, with their new scores."""
        running = self.running.get(workflow)
        if running is None:
            running = self.running[workflow] = Running()
        running.lookahead, running.next_step_at, running.step_s = lookahead, next_step_at, step_s
        known: dict[frozenset[str], Use] = {}  # several groups have the same agents where others use them too
        for group in running.groups.values():
            if not group.free and len(group.uses) == 1:
                group.stale = True  # all in use: there may be another forecast before it is judged
                continue
            agents, score, _ = group.uses[workflow]
            use = known.get(agents)
            if use is None:
                use = known[agents] = Use(agents, *lookahead.worth(agents))
            group.score += use.score - score
            group.uses[workflow] = use
            group.stale = False
        return running.groups.values()

    def score(self, group: Group) -> int:
        """Of a group by the present forecasts. Those of its workflows that came while all of it was in use are late."""
        if group.stale:
            group.stale = False
            for workflow, (agents, _, _) in group.uses.items():  # one
                use = group.uses[workflow] = Use(agents, *self.running[workflow].lookahead.worth(agents))
                group.score = use.score
        return group.score

    def end(self, workflow: str) -> Iterable[Group]:
        """The workflow has ended: its groups, which it no longer adds to. No error if it is not there."""
        running = self.running.pop(workflow, None)
        if running is None:
            return ()
        for group in running.groups.values():
            group.score -= group.uses.pop(workflow).score
        return running.groups.values()

    def forget(self, group: Group, blocks: Sequence[int]) -> None:
        """These blocks of `group`, no longer free, will hold something else."""
        group_of = self.group_of
        for block in blocks:
            group_of[block] = None
        group.size -= len(blocks)
        if not group.size:
            self._drop(group)

    def kind(self, group: Group) -> str:
        """What is known of a group, by the names of `eviction.CLASSES`."""
        if not group.uses:
            return "retired"
        running = self.running
        for workflow in group.uses:
            if running[workflow].lookahead.says_something:
                return "forecast"
        return "unknown" if group.score else "worthless"

    def due(self, group: Group) -> float:
        """When the next touch is expected, seconds of the caller's clock.

        0 where several workflows use it, since one of them comes soon; infinity where none is expected.
        """
        if len(group.uses) != 1:
            return 0.0
        ((workflow, use),) = group.uses.items()
        running = self.running[workflow]
        if not use.score:
            return math.inf
        return running.next_step_at + (use.moment / use.score - 1.0) * running.step_s

    def _new(self, users: int, uses: dict[str, Use], score: int) -> Group:
        self._next += 1
        group = self.by_id[self._next] = Group(self._next, users, uses, score)
        return group

    def _split(self, group: Group) -> Group:
        """An empty group with the same map."""
        target = self._new(group.users, dict(group.uses), group.score)
        target.last_use, target.stale = group.last_use, group.stale
        for workflow in group.uses:
            self.running[workflow].groups[target.id] = target
        return target

    def _relabel(self, workflow: str, running: Running, group: Group, agents: frozenset[str]) -> None:
        """The agents of one workflow that touch a group, and with them its score and its number of users."""
        self.score(group)
        before = group.uses.get(workflow)
        use = Use(agents, *running.lookahead.worth(agents))
        group.score += use.score - (before.score if before else 0)
        group.uses[workflow] = use
        running.groups[group.id] = group
        if before is None:
            group.users += 1
            if group.users == 2:
                self._unlist(group)  # it was private to another workflow
        if group.users == 1 and group not in running.private:
            running.private.append(group)

    def _unlist(self, group: Group) -> None:
        for workflow in group.uses:
            private = self.running[workflow].private
            if group in private:
                private.remove(group)

    def _move(self, part: list[int], group: Group | None, target: Group) -> None:
        group_of = self.group_of
        for block in part:
            group_of[block] = target
        target.size += len(part)
        if group is None:
            return
        group.size -= len(part)
        if group.free:
            for block in part:
                if block in group.free:
                    del group.free[block]
                    target.free[block] = None
        if not group.size:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        self._unlist(group)
        for workflow in group.uses:
            del self.running[workflow].groups[group.id]
        group.uses.clear()
        group.entry = None
        del self.by_id[group.id]
