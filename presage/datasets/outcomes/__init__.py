"""Which model solved which prompt, as one matrix.

A row is a prompt as it is written: case and indentation may change what is asked (CO and Co, Python). Splits compare
prompts after Unicode normalisation (NFKC), case folding and collapsing of white space, so that the spellings of one
prompt never stand on both sides.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def normalise(prompt: str) -> str:
    """The normal form of a prompt; empty for a prompt without text."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Outcomes of n prompts and M models; NaN and None for what is unknown."""

    prompts: tuple[str, ...]  # n texts, distinct, in the order first read
    models: tuple[str, ...]  # M names, sorted
    correct: NDArray[np.float32]  # [n, M], degree 0..1 to which each model solved each prompt
    output_tokens: NDArray[np.float32]  # [n, M], of the model for the prompt
    cost: NDArray[np.float32]  # [n, M], of the response, in the unit of the rows
    task: tuple[str | None, ...]  # n names of the prompts' tasks
    group: tuple[str | None, ...] = ()  # n names of what no split divides, such as one workflow; empty without any

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Number of labels of each model, int64 [M]."""
        return np.asarray((~np.isnan(self.correct)).sum(axis=0), np.int64)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Outcomes:
        """Some of the prompts, by indices or by a mask."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Outcomes(
            tuple(self.prompts[i] for i in places),
            self.models,
            self.correct[places],
            self.output_tokens[places],
            self.cost[places],
            tuple(self.task[i] for i in places),
            tuple(self.group[i] for i in places) if self.group else (),
        )

    def of_models(self, models: Sequence[str]) -> Outcomes:
        """The same prompts with these models, in this order; an unknown model has no labels."""
        place = {name: i for i, name in enumerate(self.models)}
        blank = np.full((len(self), 1), np.nan, np.float32)
        columns = np.array([place.get(name, len(place)) for name in models], np.int64)
        correct, tokens, cost = (
            np.concatenate([matrix, blank], axis=1)[:, columns]
            for matrix in (self.correct, self.output_tokens, self.cost)
        )
        return Outcomes(self.prompts, tuple(models), correct, tokens, cost, self.task, self.group)


def prompt_keys(outcomes: Outcomes) -> NDArray[np.uint64]:
    """A hash key for each prompt, uint64 [n], equal for all spellings of a prompt, and all prompts of a group, in any
    set: what has one key never stands on both sides of a split.
    """
    groups = outcomes.group or (None,) * len(outcomes)
    pairs = zip(outcomes.prompts, groups, strict=True)
    return _hashes(normalise(prompt) if group is None else f"\0{group}" for prompt, group in pairs)


def _hashes(texts: Iterable[str]) -> NDArray[np.uint64]:
    # JSON can hold lone surrogates
    digests = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def outcomes_digest(outcomes: Outcomes) -> str:
    """SHA-256 over prompts, models, labels, tokens and costs, as 64 hexadecimal digits, whatever their order."""
    keys = _hashes(map(normalise, outcomes.prompts))
    order = np.lexsort((_hashes(outcomes.prompts), keys))
    total = hashlib.sha256("\0".join(outcomes.models).encode())
    for array in (keys, outcomes.correct, outcomes.output_tokens, outcomes.cost):
        total.update(np.ascontiguousarray(np.nan_to_num(array[order], nan=-1.0)).tobytes())
    return total.hexdigest()
