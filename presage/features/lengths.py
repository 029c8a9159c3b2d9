"""Inputs and labels of a predictor of lengths: one definition for training and serving.

Chimera §3.4: token counts of the system prompt, the user prompt and the full prompt, workflow type, agent, model, and
a sketch of the user prompt. Ours: how far the workflow has come and which agents came before (`history.py`), and a
sketch of the previous step's output.

A trace counts the tokens of full prompts only. Those of system and user prompt, and of a prompt that was not counted,
are taken as a quarter of their characters.

A row is an LLM step (`served_steps.py`). The label of a step counts its own tokens and those of all later steps; it is
unknown as soon as one of them is, and a lower bound in a workflow that was cut (`complete` false). Other labels are
those of `Target`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.datasets.schema.names import NameMapping
from presage.datasets.tasks import task_of
from presage.errors import InputError
from presage.features.history import (
    COUNTERS,
    NAMED,
    NEVER,
    PROGRESS,
    RECENT,
    advance_course,
    begin_course,
    histories,
    history_size,
    produce,
    progress,
)
from presage.features.input_profiles import TEXT, TOKENS, Sources
from presage.features.rows import (
    CONTEXT_TARGETS,
    PREVIOUS_COLUMN,
    PRODUCED_COLUMN,
    PROMPT,
    PROMPT_COLUMN,
    SYSTEM_COLUMN,
    TEXT_COLUMNS,
    USER_COLUMN,
    LabelledRows,
    Target,
)
from presage.features.served_steps import served_steps
from presage.features.sketch import Sketch
from presage.features.vocabulary import Vocabulary, codes, encode, most_frequent, token_counts, unknown_names

_NO_COUNT: Final = 2**63
CHARS_PER_TOKEN: Final = 4.0
MODELS_KEPT: Final = 256
_NOTHING: Final = np.empty(0, np.float32)

PROMPT_READ: Final = "prompt_read"
"""A step's column for what another process has read of its prompt (`LengthEncoder.read_prompt`), in place of texts."""

AGENTS_TRACKED: Final = 16
"""Number of agents, the most frequent, of which a row has the calls and the steps since."""


@dataclass(frozen=True, eq=False)
class LengthEncoder:
    """Encodes the steps of a trace (`length_rows`) or of a running workflow (`LengthWorkflow`); fitted on a trace.

    Attributes:
        models: M names of models, sorted.
        tracked: indices of the agents whose calls are counted one by one, rising; the last of all unknown ones.
        sketch: of user prompts and of outputs; None where training had no text.
    """

    vocabulary: Vocabulary
    models: tuple[str, ...]
    tracked: tuple[int, ...]
    sketch: Sketch | None
    text_columns: ClassVar[tuple[int, ...]] = TEXT_COLUMNS
    """Columns of `numbers` of which one is known if a row has a text."""

    @classmethod
    def fit(cls, table: pa.Table, sketch: Sketch | None = None) -> LengthEncoder:
        """Fits vocabularies on a training trace; `sketch` is one of its texts (`training/length/train.py`)."""
        table = served_steps(table)
        types = tuple(sorted(pc.unique(table["workflow_type"]).to_pylist()))
        agents = tuple(sorted(pc.unique(table["agent"]).to_pylist()))
        tracked = sorted(map(agents.index, most_frequent(table["agent"], AGENTS_TRACKED)))
        models = tuple(sorted(most_frequent(table["model"], MODELS_KEPT)))
        vocabulary = Vocabulary(types, agents, names=NameMapping.of(table))
        return cls(vocabulary, models, (*tracked, vocabulary.unknown), sketch)

    @property
    def names(self) -> tuple[str, ...]:
        """What the F columns of `numbers` are."""
        before = tuple(f"agent_{i}_before" for i in range(1, RECENT))
        tracked = tuple(f"{what}_{agent}" for what in ("calls", "since") for agent in self.tracked)
        dimensions = range(self.sketch.size) if self.sketch is not None else range(0)
        sketch = tuple(f"{text}_{i}" for text in ("prompt", "answer") for i in dimensions)
        return PROMPT + PROGRESS + before + tracked + sketch

    @property
    def unknown_column(self) -> int:
        """The calls of unknown agents so far, in `numbers`."""
        return len(PROMPT) + len(PROGRESS) + RECENT - 1 + self.tracked.index(self.vocabulary.unknown)

    @property
    def answer_size(self) -> int:
        """S, what is read of an output; 2 + S of a prompt."""
        return self.sketch.size if self.sketch is not None else 0

    def read_prompt(self, step: Mapping[str, Any]) -> NDArray[np.float32]:
        """All that is read of the texts of a step's prompt, float32 [2 + S], NaN where unknown.

        It is the characters of the system prompt, those of the user prompt, and the sketch of the latter. Raises
        InputError for an invalid text.
        """
        system, user = _text(step, "system_prompt"), _text(step, "input_text")
        return np.concatenate([[_length(system), _length(user)], self._sketched(user)], dtype=np.float32)

    def read_answer(self, step: Mapping[str, Any]) -> NDArray[np.float32]:
        """All that is read of the text of a step's output, float32 [S]; as `read_prompt`."""
        return self._sketched(_text(step, "output_text") if self.sketch is not None else None)

    def _sketched(self, text: str | None) -> NDArray[np.float32]:
        """The sketch of a text, float32 [S]: NaN for None, empty without a sketch."""
        if self.sketch is None:
            return _NOTHING
        return np.full(self.sketch.size, np.nan, np.float32) if text is None else self.sketch.transform_one(text)

    def model(self, name: Any) -> int:
        """Index of a model: M for one that training never saw, M + 1 for none."""
        if name is None:
            return len(self.models) + 1
        name = str(name)
        return self.models.index(name) if name in self.models else len(self.models)

    def observed(self, rows: LabelledRows, sources: Sources) -> LabelledRows:
        """The rows of the same trace without all other sources; the labels stay."""
        numbers, model = rows.numbers.copy(), rows.model
        if TEXT not in sources:
            # Where a prompt was not counted, its characters replace the count.
            texts = _of_characters(numbers)
            numbers[numbers[:, PROMPT_COLUMN] == texts, PROMPT_COLUMN] = np.nan
            sketches = 2 * (self.sketch.size if self.sketch is not None else 0)
            numbers[:, [SYSTEM_COLUMN, USER_COLUMN, *range(numbers.shape[1] - sketches, numbers.shape[1])]] = np.nan
            model = np.full_like(model, self.model(None))
        if TOKENS not in sources:
            numbers[:, PROMPT_COLUMN] = _of_characters(numbers)
            numbers[:, PRODUCED_COLUMN] = 0.0
            numbers[:, PREVIOUS_COLUMN] = np.nan
        return replace(rows, numbers=numbers, model=model)

    def nameless(self, rows: LabelledRows) -> LabelledRows:
        """The rows as if each one's own agent were unknown, in the earlier steps of its workflow too."""
        agent, numbers = rows.agent[:, None], rows.numbers.copy()
        before = len(PROMPT) + len(PROGRESS)
        calls = before + RECENT - 1
        earlier = numbers[:, before:calls]
        earlier[earlier == agent] = len(self.vocabulary.agents)
        own = agent == np.array(self.tracked)
        for first, nothing in ((calls, 0.0), (calls + len(self.tracked), NEVER)):
            numbers[:, first : first + len(self.tracked)][own] = nothing
        if self.vocabulary.unknown in self.tracked:  # it is not in artefacts of before
            unknown = self.unknown_column
            numbers[:, unknown] = numbers[:, len(PROMPT) + PROGRESS.index("calls")]
            numbers[:, unknown + len(self.tracked)] = 0.0
        return replace(rows, agent=np.full_like(rows.agent, len(self.vocabulary.agents)), numbers=numbers)

    def with_unknown_names(self, rows: LabelledRows, rng: np.random.Generator) -> LabelledRows:
        """The rows of whole workflows after a release that renames (`unknown_names`); the labels stay."""
        first = np.flatnonzero(np.diff(rows.workflow, prepend=-1))
        offsets = np.append(first, len(rows)).astype(np.int64)
        agent, types = unknown_names(rows.agent, rows.workflow_type[first], offsets, self.vocabulary, rng)
        numbers, count = rows.numbers.copy(), len(self.vocabulary.agents)
        names, begin = slice(len(PROMPT), len(PROMPT) + NAMED), len(PROMPT) + len(PROGRESS)
        numbers[:, names] = progress(agent, np.zeros(len(rows), np.float32), offsets, count)[:, :NAMED]
        columns = self.history_columns
        numbers[:, begin : begin + len(columns)] = histories(agent, offsets, count)[:, columns]
        return replace(rows, agent=agent, workflow_type=np.repeat(types, np.diff(offsets)), numbers=numbers)

    def to_config(self) -> dict[str, Any]:
        """As the configuration of an artefact keeps it; JSON values only."""
        return {
            "vocabulary": self.vocabulary.to_dict(),
            "models": list(self.models),
            "tracked": list(self.tracked),
            "sketch": self.sketch is not None,
        }

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors of an artefact: the sketch's."""
        return self.sketch.to_tensors() if self.sketch is not None else {}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> LengthEncoder:
        """Inverse of `to_config` and `to_tensors`; other tensors are left alone."""
        vocabulary = Vocabulary.from_dict(config["vocabulary"])
        sketch = Sketch.from_tensors(tensors) if config["sketch"] else None
        return cls(vocabulary, tuple(config["models"]), tuple(config["tracked"]), sketch)

    @cached_property
    def history_columns(self) -> NDArray[np.int64]:
        """The numbers of a history that a row contains, int64 [H]."""
        tracked = np.array(self.tracked, np.int64)
        return np.concatenate(
            [np.arange(1, RECENT), RECENT + tracked, RECENT + len(self.vocabulary.agents) + 1 + tracked]
        )


class LengthWorkflow:
    """State of a running workflow, of constant size: call `begun` and `completed` once a step each.

    Its numbers equal those of `length_rows` bit by bit.
    """

    __slots__ = ("_answer", "_calls", "_columns", "_counters", "_encoder", "_history", "_type")

    def __init__(self, encoder: LengthEncoder, workflow_type: str) -> None:
        agents = len(encoder.vocabulary.agents)
        self._encoder, self._type = encoder, encoder.vocabulary.workflow_type(workflow_type)
        self._columns = encoder.history_columns
        self._history = np.empty(history_size(agents), np.float32)
        self._calls = np.empty(agents + 1, np.int64)
        self._counters = np.empty(COUNTERS, np.float64)
        begin_course(self._history, self._calls, self._counters)
        self._answer = encoder.read_answer({})

    def begun(self, step: Mapping[str, Any]) -> tuple[int, int, int, NDArray[np.float32]]:
        """Begin a step: its workflow type, agent, model and numbers float32 [F], before its output.

        `step` is keyed by column names of traces, or has PROMPT_READ in place of texts. Raises InputError for an
        invalid token count or text; the workflow is unusable afterwards.
        """
        encoder = self._encoder
        agent, course = self._advanced(step)
        read = step.get(PROMPT_READ)
        read = encoder.read_prompt(step) if read is None else _checked(read, 2 + encoder.answer_size)
        prompt = np.empty(len(PROMPT), np.float32)
        _prompt_tokens(float(read[0]), float(read[1]), count_of(step, "input_tokens"), prompt)
        numbers = np.concatenate([prompt, course, read[2:], self._answer], dtype=np.float32)
        self._answer = encoder.read_answer({})
        return self._type, agent, encoder.model(step.get("model")), numbers

    def completed(self, step: Mapping[str, Any]) -> None:
        """Record the output of the step that began last; raises InputError as `begun`."""
        produce(self._counters, float(np.float32(count_of(step, "output_tokens"))))
        self._answer = self._encoder.read_answer(step)

    def answered(self, read: NDArray[np.float32]) -> None:
        """What another process has read of the output of the step that completed last; raises InputError as `begun`."""
        self._answer = _checked(read, self._encoder.answer_size)

    def passed(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Record steps that are over: as `begun` and `completed` of each, but only the last output is sketched."""
        for step in steps:
            self._advanced(step)
            produce(self._counters, float(np.float32(count_of(step, "output_tokens"))))
        if steps:
            self._answer = self._encoder.read_answer(steps[-1])

    def _advanced(self, step: Mapping[str, Any]) -> tuple[int, NDArray[np.float32]]:
        agent = self._encoder.vocabulary.agent(step["agent"])
        course = np.empty(len(PROGRESS) + len(self._columns), np.float32)
        advance_course(self._history, self._calls, self._counters, agent, self._columns, course)
        return agent, course


def length_rows(table: pa.Table, encoder: LengthEncoder, target: Target = "remaining") -> LabelledRows:
    """Rows of a trace in canonical order (as `read_traces` returns it); raises TraceError without an LLM step."""
    table = served_steps(table)
    workflow = workflow_codes(table)
    offsets = np.r_[np.flatnonzero(np.diff(workflow, prepend=-1)), len(table)].astype(np.int64)
    vocabulary = encoder.vocabulary
    agent = vocabulary.encode_agents(table["agent"])
    outputs = token_counts(table["output_tokens"])
    count = len(vocabulary.agents)
    numbers = [
        _prompts(
            token_counts(pc.utf8_length(table["system_prompt"])),
            token_counts(pc.utf8_length(table["input_text"])),
            token_counts(table["input_tokens"]),
        ),
        progress(agent, outputs, offsets, count),
        histories(agent, offsets, count)[:, encoder.history_columns],
    ]
    if encoder.sketch is not None:
        prompts, answers = prompts_and_answers(table)
        numbers += np.split(encoder.sketch.transform(prompts + answers), 2)
    last = np.isin(np.arange(len(table)), offsets[1:] - 1)
    cut, named = ~np.asarray(table["complete"].to_numpy(), bool), table["model"].is_valid().to_numpy()
    if target == "next-context":
        cut &= last
    label = outputs
    if target == "remaining":
        label = _sums_to_the_end(outputs, offsets)
    elif target in CONTEXT_TARGETS:
        label = _growth(token_counts(table["input_tokens"]), outputs, offsets, last, target)
    return LabelledRows(
        vocabulary=vocabulary,
        target=target,
        workflow_type=vocabulary.encode_types(table["workflow_type"]),
        agent=agent,
        model=np.where(named, encode(table["model"], encoder.models), len(encoder.models) + 1).astype(np.int32),
        numbers=np.concatenate(numbers, axis=1, dtype=np.float32),
        label=label,
        lower_bound=cut & (target != "step"),
        step=(np.arange(len(table)) - offsets[workflow]).astype(np.int32),
        workflow=workflow.astype(np.int32),
        task=codes(task_of(table)),
    )


def prompts_and_answers(table: pa.Table) -> tuple[list[str | None], list[str | None]]:
    """The texts of every step's row: its prompt, and the output of the step before in its workflow."""
    prompts, answers = (table[column].to_pylist() for column in ("input_text", "output_text"))
    answers = [None, *answers[:-1]]
    for first in np.flatnonzero(np.diff(workflow_codes(table), prepend=-1)):
        answers[first] = None  # the answer before a workflow's first step is another workflow's
    return prompts, answers


@njit(cache=True)
def _of_characters(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The characters that replace the token count of the whole prompt, float32 [n], NaN without texts."""
    out = np.empty(len(numbers), np.float32)
    for row in range(len(numbers)):
        out[row] = _sum_of_known(numbers[row, SYSTEM_COLUMN], numbers[row, USER_COLUMN])
    return out


@njit(cache=True, inline="always")
def _sum_of_known(a: np.float32, b: np.float32) -> np.float32:
    return b if np.isnan(a) else a if np.isnan(b) else a + b


@njit(cache=True)
def _prompt_tokens(system_chars: float, user_chars: float, tokens: float, out: NDArray[np.float32]) -> None:
    """Write PROMPT, float32 [3], from characters and the count of the whole prompt, NaN where unknown."""
    out[SYSTEM_COLUMN] = system_chars / CHARS_PER_TOKEN
    out[USER_COLUMN] = user_chars / CHARS_PER_TOKEN
    out[PROMPT_COLUMN] = tokens
    if np.isnan(tokens):
        out[PROMPT_COLUMN] = _sum_of_known(out[SYSTEM_COLUMN], out[USER_COLUMN])


@njit(cache=True)
def _prompts(
    system_chars: NDArray[np.float32], user_chars: NDArray[np.float32], tokens: NDArray[np.float32]
) -> NDArray[np.float32]:
    """PROMPT of n steps, float32 [n, 3]."""
    out = np.empty((len(tokens), len(PROMPT)), np.float32)
    for row in range(len(tokens)):
        _prompt_tokens(system_chars[row], user_chars[row], tokens[row], out[row])
    return out


def _sums_to_the_end(tokens: NDArray[np.float32], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """Each row and all later ones of its workflow together, float32 [n]; NaN as soon as one is."""
    total = tokens.astype(np.float64)
    # From the last row of each workflow back to its first; one workflow's NaN must not reach another's rows.
    ends = np.repeat(offsets[1:], np.diff(offsets)) - 1
    unknown = np.isnan(total)
    sums = np.cumsum(np.where(unknown, 0.0, total))
    counts = np.cumsum(unknown)
    missing = counts[ends] - counts + unknown > 0
    return np.where(missing, np.nan, sums[ends] - sums + np.where(unknown, 0.0, total)).astype(np.float32)


def _growth(
    prompts: NDArray[np.float32],
    outputs: NDArray[np.float32],
    offsets: NDArray[np.int64],
    last: NDArray[np.bool_],
    target: Target,
) -> NDArray[np.float32]:
    """The growth of each row's context, float32 [n], NaN as soon as a count that it needs is; `last` rows end one."""
    contexts = prompts + outputs
    if target == "next-context":
        coming = np.where(last, contexts, np.roll(contexts, -1))
    else:
        coming = np.empty_like(contexts)
        for begin, end in pairwise(offsets.tolist()):
            coming[begin:end] = np.maximum.accumulate(contexts[begin:end][::-1])[::-1]
    return np.maximum(coming - prompts, np.float32(0.0))


def count_of(step: Mapping[str, Any], name: str) -> float:
    """A number of tokens, NaN if absent; raises InputError unless it is a number from 0 to below 2^63."""
    tokens = step.get(name)
    if tokens is None:
        return float("nan")
    if not isinstance(tokens, int | float | np.number) or not 0 <= tokens < _NO_COUNT:
        raise InputError(f"{name} is {tokens!r:.40}; expected a number of tokens, 0 or more")
    return float(tokens)


def _text(step: Mapping[str, Any], name: str) -> str | None:
    text = step.get(name)
    if text is not None and not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}; expected a string, or null")
    return text


def _checked(read: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """What another process has read, float32 [size]; checked here, since kernels check no widths."""
    if read.dtype != np.float32 or read.shape != (size,) or np.isinf(read).any():
        raise InputError(f"what was read of a text is not {size} numbers of float32; use the encoder of this predictor")
    return read


def _length(text: str | None) -> float:
    return float("nan") if text is None else float(len(text))
