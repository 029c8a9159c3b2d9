"""Which model a prompt goes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ConfigurationError
from presage.predictors.router.choice import choose

LIKELY = {"small": 0.5, "large": 0.9, "slow": 0.9}
COSTS = {"small": 1.0, "large": 10.0, "slow": 14.0}
SHARES = st.floats(0, 1)


def test_without_a_limit_the_router_picks_and_no_cost_is_needed() -> None:
    assert choose(LIKELY, {}, "small").model == "small"


def test_of_equally_likely_ones_the_cheaper() -> None:
    assert choose(LIKELY, {"small": 1.0, "large": 15.0, "slow": 14.0}, "small", max_cost=20).model == "slow"


def test_a_budget_takes_the_likeliest_within_it() -> None:
    assert choose(LIKELY, COSTS, "small", max_cost=10).model == "large"
    assert choose(LIKELY, COSTS, "small", max_cost=9).model == "small"


def test_a_wish_for_quality_takes_the_cheapest_that_has_it() -> None:
    assert choose(LIKELY, COSTS, "small", min_quality=0.4).model == "small"
    assert choose(LIKELY, COSTS, "small", min_quality=0.6).model == "large"


def test_where_no_model_keeps_the_limit_the_nearest_is_taken_and_said() -> None:
    dear, poor = choose(LIKELY, COSTS, "small", max_cost=0.5), choose(LIKELY, COSTS, "small", min_quality=0.95)
    assert (dear.model, dear.kept) == ("small", False)
    assert (poor.model, poor.kept) == ("large", False)
    assert "no model costs at most 0.5" in dear.reason


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_cost": 1.0, "min_quality": 0.5}, "only one of them"),
        ({"max_cost": 1.0}, "no cost for slow"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(limits: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        choose(LIKELY, {"small": 1.0, "large": 2.0}, "small", **limits)


@given(st.dictionaries(st.text(min_size=1), st.tuples(SHARES, st.floats(0, 100)), min_size=1), SHARES)
def test_law_a_kept_limit_is_kept_at_the_least_price(models: dict[str, tuple[float, float]], wanted: float) -> None:
    likely, costs = ({name: of[i] for name, of in models.items()} for i in (0, 1))
    found = choose(likely, costs, next(iter(likely)), min_quality=wanted)
    assert found.kept == (max(likely.values()) >= wanted)
    if found.kept:
        assert likely[found.model] >= wanted
        assert costs[found.model] == min(costs[name] for name in likely if likely[name] >= wanted)
