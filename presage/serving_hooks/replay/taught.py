"""What a training part of the traces teaches policies that know no model: transitions, and a back-off trigram.

The training part and what is replayed have no task in common; that is the caller's business.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from presage.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from presage.predictors.ngram import BackoffNgram
    from presage.serving_hooks.replay.static_graph import Transitions
    from presage.serving_hooks.replay.workload import Job

HORIZON = 3
"""Steps that the trigram looks ahead: K of the score's default."""


@dataclass(frozen=True)
class Taught:
    """What was learnt.

    Attributes:
        transitions: of each workflow type, of each agent, those that ever came right after it.
        markov: the back-off trigram.
        medians: by (workflow type, agent), the median of the output tokens left when a step of the agent arrives.
    """

    transitions: Transitions
    markov: BackoffNgram
    medians: Mapping[tuple[str, str], float]


def teach(table: pa.Table, jobs: tuple[Job, ...]) -> Taught:
    """Learns from a training part.

    Args:
        table: the trace.
        jobs: of it.

    Raises:
        TraceError: there is nothing to be learnt from it.
    """
    from presage.features.prefixes import prefixes_of
    from presage.features.vocabulary import Vocabulary
    from presage.predictors.ngram import LONGEST, BackoffNgram

    if not len(table):
        raise TraceError("the training part is empty: give --train-traces, or more traces")
    prefixes = prefixes_of(table, Vocabulary.from_table(table), HORIZON)
    return Taught(_transitions(jobs), BackoffNgram(LONGEST).fit(prefixes, prefixes), _medians(jobs))


def _transitions(jobs: tuple[Job, ...]) -> Transitions:
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for job in jobs:
        for step in job.steps:
            for parent in step.parents:
                found[job.workflow_type][job.steps[parent].agent].add(step.agent)
    return {kind: {agent: frozenset(after) for agent, after in of.items()} for kind, of in found.items()}


def _medians(jobs: tuple[Job, ...]) -> dict[tuple[str, str], float]:
    left: dict[tuple[str, str], list[int]] = defaultdict(list)
    for job in jobs:
        if not job.complete:
            continue  # what was left of it was never seen
        tokens = 0
        for step in reversed(job.steps):
            tokens += step.output_tokens
            left[job.workflow_type, step.agent].append(tokens)
    return {key: float(median(values)) for key, values in left.items()}
