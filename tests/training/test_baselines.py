"""Baselines by name: sets and lists of them, and what each is allowed to learn from."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from presage.datasets.synthetic.workflows import generate
from presage.errors import ConfigurationError
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.training.baselines import (
    BASELINES,
    Behind,
    NextAgentBaseline,
    NextAgentEstimator,
    behind,
    choose,
    last_words,
    worst,
)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("default", tuple(BASELINES)),
        ("all", tuple(BASELINES)),
        ("none", ()),
        ("boosted-trees,markov-1,boosted-trees", ("boosted-trees", "markov-1")),
        ("none,presage.training.baselines:markov-1", ("presage.training.baselines:markov-1",)),
    ],
)
def test_a_list_names_baselines_and_sets(names: str, wanted: tuple[str, ...]) -> None:
    assert choose(names) == wanted


@pytest.mark.parametrize("names", ["markov-9", "default,rgcn-2", "", "all,", "Default"])
def test_a_wrong_name_lists_what_there_is(names: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no baseline .*; there are: markov-1, .*, published-graphsage; and the sets default"
    ):
        choose(names)


@pytest.mark.parametrize("name", ["nowhere:mine", "json:mine", "presage.training.baselines:mine", ":mine"])
def test_a_baseline_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"baseline '{name}' cannot be loaded .* module on PYTHONPATH"):
        choose(name)


def test_a_broken_module_of_baselines_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_baselines.py").write_text("1 / 0")
    (tmp_path / "odd_baselines.py").write_text("BASELINES = {'mine': 3}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="baseline 'broken_baselines:mine' cannot be loaded"):
        choose("broken_baselines:mine")
    with pytest.raises(ConfigurationError, match="is a int; wanted a NextAgentBaseline"):
        choose("odd_baselines:mine")


def test_every_baseline_answers_to_its_name() -> None:
    for name, baseline in BASELINES.items():
        assert baseline.make(0, 100).name == name


def test_what_decides_on_the_validation_part_does_not_learn_from_it() -> None:
    drawn = generate("retry", 6, 0).table
    learning = prefixes_of(drawn, Vocabulary.from_table(drawn), 3)
    inner, validation = learning.take(np.arange(4)), learning.take(np.arange(4, 6))
    fitted_on: list[Prefixes] = []

    class Recorder:
        name = "recorder"

        def fit(self, train: Prefixes, validation: Prefixes) -> Recorder:
            fitted_on.append(train)
            return self

        def predict(self, prefixes: Prefixes, moment: str) -> None:
            raise AssertionError

    def make(seed: int, steps: int) -> NextAgentEstimator:
        assert (seed, steps) == (3, learning.steps)
        return Recorder()  # type: ignore[return-value]

    for validates in (True, False):
        NextAgentBaseline(make, validates).fit(3, learning, inner, validation)
    assert [part.workflows for part in fitted_on] == [4, 6]


def test_a_baseline_won_where_the_whole_interval_is_on_its_side() -> None:
    (found,) = behind("markov-3", "1 step ahead", 0.07, (0.05, 0.09), 0.86)
    assert found == Behind("markov-3", "1 step ahead", 0.07, (0.05, 0.09), 0.86)
    assert behind("markov-3", "1 step ahead", 0.07, (-0.01, 0.15), 0.86) == []
    assert behind("markov-3", "1 step ahead", -0.07, (-0.09, -0.05), 0.86) == []
    assert behind("markov-3", "1 step ahead", math.nan, (math.nan, math.nan), 0.86) == []


def test_the_last_words_name_baseline_horizon_margin_and_what_to_try() -> None:
    lost = worst(
        [
            Behind("markov-3", "2 steps ahead before the output", 0.18, (0.1, 0.26), 0.7),
            Behind("markov-1", "1 step ahead before the output", 0.07, (0.05, 0.09), 0.86),
            *(Behind(f"tree-{place}", "3 steps ahead", 0.01, (0.001, 0.02), 0.5) for place in range(6)),
        ]
    )
    lines = last_words(lost, "more workflows")
    assert lines[0] == "LOST: 8 comparisons with a baseline, beyond the 95 % interval"
    assert lines[1] == "  markov-3 is better 2 steps ahead before the output by 0.18 (95 % 0.1 to 0.26)"
    assert re.fullmatch(r"  and \d+ more", lines[-2])
    assert lines[-1] == "What to try: more workflows"
    assert last_words([], "more workflows") == []
