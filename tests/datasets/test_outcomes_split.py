"""Splits of outcomes by prompt, the choice of models, families of tasks, and the law that makes outcomes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.outcomes import Outcomes, prompt_keys
from presage.datasets.outcomes.split import choose_models, families, split_outcomes
from presage.datasets.synthetic.outcomes import generate_outcomes
from presage.errors import ConfigurationError, TraceError


def matrix(correct: list[list[float]]) -> Outcomes:
    labels = np.array(correct, np.float32)
    blank = np.full_like(labels, np.nan)
    models = tuple("abcdef"[: labels.shape[1]])
    return Outcomes(tuple(f"p{i}" for i in range(len(labels))), models, labels, blank, blank, (None,) * len(labels))


@given(st.integers(2, 60), st.floats(0.05, 0.95), st.integers(0, 5))
def test_every_prompt_stands_on_one_side(prompts: int, fraction: float, seed: int) -> None:
    outcomes = generate_outcomes(prompts, 1).outcomes
    kept, apart = split_outcomes(outcomes, fraction, seed)
    assert len(kept) > 0 < len(apart)
    assert sorted(kept.prompts + apart.prompts) == sorted(outcomes.prompts)


def test_the_side_depends_on_prompt_and_seed_alone() -> None:
    outcomes = generate_outcomes(2000, 0).outcomes
    apart = set(split_outcomes(outcomes, 0.3, 0)[1].prompts)
    assert len(apart) == pytest.approx(600, abs=80)
    some = outcomes.take(np.arange(1999, 500, -1))
    assert set(split_outcomes(some, 0.3, 0)[1].prompts) == apart & set(some.prompts)
    assert set(split_outcomes(outcomes, 0.3, 1)[1].prompts) != apart


def test_no_split_divides_a_group() -> None:
    outcomes = matrix([[1, 0]] * 60)
    grouped = replace(outcomes, group=tuple(f"g{i // 3}" if i < 30 else None for i in range(60)))
    for seed in range(10):
        kept, apart = split_outcomes(grouped, 0.4, seed)
        assert not set(kept.group) & set(apart.group) - {None}
        assert sorted(kept.prompts + apart.prompts) == sorted(outcomes.prompts)
    with pytest.raises(TraceError, match="1 prompt or group of prompts"):
        split_outcomes(grouped.take(np.arange(3)), 0.5, 0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_fraction_outside_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        split_outcomes(matrix([[1, 0], [0, 1]]), fraction, 0)


def test_a_single_prompt_cannot_be_divided() -> None:
    with pytest.raises(TraceError, match="1 prompt or group of prompts; expected at least 2"):
        split_outcomes(matrix([[1, 0]]), 0.5, 0)


def test_models_with_few_labels_are_left_out_with_prompts_only_they_answered() -> None:
    nan = float("nan")
    chosen = choose_models(matrix([[1, 0, nan], [0, 1, nan], [nan, nan, 1]]), minimum=2)
    assert chosen.outcomes.models == ("a", "b")
    assert chosen.outcomes.prompts == ("p0", "p1")
    assert chosen.left_out == {"c": 1}


@pytest.mark.parametrize(
    ("correct", "told"),
    [
        ([[1.0], [0.0]], "outcomes of one model only"),
        ([[1, 1], [1, 1]], "correct is 1 in every row"),
        ([[1, float("nan")], [0, float("nan")]], "1 of 2 models with 2 labels or more"),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(correct: list[list[float]], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        choose_models(matrix(correct), minimum=2)


def test_columns_of_other_models_are_blank() -> None:
    found = matrix([[1, 0]]).of_models(["b", "z"])
    assert found.models == ("b", "z")
    np.testing.assert_array_equal(found.correct, np.float32([[0, np.nan]]))


def test_the_law_is_as_it_says() -> None:
    drawn = generate_outcomes(20_000, 3, missing=0.25)
    correct = drawn.outcomes.correct
    known = ~np.isnan(correct)
    assert known.mean() == pytest.approx(0.75, abs=0.01)
    assert len(set(prompt_keys(drawn.outcomes).tolist())) == 20_000
    for low in np.arange(0, 1, 0.1):
        inside = known & (drawn.probabilities >= low) & (drawn.probabilities < low + 0.1)
        assert correct[inside].mean() == pytest.approx(drawn.probabilities[inside].mean(), abs=0.03)
    best = drawn.probabilities.mean(axis=0)
    assert drawn.probabilities.max(axis=1).mean() > best.max() + 0.05  # there is room for a router
    code = np.array([task == "code" for task in drawn.outcomes.task])
    specialist = drawn.outcomes.models.index("specialist")
    assert drawn.probabilities[code, specialist].mean() > drawn.probabilities[~code, specialist].mean() + 0.2
    np.testing.assert_array_equal(np.isnan(drawn.outcomes.cost), ~known)


def test_the_same_seed_draws_the_same() -> None:
    one, other = (generate_outcomes(50, 7) for _ in range(2))
    assert one.outcomes.prompts == other.outcomes.prompts
    np.testing.assert_array_equal(one.outcomes.correct, other.outcomes.correct)
    assert generate_outcomes(50, 8).outcomes.prompts != one.outcomes.prompts


@pytest.mark.parametrize(("prompts", "missing"), [(0, 0.1), (5, 1.0), (5, -0.1)])
def test_a_law_out_of_range_is_refused(prompts: int, missing: float) -> None:
    with pytest.raises(ConfigurationError):
        generate_outcomes(prompts, 0, missing=missing)


def test_the_benchmark_names_the_family_and_its_parts_are_one() -> None:
    assert families(["mmlu/law", "mmlu/art", "gsm8k", None]) == ["mmlu", "mmlu", "gsm8k", None]
    assert families(["arc_easy_train", "arc_easy_test", "mbpp"]) == ["arc_easy", "arc_easy", "mbpp"]


def test_of_one_benchmark_each_subject_is_a_family() -> None:
    assert families(["mmlu/law", "mmlu/art_test", None]) == ["mmlu/law", "mmlu/art", None]


def test_a_pattern_names_it_by_its_first_group_or_by_all_that_matches() -> None:
    assert families(["arc_easy", "arc_hard", "mbpp", None], "^[^_]+") == ["arc", "arc", "mbpp", None]
    assert families(["a/x-1", "b/x-2", "b"], "/(x)") == ["x", "x", None]
    with pytest.raises(ConfigurationError, match="no regular expression"):
        families(["a"], "(")
