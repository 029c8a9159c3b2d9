"""Where workflows and their steps are recorded; the recorder fills it in, applications report on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_REQUESTS: Final = 256


@dataclass(slots=True, eq=False)
class RecordedWorkflow:
    """A run of a workflow in this engine.

    Attributes:
        workflow_id: as the client sent it, without its tenant.
        steps, known: steps begun, and whether the writer thread has an event of the run; set by the engine thread.
        requests: the step of each request, by the number that identity gave it; of the last MOST_REQUESTS.
        running, how: steps that have not completed, and how the run ended; set by the writer thread.
    """

    number: int
    workflow_type: str
    workflow_id: str
    tenant: str | None = None
    steps: int = 0
    known: bool = False
    requests: dict[int, int] = field(default_factory=dict)
    running: int = 0
    how: str | None = None

    def requested(self, step: int, number: int) -> None:
        """A step is this request."""
        if number:
            self.requests[number] = step
            if len(self.requests) > MOST_REQUESTS:
                del self.requests[next(iter(self.requests))]


class RecordedStep(NamedTuple):
    """Where a step is recorded: its run, and its number there."""

    run: RecordedWorkflow
    number: int
