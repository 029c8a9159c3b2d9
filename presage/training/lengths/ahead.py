"""What a next-agent model expects of the very traces it may have learnt from, without its being too sure of them.

A model forecasts the workflows it was trained on better than any other. A predictor of lengths that learnt from such
forecasts would trust them more than they deserve when serving. So what is expected of those workflows comes from copies
of the same configuration, each fitted on the tasks of other folds; all other workflows, and serving, get the model
itself. The copies have fewer tasks to learn from than the model had: what is learnt of them trusts a little too little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.tasks import task_keys
from presage.features.prefixes import prefixes_of
from presage.predictors.ahead import AgentsAhead
from presage.predictors.next_agent import NextAgentPredictor
from presage.training.semantic_state import VALIDATION_FRACTION
from presage.training.sets import learnt_from, split_validation
from presage.training.training import Progress

FOLDS: Final = 3

NEXT_AGENT_TASKS: Final = "test workflows whose task the next-agent model learnt from"
"""The line of the report that is 0 unless the model was trained on what is judged here."""


@dataclass(frozen=True)
class Expected:
    """What is expected of the steps of a training trace.

    Attributes:
        ahead: what serving will ask.
        numbers: float32 [rows, A].
        workflows: how many of them the model had learnt from, so that copies answered.
        copies: how many were fitted.
        seconds: what fitting them took.
    """

    ahead: AgentsAhead
    numbers: NDArray[np.float32]
    workflows: int
    copies: int
    seconds: float

    def facts(self, test: pa.Table) -> dict[str, Any]:
        """For the report of a training that is judged on `test`."""
        given = self.ahead.given
        fitted = f"{self.copies} copies in {self.seconds:.1f} s for the {self.workflows} workflows it had learnt from"
        return {
            "next-agent model": given.called,
            "out of fold": fitted if self.copies else "nothing: the next-agent model learnt from none of these tasks",
            NEXT_AGENT_TASKS: learnt_from(test, given.predictor),
            "digest of the next-agent model": given.digest,
        }


def expected_out_of_fold(table: pa.Table, ahead: AgentsAhead, seed: int, progress: Progress) -> Expected:
    """`ahead.of_table`, but by a model that did not learn from the task of the step.

    Args:
        table: the training trace, in canonical order.
        ahead: what serving will ask.
        seed: of the folds.
        progress: told what is being done.

    Raises:
        TraceError: there are too few tasks to fit a copy on those of other folds.
    """
    begun = time.perf_counter()
    keys = task_keys(table)
    learnt = np.isin(keys, ahead.given.predictor.trained_on)
    numbers, copies = ahead.of_table(table), 0
    fold = folds_of(keys, table["workflow_type"], seed)
    for number in np.unique(fold[learnt]).tolist():
        inside = fold == number
        wanted = inside & learnt
        progress(f"learning who is next, fold {number + 1} of {FOLDS}", number / FOLDS)
        copy = _copy(ahead.given.predictor, table.filter(pa.array(~inside)))
        of_copy = replace(ahead, given=replace(ahead.given, predictor=copy))
        numbers[wanted] = of_copy.of_table(table.filter(pa.array(wanted)))
        copies += 1
    workflows = learnt_from(table, ahead.given.predictor)
    return Expected(ahead, numbers, workflows, copies, time.perf_counter() - begun)


def folds_of(keys: NDArray[np.uint64], workflow_type: pa.ChunkedArray, seed: int) -> NDArray[np.int64]:
    """A fold for each row, int64 [n], the same for all rows of a task; each workflow type's tasks are spread evenly."""
    types = pc.dictionary_encode(workflow_type.combine_chunks()).indices.to_numpy()
    tasks, first, task_of = np.unique(keys, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(tasks))
    order = order[np.argsort(types[first[order]], kind="stable")]
    fold = np.empty(len(tasks), np.int64)
    fold[order] = np.arange(len(tasks)) % FOLDS
    return np.asarray(fold[task_of])


def _copy(model: NextAgentPredictor, table: pa.Table) -> NextAgentPredictor:
    """The same configuration, vocabulary and horizon, learnt from this trace by ids alone."""
    prefixes = prefixes_of(table, model.vocabulary, model.horizon)
    inner, validation = split_validation(prefixes, VALIDATION_FRACTION, model.seed)
    return NextAgentPredictor(model.config, model.seed).fit(inner, validation)
