"""The prompts that a trace records, by workflow type: what prompt templates are learnt from and judged on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.tasks import task_of
from presage.features.sequences import TypeSequences
from presage.predictors.profile.composition import PromptStep
from presage.predictors.profile.templates import Workflows, prompt_steps

MOST_STEPS: Final = 100_000
MOST_BYTES: Final = 200_000_000
"""Steps, and bytes of their texts, that are read of a trace; a workflow type has an equal share of both."""
_COLUMNS: Final = ("agent", "input_text", "output_text", "system_prompt")


def recorded_prompts(table: pa.Table, sequences: Mapping[str, TypeSequences]) -> dict[str, Workflows]:
    """The workflows of the types that have a prompt, read one by one, once; where they are too many, some, evenly
    spread over time.

    Args:
        table: the valid trace that `sequences` are of.
    """
    texts = table.select(_COLUMNS)
    size = np.zeros(len(table), np.int64)
    for name in _COLUMNS[1:]:
        size += pc.fill_null(pc.binary_length(texts[name]), 0).to_numpy()
    prompted = pc.is_valid(texts["input_text"]).to_numpy()
    tasks, recorded = task_of(table), dict[str, Workflows]()
    for name, of_type in sequences.items():
        rows = [workflow.rows for workflow in of_type.workflows]
        if any(prompted[part].any() for part in rows):
            steps, texts_size = (sum(each) for each in zip(*((len(size[p]), size[p].sum()) for p in rows), strict=True))
            excess = max(1.0, len(sequences) * max(steps / MOST_STEPS, texts_size / MOST_BYTES))
            kept = np.linspace(0, len(rows) - 1, max(1, int(len(rows) / excess))).astype(int)
            recorded[name] = _read(texts, tasks, [rows[index] for index in kept])
    return recorded


def _read(texts: pa.Table, tasks: pa.ChunkedArray, rows: Sequence[slice]) -> Iterator[tuple[str, list[PromptStep]]]:
    for span in rows:
        yield tasks[span.start].as_py(), prompt_steps(texts.slice(span.start, span.stop - span.start).to_pylist())
