"""A profile where forecasts are needed: its turn before online counts, its steps ahead, and where a workflow is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_name import ByName, Forecaster, VersionedForecaster
from profile_samples import Parents, coding, table_of
from registry_database import new_database
from serving_samples import Clock
from tiny_model import Tiny

from presage.features.sequences import sequences_of
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.profile.predictor import ProfilePredictor
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.explain import reasons
from presage.serving_hooks.forecasting.champions import Champions, load_forecasts
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig, Reason
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import AgainstCounts, Followed
from presage.serving_hooks.monitoring.promoted import Figure
from presage.serving_hooks.monitoring.stand_back import STEPS
from presage.serving_hooks.settings import ForecastSettings
from presage.serving_hooks.status import ModelStatus
from presage.serving_hooks.workflows.live import DRIFTED, LESS_ACCURATE, LITTLE_SEEN, NO_MODEL, LiveForecast

PLAN = coding(300)
HALVES = [["a", "b", "c"], ["a", "c"]] * 50
"""Half of the workflows leave out b."""


def profile_of_plan(workflows: Sequence[Sequence[str]], parents: Parents | None = None) -> ProfilePredictor:
    return ProfilePredictor().fit(sequences_of(table_of(workflows, parents)))


def walk(
    forecaster: Forecaster, agents: Sequence[str], name: str = "w", kind: str = "app", end: bool = False
) -> list[LiveForecast]:
    """The forecasts as each step begins."""
    made = []
    for agent in agents:
        made.append(forecaster.on_prefill(kind, name, agent))
        forecaster.on_completion(kind, name, output_tokens=10)
    if end:
        forecaster.close(kind, name)
    return made


def chance(made: LiveForecast, agent: str | None, ahead: int = 1) -> float:
    column = len(made.agents) if agent is None else made.agents.index(agent)
    return float(made.probabilities[ahead - 1, column])


def test_a_profile_forecasts_as_it_does_of_the_whole_prefix() -> None:
    predictor = profile_of_plan(PLAN)
    forecaster = Forecaster(None, profile=predictor, profile_version=7, back_off=OnlineCounts(), clock=Clock())
    agents = coding(1, seed=9)[0]
    for at, live in enumerate(walk(forecaster, agents)):
        whole = predictor.forecast([{"workflow_type": "app", "agent": agent} for agent in agents[: at + 1]])
        assert (live.source, live.version, live.evidence, live.reason) == ("profile", 7, whole.evidence, NO_MODEL)
        assert {name: chance(live, name) for name in whole.agents} == pytest.approx(dict(whole.agents), abs=1e-6)
        assert chance(live, None) == pytest.approx(whole.end, abs=1e-6)
        np.testing.assert_allclose(live.probabilities.sum(1), 1.0, atol=1e-5)
    assert forecaster.counts["next-agent", "profile", NO_MODEL] == 2 * len(agents)


def test_later_steps_are_given_that_the_workflow_has_not_ended() -> None:
    (live,) = walk(Forecaster(None, profile=profile_of_plan(HALVES), clock=Clock()), ["a"])
    assert (chance(live, "b"), chance(live, "c"), chance(live, None)) == pytest.approx((0.5, 0.5, 0.0))
    assert (chance(live, "b", 2), chance(live, "c", 2), chance(live, None, 2)) == pytest.approx((0.0, 0.5, 0.5))
    assert chance(live, None, 3) == pytest.approx(1.0), "c, and whoever has reached it ends"
    last = walk(Forecaster(None, profile=profile_of_plan(HALVES), clock=Clock()), ["a", "c"])[-1]
    assert last.probabilities[:, -1].tolist() == [1.0, 1.0, 1.0], "no workflow gets further"


def test_the_model_comes_before_the_profile_and_the_profile_before_counts(tiny: Tiny) -> None:
    predictor = NextAgentPredictor.load(tiny.folder)
    profile = profile_of_plan(PLAN)
    profile.profiles["retry"] = profile.profiles["app"]
    forecaster = Forecaster(predictor, 3, profile=profile, profile_version=7, back_off=OnlineCounts(), clock=Clock())
    for number in range(9):
        walk(forecaster, PLAN[number], f"w{number}", end=True)
    made = walk(forecaster, PLAN[10])
    assert {(live.source, live.version, live.reason) for live in made} == {("profile", 7, LITTLE_SEEN)}
    assert walk(forecaster, ["planner"], kind="retry")[0].source == "champion"


def test_off_the_graph_and_without_evidence_counts_answer_as_ever() -> None:
    for predictor in (profile_of_plan(PLAN), profile_of_plan(coding(10))):
        forecaster = Forecaster(None, profile=predictor, back_off=OnlineCounts(), clock=Clock())
        for number in range(9):
            walk(forecaster, ["planner", "tester", "planner"], f"w{number}", end=True)
        assert walk(forecaster, ["planner", "tester"])[-1].source == "back-off"


@pytest.mark.parametrize("agent", ["", "nobody", None])
def test_an_agent_that_no_workflow_had_leaves_the_graph(agent: Any) -> None:
    forecaster = Forecaster(None, profile=profile_of_plan(PLAN), back_off=OnlineCounts(), clock=Clock())
    assert [live.source for live in walk(forecaster, ["planner", agent, "coder"])] == ["profile", "none", "none"]


def test_a_fan_out_stays_on_the_graph_while_its_steps_run_at_once() -> None:
    wide = [["p", "s", "s", "s", "w"]] * 60
    forecaster = Forecaster(None, profile=profile_of_plan(wide, [(), (0,), (0,), (0,), (1, 2, 3)]), clock=Clock())
    walk(forecaster, ["p"])
    made = [forecaster.on_prefill("app", "w", "s", step=step) for step in (1, 2, 3)]
    assert [live.source for live in made] == ["profile"] * 3
    assert [chance(live, "s") for live in made] == [1.0, 1.0, 0.0]
    assert chance(made[0], "w", 3) == 1.0
    assert chance(made[2], "w") == 1.0


def test_a_missed_step_is_the_end_of_what_the_profile_says() -> None:
    forecaster = Forecaster(None, profile=profile_of_plan(PLAN), back_off=OnlineCounts(), clock=Clock())
    assert forecaster.on_prefill("app", "w", "planner", step=0).source == "profile"
    forecaster.on_completion("app", "w", output_tokens=3)
    assert forecaster.on_prefill("app", "w", "explorer", step=40).source == "none"
    assert forecaster.position("app", "w") is None


def test_a_type_that_has_drifted_gets_counts() -> None:
    class Kept(ForecastMonitor):
        def followed(self, workflow: Followed) -> None:
            kept.append(set(workflow.next_agent))
            super().followed(workflow)

    kept: list[set[str]] = []
    monitor = Kept(Drift({}))
    forecaster = Forecaster(
        None, profile=profile_of_plan(PLAN), profile_version=7, back_off=OnlineCounts(), monitor=monitor, clock=Clock()
    )
    for number in range(9):
        walk(forecaster, PLAN[number], f"w{number}", end=True)
    assert kept[-1] == {"profile version 7"}, "its forecasts are judged under its own name"
    monitor.drift.alarms["app"] = Alarm(
        "app", 99, (Reason("accuracy at prefill", "below", 0.1, Figure(0.8, 0.7, 0.9)),)
    )
    drifted = walk(forecaster, PLAN[9])
    assert {(live.source, live.reason) for live in drifted} == {("back-off", DRIFTED)}
    monitor.drift.alarms.clear()
    assert {live.source for live in walk(forecaster, PLAN[10], "recovered")} == {"profile"}


def test_a_profile_that_counts_beat_stands_back_until_it_is_as_accurate_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = ForecastMonitor(Drift(config=DriftConfig(learn_from=10**6)))
    forecaster = Forecaster(
        None,
        profile=profile_of_plan(HALVES),
        profile_version=7,
        back_off=OnlineCounts(),
        monitor=monitor,
        clock=Clock(),
    )
    served = 0
    while "app" not in monitor.profile_stand_back.types and served < STEPS:
        assert {live.source for live in walk(forecaster, ["a", "c"], f"w{served}", end=True)} == {"profile"}
        served += 1
    compared = monitor.status()["profile_against_counts"]["app"]
    assert compared["steps"] >= STEPS
    assert compared["counts"] > compared["model"]
    assert compared["stands_back"]
    assert "the profile stands back for workflow type 'app'" in caplog.text
    made = walk(forecaster, ["a", "c"], "beaten", end=True)
    assert {(live.source, live.reason) for live in made} == {("back-off", LESS_ACCURATE)}
    assert monitor.live.agents("app", "profile version 7"), "judged all the same"
    assert not monitor.live.agents("app", "counts")
    assert walk(forecaster, ["a"], "other", kind="other")[0].source == "none", "of that type only"
    for number in range(STEPS):
        made = walk(forecaster, ["a", "b", "c"], f"later {number}", end=True)
        if made[0].source == "profile":
            break
    assert {live.source for live in made} == {"profile"}
    assert "the profile forecasts workflow type 'app' again" in caplog.text


def test_where_counts_know_too_little_a_profile_that_stands_back_goes_on() -> None:
    monitor = ForecastMonitor()
    forecaster = Forecaster(None, profile=profile_of_plan(PLAN), back_off=OnlineCounts(), monitor=monitor)
    monitor.profile_stand_back.types.add("app")
    assert walk(forecaster, ["planner"])[0].source == "profile"


def test_where_counts_know_too_little_a_model_that_stands_back_goes_on_before_the_profile(tiny: Tiny) -> None:
    profile = profile_of_plan([["planner", "coder", "tester"]] * 60)
    profile.profiles["retry"] = profile.profiles["app"]
    monitor = ForecastMonitor()
    predictor = NextAgentPredictor.load(tiny.folder)
    forecaster = Forecaster(predictor, 3, profile=profile, back_off=OnlineCounts(), monitor=monitor, clock=Clock())
    monitor.stand_back.types.add("retry")
    assert walk(forecaster, ["planner"], kind="retry")[0].source == "champion"


def test_a_profile_that_leads_the_counts_answers_where_the_model_stands_back(tiny: Tiny) -> None:
    profile = profile_of_plan([["planner", "coder", "tester"]] * 60)
    profile.profiles["retry"] = profile.profiles["app"]
    monitor = ForecastMonitor()
    predictor = NextAgentPredictor.load(tiny.folder)
    forecaster = Forecaster(predictor, 3, profile=profile, back_off=OnlineCounts(), monitor=monitor, clock=Clock())
    for number in range(8):
        walk(forecaster, ["planner", "coder", "tester"], f"w{number}", kind="retry", end=True)
    monitor.stand_back.types.add("retry")
    made = walk(forecaster, ["planner", "coder", "tester"], "counts", kind="retry", end=True)
    assert {(live.source, live.reason) for live in made} == {("back-off", LESS_ACCURATE)}
    for _ in range(25):
        monitor.profile_stand_back.followed("retry", AgainstCounts(10, 9, 6))
    made = walk(forecaster, ["planner", "coder", "tester"], "profile", kind="retry")
    assert {(live.source, live.reason) for live in made} == {("profile", LESS_ACCURATE)}


def test_a_profile_that_fails_is_switched_off_and_counts_answer() -> None:
    predictor = profile_of_plan(PLAN)
    budget = Budget(deadline_s=1e9, window=10, share=0.2, at_least=5)
    forecaster = Forecaster(None, profile=predictor, back_off=OnlineCounts(), budget=budget, clock=Clock())

    def fail(*_: object) -> bool:
        raise OSError("disk")

    predictor.sure = fail  # type: ignore[method-assign]
    for number in range(12):
        made = walk(forecaster, PLAN[number], f"w{number}", end=True)
    assert {live.source for live in made} == {"back-off"}
    assert forecaster.breakers["profile"].off
    assert (len(forecaster), forecaster.position("app", "w1")) == (0, None)


def test_a_running_workflow_keeps_its_version_and_new_ones_get_the_newer() -> None:
    old, new = (Forecaster(None, profile=profile_of_plan(PLAN), profile_version=number) for number in (1, 2))
    of = VersionedForecaster(old)
    of.on_prefill("app", "running", "planner")
    of.take_over(new)
    assert of.on_completion("app", "running", output_tokens=3).version == 1
    assert of.on_prefill("app", "new", "planner").version == 2
    running, later = of.position("app", "running"), of.position("app", "new")
    assert running is not None
    assert later is not None
    assert (running["version"], later["version"]) == (1, 2)
    of.close("app", "running")
    assert (of.position("app", "running"), of.under_older) == (None, 0)


def told(position: dict[str, Any] | None) -> str:
    nothing = dict.fromkeys(("admission", "blocks", "growth", "returns"))
    modes: dict[str, str] = {}
    return "; ".join(
        reasons({**nothing, "modes": modes, "alive": True, "requests": [], "forecasts": [], "position": position})
    )


def test_people_are_told_where_a_workflow_is() -> None:
    forecaster = Forecaster(None, profile=profile_of_plan(PLAN), profile_version=7, clock=Clock())
    walk(forecaster, ["planner", "explorer", "explorer", "explorer"])
    position = forecaster.position("app", "w")
    assert position is not None
    assert (position["on_graph"], position["at"], position["confident"]) == (True, ["explorer"], True)
    sentence = told(position)
    assert f"by profile 7 it is in state {position['state']}, explorer, on the graph" in sentence
    assert f"{position['left']['mean']:.1f} further steps are expected (90 %: at most " in sentence
    assert "workflows of its type run planner explorer{3,12} (coder tester){1,4} reviewer?" in sentence
    walk(forecaster, ["planner"])
    assert "off the graph since a call that no workflow made before" in told(forecaster.position("app", "w"))
    walk(forecaster, ["nobody"])
    assert "profile 7 does not know where it is" in told(forecaster.position("app", "w"))
    assert forecaster.position("unheard of", "w") is None
    assert "profile" not in told(None)


def test_the_setting_loads_a_profile_and_none_is_no_trouble(tmp_path: Path) -> None:
    profile_of_plan(PLAN).save(tmp_path / "profile")
    without = dict.fromkeys(("next_agent", "remaining_length", "return_time", "context_growth"))
    made = load_forecasts(ForecastSettings(profile=str(tmp_path / "profile"), **without))  # type: ignore[arg-type]
    assert str(made.models["profile"]) == str(tmp_path / "profile")
    assert made.next_agents is not None
    assert ByName(made.next_agents).on_prefill("app", "w", "planner").source == "profile"
    none = load_forecasts(ForecastSettings(profile=None, **without))  # type: ignore[arg-type]
    assert none.next_agents is not None
    assert ByName(none.next_agents).on_prefill("app", "w", "planner").source == "none"


@pytest.mark.slow
def test_a_newer_champion_of_the_registry_goes_live(tmp_path: Path) -> None:
    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    for version, workflows in enumerate((PLAN, coding(300, seed=1)), 1):
        folder = tmp_path / str(version)
        profile_of_plan(workflows).save(folder)
        row = {"workflow_type": "app", "workflow_id": "w", "step": 0, "agent": "planner"}
        register(registry, folder, name="profile", metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("profile", "champion", "1")
    without = dict.fromkeys(("next_agent", "remaining_length", "return_time", "context_growth"))
    made = load_forecasts(ForecastSettings(registry=uri, **without))  # type: ignore[arg-type]
    assert made.models["profile"] == ModelStatus("models:/profile@champion", 1)
    assert isinstance(made.upkeep, Champions)
    source = ByName(made.upkeep.source)
    assert source.on_prefill("app", "running", "planner").version == 1
    registry.client.set_registered_model_alias("profile", "champion", "2")
    made.upkeep.reload.look()
    assert made.upkeep.renew()
    made.upkeep.close()
    assert made.models["profile"] == ModelStatus("models:/profile@champion", 2)
    assert source.on_prefill("app", "new", "planner").version == 2
    source.on_completion("app", "running", output_tokens=3)
    assert source.on_prefill("app", "running", "explorer").version == 1
