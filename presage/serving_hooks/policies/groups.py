"""A group of blocks with one access map, and a workflow with its groups: what access.py keeps of each.

There are some of these for every workflow alive, and most are silent: what is small or empty stands in the object
itself, and a table is made only where there is something to find in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from presage.serving_hooks.policies.score import UNKNOWN, Lookahead

NOBODY: Final[frozenset[str]] = frozenset()


class Use(NamedTuple):
    """What one active workflow does with a group: the agents that touch it, and what that adds, in 1 / UNIT."""

    agents: frozenset[str]
    score: int
    moment: int


FEW: Final = 5
"""Free blocks of a group that are kept in a tuple: the smallest table holds as many, and takes three times as much."""

_NO_USES: Final[dict[str, Use]] = {}
_NO_GROUPS: Final[dict[int, Group]] = {}


class Group:
    """Blocks with one access map.

    Nearly all have one active workflow, or none: what that one does stands in the group itself.

    Attributes:
        id: rises with creation.
        users: workflows that ever touched it, ended ones included.
        sole: its one active workflow; None where it has none or several.
        agents, moment: of that one, as `Use` has them; what it adds is the score.
        many: uses of each active workflow where there are several; else empty, and not to be written to.
        size: blocks in it.
        score: Σ of what its active workflows add, in 1 / UNIT.
        free: those of its blocks that are free, the first freed first; changed by way of `unpacked`.
        stale: its one workflow has had a new forecast since it was scored; see `AccessIndex.score`.
        holes: blocks given up from the front of `free` since it was last rebuilt.
        last_use: stamp of the last time blocks of it were freed.
        entry: its valid entry in an eviction order, or None.
    """

    __slots__ = (
        "agents",
        "entry",
        "free",
        "holes",
        "id",
        "last_use",
        "many",
        "moment",
        "score",
        "size",
        "sole",
        "stale",
        "users",
    )

    def __init__(self, number: int) -> None:
        self.id = number
        self.users = self.size = self.score = self.moment = self.holes = self.last_use = 0
        self.sole: str | None = None
        self.agents = NOBODY
        self.many = _NO_USES
        self.stale = False
        self.free: dict[int, None] | tuple[int, ...] = ()
        self.entry: bytes | None = None

    @property
    def workflows(self) -> Collection[str]:
        """The active ones."""
        return self.many if self.sole is None else (self.sole,)

    def agents_of(self, workflow: str) -> frozenset[str] | None:
        """Those of a workflow that touch it; None if none ever did, or it has ended."""
        if workflow == self.sole:
            return self.agents
        use = self.many.get(workflow)
        return None if use is None else use.agents

    def put(self, workflow: str, agents: frozenset[str], score: int, moment: int) -> None:
        """What an active workflow does with it, from now on."""
        if self.sole == workflow or (self.sole is None and not self.many):
            self.sole, self.agents, self.score, self.moment = workflow, agents, score, moment
            return
        if self.sole is not None:
            self.many = {self.sole: Use(self.agents, self.score, self.moment)}
            self.sole, self.agents = None, NOBODY
        before = self.many.get(workflow)
        self.score += score - (0 if before is None else before.score)
        self.many[workflow] = Use(agents, score, moment)

    def leave(self, workflow: str) -> None:
        """An active workflow has ended."""
        if workflow == self.sole:
            self.sole, self.agents, self.score, self.stale = None, NOBODY, 0, False
            return
        self.score -= self.many.pop(workflow).score
        if len(self.many) == 1:
            ((self.sole, (self.agents, _, self.moment)),) = self.many.items()
            self.many = _NO_USES

    def unpacked(self) -> dict[int, None]:
        """`free` as a table, to be changed; the next time blocks are freed it is packed again."""
        if isinstance(self.free, tuple):
            self.free, self.holes = dict.fromkeys(self.free), 0
        return self.free

    def pack(self) -> None:
        """`free` without a table, where it is small."""
        if len(self.free) <= FEW:
            self.free = tuple(self.free)


class Running:
    """An active workflow: its groups, what its forecast adds to them, and when its next step is due.

    Attributes:
        lookahead: its forecast as scores.
        next_step_at: when its next step is expected to start, seconds of the caller's clock; 0 if unknown.
        step_s: expected seconds from one of its steps to the next.
        private: groups no other workflow ever touched, one for each set of agents that touch them; few.
        shared: the others, by id; where there are none, not to be written to.
        written: where the last new blocks went.
    """

    __slots__ = ("lookahead", "next_step_at", "private", "shared", "step_s", "written")

    def __init__(self) -> None:
        self.lookahead: Lookahead = UNKNOWN
        self.next_step_at = 0.0
        self.step_s = 0.0
        self.private: tuple[Group, ...] = ()
        self.shared = _NO_GROUPS
        self.written: Group | None = None

    @property
    def groups(self) -> Sequence[Group]:
        """All of them, as they are now."""
        return (*self.private, *self.shared.values()) if self.shared else self.private

    def own(self, agents: frozenset[str]) -> Group | None:
        """The private group that these agents touch."""
        for group in self.private:
            if group.agents == agents:
                return group
        return None

    def add(self, group: Group) -> None:
        """It touches this group, perhaps for long."""
        if group.users > 1:
            if not self.shared:
                self.shared = {}
            self.shared[group.id] = group
        elif group not in self.private:
            self.private = (*self.private, group)

    def remove(self, group: Group) -> None:
        """This group is none of its groups any more, or not private."""
        if self.shared.pop(group.id, None) is None:
            self.private = tuple(one for one in self.private if one is not group)
