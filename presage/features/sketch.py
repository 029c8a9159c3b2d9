"""A sketch of a text: hashed terms, TF-IDF, truncated SVD. Data-only, under a megabyte, fitted in seconds.

The terms are those that told next agents apart on real traces, not those of a search engine: punctuation and line
breaks are tokens, because they carry the format of an answer, and the first and last tokens count once more by their
place, because agents are called by name at the edges of a message.

Traces hold private text, so a term is a 32-bit hash from the moment it is counted; no text enters the sketch. The hash
has no key: who guesses a term can test whether it was frequent. Nobody can read one.

There is one arithmetic for one text (`transform_one`); many texts are a loop over it, so training and serving agree to
the last bit. It avoids BLAS, whose sums depend on how many threads it was given.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, InputError

WHOLE_CHARS: Final = 1_400
"""A text up to this length counts whole; of a longer one, only so many characters of its head and of its tail."""
HEAD_CHARS: Final = 500
TAIL_CHARS: Final = 900

EDGE_TOKENS: Final = 12
"""How many tokens at either end of a text count once more, by their place."""

FIT_TEXTS: Final = 50_000
"""A sketch is fitted on at most so many distinct texts, drawn by its seed: more cost time and memory, and change it
little."""

_TOKEN: Final = re.compile(r"\w+|[^\w\s]+|\n")
_HEAD, _TAIL, _LAST = (np.uint32(zlib.crc32(tag)) for tag in (b"^", b"$", b"$$"))
_ODD: Final = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: spreads a hash over all bits
_CHUNK: Final = 2_000
_PREFIX: Final = "sketch."
_DTYPES: Final = {"terms": np.uint32, "idf": np.float32, "scales": np.float32, "components": np.int8}


class _TokenHashes(dict[str, int]):
    """CRC-32 of tokens, remembered for one call: kept longer, it would hold private words and grow without end."""

    def __missing__(self, token: str) -> int:
        # A lone surrogate is no valid UTF-8, yet JSON can spell one: it must count as any other character.
        value = self[token] = zlib.crc32(token.encode("utf-8", "surrogatepass"))
        return value


def _mix(first: NDArray[np.uint32], second: NDArray[np.uint32] | np.uint32) -> NDArray[np.uint32]:
    """Hash of an ordered pair, uint32 of the shape of `first`."""
    return np.asarray(first * _ODD ^ second, np.uint32)


def term_hashes(text: str, hashes: _TokenHashes) -> NDArray[np.uint32]:
    """Every occurrence of a term in a text, uint32 [m]: unigrams, bigrams, and those at the edges by their place."""
    if len(text) > WHOLE_CHARS:
        text = text[:HEAD_CHARS] + " " + text[-TAIL_CHARS:]
    tokens = _TOKEN.findall(text.lower())
    single = np.fromiter(map(hashes.__getitem__, tokens), np.uint32, len(tokens))
    if not tokens:
        return single
    pair = _mix(single[:-1], single[1:])
    edge = EDGE_TOKENS - 1
    return np.concatenate(
        [
            single,
            pair,
            _mix(single[:EDGE_TOKENS], _HEAD),
            _mix(pair[:edge], _HEAD),
            _mix(single[-EDGE_TOKENS:], _TAIL),
            _mix(pair[-edge:], _TAIL),
            _mix(single[-1:], _LAST),
        ]
    )


@dataclass(frozen=True, eq=False)
class Sketch:
    """A fitted sketch of T terms and d dimensions.

    Attributes:
        terms: uint32 [T], hashes of the terms, rising.
        idf: float32 [T], inverse document frequency of each term.
        scales: float32 [T], what one unit of `components` is worth.
        components: int8 [T, d], the right singular vectors; a scale for each term keeps rare terms, whose
            weights are small everywhere, from vanishing.
    """

    terms: NDArray[np.uint32]
    idf: NDArray[np.float32]
    scales: NDArray[np.float32]
    components: NDArray[np.int8]

    @property
    def size(self) -> int:
        """d, the width of a sketch: what was asked for, or less where the texts have fewer independent directions."""
        return int(self.components.shape[1])

    @classmethod
    def fit(cls, texts: Sequence[str | None], *, size: int = 128, terms: int = 5_000, seed: int = 0) -> Sketch:
        """Fits on the inputs and outputs of a training set together.

        Args:
            texts: any number of texts; None is a text that was not recorded.
            size: dimensions wanted.
            terms: how many terms to keep, the most frequent by document frequency.
            seed: of the randomised SVD, and of the draw of texts where there are very many.

        Raises:
            InputError: no two texts share a term, so there is nothing to learn from.
        """
        distinct, index = _distinct(texts)
        repeats = np.bincount(index[index >= 0], minlength=len(distinct))
        rng = np.random.default_rng(seed)
        if len(distinct) > FIT_TEXTS:
            drawn = np.sort(rng.choice(len(distinct), FIT_TEXTS, replace=False))
            distinct, repeats = [distinct[i] for i in drawn], repeats[drawn]
        hashes = _TokenHashes()
        documents = [term_hashes(text, hashes) for text in distinct]
        kept, idf = _choose_terms(documents, repeats, terms)
        if not len(kept):
            raise InputError(
                f"no text to sketch: of {len(texts)} texts {int(repeats.sum())} are present and no term stands in two "
                "of them; record input_text and output_text, or train without states (--states none)"
            )
        components = _singular_vectors(_tf_idf(documents, repeats, kept, idf), size, int(rng.integers(2**31)))
        scales = np.maximum(np.abs(components).max(axis=1), np.finfo(np.float32).tiny * 127) / np.float32(127)
        quantised = np.rint(components / scales[:, None]).astype(np.int8)
        return cls(kept, idf, scales.astype(np.float32), quantised)

    def transform(self, texts: Sequence[str | None]) -> NDArray[np.float32]:
        """Sketches of texts, float32 [n, d]: NaN for None, zero for a text without a known term."""
        distinct, index = _distinct(texts)
        hashes = _TokenHashes()
        rows = np.empty((len(distinct) + 1, self.size), np.float32)
        rows[-1] = np.nan  # the index of None is -1
        for i, text in enumerate(distinct):
            rows[i] = self._project(term_hashes(text, hashes))
        return rows[index]

    def transform_one(self, text: str) -> NDArray[np.float32]:
        """The sketch of one text, float32 [d]: the same bits as its row of `transform`."""
        return self._project(term_hashes(text, _TokenHashes()))

    def _project(self, found: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Occurrences of terms, uint32 [m], to their sketch, float32 [d]."""
        count = np.bincount(_locate(found, self.terms), minlength=len(self.terms))
        rows = count.nonzero()[0]
        weight = (1.0 + np.log(count[rows])) * self.idf[rows]
        norm = np.sqrt(np.add.reduce(weight * weight))
        share = (weight * self.scales[rows] / (norm or 1.0)).astype(np.float32)
        products = np.multiply(self.components[rows], share[:, None], dtype=np.float32)
        return np.asarray(np.add.reduce(products, axis=0), np.float32)

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """As an artefact keeps it."""
        return {_PREFIX + name: getattr(self, name) for name in _DTYPES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Sketch:
        """Inverse of `to_tensors`; other tensors are left alone.

        Raises:
            ArtefactError: a tensor is missing, or not what a sketch consists of.
        """
        missing = [_PREFIX + name for name in _DTYPES if _PREFIX + name not in tensors]
        if missing:
            raise ArtefactError(f"the text sketch lacks the tensors {', '.join(missing)}: train anew")
        found = {name: tensors[_PREFIX + name] for name in _DTYPES}
        count = len(found["terms"])
        width = found["components"].shape[-1] if found["components"].ndim else 0
        shapes = {"terms": (count,), "idf": (count,), "scales": (count,), "components": (count, width)}
        for name, dtype in _DTYPES.items():
            if found[name].dtype != dtype or found[name].shape != shapes[name] or not found[name].size:
                raise ArtefactError(
                    f"tensor {_PREFIX + name} is {found[name].dtype} {list(found[name].shape)}; the text sketch wants "
                    f"{np.dtype(dtype)} {list(shapes[name])}, not empty: train anew"
                )
        if (np.diff(found["terms"].astype(np.int64)) <= 0).any():
            raise ArtefactError(f"tensor {_PREFIX}terms is not in rising order: train anew")
        return cls(**found)


def _distinct(texts: Sequence[str | None]) -> tuple[list[str], NDArray[np.int64]]:
    """The distinct texts, and the index of each text among them, int64 [n], -1 for None.

    The input of a step is often the output of an earlier one, so this alone saves about half the work.
    """
    position: dict[str, int] = {}
    index = [-1 if text is None else position.setdefault(text, len(position)) for text in texts]
    return list(position), np.array(index, np.int64)


def _locate(found: NDArray[np.uint32], terms: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Positions in `terms` of those occurrences that are among them."""
    at = np.searchsorted(terms, found)
    at[at == len(terms)] = 0
    return np.asarray(at[terms[at] == found], np.int64)


def _choose_terms(
    documents: list[NDArray[np.uint32]], repeats: NDArray[np.int64], terms: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The terms in most texts, at least two, in rising order, uint32 [T], and their smoothed IDF, float32 [T]."""
    hashes: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
    counts: list[NDArray[np.float64]] = [np.empty(0)]
    for start in range(0, len(documents), _CHUNK):
        part = documents[start : start + _CHUNK]
        document = np.repeat(np.arange(start, start + len(part), dtype=np.uint64), [len(d) for d in part])
        # One sort of 64-bit keys finds the distinct (text, term) pairs of a whole chunk; np.unique is far slower.
        pairs = np.sort(document << np.uint64(32) | np.concatenate(part))
        pairs = pairs[np.diff(pairs, prepend=pairs[:1] + np.uint64(1)) != 0]
        unique, inverse = np.unique(pairs.astype(np.uint32), return_inverse=True)
        hashes.append(unique)
        of = (pairs >> np.uint64(32)).astype(np.int64)
        counts.append(np.asarray(np.bincount(inverse, weights=repeats[of]), np.float64))
    unique, inverse = np.unique(np.concatenate(hashes), return_inverse=True)
    frequency = np.bincount(inverse, weights=np.concatenate(counts), minlength=len(unique))
    often = frequency >= 2
    unique, frequency = unique[often], frequency[often]
    chosen = np.sort(np.lexsort((unique, -frequency))[:terms])
    idf = np.log((1.0 + repeats.sum()) / (1.0 + frequency[chosen])) + 1.0
    return unique[chosen], idf.astype(np.float32)


def _tf_idf(
    documents: list[NDArray[np.uint32]], repeats: NDArray[np.int64], terms: NDArray[np.uint32], idf: NDArray[np.float32]
) -> Any:
    """TF-IDF rows of unit length, one a distinct text, scipy CSR float32 [n, T], times the square root of repeats.

    With that factor, the singular vectors are those of the matrix in which every repeat has a row of its own.
    """
    from scipy.sparse import csr_matrix

    located = [_locate(document, terms) for document in documents]
    ends = np.cumsum([0, *(len(at) for at in located)])
    counts = csr_matrix(
        (np.ones(ends[-1], np.float32), np.concatenate(located), ends), shape=(len(documents), len(terms))
    )
    counts.sum_duplicates()
    counts.data = (1.0 + np.log(counts.data)) * idf[counts.indices]
    row = np.repeat(np.arange(len(documents)), np.diff(counts.indptr))
    squares = np.bincount(row, weights=counts.data.astype(np.float64) ** 2, minlength=len(documents))
    counts.data *= np.sqrt(repeats / np.maximum(squares, 1e-30)).astype(np.float32)[row]
    return counts


def _singular_vectors(matrix: Any, size: int, seed: int) -> NDArray[np.float32]:
    """The first right singular vectors of a sparse matrix [n, T], as columns, float32 [T, d], d at most `size`.

    Directions without weight (fewer texts or terms than `size`) are left out. Each vector's largest entry is positive.
    """
    from sklearn.utils.extmath import randomized_svd

    size = min(size, *matrix.shape)
    _, weight, vectors = randomized_svd(matrix, size, n_iter=4, random_state=seed)
    vectors = vectors[weight > 1e-4 * weight[0]]
    largest = np.abs(vectors).argmax(axis=1)
    sign = np.sign(vectors[np.arange(len(vectors)), largest])
    return np.ascontiguousarray((vectors * sign[:, None]).T, np.float32)
