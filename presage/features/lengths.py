"""What a predictor of lengths sees of a step, and what it is to predict: one definition for training and serving.

Chimera §3.4: token counts of the system prompt, the user prompt and the full prompt, workflow type, agent, model, and
a sketch of the user prompt. Ours: how far the workflow has come and which agents came before (`history.py`), and a
sketch of what the previous step answered.

The trace counts the tokens of full prompts only. Those of a system prompt and of a user prompt are taken as a quarter
of their characters; trees compare, so the factor means nothing to them. Where a prompt was not counted, its texts
replace it.

A row is an LLM step. Tool calls produce no tokens: they are no rows, and count as steps of the workflow only. The label
of a step counts its own tokens and those of all later steps; it is unknown as soon as one of them is. In a workflow
that was cut (`complete` false) it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.datasets.tasks import task_of
from presage.errors import InputError, TraceError
from presage.features.history import PROGRESS, RECENT, LengthHistory, histories, progress
from presage.features.input_profiles import PROFILES, TEXT, TOKENS, Sources
from presage.features.sketch import Sketch
from presage.features.vocabulary import Vocabulary

Target = Literal["remaining", "step"]
"""What is predicted: the output tokens of this and all later steps, or of this step alone."""

PROMPT: Final = ("system_tokens", "user_tokens", "prompt_tokens")
_NO_COUNT: Final = 2**63
CHARS_PER_TOKEN: Final = 4.0
MODELS_KEPT: Final = 256
_NOTHING: Final = np.empty(0, np.float32)
_SYSTEM, _USER, _PROMPT = range(len(PROMPT))
_PRODUCED, _PREVIOUS = (len(PROMPT) + PROGRESS.index(name) for name in ("produced_tokens", "previous_output_tokens"))

LEARNT_PROFILES: Final[tuple[Sources, ...]] = tuple(PROFILES[name] for name in ("ids", "ids+tokens", "+text"))
"""The input profiles that differ to a predictor of lengths, which reads no hidden states; the least first. A row with a
text counts as the last."""
AGENTS_TRACKED: Final = 16
"""Of so many agents, the most frequent, a row says how often they were called and how long ago."""


@dataclass(frozen=True, eq=False)
class LengthRows:
    """n LLM steps of W workflows, with their labels.

    Attributes:
        vocabulary: what `workflow_type` and `agent` mean.
        target: what `remaining` counts.
        workflow_type: int32 [n], T for an unknown type.
        agent: int32 [n], V for an unknown agent.
        model: int32 [n], M for a model that training never saw, M + 1 where none is named.
        numbers: float32 [n, F], the columns of `LengthEncoder.names`, NaN where unknown.
        remaining: float32 [n], output tokens, NaN where unknown.
        lower_bound: bool [n], the workflow was cut: `remaining` is at least that.
        step: int32 [n], steps of the workflow before this one.
        workflow: int32 [n], 0..W-1.
        task: int32 [n], equal for workflows of one task: they stay on one side of any split.
    """

    vocabulary: Vocabulary
    target: Target
    workflow_type: NDArray[np.int32]
    agent: NDArray[np.int32]
    model: NDArray[np.int32]
    numbers: NDArray[np.float32]
    remaining: NDArray[np.float32]
    lower_bound: NDArray[np.bool_]
    step: NDArray[np.int32]
    workflow: NDArray[np.int32]
    task: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.agent)

    @property
    def workflows(self) -> int:
        """How many workflows have a row."""
        return len(np.unique(self.workflow))

    @property
    def labelled(self) -> NDArray[np.bool_]:
        """bool [n], rows whose label is the number itself, neither unknown nor a bound."""
        return np.isfinite(self.remaining) & ~self.lower_bound

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> LengthRows:
        """The given rows alone, by number or by a mask; workflows and tasks keep their numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _PER_ROW})


_PER_ROW: Final = (
    "workflow_type",
    "agent",
    "model",
    "numbers",
    "remaining",
    "lower_bound",
    "step",
    "workflow",
    "task",
)


@dataclass(frozen=True, eq=False)
class LengthEncoder:
    """Makes rows from a trace, or one from the steps of a request. Fitted on training traces.

    Attributes:
        vocabulary: workflow types and agents.
        models: M names of models, sorted.
        tracked: the agents whose calls are counted one by one, indices in the vocabulary, rising.
        sketch: of user prompts and of answers; None where training had no text.
    """

    vocabulary: Vocabulary
    models: tuple[str, ...]
    tracked: tuple[int, ...]
    sketch: Sketch | None

    @classmethod
    def fit(cls, table: pa.Table, sketch: Sketch | None = None) -> LengthEncoder:
        """Fits vocabularies on a training trace; `sketch` is one of its texts (`training/lengths/texts.py`)."""
        types = tuple(sorted(pc.unique(table["workflow_type"]).to_pylist()))
        agents = tuple(sorted(pc.unique(table["agent"]).to_pylist()))
        tracked = sorted(map(agents.index, _most_frequent(table["agent"], AGENTS_TRACKED)))
        models = tuple(sorted(_most_frequent(table["model"], MODELS_KEPT)))
        return cls(Vocabulary(types, agents), models, tuple(tracked), sketch)

    @property
    def names(self) -> tuple[str, ...]:
        """What the F columns of `numbers` are."""
        before = tuple(f"agent_{i}_before" for i in range(1, RECENT))
        tracked = tuple(f"{what}_{agent}" for what in ("calls", "since") for agent in self.tracked)
        dimensions = range(self.sketch.size) if self.sketch is not None else range(0)
        sketch = tuple(f"{of}_{i}" for of in ("prompt", "answer") for i in dimensions)
        return PROMPT + PROGRESS + before + tracked + sketch

    def model(self, name: Any) -> int:
        """Index of a model: M for one that training never saw, M + 1 for none."""
        if name is None:
            return len(self.models) + 1
        name = str(name)
        return self.models.index(name) if name in self.models else len(self.models)

    def vector(self, steps: Sequence[Mapping[str, Any]]) -> tuple[int, int, int, NDArray[np.float32]]:
        """Workflow type, agent, model and numbers float32 [F] of the last step, before its output.

        Args:
            steps: one workflow's steps in order, checked (`common.steps.check_steps`), columns of the trace by name.

        Raises:
            InputError: a negative or no number of tokens, or a text that is none.
        """
        last = steps[-1]
        name = self.vocabulary.agent
        agents = np.array([name(step["agent"]) for step in steps], np.int32)
        outputs = np.array([count_of(step, "output_tokens") for step in steps], np.float32)
        course = self.course(agents, outputs, np.array([0, len(steps)]))[-1]
        answer = self.sketched(steps[-2] if len(steps) > 1 else {}, "output_text")
        return (
            self.vocabulary.workflow_type(last["workflow_type"]),
            int(agents[-1]),
            self.model(last.get("model")),
            self.joined(last, course, answer),
        )

    def joined(
        self, step: Mapping[str, Any], course: NDArray[np.float32], answer: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The numbers of a step, float32 [F], from the step and what is known from before it.

        Args:
            step: columns of the trace by name; its output is not looked at.
            course: float32 [C], as `course` has it.
            answer: float32 [S], `sketched` of the step before.

        Raises:
            InputError: a negative or no number of tokens, or a text that is none.
        """
        system, user = _length(_text(step, "system_prompt")), _length(_text(step, "input_text"))
        prompt = _prompt_tokens(system, user, count_of(step, "input_tokens"))
        return np.concatenate([prompt, course, self.sketched(step, "input_text"), answer], dtype=np.float32)

    def observed(self, rows: LengthRows, sources: Sources) -> LengthRows:
        """The rows as a trace without all other sources makes them; the labels stay."""
        numbers, model = rows.numbers.copy(), rows.model
        if TEXT not in sources:
            # Where a prompt was not counted, its characters replace the count.
            texts = _of_characters(numbers)
            numbers[numbers[:, _PROMPT] == texts, _PROMPT] = np.nan
            numbers[:, [_SYSTEM, _USER, *self._of_texts()]] = np.nan
            model = np.full_like(model, self.model(None))
        if TOKENS not in sources:
            numbers[:, _PROMPT] = _of_characters(numbers)
            numbers[:, _PRODUCED] = 0.0
            numbers[:, _PREVIOUS] = np.nan
        return replace(rows, numbers=numbers, model=model)

    def _of_texts(self) -> range:
        """The columns of `numbers` that are of a sketch."""
        ends = len(self.names)
        return range(ends - 2 * (self.sketch.size if self.sketch is not None else 0), ends)

    def sketched(self, step: Mapping[str, Any], column: str) -> NDArray[np.float32]:
        """The sketch of a step's text, float32 [S]: NaN where it has none, empty without a sketch.

        Raises:
            InputError: the text is none.
        """
        if self.sketch is None:
            return _NOTHING
        text = _text(step, column)
        return np.full(self.sketch.size, np.nan, np.float32) if text is None else self.sketch.transform_one(text)

    def open(self) -> LengthHistory:
        """`course` of a workflow before its first step."""
        return LengthHistory(len(self.vocabulary.agents), self._of_history())

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

    def course(
        self, agent: NDArray[np.int32], output_tokens: NDArray[np.float32], offsets: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """What the steps so far say, float32 [n, C], for whole workflows; the arguments are those of `progress`."""
        count = len(self.vocabulary.agents)
        history = histories(agent, offsets, count)[:, self._of_history()]
        return np.concatenate([progress(agent, output_tokens, offsets, count), history], axis=1)

    def _of_history(self) -> NDArray[np.int64]:
        """Which numbers of a history a row has."""
        tracked = np.array(self.tracked, np.int64)
        return np.concatenate(
            [np.arange(1, RECENT), RECENT + tracked, RECENT + len(self.vocabulary.agents) + 1 + tracked]
        )

    def row(self, steps: Sequence[Mapping[str, Any]]) -> LengthRows:
        """`vector` as rows of one; without a label."""
        workflow_type, agent, model, numbers = self.vector(steps)
        zero = np.zeros(1, np.int32)
        return LengthRows(
            vocabulary=self.vocabulary,
            target="remaining",
            workflow_type=np.array([workflow_type], np.int32),
            agent=np.array([agent], np.int32),
            model=np.array([model], np.int32),
            numbers=numbers[None],
            remaining=np.full(1, np.nan, np.float32),
            lower_bound=np.zeros(1, bool),
            step=np.array([len(steps) - 1], np.int32),
            workflow=zero,
            task=zero,
        )


def length_rows(table: pa.Table, encoder: LengthEncoder, target: Target = "remaining") -> LengthRows:
    """Rows of a trace in canonical order (as `read_traces` returns it).

    Args:
        table: the trace.
        encoder: makes the numbers.
        target: what the labels count.

    Raises:
        TraceError: the trace has no LLM step.
    """
    llm = np.asarray(pc.equal(table["kind"], "llm").to_numpy(), bool)
    if not llm.any():
        raise TraceError('the traces have no LLM step (kind "llm"): tool calls produce no tokens to predict')
    workflow = workflow_codes(table)
    offsets = np.r_[np.flatnonzero(np.diff(workflow, prepend=-1)), len(table)].astype(np.int64)
    vocabulary = encoder.vocabulary
    agent = vocabulary.encode_agents(table["agent"])
    outputs = _floats(table["output_tokens"])
    known = np.where(llm, outputs, np.float32(0.0))  # a tool call adds nothing to what is left
    numbers = [
        _prompt_tokens(
            _floats(pc.utf8_length(table["system_prompt"])),
            _floats(pc.utf8_length(table["input_text"])),
            _floats(table["input_tokens"]),
        )[llm],
        encoder.course(agent, outputs, offsets)[llm],
    ]
    if encoder.sketch is not None:
        prompts, answers = prompts_and_answers(table)
        numbers += [of[llm] for of in np.split(encoder.sketch.transform(prompts + answers), 2)]
    cut = ~np.asarray(table["complete"].to_numpy(), bool)
    return LengthRows(
        vocabulary=vocabulary,
        target=target,
        workflow_type=vocabulary.encode_types(table["workflow_type"])[llm],
        agent=agent[llm],
        model=_models(table["model"], encoder)[llm],
        numbers=np.concatenate(numbers, axis=1, dtype=np.float32),
        remaining=(outputs if target == "step" else _sums_to_the_end(known, offsets))[llm],
        lower_bound=cut[llm] & (target == "remaining"),
        step=(np.arange(len(table)) - offsets[workflow]).astype(np.int32)[llm],
        workflow=workflow.astype(np.int32)[llm],
        task=_codes(task_of(table))[llm],
    )


def prompts_and_answers(table: pa.Table) -> tuple[list[str | None], list[str | None]]:
    """The texts that a row of every step is made of: its prompt, and what the step before answered in its workflow."""
    prompts, answers = (table[column].to_pylist() for column in ("input_text", "output_text"))
    answers = [None, *answers[:-1]]
    for first in np.flatnonzero(np.diff(workflow_codes(table), prepend=-1)):
        answers[first] = None  # the answer before a workflow's first step is another workflow's
    return prompts, answers


@njit(cache=True)
def profiles_of(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """Which of LEARNT_PROFILES the numbers of rows are made of, int64 [n], from float32 [n, F]."""
    out = np.empty(len(numbers), np.int64)
    for row in range(len(numbers)):
        of = numbers[row]
        if not (np.isnan(of[_SYSTEM]) and np.isnan(of[_USER])):
            out[row] = 2
        else:
            out[row] = not (np.isnan(of[_PROMPT]) and np.isnan(of[_PREVIOUS])) or of[_PRODUCED] > 0
    return out


def join_rows(first: LengthRows, second: LengthRows) -> LengthRows:
    """Both, one after the other; they come from one trace, so workflow and task numbers agree."""
    both = [np.concatenate([getattr(first, name), getattr(second, name)]) for name in _PER_ROW]
    return LengthRows(first.vocabulary, first.target, *both)


def _of_characters(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The characters that replace the token count of the whole prompt, float32 [n], NaN without texts."""
    system, user = numbers[:, _SYSTEM], numbers[:, _USER]
    return np.where(np.isnan(system), user, np.where(np.isnan(user), system, system + user))


def _prompt_tokens(system_chars: Any, user_chars: Any, tokens: Any) -> NDArray[np.float32]:
    """The columns of PROMPT, float32 [..., 3], from characters and the count of the whole prompt, NaN where unknown."""
    found = np.stack([system_chars, user_chars, tokens * CHARS_PER_TOKEN], axis=-1).astype(np.float32) / CHARS_PER_TOKEN
    counted = found.reshape(-1, len(PROMPT))
    counted[:, _PROMPT] = np.where(np.isnan(counted[:, _PROMPT]), _of_characters(counted), counted[:, _PROMPT])
    return np.asarray(found, np.float32)


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


def _most_frequent(column: pa.ChunkedArray, most: int) -> list[str]:
    counts = pc.value_counts(pc.drop_null(column)).to_pylist()
    return [c["values"] for c in sorted(counts, key=lambda c: (-c["counts"], c["values"]))[:most]]


def _floats(column: pa.ChunkedArray) -> NDArray[np.float32]:
    return np.asarray(pc.cast(column, pa.float32(), safe=False).to_numpy(), np.float32)  # above 2^24 it is rounded


def _codes(column: pa.ChunkedArray) -> NDArray[np.int32]:
    return np.asarray(pc.dictionary_encode(column.combine_chunks()).indices.to_numpy(zero_copy_only=False), np.int32)


def _models(column: pa.ChunkedArray, encoder: LengthEncoder) -> NDArray[np.int32]:
    found = pc.index_in(column, value_set=pa.array(encoder.models, pa.string()))
    index = np.asarray(pc.fill_null(found, len(encoder.models)).to_numpy(), np.int32)
    return np.where(column.is_valid().to_numpy(), index, len(encoder.models) + 1).astype(np.int32)


def count_of(step: Mapping[str, Any], name: str) -> float:
    """A number of tokens, NaN where unknown; raises InputError where it is none, negative, or past all counting."""
    tokens = step.get(name)
    if tokens is None:
        return float("nan")
    if not isinstance(tokens, int | float | np.number) or not 0 <= tokens < _NO_COUNT:
        raise InputError(f"{name} is {tokens!r:.40}; a number of tokens, 0 or more, is wanted")
    return float(tokens)


def _text(step: Mapping[str, Any], name: str) -> str | None:
    text = step.get(name)
    if text is not None and not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}; a string is wanted, or null")
    return text


def _length(text: str | None) -> float:
    return float("nan") if text is None else float(len(text))
