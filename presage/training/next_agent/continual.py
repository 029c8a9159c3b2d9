"""Train a fitted next-agent predictor further, on newer traces: it keeps what it knows, and learns what is new.

Horizon, settings, states and projections are the old ones. A new agent takes the place of an old one that the newer
traces no longer call, if the old predictor expected that one where the new one came (`places_taken`): it was renamed,
or is a part of it. Then the network is trained further, trees are added, n-gram and evidence are counted further, and
the mixture is weighed again (`predictors/next_agent/continued.py`). So that the old names are not forgotten, each
workflow with such an agent is learnt under the old names too.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from presage.datasets.schema.names import NameMapping
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.agent_names import AgentNames
from presage.features.moment import COMPLETION
from presage.features.prefixes import prefixes_of
from presage.features.served_steps import served_steps
from presage.features.vocabulary import encode
from presage.predictors.next_agent.continued import Extension, Start
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.next_agent.semantic_state import VALIDATION_FRACTION
from presage.training.next_agent.train import FittedPredictor
from presage.training.sets import tasks_apart
from presage.training.training import Progress


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
    predictor.agent_names = AgentNames.of_traces(table)
    return FittedPredictor(predictor, learning, inner, validation, None, time.perf_counter() - begun)


def places_taken(old: NextAgentPredictor, table: pa.Table) -> dict[str, str]:
    """The old agent whose place a new one takes, by the new name, judged by the served steps of newer traces.

    It is the outcome that the old predictor expected most where the new agent came, if the traces do not call it.
    """
    prefixes = prefixes_of(table, old.vocabulary, old.horizon).with_states(old.source.states(table))
    expected = old.predict(prefixes, COMPLETION)[:, 0]
    names = sorted(set(table["agent"].to_pylist()) - set(old.vocabulary.agents))
    index = encode(table["agent"], names)
    gone = np.setdiff1d(np.arange(len(old.vocabulary.agents)), prefixes.agent)
    takes = {}
    for number, name in enumerate(names):
        came = np.flatnonzero((index == number) & (prefixes.position > 0))
        likeliest = int(expected[came - 1].sum(axis=0).argmax())
        if len(came) and likeliest in gone:
            takes[name] = old.vocabulary.agents[likeliest]
    return takes
