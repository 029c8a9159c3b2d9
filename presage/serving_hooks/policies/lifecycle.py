"""Which workflows are alive: those that never say they have ended must not keep their blocks for ever.

A workflow is alive while it has a request in the engine, or was heard of less than its time to live ago. One that
comes back after that is a new one: it has lost its claim to the cache, nothing else. The clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from presage.errors import ConfigurationError

TIME_TO_LIVE_S: Final = 600.0
"""Unless said otherwise: longer than most tools take."""


@dataclass(slots=True)
class _Alive:
    heard_at: float
    requests: int = 0


class Lifecycle:
    """Workflows alive, the one longest unheard of first.

    Args:
        time_to_live_s: seconds without a request after which a workflow counts as ended; longer than tools take.

    Attributes:
        expired: workflows that ended this way.
    """

    def __init__(self, time_to_live_s: float = TIME_TO_LIVE_S) -> None:
        if not time_to_live_s > 0:
            raise ConfigurationError(f"time_to_live_s is {time_to_live_s}; give seconds above 0")
        self.time_to_live_s = time_to_live_s
        self.expired = 0
        self._alive: OrderedDict[str, _Alive] = OrderedDict()

    def __len__(self) -> int:
        return len(self._alive)

    def __contains__(self, workflow: str) -> bool:
        return workflow in self._alive

    def begin(self, workflow: str, now: float) -> None:
        """A request of the workflow arrives."""
        self._hear(workflow, now).requests += 1

    def finish(self, workflow: str, now: float) -> None:
        """A request of it leaves the engine, however it ended. No error if the workflow has ended before."""
        if workflow in self._alive:
            alive = self._hear(workflow, now)
            alive.requests = max(0, alive.requests - 1)

    def end(self, workflow: str) -> bool:
        """It says it has ended; whether it was alive."""
        return self._alive.pop(workflow, None) is not None

    def expire(self, now: float) -> list[str]:
        """Those whose time is over, ended hereby. Costs O(those and the busy ones before them)."""
        over: list[str] = []
        while self._alive:
            workflow = next(iter(self._alive))
            alive = self._alive[workflow]
            if now - alive.heard_at < self.time_to_live_s:
                break
            if alive.requests:  # a request in the engine is a sign of life
                self._hear(workflow, now)
                continue
            del self._alive[workflow]
            over.append(workflow)
        self.expired += len(over)
        return over

    def _hear(self, workflow: str, now: float) -> _Alive:
        alive = self._alive.get(workflow)
        if alive is None:
            alive = self._alive[workflow] = _Alive(now)
        alive.heard_at = now
        self._alive.move_to_end(workflow)
        return alive
