"""Which workflows are alive: those that never say they have ended must not keep their blocks for ever.

A workflow is alive while it has a request in the engine, or was heard of less than its time to live ago. One that
comes back after that is a new one: it has lost its claim to the cache, nothing else. The clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from presage.errors import ConfigurationError

TIME_TO_LIVE_S: Final = 600.0
"""Unless said otherwise: longer than most tools take."""


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
        self._heard_at: OrderedDict[str, float] = OrderedDict()
        self._requests: dict[str, int] = {}  # of those that have any: most are silent

    def __len__(self) -> int:
        return len(self._heard_at)

    def __contains__(self, workflow: str) -> bool:
        return workflow in self._heard_at

    def begin(self, workflow: str, now: float) -> None:
        """A request of the workflow arrives."""
        self._hear(workflow, now)
        self._requests[workflow] = self._requests.get(workflow, 0) + 1

    def finish(self, workflow: str, now: float) -> None:
        """A request of it leaves the engine, however it ended. No error if the workflow has ended before."""
        if workflow not in self._heard_at:
            return
        self._hear(workflow, now)
        left = self._requests.get(workflow, 0) - 1
        if left > 0:
            self._requests[workflow] = left
        else:
            self._requests.pop(workflow, None)

    def end(self, workflow: str) -> bool:
        """It says it has ended; whether it was alive."""
        self._requests.pop(workflow, None)
        return self._heard_at.pop(workflow, None) is not None

    def expire(self, now: float) -> list[str]:
        """Those whose time is over, ended hereby. Costs O(those and the busy ones before them)."""
        over: list[str] = []
        while self._heard_at:
            workflow = next(iter(self._heard_at))
            if now - self._heard_at[workflow] < self.time_to_live_s:
                break
            if workflow in self._requests:  # a request in the engine is a sign of life
                self._hear(workflow, now)
                continue
            del self._heard_at[workflow]
            over.append(workflow)
        self.expired += len(over)
        return over

    def _hear(self, workflow: str, now: float) -> None:
        self._heard_at[workflow] = now
        self._heard_at.move_to_end(workflow)
