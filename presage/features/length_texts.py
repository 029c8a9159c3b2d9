"""The texts of a training trace, ready for sketches that a predictor of lengths may read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.features.folds import task_folds
from presage.features.lengths import LengthEncoder, LengthRows, prompts_and_answers
from presage.features.sketch import Corpus, Sketch

SKETCH_SIZE: Final = 48


@dataclass(frozen=True, eq=False)
class LengthTexts:
    """The prompts of n LLM steps and the answers before them.

    Attributes:
        rows: the steps, without sketches.
        corpus: 2 n rows, first all prompts.
        fold: int64 [2 n], equal for steps of one task.
    """

    rows: LengthRows
    corpus: Corpus
    fold: NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table, rows: LengthRows, seed: int) -> LengthTexts | None:
        """Of a trace and its rows; None where no step of it has a text.

        A term has to tell whether more is left than usually at such a step: of this agent, in this workflow type.
        """
        llm = np.flatnonzero(pc.equal(table["kind"], "llm").to_numpy())
        prompts, answers = prompts_and_answers(table)
        texts = [of[row] for of in (prompts, answers) for row in llm.tolist()]
        if not any(texts):
            return None
        group = rows.workflow_type * (len(rows.vocabulary.agents) + 1) + rows.agent
        corpus = Corpus.of(
            texts,
            np.tile(rows.task, 2),
            np.tile(group, 2).astype(np.int32),
            np.repeat(np.arange(2, dtype=np.int8), len(rows)),
            np.tile(_above_usual(rows, group), 2)[:, None],
        )
        return cls(rows, corpus, np.tile(task_folds(rows.task, seed), 2))

    def fit(
        self,
        encoder: LengthEncoder,
        *,
        relevant: bool,
        seed: int,
        size: int = SKETCH_SIZE,
        learning: NDArray[np.bool_] | None = None,
    ) -> tuple[LengthEncoder, LengthRows]:
        """Fits a sketch.

        Args:
            encoder: that made the rows, without a sketch.
            relevant: keep only terms that tell of what is left.
            seed: of the sketch.
            size: S, dimensions wanted.
            learning: bool [n], the rows whose texts are learnt; None for all.

        Returns:
            The encoder with the sketch, and all rows with their sketches. Those of rows that chose relevant terms are
            out of fold. All others are as serving makes them: terms chosen without a label flatter no row, while
            sketches that differ from fold to fold tell trees which fold a row is of.

        Raises:
            InputError: there is nothing a sketch could learn from.
        """
        mine = np.tile(np.ones(len(self.rows), bool) if learning is None else learning, 2)
        part = self.corpus.take(mine)
        sketch, own = Sketch.fit(part, self.fold[mine], relevant=relevant, size=size, seed=seed)
        found = np.empty((len(mine), sketch.size), np.float32)
        found[mine] = own if relevant else sketch.rows(part)
        found[~mine] = sketch.rows(self.corpus.take(~mine))
        at = len(encoder.names) - (len(encoder.ahead.names) if encoder.ahead is not None else 0)
        before, after = np.split(self.rows.numbers, [at], axis=1)
        numbers = np.concatenate([before, *np.split(found, 2), after], axis=1)
        return replace(encoder, sketch=sketch), replace(self.rows, numbers=numbers)


def _above_usual(rows: LengthRows, group: NDArray[np.int32]) -> NDArray[np.float32]:
    """Whether more than the median of a row's group is left, 0 or 1, NaN where that is not known; float32 [n]."""
    above = np.full(len(rows), np.nan, np.float32)
    for one in np.unique(group):
        inside = (group == one) & rows.labelled
        above[inside] = rows.remaining[inside] > np.median(rows.remaining[inside]) if inside.any() else np.nan
    return above
