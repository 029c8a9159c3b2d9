"""Scores are those of the paper's equations, computed by hand, and a small error of a forecast stays small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.serving_hooks.policies.score import NO_USE, UNIT, UNKNOWN, Lookahead, ScoreConfig, TouchRates, lookahead

AGENTS = ("coder", "tester", "writer")


def of(rows: list[list[float]], horizon: int = 3, decay: float = 0.7) -> Lookahead:
    return lookahead(np.array(rows, np.float32), AGENTS, ScoreConfig(horizon, decay))


FORECAST = [[0.5, 0.25, 0.0, 0.25], [0.2, 0.4, 0.2, 0.2], [0.5, 0.1, 0.0, 0.4]]
# s = 1, .75, .75 · .8 = .6; γ s = 1, .525, .294


@pytest.mark.parametrize(
    ("agents", "score"),
    [
        (["coder"], 0.5 + 0.525 * 0.2 + 0.294 * 0.5),
        (["tester"], 0.25 + 0.525 * 0.4 + 0.294 * 0.1),
        (["coder", "tester", "writer"], 0.75 + 0.525 * 0.8 + 0.294 * 0.6),
        ([], 0.0),
        (["an agent no forecast knows"], 0.0),
    ],
)
def test_score_is_equation_2_by_hand(agents: list[str], score: float) -> None:
    assert of(FORECAST).score(agents) / UNIT == pytest.approx(score, abs=2e-6)


def test_value_is_equation_1_by_hand() -> None:
    assert of(FORECAST).one_step(["coder", "tester"]) / UNIT == pytest.approx(0.75, abs=2e-6)
    assert of(FORECAST).one_step(["writer"]) == 0


def test_agents_that_may_come_next_are_those_likely_enough() -> None:
    assert set(of(FORECAST).next_agents(0.01)) == {"coder", "tester"}
    assert UNKNOWN.next_agents(0.01) == []


def test_a_shorter_horizon_and_another_decay_are_options() -> None:
    assert of(FORECAST, horizon=1).score(["tester"]) / UNIT == pytest.approx(0.25, abs=2e-6)
    assert of(FORECAST, decay=1.0).score(["tester"]) / UNIT == pytest.approx(0.25 + 0.75 * 0.4 + 0.06, abs=2e-6)
    assert of(FORECAST, horizon=9).score(["tester"]) == of(FORECAST).score(["tester"])


def test_after_a_certain_end_nothing_counts() -> None:
    assert of([[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]]).score(AGENTS) == 0
    assert of([[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]]).first_use(AGENTS) == NO_USE


def test_no_forecast_and_a_broken_one_count_as_one_certain_touch() -> None:
    assert lookahead(np.empty((0, 0), np.float32), (), ScoreConfig()) is UNKNOWN
    assert of([[float("nan"), 0, 0, 0]]) is UNKNOWN
    assert UNKNOWN.score(["whoever"]) == UNIT
    assert UNKNOWN.first_use(["whoever"]) == (1.0, 1.0)


def test_the_first_use_is_that_of_the_paths_by_hand() -> None:
    """Given that the workflow returns: of .75, .5 / .75 is the coder's; of the other third 1 - .2 - .2 goes on."""
    use = of(FORECAST).first_use(["coder"])
    first, second = 0.5 / 0.75, (1 - 0.5 / 0.75) * 0.2
    third = (1 - 0.5 / 0.75) * (1 - 0.2 - 0.2) * 0.5
    assert use.probability == pytest.approx(first + second + third, abs=1e-6)
    assert use.step == pytest.approx((first + 2 * second + 3 * third) / (first + second + third), abs=1e-6)
    assert of([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]).first_use(["writer"]) == pytest.approx((1, 3))
    assert of(FORECAST).first_use(["an agent no forecast knows"]) == NO_USE


def test_an_agent_that_reads_what_others_wrote_counts_for_blocks_it_has_not_touched() -> None:
    shared = of(FORECAST).with_rates({"tester": TouchRates(1.0, 1.0, 0.5), "nobody": TouchRates(1.0, 1.0, 1.0)})
    half = of([[0.5, 0.125, 0.0, 0.25], [0.2, 0.2, 0.2, 0.2], [0.5, 0.05, 0.0, 0.4]])  # of the tester's steps
    assert shared.first_use([]) == pytest.approx(half.first_use(["tester"]), abs=1e-6)
    assert shared.first_use(["tester"]) == pytest.approx(of(FORECAST).first_use(["tester"]), abs=1e-6)


def test_an_agent_that_begins_anew_at_each_call_does_not_keep_its_old_conversations() -> None:
    anew = of([[1.0, 0, 0, 0]] * 3).with_rates({"coder": TouchRates(0.1, 0.0, 0.0)})
    assert anew.first_use(["coder"]).probability == pytest.approx(1 - 0.9**3, abs=1e-6)


def test_what_all_agents_read_is_read_when_the_workflow_returns() -> None:
    everyone = of(FORECAST).with_rates(dict.fromkeys(AGENTS, TouchRates(1.0, 1.0, 1.0)))
    assert everyone.first_use([]) == everyone.first_use(AGENTS) == pytest.approx((1.0, 1.0), abs=1e-6)


def simplex(draw: st.DrawFn, rows: int) -> NDArray[np.float64]:
    raw = np.array(draw(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=rows, max_size=rows)))
    return (raw + np.eye(4)[-1] * (raw.sum(axis=1, keepdims=True) == 0)) / np.maximum(raw.sum(axis=1), 1)[:, None]


@st.composite
def true_and_estimated(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = draw(st.integers(1, 4))
    return simplex(draw, rows), simplex(draw, rows)


@given(
    st.lists(st.tuples(true_and_estimated(), st.sets(st.sampled_from(AGENTS))), min_size=1, max_size=4),
    st.sampled_from([0.3, 0.7, 0.9]),
)
def test_an_error_of_the_forecasts_moves_a_score_no_further_than_the_paper_proves(
    uses: list[tuple[tuple[NDArray[np.float64], NDArray[np.float64]], set[str]]], decay: float
) -> None:
    """PBKV, lemma G.2: |Score − Score'| ≤ (1 − γ^K) / (2 (1 − γ)) · Σ_w Σ_k γ^(k−1) ‖P − P'‖₁, up to rounding.

    Ranking stability (corollary G.3) is this bound for two blocks: scores further apart than both bounds keep order.
    """
    config, error, moved = ScoreConfig(4, decay), 0.0, 0
    for (true, guess), agents in uses:
        error += sum(decay**k * row for k, row in enumerate(np.abs(true - guess).sum(axis=1).tolist()))
        moved += lookahead(true, AGENTS, config).score(agents) - lookahead(guess, AGENTS, config).score(agents)
    assert abs(moved) / UNIT <= (1 - decay**4) / (2 * (1 - decay)) * error + len(uses) * len(AGENTS) / UNIT
