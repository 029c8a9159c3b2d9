"""Return times on vLLM's own scheduler: counts learn them, a model forecasts them, answers renew them."""

from pathlib import Path
from typing import Any

import pytest
from return_samples import sessions
from test_policies_in_engine import Clock
from tool_samples import QUICK, tool_led
from vllm_samples import Engine, ask, build

from presage.features.return_times import ReturnEncoder, return_rows
from presage.predictors.return_time.predictor import ReturnTimeConfig, ReturnTimePredictor
from presage.serving_hooks.metrics import METRICS
from presage.serving_hooks.status import read_status
from presage.serving_hooks.vllm.http.plugin import call_scheduler
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.training.next_agent.train import fit_predictor

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

NO_MODELS = {"next_agent": None, "remaining_length": None, "profile": None, "reload_s": None}


@pytest.fixture(autouse=True)
def no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def engine_of(folder: Path, **presage: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    kind = type("Kind", (SyncWorkflowScheduler,), {"clock": clock})
    return Engine(build(folder / "served", kind, blocks=90, presage={**NO_MODELS, **presage})), clock


def step(engine: Engine, workflow: str, number: int, **sent: object) -> None:
    named = {"workflow_type": "coding", "workflow_id": workflow, "agent": "main", "step": number}
    engine.scheduler.add_request(ask(f"{workflow}-{number}", list(range(40)), 2, **named, **sent))
    engine.run()


def samples(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    status = read_status(engine.scheduler.presage_status())
    assert status is not None
    (metric,) = [one for one in METRICS if one.name == name]
    return dict(metric.read(status))


def reason(engine: Engine, workflow: str) -> str:
    (found,) = [one for one in engine.scheduler.explain("coding", workflow)["reasons"] if "away" in one]
    return str(found)


def test_counts_learn_when_workflows_return_and_the_coverage_is_live(tmp_path: Path) -> None:
    engine, clock = engine_of(tmp_path, return_time=None)
    step(engine, "a", 0)
    assert reason(engine, "a") == "it has been away for 0.0 s; when it returns is unknown: no model"
    assert engine.scheduler.explain("coding", "a")["returns"]["retention"] is None
    for number in range(1, 9):
        clock.now += 20.0
        step(engine, "a", number)
    clock.now += 5.0
    assert reason(engine, "a") == (
        "it has been away for 5.0 s; expected back in 15 s (90 %: 15 s); ended with probability 0 %"
    )
    explained = engine.scheduler.explain("coding", "a")["returns"]
    assert explained["retention"] == {"target": 0.9, "ttl_s": pytest.approx(15.0)}
    assert engine.scheduler.explain("coding", "a")["reasons"][-2] == (
        "caches outside should keep it for 15 s (target 90 %)"
    )
    assert (explained["source"], explained["evidence"], explained["away_s"]) == ("back-off", 8, 5.0)
    assert explained["quantiles"]["0.5"] == pytest.approx(15.0)
    judged = {("coding", "back-off", q): 3.0 for q in ("0.1", "0.5", "0.9", "0.99")}
    assert samples(engine, "presage_returns_judged_total") == judged
    assert samples(engine, "presage_returns_within_total") == judged
    assert samples(engine, "presage_return_log_error_total") == {("coding", "back-off"): 0.0}
    made = samples(engine, "presage_forecasts_total")
    assert (made["return-time", "back-off"], made["return-time", "none"]) == (4, 5)
    step(engine, "a", 9, workflow_end=True)
    assert engine.scheduler.explain("coding", "a")["returns"] is None


def test_a_model_of_a_folder_forecasts_and_an_answer_renews_it(tmp_path: Path) -> None:
    table = sessions(120, 1)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(table, encoder)
    apart = rows.task % 4 == 0
    model = ReturnTimePredictor(ReturnTimeConfig(estimator="forest"), 0)
    model.fit(rows.take(~apart), rows.take(apart), encoder=encoder).save(tmp_path / "model")
    engine, _ = engine_of(tmp_path, return_time=str(tmp_path / "model"), forecast_deadline_ms=1000.0)
    assert engine.scheduler.presage_status()["models"]["return-time"] == str(tmp_path / "model")
    step(engine, "a", 0)

    def answered(*given: Any) -> object:
        return call_scheduler(type("Core", (), {"scheduler": engine.scheduler}), "step_answered", given)

    found = []
    for finish_reason, tools in (("tool_calls", ["grep"]), ("stop", [])):
        assert answered("coding", "a", "main", 0, finish_reason, tools, 0)
        found.append(engine.scheduler.explain("coding", "a")["returns"])
    tool, person = found
    assert tool["source"] == person["source"] == "champion"
    assert tool["quantiles"]["0.5"] < 0.5 * person["quantiles"]["0.5"]
    assert not answered("coding", "a", "main", 7, "stop", [], 3)
    assert not answered("coding", "no such workflow", "main", 0, "stop", [], 0)
    assert samples(engine, "presage_events_total")[("answers that could not be read",)] == 3
    assert samples(engine, "presage_forecasts_total")["return-time", "champion"] == 3


def test_the_tools_of_an_answer_renew_the_forecast_of_next_agents(tmp_path: Path) -> None:
    fit_predictor(tool_led(160, 5), QUICK).predictor.save(tmp_path / "model")
    engine, _ = engine_of(tmp_path, next_agent=str(tmp_path / "model"), forecast_deadline_ms=1000.0)
    named = {"workflow_type": "app", "workflow_id": "a", "agent": "plan", "step": 0}
    engine.scheduler.add_request(ask("a-0", list(range(40)), 2, **named))
    engine.run()

    def next_agents() -> dict[str, float]:
        latest = engine.scheduler.explain("app", "a")["forecasts"][-1]
        return dict(latest["horizons"][0]["agents"])

    assert 0.1 < next_agents()["write"] < 0.9
    for tools, following in ((["ask", "ask"], "clarify"), (["search"], "write")):
        assert engine.scheduler.step_answered("app", "a", "plan", 0, "tool_calls", tools, 0)
        assert next_agents()[following] > 0.8
    engine.scheduler.workflow_ended("app", "a")
    assert engine.scheduler.debug_state()["workflows"] == 0
