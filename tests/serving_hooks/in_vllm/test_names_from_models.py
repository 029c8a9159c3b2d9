"""An engine tells its HTTP server what its models call agents."""

from pathlib import Path
from typing import Any

import pytest
from text_samples import text_lengths, text_predictor
from vllm_samples import build

from presage.features.agent_names import AgentNames
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = pytest.mark.vllm


def test_names_are_told_once_and_go_with_the_model(tmp_path: Path) -> None:
    source = VersionedForecaster(Forecaster(text_predictor(), lengths=text_lengths()))
    kind = type("Naming", (SyncWorkflowScheduler,), {"forecasts": lambda self, config: Forecasts(source, source)})
    scheduler: Any = build(tmp_path / "m", kind, blocks=64)
    told = scheduler.agent_names("")
    names = AgentNames.from_json(told["names"].encode(), tmp_path / "told")
    assert names.digest == told["digest"]
    assert len(names) == len(text_lengths().vocabulary.agents)
    assert scheduler.agent_names(told["digest"]) == {"digest": told["digest"]}
    source.take_over(Forecaster(text_predictor()))
    assert scheduler.agent_names(told["digest"]) == {}
    scheduler.shutdown()
