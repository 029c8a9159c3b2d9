"""Rows of steps with a label, a positive number: what the estimators of quantiles learn from.

The columns of `numbers` begin with PROMPT and PROGRESS (`history.py`), which tell the input profile of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.history import PROGRESS
from presage.features.input_profiles import PROFILES, Sources
from presage.features.vocabulary import Vocabulary

ContextTarget = Literal["final-context", "next-context"]
"""By how many tokens a step's prompt is exceeded by the largest context (prompt and output) of this and all later
steps, or by the context of the next step, of this one if it is the last; 0 where it is not."""

CONTEXT_TARGETS: Final[tuple[ContextTarget, ...]] = get_args(ContextTarget)

Target = Literal["remaining", "step", "return"] | ContextTarget
"""The label: the output tokens of this and all later steps, or of this step alone; the milliseconds until the next
request of the workflow; or the growth of its context."""

PROMPT: Final = ("system_tokens", "user_tokens", "prompt_tokens")
SYSTEM_COLUMN, USER_COLUMN, PROMPT_COLUMN = range(len(PROMPT))
TEXT_COLUMNS: Final = (SYSTEM_COLUMN, USER_COLUMN)
"""The columns of which one is known if a row has a text."""

PRODUCED_COLUMN, PREVIOUS_COLUMN = (
    len(PROMPT) + PROGRESS.index(name) for name in ("produced_tokens", "previous_output_tokens")
)

LEARNT_PROFILES: Final[tuple[Sources, ...]] = tuple(PROFILES[name] for name in ("ids", "ids+tokens", "+text"))
"""The input profiles that differ for a predictor that reads no hidden states; the smallest first. A row with a text has
the last."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """n LLM steps of W workflows, with their labels.

    Attributes:
        workflow_type: int32 [n], T for an unknown type.
        agent: int32 [n], V for an unknown agent.
        model: int32 [n], M for a model that training never saw, M + 1 where none is named.
        numbers: float32 [n, F], NaN where unknown.
        label: float32 [n], NaN where unknown.
        lower_bound: bool [n], the workflow was cut: the label is at least that.
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
    label: NDArray[np.float32]
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
        return np.isfinite(self.label) & ~self.lower_bound

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> LabelledRows:
        """The given rows alone, by number or by a mask; workflows and tasks keep their numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _PER_ROW})


_PER_ROW: Final = tuple(field.name for field in fields(LabelledRows) if field.name not in ("vocabulary", "target"))


def join_rows(first: LabelledRows, second: LabelledRows) -> LabelledRows:
    """Both, one after the other; they come from one trace, so workflow and task numbers agree."""
    both = [np.concatenate([getattr(first, name), getattr(second, name)]) for name in _PER_ROW]
    return LabelledRows(first.vocabulary, first.target, *both)


@njit(cache=True)
def profiles_of(numbers: NDArray[np.float32], text_columns: tuple[int, ...] = TEXT_COLUMNS) -> NDArray[np.int64]:
    """Index in LEARNT_PROFILES of each row's inputs, int64 [n], from numbers float32 [n, F].

    A row has a text if one of `text_columns` is known.
    """
    out = np.empty(len(numbers), np.int64)
    for row in range(len(numbers)):
        row_numbers = numbers[row]
        out[row] = (
            not (np.isnan(row_numbers[PROMPT_COLUMN]) and np.isnan(row_numbers[PREVIOUS_COLUMN]))
            or row_numbers[PRODUCED_COLUMN] > 0
        )
        for column in text_columns:
            if not np.isnan(row_numbers[column]):
                out[row] = 2
    return out
