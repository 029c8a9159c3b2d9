"""What was told becomes rows, in the thread that writes.

A step is handed on as a whole when it is over, so what is known of one that runs waits here; what still comes of one
that is over, its last state and its last forecast, is put into its row while that waits in the queue.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from presage.features.moment import PREFILL, Moment
from presage.serving_hooks.recorder.clock import WallClock
from presage.serving_hooks.recorder.names import NO_NAME, count_or_none, is_name, name_or_none
from presage.serving_hooks.recorder.protocol import NamedStep
from presage.serving_hooks.recorder.queue import Queue
from presage.serving_hooks.recorder.rows import EndRow, ForecastRow, RecordedWorkflow, State, StepRow

if TYPE_CHECKING:
    from presage.serving_hooks.forecasting.live import LiveForecast

_MOST_LATE: Final = 1024
_STATE_TYPES: Final = {
    np.dtype(np.float16): "float16",
    np.dtype(np.float32): "float32",
}  # dtype.name takes microseconds


class Assembly:
    """Steps that run, and those that are just over; of the thread that writes. All times by the rising clock, seconds.

    Args:
        queue: takes the rows.
        clock: makes the time of day.
        counts: of what cannot be recorded, by reason.
    """

    def __init__(self, queue: Queue, clock: WallClock, counts: Counter[str]) -> None:
        self._queue, self._clock, self._counts = queue, clock, counts
        self._running: dict[str, StepRow] = {}
        self._late: OrderedDict[str, StepRow] = OrderedDict()

    def begun(
        self,
        at_s: float,
        request_id: str,
        run: RecordedWorkflow,
        number: int,
        step: NamedStep,
        input_tokens: int | None,
        cached_input_tokens: int | None,
        input_text: str | Sequence[int] | None,
    ) -> None:
        """A step has been selected; `number` is its place in the run."""
        if not (step.agent == "" or is_name(step.agent)):
            self._counts[NO_NAME] += 1
            return
        row = StepRow(run, number, name_or_none(request_id), step.agent, self._clock.at_us(at_s))
        row.client_step = count_or_none(step.number)
        row.input_tokens, row.cached_input_tokens = count_or_none(input_tokens), count_or_none(cached_input_tokens)
        row.input_text = input_text
        run.running += 1
        self._running[request_id] = row

    def state(self, at_s: float, request_id: str, moment: Moment, state: Any) -> None:
        """A state of a step that runs, or is just over; copied here."""
        dtype = _STATE_TYPES.get(state.dtype) if isinstance(state, np.ndarray) else None
        if dtype is None or state.ndim != 1 or not state.size:
            self._counts["state: no float16 or float32 array [d]"] += 1
            return
        row = self._row(request_id)
        if row is None:
            return
        copied = State(dtype, state.tobytes())
        if moment == PREFILL:
            row.prefill_state = copied
        else:
            row.completion_state = copied

    def forecast(self, at_s: float, request_id: str, live: LiveForecast) -> None:
        """A forecast for such a step."""
        row = self._row(request_id)
        if row is not None:
            self._queue.offer(ForecastRow(row.run, row.step, self._clock.at_us(at_s), live))

    def completed(
        self,
        at_s: float,
        request_id: str,
        output_tokens: int | None,
        finish_reason: str | None,
        output_text: str | Sequence[int] | None,
    ) -> None:
        """A step is over."""
        row = self._running.pop(request_id, None)
        if row is None:
            return
        row.output_tokens, row.finish_reason = count_or_none(output_tokens), name_or_none(finish_reason)
        row.ended_at = self._clock.at_us(at_s)
        row.output_text = output_text
        self._over(at_s, request_id, row)

    def ended(self, at_s: float, run: RecordedWorkflow, how: str) -> None:
        """No other step of this run begins."""
        run.how = how
        self._end(at_s, run)

    def finish(self, at_s: float) -> None:
        """Steps that have not completed are over, as far as they are known."""
        for request_id, row in self._running.items():
            self._over(at_s, request_id, row)
        self._running.clear()

    def _row(self, request_id: str) -> StepRow | None:
        return self._running.get(request_id) or self._late.get(request_id)

    def _over(self, at_s: float, request_id: str, row: StepRow) -> None:
        row.over_s = at_s
        if self._queue.offer(row):
            self._late[request_id] = row
            if len(self._late) > _MOST_LATE:
                self._late.popitem(last=False)
        row.run.running -= 1
        self._end(at_s, row.run)

    def _end(self, at_s: float, run: RecordedWorkflow) -> None:
        """The end goes behind the last step, so whoever reads it knows that all others are there or lost."""
        if run.how is not None and not run.running:
            self._queue.offer(EndRow(run, run.steps, run.how, self._clock.at_us(at_s)))
