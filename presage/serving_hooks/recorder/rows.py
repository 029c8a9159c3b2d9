"""The way of an event to its row: the buffer between the engine thread and the writer thread, and the queue of rows.

Everything here runs in the writer thread, except that the engine thread fills the buffer and numbers runs and steps.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from presage.datasets.schema.names import MAX_NAME
from presage.features.moment import PREFILL, Moment
from presage.serving_hooks.counts import RECORDER, EventCounts
from presage.serving_hooks.workflows.recorded import RecordedWorkflow

if TYPE_CHECKING:
    from presage.serving_hooks.workflows.identity import Step
    from presage.serving_hooks.workflows.live import LiveForecast

NO_NAME: Final = f"no name, or none of at most {MAX_NAME} printable characters"
FULL: Final = "queue full"
_CLOSED: Final = "recorder closed"
_SET_BACK_S: Final = 1.0

_MAX_COUNT: Final = 2**31
_MAX_LATE: Final = 1024
_ROW_BYTES: Final = 1024
"""Approximate memory of a row without its texts, states and probabilities."""
_CHARACTER_BYTES: Final = 2
_TOKEN_BYTES: Final = 36
# dtype.name takes microseconds
_STATE_TYPES: Final = {np.dtype(np.float16): "float16", np.dtype(np.float32): "float32"}

Handler = Callable[..., None]

Text = str | Sequence[int]
"""A text, or its token ids."""


class State(NamedTuple):
    """A copy of a hidden state: the name of its NumPy type, and its bytes."""

    dtype: str
    data: bytes


@dataclass(slots=True, eq=False)
class StepRow:
    """A step; times in microseconds since 1970, `completed_s` by the monotonic clock.

    A row that awaits its completion state gets it while it waits in the queue.
    """

    run: RecordedWorkflow
    step: int
    step_id: str | None
    agent: str
    started_at: int
    client_step: int | None
    input_tokens: int | None
    cached_input_tokens: int | None
    input_text: Text | None
    system_prompt: str | None = None
    identity_confidence: float | None = None
    goes_on_from: int | None = None
    quotes: Sequence[int] | None = None
    output_tokens: int | None = None
    output_text: Text | None = None
    finish_reason: str | None = None
    model: str | None = None
    decision: str | None = None
    tools_called: tuple[str, ...] | None = None
    ended_at: int | None = None
    prefill_state: State | None = None
    completion_state: State | None = None
    completed_s: float = 0.0
    awaits_state: bool = False

    @property
    def size(self) -> int:
        """Approximate memory, in bytes."""
        states = sum(len(state.data) for state in (self.prefill_state, self.completion_state) if state is not None)
        texts = sum(map(text_bytes, (self.input_text, self.system_prompt, self.output_text)))
        return _ROW_BYTES + states + texts

    def release(self) -> None:
        """Drops texts and states of a written row, which stays known for late events."""
        self.input_text = self.system_prompt = self.output_text = None
        self.prefill_state = self.completion_state = None


class LateColumns(NamedTuple):
    """Columns that a gateway knows only once a step has been answered; an engine knows its own at the beginning.

    `decision` is JSON of what the gateway decided, without texts.
    """

    input_tokens: int | None = None
    cached_input_tokens: int | None = None
    model: str | None = None
    decision: str | None = None


class ForecastRow(NamedTuple):
    """A forecast made for a step."""

    run: RecordedWorkflow
    step: int
    made_at: int
    live: LiveForecast

    @property
    def size(self) -> int:
        """Approximate memory, in bytes."""
        return forecast_bytes(self.live)


class EndRow(NamedTuple):
    """The end of a run; `steps` is a copy, since the engine thread keeps counting."""

    run: RecordedWorkflow
    steps: int
    how: str
    ended_at: int
    size: int = _ROW_BYTES


class ReportRow(NamedTuple):
    """What was reported of an answer; without a step, of the whole run."""

    run: RecordedWorkflow
    step: int | None
    success: bool
    score: float | None
    reported_at: int
    size: int = _ROW_BYTES


Row = StepRow | ForecastRow | EndRow | ReportRow


class RowQueue:
    """Rows waiting for the disk, at most `rows` of `size` bytes. Ends are small and needed: twice as many may wait."""

    def __init__(self, rows: int, size: int, counts: EventCounts) -> None:
        self._rows, self._size, self._counts = rows, size, counts
        self._waiting: deque[Row] = deque()
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, row: Row) -> bool:
        """Adds a row, or drops and counts it; returns whether it was added."""
        size = row.size
        room = 2 * self._rows if isinstance(row, EndRow) else self._rows
        if len(self._waiting) >= room or self.waiting_bytes + size > self._size:
            self._counts.add(RECORDER, "dropped", FULL)
            return False
        self.waiting_bytes += size
        self._waiting.append(row)
        return True

    def first(self) -> Row | None:
        """The oldest row; None if the queue is empty."""
        return self._waiting[0] if self._waiting else None

    def take(self) -> Row:
        """Removes and returns the oldest row."""
        row = self._waiting.popleft()
        self.waiting_bytes -= row.size
        return row


class WallClock:
    """Time of day that never goes back: read once at the start, then advanced by a monotonic clock.

    So the rows of a workflow are in the order in which its steps started, and no step ends before it starts, even if
    the machine's clock is set back. Only `monotonic` may be called by more than one thread.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.monotonic = wall, monotonic
        self._wall_start, self._monotonic_start = wall(), monotonic()
        self._last_us = 0
        self._behind_s = 0.0

    def at_us(self, monotonic_s: float) -> int:
        """Microseconds since 1970 at a monotonic time; call it with rising times."""
        at = int((self._wall_start + monotonic_s - self._monotonic_start) * 1e6)
        if at < self._last_us:
            return self._last_us
        self._last_us = at
        return at

    def set_back(self) -> bool:
        """Whether the machine's clock was set back by more than a second since the last call."""
        behind = self._wall_start + self.monotonic() - self._monotonic_start - self._wall()
        before, self._behind_s = self._behind_s, behind
        return behind - before > _SET_BACK_S


class EventBuffer:
    """Events in the order in which they happened, each a handler and its arguments. Without a lock: the engine thread
    puts, the writer thread drains, and each writes only its own counts and byte counter.

    Args:
        events: how many may wait.
        size: bytes that may wait, approximately, here and in the queue of the rows made of them.
    """

    def __init__(
        self, events: int, size: int, queue: RowQueue, put_counts: EventCounts, drain_counts: EventCounts
    ) -> None:
        self._most, self._size, self._queue = events, size, queue
        self._put_counts, self._drain_counts = put_counts, drain_counts
        self._waiting: deque[tuple[Handler, tuple[Any, ...], int]] = deque()
        self._put_bytes = self._drained_bytes = 0
        self._drained_to_s = -math.inf
        self._reason = FULL

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Approximate memory of everything that waits, here and in the queue."""
        return self._put_bytes - self._drained_bytes + self._queue.waiting_bytes

    def put(self, handler: Handler, args: tuple[Any, ...], size: int = 0, *, always: bool = False) -> bool:
        """Adds an event, or drops and counts it; returns whether it was added.

        Args:
            handler: called by the writer thread with `args`; the first is the time of the event by the monotonic clock,
                in seconds, and `size` counts the bytes of the large ones.
            always: never drop it. Only for events that end something already added, which they cannot outnumber.
        """
        waits = self._put_bytes - self._drained_bytes + self._queue.waiting_bytes  # inlined: a call costs more
        full = len(self._waiting) >= self._most or (size and waits + size > self._size)
        if full and not always:
            self._put_counts.add(RECORDER, "dropped", self._reason)
            return False
        self._put_bytes += size
        self._waiting.append((handler, args, size))
        return True

    def fits(self, size: int) -> bool:
        """Whether there is room for this many bytes more."""
        return not size or self.waiting_bytes + size <= self._size

    def close(self) -> None:
        """Drops every later event."""
        self._most, self._reason = 0, _CLOSED

    def drained_to_s(self, now_s: float) -> float:
        """Every event before this time has been handled."""
        return self._drained_to_s if self._waiting else now_s

    def drain(self, most: int) -> bool:
        """Handles up to `most` events, oldest first; returns whether more wait."""
        for _ in range(most):
            if not self._waiting:
                return False
            handler, args, size = self._waiting.popleft()
            self._drained_bytes += size
            self._drained_to_s = args[0]
            try:
                handler(*args)
            except Exception as error:
                self._drain_counts.add(RECORDER, "failed", type(error).__name__)
        return bool(self._waiting)


class RowAssembler:
    """Makes rows of events, whose times are seconds of the monotonic clock.

    A step is queued once it has completed. Its last state and forecast may arrive a little later; the state is then
    added to the row if the row still awaits it.
    """

    def __init__(self, queue: RowQueue, clock: WallClock, counts: EventCounts) -> None:
        self._queue, self._at_us, self._counts = queue, clock.at_us, counts
        self.running: dict[str, StepRow] = {}
        self.late: OrderedDict[str, StepRow] = OrderedDict()

    def begun(
        self,
        at_s: float,
        request_id: str,
        run: RecordedWorkflow,
        number: int,
        step: Step,
        input_tokens: int | None,
        cached_input_tokens: int | None,
        input_text: Text | None,
        system_prompt: str | None = None,
        goes_on_from: int | None = None,
        quotes: Sequence[int] = (),
    ) -> None:
        """A request was selected for the first time; `number` is its place in the run."""
        agent = step.sent[1]
        if not (agent == "" or is_name(agent)):
            self._counts.add(RECORDER, "not recorded", NO_NAME)
            return
        row = StepRow(
            run,
            number,
            _name_or_none(request_id),
            agent,
            self._at_us(at_s),
            _count_or_none(step.number),
            _count_or_none(input_tokens),
            _count_or_none(cached_input_tokens),
            input_text,
            system_prompt,
            None if step.source in ("explicit", "new") else step.confidence,
            goes_on_from,
            quotes or None,
        )
        run.running += 1
        self.running[request_id] = row

    def states(self, at_s: float, request_ids: Sequence[str], moment: Moment, states: Any) -> None:
        """Copies hidden states of steps that run or have just completed."""
        dtype = _STATE_TYPES.get(states.dtype) if isinstance(states, np.ndarray) else None
        if dtype is None or states.ndim != 2 or not states.size or len(states) != len(request_ids):
            self._counts.add(RECORDER, "state", "no float16 or float32 array [n, d]")
            return
        for request_id, state in zip(request_ids, states, strict=True):
            row = self._row(request_id)
            if row is None or not (row.awaits_state or row.ended_at is None):
                continue
            copied = State(dtype, state.tobytes())
            if row.ended_at is not None:
                self._queue.waiting_bytes += len(copied.data)
            if moment == PREFILL:
                row.prefill_state = copied
            else:
                row.completion_state, row.awaits_state = copied, False

    def forecast(self, at_s: float, request_id: str, live: LiveForecast) -> None:
        """A forecast was made for such a step."""
        row = self._row(request_id)
        if row is not None:
            self._queue.offer(ForecastRow(row.run, row.step, self._at_us(at_s), live))

    def completed(
        self,
        at_s: float,
        request_id: str,
        output_tokens: int | None,
        finish_reason: str | None,
        output_text: Text | None,
        state_comes: bool,
        found: LateColumns | None = None,
    ) -> None:
        """A request left the engine."""
        row = self.running.pop(request_id, None)
        if row is None:
            return
        row.output_tokens, row.finish_reason = _count_or_none(output_tokens), _name_or_none(finish_reason)
        row.ended_at = self._at_us(at_s)
        row.output_text = output_text
        if found is not None:
            row.input_tokens = _count_or_none(found.input_tokens)
            row.cached_input_tokens = _count_or_none(found.cached_input_tokens)
            row.model, row.decision = _name_or_none(found.model), found.decision
        row.awaits_state = state_comes and row.completion_state is None
        self._enqueue(at_s, request_id, row)

    def answered(self, request_id: str, tools: Sequence[str]) -> None:
        """The answer of a step was parsed; ignored once its row is written."""
        row = self._row(request_id)
        if row is not None:
            row.tools_called = tuple(filter(None, map(_name_or_none, tools)))

    def ended(self, at_s: float, run: RecordedWorkflow, how: str) -> None:
        """A run ended; no other step of it begins."""
        run.how = how
        self._enqueue_end(at_s, run)

    def outcome(self, at_s: float, run: RecordedWorkflow, step: int | None, success: bool, score: float | None) -> None:
        """Somebody reported whether an answer, or a whole run, was right."""
        self._queue.offer(ReportRow(run, step, success, score, self._at_us(at_s)))

    def finish(self, at_s: float) -> None:
        """Queues the steps that have not completed, with their known columns."""
        for request_id, row in self.running.items():
            self._enqueue(at_s, request_id, row)
        self.running.clear()

    def _row(self, request_id: str) -> StepRow | None:
        return self.running.get(request_id) or self.late.get(request_id)

    def _enqueue(self, at_s: float, request_id: str, row: StepRow) -> None:
        row.completed_s = at_s
        if self._queue.offer(row):
            self.late[request_id] = row
            if len(self.late) > _MAX_LATE:
                self.late.popitem(last=False)
        row.run.running -= 1
        self._enqueue_end(at_s, row.run)

    def _enqueue_end(self, at_s: float, run: RecordedWorkflow) -> None:
        """Queues the end after the last step: a reader that sees it knows that missing steps are lost."""
        if run.how is not None and not run.running:
            self._queue.offer(EndRow(run, run.steps, run.how, self._at_us(at_s)))


def is_name(value: object) -> bool:
    """Whether it is a text of 1 to 256 printable characters."""
    return _name_or_none(value) not in (None, "")


def text_bytes(text: Text | None) -> int:
    """Approximate memory of a text or of its token ids."""
    if text is None:
        return 0
    return len(text) * (_CHARACTER_BYTES if isinstance(text, str) else _TOKEN_BYTES)


def forecast_bytes(live: LiveForecast) -> int:
    """Approximate memory of a forecast."""
    return _ROW_BYTES + int(live.probabilities.nbytes)


def _name_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable() else None


def _count_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < _MAX_COUNT else None
