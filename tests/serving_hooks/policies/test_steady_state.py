"""Where open workflows settle: closed forms where there are some, laws elsewhere, and the two ends of thrashing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.errors import InputError
from presage.serving_hooks.policies.steady_state import Rates, Settled, settle

HUGE = 1e12
RATES = Rates(0.01, 1e-4, 1e-4, 100.0, 200.0, 64, np.array([1.0, 2.0, 3.0]), end=0.1)
"""A step decodes 100 tokens in 1.01 s at least, prefills 200 in 0.02 s and pauses for 2 s in the mean."""


def one(rates: Rates, cache: float, workflows: float, context: float = 1000.0) -> dict[str, float]:
    found = settle(rates, cache, np.array([workflows]), np.array([context]))
    return {name: float(getattr(found, name)[0]) for name in Settled.__dataclass_fields__}


def test_one_workflow_takes_a_step_after_another() -> None:
    """It is served in 0.02 s of prefill, 100 iterations of 0.01 s that it shares with nobody, and 0.01 s of decoding;
    with queueing of itself left out, n = X (Z + p / (1 − X p) + o c_0 / (1 − X (p + o c_1)))."""
    found = one(RATES, HUGE, 1.0)
    x = found["steps_per_s"]
    assert x * (2 + 0.02 / (1 - 0.02 * x) + 1 / (1 - 0.03 * x)) == pytest.approx(1.0, rel=1e-6)
    assert x == pytest.approx(1 / 3.03, rel=0.01)
    assert found["miss_share"] == pytest.approx(0.0, abs=1e-4)
    assert found["decoding"] == pytest.approx(x / (1 - 0.03 * x), rel=1e-6)


def test_beyond_what_decodes_at_once_more_workflows_bring_nothing() -> None:
    top = 64 / (1.0 + 64 * (0.02 + 0.01))
    assert one(RATES, HUGE, 10_000.0)["steps_per_s"] == pytest.approx(top, rel=1e-3)
    assert one(RATES, HUGE, 10_000.0)["decoding"] == pytest.approx(64, rel=1e-2)
    few = one(RATES, 8_000.0, 10_000.0)  # 7.6 contexts decode at once
    assert few["decoding"] == pytest.approx(7.6, rel=1e-2)


def test_a_context_stays_for_as_long_as_the_cache_takes_to_fill() -> None:
    """Without waits, X contexts a second of 1,000 tokens come into a cache, and each leaves it with its next use or
    after T: with pauses of 2 s, none ended, and T = 1.5 s all are lost."""
    rates = replace(RATES, pauses_s=np.full(100, 2.0), end=1e-9, iteration_s=1e-9, decode_token_s=0.0, new_tokens=1.0)
    rates = replace(rates, prefill_token_s=1e-9)
    fits = one(rates, 10_050.0, 10.0)
    assert fits["steps_per_s"] == pytest.approx(5.0, rel=1e-3)
    assert fits["miss_share"] == pytest.approx(0.0, abs=1e-3)
    half = one(rates, 5_000.0, 10.0)
    assert half["stays_s"] == pytest.approx(1.0, rel=1e-2), "5 contexts a second fill 5 places in a second"
    assert half["miss_share"] == pytest.approx(1.0, abs=1e-2)


def test_beyond_what_fits_an_engine_falls_off_a_cliff() -> None:
    """Ten contexts fit; a fifth more of them, and next to nothing stays: each step computes its context again."""
    pauses_s = np.sort(np.random.default_rng(0).exponential(2.0, 600))
    rates = replace(RATES, new_tokens=400.0, pauses_s=pauses_s, end=1 / 30)
    fits, beyond = (one(rates, 200_000.0, n, context=20_000.0) for n in (10.0, 12.0))
    assert fits["miss_share"] < 0.05
    assert beyond["miss_share"] > 0.95
    assert fits["steps_per_s"] > 5 * beyond["steps_per_s"]
    recomputed_s = rates.prefill_token_s * 20_000
    assert beyond["steps_per_s"] == pytest.approx(1 / recomputed_s, rel=0.15), "the engine does little else"


def test_what_a_prompt_does_not_read_is_not_computed_again() -> None:
    lost = replace(RATES, miss_share=1.0)
    whole, half = (one(replace(lost, read_share=share), 4_000.0, 32.0) for share in (1.0, 0.5))
    assert half["steps_per_s"] > whole["steps_per_s"]


def test_what_is_read_every_third_step_has_to_stay_for_three() -> None:
    """Agents with conversations of their own: a third of the context is used a step, and again three steps later."""
    pauses_s = np.sort(np.random.default_rng(0).exponential(2.0, 600))
    rates = replace(RATES, pauses_s=pauses_s, end=1 / 30, read_share=1 / 3, apart=3.0)
    every, third = (one(replace(rates, latest_share=share), 12_000.0, 12.0) for share in (1.0, 0.0))
    assert every["miss_share"] < 0.1
    assert third["miss_share"] > every["miss_share"] + 0.1


@pytest.mark.parametrize(
    ("cache", "stays_s", "miss"), [(7_500.0, 1.5, 1.0), (12_500.0, 3.0, 0.5), (20_500.0, None, 0.0)]
)
def test_what_the_next_step_reads_stays_where_not_all_fits(cache: float, stays_s: float | None, miss: float) -> None:
    """Half of what a prompt reads is read by the next step, 2 s later, half by the third one, after 6 s.

    Of 5,000 tokens a second, 1.5 s fill 7,500; in 12,500 the one half lies for 2 s and the other for 3 s.
    """
    rates = replace(RATES, pauses_s=np.full(100, 2.0), end=1e-9, iteration_s=1e-9, decode_token_s=0.0, new_tokens=1.0)
    rates = replace(rates, prefill_token_s=1e-9, latest_share=0.5, apart=3.0)
    found = one(rates, cache, 10.0)
    assert found["miss_share"] == pytest.approx(miss, abs=0.02)
    if stays_s is not None:
        assert found["stays_s"] == pytest.approx(stays_s, rel=0.02)


def test_who_gives_up_its_place_after_a_while_lets_others_in_and_loses_its_context() -> None:
    """A tenth of the pauses takes 100 s, the others 1 s: without them a place is used 90 % of the time more often."""
    rates = replace(RATES, pauses_s=np.sort(np.concatenate([np.full(90, 1.0), np.full(10, 100.0)])))
    keeping, giving = (settle(rates, HUGE, np.array([10.0]), np.array([1000.0]), keeps_s) for keeps_s in (100.0, 1.0))
    assert keeping.miss_share[0] == pytest.approx(0.0, abs=1e-4)
    assert giving.miss_share[0] == pytest.approx(0.1, abs=0.01)
    cycles_s = [10.0 / float(of.steps_per_s[0]) for of in (keeping, giving)]
    assert cycles_s[0] - cycles_s[1] == pytest.approx(0.1 * 99.0, rel=0.05)
    assert float(giving.served_s[0]) == pytest.approx(cycles_s[1] - 1.0, rel=1e-3)


positive = st.floats(1e-6, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Rates,
        positive,
        st.floats(0, 1e-2),
        st.floats(0, 1e-2),
        st.floats(1, 5000),
        st.floats(0, 50_000),
        st.integers(1, 512),
        st.lists(st.floats(0, 3600), min_size=1, max_size=40).map(lambda pauses: np.array(sorted(pauses))),
        st.floats(1e-3, 1.0),
        st.floats(0, 1),
        st.floats(0.01, 1),
        st.floats(0, 1),
        st.floats(2, 50),
    ),
    st.floats(100, 1e7),
    st.floats(1, 1e6),
)
def test_law_every_figure_is_possible(rates: Rates, cache: float, context: float) -> None:
    n = np.array([1.0, 2.0, 10.0, 100.0, 1000.0])
    found = settle(rates, cache, n, np.full(5, context))
    for values in (found.steps_per_s, found.miss_share, found.decoding, found.stays_s, found.served_s):
        assert np.isfinite(values).all()
    assert (found.steps_per_s > 0).all()
    assert ((found.miss_share >= 0) & (found.miss_share <= 1)).all()
    assert (found.decoding <= rates.most_decoding * (1 + 1e-9)).all()
    # No more steps than pauses and the least service allow, nor than the engine can compute.
    work_s = rates.prefill_token_s * max(rates.new_tokens, 1.0) + rates.output_tokens * rates.decode_token_s
    assert (found.steps_per_s * (rates.pauses_s.mean() + work_s) <= n * (1 + 1e-6)).all()
    assert (found.steps_per_s * work_s <= 1 + 1e-6).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"iteration_s": 0.0},
        {"prefill_token_s": float("nan")},
        {"end": 0.0},
        {"end": 2.0},
        {"miss_share": -0.1},
        {"latest_share": 1.1},
        {"apart": 1.5},
        {"pauses_s": np.array([])},
    ],
)
def test_what_no_measurement_gives_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(RATES, **wrong)
