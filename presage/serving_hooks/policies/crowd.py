"""All workflows that a decision is over, in columns: deciding over a thousand of them is a few operations on arrays.

A workflow keeps its row until it ends, so what has not changed is not written again. Rows of ended ones are used anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class Phase(Enum):
    """Where a workflow is."""

    STEP = "step"  # its request is being computed
    TOOL = "tool"  # it waits for a tool
    READY = "ready"  # its request has not been started, or was preempted


@dataclass(frozen=True, slots=True)
class Workflow:
    """What a decision must know of one workflow.

    Attributes:
        id: of the workflow.
        phase: where it is.
        since: when it came there, seconds of the caller's clock.
        footprint_tokens: its working set, cache included, forecast for its next step.
        remaining_tokens: predicted output tokens of all its steps left; infinity if unknown.
        pause_s: forecast length of its present tool call, None if unknown.
    """

    id: str
    phase: Phase
    since: float
    footprint_tokens: float
    remaining_tokens: float = math.inf
    pause_s: float | None = None


PHASES: Final = tuple(Phase)
STEP, TOOL, READY = range(3)
"""Phases as numbers, in the order of PHASES."""
NUMBER: Final = {phase: number for number, phase in enumerate(PHASES)}

_FACTS: Final = np.dtype([("phase", "i1"), ("since", "f8"), ("footprint", "f8"), ("remaining", "f8"), ("pause", "f8")])
_WAITS: Final = np.dtype([("total", "f8"), ("since", "f8"), ("inside", "?")])
_NO_WAIT: Final = (0.0, math.nan, False)
_FIRST_ROOM: Final = 64


class Crowd:
    """Workflows by row.

    Attributes:
        facts: `Workflow` in columns; a pause of NaN is unknown.
        waits: how long each has been kept from running, since when it is (NaN where it is not), and whether it was let
            in by the last decision.
    """

    __slots__ = ("_free", "_ids", "_rows", "facts", "waits")

    def __init__(self) -> None:
        self.facts = np.zeros(0, _FACTS)
        self.waits = np.zeros(0, _WAITS)
        self._ids: list[str | None] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Workflow]:
        """One after the other, as they came."""
        for name, row in self._rows.items():
            phase, since, footprint, remaining, pause = self.facts[row].item()
            yield Workflow(name, PHASES[phase], since, footprint, remaining, None if math.isnan(pause) else pause)

    def row(self, name: str) -> int | None:
        """Where a workflow stands; None where it is not there."""
        return self._rows.get(name)

    def rows(self) -> NDArray[np.intp]:
        """Of all of them, as they came."""
        return np.fromiter(self._rows.values(), np.intp, len(self._rows))

    def names(self, rows: NDArray[np.intp]) -> list[Any]:
        """Who stands in these rows."""
        return [self._ids[row] for row in rows.tolist()]

    def put(
        self, name: str, phase: Phase, since: float, footprint: float, remaining: float, pause: float | None
    ) -> int:
        """What is known of a workflow now; its row."""
        row = self.place(name)
        self.facts[row] = NUMBER[phase], since, footprint, remaining, math.nan if pause is None else pause
        return row

    def place(self, name: str) -> int:
        """The row of a workflow, which may be new; what is known of it is then to be written there."""
        row = self._rows.get(name)
        return self._enter(name) if row is None else row

    def drop(self, name: str) -> None:
        """It has ended. No error if it is not there."""
        row = self._rows.pop(name, None)
        if row is not None:
            self._ids[row] = None
            self._free.append(row)

    def _enter(self, name: str) -> int:
        if not self._free:
            have = len(self._ids)
            room = max(_FIRST_ROOM, 2 * have)
            # Not by `resize`, which fails where somebody still looks at a column.
            self.facts = np.concatenate([self.facts, np.zeros(room - have, _FACTS)])
            self.waits = np.concatenate([self.waits, np.zeros(room - have, _WAITS)])
            self._ids += [None] * (room - have)
            self._free = list(range(room - 1, have - 1, -1))
        row = self._rows[name] = self._free.pop()
        self._ids[row] = name
        self.waits[row] = _NO_WAIT
        return row
