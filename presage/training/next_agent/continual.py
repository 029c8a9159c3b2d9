"""Train a fitted next-agent predictor further, on newer traces: it keeps what it knows, and learns what is new.

Horizon, settings, states and projections are the old ones. A new agent takes the place of the old one that has its
system prompt, or of one that the newer traces no longer call, if the same agents come before and after it
(`places_taken`): it was renamed, or is a part of it.
Then the network is trained further, trees are added, n-gram and evidence are counted further, and the mixture is
weighed again (`predictors/next_agent/continued.py`). So that the old agents are not forgotten, each workflow with a new
agent is learnt a second time as it was before: under the old name, or without the steps of an agent in nobody's place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema.names import NameMapping
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.agent_names import AgentNames, recognised
from presage.features.prefixes import prefixes_of
from presage.features.served_steps import served_steps
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.continued import Extension, Start
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.baselines import BASELINES, find
from presage.training.next_agent.semantic_state import VALIDATION_FRACTION
from presage.training.next_agent.train import FittedPredictor, NextAgentTraining, OldModel, assess
from presage.training.sets import set_apart, tasks_apart
from presage.training.training import Progress

_SWEEPS: Final = 3
"""Times that the place of each new agent is judged: it depends on those of the others."""
_BELIEVED: Final = 3.0
"""Steps that what follows any agent is believed as much as, against what follows this one."""


def train_further(
    table: pa.Table,
    test: pa.Table | None,
    origin: OldModel,
    *,
    seed: int = 0,
    baselines: Sequence[str] = tuple(BASELINES),
    name: str | None = None,
    progress: Progress | None = None,
) -> NextAgentTraining:
    """As `train`, from an older predictor, which is judged beside the new one; `table` and `test` are newer traces.

    Raises also what `continue_predictor` raises, and TraceError if the new one was trained on all of the old test set.
    """
    for baseline in baselines:
        find(baseline)
    parts = set_apart(table, test, seed)
    fitted = continue_predictor(origin.predictor, parts.train, seed=seed, progress=progress)
    return assess(fitted, parts, baselines=baselines, name=name, origin=origin, progress=progress)


def continue_predictor(
    old: NextAgentPredictor, table: pa.Table, *, seed: int = 0, progress: Progress | None = None
) -> FittedPredictor:
    """Fit a predictor that starts from an old one on all served steps of a valid trace.

    Raises ConfigurationError if names are folded otherwise than those that the old one was trained on, and InputError
    if captured states are of another model or layer.
    """
    report, begun = progress or (lambda _, __: None), time.perf_counter()
    table = served_steps(table)
    if NameMapping.of(table) != old.names:
        raise ConfigurationError(
            f"names in these traces are folded by {NameMapping.of(table)}, those of the model to start from by "
            f"{old.names}: ingest the traces with the patterns of that model, or train anew"
        )
    report("reading states", None)
    states = old.source.states(table)
    takes = places_taken(old, table)
    extension = Extension(old.vocabulary, old.vocabulary.extended(table, takes), takes)
    learning = prefixes_of(table, extension.new, old.horizon).with_states(states)
    apart = tasks_apart(learning.task, learning.workflow_type, VALIDATION_FRACTION, seed)
    inner, validation = (learning.take(np.flatnonzero(part)) for part in (~apart, apart))
    predictor = NextAgentPredictor(old.config, seed).fit(
        inner,
        validation,
        source=old.source,
        whole=learning,
        start=Start(extension.extend(old.parts), extension),
        trained_on=np.concatenate([old.trained_on, task_keys(table)]),
        progress=report,
    )
    names = AgentNames.of_traces(table)
    predictor.agent_names = old.agent_names.and_then(names) if old.agent_names and names else names or old.agent_names
    return FittedPredictor(predictor, learning, inner, validation, None, time.perf_counter() - begun)


def places_taken(old: NextAgentPredictor, table: pa.Table) -> dict[str, str]:
    """The old agent whose place a new one takes, by the new name, judged by the served steps of newer traces.

    It is the one as which most of its steps are recognised by their system prompts; else, of the old agents that the
    traces no longer call, the one before and after which the same agents come, and in the same workflow types: the sum
    of pointwise mutual information over its transitions, if above 0.
    """
    prompted = _by_prompts(old, table)
    names, unknown = old.vocabulary.agents, old.vocabulary.unknown
    new = sorted(set(table["agent"].to_pylist()) - set(names))
    both = Vocabulary(old.vocabulary.workflow_types, (*names, *new), names=old.names)
    prefixes = prefixes_of(table, both, 1)
    came = BackoffNgram(2).fit(prefixes, prefixes).transitions()
    steps = np.zeros((len(both.workflow_types) + 1, len(both.agents)), np.int64)
    np.add.at(steps, (prefixes.workflow_type[prefixes.workflow], prefixes.agent), 1)
    gone = np.setdiff1d(np.flatnonzero(steps[:, :unknown].sum(axis=0) == 0), old.vocabulary.new_agents)
    follows, of_types = _information(old.parts.ngram.transitions()), _information(old.parts.evidence[:-1, :-1])
    to_gone, from_gone, alone = follows[:, gone], follows[gone], follows[gone, gone]
    of_new = [old.vocabulary.agent(prompted[name]) if name in prompted else -1 for name in new]
    role = np.concatenate([np.arange(unknown), of_new, [unknown]])  # by both vocabularies; -1: nobody's place
    for agent in np.tile(unknown + np.flatnonzero(np.array(of_new) < 0), _SWEEPS):
        others = np.flatnonzero((role >= 0) & (np.arange(len(role)) != agent))
        earlier, later = (np.bincount(role[others], n[others], unknown + 1) for n in (came[:, agent], came[agent]))
        score = earlier @ to_gone + from_gone @ later + came[agent, agent] * alone
        score = score + steps[:-1, agent] @ of_types[:, gone]
        role[agent] = gone[score.argmax()] if score.max(initial=0.0) > 0 else -1
    return {name: names[role[unknown + i]] for i, name in enumerate(new) if role[unknown + i] >= 0}


def _by_prompts(old: NextAgentPredictor, table: pa.Table) -> dict[str, str]:
    """The old agent as which most steps of a new one are recognised, by the new name."""
    sent = table["agent"].to_pylist()
    known_as = recognised(table, old.agent_names, old.vocabulary)["agent"].to_pylist()
    steps, recognitions = Counter(sent), Counter((a, b) for a, b in zip(sent, known_as, strict=True) if a != b)
    return {name: old_name for (name, old_name), count in recognitions.items() if 2 * count > steps[name]}


def _information(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Pointwise mutual information of rows and columns, nats, float64 like counts; that of rare rows is small."""
    rows, columns = counts.sum(axis=1, keepdims=True), counts.sum(axis=0, keepdims=True)
    share = np.maximum(columns, 0.5) / max(counts.sum(), 1)
    return np.asarray(np.log((counts + _BELIEVED * share) / (rows + _BELIEVED) / share))
