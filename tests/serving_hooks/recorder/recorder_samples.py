"""Workflows served to a recorder, without an engine and without a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from by_name import Recorder

from presage.datasets.recording import RECORDED_FINISHED
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.rows import WallClock
from presage.serving_hooks.workflows.live import LiveForecast, LiveLengths

SIZE = 4


@dataclass(frozen=True)
class Named:
    """What the hooks know of a step."""

    workflow_id: str = "w"
    agent: str = "a"
    number: int | None = None
    workflow_type: str = "t"
    source: str = "explicit"
    confidence: float = 1.0

    @property
    def sent(self) -> tuple[str, str]:
        """Type and agent, folded by nothing."""
        return self.workflow_type, self.agent

    @property
    def workflow(self) -> str:
        """The key of its record."""
        return f"{self.workflow_type}\0{self.workflow_id}"


class Hands:
    """A clock whose wall and whose rising hand a test moves."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self.wall, self.rising = wall, 100.0

    def clock(self) -> WallClock:
        return WallClock(lambda: self.wall, lambda: self.rising)

    def on(self, seconds: float) -> None:
        self.wall += seconds
        self.rising += seconds


def recorder(folder: Path, hands: Hands | None = None, instance: str = "one", **settings: Any) -> Recorder:
    """One that writes when it is closed, or when its writer is told to."""
    hands = hands or Hands()
    served = {"model": settings.pop("model", "m"), "state_layer": settings.pop("state_layer", None)}
    served |= {name: settings.pop(name) for name in ("decode", "open_file") if name in settings}
    config = RecorderConfig(folder=str(folder), **settings)
    return Recorder(config, **served, instance=instance, clock=hands.clock())


def serve(
    to: Recorder,
    workflow_id: str,
    agents: Sequence[str],
    *,
    numbers: Sequence[int | None] | None = None,
    ends: bool = True,
    first: int = 0,
    **texts: str,
) -> None:
    """One workflow, a step after the other; request ids count from `first`."""
    for i, agent in enumerate(agents):
        request = f"{workflow_id}-{first + i}"
        number = numbers[i] if numbers is not None else None
        to.begun(
            request,
            Named(workflow_id, agent, number),
            input_tokens=100 + i,
            cached_input_tokens=i,
            input_text=texts.get("input_text"),
        )
        to.completed(request, output_tokens=10 + i, finish_reason="stop", output_text=texts.get("output_text"))
    if ends:
        to.ended("t", workflow_id, RECORDED_FINISHED)


def vector(seed: int, size: int = SIZE, dtype: type = np.float32) -> np.ndarray[Any, Any]:
    """A state."""
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def forecast(moment: str = "prefill", agents: tuple[str, ...] = ("a", "b"), steps: int = 3) -> LiveForecast:
    """The same chance for everything."""
    width = len(agents) + 1
    said = LiveLengths("champion", 5, (0.5, 0.9), (20.0, 40.0), 0, 3)
    probabilities = np.full((steps, width), 1 / width, np.float32)
    return LiveForecast("champion", 9, moment, probabilities, agents, 7, None, said)  # type: ignore[arg-type]


def counts(of: Recorder) -> Mapping[str, int]:
    found: Mapping[str, int] = of.status().counts
    return found
