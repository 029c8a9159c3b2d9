"""Forecasts are kept as they were made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from recorded_forecasts import read_forecasts
from recorder_samples import Hands, Named, forecast, recorder

from presage.datasets.recording import FORECASTS
from presage.serving_hooks.workflows.live import NO_LENGTHS, NOTHING, LiveForecast


def test_a_forecast_is_kept_as_it_was_made(tmp_path: Path) -> None:
    one = recorder(tmp_path, Hands(1_800_000_000.0))
    one.begun("r", Named())
    one.forecast("r", forecast("prefill", ("a", "b", "c"), steps=2))
    one.forecast("r", LiveForecast("none", 0, "prefill", NOTHING, (), 7, "too little seen", NO_LENGTHS))
    one.close()
    table = read_forecasts(tmp_path)
    assert table.schema.equals(FORECASTS)
    kept, none = table.to_pylist()
    assert (kept["run"], kept["step"], kept["moment"]) == (0, 0, "prefill")
    assert (kept["source"], kept["version"], kept["evidence"], kept["agents"]) == ("champion", 7, 9, ["a", "b", "c"])
    assert np.allclose(kept["probabilities"], np.full(8, 0.25))
    assert (kept["quantiles"], kept["remaining_tokens"], kept["remaining_version"]) == ([0.5, 0.9], [20.0, 40.0], 3)
    assert kept["made_at"].timestamp() == 1_800_000_000.0
    assert (none["source"], none["reason"], none["probabilities"]) == ("none", "too little seen", [])


def test_a_forecast_for_a_request_that_is_no_step_is_passed_over(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.forecast("r", forecast())
    one.begun("s", Named())
    one.completed("s")
    one.close()
    assert read_forecasts(tmp_path).num_rows == 0
