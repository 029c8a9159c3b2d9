"""`presage promote --replay`: one version passes, one that foretells wrongly is refused, both keep their report."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from registry_database import new_database

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")


from cli_samples import FAST, Ran, run, train, write

from presage.cli.train_predictor import app as train_predictor
from presage.errors import ConfigurationError
from presage.predictor_kinds import KINDS
from presage.registry.connect import open_registry
from presage.replay.promotion_gate import ReplayGate
from presage.replay.runs import half

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]

UNDER_PRESSURE = (
    *("--replay", "--prompts", "own-conversation", "--opening-tokens", 100, "--pause-s", 1),
    *("--concurrency", 12, "--cache-tokens", 16000, "--seeds", 6, "--processes", 1),
)


def draw(workflows: int, seed: int, then: str = "worker") -> list[dict[str, Any]]:
    """A planner with a long prompt, then a worker, then one of the two again and again."""
    rng = random.Random(seed)
    rows = []
    for number in range(workflows):
        size = {"planner": 900, "worker": 200}
        for step, agent in enumerate(["planner", "worker"] + [then] * rng.randint(4, 8)):
            new, output = rng.randint(100, 300), rng.randint(20, 60)
            named = {"workflow_type": "t", "workflow_id": f"{seed}-{number}", "step": step, "agent": agent}
            rows.append({**named, "input_tokens": size[agent] + new, "output_tokens": output})
            size[agent] += new + output
    return rows


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Version 1 has learnt who comes next, version 2 has learnt that the planner comes back; and traces to judge on."""
    folder = tmp_path_factory.mktemp("gate")
    uri = new_database(folder / "mlflow.db")
    for seed, then in enumerate(("worker", "planner"), start=1):
        traces = write(folder / f"{then}.jsonl", draw(100, seed, then))
        done = train(traces, "--name", "agents", "--tracking-uri", uri, "--json", *FAST, "--baselines", "markov-3")
        assert (done.code, done.json["version"]) == (0, seed), done.err
    return uri, write(folder / "held-out.jsonl", draw(32, 9))


@pytest.fixture
def promote(registry: tuple[str, Path]) -> Callable[..., Ran]:
    uri, held = registry

    def asked(version: int, *more: object) -> Ran:
        return run("promote", "agents", "--version", version, "--traces", held, "--tracking-uri", uri, *more)

    return asked


def tags(registry: tuple[str, Path], version: int) -> dict[str, str]:
    return dict(open_registry(registry[0]).version("agents", version).tags)


def replayed(registry: tuple[str, Path], version: int) -> set[str]:
    """What stands in the run of a version under replay/."""
    opened = open_registry(registry[0])
    run_id = opened.version("agents", version).run_id
    return {Path(file.path).name for file in opened.client.list_artifacts(run_id, "replay")}


def test_one_passes_and_one_is_refused(registry: tuple[str, Path], promote: Callable[..., Ran]) -> None:
    dry = promote(1, *UNDER_PRESSURE, "--dry-run", "--json")
    assert dry.json["replay"]["policies"]["stock"]["runs"] == 6
    assert replayed(registry, 1) == set()

    first = promote(1, *UNDER_PRESSURE, "--json")
    assert (first.code, first.json["promoted"], first.json["moved"]) == (0, True, True), first.err
    gates = {gate["name"]: gate for gate in first.json["gates"]}
    assert {name for name in gates if name.startswith("replay-")} == {
        "replay-ran",
        "replay-hit-rate-stock",
        "replay-completion-stock",
        "replay-completion-p99-stock",
        "replay-start-p99-stock",
        "replay-later-first-token-p99-stock",
    }
    assert first.json["replay"] == dry.json["replay"]

    second = promote(2, *UNDER_PRESSURE, "--json")
    assert (second.code, second.json["promoted"]) == (3, False)
    refused = {gate["name"]: gate for gate in second.json["gates"] if not gate["passed"]}
    assert {"replay-hit-rate-champion", "replay-completion-champion", "replay-hit-rate-stock"} <= set(refused)
    figures = second.json["replay"]["policies"]
    assert list(figures) == ["stock", "version 2", "version 1"]
    assert all(figures[name]["forecasts"]["champion"] > 0 for name in ("version 1", "version 2"))

    written = tags(registry, 2)
    assert written["presage.verdict"] == "refused"
    assert "replay-hit-rate-champion" in written["presage.verdict.refused_by"]
    assert refused["replay-hit-rate-champion"]["value"] < 0
    assert replayed(registry, 2) >= {"metrics.json", "report.html", "report.md"}
    assert open_registry(registry[0]).aliases("agents") == {"champion": 1}


def test_where_nothing_is_at_stake_it_says_so(promote: Callable[..., Ran]) -> None:
    ran = promote(1, *UNDER_PRESSURE, "--cache-tokens", 400_000, "--seeds", 3, "--dry-run")
    assert ran.code == 0, ran.err
    assert "the cache was never full" in ran.err


def test_before_anything_is_measured(
    registry: tuple[str, Path], promote: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "configures the replay: add --replay" in promote(2, "--cache-tokens", 9).complaint
    assert "cache_tokens" in promote(2, "--replay", "--cache-tokens", 0).complaint
    assert "2 kinds of arrivals" in promote(2, "--replay", "--rate", 1, "--concurrency", 2).complaint
    assert "can never run" in promote(2, *UNDER_PRESSURE, "--cache-tokens", 640).complaint
    assert "--pause-s" in promote(2, "--replay").complaint
    others = write(tmp_path / "others.jsonl", [{**row, "agent": "stranger"} for row in draw(20, 4)])
    strange = run(
        "promote", "agents", "--version", 1, "--traces", others, *UNDER_PRESSURE, "--tracking-uri", registry[0]
    )
    assert "none of these agents are known: the traces name 'stranger'" in strange.complaint
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = tags(registry, 2)
    assert "vLLM is not installed here" in promote(2, "--replay").complaint
    assert tags(registry, 2) == before


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'lengths' is a remaining-length predictor"):
        ReplayGate().check(KINDS["remaining-length"], "lengths")


def test_halves_differ_by_seed_and_need_something_to_be_drawn_of() -> None:
    jobs = tuple(range(9))
    drawn = [half(jobs, seed) for seed in range(6)]  # type: ignore[arg-type]
    assert [len(one) for one in drawn] == [5] * 6
    assert len(set(drawn)) > 3
    assert drawn[0] == half(jobs, 0)  # type: ignore[arg-type]
    assert all(list(one) == sorted(one) for one in drawn)


def test_a_fleet_gates_a_remaining_length_version(tmp_path: Path) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    traces = write(tmp_path / "learnt.jsonl", draw(100, 1))
    boosted = ("--name", "lengths", "--tracking-uri", uri, "--estimator", "boosted")
    done = Ran(train_predictor, "remaining-length", traces, *boosted)
    assert done.code == 0, done.err
    (tmp_path / "fleet.toml").write_text("[[engines]]\ncount = 2\ncache_tokens = 16000\n")
    held = write(tmp_path / "held.jsonl", draw(32, 9))
    asked = ("promote", "lengths", "--version", 1, "--traces", held, "--tracking-uri", uri, "--replay", "--fleet")
    more = ("--pause-s", 1, "--concurrency", 24, "--seeds", 3, "--processes", 1, "--dry-run", "--json")
    judged = run(*asked, tmp_path / "fleet.toml", *more)
    assert judged.json["replay"]["engines"] == 2, judged.err
    assert list(judged.json["replay"]["policies"]) == ["session-affinity", "version 1"]
    assert any(gate["name"].startswith("replay-completion") for gate in judged.json["gates"])
    assert "apply to one engine" in run(*asked, tmp_path / "fleet.toml", "--cache-tokens", 5).complaint
