"""The part of the training workflows that decides when to stop and how to mix, apart from the test set.

Whole tasks again: two runs of one task on both sides would stop too late. Tasks are drawn systematically, every so
many in an order that is random within each workflow type, so that each type is held out in proportion.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError, TraceError
from presage.features.prefixes import Prefixes


def split_validation(prefixes: Prefixes, fraction: float, seed: int) -> tuple[Prefixes, Prefixes]:
    """Divides training prefixes into (train, validation) by task.

    Args:
        prefixes: of at least two tasks.
        fraction: share of the tasks in the validation part, between 0 and 1; at least one task stands on each side.
        seed: of the choice.

    Raises:
        ConfigurationError: the fraction lies not between 0 and 1.
        TraceError: there is a single task, so that nothing can be held out.
    """
    apart = tasks_apart(prefixes.task, prefixes.workflow_type, fraction, seed)
    return prefixes.take(np.flatnonzero(~apart)), prefixes.take(np.flatnonzero(apart))


def tasks_apart(
    task: NDArray[np.int32], workflow_type: NDArray[np.int32], fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Which of n workflows, or of n of their steps, are of tasks that are held out, bool [n].

    Args:
        task: int32 [n].
        workflow_type: int32 [n].
        fraction: share of the tasks that is held out, between 0 and 1; at least one task stands on each side.
        seed: of the choice.

    Raises:
        ConfigurationError: the fraction lies not between 0 and 1.
        TraceError: there is a single task, so that nothing can be held out.
    """
    if not 0 < fraction < 1:
        raise ConfigurationError(f"validation fraction {fraction}: a number between 0 and 1 is wanted, such as 0.15")
    tasks, first, task_of = np.unique(task, return_index=True, return_inverse=True)
    if len(tasks) < 2:
        raise TraceError(
            "a single task is left for training; at least 2 tasks are wanted, one of them to decide when to stop: "
            "give traces of more tasks (without `task`, each workflow is one)"
        )
    order = np.random.default_rng(seed).permutation(len(tasks))
    order = order[np.argsort(workflow_type[first[order]], kind="stable")]
    count = min(max(1, round(fraction * len(tasks))), len(tasks) - 1)
    held_out = np.zeros(len(tasks), bool)
    held_out[order[((np.arange(count) + 0.5) * len(tasks) / count).astype(np.int64)]] = True
    return held_out[task_of]
