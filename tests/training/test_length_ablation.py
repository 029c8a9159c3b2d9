"""What is withheld is withheld, and what a law hides nowhere else is missed."""

import numpy as np
import pytest

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.history import PROGRESS
from presage.features.lengths import LengthEncoder, length_rows
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.length.train import AGENTS, GROUPS, MODEL, ablate, without

WORDS = "words of the prompt"


@pytest.mark.parametrize("group", GROUPS)
def test_only_the_group_becomes_unknown(group: str) -> None:
    table = generate_lengths(30, 0).table
    encoder = LengthEncoder.fit(table)
    rows = length_rows(table, encoder)
    before = rows.numbers.copy()
    left = without(rows, encoder, group)
    assert np.array_equal(rows.numbers, before, equal_nan=True)
    gone = np.isnan(left.numbers).all(axis=0) & ~np.isnan(rows.numbers).all(axis=0)
    names = {name for name, out in zip(encoder.names, gone, strict=True) if out}
    begin = {
        "sizes of the prompt": ("system_tokens", "user_tokens", "prompt_tokens"),
        WORDS: tuple(f"prompt_{i}" for i in range(16)),
        "words of the last answer": (),  # the law writes no answers
        "progress and tokens so far": PROGRESS,
        AGENTS: tuple(name for name in encoder.names if name.startswith(("agent_", "calls_", "since_"))),
        MODEL: (),
    }[group]
    known = {name for name, at in zip(encoder.names, rows.numbers.T, strict=True) if not np.isnan(at).all()}
    assert names == set(begin) & known
    assert np.array_equal(left.numbers[:, ~gone], rows.numbers[:, ~gone], equal_nan=True)
    assert (left.agent == len(encoder.vocabulary.agents)).all() == (group == AGENTS)
    assert (left.model == len(encoder.models)).all() == (group == MODEL)


def test_every_column_is_in_one_group() -> None:
    table = generate_lengths(30, 0).table
    encoder = LengthEncoder.fit(table)
    filled = length_rows(table, encoder)
    filled = filled.__class__(**{**filled.__dict__, "numbers": np.zeros_like(filled.numbers)})
    counts = sum(np.isnan(without(filled, encoder, group).numbers[0]).astype(int) for group in GROUPS)
    assert (counts == 1).all()


@pytest.mark.slow
def test_the_words_are_missed_on_the_law_and_absent_groups_are_left_out() -> None:
    tables = [generate_lengths(200, seed).table for seed in (0, 1)]
    found = ablate(*tables, QuantileConfig(estimator="forest"))
    assert "words of the last answer" not in found  # the process writes none
    assert found[WORDS].tau_distance["all"].ci95[0] > 0
    assert found[WORDS].pinball[0].value > 0
    again = ablate(*tables, QuantileConfig(estimator="forest"))
    assert again[WORDS] == found[WORDS]
