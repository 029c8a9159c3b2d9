"""Back-off n-grams: the outcomes counted after the last few agents, smoothed so that none is impossible.

For each horizon k the outcome k steps ahead is counted, given the last `order` agents, the current one included, of
a workflow of this type. Witten–Bell interpolation (Bell, Cleary & Witten, 1990; Chen & Goodman, 1998, eq. 16) leads
from the longest context to the shortest, to the counts over all workflow types, and to the uniform distribution: with N
outcomes counted after context c, T of them distinct, and c' the next shorter context,

    P(o | c) = (count(c, o) + T · P(o | c')) / (N + T)

The start of a workflow is a symbol of its own and ends a context. An unknown agent ends a context before itself; an
unknown workflow type gets the counts over all types. The moment of a forecast is ignored.

An artefact keeps the counts of the longest contexts, as small integers; all others are their sums. In memory C contexts
hold C · K · (V+1) float32 (2 MB for 30 agents and 5,000 contexts), so a forecast is a hash table lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.moment import Moment
from presage.features.prefixes import Prefixes
from presage.features.vocabulary import Vocabulary

LONGEST: Final = 3
"""Agents in the longest context."""

START: Final = -1
"""The symbol before the first step of a workflow."""

# A key: 14 bits of workflow type + 1 (0: all types), 2 bits of context length, 16 bits an agent + 1 (0: START or
# nothing), the current agent highest. Below the limits no key has every bit set, so that value marks an empty slot.
_MOST_TYPES: Final = 2**14 - 2
_MOST_AGENTS: Final = 2**16 - 2
_EMPTY: Final = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class NgramTable:
    """Every context of the training data.

    Attributes:
        keys: uint64 [S], S a power of two: an open-addressing hash table over the contexts, see `lookup`.
        values: int32 [S], the row of each key.
        rows: float32 [C, K, V+1], the interpolated distribution after each context, 1..K steps ahead.
        evidence: int32 [C], training positions with that context (and a known next outcome).
    """

    keys: NDArray[np.uint64]
    values: NDArray[np.int32]
    rows: NDArray[np.float32]
    evidence: NDArray[np.int32]


class BackoffNgram:
    """Order-n Markov with back-off, n = 1, 2, 3."""

    table: NgramTable
    vocabulary: Vocabulary
    horizon: int

    def __init__(self, order: int = 3) -> None:
        self.order = order
        self.name = f"markov-{order}"

    def fit(self, train: Prefixes, validation: Prefixes) -> Self:
        """Count `train`; `validation` is not used."""
        if not 1 <= self.order <= LONGEST:
            raise ConfigurationError(f"order is {self.order}; an n-gram looks back over 1 to {LONGEST} agents")
        types, agents = len(train.vocabulary.workflow_types), len(train.vocabulary.agents)
        if types > _MOST_TYPES or agents > _MOST_AGENTS:
            raise ConfigurationError(
                f"the traces name {types} workflow types and {agents} agents; n-grams take at most {_MOST_TYPES} and "
                f"{_MOST_AGENTS}: check that names do not carry run numbers"
            )
        return self._hold(_count(train, self.order), train.vocabulary, train.horizon)

    def extended(self, vocabulary: Vocabulary, types: NDArray[np.int64], agents: NDArray[np.int64]) -> BackoffNgram:
        """The same counts in a larger vocabulary: int64 [T+1] and [V+1], the new places of what was known, and of the
        unknown."""
        counts, width = self._counts, self.vocabulary.outcomes
        context = np.where(counts.context == START, START, agents[counts.context])
        context[:, 0] = types[counts.context[:, 0]]
        outcome = counts.outcome // width * vocabulary.outcomes + agents[counts.outcome % width]
        return BackoffNgram(self.order)._hold(
            _Counts(context, counts.entries, outcome, counts.count), vocabulary, self.horizon
        )

    def transitions(self) -> NDArray[np.int64]:
        """How often an outcome followed an agent, int64 [V+1, V+1]; the last row is the start of a workflow."""
        counts, followed = self._counts, np.zeros((self.vocabulary.outcomes, self.vocabulary.outcomes), np.int64)
        context, next_ = np.repeat(counts.context, counts.entries, axis=0), counts.outcome < self.vocabulary.outcomes
        agent, earlier, outcome, count = (
            context[next_, 1],
            context[next_, 2],
            counts.outcome[next_],
            counts.count[next_],
        )
        named = agent != self.vocabulary.unknown
        np.add.at(followed, (agent[named], outcome[named]), count[named])
        first = named & (earlier == START)
        np.add.at(followed, (np.full(first.sum(), self.vocabulary.unknown), agent[first]), count[first])
        return followed

    def and_then(self, more: BackoffNgram) -> BackoffNgram:
        """The counts of both, over one vocabulary."""
        both = self._counts, more._counts
        contexts, index = np.unique(np.concatenate([counts.context for counts in both]), axis=0, return_inverse=True)
        entries = np.repeat(index.reshape(-1), np.concatenate([counts.entries for counts in both]))
        width = self.horizon * self.vocabulary.outcomes
        cell, place = np.unique(
            entries * width + np.concatenate([counts.outcome for counts in both]), return_inverse=True
        )
        count = np.bincount(place, np.concatenate([counts.count for counts in both])).astype(np.int64)
        counts = _Counts(contexts, np.bincount(cell // width, minlength=len(contexts)), cell % width, count)
        return BackoffNgram(self.order)._hold(counts, self.vocabulary, self.horizon)

    def predict(self, prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        """Probabilities float32 [n, K, V+1], all above zero; the same at both moments."""
        return self.table.rows[self.rows_at(prefixes)]

    def rows_at(self, prefixes: Prefixes) -> NDArray[np.int32]:
        """Row in `table` of each prefix, int32 [n]."""
        rows: NDArray[np.int32] = _lookup_all(
            self.table.keys, self.table.values, prefixes.workflow_type, prefixes.agent, prefixes.offsets
        )
        return rows

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """The counts (`_Counts`) in the smallest unsigned integers."""
        context = self._counts.context.copy()
        context[:, 1:] += 1  # START is 0
        arrays = {**vars(self._counts), "context": context}
        return {name: array.astype(np.min_scalar_type(int(array.max(initial=0)))) for name, array in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], vocabulary: Vocabulary, horizon: int) -> Self:
        """Inverse of `to_tensors`."""
        context = tensors["context"].astype(np.int64)
        context[:, 1:] -= 1
        counts = _Counts(context, *(tensors[name].astype(np.int64) for name in ("entries", "outcome", "count")))
        return cls(context.shape[1] - 1)._hold(counts, vocabulary, horizon)

    def _hold(self, counts: _Counts, vocabulary: Vocabulary, horizon: int) -> Self:
        self._counts, self.vocabulary, self.horizon = counts, vocabulary, horizon
        self.table = _tabulate(counts, vocabulary, horizon)
        return self


@njit(cache=True)
def lookup(keys: NDArray[np.uint64], values: NDArray[np.int32], workflow_type: int, a0: int, a1: int, a2: int) -> int:
    """Row of the longest known context of this workflow type, else over all types, in an `NgramTable`.

    Args:
        keys, values: of the table.
        workflow_type: T, the unknown type, is never found.
        a0: the current agent; V, the unknown agent, is never found.
        a1, a2: the agents of the two steps before, `START` where there was none.
    """
    for owner in (workflow_type + 1, 0):
        for length in range(2 if a1 == START else LONGEST, -1, -1):
            key = _key(owner, length, a0, a1, a2)
            slot = _slot(key, len(keys))
            while keys[slot] != _EMPTY:
                if keys[slot] == key:
                    return int(values[slot])
                slot = (slot + 1) & (len(keys) - 1)
    return -1  # never: the empty context over all types always exists


@njit(cache=True, inline="always")
def _key(owner: int, length: int, a0: int, a1: int, a2: int) -> np.uint64:
    """The key of the first `length` agents of a context; `owner` is the workflow type + 1, or 0 for all types."""
    key = np.uint64(owner << 2 | length)
    key = key << np.uint64(16) | np.uint64(a0 + 1 if length > 0 else 0)
    key = key << np.uint64(16) | np.uint64(a1 + 1 if length > 1 else 0)
    return key << np.uint64(16) | np.uint64(a2 + 1 if length > 2 else 0)


@njit(cache=True, inline="always")
def _slot(key: np.uint64, slots: int) -> np.int64:
    """First slot of a key: the finaliser of SplitMix64."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((key ^ (key >> np.uint64(31))) & np.uint64(slots - 1))


@njit(cache=True)
def _lookup_all(
    keys: NDArray[np.uint64],
    values: NDArray[np.int32],
    workflow_type: NDArray[np.int32],
    agent: NDArray[np.int32],
    offsets: NDArray[np.int64],
) -> NDArray[np.int32]:
    rows = np.empty(len(agent), np.int32)
    for w in range(len(workflow_type)):
        a1, a2 = START, START
        for step in range(offsets[w], offsets[w + 1]):
            rows[step] = lookup(keys, values, workflow_type[w], agent[step], a1, a2)
            a1, a2 = agent[step], a1
    return rows


@njit(cache=True)
def _hash(keys: NDArray[np.uint64], slots: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """The hash table that finds the index of each key."""
    table, values = np.full(slots, _EMPTY, np.uint64), np.full(slots, -1, np.int32)
    for row in range(len(keys)):
        slot = _slot(keys[row], slots)
        while table[slot] != _EMPTY:
            slot = (slot + 1) & (slots - 1)
        table[slot], values[slot] = keys[row], row
    return table, values


@dataclass(frozen=True)
class _Counts:
    """Outcomes counted after the longest contexts, sparse.

    Attributes:
        context: int64 [M, 1+order], workflow type, current agent and those before it; sorted.
        entries: int64 [M], how many of the entries below belong to each context.
        outcome: int64 [E], horizon index · (V+1) + outcome; rising within a context.
        count: int64 [E], how often.
    """

    context: NDArray[np.int64]
    entries: NDArray[np.int64]
    outcome: NDArray[np.int64]
    count: NDArray[np.int64]


def _count(train: Prefixes, order: int) -> _Counts:
    outcomes = train.vocabulary.outcomes
    columns = [train.workflow_type[train.workflow].astype(np.int64)]
    code = columns[0]
    for back in range(order):
        column = np.full(train.steps, START, np.int64)
        reaches = train.position >= back
        column[reaches] = train.agent[np.flatnonzero(reaches) - back]
        columns.append(column)
        code = code * (train.vocabulary.unknown + 2) + column + 1
    _, first, index = np.unique(code, return_index=True, return_inverse=True)
    row, k = np.nonzero((train.outcomes >= 0) & (train.outcomes < outcomes))
    width = train.horizon * outcomes
    entry, count = np.unique(index[row] * width + k * outcomes + train.outcomes[row, k], return_counts=True)
    entries = np.bincount(entry // width, minlength=len(first))
    counted = entries > 0
    return _Counts(np.stack(columns, axis=1)[first][counted], entries[counted], entry % width, count)


def _tabulate(counts: _Counts, vocabulary: Vocabulary, horizon: int) -> NgramTable:
    """The distributions of all contexts from the counts of the longest ones."""
    keys, counted = _every_context(counts, vocabulary, horizon)
    owner, length = (keys >> np.uint64(50)).astype(np.int64), (keys >> np.uint64(48)).astype(np.int64) & 3
    rows = np.empty((len(keys), horizon, vocabulary.outcomes), np.float32)
    shorter = _shorter(keys, owner, length)
    for level in sorted(set(zip(owner > 0, length, strict=True))):  # a context's shorter one is ready before it
        here = np.flatnonzero(((owner > 0) == level[0]) & (length == level[1]))
        is_last = level == (False, 0)
        prior = np.full_like(rows[here], 1 / vocabulary.outcomes) if is_last else rows[shorter[here]]
        total = counted[here].sum(axis=-1, keepdims=True)
        distinct = (counted[here] > 0).sum(axis=-1, keepdims=True)
        rows[here] = np.where(total > 0, (counted[here] + distinct * prior) / np.maximum(total + distinct, 1), prior)
    slots = 1 << (2 * len(keys) - 1).bit_length()  # at most half full
    return NgramTable(*_hash(keys, slots), rows, counted[:, 0].sum(axis=-1).astype(np.int32))


def _every_context(
    counts: _Counts, vocabulary: Vocabulary, horizon: int
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Keys uint64 [C], sorted, of all contexts of any length, and their counts, int32 [C, K, V+1]."""
    types, order = counts.context[:, 0], counts.context.shape[1] - 1
    padded = np.full((len(counts.context), LONGEST), START, np.int64)
    padded[:, :order] = counts.context[:, 1:]
    # [length, owner, M]: the first `length` agents of each longest context, over all types and of its own type.
    has = np.zeros((LONGEST + 1, 2, len(types)), bool)
    key = np.zeros(has.shape, np.uint64)
    for length in range(order + 1):
        whole = (padded[:, :length] != vocabulary.unknown).all(axis=1)
        whole &= (padded[:, : max(length - 1, 0)] != START).all(axis=1)
        has[length] = whole, whole & (types < len(vocabulary.workflow_types))
        key[length] = _keys(np.zeros_like(types), length, padded), _keys(types + 1, length, padded)
    # Key 0, no context at all and over all types, is there even where nothing was counted.
    keys, index = np.unique(np.append(key[has], np.uint64(0)), return_inverse=True)
    row = np.zeros(has.shape, np.int64)
    row[has] = index[:-1]
    width = horizon * vocabulary.outcomes
    counted = np.zeros(len(keys) * width, np.int32)
    entry_of = np.repeat(np.arange(len(types)), counts.entries)
    for level in np.ndindex(has.shape[:2]):
        kept = has[level][entry_of]
        cell = row[level][entry_of[kept]] * width + counts.outcome[kept]
        np.add.at(counted, cell, counts.count[kept].astype(np.int32))
    return keys, counted.reshape(len(keys), horizon, vocabulary.outcomes)


def _keys(owner: NDArray[np.int64], length: int, agents: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`_key` of many contexts: owner int64 [M], agents int64 [M, 3]."""
    key = (owner << 2 | length).astype(np.uint64)
    for place in range(LONGEST):
        symbol = agents[:, place] + 1 if place < length else np.zeros_like(owner)
        key = key << np.uint64(16) | symbol.astype(np.uint64)
    return key


def _shorter(keys: NDArray[np.uint64], owner: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the context that each one backs off to, int64 [C]; the last one's own."""
    agents = np.stack([(keys >> np.uint64(shift)).astype(np.int64) & 0xFFFF for shift in (32, 16, 0)], axis=1) - 1
    shorter = np.zeros(len(keys), np.int64)
    for place in range(1, LONGEST + 1):
        here = length == place
        shorter[here] = np.searchsorted(keys, _keys(owner[here], place - 1, agents[here]))
    return shorter  # the empty context of a type backs off to that of all types: key 0, the first
