"""Distance of a prompt from the training prompts, by its words and its form.

Words: the share of the prompt's words that training prompts contain, weighted by inverse document frequency. Form: the
distance to the nearest training prompts, because a new benchmark often uses known words in a form of its own. Fisher's
method combines the p-values of both (the share of held-out prompts that are at least as far). A prompt that is farther
than nearly all held-out prompts has too little evidence. Words are stored as hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.prompt_terms import FORM_SIZE, prompt_form, word_hashes

FAR_SHARE: Final = 0.07
"""Share of held-out prompts that are flagged as too far: the false positive rate."""

LANDMARKS: Final = 256
"""Training prompts whose form is stored."""

_MOST_WORDS: Final = 200_000
_NEAREST: Final = 4
_FARTHEST: Final = 4.0  # deviations, as in the linear head
_LEVELS: Final = 201

Hashes = NDArray[np.uint32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Novelty:
    """Novelty of n prompts: the weighted share of known words, 0..1 (0 for a prompt without words), and the distance of
    the form to the nearest training forms, in standard deviations; float64 [n] each.
    """

    known: Floats
    away: Floats


@dataclass(frozen=True, eq=False)
class TrainingPrompts:
    """Words and forms of the training prompts.

    Attributes:
        words: uint32 [W], hashes, ascending; idf: float32 [W].
        unseen: the weight of an unknown word.
        middle, scale: float32 [15], of the form; forms: float32 [L, 15], scaled forms of some prompts.
    """

    words: Hashes
    idf: NDArray[np.float32]
    unseen: float
    middle: NDArray[np.float32]
    scale: NDArray[np.float32]
    forms: NDArray[np.float32]

    @classmethod
    def of(cls, words: Sequence[Hashes], forms: NDArray[np.float32]) -> TrainingPrompts:
        """Count the distinct words of n prompts, and keep some of their forms [n, 15]."""
        distinct, counts = np.unique(np.concatenate([np.zeros(0, np.uint32), *words]), return_counts=True)
        kept = np.sort(np.lexsort((distinct, -counts))[:_MOST_WORDS])
        idf = np.log((1.0 + len(words)) / (1.0 + counts[kept])) + 1.0
        spread = forms.std(axis=0)
        middle, scale = forms.mean(axis=0), np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
        some = np.clip((forms - middle) / scale, -_FARTHEST, _FARTHEST)[
            np.unique(np.linspace(0, len(forms) - 1, LANDMARKS).astype(np.int64))
        ]
        unseen = float(np.log(1.0 + len(words)) + 1.0)
        return cls(distinct[kept], idf.astype(np.float32), unseen, middle, scale, some.astype(np.float32))

    def novelty(self, words: Sequence[Hashes], forms: NDArray[np.float32]) -> Novelty:
        """The novelty of n prompts, from their distinct words and forms [n, 15]."""
        familiar = np.array(
            [_known(distinct_words, self.words, self.idf, self.unseen) for distinct_words in words], np.float64
        )
        return Novelty(familiar, _nearest(forms, self.middle, self.scale, self.forms))


@dataclass(frozen=True, eq=False)
class PromptEvidence:
    """The training prompts, and the novelty of held-out prompts from the same source.

    `known`, `away`, `joint`: float64 [q], ascending quantiles of held-out prompts' novelty and of both combined.
    """

    training: TrainingPrompts
    known: Floats
    away: Floats
    joint: Floats

    @classmethod
    def of(cls, training: TrainingPrompts, novelty: Novelty) -> PromptEvidence:
        """From the training prompts and the novelty of held-out prompts, if any."""
        familiar, away = _quantiles(novelty.known), _quantiles(novelty.away)
        return cls(training, familiar, away, _quantiles(_join(novelty.known, novelty.away, familiar, away)))

    def novelty(self, prompts: Sequence[str]) -> Novelty:
        """The novelty of prompts."""
        return self.training.novelty(words_of(prompts), prompt_form(prompts))

    def distance(self, novelty: Novelty) -> Floats:
        """Distances, float64 [n], 0..1: the share of held-out prompts that are nearer; 1 if no word is known."""
        return _distances(novelty.known, novelty.away, self.known, self.away, self.joint)

    def far(self, prompts: Sequence[str]) -> NDArray[np.bool_]:
        """Whether prompts are too far from the training prompts, bool [n]."""
        return too_far(self.distance(self.novelty(prompts)))

    def to_config(self) -> dict[str, float]:
        """JSON values beside the tensors."""
        return {"unseen": self.training.unseen}

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Words, forms, and quantiles of held-out prompts."""
        training = {name: getattr(self.training, name) for name in ("words", "idf", "middle", "scale", "forms")}
        return {**training, "known": self.known, "away": self.away, "joint": self.joint}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> PromptEvidence:
        """Inverse of `to_config` and `to_tensors`; raises LookupError or ValueError for a missing or wrong part."""
        words, idf, forms = tensors["words"], tensors["idf"], tensors["forms"]
        if words.dtype != np.uint32 or words.ndim != 1 or words.shape != idf.shape:
            raise ValueError("the words are not one hash (uint32) and one weight each")
        if forms.ndim != 2 or not forms.shape[1:] == tensors["middle"].shape == tensors["scale"].shape == (FORM_SIZE,):
            raise ValueError(f"the forms are not {FORM_SIZE} numbers each")
        if not len(tensors["known"]) == len(tensors["away"]) == len(tensors["joint"]):
            raise ValueError("the quantiles of held-out prompts are not of one length")
        training = TrainingPrompts(words, idf, float(config["unseen"]), tensors["middle"], tensors["scale"], forms)
        return cls(training, tensors["known"], tensors["away"], tensors["joint"])


def too_far(distance: Floats) -> NDArray[np.bool_]:
    """Whether prompts at these distances have too little evidence, bool [n]."""
    return np.asarray(distance > 1.0 - FAR_SHARE)


def words_of(prompts: Sequence[str]) -> list[Hashes]:
    """The distinct words of each prompt."""
    return [np.unique(word_hashes(prompt)) for prompt in prompts]


def _quantiles(values: Floats) -> Floats:
    return np.quantile(values, np.linspace(0.0, 1.0, _LEVELS)) if len(values) else np.zeros(0)


@njit(cache=True)
def _known(distinct: Hashes, words: Hashes, idf: NDArray[np.float32], unseen: float) -> float:
    """How known distinct words of a prompt are, 0..1."""
    there, missing = 0.0, 0
    for word in distinct:
        place = np.searchsorted(words, word)
        if place < len(words) and words[place] == word:
            there += idf[place]
        else:
            missing += 1
    return there / (there + unseen * missing) if there > 0.0 else 0.0


@njit(cache=True)
def _nearest(
    rows: NDArray[np.float32], middle: NDArray[np.float32], scale: NDArray[np.float32], forms: NDArray[np.float32]
) -> Floats:
    """Mean distance of each scaled row to its `_NEAREST` forms; 0 without forms."""
    out = np.zeros(len(rows))
    count = min(_NEAREST, len(forms))
    width = rows.shape[1]
    best, row = np.empty(_NEAREST), np.empty(width, np.float32)
    for i in range(len(rows)):
        best[:] = np.inf
        for k in range(width):
            row[k] = min(max((rows[i, k] - middle[k]) / scale[k], -_FARTHEST), _FARTHEST)
        for j in range(len(forms)):
            total = np.float32(0.0)
            for k in range(width):
                step = row[k] - forms[j, k]
                total += step * step
                if total >= best[_NEAREST - 1]:
                    break
            rank = _NEAREST - 1
            if total < best[rank]:
                while rank > 0 and best[rank - 1] > total:
                    best[rank] = best[rank - 1]
                    rank -= 1
                best[rank] = total
        for k in range(count):
            out[i] += np.sqrt(best[k]) / count
    return out


@njit(cache=True)
def _join(familiar: Floats, away: Floats, usual_known: Floats, usual_away: Floats) -> Floats:
    """Fisher's statistic of both novelties at n prompts; higher is farther."""
    count = len(usual_known)
    out = np.empty(len(familiar))
    for i in range(len(familiar)):
        fewer = np.searchsorted(usual_known, familiar[i], side="right") + 1
        farther = count - np.searchsorted(usual_away, away[i]) + 1
        out[i] = 2.0 * np.log(count + 1) - np.log(fewer) - np.log(farther)
    return out


@njit(cache=True)
def _distances(familiar: Floats, away: Floats, usual_known: Floats, usual_away: Floats, usual_joint: Floats) -> Floats:
    """Share of held-out prompts that are nearer; 0 without held-out prompts, 1 if no word is known."""
    shares = _join(familiar, away, usual_known, usual_away)
    for i in range(len(shares)):
        nearer = np.searchsorted(usual_joint, shares[i]) / max(len(usual_joint), 1)
        shares[i] = nearer if familiar[i] > 0.0 else 1.0
    return shares
