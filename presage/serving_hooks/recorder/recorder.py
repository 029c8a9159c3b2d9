"""The recorder as the engine's thread sees it: it is told, numbers runs and steps, and passes on.

That thread has the model waiting, so it does no more than it must: who is told what, and when, goes on a tape, and rows
are made of it by the thread that writes. Numbers are given here, so whatever is dropped on the way leaves a gap in
them, by which ingestion knows. Whatever cannot be recorded is counted by its reason; nothing is raised, and nothing
waits for a disk or a lock.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from presage.features.moment import PREFILL, Moment
from presage.serving_hooks.recorder.assembly import Assembly
from presage.serving_hooks.recorder.clock import WallClock
from presage.serving_hooks.recorder.config import RecorderConfig, load_redact
from presage.serving_hooks.recorder.names import NO_NAME, is_name
from presage.serving_hooks.recorder.protocol import NamedStep, NoRecorder, StepRecorder
from presage.serving_hooks.recorder.queue import Queue
from presage.serving_hooks.recorder.rows import RecordedWorkflow, forecast_bytes, text_bytes
from presage.serving_hooks.recorder.tape import Tape
from presage.serving_hooks.recorder.texts import Texts
from presage.serving_hooks.recorder.writer import Writer

if TYPE_CHECKING:
    from presage.serving_hooks.forecasting.live import LiveForecast

_MOST_RUNS: Final = 100_000
_MOST_TYPES: Final = 1_000
"""A store has a folder for each workflow type, and types are what clients say."""
_MOST_RUNNING: Final = 16_384
_CALLS_A_ROW: Final = 4
_KEPT_SHARE: Final = 64
"""A state is copied if the array it is a row of takes more than this part of what may wait."""


class Recorder:
    """Records the steps of one engine; see `protocol.py` for who calls what.

    Args:
        config: its settings.
        model: what the engine serves.
        state_layer: the layer of the states it is told, counted from 1; None for those after the final norm.
        decode: makes a text of token ids.
        instance: name of this engine in the recording; no two engines that share a folder may have the same. None
            makes one of the time and chance.
        clock: the time of day.

    Raises:
        ConfigurationError: the redaction that is named cannot be loaded.
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
    ) -> None:
        self.instance = instance or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        self._clock = clock or WallClock()
        self._states, self._text = config.states, config.text == "on"
        self._counts: Counter[str] = Counter()
        heard: Counter[str] = Counter()
        room = config.queue_mb * 2**20
        queue = Queue(config.queue_rows, room, heard)
        self._assembly = Assembly(queue, self._clock, heard)
        # Looked up once: all of this is cold when it is called, and each further object costs the thread a miss.
        self._begun, self._completed = self._assembly.begun, self._assembly.completed
        self._state, self._forecast = self._assembly.state, self._assembly.forecast
        self._now_s = self._clock.rising
        self.tape = Tape(_CALLS_A_ROW * config.queue_rows, room, queue, self._counts, heard)
        self._tell, self._most_kept = self.tape.tell, room // _KEPT_SHARE
        texts = Texts(load_redact(config.redact), decode)
        self.writer = Writer(config, self.tape, queue, texts, self._clock, self.instance, model, state_layer, heard)
        self._runs: dict[tuple[str, str], RecordedWorkflow] = {}
        self._types: set[str] = set()
        self._begun_runs = 0
        self._running: set[str] = set()

    def start(self) -> Self:
        """Writes from now on, in a thread of its own."""
        self.writer.start()
        return self

    def begun(
        self,
        request_id: str,
        step: NamedStep,
        *,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        input_text: str | Sequence[int] | None = None,
    ) -> None:
        """A step has been selected; it and its workflow have a number from here on.

        Args:
            request_id: the engine's name of the request.
            step: which step of which workflow. `number` is kept beside our own.
            input_tokens: size of the prompt.
            cached_input_tokens: how much of it was in the cache.
            input_text: the prompt, or its token ids, which must not be changed later; left out unless text is on.
        """
        try:
            run = self._runs.get((step.workflow_type, step.workflow_id)) or self._new_run(step)
            if run is None or request_id in self._running:
                return
            number = run.steps
            run.steps = number + 1
            if len(self._running) >= _MOST_RUNNING:
                self._counts["not recorded: too many steps at once"] += 1
                return
            text, size = self._kept_text(input_text) if self._text else (None, 0)
            told = self._now_s(), request_id, run, number, step, input_tokens, cached_input_tokens, text
            if self._tell(self._begun, told, size):
                self._running.add(request_id)
                run.told = True
        except Exception as error:
            self._failed(error)

    def state(self, request_id: str, moment: Moment, state: Any) -> None:
        """A hidden state of a step that is running, or has just completed.

        Args:
            request_id: as `begun` had it.
            moment: which.
            state: float16 or float32 [d], of the model that is served and of one layer, not projected. It must not be
                changed later. The whole array that it is a row of is kept for some milliseconds; a row of a large
                one is copied.
        """
        try:
            if self._states == "off" or (self._states == "prefill" and moment != PREFILL):
                return
            size = _kept_bytes(state)
            if size > self._most_kept:
                state, size = state.copy(), state.nbytes
            self._tell(self._state, (self._now_s(), request_id, moment, state), size)
        except Exception as error:
            self._failed(error)

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """A forecast was made for a step that is running, or has just completed."""
        try:
            self._tell(self._forecast, (self._now_s(), request_id, live), forecast_bytes(live))
        except Exception as error:
            self._failed(error)

    def completed(
        self,
        request_id: str,
        *,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        output_text: str | Sequence[int] | None = None,
    ) -> None:
        """A step is over, with its last token or without; one that never began is passed over.

        Args:
            request_id: as `begun` had it.
            output_tokens: how many it has produced.
            finish_reason: why it stopped, "abort" where it was broken off.
            output_text: the answer, or its token ids; as `input_text`.
        """
        try:
            if request_id not in self._running:
                return
            self._running.discard(request_id)
            text, size = self._kept_text(output_text) if self._text else (None, 0)
            told = self._now_s(), request_id, output_tokens, finish_reason, text
            self._tell(self._completed, told, size, always=True)
        except Exception as error:
            self._failed(error)

    def ended(self, workflow_type: str, workflow_id: str, how: str) -> None:
        """A workflow has ended: SAID or SILENT. A step of that name begins another run; steps still running belong to
        the one that has ended."""
        try:
            run = self._runs.pop((workflow_type, workflow_id), None)
            if run is not None and run.told:
                self._tell(self._assembly.ended, (self._now_s(), run, how), always=True)
        except Exception as error:
            self._failed(error)

    def status(self) -> dict[str, Any]:
        """What was recorded and what was not, by reason. May be asked by any thread."""
        counts = Counter(dict(self._counts))  # copies: the threads go on counting
        counts.update(dict(self.writer.counts))
        return {
            "on": True,
            "instance": self.instance,
            "waiting": self.writer.waiting,
            "recording": self.writer.state,
            "counts": dict(counts),
        }

    def close(self) -> None:
        """Writes what waits, and steps that have not completed as far as they are known; waits some seconds at most."""
        self._tell(self._assembly.finish, (self._now_s(),), always=True)
        self.tape.close()
        self._running.clear()
        self._runs.clear()
        self.writer.close()

    def _new_run(self, step: NamedStep) -> RecordedWorkflow | None:
        workflow_type, workflow_id = step.workflow_type, step.workflow_id
        # An empty type is one the client did not say.
        if not is_name(workflow_id) or not (workflow_type == "" or is_name(workflow_type)):
            self._counts[NO_NAME] += 1
            return None
        if len(self._runs) >= _MOST_RUNS:
            self._counts["not recorded: too many workflows"] += 1
            return None
        if workflow_type not in self._types:
            if len(self._types) >= _MOST_TYPES:
                self._counts["not recorded: too many workflow types"] += 1
                return None
            self._types.add(workflow_type)
        run = self._runs[workflow_type, workflow_id] = RecordedWorkflow(self._begun_runs, workflow_type, workflow_id)
        self._begun_runs += 1
        return run

    def _kept_text(self, given: str | Sequence[int] | None) -> tuple[str | Sequence[int] | None, int]:
        """A text and its bytes; nothing where there is no room for it: its step is worth more."""
        try:
            size = text_bytes(given)
        except Exception as error:
            self._failed(error)
            return None, 0
        if self.tape.fits(size):
            return given, size
        self._counts["text not kept: queue full"] += 1
        return None, 0

    def _failed(self, error: Exception) -> None:
        self._counts[f"failed: {type(error).__name__}"] += 1


def _kept_bytes(state: Any) -> int:
    """What is kept with a state: a row keeps the array it belongs to."""
    base = getattr(state, "base", None)
    whole = base if isinstance(base, np.ndarray) else state
    return whole.nbytes if isinstance(whole, np.ndarray) else 0


def start(
    config: RecorderConfig | None,
    *,
    model: str | None = None,
    state_layer: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> StepRecorder:
    """The recorder of an engine, writing from now on; one that records nothing where there are no settings.

    Args:
        config: its settings.
        model: what the engine serves; the traces' column `model`.
        state_layer: the layer of the states it tells, counted from 1; None for those after the final norm. The traces'
            column `state_layer`.
        decode: makes a text of token ids, in the thread that writes; for engines that hold no texts.

    Raises:
        ConfigurationError: the redaction that is named cannot be loaded.
    """
    if config is None:
        return NoRecorder()
    return Recorder(config, model=model, state_layer=state_layer, decode=decode).start()
