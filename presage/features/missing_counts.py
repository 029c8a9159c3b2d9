"""Token counts that a trace lacks, such as those of answers streamed without usage: estimated and marked.

A workflow with one missing count would otherwise have no length, and mostly long workflows would drop out. A missing
count is estimated from

1. the step's text, by the characters a token of the steps that have both: of the same model and agent, else of the
   agent, else of the model, else of all; CHARS_PER_TOKEN if no step has both. An empty text counts as none, because the
   answer of a step that only calls tools is empty;
2. without a text, a recorded count drawn from those of the same workflow type and agent, else of the agent, else of the
   type, else of all. A draw and not the mean, so that the sums over a workflow keep their spread.

A draw depends on the seed and on the step's workflow type, workflow id and number alone. If no step has a count, a step
without a text keeps none. An engine knows the counts of the steps it serves, so serving estimates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import PREFIX_BLOCK_TOKENS
from presage.features.lengths import CHARS_PER_TOKEN

COUNTS: Final = ("input_tokens", "output_tokens")

ENOUGH: Final = 5
"""Steps with a count that a group must have before it is used; of all steps, one is enough."""

_TEXTS: Final = {"input_tokens": ("system_prompt", "input_text"), "output_tokens": ("output_text",)}
_ALL: Final = ("kind",)  # which is "llm" on every step that is counted
_OF_RATIOS: Final = (("model", "agent"), ("agent",), ("model",), _ALL)
_OF_DRAWS: Final = (("workflow_type", "agent"), ("agent",), ("workflow_type",), _ALL)
_IDENTITY: Final = ("workflow_type", "workflow_id", "step")
_MOST: Final = 2**31 - 1

_Group = tuple[tuple[str, ...], tuple[Any, ...]]
"""Names of columns, and the values that the steps of a group have there."""


@dataclass(frozen=True, eq=False)
class FilledTrace:
    """A trace with its missing counts estimated; `estimated`, bool [rows] by column of COUNTS, marks them."""

    table: pa.Table
    estimated: Mapping[str, NDArray[np.bool_]]


@dataclass(frozen=True, eq=False)
class CountEstimates:
    """What the LLM steps of a trace say about missing counts.

    Attributes:
        seed: of draws.
        ratios: characters a token, by column of COUNTS and group.
        recorded: the counts of a group, int64, rising, by column and group.
    """

    seed: int
    ratios: Mapping[str, Mapping[_Group, float]]
    recorded: Mapping[str, Mapping[_Group, NDArray[np.int64]]]

    @classmethod
    def fit(cls, table: pa.Table, seed: int) -> CountEstimates:
        """Fits ratios and distributions on a valid trace."""
        llm = table.filter(pc.equal(table["kind"], "llm"))
        ratios, recorded = {}, {}
        for column in COUNTS:
            steps = _named(llm, column).append_column("tokens", pc.cast(llm[column], pa.int64()))
            steps = steps.filter(pc.is_valid(steps["tokens"]))
            read = steps.filter(pc.and_(pc.greater(steps["characters"], 0), pc.greater(steps["tokens"], 0)))
            ratios[column] = {
                group: sum(characters) / sum(tokens)
                for group, characters, tokens in _groups(read, _OF_RATIOS, ("characters", "tokens"))
            }
            recorded[column] = {group: np.sort(tokens) for group, tokens in _groups(steps, _OF_DRAWS, ("tokens",))}
        return cls(seed, ratios, recorded)

    def fill(self, table: pa.Table) -> FilledTrace:
        """The trace with estimates where LLM steps have no count; recorded counts stay."""
        estimated = {}
        for column in COUNTS:
            missing = pc.and_(pc.equal(table["kind"], "llm"), pc.is_null(table[column]))
            rows = np.flatnonzero(missing.to_numpy())
            counts = pc.fill_null(table[column], -1).to_numpy().astype(np.int64)
            counts[rows] = self._estimates(table.take(pa.array(rows)), column)
            estimated[column] = np.zeros(len(table), bool)
            estimated[column][rows] = counts[rows] >= 0
            if estimated[column].any():
                field = table.schema.field(column)
                filled = pa.array(counts, field.type, mask=counts < 0)
                table = table.set_column(table.schema.get_field_index(column), field, filled)
        return FilledTrace(table, estimated)

    def _estimates(self, steps: pa.Table, column: str) -> NDArray[np.int64]:
        """The count of each LLM step without one, int64 [rows]; -1 where nothing says it."""
        ratios, recorded = self.ratios[column], self.recorded[column]
        estimates = np.full(len(steps), -1, np.int64)
        for row, step in enumerate(_named(steps, column).to_pylist()):
            if step["characters"]:
                ratio = _nearest(ratios, step, _OF_RATIOS)
                estimates[row] = round(step["characters"] / (CHARS_PER_TOKEN if ratio is None else ratio))
            elif (counts := _nearest(recorded, step, _OF_DRAWS)) is not None:
                estimates[row] = counts[self._draw(column, step) * len(counts) >> 64]
        if column == "input_tokens":
            estimates = np.where(estimates < 0, estimates, np.maximum(estimates, _least_input(steps)))
        return np.where(estimates < 0, estimates, np.clip(estimates, 1, _MOST))

    def _draw(self, column: str, step: Mapping[str, Any]) -> int:
        """A random number below 2^64 that the seed, the column and the step's identity determine."""
        identity = repr((self.seed, column, *(step[name] for name in _IDENTITY)))
        return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest())


def _named(steps: pa.Table, column: str) -> pa.Table:
    """The names and numbers that identify each step and its groups, and its `characters`, 0 without a text."""
    characters = pa.array(np.zeros(len(steps), np.int64))
    for name in _TEXTS[column]:
        characters = pc.add(characters, pc.cast(pc.fill_null(pc.utf8_length(steps[name]), 0), pa.int64()))
    return steps.select([*_IDENTITY, "agent", "model", "kind"]).append_column("characters", characters)


def _groups(steps: pa.Table, levels: tuple[tuple[str, ...], ...], columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Each group of the levels that has enough steps, with the values of `columns`, int64 each."""
    groups: list[tuple[Any, ...]] = []
    for names in levels:
        grouped = steps.group_by(list(names), use_threads=False).aggregate([(column, "list") for column in columns])
        keys = zip(*(grouped[name].to_pylist() for name in names), strict=True)
        values = zip(*(grouped[f"{column}_list"].combine_chunks() for column in columns), strict=True)
        for key, lists in zip(keys, values, strict=True):
            if len(lists[0].values) >= (1 if names == _ALL else ENOUGH):
                groups.append(((names, key), *(column_values.values.to_numpy() for column_values in lists)))
    return groups


def _nearest(groups: Mapping[_Group, Any], step: Mapping[str, Any], levels: tuple[tuple[str, ...], ...]) -> Any:
    """What is known of the first of a step's groups that is known; None if none is."""
    for names in levels:
        group = groups.get((names, tuple(step[name] for name in names)))
        if group is not None:
            return group
    return None


def _least_input(steps: pa.Table) -> NDArray[np.int64]:
    """Tokens that each prompt has at least, by what else is recorded of it, int64 [rows]."""
    least: NDArray[np.int64] = pc.fill_null(steps["cached_input_tokens"], 0).to_numpy().astype(np.int64)
    if "prefix_blocks" in steps.column_names:
        blocks = [sum(last - first + 1 for first, last in runs or ()) for runs in steps["prefix_blocks"].to_pylist()]
        least = np.maximum(least, PREFIX_BLOCK_TOKENS * np.array(blocks, np.int64))
    return least
