"""Where forecasts of the next step err: what was forecast, what came instead, and after which agents.

One step ahead, where a forecast can be checked by eye. Everything is told by agent names: the same names the model and
the call graph carry, never by what a workflow was asked or what an agent said. A step whose next one is not known (the
trace was cut) is no error, and no END.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.prefixes import MASKED, Prefixes
from presage.features.vocabulary import Vocabulary

END: Final = "END"
PAIRS: Final = 10
"""So many pairs of forecast and outcome are told, the most frequent ones."""

AGENTS: Final = 10
EXAMPLES: Final = 2
PREFIX: Final = 4
"""An example shows so many agents of the prefix, the last ones."""

_NOBODY: Final = -1


def confusions(probabilities: NDArray[np.float32], prefixes: Prefixes) -> dict[str, Any]:
    """Errors one step ahead.

    Args:
        probabilities: [n, K, V+1], at one moment of every step.
        prefixes: the n steps with what came after them.

    Returns:
        JSON values: `positions` judged and `errors` among them; `pairs`, the most frequent errors, each with
        `forecast`, `came`, how many `positions`, the mean probability of what was forecast (`confidence`) and
        `examples` {"prefix": the last agents, "earlier": were there agents before them, "positions"}; `by_agent`, the
        agents after which most errors were made, with `positions` and `errors`. A name is null where training never
        saw the agent.
    """
    vocabulary = prefixes.vocabulary
    came, sure = prefixes.outcomes[:, 0], probabilities[:, 0].max(axis=1)
    forecast = probabilities[:, 0].argmax(axis=1)
    judged = came != MASKED
    wrong = judged & (forecast != came)
    rows = np.flatnonzero(wrong)
    kinds, kind = np.unique(np.stack([forecast[rows], came[rows]], axis=1), axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    counts = np.bincount(kind, minlength=len(kinds))
    pairs = []
    for index in _most_frequent(counts, PAIRS):
        of = rows[kind == index]
        pairs.append(
            {
                "forecast": _outcome(vocabulary, int(kinds[index, 0])),
                "came": _outcome(vocabulary, int(kinds[index, 1])),
                "positions": len(of),
                "confidence": float(sure[of].mean(dtype=np.float64)),
                "examples": _examples(prefixes, of),
            }
        )
    size = vocabulary.unknown + 1
    positions, errors = (np.bincount(prefixes.agent[flags], minlength=size) for flags in (judged, wrong))
    by_agent = [
        {"agent": _agent(vocabulary, int(a)), "positions": int(positions[a]), "errors": int(errors[a])}
        for a in _most_frequent(errors, AGENTS)
    ]
    return {"positions": int(judged.sum()), "errors": len(rows), "pairs": pairs, "by_agent": by_agent}


def _examples(prefixes: Prefixes, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    """The most frequent ends of the prefixes at these rows."""
    position = prefixes.position[rows]
    ends = np.full((len(rows), PREFIX + 1), _NOBODY, np.int64)
    for back in range(PREFIX):
        there = position >= back
        ends[there, PREFIX - 1 - back] = prefixes.agent[rows[there] - back]
    ends[:, PREFIX] = position >= PREFIX
    found, counts = np.unique(ends, axis=0, return_counts=True)
    return [
        {
            "prefix": [_agent(prefixes.vocabulary, int(a)) for a in found[index, :PREFIX] if a != _NOBODY],
            "earlier": bool(found[index, PREFIX]),
            "positions": int(counts[index]),
        }
        for index in _most_frequent(counts, EXAMPLES)
    ]


def _most_frequent(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Indices of the greatest counts above 0, ties in order."""
    order = np.argsort(-counts, kind="stable")[:most]
    return order[counts[order] > 0]


def _outcome(vocabulary: Vocabulary, index: int) -> str | None:
    return END if index == vocabulary.end else _agent(vocabulary, index)


def _agent(vocabulary: Vocabulary, index: int) -> str | None:
    return vocabulary.agents[index] if index < len(vocabulary.agents) else None
