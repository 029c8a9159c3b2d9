"""What a replay's figures let pass and what they refuse, against an interval reckoned by hand."""

from dataclasses import replace

import pytest

from presage.registry.evidence import Replayed, judge_replay
from presage.registry.gates import Gate

STOCK = Replayed(
    (0.30, 0.32, 0.31), (20.0, 21.0, 20.5), (40.0, 41.0, 43.0), (1.0, 1.5, 2.0), later_first_token_p99_s=(4.0, 4.5, 5.0)
)


def better_by(hits: tuple[float, ...], seconds: tuple[float, ...], than: Replayed = STOCK) -> Replayed:
    return replace(
        than,
        hit_rate=tuple(one + more for one, more in zip(than.hit_rate, hits, strict=True)),
        completion_s=tuple(one - less for one, less in zip(than.completion_s, seconds, strict=True)),
    )


def gates(*of: Replayed | None) -> dict[str, Gate]:
    return {gate.name: gate for gate in judge_replay(*of)}  # type: ignore[arg-type]


def test_the_interval_is_students_t_with_the_spread_of_halves_undivided() -> None:
    found = gates(better_by((0.10, 0.12, 0.14), (1.0, 2.0, 3.0)), None, STOCK)
    # t(0.975; 2) = 4.302653; standard deviations 0.02 and 1; means 0.12 and -2.
    assert found["replay-hit-rate-stock"].value == pytest.approx(0.12 + 4.302653 * 0.02)
    assert found["replay-completion-stock"].value == pytest.approx(-2 - 4.302653)
    assert all(gate.passed for gate in found.values())


def test_the_first_of_its_kind_is_held_against_vllm_alone() -> None:
    assert set(gates(STOCK, None, STOCK)) == {
        "replay-ran",
        "replay-hit-rate-stock",
        "replay-completion-stock",
        "replay-completion-p99-stock",
        "replay-start-p99-stock",
        "replay-later-first-token-p99-stock",
    }


def test_a_longer_tail_is_refused_though_the_mean_is_better() -> None:
    late = replace(better_by((0.1,) * 3, (5.0,) * 3), later_first_token_p99_s=(8.0, 8.6, 9.1))
    found = gates(late, None, STOCK)
    assert [name for name, gate in found.items() if not gate.passed] == ["replay-later-first-token-p99-stock"]
    said = found["replay-later-first-token-p99-stock"].reason
    assert said.startswith("p99 of first tokens of later steps +4.067 s beside vLLM's alone")


def test_starts_that_wait_longer_are_refused_though_all_later_steps_are_faster() -> None:
    late = replace(better_by((0.1,) * 3, (5.0,) * 3), start_delay_p99_s=(9.0, 9.5, 10.1))
    assert [name for name, gate in gates(late, None, STOCK).items() if not gate.passed] == ["replay-start-p99-stock"]


def test_the_same_figures_pass() -> None:
    assert all(gate.passed for gate in gates(STOCK, STOCK, STOCK).values())


def test_what_is_lost_beyond_the_interval_is_refused_and_what_is_within_it_is_not() -> None:
    sure = gates(better_by((-0.05, -0.051, -0.049), (-1.0, -1.01, -0.99)), STOCK, better_by((-0.1,) * 3, (-5.0,) * 3))
    assert {name for name, gate in sure.items() if not gate.passed} == {
        "replay-hit-rate-champion",
        "replay-completion-champion",
    }
    assert "-0.0500 beside the champion's" in sure["replay-hit-rate-champion"].reason
    unsure = gates(better_by((-0.05, 0.02, -0.06), (-1.0, 1.0, -2.0)), STOCK, STOCK)
    assert all(gate.passed for gate in unsure.values())


def test_worse_than_vllm_alone_is_refused_though_the_champion_was_no_better() -> None:
    worse = better_by((-0.05, -0.051, -0.049), (0.0,) * 3)
    assert {name for name, gate in gates(worse, worse, STOCK).items() if not gate.passed} == {"replay-hit-rate-stock"}


def test_a_policy_that_failed_with_its_forecasts_is_refused() -> None:
    failed = replace(STOCK, switched_off=("eviction",))
    found = gates(failed, None, STOCK)["replay-ran"]
    assert not found.passed
    assert found.reason == "eviction failed and switched off with its forecasts"


@pytest.mark.parametrize("runs", [2, 4])
def test_runs_that_are_not_the_same_are_a_mistake_of_the_caller(runs: int) -> None:
    with pytest.raises(ValueError, match="the same of both are wanted, 3 or more"):
        judge_replay(Replayed(*((1.0,) * runs for _ in range(5))), None, STOCK)
