"""Figures against hand computation, intervals against the table of Student's t."""

import pytest

from presage.replay.metrics import (
    PolicyRun,
    RequestOutcome,
    figures,
    gained,
    in_engine_s,
    interval,
    over_seeds,
    shares,
)


def run() -> PolicyRun:
    return PolicyRun(
        asked=[
            RequestOutcome(
                0, 0, "p", 0.0, 100, 0, hit_tokens=0, began_s=1.0, first_token_s=3.0, ended_s=4.0, starts=True
            ),
            RequestOutcome(0, 1, "q", 5.0, 300, 96, hit_tokens=64, began_s=5.0, first_token_s=6.0, ended_s=9.0),
        ],
        completions_s=[9.0, 1.0],
        end_s=10.0,
        iterations=7,
        prefilled_tokens=340,
        output_tokens=50,
        preemptions=2,
        busy_s=8.0,
        recomputing_s=2.0,
    )


def test_figures_of_a_run() -> None:
    found = figures(run())
    assert found["hit_rate"] == 64 / 400
    assert found["reusable_share"] == 96 / 400
    assert (found["completion_mean_s"], found["completion_p95_s"]) == (
        8.0,
        8.0,
    )  # the second between 4 and 5 is a pause
    with_pauses = figures(run(), with_pauses=True)
    assert (with_pauses["completion_mean_s"], with_pauses["completion_p95_s"]) == (5.0, pytest.approx(8.6))
    assert (with_pauses["completion_p50_s"], with_pauses["completion_p99_s"]) == (5.0, pytest.approx(8.92))
    assert (found["ttft_mean_s"], found["ttft_mean_s of p"], found["ttft_mean_s of q"]) == (2.0, 3.0, 1.0)
    assert (found["queueing_mean_s"], found["longest_wait_s"]) == (0.5, 1.0)
    assert (found["throughput_tokens_per_s"], found["workflows_per_s"], found["makespan_s"]) == (5.0, 0.2, 10.0)
    assert (found["preemptions"], found["recomputed_tokens"]) == (2.0, 340 - (400 - 96))
    assert found["recomputing_share"] == 0.25
    assert (found["start_delay_p99_s"], found["later_ttft_p99_s"], found["later_ttft_mean_s"]) == (1.0, 1.0, 1.0)


def test_workflows_of_one_step_have_no_later_ones() -> None:
    alone = run()
    del alone.asked[1]
    assert "later_ttft_p99_s" not in figures(alone)


def test_a_pause_of_one_branch_is_none_while_another_has_a_request() -> None:
    spans = ((0, 0.0, 4.0), (0, 1.0, 2.0), (0, 3.0, 6.0), (0, 8.0, 9.0), (1, 0.0, 1.0))
    asked = [RequestOutcome(job, 0, "p", came, 1, 0, ended_s=ended) for job, came, ended in spans]
    assert in_engine_s(PolicyRun(asked=asked)) == [7.0, 1.0]


def test_no_interval_of_a_figure_is_negative_but_one_of_a_difference_is() -> None:
    runs = [{"queueing_mean_s": 0.0, "hit_rate": 1.0}, {"queueing_mean_s": 9.0, "hit_rate": 0.5}]
    found = over_seeds(runs)
    assert (found["queueing_mean_s"]["ci95"][0], found["hit_rate"]["ci95"]) == (0.0, [0.0, 1.0])
    assert gained(runs, runs[::-1])["queueing_mean_s"]["ci95"][0] < 0


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["ci95"] == pytest.approx([2.0 - 4.3027 / 3**0.5, 2.0 + 4.3027 / 3**0.5], abs=1e-4)
    assert interval([1.0])["ci95"] is None


def test_over_seeds_keeps_what_all_runs_have() -> None:
    assert over_seeds([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": interval([1.0, 3.0], low=0.0)}


def test_a_share_of_the_oracles_gain_is_of_the_same_seeds() -> None:
    def of(*hits: float) -> dict[int, dict[str, float]]:
        return {seed: figures(run()) | {"hit_rate": hit} for seed, hit in enumerate(hits)}

    found = shares(of(0.3, 0.4, 0.9), of(0.2, 0.3), of(0.4, 0.5))
    assert found["hit_rate"] == pytest.approx(0.5)
    assert found["makespan_s"] is None  # all alike: the oracle gains nothing
    assert shares(of(0.3, 0.3), of(0.2, 0.3), of(0.4, 0.2))["hit_rate"] is None  # gains once, loses once
