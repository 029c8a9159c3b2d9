"""`presage replay` from traces to table, JSON and report, and what it says to bad input."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from context_samples import loops
from typer.testing import CliRunner

from presage.cli.presage import app
from presage.datasets.ingest import append
from presage.datasets.read import read_traces
from presage.predictors.length.context import ContextGrowthConfig
from presage.replay.runs import run_one
from presage.training.length.train import fit_lengths
from presage.training.profile.train import fit_profiles

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CHEAP = ("--seeds", "2", "--processes", "1", "--concurrency", "6", "--cache-tokens", "16000")


def ran(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "store"
    made = ran("traces", "generate", "--law", "triage", "--workflows", 12, "--seed", 3, "--to", folder)
    assert made.exit_code == 0
    return folder


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(**more: Any) -> Path:
        rows = [{"workflow_type": "t", "workflow_id": "w", "step": i, "agent": "p", **more} for i in range(2)]
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "t.jsonl"

    return write


@dataclass(frozen=True)
class Replayed:
    """The same replay as a table and as an object, with the report of the latter."""

    table: Any
    object: dict[str, Any]
    report: Path


@pytest.fixture(scope="module")
def replayed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    report = tmp_path_factory.mktemp("report")
    asked = ("replay", store, *CHEAP, "--policy", "stock,next-use,oracle", "--prompts", "own-conversation")
    table, in_json = ran(*asked), ran(*asked, "--json", "--report", report)
    assert (table.exit_code, in_json.exit_code) == (0, 0), table.stderr + in_json.stderr
    return Replayed(table, json.loads(in_json.stdout), report)


def test_the_object_holds_what_the_contract_says(replayed: Replayed) -> None:
    found = replayed.object
    assert found["workload"]["workflows"] == 12
    assert list(found["policies"]) == ["stock", "next-use", "oracle"]
    for of in found["policies"].values():
        for name in (
            *("hit_rate", "completion_mean_s", "completion_p95_s", "ttft_mean_s", "throughput_tokens_per_s"),
            *("queueing_mean_s", "preemptions", "recomputed_tokens"),
        ):
            low, high = of[name]["ci95"]
            assert low <= of[name]["mean"] <= high
    assert set(found["policies"]["next-use"]["share_of_oracle"]) >= {"hit_rate", "completion_mean_s"}
    assert json.loads((replayed.report / "metrics.json").read_text()) == found
    page = (replayed.report / "report.html").read_text()
    assert "Policies side by side" in page
    assert "invented" in page


def test_the_table_names_policies_and_figures(replayed: Replayed) -> None:
    shown = replayed.table.stdout
    assert "12 workflows, " in shown
    assert "own-conversation prompts; a cache of 16000 tokens; costs: invented" in shown
    figures, evicted = shown.split("Evicted blocks by state")
    for part in (figures, evicted):
        rows = [line.split() for line in part.splitlines() if line.startswith(("stock", "next-use"))]
        assert [row[0] for row in rows[:2]] == ["stock", "next-use"]
        assert all(float(row[1]) > 0 for row in rows[:2])
    assert all(len(line) <= 100 for line in shown.splitlines()[2:-1])
    assert "times without pauses" in shown


def test_each_run_is_shown_as_it_ends_and_the_verdict_last(replayed: Replayed) -> None:
    runs = [line for line in replayed.table.stderr.splitlines() if "mean completion" in line]
    assert sorted(line.partition(":")[0].split() for line in runs) == [
        [policy, "seed", seed] for policy in ("next-use", "oracle", "stock") for seed in "01"
    ]
    verdict = replayed.object["verdict"]
    text = f"{verdict['text']} {verdict['regime']['text']}"
    assert replayed.table.stdout.splitlines()[-1] == text
    assert text in (replayed.report / "report.html").read_text()
    assert (replayed.report / "policies.svg").exists()


def test_a_cache_that_holds_everything_is_said_before_the_table(store: Path) -> None:
    done = ran("replay", store, *CHEAP[:-1], 900_000, "--policy", "stock,lifecycle")
    before, after = done.stdout.split("Policies side by side")
    assert "Nothing can be gained from the cache here: the cache holds everything." in before
    said = "Stock spends 0% of its time on lost contexts: no policy can gain much."
    assert after.splitlines()[-1] == f"Nothing to gain here: the cache holds everything. {said}"


def test_pauses_are_counted_on_request(store: Path) -> None:
    options = ("replay", store, *CHEAP, "--policy", "stock", "--pause-s", 30, "--json")
    without, included = (json.loads(ran(*options, *more).stdout) for more in ((), ("--with-pauses",)))
    figures, with_pauses = (of["policies"]["stock"] for of in (without, included))
    assert with_pauses["completion_mean_s"]["mean"] > figures["completion_mean_s"]["mean"] + 30
    for name in [name for name in figures if not name.startswith("completion_")]:
        assert figures[name] == with_pauses[name]


def test_a_host_is_told_apart_in_object_and_report(store: Path, tmp_path: Path) -> None:
    options = (*CHEAP[:-1], 6000, "--policy", "stock,lifecycle", "--host-cache-tokens", 64000)
    done = ran("replay", store, *options, "--json", "--report", tmp_path / "r")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"]["host_cache_tokens"] == 64000
    for of in found["policies"].values():
        tiers = [of[f"hit_tokens_{tier}"]["mean"] for tier in ("gpu", "host")]
        assert sum(tiers) == pytest.approx(of["hit_tokens"]["mean"])
        assert min(tiers) > 0
    page = (tmp_path / "r" / "report.md").read_text()
    assert "Hit tokens by tier" in page
    assert "a cache of 6000 tokens and 64000 in the host; costs: invented" in page


def test_as_recorded_runs_once(store: Path) -> None:
    done = ran("replay", store, "--as-recorded", "--processes", 1, "--policy", "stock", "--json")
    assert done.exit_code == 0, done.stderr
    stock = json.loads(done.stdout)["policies"]["stock"]
    assert (stock["runs"], stock["hit_rate"]["ci95"]) == (1, None)
    assert "one run of each policy" in done.stderr


def test_an_interrupt_prints_what_was_run_and_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def stopped(*args: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run_one(*args)

    monkeypatch.setattr("presage.replay.runs.run_one", stopped)
    done = ran("replay", store, *CHEAP, "--policy", "stock", "--json")
    assert done.exit_code == 130
    found = json.loads(done.stdout)
    assert (found["interrupted"], found["policies"]["stock"]["runs"]) == (True, 1)
    assert "1 of 2 runs" in done.stderr


def test_schedulers_are_crossed_and_their_gain_is_a_share_of_the_clairvoyant_one(store: Path) -> None:
    done = ran("replay", store, *CHEAP, "--scheduler", "fcfs,stjf,stjf-oracle", "--forecasts", "noise:0.2", "--json")
    assert done.exit_code == 0, done.stderr
    policies = json.loads(done.stdout)["policies"]
    assert list(policies) == ["stock+fcfs", "stock+stjf", "stock+stjf-oracle"]
    assert "share_of_oracle" in policies["stock+stjf"]
    assert "share_of_oracle" not in policies["stock+fcfs"]
    assert policies["stock+stjf"]["promotions"]["mean"] >= 0
    assert "promotions" not in policies["stock+fcfs"]  # vLLM alone does not age


def test_queueing_stands_beside_first_come(store: Path) -> None:
    done = ran("replay", store, *CHEAP, "--scheduler", "fcfs,stjf-oracle")
    assert done.exit_code == 0, done.stderr
    title = "Queueing, from arrival to the first selection"
    rows = [line.split() for line in done.stdout.split(title)[1].splitlines() if line.startswith("stock+")][:2]
    assert [(row[0], "100%" in row) for row in rows] == [("stock+fcfs", False), ("stock+stjf-oracle", True)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "best"), "--policy 'best' is unknown"),
        (("--policy", "stock,best"), "is unknown"),
        (("--scheduler", "best"), "--scheduler 'best' is unknown"),
        (("--forecasts", "noise:7"), "a number from 0 to 1"),
        (("--forecasts", "nowhere"), "nowhere"),
        (("--concurrency", "0"), "concurrency is 0"),
        (("--rate", "2", "--concurrency", "3"), "2 kinds of arrivals"),
        (("--cache-tokens", "0"), "cache_tokens"),
        (("--cache-tokens", "320"), "can never run"),
        (("--engine", "none.toml"), "no engine file"),
        (("--host-cache-tokens", "-1"), "host_cache_tokens: input should be greater than or equal to 0"),
        (("--host-cache-tokens", "15"), "host_cache_tokens is 15, less than a block of 16"),
        (("--prompts", "mine"), "history-first, own-conversation"),
    ],
)
def test_bad_input_is_one_line(store: Path, options: tuple[str, ...], said: str) -> None:
    done = ran("replay", store, "--processes", 1, *options)
    lines = [line for line in done.stderr.splitlines() if line.startswith("presage: ")]
    assert (done.exit_code, done.stdout, len(lines)) == (2, "", 1), done.stderr
    assert said in lines[0]


def test_a_host_without_the_way_to_it_is_refused(store: Path, tmp_path: Path) -> None:
    costs = (
        'source = "a test"\niteration_s = 0.01\nprefill_token_s = 0.0\ndecode_token_s = 0.0\ncontext_token_s = 0.0\n'
    )
    (tmp_path / "e.toml").write_text(f"cache_tokens = 16000\n[cost]\n{costs}")
    done = ran("replay", store, "--engine", tmp_path / "e.toml", "--host-cache-tokens", 64000)
    assert done.exit_code == 2
    assert "[cost] has no host_token_s" in done.stderr


def test_traces_say_what_they_cannot_answer(jsonl: Callable[..., Path]) -> None:
    said = ran("replay", jsonl(), *CHEAP)
    assert said.exit_code == 2
    assert "replay needs the sizes of prompts and outputs" in said.stderr
    said = ran("replay", jsonl(input_tokens=50, output_tokens=5), *CHEAP)
    assert said.exit_code == 2
    assert "--pause-s" in said.stderr
    said = ran("replay", jsonl(input_tokens=50, output_tokens=5), "--as-recorded", "--pause-s", 1)
    assert said.exit_code == 2
    assert "no recorded times" in said.stderr


def test_a_workflow_with_a_size_that_was_not_recorded_is_replayed_and_counted(jsonl: Callable[..., Path]) -> None:
    path = jsonl(input_tokens=50, output_text="x" * 40)
    done = ran("replay", path, *CHEAP, "--pause-s", 1, "--policy", "stock", "--json")
    assert done.exit_code == 0, done.stderr
    load = json.loads(done.stdout)["workload"]
    assert (load["workflows"], load["left_out"], load["estimated_sizes"], load["output_tokens"]) == (1, 0, 1, 20)
    assert "token counts of 1 of 1 workflow were not all recorded" in done.stderr


def test_a_model_of_other_agents_is_refused_and_one_of_these_forecasts(store: Path, tiny: Any, jsonl: Any) -> None:
    other = ran("replay", jsonl(input_tokens=50, output_tokens=5), *CHEAP, "--pause-s", 1, "--forecasts", tiny.folder)
    assert other.exit_code == 2
    assert "knows none of the 1 agents" in other.stderr
    more = ("--seeds", 1, "--cache-tokens", 64000, "--policy", "next-use", "--forecasts", tiny.folder, "--json")
    done = ran("replay", tiny.held_out, *CHEAP, *more)
    assert done.exit_code == 0, done.stderr
    of = json.loads(done.stdout)["policies"]["next-use"]
    assert of["forecasts"]["champion"] > 0
    assert "switched_off" not in of


def test_a_profile_forecasts_before_counts_and_leaves_out_what_it_was_made_of(store: Path, tmp_path: Path) -> None:
    made = ran("traces", "generate", "--law", "triage", "--workflows", 200, "--seed", 4, "--to", tmp_path / "more")
    assert made.exit_code == 0
    fit_profiles(read_traces([tmp_path / "more"]).table).predictor.save(tmp_path / "profile")
    more = ("--policy", "next-use", "--profile", tmp_path / "profile", "--json")
    done = ran("replay", store, *CHEAP, *more)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["profile"] == str(tmp_path / "profile")
    assert found["policies"]["next-use"]["forecasts"]["profile"] > 0
    learnt = ran("replay", tmp_path / "more", *CHEAP, *more)
    assert learnt.exit_code != 0
    assert "trained on" in learnt.stderr


def test_a_model_of_contexts_lets_as_many_begin_as_will_fit_and_leaves_out_what_it_was_trained_on(
    tmp_path: Path,
) -> None:
    append(loops(60, 0), tmp_path / "learnt")
    append(loops(40, 1), tmp_path / "traces")
    config = ContextGrowthConfig(estimator="forest")
    fit_lengths(read_traces([tmp_path / "learnt"]).table, config, target="final-context").predictor.save(tmp_path / "m")
    more = ("--seeds", 1, "--processes", 1, "--concurrency", 40, "--cache-tokens", 120_000, "--policy", "full")
    found = {}
    for name, options in (("counts", ()), ("model", ("--contexts", tmp_path / "m"))):
        done = ran("replay", tmp_path / "traces", "--pause-s", 1, "--json", *more, *options)
        assert done.exit_code == 0, done.stderr
        found[name] = json.loads(done.stdout)
    assert found["model"]["contexts"] == str(tmp_path / "m")
    assert found["counts"]["contexts"] is None
    rates = {name: of["policies"]["full"]["hit_rate"] for name, of in found.items()}
    assert rates["model"] != rates["counts"]
    learnt = ran("replay", tmp_path / "learnt", "--pause-s", 1, *more, "--contexts", tmp_path / "m")
    assert learnt.exit_code != 0
    assert "trained on" in learnt.stderr
