"""Training sets of growing size, each within the next, of whole tasks, with workflow types in proportion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys

LEAST_TASKS: Final = 2
"""One to learn from, one to decide when to stop."""


@dataclass(frozen=True)
class NestedSets:
    """Every number of first tasks, in one random order, is a training set.

    Attributes:
        rows: int64 [n], the task of each row.
        sizes: int64 [T], workflows of each task.
        order: int64 [T], tasks in the order they are taken in.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    order: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table, seed: int, draw: int) -> NestedSets:
        """The sets of one draw of a valid trace in canonical order; a task of several types counts as of the first."""
        _, first, rows = np.unique(task_keys(table), return_index=True, return_inverse=True)
        heads = table["step"].to_numpy() == 0
        kinds = table["workflow_type"].combine_chunks().dictionary_encode().indices.to_numpy()[first]
        shuffled = np.random.default_rng([seed, draw]).permutation(len(first))
        shuffled = shuffled[np.argsort(kinds[shuffled], kind="stable")]
        _, starts, counts = np.unique(kinds[shuffled], return_index=True, return_counts=True)
        rank = np.arange(len(shuffled)) - np.repeat(starts, counts)
        # How far through its type a task stands: so ordered, first tasks hold every type in proportion.
        place = (rank + 0.5) / np.repeat(counts, counts)
        return cls(rows, np.bincount(rows[heads], minlength=len(first)), shuffled[np.argsort(place, kind="stable")])

    @property
    def tasks(self) -> int:
        """T."""
        return len(self.sizes)

    @property
    def workflows(self) -> int:
        """Of all tasks together."""
        return int(self.sizes.sum())

    def enough(self, workflows: int) -> int:
        """How many first tasks hold so many workflows; two at least, if there are two."""
        reached = int(np.searchsorted(np.cumsum(self.sizes[self.order]), workflows)) + 1
        return min(max(LEAST_TASKS, reached), self.tasks)

    def held(self, tasks: int) -> int:
        """Workflows of so many first tasks."""
        return int(self.sizes[self.order[:tasks]].sum())

    def take(self, table: pa.Table, tasks: int) -> pa.Table:
        """The steps of so many first tasks."""
        chosen = np.zeros(self.tasks, bool)
        chosen[self.order[:tasks]] = True
        return table.filter(pa.array(chosen[self.rows]))
