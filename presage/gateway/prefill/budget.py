"""How much of what was prefilled ahead was wasted, live, and the pause once that is too much."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

LEAST_JUDGED: Final = 8
"""Prefills before a pause: fewer say little."""
MOST_TYPES: Final = 1000
"""Workflow types with a budget of their own; beyond it the least recently active one is forgotten."""


class PrefillBudget:
    """The latest prefills of a workflow type: tokens, and how many of them were wasted.

    Args:
        most_wasted: share of tokens; above it nothing is sent for `pause_s` seconds. After a pause the window begins
            anew, so it takes `LEAST_JUDGED` further prefills until the next one.
        window: prefills.
    """

    def __init__(self, most_wasted: float, window: int, pause_s: float) -> None:
        self._most_wasted, self._pause_s = most_wasted, pause_s
        self._judged: deque[tuple[int, int]] = deque(maxlen=window)
        self._until_s = float("-inf")
        self._open = 0

    @property
    def wasted(self) -> float | None:
        """The share of the window's tokens; None without any."""
        tokens = sum(sent for sent, _ in self._judged)
        return sum(lost for _, lost in self._judged) / tokens if tokens else None

    def paused(self, now: float) -> bool:
        """Whether nothing may be sent now."""
        return now < self._until_s

    def may_send(self, now: float) -> bool:
        """Whether a prefill may be sent: there is no pause, and not a window of them of which nothing is known yet."""
        return not self.paused(now) and self._open < (self._judged.maxlen or 0)

    def sent(self) -> None:
        """A prefill was sent, of which nothing is known yet."""
        self._open += 1

    def judged(self, tokens: int, right: bool, now: float) -> None:
        """A prefill of so many tokens that was sent was of use, or not."""
        self._open -= 1
        if self.paused(now):
            return  # sent before the pause
        self._judged.append((tokens, 0 if right else tokens))
        if len(self._judged) >= LEAST_JUDGED and (self.wasted or 0.0) > self._most_wasted:
            self._until_s = now + self._pause_s
            self._judged.clear()


class PrefillBudgets:
    """A budget for each workflow type of a tenant."""

    def __init__(self, make: Callable[[], PrefillBudget]) -> None:
        self._make = make
        self._of: OrderedDict[str, PrefillBudget] = OrderedDict()

    def of(self, stats_key: str) -> PrefillBudget:
        """The budget of a workflow type."""
        budget = self._of.get(stats_key)
        if budget is None:
            budget = self._of[stats_key] = self._make()
            if len(self._of) > MOST_TYPES:
                self._of.popitem(last=False)
        self._of.move_to_end(stats_key)
        return budget

    def paused(self, now: float) -> int:
        """Workflow types in a pause."""
        return sum(budget.paused(now) for budget in self._of.values())
