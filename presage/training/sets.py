"""Training, validation and test sets, for every kind of predictor.

Validation and test sets consist of whole tasks: with runs of one task on both sides, training would stop too late.
Sampling is systematic: every n-th task of an order that is random within each workflow type, so that all types are held
out in proportion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import digest, workflow_codes
from presage.datasets.schema.names import NameMapping
from presage.datasets.schema.validate import validate
from presage.datasets.split import Split, split
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError, TraceError
from presage.features.input_profiles import PROFILES, Sources
from presage.features.served_steps import served_steps
from presage.features.vocabulary import Vocabulary

TEST_FRACTION: Final = 0.2

SHARED_TASKS: Final = "test workflows whose task is in the training set"
"""Report line: above 0 if separate test traces share tasks with the training traces."""


class LearntFrom(Protocol):
    """A predictor that records its training tasks."""

    @property
    def trained_on(self) -> NDArray[np.uint64]:
        """Keys of the tasks (`presage.datasets.tasks.task_keys`)."""

    @property
    def names(self) -> NameMapping:
        """How the names in its training traces were folded."""


def set_apart(table: pa.Table, test: pa.Table | None, seed: int) -> Split:
    """Training and test set of served steps; if `test` is None, a part of `table` is split off, else its names are
    folded as those of `table` were."""
    table = served_steps(table)
    if test is not None:
        return Split(table, served_steps(_folded(test, NameMapping.of(table))), "separate test traces")
    return split(table, TEST_FRACTION, seed)


def held_out(table: pa.Table, *predictors: LearntFrom) -> tuple[pa.Table, int]:
    """Served steps of tasks that no predictor was trained on, and the number of workflows left out.

    Names are folded as those of the predictors were. Raises TraceError if no workflow is left.
    """
    for predictor in predictors:
        table = _folded(table, predictor.names)
    table = served_steps(table)
    seen = np.isin(task_keys(table), np.concatenate([predictor.trained_on for predictor in predictors]))
    left_out = int((seen & (table["step"].to_numpy() == 0)).sum())
    if seen.all():
        raise TraceError(
            f"all {left_out} workflows are of tasks that the model was trained on, so its figures on them prove "
            "nothing: give traces that were kept apart, such as later ones or those of --test"
        )
    return (table.filter(pa.array(~seen)) if left_out else table), left_out


def _folded(table: pa.Table, names: NameMapping) -> pa.Table:
    """A valid trace with its names folded; raises TraceError if two workflows become one."""
    if not names or names == NameMapping.of(table):
        return table
    return names.on(validate(names.table(table), "the traces, names folded as those that the model was trained on"))


def check_known_agents(table: pa.Table, vocabulary: Vocabulary) -> None:
    """Raise TraceError if the predictor knows none of a trace's agents: its figures would be meaningless."""
    agents = pc.unique(table["agent"]).to_pylist()
    if agents and all(vocabulary.agent(name) == vocabulary.unknown for name in agents):
        theirs, ours = (", ".join(map(repr, sorted(names)[:5])) for names in (agents, vocabulary.agents))
        raise TraceError(
            f"none of these agents are known: the traces name {theirs}, the model was trained on {ours}; give traces "
            "of the application that the model was trained on, or train one for this application"
        )


def shared_tasks(parts: Split) -> int:
    """Number of test workflows whose task is also in the training part: 0 after `split`."""
    heads = parts.test.filter(pc.equal(parts.test["step"], 0))
    return int(np.isin(task_keys(heads), task_keys(parts.train)).sum())


def described(parts: Split, workflows: int, steps: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The digests of both parts by name, and an artefact's description of its training data."""
    digests = {
        "training traces": f"sha256:{digest(parts.train)}",
        "test traces": f"sha256:{digest(parts.test)}",
    }
    of_training = {"digest": digests["training traces"], "workflows": workflows, "steps": steps, "split": parts.rule}
    return digests, of_training


def workflow_names(table: pa.Table) -> tuple[str, ...]:
    """ "type/id" of each workflow of a trace in canonical order."""
    first = pa.array(np.flatnonzero(np.diff(workflow_codes(table), prepend=-1)))
    names = (table[column].take(first).to_pylist() for column in ("workflow_type", "workflow_id"))
    return tuple(f"{kind}/{workflow_id}" for kind, workflow_id in zip(*names, strict=True))


def tasks_apart(
    task: NDArray[np.int32], workflow_type: NDArray[np.int32], fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Mask of the workflows (or steps) that belong to held-out tasks, bool [n], from task and workflow type, int32 [n].

    `fraction` is the share of the tasks to hold out, between 0 and 1; each part gets at least one task.

    Raises:
        ConfigurationError: the fraction is not between 0 and 1.
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


Data = TypeVar("Data")


def under_profiles(
    whole: Data, observed: Callable[[Sources], Data], alike: Callable[[Data, Data], bool]
) -> dict[str, Data]:
    """Test data as seen under each input profile; profiles with equal inputs share one object.

    `observed` keeps the inputs of some sources of the `whole` data; `alike` compares the inputs of two.
    """
    seen, by_profile = [whole], {}
    for name, sources in PROFILES.items():
        shown = observed(sources)
        by_profile[name] = next((earlier for earlier in seen if alike(earlier, shown)), shown)
        seen.append(by_profile[name])
    return by_profile
