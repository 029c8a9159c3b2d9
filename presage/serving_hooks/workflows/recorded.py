"""Where workflows and their steps are recorded; the recorder fills it in, applications report on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_PROMPTS: Final = 64


@dataclass(slots=True, eq=False)
class RecordedWorkflow:
    """A run of a workflow in this engine.

    Attributes:
        workflow_id: as the client sent it, without its tenant.
        steps, known: steps begun, and whether the writer thread has an event of the run; set by the engine thread.
        prompts: by digest of a prompt, the latest step that sent it; of the last MOST_PROMPTS steps.
        running, how: steps that have not completed, and how the run ended; set by the writer thread.
    """

    number: int
    workflow_type: str
    workflow_id: str
    tenant: str | None = None
    steps: int = 0
    known: bool = False
    prompts: dict[bytes, int] = field(default_factory=dict)
    running: int = 0
    how: str | None = None

    def prompted(self, number: int, prompt: bytes, after: bytes) -> int | None:
        """A step has sent a prompt that goes on from an earlier one, by digests; which step that was."""
        goes_on_from = self.prompts.get(after)
        if prompt:
            self.prompts.pop(prompt, None)
            self.prompts[prompt] = number
            if len(self.prompts) > MOST_PROMPTS:
                del self.prompts[next(iter(self.prompts))]
        return goes_on_from


class RecordedStep(NamedTuple):
    """Where a step is recorded: its run, and its number there."""

    run: RecordedWorkflow
    number: int
