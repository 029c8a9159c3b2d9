"""vLLM's own scheduler and a model of folded names: requests with ids in their names are known ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import Tiny
from told import AGENTS, left_behind, send, told, whole
from vllm_samples import Engine, build

from presage.datasets.read import read_traces
from presage.datasets.schema.names import NameMapping
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.monitoring.drift import Drift
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

NAMES = NameMapping(((r"(\w+)-\d+", r"\1"),), ((r"(\w+) run \d+", r"\1"),))


def folding(tiny: Tiny, names: NameMapping) -> NextAgentPredictor:
    predictor = NextAgentPredictor.load(tiny.folder)
    predictor.vocabulary = replace(predictor.vocabulary, names=names)
    return predictor


def test_names_with_ids_are_folded_for_models_counts_and_monitors_and_recorded_as_sent(
    tiny: Tiny, tmp_path: Path
) -> None:
    live = LiveAccuracy()
    monitor = ForecastMonitor(Drift({}), live)
    forecaster = Forecaster(folding(tiny, NAMES), back_off=OnlineCounts(), monitor=monitor)
    presage = {"recorder": {"folder": str(tmp_path / "r")}}
    engine = Engine(build(tmp_path / "m", told(forecaster), blocks=400, presage=presage))
    scheduler: Any = engine.scheduler
    for number in range(6):
        kind, workflow = f"retry run {number}", f"w{number}"
        for step, agent in enumerate(AGENTS):
            send(engine, workflow, step, workflow_type=kind, agent=f"{agent}-{number}")
            engine.run()
            assert scheduler.step_answered(kind, workflow, f"{agent}-{number}", step, "stop", [], 0)
            assert not scheduler.step_answered(kind, workflow, agent, step, "stop", [], 0)
        explained = scheduler.explain(kind, workflow)
        assert explained["alive"]
        assert [made["agent"] for made in explained["forecasts"]][-1] == AGENTS[-1]
        assert scheduler.workflow_ended(kind, workflow)
    assert {source for (what, source, _) in forecaster.counts if what == "next-agent"} == {"champion"}
    assert list(live.to_dict()) == ["retry"]
    engine.drain()
    scheduler.shutdown()
    assert not any(left_behind(scheduler).values())
    rows = read_traces([tmp_path / "r"]).table.to_pylist()
    assert {row["agent"] for row in rows} == {f"{agent}-{number}" for agent in AGENTS for number in range(6)}
    assert {row["workflow_type"] for row in rows} == {f"retry run {number}" for number in range(6)}


def test_a_workflow_keeps_the_type_it_began_with_when_newer_models_fold_otherwise(tiny: Tiny, tmp_path: Path) -> None:
    source = VersionedForecaster(Forecaster(folding(tiny, NAMES)))
    kind = type("Told", (SyncWorkflowScheduler,), {"forecasts": lambda self, config: Forecasts(source, source)})
    engine = Engine(build(tmp_path / "m", kind, blocks=400))
    scheduler: Any = engine.scheduler
    send(engine, "w", 0, workflow_type="retry run 1", agent="planner-1")
    engine.run()
    source.take_over(Forecaster(folding(tiny, NameMapping())))
    send(engine, "w", 1, workflow_type="retry run 1", agent="coder-1")
    send(engine, "v", 0, workflow_type="retry run 1", agent="planner-1")
    engine.run()
    assert scheduler.workflow_table.get("retry run 1\0w").step.workflow_type == "retry"
    assert scheduler.workflow_table.get("retry run 1\0v").step.workflow_type == "retry run 1"
    assert scheduler.workflow_ended("retry run 1", "w")
    assert source.under_older == 0


def test_where_models_learnt_from_names_folded_otherwise_the_engine_leaves_it_to_each(tiny: Tiny) -> None:
    one = Forecaster(folding(tiny, NAMES))
    other = Forecaster(folding(tiny, NameMapping()))
    assert Forecasts(one).names == Forecasts(one, contexts=whole(None, loaded=one.loaded)).names == NAMES
    assert not Forecasts(one, contexts=whole(None, loaded=other.loaded)).names
    assert not Forecasts().names
