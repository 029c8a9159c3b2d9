"""Forecasts are kept as they were made, and stand beside what came true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorder_samples import Hands, Named, forecast, recorder

from presage.datasets.recorded_forecasts import SCHEMA, read_forecasts
from presage.errors import TraceError
from presage.serving_hooks.forecasting.live import NO_LENGTHS, NOTHING, LiveForecast
from presage.serving_hooks.recorder.recorder import Recorder


def served(to: Recorder, agents: str, ends: bool = True, first: int = 0) -> None:
    for i, agent in enumerate(agents, start=first):
        to.begun(f"r{i}", Named(agent=agent))
        to.forecast(f"r{i}", forecast("prefill"))
        to.completed(f"r{i}", output_tokens=10 * (i + 1))
        to.forecast(f"r{i}", forecast("completion"))
    if ends:
        to.ended("t", "w", "finished")


def test_a_forecast_is_kept_as_it_was_made(tmp_path: Path) -> None:
    one = recorder(tmp_path, Hands(1_800_000_000.0))
    one.begun("r", Named())
    one.forecast("r", forecast("prefill", ("a", "b", "c"), steps=2))
    one.forecast("r", LiveForecast("none", 0, "prefill", NOTHING, (), 7, "too little seen", NO_LENGTHS))
    one.close()
    table, lost = read_forecasts(tmp_path)
    assert table.schema.equals(SCHEMA)
    assert not lost
    kept, none = table.to_pylist()
    assert (kept["instance"], kept["run"], kept["step"], kept["moment"]) == ("one", 0, 0, "prefill")
    assert (kept["source"], kept["version"], kept["evidence"], kept["agents"]) == ("champion", 7, 9, ["a", "b", "c"])
    assert np.allclose(kept["probabilities"], np.full(8, 0.25))
    assert (kept["quantiles"], kept["remaining_tokens"], kept["remaining_version"]) == ([0.5, 0.9], [20.0, 40.0], 3)
    assert kept["made_at"].timestamp() == 1_800_000_000.0
    assert (none["source"], none["reason"], none["probabilities"], none["came"]) == ("none", "too little seen", [], [])


def test_what_came_true_stands_beside_it(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    served(one, "abca")
    one.close()
    rows = read_forecasts(tmp_path)[0].to_pylist()
    assert [row["came"] for row in rows if row["moment"] == "prefill"] == [
        ["b", "c", "a"],
        ["c", "a", "END"],
        ["a", "END"],
        ["END"],
    ]
    assert [row["came_tokens"] for row in rows if row["moment"] == "prefill"] == [100, 90, 70, 40]
    assert [row["came_tokens"] for row in rows if row["moment"] == "completion"] == [90, 70, 40, 0]


def test_what_nobody_knows_yet_is_left_open(tmp_path: Path) -> None:
    hands = Hands()
    one = recorder(tmp_path, hands)
    served(one, "ab", ends=False)
    one.writer.turn(hands.rising)
    hands.on(2.0)
    one.writer.turn(hands.rising)
    rows = read_forecasts(tmp_path)[0].to_pylist()
    assert [row["came"] for row in rows] == [["b"], ["b"], [], []]
    assert {row["came_tokens"] for row in rows} == {None}
    served(one, "c", first=2)
    one.close()
    rows = read_forecasts(tmp_path)[0].to_pylist()
    assert [row["came"] for row in rows[::2]] == [["b", "c", "END"], ["c", "END"], ["END"]]


def test_nothing_is_known_past_a_step_that_is_missing(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    for i, agent in enumerate(["a", "b" * 300, "c"]):
        one.begun(f"r{i}", Named(agent=agent))
        one.forecast(f"r{i}", forecast())
        one.completed(f"r{i}", output_tokens=1)
    one.ended("t", "w", "finished")
    one.close()
    rows = read_forecasts(tmp_path)[0].to_pylist()
    assert [(row["step"], row["came"], row["came_tokens"]) for row in rows] == [(0, [], None), (2, ["END"], 1)]


def test_a_forecast_for_a_request_that_is_no_step_is_passed_over(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    one.forecast("r", forecast())
    one.begun("s", Named())
    one.completed("s")
    one.close()
    assert read_forecasts(tmp_path)[0].num_rows == 0


def test_where_there_is_no_recording_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recording"):
        read_forecasts(tmp_path)
