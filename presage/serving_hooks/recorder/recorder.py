"""The recorder as the engine's thread sees it: it is told, numbers runs and steps, and hands over.

A step is handed over as a whole when it is over, so what a step told at its beginning waits here. Whatever cannot be
recorded is counted by its reason; nothing is raised, nothing waits for a disk or a lock, and a row that is dropped
leaves a gap in the numbers, by which ingestion knows.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from presage.features.moment import PREFILL, Moment
from presage.serving_hooks.recorder.clock import Clock
from presage.serving_hooks.recorder.config import RecorderConfig, load_redact
from presage.serving_hooks.recorder.names import NO_NAME, count_or_none, is_name, name_or_none
from presage.serving_hooks.recorder.protocol import NamedStep
from presage.serving_hooks.recorder.queue import Queue
from presage.serving_hooks.recorder.rows import EndRow, ForecastRow, Run, State, StepRow
from presage.serving_hooks.recorder.texts import Texts
from presage.serving_hooks.recorder.writer import Writer

if TYPE_CHECKING:
    from presage.serving_hooks.live import LiveForecast

_MOST_RUNS: Final = 100_000
_MOST_TYPES: Final = 1_000
"""A store has a folder for each workflow type, and types are what clients say."""
_MOST_RUNNING: Final = 16_384
_MOST_LATE: Final = 1024
_STATE_TYPES: Final = {
    np.dtype(np.float16): "float16",
    np.dtype(np.float32): "float32",
}  # dtype.name takes microseconds


class Recorder:
    """Records the steps of one engine; see `protocol.py` for who calls what.

    Args:
        config: its settings.
        model: what the engine serves.
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
        decode: Callable[[Sequence[int]], str] | None = None,
        instance: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.instance = instance or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        self._clock = clock or Clock()
        self._states, self._text = config.states, config.text == "on"
        self._linger = config.states == "both"
        self._counts: Counter[str] = Counter()
        self.queue = Queue(config.queue_rows, config.queue_mb * 2**20, self._counts)
        texts = Texts(load_redact(config.redact), decode)
        self.writer = Writer(config, self.queue, texts, self._clock, self.instance, model)
        self._runs: dict[tuple[str, str], Run] = {}
        self._types: set[str] = set()
        self._begun_runs = 0
        self._running: dict[str, StepRow] = {}
        self._late: OrderedDict[str, StepRow] = OrderedDict()

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
            run = self._run(step.workflow_type, step.workflow_id)
            if run is None or request_id in self._running:
                return
            number = run.steps
            run.steps += 1
            if not self._may_begin(step.agent):
                return
            row = StepRow(run, number, name_or_none(request_id), step.agent, self._clock.now_us())
            row.client_step = count_or_none(step.number)
            row.input_tokens, row.cached_input_tokens = count_or_none(input_tokens), count_or_none(cached_input_tokens)
            if self._text:
                row.input_text = input_text
            run.running += 1
            self._running[request_id] = row
        except Exception as error:
            self._failed(error)

    def state(self, request_id: str, moment: Moment, state: Any) -> None:
        """A hidden state of a step that is running, or has just completed; copied here.

        Args:
            request_id: as `begun` had it.
            moment: which.
            state: float16 or float32 [d], after the last norm; of the model that is served, not projected.
        """
        try:
            if self._states == "off" or (self._states == "prefill" and moment != PREFILL):
                return
            row = self._running.get(request_id) or self._late.get(request_id)
            if row is None:
                return
            dtype = _STATE_TYPES.get(state.dtype) if isinstance(state, np.ndarray) else None
            if dtype is None or state.ndim != 1 or not state.size:
                self._counts["state: no float16 or float32 array [d]"] += 1
                return
            copied = State(dtype, state.tobytes())
            if moment == PREFILL:
                row.prefill_state = copied
            else:
                row.completion_state = copied
        except Exception as error:
            self._failed(error)

    def forecast(self, request_id: str, live: LiveForecast) -> None:
        """A forecast was made for a step that is running, or has just completed."""
        try:
            row = self._running.get(request_id) or self._late.get(request_id)
            if row is not None:
                self.queue.offer(ForecastRow(row.run, row.step, self._clock.now_us(), live))
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
            row = self._running.pop(request_id, None)
            if row is None:
                return
            row.output_tokens, row.finish_reason = count_or_none(output_tokens), name_or_none(finish_reason)
            row.ended_at = self._clock.now_us()
            if self._text:
                row.output_text = output_text
            self._over(request_id, row)
        except Exception as error:
            self._failed(error)

    def ended(self, workflow_type: str, workflow_id: str, how: str) -> None:
        """A workflow has ended: SAID or SILENT. A step of that name begins another run; steps still running belong to
        the one that has ended."""
        try:
            run = self._runs.pop((workflow_type, workflow_id), None)
            if run is not None:
                run.how = how
                self._end(run)
        except Exception as error:
            self._failed(error)

    def status(self) -> dict[str, Any]:
        """What was recorded and what was not, by reason. May be asked by any thread."""
        counts = Counter(dict(self._counts))  # copies: the threads go on counting
        counts.update(dict(self.writer.counts))
        return {
            "on": True,
            "instance": self.instance,
            "waiting": len(self.queue),
            "recording": self.writer.state,
            "counts": dict(counts),
        }

    def close(self) -> None:
        """Writes what waits, and steps that have not completed as far as they are known; waits some seconds at most."""
        try:
            for request_id, row in list(self._running.items()):
                self._over(request_id, row)
            self._running.clear()
        except Exception as error:
            self._failed(error)
        self.writer.close()

    def _run(self, workflow_type: str, workflow_id: str) -> Run | None:
        run = self._runs.get((workflow_type, workflow_id))
        if run is not None:
            return run
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
        run = self._runs[workflow_type, workflow_id] = Run(self._begun_runs, workflow_type, workflow_id)
        self._begun_runs += 1
        return run

    def _may_begin(self, agent: str) -> bool:
        if not (agent == "" or is_name(agent)):
            self._counts[NO_NAME] += 1
            return False
        if len(self._running) >= _MOST_RUNNING:
            self._counts["not recorded: too many steps at once"] += 1
            return False
        return True

    def _over(self, request_id: str, row: StepRow) -> None:
        row.over_s = self._clock.rising()
        self.queue.offer(row)
        self._late[request_id] = row
        if len(self._late) > _MOST_LATE:
            self._late.popitem(last=False)
        row.run.running -= 1
        self._end(row.run)

    def _end(self, run: Run) -> None:
        """The end goes behind the last step, so whoever reads it knows that all others are there or lost."""
        if run.how is not None and not run.running:
            self.queue.offer(EndRow(run, run.steps, run.how, self._clock.now_us()))

    def _failed(self, error: Exception) -> None:
        self._counts[f"failed: {type(error).__name__}"] += 1
