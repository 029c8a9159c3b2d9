"""Features of a prompt for a router: its terms and its form.

Terms are TF-IDF over words and their pairs, and over strings of three to five characters within words, which also
represent endings, formulas, numbers and other scripts. Each of the two blocks is scaled to unit length. The weights are
those of scikit-learn's `TfidfVectorizer` (`sublinear_tf`, smoothed IDF; `analyzer="char_wb"` for the strings), a
hundred times as fast.

Prompts may be private, so a term is a 32-bit hash as soon as it is counted. The hash has no key: a guessed term can be
tested, but none can be read. Of a hundred thousand terms about two share a hash; they count as one.

The form (`prompt_form`) is the length and the kinds of characters of a prompt: long questions, numbers, formulas and
code are solved less often. Of a long prompt only head and tail are read, so the time for one prompt is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.errors import InputError

HEAD_CHARS: Final = 2_000
TAIL_CHARS: Final = 2_000
"""Of a prompt longer than both together, so many characters of either end are read."""

BLOCKS: Final = ("words", "strings")
LEAST_PROMPTS: Final = (2, 3)
"""Least prompts of a term, by block."""
MOST_TERMS: Final = (60_000, 100_000)
"""Terms of each block that are kept, those in most prompts."""

SHORTEST: Final = 3
LONGEST: Final = 5

_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_LETTERS: Final = re.compile(r"\w+")
_WORD: Final = re.compile(r"\S+")
CHUNK: Final = 2_000
_ODD: Final = np.uint32(0x9E3779B1)  # distinguishes a pair from its reverse

Hashes = NDArray[np.uint32]
Codes = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class PromptTerms:
    """A vocabulary of T terms: for each block hashes, uint32, rising, and inverse document frequencies, float32."""

    hashes: tuple[Hashes, Hashes]
    idf: tuple[NDArray[np.float32], NDArray[np.float32]]

    @property
    def size(self) -> int:
        """T."""
        return len(self.hashes[0]) + len(self.hashes[1])

    @classmethod
    def fit(cls, prompts: Sequence[str]) -> PromptTerms:
        """Choose the terms of at least two training prompts; raises InputError if no two of them share a term."""
        counted = [(np.zeros(0, np.uint32), np.zeros(0, np.int64))] * len(BLOCKS)
        for start in range(0, len(prompts), CHUNK):
            terms = [terms_of(prompt) for prompt in prompts[start : start + CHUNK]]
            counted = [
                _add(counted[block], [blocks_of_prompt[block] for blocks_of_prompt in terms])
                for block in range(len(BLOCKS))
            ]
        limits = zip(counted, LEAST_PROMPTS, MOST_TERMS, strict=True)
        blocks = [_choose(*counts, len(prompts), least, most) for counts, least, most in limits]
        if not any(len(hashes) for hashes, _ in blocks):
            raise InputError(
                f"of {len(prompts)} prompts no two share a word: nothing can be learnt from their text; give more"
            )
        return cls((blocks[0][0], blocks[1][0]), (blocks[0][1], blocks[1][1]))

    def transform(self, prompts: Sequence[str]) -> Any:
        """TF-IDF rows of prompts, scipy CSR float32 [n, T], indices rising in each row."""
        from scipy.sparse import csr_matrix

        rows = [self.transform_one(prompt) for prompt in prompts]
        ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
        places = np.concatenate([columns for columns, _ in rows]) if rows else np.zeros(0, np.int32)
        weights = np.concatenate([row_weights for _, row_weights in rows]) if rows else np.zeros(0, np.float32)
        return csr_matrix((weights, places, ends), shape=(len(prompts), self.size))

    def transform_one(self, prompt: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Of one prompt the indices of its known terms int32 [m], rising, and their weights float32 [m]."""
        words, strings = terms_of(prompt)
        first, weights = _weigh(words, self.hashes[0], self.idf[0])
        second, others = _weigh(strings, self.hashes[1], self.idf[1])
        places = np.concatenate([first, second + np.int32(len(self.hashes[0]))])
        return places, np.concatenate([weights, others])

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays of an artefact."""
        return {
            f"{block}.{name}": arrays[i]
            for i, block in enumerate(BLOCKS)
            for name, arrays in (("hashes", self.hashes), ("idf", self.idf))
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> PromptTerms:
        """Inverse of `to_tensors`; raises LookupError or ValueError if a tensor is missing or malformed."""
        hashes, idf = ([tensors[f"{block}.{name}"] for block in BLOCKS] for name in ("hashes", "idf"))
        for block, block_hashes, block_idf in zip(BLOCKS, hashes, idf, strict=True):
            if (
                block_hashes.dtype != np.uint32
                or block_idf.dtype != np.float32
                or block_hashes.ndim != 1
                or block_hashes.shape != block_idf.shape
            ):
                raise ValueError(f"the terms of {block} are not one hash (uint32) and one weight (float32) each")
            if (np.diff(block_hashes.astype(np.int64)) <= 0).any():
                raise ValueError(f"the terms of {block} are not in rising order")
        return cls((hashes[0], hashes[1]), (idf[0], idf[1]))


def read_part(prompt: str) -> str:
    """All of a prompt, or head and tail of a long one."""
    if len(prompt) <= HEAD_CHARS + TAIL_CHARS:
        return prompt
    return prompt[:HEAD_CHARS] + " " + prompt[-TAIL_CHARS:]


def codes_of(text: str) -> Codes:
    """The code points of a text, uint32, lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def terms_of(prompt: str) -> tuple[Hashes, Hashes]:
    """Every occurrence of a term in a prompt, uint32: words and pairs of neighbours, and strings within words."""
    text = read_part(prompt).lower()
    codes = codes_of(text)
    return _words(codes, _spans(_TOKEN, text)), _strings(codes, _spans(_WORD, text))


def word_hashes(prompt: str) -> Hashes:
    """Every occurrence of a word in a prompt, uint32: letters and digits, no punctuation."""
    text = read_part(prompt).lower()
    spans = _spans(_LETTERS, text)
    return _words(codes_of(text), spans)[: len(spans)]


def _spans(pattern: re.Pattern[str], text: str) -> NDArray[np.int64]:
    flat = [end for match in pattern.finditer(text) for end in match.span()]  # NumPy reads pairs three times slower
    return np.array(flat, np.int64).reshape(-1, 2)


@njit(cache=True, inline="always")
def _finish(h: np.uint32) -> np.uint32:
    """MurmurHash3's finaliser."""
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h ^= h >> np.uint32(13)
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(cache=True, inline="always")
def _next(h: np.uint32, code: np.uint32) -> np.uint32:
    """One more code point (FNV-1a's step)."""
    return np.uint32((h ^ code) * np.uint32(16777619))


@njit(cache=True)
def _words(codes: Codes, spans: NDArray[np.int64]) -> Hashes:
    """Hashes of k tokens, then of their k - 1 pairs."""
    count = len(spans)
    out = np.empty(max(0, 2 * count - 1), np.uint32)
    for i in range(count):
        h = np.uint32(2166136261)
        for j in range(spans[i, 0], spans[i, 1]):
            h = _next(h, codes[j])
        out[i] = _finish(h)
    for i in range(count - 1):
        out[count + i] = _finish(_next(np.uint32(out[i] * _ODD), out[i + 1]))
    return out


@njit(cache=True)
def _strings(codes: Codes, spans: NDArray[np.int64]) -> Hashes:
    """Hashes of the strings of each word between spaces; a shorter word counts once, whole."""
    size = 0
    for i in range(len(spans)):
        size += 3 * (spans[i, 1] - spans[i, 0] + 2)
    out = np.empty(size, np.uint32)
    written = 0
    for i in range(len(spans)):
        begin, end = spans[i, 0] - 1, spans[i, 1] + 1  # the spaces
        for n in range(SHORTEST, LONGEST + 1):
            whole = end - begin <= n
            last = begin if whole else end - n
            for start in range(begin, last + 1):
                h = np.uint32(2166136261)
                for j in range(start, min(start + n, end)):
                    h = _next(h, np.uint32(32) if j == begin or j == end - 1 else codes[j])
                out[written] = _finish(h)
                written += 1
            if whole:
                break
    return out[:written]


@njit(cache=True, inline="always")
def _place(terms: Hashes, term: np.uint32) -> int:
    """The first place that is not below a term."""
    low, high = 0, len(terms)
    while low < high:
        middle = (low + high) // 2
        if terms[middle] < term:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _weigh(hashes: Hashes, terms: Hashes, idf: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Places and weights, of unit length together, of the known among found terms."""
    ordered = np.sort(hashes)
    places, weights = np.empty(len(ordered), np.int32), np.empty(len(ordered), np.float32)
    kept = i = 0
    total = 0.0
    while i < len(ordered):
        end = i
        while end < len(ordered) and ordered[end] == ordered[i]:
            end += 1
        column = _place(terms, ordered[i])
        if column < len(terms) and terms[column] == ordered[i]:
            weight = (1.0 + np.log(end - i)) * idf[column]
            places[kept], weights[kept] = column, weight
            total += weight * weight
            kept += 1
        i = end
    scale = 1.0 / np.sqrt(total) if total > 0.0 else 0.0
    for j in range(kept):
        weights[j] *= scale
    return places[:kept], weights[:kept]


def _add(counted: tuple[Hashes, NDArray[np.int64]], documents: Sequence[Hashes]) -> tuple[Hashes, NDArray[np.int64]]:
    """Terms, rising, and how many documents each occurs in, with more documents added."""
    terms, counts = counted
    fresh, occurrences = np.unique(np.concatenate([np.unique(document) for document in documents]), return_counts=True)
    merged, inverse = np.unique(np.concatenate([terms, fresh]), return_inverse=True)
    total = np.bincount(inverse, weights=np.concatenate([counts, occurrences]), minlength=len(merged))
    return merged, total.astype(np.int64)


def _choose(
    terms: Hashes, counts: NDArray[np.int64], documents: int, least: int, most: int
) -> tuple[Hashes, NDArray[np.float32]]:
    """The terms in most documents, rising, uint32 [T], and their smoothed IDF, float32 [T]."""
    often = counts >= least
    terms, counts = terms[often], counts[often]
    chosen = np.sort(np.lexsort((terms, -counts))[:most])
    idf = np.log((1.0 + documents) / (1.0 + counts[chosen])) + 1.0
    return terms[chosen], idf.astype(np.float32)


FORM_NAMES: Final = (
    "log characters",
    "log words",
    "log lines",
    "log numbers",
    "log digits of the longest number",
    "log question marks",
    "log signs of formulas",
    "log full stops",
    "log commas",
    "log percent signs",
    "share of digits",
    "share beyond ASCII",
    "share of capitals",
    "share of signs",
    "characters a word",
)
FORM_SIZE: Final = len(FORM_NAMES)

_LONGEST_WORD: Final = 20.0


def prompt_form(prompts: Sequence[str]) -> NDArray[np.float32]:
    """The form of n prompts, float32 [n, 15], as `FORM_NAMES`; characters are counted over all of a long prompt."""
    rows = np.zeros((len(prompts), FORM_SIZE), np.float32)
    for i, prompt in enumerate(prompts):
        _form(codes_of(read_part(prompt)), len(prompt), rows[i])
    return rows


@njit(cache=True)
def _form(codes: NDArray[np.uint32], length: int, out: NDArray[np.float32]) -> None:
    words = lines = numbers = longest = run = questions = formulas = stops = commas = percents = 0
    digits = beyond = capitals = signs = 0
    inside = False
    for code in codes:
        space = code <= 32 or code == 0xA0 or code == 0x3000
        if not space and not inside:
            words += 1
        inside = not space
        if 48 <= code <= 57:
            digits += 1
            run += 1
            if run == 1:
                numbers += 1
            longest = max(longest, run)
        else:
            run = 0
        lines += code == 10
        questions += code == 63 or code == 0xFF1F
        formulas += code == 36 or code == 92 or code == 94 or code == 61
        stops += code == 46 or code == 0x3002
        commas += code == 44 or code == 0xFF0C
        percents += code == 37
        beyond += code > 127
        capitals += 65 <= code <= 90
        signs += 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    size = max(len(codes), 1)
    counts = (length, words, lines, numbers, longest, questions, formulas, stops, commas, percents)
    for i in range(len(counts)):
        out[i] = np.log(1.0 + counts[i])
    shares = (digits, beyond, capitals, signs)
    for i in range(len(shares)):
        out[len(counts) + i] = shares[i] / size
    out[len(counts) + len(shares)] = min(size / max(words, 1), _LONGEST_WORD)
