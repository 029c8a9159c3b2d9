"""Inputs and labels of the predictor of return times: one definition for training and serving.

The return time of a step is the time from its completion to the arrival of the workflow's next request. A row is an LLM
step at its completion. Its numbers are those of a length predictor (`lengths.py`), then RETURNS: what the step produced
and how long it took, and when the workflow returned after its earlier steps; then one column a finish reason and one a
tool, 1 for the reason of the step and for the tools that its answer calls. Tools are known from the tool calls that
follow the step in the trace.

The label is in milliseconds: infinite where the workflow ended with the step, NaN where that or a time is unknown (also
in a workflow that was cut: `complete` false). Times are at least LEAST_MS.

Time stamps may be rounded down to seconds. A step that starts on a full second, less than one second before the step
before it ends, is taken to start where that one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from presage.datasets.schema import ALIASES, workflow_codes
from presage.errors import InputError
from presage.features.input_profiles import TEXT, TOKENS, Sources
from presage.features.lengths import LengthEncoder, LengthWorkflow, count_of, length_rows, most_frequent
from presage.features.rows import PROMPT_COLUMN, TEXT_COLUMNS, LabelledRows
from presage.features.vocabulary import encode, token_counts

LEAST_MS: Final = 10.0
"""The shortest return time that is told from others, milliseconds."""
REASONS_KEPT: Final = 8
TOOLS_KEPT: Final = 32
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
TOOLS_CALLED: Final = "tools_called"

# The state of a workflow: these numbers, then three for each finish reason (last return, sum, number).
_FIRST, _LAST_END, _LAST_PROMPT, _LAST_OUTPUT, _LAST_REASON, _RUN, _FLYING = range(7)
_COUNT, _SUM, _SQUARES, _LEAST, _MOST, _RECENT, _SHARE = range(7, 14)
_RING: Final = 14
_OF_REASONS: Final = _RING + _LATEST


@dataclass(frozen=True, eq=False)
class ReturnEncoder:
    """Encodes completed steps of a trace (`return_rows`) or of a running workflow (`last_row`).

    Attributes:
        course: of the workflow so far.
        reasons: finish reasons with a column of their own, sorted.
        tools: agents of tool calls with a column of their own, sorted.
    """

    course: LengthEncoder
    reasons: tuple[str, ...]
    tools: tuple[str, ...]

    @classmethod
    def fit(cls, table: pa.Table) -> ReturnEncoder:
        """Fit vocabularies on a training trace."""
        tools = table.filter(pc.equal(table["kind"], "tool"))["agent"]
        reasons = most_frequent(table["finish_reason"], REASONS_KEPT)
        return cls(LengthEncoder.fit(table), tuple(sorted(reasons)), tuple(sorted(most_frequent(tools, TOOLS_KEPT))))

    @property
    def names(self) -> tuple[str, ...]:
        """What the F columns of `numbers` are."""
        reasons, tools = (f"reason_{name}" for name in self.reasons), (f"tool_{name}" for name in self.tools)
        return (*self.course.names, *RETURNS, *reasons, TOOLS_CALLED, *tools)

    @property
    def text_columns(self) -> tuple[int, ...]:
        """The columns of which one is known if a row has a text, or the tools that the answer calls."""
        return (*TEXT_COLUMNS, len(self.names) - 1 - len(self.tools))

    def reason(self, name: Any) -> int:
        """Index of a finish reason: F for one that is unknown, F + 1 for none."""
        if name is None:
            return len(self.reasons) + 1
        return self.reasons.index(name) if name in self.reasons else len(self.reasons)

    def observed(self, rows: LabelledRows, sources: Sources) -> LabelledRows:
        """The rows of the same trace without all other sources; the labels stay."""
        seen = self.course.observed(rows, sources)
        begin = len(self.course.names)
        if TEXT not in sources:
            seen.numbers[:, -1 - len(self.tools) :] = np.nan  # the tools that an answer calls
        if TOKENS not in sources:
            seen.numbers[:, begin : begin + _TOKEN_COLUMNS] = np.nan
        return seen

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
    rows = length_rows(table, encoder.course, "step")
    llm = np.asarray(pc.equal(table["kind"], "llm").to_numpy(), bool)
    started, ended = (_milliseconds(table[name])[llm] for name in ("started_at", "ended_at"))
    given = table["finish_reason"].is_valid().to_numpy()
    reason = np.where(given, encode(table["finish_reason"], encoder.reasons), len(encoder.reasons) + 1)
    offsets = np.r_[np.flatnonzero(np.diff(rows.workflow, prepend=-1)), len(rows)].astype(np.int64)
    complete = np.asarray(table["complete"].to_numpy(), bool)[llm]
    numbers, label = _returns(
        offsets,
        started,
        ended,
        reason[llm].astype(np.int64),
        rows.numbers[:, PROMPT_COLUMN].astype(np.float64),
        token_counts(table["output_tokens"])[llm].astype(np.float64),
        complete,
        len(encoder.reasons),
    )
    called = _tools_called(table, llm, encoder.tools)
    return replace(
        rows,
        target="return",
        numbers=np.concatenate([rows.numbers, numbers, called], axis=1, dtype=np.float32),
        label=label,
        lower_bound=np.isnan(label) & ~complete,
    )


def last_row(encoder: ReturnEncoder, steps: Sequence[Mapping[str, Any]]) -> tuple[int, int, int, NDArray[np.float32]]:
    """The row of the LLM step that completed last: its workflow type, agent, model and numbers float32 [F].

    `steps` are those of one workflow so far, keyed by column names of traces. The row equals that of `return_rows` bit
    by bit, also where steps overlap. Raises InputError for no LLM step, or an invalid count, text or time.
    """
    course, rows, places = LengthWorkflow(encoder.course, steps[0]["workflow_type"]), [], []
    for place, step in enumerate(steps):
        row = course.begun(step)
        course.completed(step)
        if step.get("kind", "llm") == "llm":
            rows.append(row)
            places.append(place)
    if not rows:
        raise InputError('no LLM step (kind "llm"); a return time is that of an LLM step')
    llm = [steps[place] for place in places]
    started, ended = (np.array([_time_of(step, name) for step in llm]) for name in ("started_at", "ended_at"))
    numbers, _ = _returns(
        np.array([0, len(llm)]),
        started,
        ended,
        np.array([encoder.reason(step.get("finish_reason")) for step in llm]),
        np.array([row[3][PROMPT_COLUMN] for row in rows], np.float64),
        np.array([count_of(step, "output_tokens") for step in llm]).astype(np.float32).astype(np.float64),
        np.zeros(len(llm), np.bool_),
        len(encoder.reasons),
    )
    events = np.argsort(_event_times(started, ended), kind="stable")
    last = int(events[events % 2 == 1][-1]) // 2
    called = np.full(1 + len(encoder.tools), np.nan, np.float32)
    if len(llm) < len(steps):
        tools = [step["agent"] for step in steps[places[last] + 1 : [*places, len(steps)][last + 1]]]
        called[0] = len(tools)
        called[1:] = [name in tools for name in encoder.tools]
    workflow_type, agent, model, course_numbers = rows[last]
    return workflow_type, agent, model, np.concatenate([course_numbers, numbers[last], called], dtype=np.float32)


def _tools_called(table: pa.Table, llm: NDArray[np.bool_], tools: tuple[str, ...]) -> NDArray[np.float32]:
    """The number of tool calls between an LLM step and the next, and whether each tool is among them; [n, 1 + tools].

    NaN in a trace that records no tool call at all.
    """
    found = np.full((int(llm.sum()), 1 + len(tools)), np.nan, np.float32)
    if llm.all():
        return found
    found[:] = 0.0
    workflow, row = workflow_codes(table), np.cumsum(llm) - 1
    calls = np.flatnonzero(~llm & (row >= 0))
    calls = calls[workflow[calls] == workflow[np.flatnonzero(llm)[row[calls]]]]
    np.add.at(found, (row[calls], 0), 1.0)
    named = encode(table["agent"], tools)[calls]
    known = named < len(tools)
    found[row[calls[known]], 1 + named[known]] = 1.0
    return found


def _milliseconds(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Time stamps as milliseconds since the epoch, float64 [n]; NaN for null."""
    return np.asarray(pc.cast(pc.cast(column, pa.int64()), pa.float64()).to_numpy(), np.float64) / 1e3


def _time_of(step: Mapping[str, Any], name: str) -> float:
    """A time of a step, milliseconds since the epoch, from a datetime or epoch seconds; NaN if absent.

    The step may call it by its name in plain JSONL, `start_time` or `end_time`.
    """
    found = step.get(name, step.get(_ALIAS[name]))
    if found is None:
        return float("nan")
    if isinstance(found, datetime):
        return round(found.timestamp() * 1e6) / 1e3
    if not isinstance(found, int | float | np.number) or not np.isfinite(found):
        raise InputError(f"{name} is {found!r:.40}; expected a time: a datetime, or epoch seconds")
    return round(float(found) * 1e6) / 1e3


@njit(cache=True)
def _begin(state: NDArray[np.float64]) -> None:
    """Write the state of a workflow before its first step."""
    state[:] = 0.0
    state[:_RUN] = np.nan
    state[_LAST_REASON] = -1.0
    state[_LEAST:_OF_REASONS] = np.nan
    for at in range(_OF_REASONS, len(state), 3):
        state[at] = np.nan


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
        at = _OF_REASONS + 3 * int(state[_LAST_REASON])
        state[at] = away
        state[at + 1] += away
        state[at + 2] += 1.0
    state[_FLYING] += 1.0


@njit(cache=True)
def _complete(
    state: NDArray[np.float64],
    started: float,
    now: float,
    reason: int,
    prompt: float,
    output: float,
    reasons: int,
    out: NDArray[np.float32],
) -> None:
    """A step completes at `now`, ms; writes RETURNS and one column a reason to `out`, float32 [R + reasons]."""
    state[_FLYING] = max(state[_FLYING] - 1.0, 0.0)
    state[_RUN] = state[_RUN] + 1.0 if reason == state[_LAST_REASON] else 1.0
    out[0] = np.log1p(output)
    out[1] = np.log1p(max(prompt - state[_LAST_PROMPT] - state[_LAST_OUTPUT], 0.0))
    out[2] = np.log1p(max(now - started, 0.0))
    out[3] = np.log1p(max(now - state[_FIRST], 0.0))
    out[4] = state[_FLYING]
    out[5] = state[_RUN]
    for i in range(_LATEST):
        out[6 + i] = state[_RING + i]
    count, at = state[_COUNT], 6 + _LATEST
    out[at] = state[_SUM] / count if count else np.nan
    out[at + 1] = np.sqrt(max(state[_SQUARES] / count - (state[_SUM] / count) ** 2, 0.0)) if count else np.nan
    out[at + 2] = state[_LEAST]
    out[at + 3] = state[_MOST]
    out[at + 4] = state[_RECENT]
    out[at + 5] = state[_SHARE]
    own = _OF_REASONS + 3 * reason
    out[at + 6] = state[own]
    out[at + 7] = state[own + 1] / state[own + 2] if state[own + 2] else np.nan
    out[at + 8] = state[own + 2]
    for i in range(reasons):
        out[at + 9 + i] = i == reason
    state[_LAST_REASON] = reason
    state[_LAST_PROMPT] = prompt
    state[_LAST_OUTPUT] = 0.0 if np.isnan(output) else output
    state[_LAST_END] = now if np.isnan(state[_LAST_END]) else max(state[_LAST_END], now)


@njit(cache=True)
def _event_times(started: NDArray[np.float64], ended: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each step of a workflow arrives and completes, float64 [2 m]; an unknown time is that of the last event."""
    at = np.empty(2 * len(started), np.float64)
    latest = -np.inf
    for i in range(len(started)):
        begin, end = started[i], ended[i]
        if i and begin % _SECOND == 0.0 and begin < at[2 * i - 1] < begin + _SECOND:
            begin = at[2 * i - 1]
        at[2 * i] = latest if np.isnan(begin) else begin
        at[2 * i + 1] = at[2 * i] if np.isnan(end) else max(end, at[2 * i])
        latest = max(latest, at[2 * i + 1])
    return at


@njit(cache=True)
def _returns(
    offsets: NDArray[np.int64],
    started: NDArray[np.float64],
    ended: NDArray[np.float64],
    reason: NDArray[np.int64],
    prompt: NDArray[np.float64],
    output: NDArray[np.float64],
    complete: NDArray[np.bool_],
    reasons: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """RETURNS and reasons of n steps, float32 [n, R + reasons], and their labels, float32 [n].

    Workflow w has the rows offsets[w]:offsets[w + 1]; times in ms, NaN where unknown.
    """
    n = len(started)
    numbers = np.empty((n, len(RETURNS) + reasons), np.float32)
    label = np.full(n, np.nan, np.float32)
    state = np.empty(_OF_REASONS + 3 * (reasons + 2), np.float64)
    for w in range(len(offsets) - 1):
        first, size = offsets[w], offsets[w + 1] - offsets[w]
        _begin(state)
        at = _event_times(started[first : first + size], ended[first : first + size])
        order = np.argsort(at, kind="mergesort")
        for event in order:
            row = first + event // 2
            if event % 2 == 0:
                _arrive(state, np.nan if np.isnan(started[row]) else at[event])
            else:
                _complete(state, started[row], ended[row], reason[row], prompt[row], output[row], reasons, numbers[row])
        upcoming = -1  # the next arrival, going backwards
        for event in order[::-1]:
            row = first + event // 2
            if event % 2 == 0:
                upcoming = event
            elif upcoming < 0:
                label[row] = np.inf if complete[row] else np.nan
            elif not (np.isnan(started[first + upcoming // 2]) or np.isnan(ended[row])):
                label[row] = max(at[upcoming] - at[event], LEAST_MS)
    return numbers, label
