"""Scores are those of the paper's equations, computed by hand, and a small error of a forecast stays small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.serving_hooks.policies.score import UNIT, UNKNOWN, Lookahead, ScoreConfig, lookahead

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
    assert of(FORECAST).worth(agents)[0] / UNIT == pytest.approx(score, abs=2e-6)


def test_value_is_equation_1_by_hand() -> None:
    assert of(FORECAST).one_step(["coder", "tester"]) / UNIT == pytest.approx(0.75, abs=2e-6)
    assert of(FORECAST).one_step(["writer"]) == 0


def test_agents_that_may_come_next_are_those_likely_enough() -> None:
    assert set(of(FORECAST).next_agents(0.01)) == {"coder", "tester"}
    assert UNKNOWN.next_agents(0.01) == []


def test_a_shorter_horizon_and_another_decay_are_options() -> None:
    assert of(FORECAST, horizon=1).worth(["tester"])[0] / UNIT == pytest.approx(0.25, abs=2e-6)
    assert of(FORECAST, decay=1.0).worth(["tester"])[0] / UNIT == pytest.approx(0.25 + 0.75 * 0.4 + 0.06, abs=2e-6)
    assert of(FORECAST, horizon=9).worth(["tester"]) == of(FORECAST).worth(["tester"])


def test_the_mean_step_of_a_touch_is_that_of_the_one_step_it_can_happen_at() -> None:
    score, moment = of([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]).worth(["writer"])
    assert moment / score == pytest.approx(3)
    score, moment = of(FORECAST).worth(["coder"])
    assert moment / score == pytest.approx((0.5 + 2 * 0.105 + 3 * 0.147) / 0.752, abs=1e-5)


def test_after_a_certain_end_nothing_counts() -> None:
    assert of([[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]]).worth(AGENTS) == (0, 0)


def test_no_forecast_and_a_broken_one_count_as_one_certain_touch() -> None:
    assert lookahead(np.empty((0, 0), np.float32), (), ScoreConfig()) is UNKNOWN
    assert of([[float("nan"), 0, 0, 0]]) is UNKNOWN
    assert UNKNOWN.worth(["whoever"]) == (UNIT, UNIT)


def test_an_agent_that_reads_what_others_wrote_counts_for_blocks_it_has_not_touched() -> None:
    plain, shared = of(FORECAST), of(FORECAST).shared({"tester": 0.5, "nobody": 1.0})
    # half of what the tester does touches: .125, .2, .05 at the three steps. Of the workflows that have not ended after
    # the first, .125 / .75 were touched, after the second .2 / .8 of the others.
    untouched = 1 - 0.125 / 0.75
    first = 0.125 + 0.525 * 0.2 * untouched + 0.294 * 0.05 * untouched * (1 - 0.2 / 0.8)
    assert shared.worth([])[0] / UNIT == pytest.approx(first, abs=2e-6)
    tester, coder = (plain.worth([agent])[0] / UNIT for agent in ("tester", "coder"))
    assert shared.worth(["tester"])[0] / UNIT == pytest.approx(first + tester / 2, abs=2e-6)
    assert shared.worth(["coder"])[0] / UNIT == pytest.approx(first + coder, abs=2e-6)


def test_of_what_all_share_the_first_touch_alone_counts() -> None:
    everyone = of(FORECAST).shared(dict.fromkeys(AGENTS, 1.0))
    assert everyone.worth([]) == everyone.worth(AGENTS)
    assert everyone.worth([])[0] / UNIT == pytest.approx(0.75, abs=2e-6)  # then it is touched, or it has ended
    rates = dict.fromkeys(AGENTS, 1.0)
    soon, long = ([[1.0, 0, 0, 0], *[[0, 0, 0, 1.0]] * 2], [[1.0, 0, 0, 0]] * 3)
    assert of(soon).shared(rates).worth([]) == of(long).shared(rates).worth([]) == (UNIT, UNIT)


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
        moved += lookahead(true, AGENTS, config).worth(agents)[0] - lookahead(guess, AGENTS, config).worth(agents)[0]
    assert abs(moved) / UNIT <= (1 - decay**4) / (2 * (1 - decay)) * error + len(uses) * len(AGENTS) / UNIT
