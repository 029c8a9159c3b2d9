"""`presage replay` of plain requests: prefixes are found again by their ids, and policies of workflows are idle."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")


from cli_samples import run, write

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

POLICIES = ("--policy", "stock,lifecycle,next-use,full", "--processes", 1, "--json")


def mooncake(path: Path) -> Path:
    """Conversations of two turns, the second of which begins with the first."""
    rng = random.Random(0)
    rows = []
    for number in range(20):
        for turn in range(2):
            size = 1024 + 600 * turn
            came = {"timestamp": 400 * number + 9000 * turn + rng.randint(0, 99), "output_length": rng.randint(1, 40)}
            rows.append({**came, "input_length": size, "hash_ids": [10 * number + i for i in range(-(-size // 512))]})
    return write(path, rows)


def test_prefixes_are_found_again_and_policies_of_workflows_are_idle(tmp_path: Path) -> None:
    ran = run("replay", mooncake(tmp_path / "m.jsonl"), "--as-recorded", "--cache-tokens", 64000, *POLICIES)
    assert ran.code == 0, ran.err
    assert "without workflows there are no forecasts and workflow policies have no effect" in ran.err
    found = ran.json
    assert (found["workload"]["workflows"], found["workload"]["requests"]) == (0, 40)
    assert (found["workload"]["prompts"], found["forecasts"]) == ("hash-ids", None)
    assert found["policies"]["full"]["promotions"]["mean"] == 0
    own = ("share_of_oracle", "promotions")  # the second only where requests are ranked
    figures = {name: {k: v for k, v in of.items() if k not in own} for name, of in found["policies"].items()}
    assert figures["stock"]["hit_rate"]["mean"] == pytest.approx(20 * 1024 / (20 * (1024 + 1624)))
    assert figures["lifecycle"] == figures["next-use"] == figures["full"] == figures["stock"]


def test_under_pressure_they_are_idle_too(tmp_path: Path) -> None:
    ran = run("replay", mooncake(tmp_path / "m.jsonl"), "--as-recorded", "--cache-tokens", 8000, *POLICIES)
    assert ran.code == 0, ran.err
    hits = {name: of["hit_rate"]["mean"] for name, of in ran.json["policies"].items()}
    assert hits["stock"] == hits["next-use"] < 0.3
    assert not any("switched_off" in of for of in ran.json["policies"].values())


def test_who_knows_the_future_or_lets_fewer_in_is_not_idle(tmp_path: Path) -> None:
    path, policies = mooncake(tmp_path / "m.jsonl"), ("--policy", "stock,belady,best-fixed", "--processes", 1, "--json")
    ran = run("replay", path, "--concurrency", 12, "--seeds", 1, "--cache-tokens", 16000, *policies)
    assert ran.code == 0, ran.err
    hits = {name: of["hit_rate"]["mean"] for name, of in ran.json["policies"].items()}
    assert hits["belady"] != hits["stock"]
    assert ran.json["policies"]["best-fixed"]["at_once"] <= 12
    assert not any("switched_off" in of for of in ran.json["policies"].values())


def test_a_trace_of_sizes_alone_is_replayed_for_time(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "".join(f"2026-01-01 00:00:{second:02}.0000000,300,9\n" for second in range(30))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    ran = run("replay", path, "--concurrency", 4, "--seeds", 2, "--policy", "stock", "--processes", 1)
    assert ran.code == 0, ran.err
    assert "without block hashes there are no cache hits" in ran.err
    assert "0 workflows, 30 requests, 4 at once; nothing-shared prompts" in ran.out


def test_what_they_cannot_answer_is_refused(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "m.jsonl")
    assert "--pause-s applies to workflows only" in run("replay", path, "--pause-s", 1).complaint
    assert "it forecasts workflows" in run("replay", path, "--forecasts", "models:/x@champion").complaint
    assert "--scheduler applies to workflows only" in run("replay", path, "--scheduler", "sjf").complaint
    assert "--lengths applies to workflows only" in run("replay", path, "--lengths", "models:/x@champion").complaint
    steps = write(tmp_path / "s.jsonl", [{"workflow_type": "t", "workflow_id": "w", "step": 0, "agent": "a"}])
    assert "one after the other" in run("replay", path, steps).complaint
    large = run("replay", path, "--cache-tokens", 640)
    assert (large.code, large.out) == (2, "")
    assert "'request 0': one of its requests has" in large.err
    lacks = write(tmp_path / "l.jsonl", [{"timestamp": 0, "input_length": 9}])
    assert "neither cache nor time" in run("replay", lacks).complaint
