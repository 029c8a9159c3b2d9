"""The two moments of a step at which a forecast is made."""

from __future__ import annotations

from typing import Final, Literal

Moment = Literal["prefill", "completion"]

PREFILL: Final = "prefill"
"""After prefill, before the first output token: the step's agent, input and prefill state are known."""

COMPLETION: Final = "completion"
"""After the last output token: the step's output and completion state are known as well."""

MOMENTS: Final[tuple[Moment, ...]] = (PREFILL, COMPLETION)


def moment_name(moment: Moment) -> str:
    """Description of a moment: a forecast is made before a step's output, and again after it."""
    return "before the output" if moment == PREFILL else "after the output"
