"""Inputs and labels of the predictor of return times: one definition for training and serving.

The return time of a step is the time from its completion to the arrival of the workflow's next request. A row is an LLM
step at its completion. Its numbers are those of a length predictor (`lengths.py`); then RETURNS: what the step produced
and how long it took, and when the workflow returned after its earlier steps; then one column a finish reason and one a
tool, 1 for the reason of the step and for the tools that its answer calls (`served_steps.py`).

Steps may overlap. Every number counts what had happened when it was taken: at the arrival of a step, only steps that
had completed have produced their tokens.

An engine knows ENGINE_REASONS only. A predictor that learnt others, such as `tool_calls`, learnt them from parsed
answers: its reasons count as text (`parsed`), like the tools.

The label is in milliseconds: infinite where the workflow ended with the step, NaN where that or a time is unknown (also
in a workflow that was cut: `complete` false). Times are at least LEAST_MS.

Time stamps may be rounded down to seconds. A step that starts on a full second, less than one second before the step
before it ends, is taken to start where that one ends. No step starts before the previous one, or ends before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from presage.datasets.schema import ALIASES
from presage.errors import InputError
from presage.features.history import COUNTERS, PROGRESS, advance_progress, begin_progress, produce
from presage.features.input_profiles import ANSWERS, TOKENS, Sources
from presage.features.lengths import LengthEncoder, LengthWorkflow, count_of, length_rows
from presage.features.rows import PROMPT, PROMPT_COLUMN, TEXT_COLUMNS, LabelledRows
from presage.features.served_steps import TOOLS_CALLED, running_steps, served_steps
from presage.features.vocabulary import (
    TOOLS_KEPT,
    Vocabulary,
    encode,
    most_frequent,
    token_counts,
    tools_called,
    tools_of,
)

LEAST_MS: Final = 10.0
"""The shortest return time that is told from others, milliseconds."""
ENGINE_REASONS: Final = frozenset(("abort", "error", "length", "repetition", "stop"))
"""The finish reasons that vLLM's scheduler knows. It ends an answer that calls a tool with `stop`."""
SYNONYMS: Final = {
    "end_turn": "stop",
    "max_tokens": "length",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
}
"""Finish reasons as other interfaces name them, and their names in OpenAI's."""
REASONS_KEPT: Final = 8
_LATEST: Final = 5
_LONG: Final = float(np.log1p(30_000.0))
_DECAY: Final = 0.8
_SECOND: Final = 1000.0
_ALIAS: Final = {column: alias for alias, column in ALIASES.items()}

RETURNS: Final = (
    "output_tokens",
    "prompt_growth",
    "step_ms",
    "elapsed_ms",
    "in_flight",
    "reason_run",
    *(f"return_{i}" for i in range(1, _LATEST + 1)),
    "return_mean",
    "return_deviation",
    "return_least",
    "return_most",
    "return_recent",
    "returns_long",
    "same_reason_last",
    "same_reason_mean",
    "same_reason_returns",
)
"""Of the step: its output tokens; the tokens of its prompt beyond the previous prompt and answer; the time of the step
and since the first; other steps of the workflow that still run; steps in a row with its finish reason. Of the returns
so far: the latest, mean, deviation, extremes, a recent mean, and the recent share above 30 s; the last, the mean and
the number of those after steps with the same finish reason. Tokens are log(1 + x), times log(1 + ms)."""
_TOKEN_COLUMNS: Final = 2
"""The first columns of RETURNS come from token counts."""
_REASON_PLACES: Final = tuple(place for place, name in enumerate(RETURNS) if "reason" in name)
"""The places in RETURNS that depend on finish reasons."""
_PROGRESS: Final = slice(len(PROMPT), len(PROMPT) + len(PROGRESS))

# The state of a workflow: these numbers, then three for each finish reason (last return, sum, number).
_FIRST, _LAST_END, _LAST_PROMPT, _LAST_OUTPUT, _LAST_REASON, _RUN, _REASON_BEFORE, _RUN_BEFORE = range(8)
_FLYING, _COUNT, _SUM, _SQUARES, _LEAST, _MOST, _RECENT, _SHARE = range(8, 16)
_RING: Final = 16
_OF_REASONS: Final = _RING + _LATEST


@dataclass(frozen=True, eq=False)
class ReturnEncoder:
    """Encodes completed steps of a trace (`return_rows`) or of a running workflow (`ReturnWorkflow`).

    Attributes:
        course: of the workflow so far.
        reasons: finish reasons with a column of their own, sorted.
        tools: those with a column of their own, sorted.
    """

    course: LengthEncoder
    reasons: tuple[str, ...]
    tools: tuple[str, ...]

    @classmethod
    def fit(cls, table: pa.Table) -> ReturnEncoder:
        """Fit vocabularies on a training trace."""
        steps = served_steps(table)
        tools, reasons = pc.list_flatten(steps[TOOLS_CALLED]), most_frequent(_reasons(steps), REASONS_KEPT)
        return cls(LengthEncoder.fit(steps), tuple(sorted(reasons)), tuple(sorted(most_frequent(tools, TOOLS_KEPT))))

    @property
    def vocabulary(self) -> Vocabulary:
        """Workflow types and agents."""
        return self.course.vocabulary

    @property
    def names(self) -> tuple[str, ...]:
        """What the F columns of `numbers` are."""
        reasons, tools = (f"reason_{name}" for name in self.reasons), (f"tool_{name}" for name in self.tools)
        return (*self.course.names, *RETURNS, *reasons, TOOLS_CALLED, *tools)

    @property
    def unknown_column(self) -> int:
        """As `LengthEncoder.unknown_column`."""
        return self.course.unknown_column

    @property
    def parsed(self) -> bool:
        """Whether finish reasons are those of parsed answers, which an engine does not know."""
        return not ENGINE_REASONS.issuperset(self.reasons)

    @cached_property
    def answer_columns(self) -> NDArray[np.int64]:
        """The columns that are known from the parsed answer only."""
        begin = len(self.course.names)
        reasons = begin + np.array([*_REASON_PLACES, *range(len(RETURNS), len(RETURNS) + len(self.reasons))])
        tools = begin + len(RETURNS) + len(self.reasons) + np.arange(1 + len(self.tools))
        return np.concatenate([reasons, tools]) if self.parsed else tools

    @property
    def text_columns(self) -> tuple[int, ...]:
        """The columns of which one is known if a row has a text, or its answer was parsed."""
        reason = len(self.course.names) + len(RETURNS)
        return (*TEXT_COLUMNS, *((reason,) if self.parsed else ()), reason + len(self.reasons))

    def reason(self, name: Any) -> int:
        """Index of a finish reason: F for one that is unknown, F + 1 for none."""
        if name is None:
            return len(self.reasons) + 1
        name = SYNONYMS.get(name, name) if isinstance(name, str) else name
        return self.reasons.index(name) if name in self.reasons else len(self.reasons)

    def observed(self, rows: LabelledRows, sources: Sources) -> LabelledRows:
        """The rows of the same trace without all other sources; the labels stay."""
        seen = self.course.observed(rows, sources)
        begin = len(self.course.names)
        if ANSWERS not in sources:
            seen.numbers[:, self.answer_columns] = np.nan
        if TOKENS not in sources:
            seen.numbers[:, begin : begin + _TOKEN_COLUMNS] = np.nan
        return seen

    def nameless(self, rows: LabelledRows) -> LabelledRows:
        """As `LengthEncoder.nameless`."""
        return self.course.nameless(rows)

    def with_unknown_names(self, rows: LabelledRows, rng: np.random.Generator) -> LabelledRows:
        """As `LengthEncoder.with_unknown_names`."""
        return self.course.with_unknown_names(rows, rng)

    def to_config(self) -> dict[str, Any]:
        """As the configuration of an artefact keeps it; JSON values only."""
        return {"course": self.course.to_config(), "reasons": list(self.reasons), "tools": list(self.tools)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ReturnEncoder:
        """Inverse of `to_config`."""
        course = LengthEncoder.from_artefact(config["course"], {})
        return cls(course, tuple(config["reasons"]), tuple(config["tools"]))


def return_rows(table: pa.Table, encoder: ReturnEncoder) -> LabelledRows:
    """Rows of a trace in canonical order (as `read_traces` returns it); raises TraceError without an LLM step."""
    steps = served_steps(table)
    rows = length_rows(steps, encoder.course, "step")
    started, ended = (_milliseconds(steps[name]) for name in ("started_at", "ended_at"))
    given = steps["finish_reason"].is_valid().to_numpy()
    reason = np.where(given, encode(_reasons(steps), encoder.reasons), len(encoder.reasons) + 1)
    offsets = np.r_[np.flatnonzero(np.diff(rows.workflow, prepend=-1)), len(rows)].astype(np.int64)
    complete = np.asarray(steps["complete"].to_numpy(), bool)
    progress, numbers, label = _returns(
        offsets,
        started,
        ended,
        reason.astype(np.int64),
        rows.agent,
        rows.numbers[:, PROMPT_COLUMN].astype(np.float64),
        token_counts(steps["output_tokens"]).astype(np.float64),
        complete,
        len(encoder.reasons),
        len(encoder.vocabulary.agents),
    )
    rows.numbers[:, _PROGRESS] = progress
    called = tools_called(steps[TOOLS_CALLED], encoder.tools)
    return replace(
        rows,
        target="return",
        numbers=np.concatenate([rows.numbers, numbers, called], axis=1, dtype=np.float32),
        label=label,
        lower_bound=np.isnan(label) & ~complete,
    )


Row = tuple[int, int, int, NDArray[np.float32]]
"""The workflow type, agent, model and numbers float32 [F] of a row."""


class BegunStep(NamedTuple):
    """A step between its arrival and its completion: the course of its workflow at its arrival, and when that was."""

    course: Row
    at: float


class ReturnWorkflow:
    """State of a running workflow: call `arrived`, `completed` and, if known, `answered`, in the order of events.

    Rows equal those of `return_rows` bit by bit. Its size is constant; callers keep the steps in flight. Times are
    milliseconds, NaN if unknown.
    """

    __slots__ = ("_course", "_encoder", "_row", "_state")

    def __init__(self, encoder: ReturnEncoder, workflow_type: str) -> None:
        self._encoder, self._course = encoder, LengthWorkflow(encoder.course, workflow_type)
        self._state = np.empty(_OF_REASONS + 3 * (len(encoder.reasons) + 2), np.float64)
        self._row: Row | None = None
        _begin(self._state)

    def arrived(self, step: Mapping[str, Any], now: float) -> BegunStep:
        """A step arrives; keyed by column names of traces. Raises InputError for an invalid token count or text."""
        begun = BegunStep(self._course.begun(step), now)
        _arrive(self._state, now)
        self._row = None
        return begun

    def completed(self, begun: BegunStep, step: Mapping[str, Any], now: float) -> Row:
        """The step completes: its row as long as its answer is not parsed. Raises InputError as `arrived`."""
        encoder = self._encoder
        workflow_type, agent, model, course = begun.course
        self._course.completed(step)
        reason = encoder.reason(None if encoder.parsed else step.get("finish_reason"))
        output = float(np.float32(count_of(step, "output_tokens")))
        numbers = np.empty(len(course) + len(RETURNS) + len(encoder.reasons) + 1 + len(encoder.tools), np.float32)
        numbers[: len(course)] = course
        _complete(
            self._state,
            begun.at,
            now,
            reason,
            float(course[PROMPT_COLUMN]),
            output,
            len(encoder.reasons),
            numbers[len(course) :],
        )
        numbers[encoder.answer_columns] = np.nan
        self._row = workflow_type, agent, model, numbers
        return self._row

    def answered(self, finish_reason: str | None, tools: Sequence[str] | None) -> Row | None:
        """The answer of the latest step is parsed: its whole row; None if the workflow has gone on.

        `tools` are those that the answer calls, None if unknown. A finish reason is read only if the encoder learnt
        those of parsed answers.
        """
        if self._row is None:
            return None
        encoder, (workflow_type, agent, model, before) = self._encoder, self._row
        numbers = before.copy()
        if encoder.parsed:
            begin = len(encoder.course.names)
            _give_reason(self._state, encoder.reason(finish_reason), len(encoder.reasons), numbers[begin:])
        called = tools_of(tools, encoder.tools)
        if len(called):
            numbers[-len(called) :] = called
        self._row = workflow_type, agent, model, numbers
        return self._row


def last_row(encoder: ReturnEncoder, steps: Sequence[Mapping[str, Any]]) -> Row:
    """The row of the LLM step that completed last.

    `steps` are those of one workflow so far, keyed by column names of traces. Raises InputError for no LLM step, or an
    invalid count, text or time.
    """
    llm = running_steps(steps)
    started, ended = (np.array([_time_of(step, name) for step in llm]) for name in ("started_at", "ended_at"))
    times = _event_times(started, ended)
    workflow, begun, row = ReturnWorkflow(encoder, llm[0]["workflow_type"]), {}, None
    for event in np.argsort(times, kind="stable").tolist():
        number, completes = divmod(event, 2)
        if not completes:
            begun[number] = workflow.arrived(llm[number], _known(times[event], started[number]))
            continue
        workflow.completed(begun.pop(number), llm[number], _known(times[event], ended[number]))
        row = workflow.answered(llm[number].get("finish_reason"), llm[number].get(TOOLS_CALLED))
    assert row is not None
    return row


def _reasons(steps: pa.Table) -> pa.ChunkedArray:
    """Finish reasons by their names in OpenAI's interface."""
    recorded = steps["finish_reason"]
    place = pc.index_in(recorded, value_set=pa.array(list(SYNONYMS), pa.string()))
    return pc.coalesce(pc.take(pa.array(list(SYNONYMS.values()), pa.string()), place), recorded)


def _milliseconds(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Time stamps as milliseconds since the epoch, float64 [n]; NaN for null."""
    return np.asarray(pc.cast(pc.cast(column, pa.int64()), pa.float64()).to_numpy(), np.float64) / 1e3


def _time_of(step: Mapping[str, Any], name: str) -> float:
    """A time of a step, milliseconds since the epoch, from a datetime or epoch seconds; NaN if absent.

    The step may call it by its name in plain JSONL, `start_time` or `end_time`.
    """
    given = step.get(name, step.get(_ALIAS[name]))
    if given is None:
        return float("nan")
    if isinstance(given, datetime):
        return milliseconds(given.timestamp())
    if not isinstance(given, int | float | np.number) or not np.isfinite(given):
        raise InputError(f"{name} is {given!r:.40}; expected a time: a datetime, or epoch seconds")
    return milliseconds(float(given))


def milliseconds(seconds: float) -> float:
    """Seconds as milliseconds, rounded to microseconds as in traces."""
    return round(seconds * 1e6) / 1e3


@njit(cache=True)
def _known(time: float, given: float) -> float:
    """The time of an event; NaN if none was given."""
    return np.nan if np.isnan(given) else time


@njit(cache=True)
def _begin(state: NDArray[np.float64]) -> None:
    """Write the state of a workflow before its first step."""
    state[:] = 0.0
    state[:_RUN] = np.nan
    state[_LAST_REASON] = -1.0
    state[_LEAST:_OF_REASONS] = np.nan
    for first in range(_OF_REASONS, len(state), 3):
        state[first] = np.nan


@njit(cache=True)
def _arrive(state: NDArray[np.float64], now: float) -> None:
    """A request arrives at `now`, ms: the workflow is back, unless another of its steps still runs."""
    if np.isnan(state[_FIRST]):
        state[_FIRST] = now
    if state[_FLYING] == 0.0 and not np.isnan(now - state[_LAST_END]):
        away = np.log1p(max(now - state[_LAST_END], LEAST_MS))
        long = 1.0 if away > _LONG else 0.0
        if state[_COUNT] == 0.0:
            state[_LEAST] = state[_MOST] = state[_RECENT] = away
            state[_SHARE] = long
        else:
            state[_LEAST], state[_MOST] = min(state[_LEAST], away), max(state[_MOST], away)
            state[_RECENT] += (1.0 - _DECAY) * (away - state[_RECENT])
            state[_SHARE] += (1.0 - _DECAY) * (long - state[_SHARE])
        state[_COUNT] += 1.0
        state[_SUM] += away
        state[_SQUARES] += away * away
        for i in range(_RING + _LATEST - 1, _RING, -1):
            state[i] = state[i - 1]
        state[_RING] = away
        first = _OF_REASONS + 3 * int(state[_LAST_REASON])
        state[first] = away
        state[first + 1] += away
        state[first + 2] += 1.0
    state[_FLYING] += 1.0


@njit(cache=True)
def _complete(
    state: NDArray[np.float64],
    began: float,
    now: float,
    reason: int,
    prompt: float,
    output: float,
    reasons: int,
    out: NDArray[np.float32],
) -> None:
    """A step that began at `began` completes at `now`, ms; writes RETURNS and one column a reason, float32 [R + F]."""
    state[_FLYING] = max(state[_FLYING] - 1.0, 0.0)
    out[0] = np.log1p(output)
    out[1] = np.log1p(max(prompt - state[_LAST_PROMPT] - state[_LAST_OUTPUT], 0.0))
    out[2] = np.log1p(max(now - began, 0.0))
    out[3] = np.log1p(max(now - state[_FIRST], 0.0))
    out[4] = state[_FLYING]
    for i in range(_LATEST):
        out[6 + i] = state[_RING + i]
    count, first = state[_COUNT], 6 + _LATEST
    out[first] = state[_SUM] / count if count else np.nan
    out[first + 1] = np.sqrt(max(state[_SQUARES] / count - (state[_SUM] / count) ** 2, 0.0)) if count else np.nan
    out[first + 2] = state[_LEAST]
    out[first + 3] = state[_MOST]
    out[first + 4] = state[_RECENT]
    out[first + 5] = state[_SHARE]
    state[_REASON_BEFORE] = state[_LAST_REASON]
    state[_RUN_BEFORE] = state[_RUN]
    _give_reason(state, reason, reasons, out)
    state[_LAST_PROMPT] = prompt
    state[_LAST_OUTPUT] = 0.0 if np.isnan(output) else output
    state[_LAST_END] = now if np.isnan(state[_LAST_END]) else max(state[_LAST_END], now)


@njit(cache=True)
def _give_reason(state: NDArray[np.float64], reason: int, reasons: int, out: NDArray[np.float32]) -> None:
    """The step that completed last has this finish reason; writes what depends on it to `out`, as `_complete`."""
    state[_RUN] = state[_RUN_BEFORE] + 1.0 if reason == state[_REASON_BEFORE] else 1.0
    state[_LAST_REASON] = reason
    out[5] = state[_RUN]
    own, first = _OF_REASONS + 3 * reason, 6 + _LATEST + 6
    out[first] = state[own]
    out[first + 1] = state[own + 1] / state[own + 2] if state[own + 2] else np.nan
    out[first + 2] = state[own + 2]
    for i in range(reasons):
        out[first + 3 + i] = i == reason


@njit(cache=True)
def _event_times(started: NDArray[np.float64], ended: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each step of a workflow arrives and completes, float64 [2 m]; an unknown time is that of the last event."""
    times = np.empty(2 * len(started), np.float64)
    latest = -np.inf
    for i in range(len(started)):
        begin, end = started[i], ended[i]
        if i and begin % _SECOND == 0.0 and begin < times[2 * i - 1] < begin + _SECOND:
            begin = times[2 * i - 1]
        if i and begin < times[2 * i - 2]:
            begin = times[2 * i - 2]
        times[2 * i] = latest if np.isnan(begin) else begin
        times[2 * i + 1] = times[2 * i] if np.isnan(end) else max(end, times[2 * i])
        latest = max(latest, times[2 * i + 1])
    return times


@njit(cache=True)
def _returns(
    offsets: NDArray[np.int64],
    started: NDArray[np.float64],
    ended: NDArray[np.float64],
    reason: NDArray[np.int64],
    agent: NDArray[np.int32],
    prompt: NDArray[np.float64],
    output: NDArray[np.float64],
    complete: NDArray[np.bool_],
    reasons: int,
    agents: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """PROGRESS of n steps, float32 [n, 6], RETURNS and reasons, float32 [n, R + reasons], and labels, float32 [n].

    Workflow w has the rows offsets[w]:offsets[w + 1]; times in ms, NaN where unknown.
    """
    n = len(started)
    progress, numbers = np.empty((n, 6), np.float32), np.empty((n, len(RETURNS) + reasons), np.float32)
    calls, counters = np.empty(agents + 1, np.int64), np.empty(COUNTERS, np.float64)
    label = np.full(n, np.nan, np.float32)
    state = np.empty(_OF_REASONS + 3 * (reasons + 2), np.float64)
    for w in range(len(offsets) - 1):
        first, size = offsets[w], offsets[w + 1] - offsets[w]
        _begin(state)
        begin_progress(calls, counters)
        times = _event_times(started[first : first + size], ended[first : first + size])
        order = np.argsort(times, kind="mergesort")
        for event in order:
            row = first + event // 2
            if event % 2 == 0:
                _arrive(state, _known(times[event], started[row]))
                advance_progress(calls, counters, agent[row], progress[row])
            else:
                began, done = _known(times[event - 1], started[row]), _known(times[event], ended[row])
                _complete(state, began, done, reason[row], prompt[row], output[row], reasons, numbers[row])
                produce(counters, output[row])
        upcoming = -1  # the next arrival, going backwards
        for event in order[::-1]:
            row = first + event // 2
            if event % 2 == 0:
                upcoming = event
            elif upcoming < 0:
                label[row] = np.inf if complete[row] else np.nan
            elif not (np.isnan(started[first + upcoming // 2]) or np.isnan(ended[row])):
                label[row] = max(times[upcoming] - times[event], LEAST_MS)
    return progress, numbers, label
