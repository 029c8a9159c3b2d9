"""Families of tasks: by default by the benchmark's name, else by a pattern of one's own."""

import pytest

from presage.datasets.outcomes.split import families
from presage.errors import ConfigurationError


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
