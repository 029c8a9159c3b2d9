"""When there is too little to go by: a prompt in other words than the training prompts, a model with few labels.

A prompt is known by the share of its words that training prompts have, each counted by how much it tells (its inverse
document frequency; a word never seen counts as the rarest). One that is less known than nearly all prompts held out
from training is far from them: there the base rates of the models are the honest answer. Words are kept as hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.prompt_terms import word_hashes

FAR_SHARE: Final = 0.005
"""Share of held-out prompts that are less known than the threshold."""

_MOST_WORDS: Final = 200_000


@dataclass(frozen=True, eq=False)
class PromptEvidence:
    """What was seen of words.

    Attributes:
        words: uint32 [W], hashes, rising.
        idf: float32 [W].
        unseen: the weight of a word that is not there.
        threshold: share below which a prompt is far from the training prompts.
    """

    words: NDArray[np.uint32]
    idf: NDArray[np.float32]
    unseen: float
    threshold: float

    @classmethod
    def fit(cls, prompts: Sequence[str], held_out: Sequence[str]) -> PromptEvidence:
        """Counts words of training prompts, and sets the threshold by prompts held out from them."""
        found = [np.unique(word_hashes(prompt)) for prompt in prompts]
        words, counts = np.unique(np.concatenate([np.zeros(0, np.uint32), *found]), return_counts=True)
        kept = np.sort(np.lexsort((words, -counts))[:_MOST_WORDS])
        idf = np.log((1.0 + len(found)) / (1.0 + counts[kept])) + 1.0
        unseen = float(np.log(1.0 + len(found)) + 1.0)
        seen = cls(words[kept], idf.astype(np.float32), unseen, 0.0)
        shares = seen.known(held_out)
        return cls(seen.words, seen.idf, unseen, float(np.quantile(shares, FAR_SHARE)) if len(shares) else 0.0)

    def known(self, prompts: Sequence[str]) -> NDArray[np.float64]:
        """How known each prompt is, float64 [n], 0..1; 0 of one without words."""
        return np.array([self._known(prompt) for prompt in prompts], np.float64)

    def far(self, prompts: Sequence[str]) -> NDArray[np.bool_]:
        """The prompts that are far from the training prompts, bool [n]."""
        return self.is_far(self.known(prompts))

    def is_far(self, known: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The same of what `known` says, bool [n]."""
        return np.asarray((known < self.threshold) | (known == 0.0))

    def to_config(self) -> dict[str, float]:
        """The numbers."""
        return {"unseen": self.unseen, "threshold": self.threshold}

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """The words."""
        return {"words": self.words, "idf": self.idf}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> PromptEvidence:
        """Inverse of `to_config` and `to_tensors`; raises LookupError or ValueError where a part is missing."""
        words, idf = tensors["words"], tensors["idf"]
        if words.dtype != np.uint32 or words.ndim != 1 or words.shape != idf.shape:
            raise ValueError("the words are not one hash (uint32) and one weight each")
        return cls(words, idf, float(config["unseen"]), float(config["threshold"]))

    def _known(self, prompt: str) -> float:
        found = np.unique(word_hashes(prompt))
        if not len(found) or not len(self.words):
            return 0.0
        at = np.minimum(np.searchsorted(self.words, found), len(self.words) - 1)
        seen = self.words[at] == found
        weight = float(self.idf[at[seen]].sum(dtype=np.float64))
        return weight / (weight + self.unseen * int((~seen).sum()))
