"""The workflows under way: found by name, and gone when they end, fall silent, or there are too many.

They are kept in the order in which they were last heard of, so who is to go stands first. Names are cut to a bounded
length, with a digest in the place of the rest: an id of a megabyte must not be kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from sys import intern
from typing import Any, Final

from presage.errors import ConfigurationError
from presage.predictors.lengths.running import LengthWorkflow
from presage.predictors.next_agent import Workflow
from presage.serving_hooks.guard import Refused
from presage.serving_hooks.live import MISSED_STEP, NO_LENGTHS, LiveForecast
from presage.serving_hooks.seen import Seen

LONGEST_NAME: Final = 128

Key = tuple[str, str]
"""Workflow type and id, as `short` has them."""


def short(name: str) -> str:
    """A name of at most LONGEST_NAME characters, different for different names.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(name, str):
        raise TypeError("a name is a text")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:64]}…{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def shared(name: str) -> str:
    """The same, one copy for whoever says it: for names that many workflows have."""
    return intern(str(short(name)))


@dataclass(frozen=True, slots=True)
class Awaited:
    """A step that has begun and whose state is still to come.

    Attributes:
        before: the workflow before it, a copy.
        step: what was given of the step.
        answered: the forecast that was made without the state.
    """

    before: Workflow
    step: Mapping[str, Any]
    answered: LiveForecast


class Running:
    """A workflow under way.

    Attributes:
        agents, lengths: its state in each predictor, or why it has none any more.
        steps: how many have begun.
        within: whether the last one has not completed yet.
        said: what was said of the tokens left when the last step began.
        heard_at: of its last event, seconds.
        seen: what counts are to learn of it.
        awaited: the step that began last, as long as its state may come.
        learnt_as: what counts learn of it, they learn of this workflow type.
    """

    __slots__ = ("agents", "awaited", "heard_at", "learnt_as", "lengths", "said", "seen", "steps", "within")

    def __init__(self, agents: Workflow | Refused, lengths: LengthWorkflow | Refused, learnt_as: str) -> None:
        self.learnt_as = learnt_as
        self.agents, self.lengths, self.said = agents, lengths, NO_LENGTHS
        self.steps, self.within, self.heard_at = 0, False, 0.0
        self.seen = Seen()
        self.awaited: Awaited | None = None

    def miss(self, step: int) -> None:
        """Steps before number `step` went by unseen: no predictor knows any more where the workflow stands."""
        self.agents = self.lengths = Refused(MISSED_STEP)
        self.seen.missed()
        self.awaited = None
        self.steps = step


class Workflows:
    """Those under way, the one longest unheard of first.

    Args:
        most: how many are kept.
        time_to_live_s: seconds without an event after which a workflow counts as ended; longer than tools take.
    """

    def __init__(self, most: int, time_to_live_s: float) -> None:
        if most < 1:
            raise ConfigurationError(f"max_workflows is {most}; give 1 or more")
        if not time_to_live_s > 0:
            raise ConfigurationError(f"time_to_live_s is {time_to_live_s}; give seconds above 0")
        self.most, self.time_to_live_s = most, time_to_live_s
        self._running: OrderedDict[Key, Running] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    def heard(self, key: Key, now: float) -> Running | None:
        """The workflow of that name, now the last one heard of."""
        running = self._running.get(key)
        if running is not None:
            running.heard_at = now
            self._running.move_to_end(key)
        return running

    def add(self, key: Key, running: Running, now: float) -> bool:
        """A new one; whether the one longest unheard of had to go for it."""
        running.heard_at = now
        self._running[key] = running
        if len(self._running) <= self.most:
            return False
        self._running.popitem(last=False)
        return True

    def pop(self, key: Key) -> Running | None:
        """It has ended; None if it is not there."""
        return self._running.pop(key, None)

    def silent(self, now: float) -> Iterator[tuple[Key, Running]]:
        """Those whose time is over, gone as they are named."""
        while self._running:
            key, running = next(iter(self._running.items()))
            if now - running.heard_at < self.time_to_live_s:
                return
            del self._running[key]
            yield key, running
