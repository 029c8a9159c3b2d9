"""The two moments of a step at which a forecast is made."""

from __future__ import annotations

from typing import Final, Literal

Moment = Literal["prefill", "completion"]

PREFILL: Final = "prefill"
"""The prompt has been read, no token produced: the step's agent, its input and the prefill state are known."""

COMPLETION: Final = "completion"
"""The last token has been produced: the step's output and its completion state are known as well."""

MOMENTS: Final[tuple[Moment, ...]] = (PREFILL, COMPLETION)
