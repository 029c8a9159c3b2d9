"""Prefixes from words: each letter is an agent, each word a workflow."""

from collections.abc import Collection, Sequence

import numpy as np

from presage.features.prefixes import MASKED, Prefixes
from presage.features.vocabulary import Vocabulary


def prefixes_from(
    words: Sequence[str],
    *,
    agents: str,
    types: Sequence[str] = (),
    known_types: Sequence[str] = ("t",),
    cut: Collection[int] = (),
    horizon: int = 3,
) -> Prefixes:
    """Workflows of one letter a step.

    Args:
        words: the workflows.
        agents: the vocabulary; any other letter is an unknown agent.
        types: the workflow type of each word, by default the first known one.
        known_types: the vocabulary of workflow types.
        cut: indices of the words that were cut before they ended.
        horizon: K.
    """
    vocabulary = Vocabulary(tuple(known_types), tuple(agents))
    outcomes = []
    for w, word in enumerate(words):
        labels = [vocabulary.agents.index(a) if a in agents else vocabulary.unseen for a in word]
        labels += [MASKED if w in cut else vocabulary.end] + [MASKED] * horizon
        outcomes += [labels[step + 1 : step + 1 + horizon] for step in range(len(word))]
    steps = sum(map(len, words))
    return Prefixes(
        vocabulary=vocabulary,
        offsets=np.cumsum([0, *map(len, words)]).astype(np.int64),
        workflow_type=np.array([vocabulary.workflow_type(t) for t in types or [known_types[0]] * len(words)], np.int32),
        task=np.arange(len(words), dtype=np.int32),
        agent=np.array([vocabulary.agent(a) for a in "".join(words)], np.int32),
        outcomes=np.array(outcomes, np.int32).reshape(steps, horizon),
        sizes=np.full((steps, 4), np.nan, np.float32),
        called=np.full((steps, 1), np.nan, np.float32),
        states={},
    )
