"""A replay of several engines: one engine behind a router is that engine; the same seed gives the same figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from presage.cli.presage import app
from presage.replay.metrics import PolicyRun
from presage.replay.policies import POLICIES, ROUTING
from presage.replay.workload import Arrivals, PromptConvention
from presage.serving_hooks.engine_file import read_engine
from presage.serving_hooks.policies.scaling import ScalingConfig

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")


from replay_samples import chain

from presage.replay.fleet_file import FleetMember
from presage.replay.runs import Setting, run_one

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CONVENTION = PromptConvention("history-first", opening_tokens=32)
JOBS = tuple(chain(number, "abcab"[: 2 + number % 4], CONVENTION, new=40 + 7 * number) for number in range(24))


def setting(*members: FleetMember, concurrency: int = 8, cache_tokens: int = 3200) -> Setting:
    engine = read_engine("invented", cache_tokens)
    fleet = members or (FleetMember("a", engine, POLICIES["stock"]),)
    return Setting(JOBS, CONVENTION, Arrivals(concurrency), engine, "counts", fleet=fleet)


def engines(count: int, cache_tokens: int = 3200, policy: str = "stock") -> tuple[FleetMember, ...]:
    engine = read_engine("invented", cache_tokens)
    return tuple(FleetMember(f"e{number}", engine, POLICIES[policy]) for number in range(count))


@pytest.mark.parametrize("policy", ["stock", "next-use", "full"])
@pytest.mark.parametrize("routing", ["round-robin", "session-affinity", "longest-prefix"])
def test_a_fleet_of_one_is_the_replay_of_that_engine_to_the_bit(policy: str, routing: str) -> None:
    alone = run_one(setting(), POLICIES[policy], 3)
    routed = run_one(setting(*engines(1, policy=policy)), ROUTING[routing], 3)
    own = {"moves", "held_mean_s", "imbalance", "running_share", "recomputed_share", "idle_share", "unused_share"}
    assert {name: value for name, value in routed.figures.items() if name not in own} == alone.figures
    assert routed.forecasts == alone.forecasts


@pytest.mark.parametrize("routing", list(ROUTING))
def test_every_policy_serves_everything_and_repeats_itself(routing: str) -> None:
    runs: list[PolicyRun] = []
    of = setting(*engines(3), concurrency=16)
    first = run_one(of, ROUTING[routing], 1, on_run=runs.append)
    assert first.figures == run_one(of, ROUTING[routing], 1).figures
    assert len(runs[0].asked) == sum(len(job.steps) for job in JOBS)
    assert len(runs[0].completions_s) == len(JOBS)
    for job in range(len(JOBS)):  # steps in their order, whatever engines serve them
        ends = [one.ended_s or 0.0 for one in sorted(runs[0].asked, key=lambda one: one.step) if one.job == job]
        assert ends == sorted(ends)


def test_the_fast_path_takes_the_same_decisions_on_a_fleet() -> None:
    of = setting(*engines(2), concurrency=12)
    fast, slow = (run_one(of, ROUTING["session-affinity"], 0, fast_path=fast) for fast in (True, False))
    for name in ("hit_tokens", "preemptions", "iterations"):
        assert fast.figures[name] == slow.figures[name]
    assert fast.figures["completion_mean_s"] == pytest.approx(slow.figures["completion_mean_s"], rel=1e-9)


def test_an_engine_that_is_drained_gets_no_more_requests_and_one_that_loads_none_yet() -> None:
    one, two = engines(2)
    of = setting(replace(one, closes_s=3.0), replace(two, opens_s=5.0), concurrency=4)
    runs: list[PolicyRun] = []
    run_one(of, ROUTING["least-loaded"], 0, on_run=runs.append)
    began = sorted(outcome.began_s or 0.0 for outcome in runs[0].asked)
    assert not [at_s for at_s in began if 3.5 < at_s < 5.0]
    assert any(at_s <= 3.0 for at_s in began)
    assert len(began) == sum(len(job.steps) for job in JOBS)


@pytest.mark.parametrize("routing", list(ROUTING))
def test_engines_serve_the_agents_of_their_model_alone(routing: str) -> None:
    small, large = ([replace(one, model=model, name=f"{model} {one.name}") for one in engines(2)] for model in "sl")
    of = replace(setting(*small, *large, concurrency=12), models={"b": "l"})
    runs: list[PolicyRun] = []
    run_one(of, ROUTING[routing], 0, on_run=runs.append)
    assert len(runs[0].asked) == sum(len(job.steps) for job in JOBS)
    assert {(one.agent == "b", one.engine >= 2) for one in runs[0].asked} == {(True, True), (False, False)}


@pytest.mark.parametrize("policy", ["forecast", "last-window", "reactive"])
def test_an_autoscaler_serves_everything_repeats_itself_and_pays_for_what_it_opens(policy: str) -> None:
    scaling = ScalingConfig(policy=policy, load_s=2, requests_per_engine=2, keep_s=1)  # type: ignore[arg-type]
    of = replace(setting(*engines(4), concurrency=8), scaling=scaling)
    runs: list[PolicyRun] = []
    first = run_one(of, ROUTING["least-loaded"], 0, on_run=runs.append)
    again = run_one(of, ROUTING["least-loaded"], 0)
    assert first.figures == again.figures
    assert len(runs[0].asked) == sum(len(job.steps) for job in JOBS)
    assert first.figures["engine_starts"] >= 1
    assert runs[0].end_s <= 3600 * first.figures["engine_hours"] <= 4 * runs[0].end_s
    assert not [one for one in runs[0].asked if one.engine and (one.began_s or 0.0) < 3.0]  # asked for at 1 s
    assert {tick.engines[0] + tick.loading[0] for tick in runs[0].scaling} <= {1, 2, 3, 4}
    assert ("demand_error" in first.figures) == (policy == "forecast")


def test_a_pool_that_is_always_open_is_the_fleet_without_an_autoscaler() -> None:
    of = setting(*engines(2), concurrency=8)
    scaling = ScalingConfig(policy="reactive", requests_per_engine=1, least={"": 2})
    plain, kept = (run_one(one, ROUTING["presage"], 0).figures for one in (of, replace(of, scaling=scaling)))
    assert kept.pop("engine_starts") == 0
    assert kept.pop("engine_hours") == pytest.approx(2 * plain["makespan_s"] / 3600)
    assert kept == plain


def test_the_cache_of_an_engine_that_opens_again_is_empty() -> None:
    one = chain(0, "ab", CONVENTION, new=400)
    late = [replace(chain(n, "a", CONVENTION, new=400), workflow_id="w0", arrives_s=60.0) for n in (0, 0)]
    jobs = (replace(one, arrives_s=0.0), *late)
    scaling = ScalingConfig(policy="reactive", load_s=1, requests_per_engine=1, keep_s=0, least={"": 0})
    of = replace(setting(*engines(1, 6400)), jobs=jobs, arrivals=Arrivals(as_recorded=True), scaling=scaling)
    figures = run_one(of, ROUTING["least-loaded"], 0).figures
    assert figures["engine_starts"] == 2
    kept = replace(of, scaling=scaling.model_copy(update={"least": {"": 1}}))
    assert figures["hit_tokens"] < run_one(kept, ROUTING["least-loaded"], 0).figures["hit_tokens"]


def test_sessions_stay_on_an_engine_and_requests_that_take_turns_move() -> None:
    of = setting(*engines(4, 6400), concurrency=8)
    stays, turns = (run_one(of, ROUTING[name], 0).figures for name in ("session-affinity", "round-robin"))
    assert stays["moves"] == 0 < turns["moves"]


def test_the_course_of_a_run_adds_up_to_its_requests() -> None:
    runs: list[PolicyRun] = []
    done = run_one(setting(*engines(2), concurrency=16), ROUTING["presage"], 0, on_run=runs.append)
    course = done.course
    assert course is not None
    assert sum(course["held"]) * course["window_s"] / len(runs[0].asked) == pytest.approx(
        done.figures["held_mean_s"], abs=0.01
    )
    under_way = sum(sum(series) for series in course["under_way"].values()) * course["window_s"]
    assert under_way == pytest.approx(sum((one.ended_s or 0.0) - one.placed_s for one in runs[0].asked), rel=0.01)
    for used in course["cache_in_use"].values():
        assert 0 < max(used) <= 1


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    told = ["traces", "generate", "--law", "triage", "--workflows", "12", "--seed", "3", "--to", str(folder)]
    assert CliRunner().invoke(app, told).exit_code == 0
    return folder


def test_the_command_replays_a_fleet(store: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[[engines]]\ncount = 2\ncache_tokens = 16000\n")
    told = ["replay", str(store), "--fleet", str(tmp_path / "fleet.toml"), "--concurrency", "6", "--seeds", "2"]
    done = CliRunner().invoke(app, [*told, "--processes", "1", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engines"] == 2
    assert list(found["policies"]) == list(ROUTING)
    for of in found["policies"].values():
        for name in ("hit_rate", "completion_mean_s", "completion_p95_s", "ttft_mean_s", "throughput_tokens_per_s"):
            assert of[name]["ci95"][0] <= of[name]["mean"] <= of[name]["ci95"][1]
    placed = found["policies"]["least-loaded"]["placed"]
    assert placed.keys() == {"fewest requests in flight"}
    assert sum(placed["fewest requests in flight"].values()) == found["workload"]["requests"]
    table = CliRunner().invoke(app, [*told, "--policy", "thunderagent,presage", "--processes", "1"])
    assert "The fleet" in table.stdout
    assert "2 engines, the first with a cache of 16000 tokens" in table.stdout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "stock"], "there are session-affinity"),
        (["--cache-tokens", "5"], "applies to one engine"),
        (["--scheduler", "sjf"], "applies to one engine"),
    ],
)
def test_options_of_one_engine_are_refused_with_a_fleet(
    store: Path, tmp_path: Path, more: list[str], says: str
) -> None:
    (tmp_path / "fleet.toml").write_text("[[engines]]\n")
    done = CliRunner().invoke(app, ["replay", str(store), "--fleet", str(tmp_path / "fleet.toml"), *more])
    assert done.exit_code not in (0, 1)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_model_that_only_the_queues_of_engines_ask_is_loaded(store: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[[engines]]\ncount = 2\nscheduler = "stjf"\n')
    told = ["replay", str(store), "--fleet", str(tmp_path / "fleet.toml"), "--policy", "session-affinity", "--seeds"]
    done = CliRunner().invoke(app, [*told, "1", "--processes", "1", "--lengths", str(tmp_path / "nothing")])
    assert done.exit_code not in (0, 1)
    assert "nothing" in done.stderr
    first_come = CliRunner().invoke(app, [*told, "1", "--processes", "1", "--json"])
    found = json.loads(first_come.stdout)
    assert (found["forecasts"], found["lengths"]) == ("counts", None)
