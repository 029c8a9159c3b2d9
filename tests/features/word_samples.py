"""Traces from words: each letter is an agent, each word a workflow."""

from collections.abc import Collection, Sequence

import pyarrow as pa

from presage.datasets.schema import conform
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary


def trace_of(
    words: Sequence[str],
    *,
    types: Sequence[str] = (),
    tasks: Sequence[str | None] = (),
    cut: Collection[int] = (),
) -> pa.Table:
    """One workflow a word, in the order given.

    Args:
        words: the workflows.
        types: workflow type of each, "t" by default.
        tasks: task of each, null by default.
        cut: indices of the words that were cut before they ended.
    """
    rows = []
    for w, word in enumerate(words):
        for step, agent in enumerate(word):
            rows.append(
                {
                    "workflow_type": types[w] if types else "t",
                    "workflow_id": f"w{w}",
                    "step": step,
                    "agent": agent,
                    "task": tasks[w] if tasks else None,
                    "complete": w not in cut,
                }
            )
    return conform(pa.Table.from_pylist(rows), "words")


def prefixes_in(words: Sequence[str], agents: str, *, horizon: int = 3, cut: Collection[int] = ()) -> Prefixes:
    """Prefixes of words over these agents and one workflow type; any other letter is an unknown agent."""
    return prefixes_of(trace_of(words, cut=cut), Vocabulary(("t",), tuple(agents)), horizon)
