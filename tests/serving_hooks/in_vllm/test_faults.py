"""Each fault by its name, on vLLM's own scheduler: every request is answered, and what still works goes on."""

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import Tiny
from told import left_behind, send, serve, told, whole
from vllm_samples import Engine, build, everything_is_free

from presage.predictors.common.artefact import CONFIG_FILE
from presage.registry.connect import Registry
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.forecasting.sources import resolve_predictors
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.live import MISSED_STEP, NOT_BACK, SWITCHED_OFF

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.one_version]  # a predictor is trained
ALL_ON = {"priority": True, "eviction": True, "admission": True}
SECRET = "what the prompt says"


@pytest.fixture
def predictor(tiny: Tiny) -> Any:
    return tiny.training.predictor


def engine_of(folder: Path, kind: type[Any], **settings: Any) -> Engine:
    return Engine(build(folder / "model", kind, blocks=64, presage=settings))


def all_well(engine: Engine, sent: list[str]) -> dict[str, Any]:
    """Every request has its whole answer, every block is accounted for, both policies are on; the counts."""
    assert sorted(engine.ended) == sorted(sent)
    assert {len(engine.said[name]) for name in sent} == {3}
    assert everything_is_free(engine.scheduler)
    status: dict[str, Any] = engine.scheduler.presage_status()
    assert status["on"] == ALL_ON
    return dict(status["counts"])


def failed(forecaster: Forecaster, reason: str) -> int:
    """Forecasts of next agents that the model did not make for this reason."""
    return sum(forecaster.counts["next-agent", source, reason] for source in ("back-off", "none"))  # type: ignore[index]


def test_the_registry_is_down_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:9")
    with caplog.at_level(logging.WARNING, logger="presage"):
        engine = engine_of(tmp_path, SyncWorkflowScheduler)
    assert "localhost:9" in caplog.text
    assert "using online counts" in caplog.text
    counts = all_well(engine, serve(engine, 24))
    assert counts["forecast: none"] > 0, "nothing is known at first"
    assert counts["forecast: back-off"] > 0, "counts of what was seen answer after a while"


def test_an_artefact_of_another_schema(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "artefact"
    shutil.copytree(tiny.folder, folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"format_version": 99}))

    def none() -> Registry:
        raise AssertionError("a folder needs no registry")

    with caplog.at_level(logging.WARNING, logger="presage"):
        found = resolve_predictors(none, {"next-agent": str(folder)})["next-agent"]
    assert found.predictor is None
    assert "99" in caplog.text
    engine = engine_of(tmp_path, told(Forecaster(found.predictor, back_off=OnlineCounts())))
    counts = all_well(engine, serve(engine, 24))
    assert counts["forecast: back-off"] > 0


def raises(*_: Any) -> int:
    raise RuntimeError(SECRET)


def answers_nan(workflow: Any, agent: int, tokens: float, state: Any, out: np.ndarray) -> int:
    out[:] = np.nan
    return 100


def answers_half(workflow: Any, agent: int, tokens: float, state: Any, out: np.ndarray) -> int:
    out[0] = 1.0 / out.shape[1]  # and leaves the later horizons as they were
    return 100


@pytest.mark.parametrize(
    ("method", "instead", "reason"),
    [
        ("prefilled", raises, "RuntimeError"),
        ("completed", raises, "RuntimeError"),
        ("open", raises, "RuntimeError"),
        ("prefilled", answers_nan, "NotAForecast"),
        ("prefilled", answers_half, "NotAForecast"),
        ("prefilled", lambda *_: None, "NotAForecast"),
    ],
    ids=["prefill raises", "completion raises", "opening raises", "NaN", "rows missing", "nothing"],
)
def test_a_predictor_raises_or_answers_what_is_no_forecast(
    tmp_path: Path, predictor: Any, caplog: pytest.LogCaptureFixture, method: str, instead: Any, reason: str
) -> None:
    forecaster = Forecaster(whole(predictor, **{method: instead}), 3, back_off=OnlineCounts())
    engine = engine_of(tmp_path, told(forecaster))
    with caplog.at_level(logging.ERROR, logger="presage"):
        counts = all_well(engine, serve(engine, 64))
    assert failed(forecaster, reason) > 0
    assert forecaster.breakers["next-agent"].off
    assert failed(forecaster, SWITCHED_OFF) > 0
    assert counts["forecast: back-off"] > 0
    assert caplog.text.count("next-agent version 3 is switched off") == 1
    assert SECRET not in caplog.text


def test_a_vocabulary_of_another_size(tmp_path: Path, predictor: Any) -> None:
    one_more = whole(predictor.vocabulary, outcomes=predictor.vocabulary.outcomes + 1)

    def spread(workflow: Any, agent: int, tokens: float, state: Any, out: np.ndarray) -> int:
        out[:] = 1.0 / out.shape[1]
        return 100

    forecaster = Forecaster(whole(predictor, vocabulary=one_more, prefilled=spread))
    engine = engine_of(tmp_path, told(forecaster))
    all_well(engine, serve(engine, 8))
    assert failed(forecaster, "NotAForecast") > 0
    assert not any(source == "champion" for _, source, _ in forecaster.counts)


@pytest.mark.parametrize("method", ["open", "prefilled", "completed"])
def test_a_predictor_hangs(tmp_path: Path, predictor: Any, caplog: pytest.LogCaptureFixture, method: str) -> None:
    comes_back, asked = threading.Event(), []

    def hangs(*_: Any) -> None:
        asked.append(1)
        comes_back.wait()

    # Other calls may compile: only the one that hangs must be given up early, and it is asked first or soon after.
    serve(engine_of(tmp_path, told(Forecaster(predictor))), 2)
    forecaster = Forecaster(
        whole(predictor, **{method: hangs}), back_off=OnlineCounts(), budget=Budget(hang_s=3.0, first_hang_s=3.0)
    )
    engine = engine_of(tmp_path, told(forecaster))
    with caplog.at_level(logging.WARNING, logger="presage"):
        counts = all_well(engine, serve(engine, 24))
    assert asked == [1], "it is asked once and never again"
    assert forecaster.breakers["next-agent"].hung
    assert failed(forecaster, NOT_BACK) > 0
    assert counts["forecast: back-off"] > 0
    assert caplog.text.count("has no forecasts until its call") == 1
    forecaster.reset()
    sent = serve(engine, 8, first=24)
    assert asked == [1]
    assert set(sent) <= set(engine.ended)
    comes_back.set()


def test_the_engine_restarts_within_a_workflow(tmp_path: Path, predictor: Any) -> None:
    """All states are lost, and the clients go on: their workflows are new ones of which the beginning was missed."""
    before = Forecaster(predictor)
    engine = engine_of(tmp_path, told(before))
    for step in range(2):
        send(engine, "w0", step)
        engine.run()
    assert before.counts["next-agent", "champion", None] == 4
    after = Forecaster(predictor)
    engine = engine_of(tmp_path, told(after))
    sent = [send(engine, "w0", 2)]
    engine.run()
    assert failed(after, MISSED_STEP) == 2
    assert engine.scheduler.presage_status()["workflows"] == 1
    sent += serve(engine, 1, first=1)
    assert after.counts["next-agent", "champion", None] == 6, "one that begins is forecast, at each moment"
    sent.append(send(engine, "w0", 3, workflow_end=True))
    engine.run()
    all_well(engine, sent)
    assert not any(left_behind(engine.scheduler).values())


def test_workflows_that_are_never_ended_take_no_more_entries_than_the_setting_says(
    tmp_path: Path, predictor: Any
) -> None:
    recorder = {"folder": str(tmp_path / "r")}
    forecaster = Forecaster(predictor, back_off=OnlineCounts(), monitor=ForecastMonitor())
    engine = engine_of(tmp_path, told(forecaster), max_workflows=10, recorder=recorder)
    counts = all_well(engine, serve(engine, 40, steps=1, end=False))
    assert counts["workflows: too many"] == 30
    left = left_behind(engine.scheduler)
    blocks = left.pop("free blocks of workflows")
    assert blocks <= 64, "no more than the cache has"
    assert left["workflows"] == left["forecaster"] == left["monitor"] == 10
    assert left["admission accounts"] == 10
    assert max(left.values()) == 10, left
    engine.scheduler.shutdown()


def test_ends_come_twice_early_and_for_nobody(tmp_path: Path, predictor: Any) -> None:
    engine = engine_of(tmp_path, told(Forecaster(predictor)))
    scheduler = engine.scheduler
    assert not scheduler.workflow_ended("retry", "w0"), "before its first step"
    sent = [send(engine, "w0", 0)]
    engine.step()
    assert scheduler.workflow_ended("retry", "w0"), "while a step runs"
    assert not scheduler.workflow_ended("retry", "w0"), "a second time"
    engine.run()
    sent.append(send(engine, "w0", 1))  # it goes on all the same
    engine.run()
    assert scheduler.presage_status()["workflows"] == 1
    for number, step in ((1, 2), (1, 1), (2, 0), (2, 0)):  # ends that overtake, and two at once
        sent.append(send(engine, f"w{number}-{len(sent)}", step, workflow_id=f"w{number}", workflow_end=True))
    engine.run()
    assert scheduler.workflow_ended("retry", "w0")
    all_well(engine, sent)
    assert not any(left_behind(scheduler).values())
