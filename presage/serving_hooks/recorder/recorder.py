"""The recorder as the engine thread sees it.

The model waits for the engine thread, so this thread only buffers events; the writer thread makes rows of them. Runs
and steps are numbered here, so a row dropped later leaves a gap that ingestion detects. No call blocks or raises:
events that cannot be recorded are counted by reason.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from presage.features.moment import PREFILL, Moment
from presage.serving_hooks.counts import RECORDER, EventCounts
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.files import OpenFile
from presage.serving_hooks.recorder.rows import (
    FULL,
    NO_NAME,
    EventBuffer,
    LateColumns,
    RowAssembler,
    RowQueue,
    Text,
    WallClock,
    forecast_bytes,
    is_name,
    text_bytes,
)
from presage.serving_hooks.recorder.writer import Writer
from presage.serving_hooks.status import RecorderStatus
from presage.serving_hooks.workflows.identity import tenant_of, unscoped
from presage.serving_hooks.workflows.recorded import RecordedStep, RecordedWorkflow

if TYPE_CHECKING:
    from presage.serving_hooks.workflows import RunningStep, Workflow
    from presage.serving_hooks.workflows.identity import Step
    from presage.serving_hooks.workflows.live import LiveForecast

_log = logging.getLogger(__name__)

_MAX_TYPES: Final = 1_000
"""A store has a folder for each workflow type, and clients name the types."""
_MAX_RUNNING: Final = 16_384
_EVENTS_PER_ROW: Final = 4
_LOSING_STEPS: Final = 100
"""Steps before the recorder can be said to lose most of them; it forgets half of what it has counted every ten times as
many."""
_KEPT_SHARE: Final = 64
"""States are copied if the array they are rows of takes more than 1/64 of the buffer."""


class Recorder:
    """Records the steps of one engine. All calls come from one thread, except `counts`, `status` and `debug_state`.

    Args:
        model: name of the served model.
        state_layer: the layer of the states, from 1; None for those after the final norm.
        decode: converts token ids to text.
        instance: name of this engine, unique in the folder; by default the time and a random number.

    Raises:
        ConfigurationError: the configured redaction cannot be loaded.
    """

    def __init__(
        self,
        config: RecorderConfig,
        *,
        model: str | None = None,
        state_layer: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        instance: str | None = None,
        clock: WallClock | None = None,
        open_file: OpenFile = lambda path: pa.OSFile(path, "wb"),
    ) -> None:
        self.instance = instance or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        clock = clock or WallClock()
        self._states, self._text = config.states, config.text == "on"
        self._counts, written = EventCounts(RECORDER), EventCounts(RECORDER)
        room = config.queue_mb * 2**20
        queue = RowQueue(config.queue_rows, room, written)
        self._rows = RowAssembler(queue, clock, written)
        self._events = EventBuffer(_EVENTS_PER_ROW * config.queue_rows, room, queue, self._counts, written)
        # Bound once: this code is cold in the CPU cache when called, and each further object costs a cache miss.
        self._put, self._now_s, self._most_kept = self._events.put, clock.monotonic, room // _KEPT_SHARE
        self._begun, self._completed = self._rows.begun, self._rows.completed
        self._hidden, self._forecast = self._rows.states, self._rows.forecast
        self.writer = Writer(
            config, self._events, queue, decode, clock, self.instance, model, state_layer, written, open_file
        )
        self._types: set[str] = set()
        self._begun_runs = 0
        self._running: set[str] = set()
        self._offered = self._lost = 0
        self._losing = False

    def start(self) -> Self:
        """Starts the writer thread."""
        self.writer.start()
        return self

    def begun(
        self,
        running: RunningStep,
        *,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        input_text: Text | None = None,
        system_prompt: str | None = None,
        number: int = 0,
        goes_on_from: int = 0,
        quotes: Sequence[int] = (),
    ) -> RecordedStep | None:
        """A request was selected for the first time; its step and workflow are numbered from here on.

        Names are recorded as they were sent: ingestion folds them. The `number` of the step is recorded beside ours.
        `input_text` is the prompt or its token ids, which must not be changed later; it is ignored unless text is on,
        like `system_prompt`, the part of the prompt that never varies. `number`, `goes_on_from` and `quotes` are
        those of its identity. Returns where the step is recorded, for `outcome`; None if it is not.
        """
        try:
            request_id, step = running.request_id, running.step
            run = running.workflow.run or self._new_run(running.workflow, step)
            if run is not None and request_id in self._running:
                return None
            self._offered, self._lost = self._offered + 1, self._lost + 1  # until it is in the buffer
            if self._offered >= _LOSING_STEPS:
                self._watch_losses()
            if run is None:
                return None
            place = run.steps
            run.steps = place + 1
            before = (
                run.requests.get(goes_on_from),
                [run.requests[quoted] for quoted in quotes if quoted in run.requests],
            )
            run.requested(place, number)
            if len(self._running) >= _MAX_RUNNING:
                self._counts.add(RECORDER, "not recorded", "too many steps at once")
                return None
            text, size = self._kept_text(input_text) if self._text else (None, 0)
            system, more = self._kept_text(system_prompt) if self._text and system_prompt else (None, 0)
            size += more
            counts = input_tokens, cached_input_tokens
            event = self._now_s(), request_id, run, place, step, *counts, text, system, *before
            if self._put(self._begun, event, size):
                self._running.add(request_id)
                run.known = True
                self._lost -= 1
                return RecordedStep(run, place)
        except Exception as error:
            self._failed(error)
        return None

    def states(self, request_ids: Sequence[str], moment: Moment, states: Any) -> None:
        """Hidden states of steps that are running, or completed and await theirs.

        They are float16 or float32 [n, d], of one layer of the served model, not projected, and must not be changed
        later. An array that they are rows of stays in memory for some milliseconds; rows of a large one are copied.
        """
        try:
            if self._states == "off" or (self._states == "prefill" and moment != PREFILL):
                return
            size = _kept_bytes(states)
            if size > self._most_kept and size > states.nbytes:
                states, size = states.copy(), states.nbytes
            self._put(self._hidden, (self._now_s(), request_ids, moment, states), size)
        except Exception as error:
            self._failed(error)

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """A forecast for a step that is running or has just completed."""
        try:
            self._put(self._forecast, (self._now_s(), request_id, live), forecast_bytes(live))
        except Exception as error:
            self._failed(error)

    def completed(
        self,
        request_id: str,
        *,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        output_text: Text | None = None,
        state_comes: bool = False,
        found: LateColumns | None = None,
    ) -> None:
        """A request left the engine, with its last token or without; ignored if it never began.

        The finish reason is "abort" if it was aborted. `output_text` is the answer or its token ids; see `input_text`.
        With `state_comes` the row waits for the completion state, for `linger_s` at most. `found` replaces what the
        beginning told.
        """
        try:
            if request_id not in self._running:
                return
            self._running.discard(request_id)
            text, size = self._kept_text(output_text) if self._text else (None, 0)
            event = self._now_s(), request_id, output_tokens, finish_reason, text, state_comes, found
            self._put(self._completed, event, size, always=True)
        except Exception as error:
            self._failed(error)

    def answered(self, request_id: str, tools: Sequence[str]) -> None:
        """The answer of a step was parsed, at its completion or soon after: the tools that it calls."""
        try:
            self._put(self._rows.answered, (request_id, tools))
        except Exception as error:
            self._failed(error)

    def outcome(self, of: RecordedStep, success: bool, score: float | None) -> bool:
        """Somebody reported whether an answer was right; without a score, whether its workflow as a whole was.

        The workflow may have ended. Returns whether it is recorded.
        """
        step = None if score is None else of.number
        return self._put(self._rows.outcome, (self._now_s(), of.run, step, success, score))

    def ended(self, workflow: Workflow, how: str) -> None:
        """A workflow ended: RECORDED_FINISHED or RECORDED_EXPIRED.

        A later step of that name begins another run; steps still running belong to this one.
        """
        try:
            run, workflow.run = workflow.run, None
            if run is not None and run.known:
                self._put(self._rows.ended, (self._now_s(), run, how), always=True)
        except Exception as error:
            self._failed(error)

    @property
    def counts(self) -> EventCounts:
        """Rows written, and rows not recorded by reason."""
        return self._counts + self.writer.counts

    def status(self) -> RecorderStatus:
        """The counts, and what the writer thread does."""
        return RecorderStatus(
            on=True,
            instance=self.instance,
            waiting=self.writer.waiting,
            recording=self.writer.state,
            losing=self._losing,
            counts=self.counts.by_key(),
        )

    def debug_state(self) -> dict[str, int]:
        """Sizes in memory: `events` in the buffer, `bytes` there and in the queue, `running` steps, and `late` steps,
        which have completed and may still get a state."""
        return {
            "events": len(self._events),
            "bytes": self._events.waiting_bytes,
            "running": len(self._rows.running),
            "late": len(self._rows.late),
        }

    def close(self) -> None:
        """Writes waiting rows and the known columns of running steps; stops after some seconds."""
        self._put(self._rows.finish, (self._now_s(),), always=True)
        self._events.close()
        self._running.clear()
        self.writer.close()

    def _new_run(self, workflow: Workflow, step: Step) -> RecordedWorkflow | None:
        workflow_type, scoped = step.sent[0], step.workflow_id if isinstance(step.workflow_id, str) else ""
        workflow_id = unscoped(scoped)
        # The type is empty if the client sent none.
        if not is_name(workflow_id) or not (workflow_type == "" or is_name(workflow_type)):
            self._counts.add(RECORDER, "not recorded", NO_NAME)
            return None
        if workflow_type not in self._types:
            if len(self._types) >= _MAX_TYPES:
                self._counts.add(RECORDER, "not recorded", "too many workflow types")
                return None
            self._types.add(workflow_type)
        workflow.run = run = RecordedWorkflow(self._begun_runs, workflow_type, workflow_id, tenant_of(scoped) or None)
        self._begun_runs += 1
        return run

    def _watch_losses(self) -> None:
        """Raises the alarm once more than half of the latest steps were not recorded, and takes it back."""
        losing = self._lost > self._offered / 2
        if losing and not self._losing:
            _log.error(
                "the recorder has lost %d of the latest %d steps; recorder.counts of the status says why",
                self._lost,
                self._offered,
            )
        self._losing = losing
        if self._offered >= 10 * _LOSING_STEPS:
            self._offered, self._lost = self._offered // 2, self._lost // 2

    def _kept_text(self, given: Text | None) -> tuple[Text | None, int]:
        """A text and its bytes; (None, 0) if there is no room: the step matters more."""
        try:
            size = text_bytes(given)
        except Exception as error:
            self._failed(error)
            return None, 0
        if self._events.fits(size):
            return given, size
        self._counts.add(RECORDER, "text not kept", FULL)
        return None, 0

    def _failed(self, error: Exception) -> None:
        self._counts.add(RECORDER, "failed", type(error).__name__)


class NoRecorder:
    """Records nothing."""

    counts = EventCounts()

    def begun(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    states = forecast = completed = answered = outcome = ended = close = begun

    def debug_state(self) -> dict[str, int]:
        """Nothing is in memory."""
        return {}

    def status(self) -> RecorderStatus:
        """Reports that the recorder is off."""
        return RecorderStatus()


StepRecorder = Recorder | NoRecorder


def _kept_bytes(states: Any) -> int:
    """Bytes kept in memory with states: rows keep the array they belong to."""
    base = getattr(states, "base", None)
    whole = base if isinstance(base, np.ndarray) else states
    return whole.nbytes if isinstance(whole, np.ndarray) else 0


def start(
    config: RecorderConfig | None,
    *,
    model: str | None = None,
    state_layer: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> StepRecorder:
    """Starts the recorder of an engine; without settings, one that records nothing. See `Recorder`.

    Raises:
        ConfigurationError: the configured redaction cannot be loaded.
    """
    if config is None:
        return NoRecorder()
    return Recorder(config, model=model, state_layer=state_layer, decode=decode).start()
