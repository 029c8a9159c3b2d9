"""What is handed over: a step, a forecast, the end of a run. Plain things, so that making one costs microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from presage.serving_hooks.forecasting.live import LiveForecast

ROW_BYTES: Final = 1024
"""About how much memory a row takes without what is large in it."""

_CHARACTER_BYTES: Final = 2
_TOKEN_BYTES: Final = 36


class State(NamedTuple):
    """A copy of a hidden state: the name of its NumPy type, and its bytes."""

    dtype: str
    data: bytes


class RecordedWorkflow:
    """A workflow as this engine sees it.

    Attributes:
        number: counts the runs of the engine.
        workflow_type, workflow_id: its names.
        steps: how many have begun; of the engine's thread, as the next.
        told: whether the thread that writes is told of any.
        running: how many steps are not over; of the thread that writes, as the next.
        how: how it ended, once it has.
    """

    __slots__ = ("how", "number", "running", "steps", "told", "workflow_id", "workflow_type")

    def __init__(self, number: int, workflow_type: str, workflow_id: str) -> None:
        self.number, self.workflow_type, self.workflow_id = number, workflow_type, workflow_id
        self.steps = self.running = 0
        self.told = False
        self.how: str | None = None


class StepRow:
    """A step; times in microseconds since 1970. A state may still be put in while the row waits in the queue."""

    __slots__ = (
        "agent",
        "cached_input_tokens",
        "client_step",
        "completion_state",
        "ended_at",
        "finish_reason",
        "input_text",
        "input_tokens",
        "output_text",
        "output_tokens",
        "over_s",
        "prefill_state",
        "run",
        "started_at",
        "step",
        "step_id",
    )

    def __init__(self, run: RecordedWorkflow, step: int, step_id: str | None, agent: str, started_at: int) -> None:
        self.run, self.step, self.step_id, self.agent, self.started_at = run, step, step_id, agent, started_at
        self.over_s = 0.0
        self.client_step: int | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_input_tokens: int | None = None
        self.finish_reason: str | None = None
        self.ended_at: int | None = None
        self.input_text: str | Sequence[int] | None = None
        self.output_text: str | Sequence[int] | None = None
        self.prefill_state: State | None = None
        self.completion_state: State | None = None

    def release(self) -> None:
        """It is written: what is large in it goes, while the recorder still knows the step by name."""
        self.input_text = self.output_text = None
        self.prefill_state = self.completion_state = None


class ForecastRow(NamedTuple):
    """A forecast made for a step."""

    run: RecordedWorkflow
    step: int
    made_at: int
    live: LiveForecast


class EndRow(NamedTuple):
    """A run has ended; `steps` and `how` are copies, since the row is made by another thread."""

    run: RecordedWorkflow
    steps: int
    how: str
    ended_at: int


Row = StepRow | ForecastRow | EndRow


def text_bytes(text: str | Sequence[int] | None) -> int:
    """About how much memory a text takes, or its token ids."""
    if text is None:
        return 0
    return len(text) * (_CHARACTER_BYTES if isinstance(text, str) else _TOKEN_BYTES)


def forecast_bytes(live: LiveForecast) -> int:
    """About how much memory a forecast takes."""
    return ROW_BYTES + int(live.probabilities.nbytes)
