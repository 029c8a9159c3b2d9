"""`presage calibrate-cost` from step times to an engine file that a replay reads."""

from pathlib import Path

import pytest
from cli_samples import run
from step_time_samples import TRUE, iterations, measured, times_of, write_steps

from presage.serving_hooks.engine_file import read_engine

TIMES = measured(iterations(1000), times_of(iterations(1000)))


def test_the_engine_file_holds_what_was_measured(tmp_path: Path) -> None:
    steps, to = write_steps(tmp_path / "steps.jsonl", TIMES), tmp_path / "engine.toml"
    ran = run("calibrate-cost", steps, "--to", to, "--source", "a “test”", "--json")
    assert ran.code == 0, ran.err
    engine = read_engine(str(to))
    assert engine.model_dump() == ran.json["engine"]
    assert (engine.cache_tokens, engine.block_tokens, engine.most_requests) == (64000, 16, 64)
    assert engine.cost.prefill_token_s == pytest.approx(TRUE[1])
    assert engine.cost.source.startswith("a “test”; fitted to 808 iterations")
    assert (ran.json["fitted_to"], ran.json["held_out"]) == (808, 192)
    assert ran.json["median_error"] < 1e-6


def test_the_table_says_what_costs_and_how_far_off_it_is(tmp_path: Path) -> None:
    ran = run("calibrate-cost", write_steps(tmp_path / "s.jsonl", TIMES), "--to", tmp_path / "engine.toml")
    assert "8 ms" in ran.out
    assert "90 µs" in ran.out
    assert "On 192 others: median error 0.0%" in ran.out


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    to = tmp_path / "engine.toml"
    assert "give a file that an engine wrote" in run("calibrate-cost", tmp_path / "nowhere", "--to", to).complaint
    few = write_steps(tmp_path / "few.jsonl", measured(TIMES.tokens[:9], TIMES.seconds[:9]))
    assert "9 iterations; a fit needs at least 320" in run("calibrate-cost", few, "--to", to).complaint
    slow = write_steps(tmp_path / "slow.jsonl", measured(TIMES.tokens, 1e5 * TIMES.seconds))
    assert "cost.iteration_s" in run("calibrate-cost", slow, "--to", to).complaint
    assert not to.exists()
