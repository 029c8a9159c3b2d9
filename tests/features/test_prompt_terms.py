"""Terms and form of prompts: scikit-learn's weights, bounded time, any text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import InputError
from presage.features.prompt_terms import (
    FORM_NAMES,
    HEAD_CHARS,
    TAIL_CHARS,
    PromptTerms,
    prompt_form,
    terms_of,
    word_hashes,
)

PROMPTS = (
    *generate_outcomes(60, 0).outcomes.prompts,
    "Let f(x) = 2x + 1. Find f(12)!",
    "Find the root: x^2 = 12, x > 0 ?!",
    "Ω is the ohm, straße a street; 数学 问题",
    "x x x y y x",
    "y x, x y",
)
FRESH = (*generate_outcomes(20, 1).outcomes.prompts, "find f(3) in the straße", "", "数学")


@pytest.mark.parametrize("block", [0, 1])
def test_weights_are_those_of_scikit_learn(block: int) -> None:
    reference = (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2, token_pattern=r"(?u)\w+|[^\w\s]"),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, min_df=3),
    )[block].fit(PROMPTS)
    terms = PromptTerms.fit(PROMPTS)
    words = len(terms.hashes[0])
    columns = slice(None, words) if block == 0 else slice(words, None)
    ours = [terms.transform(texts)[:, columns].toarray() for texts in (PROMPTS, FRESH)]
    theirs = [reference.transform(texts).toarray() for texts in (PROMPTS, FRESH)]
    assert ours[0].shape == theirs[0].shape
    # Columns stand in another order: each of ours, over training and fresh prompts, is one of theirs.
    order = [np.lexsort(np.round(of[0], 5)) for of in (ours, theirs)]
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine @ mine.T, its @ its.T, atol=1e-5)
    np.testing.assert_allclose(ours[0][:, order[0]], theirs[0][:, order[1]], atol=1e-5)


def test_one_prompt_has_the_bits_of_its_row() -> None:
    terms = PromptTerms.fit(PROMPTS)
    rows = terms.transform(FRESH)
    for i, prompt in enumerate(FRESH):
        places, weights = terms.transform_one(prompt)
        np.testing.assert_array_equal(places, rows[i].indices)
        np.testing.assert_array_equal(weights, rows[i].data)


@given(st.text(max_size=60))
def test_any_text_has_terms_of_unit_length_or_none(text: str) -> None:
    terms = PromptTerms.fit(PROMPTS)
    places, weights = terms.transform_one(text + "\ud800")
    assert (np.diff(places) > 0).all()
    words = places < len(terms.hashes[0])
    for block in (weights[words], weights[~words]):
        assert not len(block) or np.isclose((block**2).sum(), 1, atol=1e-5)
    assert np.isfinite(prompt_form([text])).all()


def test_a_pair_is_not_its_reverse() -> None:
    one, other = (terms_of(text)[0] for text in ("red door", "door red"))
    assert set(one[:2].tolist()) == set(other[:2].tolist())
    assert one[2] != other[2]


def test_of_a_long_prompt_both_ends_are_read() -> None:
    middle = "filler " * 5000
    assert len(terms_of("start " + middle + "end")[0]) < HEAD_CHARS + TAIL_CHARS
    words = set(word_hashes("start " + middle + "end").tolist())
    assert set(word_hashes("start end filler").tolist()) <= words
    assert prompt_form([middle])[0, FORM_NAMES.index("log characters")] == pytest.approx(np.log(1 + len(middle)))


def test_form_counts_what_it_says() -> None:
    row = dict(zip(FORM_NAMES, prompt_form(["Is 12 > 3? Yes.\nA 4,5%"])[0].tolist(), strict=True))
    assert row["log numbers"] == pytest.approx(np.log(1 + 4))
    assert row["log digits of the longest number"] == pytest.approx(np.log(1 + 2))
    assert row["log lines"] == pytest.approx(np.log(2))
    assert row["log question marks"] == pytest.approx(np.log(2))
    assert row["log percent signs"] == pytest.approx(np.log(2))
    assert row["log words"] == pytest.approx(np.log(1 + 7))
    assert row["share of capitals"] == pytest.approx(3 / 22)
    assert row["share beyond ASCII"] == 0


def test_terms_are_counted_in_portions_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PromptTerms.fit(PROMPTS)
    monkeypatch.setattr("presage.features.prompt_terms.CHUNK", 7)
    for name, array in PromptTerms.fit(PROMPTS).to_tensors().items():
        np.testing.assert_array_equal(array, whole.to_tensors()[name])


def test_prompts_that_share_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="no two share"):
        PromptTerms.fit(["alpha", "beta"])


def test_a_vocabulary_is_rebuilt_from_tensors_or_refused() -> None:
    terms = PromptTerms.fit(PROMPTS)
    tensors = terms.to_tensors()
    again = PromptTerms.from_tensors(tensors)
    np.testing.assert_array_equal(again.transform(FRESH).toarray(), terms.transform(FRESH).toarray())
    for change in (
        {"words.hashes": tensors["words.hashes"][::-1].copy()},
        {"words.idf": tensors["words.idf"][1:]},
        {"strings.hashes": tensors["strings.hashes"].astype(np.int64)},
    ):
        with pytest.raises(ValueError, match="terms of"):
            PromptTerms.from_tensors(tensors | change)
