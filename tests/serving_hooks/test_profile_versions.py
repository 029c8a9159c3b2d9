"""Versions of an application: a new label is forecast with care by the latest known version; a drift sets it aside."""

import random
from collections.abc import Sequence

import pytest
from by_name import Forecaster
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import coding, table_of

from presage.features.sequences import sequences_of
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.versions import application_of, latest_versions
from presage.serving_hooks.explain import reasons
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.monitoring.outcomes import AgainstCounts
from presage.serving_hooks.workflows.live import DRIFTED, NO_MODEL, OTHER_VERSION, LiveForecast

PLAN = coding(200)
PATIENT = Budget(deadline_s=1e9, hang_s=None)


def profile_of_versions(*types: str) -> ProfilePredictor:
    """The same profile under each of these workflow types."""
    made = ProfilePredictor().fit(sequences_of(table_of(PLAN, output_tokens=7)))
    made.profiles = dict.fromkeys(types, made.profiles["app"])
    return made


def walk(forecaster: Forecaster, agents: Sequence[str], name: str, kind: str) -> list[LiveForecast]:
    made = []
    for agent in agents:
        made.append(forecaster.on_prefill(kind, name, agent))
        forecaster.on_completion(kind, name, output_tokens=7)
    forecaster.close(kind, name)
    return made


def test_numbers_in_labels_count_as_numbers() -> None:
    assert application_of("coding@2") == application_of("coding") == "coding"
    types = ["coding@9", "coding@10", "coding", "other", "other@v1.9.0", "other@v1.10.0", "third@a", "third@b"]
    assert latest_versions(types) == {"coding": "coding@10", "other": "other@v1.10.0", "third": "third@b"}


@given(st.lists(st.text("ab@1.²", max_size=6)))
def test_law_every_application_has_a_version_and_none_of_another(types: list[str]) -> None:
    latest = latest_versions(types)
    assert latest.keys() == {application_of(name) for name in types}
    assert all(name in types and application_of(name) == of for of, name in latest.items())
    assert latest == latest_versions(types[::-1])


def test_a_new_version_is_described_by_the_latest_known_one_and_not_surely() -> None:
    predictor = profile_of_versions("coding@1", "coding@10", "coding@9")
    steps = [{"workflow_type": "coding@11", "agent": "planner"}]
    found = predictor.forecast(steps)
    assert (found.source, found.workflow_type, found.prediction) == ("back-off", "coding@10", "explorer")
    own = predictor.forecast([{**steps[0], "workflow_type": "coding@9"}])
    assert (own.source, own.workflow_type) == ("champion", "coding@9")
    assert predictor.forecast([{**steps[0], "workflow_type": "codings@1"}]).source == "none"


def test_the_profile_of_another_version_answers_until_counts_know_enough_and_says_so() -> None:
    forecaster = Forecaster(
        None, profile=profile_of_versions("coding@1", "coding@2"), profile_version=7, back_off=OnlineCounts()
    )
    first = walk(forecaster, PLAN[0], "w", "coding@3")[0]
    assert (first.source, first.version, first.evidence, first.reason) == ("profile", 7, 0, OTHER_VERSION)
    left = first.remaining
    assert (left.source, left.evidence, left.reason) == ("profile", 0, OTHER_VERSION)
    for number in range(12):
        later = walk(forecaster, PLAN[number], f"w{number}", "coding@3")[0]
    assert (later.source, later.reason) == ("back-off", OTHER_VERSION)
    assert (later.remaining.source, later.remaining.reason) == ("back-off", OTHER_VERSION)
    known = walk(forecaster, PLAN[0], "w", "coding@2")[0]
    assert (known.source, known.reason) == ("profile", NO_MODEL)
    assert known.evidence > 0
    assert walk(forecaster, PLAN[0], "w", "other@3")[0].source == "none"


def test_once_it_leads_the_counts_it_answers_and_still_says_so() -> None:
    monitor = ForecastMonitor()
    forecaster = Forecaster(None, profile=profile_of_versions("coding@2"), back_off=OnlineCounts(), monitor=monitor)
    for number in range(9):
        walk(forecaster, PLAN[number], f"w{number}", "coding@3")
    assert monitor.status()["profile_against_counts"]["coding@3"]["steps"] > 0, "it is compared meanwhile"
    for _ in range(25):
        monitor.profile_stand_back.followed("coding@3", AgainstCounts(10, 9, 6))
    made = walk(forecaster, PLAN[9], "w", "coding@3")
    assert {(live.source, live.evidence, live.reason) for live in made} == {("profile", 0, OTHER_VERSION)}


def test_people_are_told_whose_profile_it_is() -> None:
    forecaster = Forecaster(None, profile=profile_of_versions("coding@2"), profile_version=7)
    forecaster.on_prefill("coding@3", "w", "planner")
    position = forecaster.position("coding@3", "w")
    assert position is not None
    assert (position["own"], position["source"]) == (False, "back-off")
    nothing = dict.fromkeys(("admission", "blocks", "growth", "returns"))
    told = reasons({**nothing, "modes": {}, "alive": True, "requests": [], "forecasts": [], "position": position})
    assert "its type has no profile, so this is that of coding@2" in "; ".join(told)


def test_a_drift_sets_the_profile_aside_until_the_type_recovers(caplog: pytest.LogCaptureFixture) -> None:
    """The application as it was, then half of its workflows make calls that were never seen, then as it was."""
    monitor, rng = ForecastMonitor(), random.Random(0)
    plan = ["a", "b", "c"], ["a", "c"]
    predictor = ProfilePredictor().fit(sequences_of(table_of([*plan] * 50)))
    forecaster = Forecaster(None, profile=predictor, back_off=OnlineCounts(), monitor=monitor, budget=PATIENT)

    def served(times: int, *agents: Sequence[str]) -> LiveForecast:
        for _ in range(times):
            made = walk(forecaster, rng.choice(agents), "w", "app")
        return made[0]

    assert served(monitor.drift.config.learn_from, *plan).source == "profile"
    for _ in range(300):
        served(1, *plan, ["a", "d", "c"])
        if monitor.drift.alarms:
            break
    assert "workflow type 'app' has changed" in caplog.text
    drifted = served(1, *plan)
    assert (drifted.source, drifted.reason) == ("back-off", DRIFTED)
    recovered = served(3 * monitor.drift.config.recovery, *plan)
    assert "workflow type 'app' has recovered" in caplog.text
    assert recovered.source == "profile"
