"""Every benchmark starts: small where it can be small, else its `--help` shows that all it imports is there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1]

SMALL = {
    "adapter_speed": "--steps 200",
    "batch_client": "--rows 20",
    "gateway_decisions": "--workflows 50",
    "gateway_identity": "--workflows 1 --only react",
    "gateway_latency": "--seconds 0.5 --turn 0.5 --rate 20 --streams 2",
    "gateway_soak": "--seconds 1 --connections 4 --streams 2",
    "identifiers": "--kinds nothing --workflows 20 --test 20",
    "ingest_speed": "--steps 500 --repeats 1",
    "nightly_ingestion": "--sizes 0 --day 200 --repeats 1",
    "policies": "--workflows 5",
    "recorder": "--seconds 0.1 --rounds 1 --rate 100 --size 8",
    "remaining_length": "--rows 100",
    "request_way": "--show",
}
"""Arguments with which a benchmark takes a few seconds."""

TAKES_LONG = {
    "drift",
    "forecast_latency",
    "forecaster",
    "framework_apps",
    "frameworks",
    "gateway_choice",
    "length_latency",
    "start_up",
    "synthetic_processes",
    "tool_service",
    "training_speed",
    "webhooks",
}
"""Fifteen seconds or more with any arguments."""

NEEDS_DATA = {
    "ablation",
    "continual",
    "identity",
    "new_agents",
    "profiles",
    "real_traces",
    "return_times",
    "reworded_prompts",
    "router",
    "router_shift",
}

NEEDS_VLLM = {
    "batch_engine",
    "batch_replay",
    "cost_model",
    "fair_shares",
    "feedback_loop",
    "fleet",
    "forecast_to_decision",
    "gateway_engines",
    "gpu_hooks",
    "messy_loop",
    "prefill_ahead",
    "program_throughput",
    "real_engine",
    "real_model_states",
    "recorder_in_engine",
    "regimes",
    "reload",
    "replay",
    "replay_speed",
    "soak",
    "vllm_memory",
    "vllm_overhead",
}

STARTS_SERVERS = {"gateway_latency", "gateway_soak"}


def test_every_benchmark_is_in_one_of_the_lists() -> None:
    programs = [path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert sorted([*SMALL, *TAKES_LONG, *NEEDS_DATA, *NEEDS_VLLM]) == sorted(programs)


def output(folder: Path, program: Path, *arguments: str) -> str:
    line = [sys.executable, str(program), *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def last_object(stdout: str) -> dict[str, Any]:
    last = json.loads(stdout.splitlines()[-1])
    assert isinstance(last, dict)
    return last


def ends(folder: Path, lines: dict[str, str]) -> dict[str, Any]:
    """How each benchmark ends with these arguments, called one after the other in one process."""
    return last_object(output(folder, Path(__file__).with_name("call_benchmarks.py"), json.dumps(lines)))


@pytest.mark.slow
def test_small_runs_end_with_one_json_object(tmp_path: Path) -> None:
    lines = {name: line for name, line in SMALL.items() if name not in STARTS_SERVERS}
    assert ends(tmp_path, lines) == dict.fromkeys(lines, "an object")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(STARTS_SERVERS))
def test_a_small_run_with_servers_ends_with_one_json_object(tmp_path: Path, name: str) -> None:
    assert last_object(output(tmp_path, BENCHMARKS / f"{name}.py", *SMALL[name].split()))


@pytest.mark.slow
def test_those_that_take_long_or_need_data_show_their_help(tmp_path: Path) -> None:
    lines = dict.fromkeys(TAKES_LONG | NEEDS_DATA, "--help")
    assert ends(tmp_path, lines) == dict.fromkeys(lines, 0)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_those_that_need_vllm_show_their_help(tmp_path: Path) -> None:
    lines = dict.fromkeys(NEEDS_VLLM, "--help")
    assert ends(tmp_path, lines) == dict.fromkeys(lines, 0)
