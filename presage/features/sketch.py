"""A sketch of a text: hashed terms, TF-IDF, truncated SVD. Under a megabyte, fitted in seconds.

Punctuation and line breaks are tokens, because they carry the format of an answer; the first and last tokens count once
more by their place, because agents are called by name at the edges of a message. Identifiers are replaced by their kind
(`text_tokens.py`).

A term is counted by the tasks it occurs in, not by texts: a word in a hundred prompts of one workflow predicts nothing
about the next workflow. Of two vocabularies the caller keeps the better on held-out tasks
(`training/next_agent/semantic_state.py`): every term of `MIN_TASKS` tasks, or only the *relevant* ones of these, which
are associated with the target beyond chance (`term_chances`). Irrelevant free text (names, random words) dominates the
SVD of the first, but not of the second.

Traces hold private text, so a term is a 32-bit hash as soon as it is counted. The hash has no key: a guessed term can
be tested, but none can be read.

Training and serving agree to the last bit: many texts are a loop over one (`transform_one`), without BLAS, whose sums
depend on the number of threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.errors import ArtefactError, InputError
from presage.features.text_tokens import chunks_of, tokens_of_chunk

WHOLE_CHARS: Final = 1_400
"""Of a longer text only so many characters of its head and of its tail count."""
HEAD_CHARS: Final = 500
TAIL_CHARS: Final = 900

EDGE_TOKENS: Final = 12
"""Tokens at either end of a text that count once more, by their place."""

MIN_TASKS: Final = 3
"""Tasks a term occurs in before it can be a feature."""

MOST_TERMS: Final = 5_000
"""Most terms of a sketch."""

MOST_CANDIDATES: Final = 20_000
"""Most terms whose relevance is tested, the most frequent."""

FALSE_DISCOVERIES: Final = 0.2
"""Expected share of irrelevant terms among those kept as relevant (Benjamini and Hochberg, 1995)."""

FIT_TEXTS: Final = 50_000
"""Most distinct texts to fit on, drawn by the seed."""

PRIOR_TASKS: Final = 20.0
"""Weight, in tasks, of the general variance of a target beside that of a tested term's own tasks."""

_HEAD, _TAIL, _LAST = (np.uint32(zlib.crc32(tag)) for tag in (b"^", b"$", b"$$"))
_ODD: Final = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: spreads a hash over all bits
_PREFIX: Final = "sketch."
_DTYPES: Final = {"terms": np.uint32, "idf": np.float32, "scales": np.float32, "components": np.int8}


class _ChunkHashes(dict[str, list[int]]):
    """CRC-32 of the tokens of chunks, cached for one call: a longer-lived cache would hold private words."""

    def __missing__(self, chunk: str) -> list[int]:
        # A lone surrogate is invalid UTF-8, but JSON can contain one.
        value = self[chunk] = [zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in tokens_of_chunk(chunk)]
        return value


def _mix(first: NDArray[np.uint32], second: NDArray[np.uint32] | np.uint32) -> NDArray[np.uint32]:
    return np.asarray(first * _ODD ^ second, np.uint32)


def term_hashes(text: str, hashes: _ChunkHashes | None = None) -> NDArray[np.uint32]:
    """Every occurrence of a term in a text, uint32 [m]: unigrams, bigrams, and those at the edges by their place."""
    hashes = _ChunkHashes() if hashes is None else hashes
    if len(text) > WHOLE_CHARS:
        text = text[:HEAD_CHARS] + " " + text[-TAIL_CHARS:]
    single = np.array([value for chunk in chunks_of(text) for value in hashes[chunk]], np.uint32)
    if not len(single):
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
class Corpus:
    """The tokenised texts of training steps, and the targets of relevant terms.

    A row is an occurrence of a text: a step has two, its input and its output.

    Attributes:
        vocabulary: uint32 [V], hashes of all terms, rising.
        counts: how often each term occurs in each of D distinct texts, scipy CSR int64 [D, V].
        document: int64 [R], index of the text; -1 where none was recorded.
        task: int32 [R], of the step.
        group: int32 [R], known of the step without its text: terms are tested within groups.
        side: int8 [R]: rows of one side (all inputs, all outputs) are tested together.
        targets: float32 [R, O], NaN where unknown.
    """

    vocabulary: NDArray[np.uint32]
    counts: Any
    document: NDArray[np.int64]
    task: NDArray[np.int32]
    group: NDArray[np.int32]
    side: NDArray[np.int8]
    targets: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        texts: Sequence[str | None],
        task: NDArray[np.int32],
        group: NDArray[np.int32],
        side: NDArray[np.int8],
        targets: NDArray[np.float32],
    ) -> Corpus:
        """Tokenise R texts; None is a text that was not recorded."""
        from scipy.sparse import csr_matrix

        distinct, document = _distinct(texts)
        hashes = _ChunkHashes()
        nothing = np.empty(0, np.uint32), np.empty(0, np.int64)
        counted = [nothing, *(np.unique(term_hashes(text, hashes), return_counts=True) for text in distinct)]
        starts = np.cumsum([len(terms) for terms, _ in counted])
        terms, times = (np.concatenate(parts) for parts in zip(*counted, strict=True))
        vocabulary, column = np.unique(terms, return_inverse=True)
        counts = csr_matrix((times, column, starts), shape=(len(distinct), len(vocabulary)))
        return cls(vocabulary, counts, document, task, group, side, targets)

    def take(self, rows: NDArray[np.bool_]) -> Corpus:
        """Some of the rows, bool [R]."""
        per_row = ("document", "task", "group", "side", "targets")
        return replace(self, **{name: getattr(self, name)[rows] for name in per_row})

    def among(self, terms: NDArray[np.uint32]) -> Any:
        """Occurrences of each of T terms, rising, in each text, scipy CSR int64 [D, T]."""
        from scipy.sparse import csr_matrix

        column = np.minimum(np.searchsorted(self.vocabulary, terms), len(self.vocabulary) - 1)
        here = np.flatnonzero(self.vocabulary[column] == terms)
        occurring = self.counts[:, column[here]]
        occurring.sort_indices()
        return csr_matrix(
            (occurring.data, here[occurring.indices], occurring.indptr), shape=(occurring.shape[0], len(terms))
        )


@dataclass(frozen=True, eq=False)
class Sketch:
    """A fitted sketch of T terms and d dimensions.

    Attributes:
        terms: uint32 [T], hashes, rising.
        idf: float32 [T], inverse document frequencies.
        scales: float32 [T], units of `components`; one for each term, because the weights of rare terms are small.
        components: int8 [T, d], the right singular vectors.
    """

    terms: NDArray[np.uint32]
    idf: NDArray[np.float32]
    scales: NDArray[np.float32]
    components: NDArray[np.int8]

    @property
    def size(self) -> int:
        """d: the requested size, or less where the texts have fewer independent directions."""
        return int(self.components.shape[1])

    @classmethod
    def fit(
        cls,
        corpus: Corpus,
        fold: NDArray[np.int64],
        *,
        relevant: bool = False,
        size: int = 128,
        seed: int = 0,
    ) -> tuple[Sketch, NDArray[np.bool_]]:
        """Fit on the inputs and outputs of a training set together, with `size` dimensions.

        Args:
            corpus: the texts, R rows.
            fold: int64 [R], 0..F-1, equal for rows of one task.
            relevant: keep only terms associated with the targets beyond chance.
            size: dimensions wanted.
            seed: of the randomised SVD, and of the draw of texts.

        Returns the sketch of T terms, and which of them are chosen without each fold, bool [F, T]; see `out_of_fold`.
        Raises InputError if no term occurs in MIN_TASKS tasks, or none of them is relevant.
        """
        rng = np.random.default_rng(seed)
        repeats = np.bincount(corpus.document[corpus.document >= 0], minlength=corpus.counts.shape[0])
        drawn = np.flatnonzero(repeats)
        if len(drawn) > FIT_TEXTS:
            drawn = np.sort(rng.choice(drawn, FIT_TEXTS, replace=False))
        terms, tasks = _terms_by_task(corpus, fold)
        if not len(terms):
            raise _nothing(corpus, f"occurs in {MIN_TASKS} tasks")
        counts = corpus.among(terms)[drawn]
        weights = np.repeat(repeats[drawn], np.diff(counts.indptr)).astype(np.float64)
        frequency = np.asarray(np.bincount(counts.indices, weights, len(terms)), np.float64)
        elsewhere_known = tasks.sum(axis=0) - tasks >= MIN_TASKS  # [F, terms], without the fold's own tasks
        kept = _most_frequent(terms, frequency, MOST_CANDIDATES if relevant else MOST_TERMS)
        if relevant:
            everywhere, elsewhere = _relevant(corpus, fold, terms[kept])
            elsewhere_known = elsewhere_known[:, kept] & elsewhere
            elsewhere_known, kept = elsewhere_known[:, everywhere], kept[everywhere]
            if not len(kept):
                raise _nothing(corpus, "goes with what is to be forecast")
            most = _most_frequent(terms[kept], frequency[kept], MOST_TERMS)
            elsewhere_known, kept = elsewhere_known[:, most], kept[most]
        else:
            elsewhere_known = elsewhere_known[:, kept]
        terms, frequency = terms[kept], frequency[kept]
        idf = (np.log((1.0 + repeats[drawn].sum()) / (1.0 + frequency)) + 1.0).astype(np.float32)
        matrix = _tf_idf(counts[:, kept], repeats[drawn], idf)
        components = _singular_vectors(matrix, size, int(rng.integers(2**31)))
        scales = np.maximum(np.abs(components).max(axis=1), np.finfo(np.float32).tiny * 127) / np.float32(127)
        quantised = np.rint(components / scales[:, None]).astype(np.int8)
        return cls(terms, idf, scales.astype(np.float32), quantised), elsewhere_known

    def out_of_fold(self, corpus: Corpus, fold: NDArray[np.int64], known: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Sketches of the corpus it was fitted on, float32 [R, d], each with only those terms that other folds choose.

        A term that was chosen because of a workflow overfits to it. `corpus` and `fold` are those of `fit`, `known` is
        its result; NaN where a text was not recorded.
        """
        counts = corpus.among(self.terms)
        out = np.full((len(fold), self.size), np.nan, np.float32)
        for of_fold, chosen in enumerate(known):
            rows = np.flatnonzero((fold == of_fold) & (corpus.document >= 0))
            distinct, index = np.unique(corpus.document[rows], return_inverse=True)
            own = counts[distinct]
            out[rows] = self._sums(own.indptr, own.indices, own.data * chosen[own.indices])[index]
        return out

    def transform(self, texts: Sequence[str | None]) -> NDArray[np.float32]:
        """Sketches of texts, float32 [n, d]: NaN for None, zero for a text without a known term."""
        distinct, index = _distinct(texts)
        hashes = _ChunkHashes()
        rows = np.empty((len(distinct) + 1, self.size), np.float32)
        rows[-1] = np.nan  # the index of None is -1
        for i, text in enumerate(distinct):
            rows[i] = self.of_terms(term_hashes(text, hashes))
        return rows[index]

    def rows(self, corpus: Corpus) -> NDArray[np.float32]:
        """Sketches of the texts of a corpus, float32 [R, d], as of `transform`."""
        rows, everything = len(corpus.document), np.ones((1, len(self.terms)), bool)
        return self.out_of_fold(corpus, np.zeros(rows, np.int64), everything)

    def transform_one(self, text: str) -> NDArray[np.float32]:
        """The sketch of one text, float32 [d]: the same bits as its row of `transform`."""
        return self.of_terms(term_hashes(text))

    def of_terms(self, found: NDArray[np.uint32]) -> NDArray[np.float32]:
        """The sketch of occurrences of terms, uint32 [m], float32 [d]; unknown terms do not count."""
        columns = np.searchsorted(self.terms, found)
        columns[columns == len(self.terms)] = 0
        places = columns[self.terms[columns] == found]
        sketch: NDArray[np.float32] = self._sums(np.array([0, len(places)]), places, np.ones_like(places))[0]
        return sketch

    def _sums(
        self, starts: NDArray[np.integer[Any]], places: NDArray[np.integer[Any]], times: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Sketches float32 [n, d]; text i has the terms places[starts[i]:starts[i + 1]], each so many times."""
        where = starts.astype(np.int64), places.astype(np.int64)
        sketches: NDArray[np.float32] = _sums(*where, times, self.idf, self.scales, self.components)
        return sketches

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays of an artefact."""
        return {_PREFIX + name: getattr(self, name) for name in _DTYPES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Sketch:
        """Inverse of `to_tensors`; raises ArtefactError if a tensor is missing or malformed."""
        missing = [_PREFIX + name for name in _DTYPES if _PREFIX + name not in tensors]
        if missing:
            raise ArtefactError(f"the text sketch lacks the tensors {', '.join(missing)}: train anew")
        parts = {name: tensors[_PREFIX + name] for name in _DTYPES}
        count = len(parts["terms"])
        width = parts["components"].shape[-1] if parts["components"].ndim else 0
        shapes = {"terms": (count,), "idf": (count,), "scales": (count,), "components": (count, width)}
        for name, dtype in _DTYPES.items():
            if parts[name].dtype != dtype or parts[name].shape != shapes[name] or not parts[name].size:
                raise ArtefactError(
                    f"tensor {_PREFIX + name} is {parts[name].dtype} {list(parts[name].shape)}; expected in a text "
                    f"sketch {np.dtype(dtype)} {list(shapes[name])}, not empty: train anew"
                )
        if (np.diff(parts["terms"].astype(np.int64)) <= 0).any():
            raise ArtefactError(f"tensor {_PREFIX}terms is not in rising order: train anew")
        return cls(**parts)


@njit(cache=True)
def _sums(
    starts: NDArray[np.int64],
    places: NDArray[np.int64],
    times: NDArray[np.int64],
    idf: NDArray[np.float32],
    scales: NDArray[np.float32],
    components: NDArray[np.int8],
) -> NDArray[np.float32]:
    """TF-IDF weights of unit length times the singular vectors, float32 [n, d]."""
    counts = np.zeros(len(idf), np.int64)
    out = np.zeros((len(starts) - 1, components.shape[1]), np.float32)
    for text in range(len(out)):
        counts[:] = 0
        for entry in range(starts[text], starts[text + 1]):
            counts[places[entry]] += times[entry]
        squares = 0.0
        for place in range(len(counts)):
            if counts[place]:
                squares += ((1.0 + np.log(counts[place])) * idf[place]) ** 2
        for place in range(len(counts)):
            if counts[place]:
                share = np.float32((1.0 + np.log(counts[place])) * idf[place] * scales[place] / np.sqrt(squares))
                for d in range(out.shape[1]):
                    out[text, d] += share * np.float32(components[place, d])
    return out


def _nothing(corpus: Corpus, what: str) -> InputError:
    return InputError(
        f"no text to learn from: of {len(corpus.document)} texts {int((corpus.document >= 0).sum())} are present and "
        f"no term {what}; record input_text and output_text of more tasks, or train without texts (--states none)"
    )


def _distinct(texts: Sequence[str | None]) -> tuple[list[str], NDArray[np.int64]]:
    """The distinct texts, and the index of each text among them, int64 [n], -1 for None."""
    position: dict[str, int] = {}
    index = [-1 if text is None else position.setdefault(text, len(position)) for text in texts]
    return list(position), np.array(index, np.int64)


def _terms_by_task(corpus: Corpus, fold: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The terms of MIN_TASKS tasks, rising, uint32 [T], and the number of tasks in each fold, int64 [F, T]."""
    from scipy.sparse import csr_matrix

    texts, terms = corpus.counts.shape
    present = corpus.document >= 0
    number, fold_of = np.unique(np.stack([corpus.task[present], fold[present]]), axis=1, return_inverse=True)
    pairs = np.unique(np.stack([fold_of, corpus.document[present]]), axis=1)
    has = csr_matrix((np.ones(pairs.shape[1], np.int32), pairs), shape=(number.shape[1], texts))
    occurring = has @ (corpus.counts > 0).astype(np.int32)
    tasks = np.zeros((int(fold.max(initial=0)) + 1, terms), np.int64)
    for of_fold in range(len(tasks)):
        tasks[of_fold] = np.bincount(occurring[number[1] == of_fold].indices, minlength=terms)
    often = tasks.sum(axis=0) >= MIN_TASKS
    return corpus.vocabulary[often], tasks[:, often]


def _most_frequent(terms: NDArray[np.uint32], frequency: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Places of the most frequent terms, rising."""
    return np.sort(np.lexsort((terms, -frequency))[:most])


def _relevant(
    corpus: Corpus, fold: NDArray[np.int64], terms: NDArray[np.uint32]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Terms associated with a target beyond chance: in all rows, bool [T], and without each fold, bool [F, T]."""
    chances = term_chances(corpus, fold, terms)
    kept = np.stack([_discoveries(row) for row in chances])
    return kept[-1], kept[:-1]


def term_chances(corpus: Corpus, fold: NDArray[np.int64], terms: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The p-value of each term's association with the targets.

    Let x be 1 where a term occurs in a row, e a target less the mean of its group, and s the sum of x e within a task.
    The sum of s over the tasks of an irrelevant term is 0 in expectation. It is tested by a moderated t statistic
    (Smyth, 2004): the variance of s over the term's own tasks, shrunk towards that over all tasks. (The own variance
    alone takes a few short workflows for a discovery, the general one a single long workflow.)

    Returns the smallest p-value over all targets and sides, times their number, float64 [F+1, T]: without the tasks of
    each fold, and last with all.
    """
    from scipy.special import fdtrc

    counts = corpus.among(terms)
    folds = int(fold.max(initial=0)) + 1
    least, tested = np.ones((folds + 1, len(terms))), 0
    for side in np.unique(corpus.side):
        rows = np.flatnonzero((corpus.side == side) & (corpus.document >= 0))
        rows = rows[np.argsort(corpus.task[rows], kind="stable")]
        residuals = _residuals(corpus.targets[rows], corpus.group[rows])
        sums, squares, expected, tasks, occurrences = _score_sums(
            corpus.document[rows],
            corpus.task[rows],
            fold[rows],
            counts.indptr.astype(np.int64),
            counts.indices.astype(np.int32),
            residuals,
            *_by_task(residuals, corpus.task[rows]),
            len(terms),
            folds,
        )
        # Of a term in most rows of its group, the squares of its own tasks exceed the variance of the sum.
        spare = np.maximum(1.0 - _usual_share(corpus, rows, counts, occurrences), 0.0)
        for left_out in range(folds + 1):
            others = np.arange(folds) != left_out
            count = tasks[others].sum(axis=0)[:, None].astype(np.float64)
            total = sums[others].sum(axis=0)
            own = squares[others].sum(axis=0) - total**2 / np.maximum(count, 1.0)
            freedom = PRIOR_TASKS + np.maximum(count - 1.0, 0.0)
            variance = (PRIOR_TASKS * expected[others].sum(axis=0) + own * count) / freedom * spare[:, None]
            shown = np.divide(total**2, variance, out=np.zeros_like(total), where=variance > 1e-9)
            # All targets of a term have the same degrees of freedom: the largest statistic has the smallest p-value.
            strongest = shown.max(axis=1, initial=0.0)
            least[left_out] = np.minimum(least[left_out], fdtrc(1, freedom[:, 0], strongest))
        tested += residuals.shape[1]
    return np.minimum(least * tested, 1.0)


def _by_task(
    residuals: NDArray[np.float32], task: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean square of the sum of residuals [R, O] over a task, and their intraclass correlation, at least 0; float64 [O]
    each. Rows are sorted by task."""
    starts = np.flatnonzero(np.diff(task, prepend=-1))
    if not len(starts):
        return np.zeros(residuals.shape[1]), np.zeros(residuals.shape[1])
    rows = np.diff(np.append(starts, len(task))).astype(np.float64)
    squares = (residuals.astype(np.float64) ** 2).sum(axis=0)
    sums = (np.add.reduceat(residuals, starts, axis=0).astype(np.float64) ** 2).sum(axis=0)
    pairs = max((rows * (rows - 1.0)).sum(), 1.0) / len(task)
    excess = np.divide(sums, squares, out=np.ones_like(sums), where=squares > 0.0) - 1.0
    return sums / len(starts), np.clip(excess / pairs, 0.0, 1.0)


def _residuals(targets: NDArray[np.float32], group: NDArray[np.int32]) -> NDArray[np.float32]:
    """Targets [R, O] less the mean of their group, 0 where unknown."""
    finite = np.isfinite(targets)
    values = np.where(finite, targets, 0.0).astype(np.float64)
    index = np.unique(group, return_inverse=True)[1]
    totals, counts = (np.zeros((int(index.max(initial=0)) + 1, targets.shape[1])) for _ in range(2))
    np.add.at(totals, index, values)
    np.add.at(counts, index, finite)
    return np.where(finite, values - (totals / np.maximum(counts, 1))[index], 0.0).astype(np.float32)


def _usual_share(
    corpus: Corpus, rows: NDArray[np.int64], counts: Any, occurrences: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Share of the rows of a group that a term occurs in, mean over the term's occurrences, float64 [T]."""
    total = np.zeros(len(occurrences))
    for group in np.unique(corpus.group[rows]):
        texts = corpus.document[rows[corpus.group[rows] == group]]
        own, repeats = np.unique(texts, return_counts=True)
        occurring = counts[own]
        count = np.bincount(occurring.indices, np.repeat(repeats, np.diff(occurring.indptr)), len(total))
        total += count**2 / len(texts)
    return np.asarray(total / np.maximum(occurrences, 1))


def _discoveries(p: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of T p-values are discoveries at the rate FALSE_DISCOVERIES (Benjamini and Hochberg)."""
    order = np.argsort(p, kind="stable")
    below = p[order] <= FALSE_DISCOVERIES * np.arange(1, len(p) + 1) / max(len(p), 1)
    discoveries = np.zeros(len(p), bool)
    discoveries[order[: int(np.flatnonzero(below).max(initial=-1)) + 1]] = True
    return discoveries


@njit(cache=True)
def _score_sums(
    document: NDArray[np.int64],
    task: NDArray[np.int32],
    fold: NDArray[np.int64],
    starts: NDArray[np.int64],
    flat: NDArray[np.int32],
    residuals: NDArray[np.float32],
    mean_square: NDArray[np.float64],
    correlation: NDArray[np.float64],
    terms: int,
    folds: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Of the tasks of each fold: sums, squared sums, squared sums expected of as many rows of any task, float64
    [F, T, O] each, and their number, int64 [F, T]; and occurrences int64 [T].

    Rows are in the order of their tasks; document d has the terms flat[starts[d]:starts[d + 1]], each once.
    """
    outputs = residuals.shape[1]
    sums = np.zeros((folds, terms, outputs))
    squares = np.zeros((folds, terms, outputs))
    expected = np.zeros((folds, terms, outputs))
    tasks = np.zeros((folds, terms), np.int64)
    occurrences = np.zeros(terms, np.int64)
    within = np.zeros((terms, outputs), np.float32)
    seen = np.zeros(terms, np.int64)
    touched = np.empty(terms, np.int32)
    count, rows = 0, 0
    for row in range(len(document)):
        rows += 1
        for entry in range(starts[document[row]], starts[document[row] + 1]):
            term = flat[entry]
            occurrences[term] += 1
            if not seen[term]:
                touched[count] = term
                count += 1
            seen[term] += 1
            of_term = within[term]
            for o in range(outputs):
                of_term[o] += residuals[row, o]
        if row + 1 == len(document) or task[row + 1] != task[row]:
            here, there, anywhere = sums[fold[row]], squares[fold[row]], expected[fold[row]]
            for i in range(count):
                term = touched[i]
                with_term = seen[term]
                seen[term] = 0
                tasks[fold[row], term] += 1
                of_term = within[term]
                for o in range(outputs):
                    here[term, o] += of_term[o]
                    there[term, o] += of_term[o] * of_term[o]
                    share = (
                        with_term
                        * (1.0 + correlation[o] * (with_term - 1))
                        / (rows * (1.0 + correlation[o] * (rows - 1)))
                    )
                    anywhere[term, o] += mean_square[o] * share
                    of_term[o] = 0.0
            count, rows = 0, 0
    return sums, squares, expected, tasks, occurrences


def _tf_idf(counts: Any, repeats: NDArray[np.int64], idf: NDArray[np.float32]) -> Any:
    """TF-IDF rows of unit length, one a distinct text, scipy CSR float32 [n, T], times the square root of repeats.

    The singular vectors are then those of the matrix with a row for each repeat.
    """
    counts.sort_indices()
    counts = counts.astype(np.float32)
    counts.data = (1.0 + np.log(counts.data)) * idf[counts.indices]
    row = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    squares = np.bincount(row, weights=counts.data.astype(np.float64) ** 2, minlength=counts.shape[0])
    counts.data *= np.sqrt(repeats / np.maximum(squares, 1e-30)).astype(np.float32)[row]
    return counts


def _singular_vectors(matrix: Any, size: int, seed: int) -> NDArray[np.float32]:
    """The first right singular vectors of a sparse matrix [n, T] with any weight, as columns, float32 [T, d ≤ size]."""
    from sklearn.utils.extmath import randomized_svd

    size = min(size, *matrix.shape)
    _, weight, vectors = randomized_svd(matrix, size, n_iter=4, random_state=seed)
    vectors = vectors[weight > 1e-4 * weight[0]]
    largest = np.abs(vectors).argmax(axis=1)
    sign = np.sign(vectors[np.arange(len(vectors)), largest])
    return np.ascontiguousarray((vectors * sign[:, None]).T, np.float32)
