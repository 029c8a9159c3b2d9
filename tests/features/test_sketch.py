"""A sketch agrees with scikit-learn, with itself in serving, holds no text, and has no term that lives in one task."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from presage.errors import ArtefactError, InputError
from presage.features.sketch import (
    HEAD_CHARS,
    MIN_TASKS,
    PRIOR_TASKS,
    TAIL_CHARS,
    WHOLE_CHARS,
    Corpus,
    Sketch,
    term_chances,
    term_hashes,
)

WORDS = (
    "plan",
    "search",
    "read",
    "verify",
    "write",
    "call",
    "tool",
    "answer",
    "error",
    "retry",
    "file",
    "line",
    "test",
)
ANY_TEXT = st.text(st.characters(), max_size=300)  # lone surrogates included: JSON can spell them


def sample_texts(count: int = 200, seed: int = 0) -> list[str]:
    """Texts of a few topics, some of them twice."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        topic = rng.integers(4)
        words = rng.choice(WORDS[topic * 3 : topic * 3 + 7], size=rng.integers(1, 40))
        texts.append(" ".join(words) + rng.choice([".", "\n", " -> writer", "!?"]))
    return texts + texts[: count // 4]


def terms_of(text: str) -> list[int]:
    return term_hashes(text).tolist()


def corpus_of(
    texts: Sequence[str | None], task: Sequence[int] | None = None, target: Sequence[float] | None = None
) -> Corpus:
    """Rows of one side and group, each a task of its own unless told otherwise."""
    rows = len(texts)
    return Corpus.of(
        texts,
        np.array(range(rows) if task is None else task, np.int32),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int8),
        np.array([0.0] * rows if target is None else target, np.float32).reshape(rows, 1),
    )


def fit(texts: Sequence[str | None], **settings: int) -> Sketch:
    """Of texts that are a task each."""
    return Sketch.fit(corpus_of(texts), np.arange(len(texts)) % 5, **settings)[0]  # type: ignore[arg-type]


@cache
def small_sketch() -> Sketch:
    return fit(sample_texts(40), size=8, seed=0)


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return fit(sample_texts(), size=16, seed=0)


def test_terms_are_tokens_pairs_and_edges() -> None:
    terms = terms_of("Call the Tool!\n")
    # 5 tokens and 4 pairs; all of them again at the head and at the tail; the last token once more
    assert len(terms) == 3 * (5 + 4) + 1
    assert len(set(terms)) == len(terms)
    assert terms == terms_of("call THE tool!\n")
    assert terms_of("") == []
    assert set(terms_of("b a")[:2]) == set(terms_of("a b")[:2])
    assert terms_of("b a")[2] != terms_of("a b")[2], "a pair has an order"


def test_terms_do_not_change_between_releases() -> None:
    """An artefact holds hashes: other ones would silently blind every sketch already trained."""
    assert terms_of("ok\n") == [
        2044517703,
        852952723,
        811305860,
        1549606505,
        2995623389,
        2068400442,
        3968697931,
        39652863,
        3415855384,
        1617826091,
    ]


def test_of_a_long_text_only_head_and_tail_count() -> None:
    head, tail = "h" * HEAD_CHARS, "t" * TAIL_CHARS
    assert terms_of(head + " lost " * 100 + tail) == terms_of(head + " also gone " * 900 + tail)
    whole = "x " * (HEAD_CHARS // 2) + "middle " + "x " * ((WHOLE_CHARS - HEAD_CHARS - 7) // 2)
    assert len(set(terms_of(whole))) > len(set(terms_of(whole + "x " * 5))), "past the limit the middle is left out"


@pytest.mark.parametrize("size", [2, 3])
def test_terms_weights_and_components_are_those_of_scikit_learn(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.features.sketch.MOST_TERMS", 100_000)
    texts = sample_texts()
    reference = TfidfVectorizer(analyzer=terms_of, sublinear_tf=True, min_df=MIN_TASKS)
    weights = reference.fit_transform(texts)
    svd = TruncatedSVD(size, algorithm="arpack", random_state=0).fit(weights)
    sketch = fit(texts, size=size, seed=0)

    assert sketch.terms.tolist() == sorted(reference.vocabulary_)
    order = [reference.vocabulary_[term] for term in sketch.terms.tolist()]
    np.testing.assert_allclose(sketch.idf, reference.idf_[order], rtol=1e-6)
    wanted = svd.components_.T[order]
    wanted = wanted * np.sign(wanted[np.abs(wanted).argmax(axis=0), np.arange(size)])
    found = sketch.components * sketch.scales[:, None]
    assert (np.abs(found - wanted) <= sketch.scales[:, None] / 2 + 1e-4).all(), "within half a unit of quantisation"
    np.testing.assert_allclose(sketch.transform(texts), (weights[:, order] @ wanted), atol=4e-3)


def test_the_most_frequent_terms_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a b", "a b", "a b", "a c", "a c", "a c", "a d", "d"]
    every = fit(texts, size=2, seed=0)
    monkeypatch.setattr("presage.features.sketch.MOST_TERMS", 3)
    few = fit(texts, size=2, seed=0)
    assert len(few.terms) == 3
    assert set(few.terms) <= set(every.terms)
    assert few.idf.max() <= np.sort(every.idf)[2]


@given(ANY_TEXT)
def test_one_text_has_the_bits_of_its_row(text: str) -> None:
    sketch = small_sketch()
    rows = sketch.transform([None, text, "plan search", text])
    assert np.isnan(rows[0]).all()
    assert np.isfinite(rows[1:]).all()
    one = sketch.transform_one(text)
    assert one.dtype == np.float32
    assert one.tobytes() == rows[1].tobytes() == rows[3].tobytes()


@given(st.lists(ANY_TEXT | st.none(), max_size=12))
def test_any_texts_are_sketched_or_refused(texts: list[str | None]) -> None:
    try:
        sketch = fit(texts, size=5, seed=0)
    except InputError:
        tasks = Counter(term for text in texts if text for term in set(terms_of(text)))
        assert max(tasks.values(), default=0) < MIN_TASKS
        return
    assert 1 <= sketch.size <= 5
    rows = sketch.transform(texts)
    assert np.isnan(rows).any(axis=1).tolist() == [text is None for text in texts]
    assert np.nanmax(np.abs(rows)) <= 1.02, "a projection of a unit vector, but for quantisation"


def test_same_seed_same_sketch() -> None:
    texts = sample_texts()
    first, second = (fit(texts, size=8, seed=3).to_tensors() for _ in range(2))
    assert {name: tensor.tobytes() for name, tensor in first.items()} == {
        name: tensor.tobytes() for name, tensor in second.items()
    }


def test_a_text_without_a_known_term_is_zero(sketch: Sketch) -> None:
    assert not sketch.transform_one("").any()
    assert not sketch.transform_one("unheard-of").any()


def test_few_texts_make_a_smaller_sketch() -> None:
    sketch = fit(["plan it"] * 3 + ["read it"] * 3, size=128, seed=0)
    assert sketch.size == 2
    assert sketch.transform(["plan it"]).shape == (1, 2)
    assert fit(["plan it"] * 30, size=128, seed=0).size == 1


@pytest.mark.parametrize("texts", [[], [None, None, None], ["", "", "  "], ["one", "one", "other"]])
def test_nothing_to_learn_from_is_refused(texts: list[str | None]) -> None:
    with pytest.raises(InputError, match=r"no text to learn from.*--states none"):
        fit(texts)


def test_tensors_hold_no_text(sketch: Sketch) -> None:
    content = b"".join(tensor.tobytes() for tensor in sketch.to_tensors().values())
    assert not [word for word in WORDS if re.search(word.encode(), content)]
    assert {tensor.dtype.kind for tensor in sketch.to_tensors().values()} <= set("uif")


def test_tensors_round_trip(sketch: Sketch) -> None:
    again = Sketch.from_tensors(sketch.to_tensors() | {"other": np.zeros(1)})
    assert again.transform_one("plan and verify").tobytes() == sketch.transform_one("plan and verify").tobytes()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("sketch.idf", None, "lacks the tensors sketch.idf"),
        ("sketch.idf", np.zeros(2, np.float32), r"sketch.idf is float32 \[2\]"),
        ("sketch.components", np.zeros((3, 4), np.float32), "sketch.components is float32"),
        ("sketch.components", np.zeros((), np.int8), "sketch.components is int8"),
        ("sketch.terms", "reversed", "rising order"),
    ],
)
def test_broken_tensors_are_refused(sketch: Sketch, name: str, tensor: object, message: str) -> None:
    tensors = sketch.to_tensors()
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensors[name][::-1] if isinstance(tensor, str) else np.asarray(tensor)
    with pytest.raises(ArtefactError, match=message):
        Sketch.from_tensors(tensors)


def test_a_full_sketch_stays_under_a_megabyte() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(4_000)]
    texts = [" ".join(rng.choice(words, 60)) for _ in range(1_500)]
    sketch = fit(texts, seed=0)
    assert sketch.components.shape == (5_000, 128)
    assert sum(tensor.nbytes for tensor in sketch.to_tensors().values()) <= 720_000


def test_of_very_many_texts_a_draw_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sample_texts()
    whole = fit(texts, size=8, seed=0)
    monkeypatch.setattr("presage.features.sketch.FIT_TEXTS", 60)
    drawn, again, other = (fit(texts, size=8, seed=seed) for seed in (0, 0, 1))
    assert drawn.idf.tolist() != whole.idf.tolist(), "frequencies are those of the draw"
    assert drawn.to_tensors().keys() == again.to_tensors().keys()
    assert drawn.components.tobytes() == again.components.tobytes() != other.components.tobytes()


# --- terms by task ---


def hashes_of(words: str) -> set[int]:
    return set(terms_of(words))


def test_a_term_of_one_task_is_no_feature_however_often_it_is_said() -> None:
    texts = ["plan kowalski"] * 50 + ["plan it", "read it", "plan it", "read it"]
    corpus = corpus_of(texts, task=[0] * 50 + [1, 2, 3, 4])
    sketch, _ = Sketch.fit(corpus, corpus.task % 2)
    assert terms_of("plan")[0] in sketch.terms.tolist()
    assert terms_of("kowalski")[0] not in sketch.terms.tolist()


def test_identifiers_change_no_bit() -> None:
    rng = np.random.default_rng(0)
    texts = sample_texts()
    numbered = [f"{text} ticket {rng.integers(10**5, 10**6)}" for text in texts]
    others = [f"{text} ticket {rng.integers(10**5, 10**6)}" for text in texts]
    first, second = fit(numbered, size=8), fit(others, size=8)
    assert all(np.array_equal(a, second.to_tensors()[name]) for name, a in first.to_tensors().items())
    assert first.transform_one(numbered[0]).tobytes() == second.transform_one(others[0]).tobytes()


def drawn_with_noise(tasks: int, seed: int, words: int = 30) -> tuple[list[str], list[int], list[float]]:
    """Two texts a task: one word in two decides the target, the others are drawn from a few hundred."""
    rng = np.random.default_rng(seed)
    texts, task, target = [], [], []
    for number in range(tasks):
        told = rng.random() < 0.5
        for _ in range(2):
            noise = " ".join(f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in rng.integers(0, 400, words))
            texts.append(f"{'deploy' if told else 'review'} {noise}")
            task.append(number)
            target.append(float(rng.random() < (0.9 if told else 0.1)))
    return texts, task, target


def test_of_free_text_the_terms_that_tell_are_kept_and_few_others() -> None:
    corpus = corpus_of(*drawn_with_noise(200, 0))
    sketch, _ = Sketch.fit(corpus, corpus.task % 5, relevant=True)
    every, _ = Sketch.fit(corpus, corpus.task % 5)
    assert {terms_of("deploy")[0], terms_of("review")[0]} <= set(sketch.terms.tolist())
    telling = hashes_of("deploy") | hashes_of("review")
    assert len(set(sketch.terms.tolist()) - telling) <= 4
    assert len(every.terms) > 300


def test_where_no_term_tells_there_is_nothing_to_learn() -> None:
    texts, task, target = drawn_with_noise(200, 1)
    random = np.random.default_rng(0).random(len(target)).round().tolist()
    corpus = corpus_of(texts, task, random)
    with pytest.raises(InputError, match="goes with what is to be forecast"):
        Sketch.fit(corpus, corpus.task % 5, relevant=True)


def test_training_rows_see_no_term_that_their_own_tasks_brought_in() -> None:
    """A word of three tasks of one fold is a feature for fresh texts, and none for those tasks."""
    texts = ["plan rare"] * 3 + ["plan it"] * 6
    corpus = corpus_of(texts)
    fold = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    sketch, chosen = Sketch.fit(corpus, fold)
    rows = sketch.out_of_fold(corpus, fold, chosen)
    assert terms_of("rare")[0] in sketch.terms.tolist()
    fresh = sketch.transform(texts)
    assert not np.allclose(rows[0], fresh[0])
    known = [t for t in terms_of("plan rare") if sum(t in terms_of(text) for text in texts[3:]) >= MIN_TASKS]
    np.testing.assert_array_equal(rows[0], sketch.of_terms(np.array(known, np.uint32)))


def test_rows_of_a_corpus_are_those_of_its_texts(sketch: Sketch) -> None:
    texts = [*sample_texts(20, seed=3), None]
    np.testing.assert_array_equal(sketch.rows(corpus_of(texts)), sketch.transform(texts))


def test_the_chance_of_a_term_is_that_of_the_formula() -> None:
    """The sum over tasks of s = (sum of x e), squared, over its variance: that of s in the term's tasks, shrunk to that
    over all tasks, less the share of rows the term stands in."""
    texts = ["alpha beta", "alpha", "beta", "gamma", "alpha gamma", "beta gamma"] * 4
    task = np.arange(24) // 2
    target = np.random.default_rng(0).normal(size=24).astype(np.float32)
    corpus = corpus_of(texts, task.tolist(), target.tolist())
    x = np.array(["alpha" in text.split() for text in texts], float)
    e = target - target.mean()
    with_it = np.unique(task[x > 0])
    s = np.bincount(task, x * e)[with_it]
    rows = np.bincount(task, x)[with_it]
    squares = np.square(np.bincount(task, e))
    correlation = np.clip(squares.sum() / np.square(e).sum() - 1, 0, 1)  # two rows a task
    anyway = squares.mean() * (rows * (1 + correlation * (rows - 1)) / (2 * (1 + correlation))).sum()
    freedom = PRIOR_TASKS + len(s) - 1
    variance = (PRIOR_TASKS * anyway + len(s) * np.square(s - s.mean()).sum()) / freedom * (1 - x.mean())
    wanted = f.sf(s.sum() ** 2 / variance, 1, freedom)
    chances = term_chances(corpus, task.astype(np.int64) % 3, np.array([terms_of("alpha")[0]], np.uint32))
    np.testing.assert_allclose(chances[-1], [wanted], rtol=1e-4)


def test_words_of_short_workflows_are_no_discovery() -> None:
    """What is left is skewed: most workflows have a little less than the mean left, a few far more. A random word that
    happens to stand in no long workflow tells nothing."""
    rng = np.random.default_rng(0)
    texts, task, target = [], [], []
    for workflow in range(300):
        words = " ".join("w" + "".join(rng.choice(list("abcdefghijklmnopqrst"), 2)) for _ in range(40))
        steps = 2 if rng.random() < 0.9 else 20
        texts += [f"go {words}"] * steps
        task += [workflow] * steps
        target += [float(steps - step) for step in range(steps)]
    with pytest.raises(InputError, match="goes with what is to be forecast"):
        Sketch.fit(corpus_of(texts, task, target), np.array(task) % 5, relevant=True)
