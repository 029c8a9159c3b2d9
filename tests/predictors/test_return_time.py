"""The return-time predictor: what it learns, its conditional answer, its artefact, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from return_samples import MEDIAN_S, PERSON_S, sessions

from presage.errors import ArtefactError, InputError, TraceError
from presage.features.return_times import ReturnEncoder, return_rows
from presage.predictors.quantiles.boosted import BoostedQuantiles
from presage.predictors.return_time.baselines import RETURN_BASELINES
from presage.predictors.return_time.predictor import ReturnForecast, ReturnTimeConfig, ReturnTimePredictor

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


@pytest.fixture(scope="module")
def fitted() -> ReturnTimePredictor:
    table = sessions(240, 1)
    encoder = ReturnEncoder.fit(table)
    rows = return_rows(table, encoder)
    apart = rows.task % 4 == 0
    config = ReturnTimeConfig(estimator="forest")
    tasks = np.arange(5, dtype=np.uint64)
    return ReturnTimePredictor(config, 0).fit(rows.take(~apart), rows.take(apart), encoder=encoder, trained_on=tasks)


def pinball(outcome: np.ndarray, forecast: np.ndarray, level: float) -> float:
    above = np.log(outcome) - np.log(forecast)
    return float(np.maximum(level * above, (level - 1) * above).mean())


def test_it_beats_the_median_of_agent_and_reason_and_its_quantiles_cover(fitted: ReturnTimePredictor) -> None:
    rows = return_rows(sessions(200, 2), fitted.encoder)
    rows = rows.take(rows.labelled)
    train = return_rows(sessions(240, 1), fitted.encoder)
    usual = RETURN_BASELINES["agent-and-reason"](train, fitted.encoder, LEVELS)(rows)
    found = fitted.predict(rows)
    assert pinball(rows.label, found[:, 3], 0.5) < 0.5 * pinball(rows.label, usual[:, 3], 0.5)
    assert (rows.label[:, None] <= found).mean(axis=0) == pytest.approx(LEVELS, abs=0.06)


def test_what_the_answer_calls_decides_the_forecast(fitted: ReturnTimePredictor) -> None:
    table = sessions(60, 7)
    steps, found, ends = table.to_pylist(), fitted.predict(return_rows(table, fitted.encoder))[:, 3] / 1e3, {}
    end = fitted.predict_end(return_rows(table, fitted.encoder))
    llm = [place for place, step in enumerate(steps) if step["kind"] == "llm"]
    after = [steps[place + 1]["agent"] if steps[place]["finish_reason"] == "tool_calls" else None for place in llm]
    for tool, median in ((None, PERSON_S), *MEDIAN_S.items()):
        mine = np.array([called == tool for called in after])
        assert 0.6 < np.median(found[mine]) / median < 1.6
        ends[tool] = float(end[mine].mean())
    assert ends[None] == pytest.approx(1 / 3, abs=0.08)
    assert max(ends["grep"], ends["pytest"]) < 0.03


def test_a_forecast_is_that_of_its_row_of_a_trace(fitted: ReturnTimePredictor) -> None:
    table = sessions(6, 3)
    rows, steps = return_rows(table, fitted.encoder), table.to_pylist()
    llm = [place for place, step in enumerate(steps) if step["kind"] == "llm"]
    for row, place in enumerate(llm):
        first = place - steps[place]["step"]
        called = place + 1 < len(steps) and steps[place + 1]["kind"] == "tool"
        found = fitted.forecast(steps[first : place + 1 + called])
        if any(step["kind"] == "tool" for step in steps[first : place + 1 + called]):
            expected = fitted.predict(rows.take(np.array([row])))[0] / 1e3
            np.testing.assert_allclose(list(found.quantiles.values()), expected, rtol=1e-6)
            assert found.end == pytest.approx(fitted.predict_end(rows.take(np.array([row])))[0])


def test_an_unknown_agent_reason_and_tool_get_an_answer_that_backs_off(fitted: ReturnTimePredictor) -> None:
    strange = {"workflow_type": "new", "workflow_id": "w", "agent": "new", "finish_reason": "content_filter"}
    found = fitted.forecast([strange, {**strange, "agent": "no such tool", "kind": "tool"}])
    assert (found.source, found.evidence, found.calibrated) == ("back-off", 0, False)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in found.quantiles.values())


forecasts = st.builds(
    lambda end, times: ReturnForecast(end, dict(zip(LEVELS, sorted(times), strict=True)), "champion", 1, True, 1),
    st.floats(0, 1),
    st.lists(st.floats(0.0, 1e6), min_size=8, max_size=8),
)


@given(forecasts, st.floats(0, 1e6), st.floats(0, 1e6))
def test_waiting_moves_the_forecast_as_probability_wants(of: ReturnForecast, first: float, second: float) -> None:
    sooner, later = sorted((first, second))
    assert 0.0 <= of.returned(sooner) <= of.returned(later) <= 1.0
    one, other = of.waited(sooner), of.waited(later)
    assert of.end <= one.end + 1e-12
    assert one.end <= other.end + 1e-12
    for found in (one, other):
        times = list(found.quantiles.values())
        assert times == sorted(times)
        assert all(math.isfinite(seconds) and seconds >= 0 for seconds in times)


@given(forecasts)
def test_a_forecast_after_no_wait_is_the_forecast(of: ReturnForecast) -> None:
    found = of.waited(0.0)
    assert found.end == pytest.approx(of.end)
    assert list(found.quantiles.values()) == pytest.approx([max(s, 0.01) for s in of.quantiles.values()], rel=1e-6)


def test_waiting_by_hand() -> None:
    """Half return within 1 s, 90 % within 100 s. After 10 s of silence, .7 have returned, so that .3 are left: of them
    two thirds return within 100 s."""
    of = ReturnForecast(0.25, {0.5: 1.0, 0.9: 100.0}, "champion", 1, True, 1)
    assert of.returned(10.0) == pytest.approx(0.7)
    after = of.waited(10.0)
    assert after.end == pytest.approx(0.25 / (0.25 + 0.3 * 0.75))
    assert after.quantiles[0.5] == pytest.approx(math.exp(math.log(100) * (0.85 - 0.5) / 0.4) - 10.0)
    # Beyond the last quantile: a Pareto tail whose exponent is ln 5 / ln 100.
    assert after.quantiles[0.9] == pytest.approx(100 * (0.1 / 0.03) ** (math.log(100) / math.log(5)) - 10.0)


def test_a_time_to_live_by_hand() -> None:
    """A quarter has ended. After 10 s, .3 of the others are left, .225 of all; after 100 s, .1 of the others."""
    of = ReturnForecast(0.25, {0.5: 1.0, 0.9: 100.0}, "champion", 1, True, 1)
    assert of.ttl(1 - 0.225) == pytest.approx(10.0)
    assert of.ttl(1 - 0.075) == pytest.approx(100.0)
    assert of.ttl(0.25) == of.ttl(0.1) == 0.0
    assert ReturnForecast(0.95, {0.5: 1.0, 0.9: 100.0}, "champion", 1, True, 1).ttl() == 0.0
    assert of.to_dict()["retention"] == {"target": 0.9, "ttl_s": of.ttl(0.9)}


@given(forecasts, st.floats(0.001, 0.999))
def test_after_its_time_to_live_no_more_than_the_rest_returns(of: ReturnForecast, target: float) -> None:
    ttl = of.ttl(target)
    assert 0.0 <= ttl <= 1e9
    assert (1.0 - of.end) * (1.0 - of.returned(ttl)) <= 1.0 - target + 1e-6 or ttl == 1e9


@pytest.mark.parametrize("target", [0.001, 0.5, 0.9, 0.999])
def test_a_time_to_live_is_finite_whatever_the_quantiles(target: float) -> None:
    of = ReturnForecast(0.0, {0.5: 1.0, 0.9: math.inf, 0.95: math.inf}, "champion", 1, True, 1)
    assert 0.0 <= of.ttl(target) <= 1e9
    assert 0.0 <= of.waited(50.0).ttl(target) <= 1e9


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.5, math.nan])
def test_a_target_that_is_no_probability_is_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="expected a probability above 0 and below 1"):
        ReturnForecast(0.0, {0.5: 1.0, 0.9: 2.0}, "champion", 1, True, 1).ttl(wrong)


def test_a_quantile_longer_than_all_that_calibrated_it_says_so_after_waiting_too() -> None:
    of = ReturnForecast(0.0, {0.5: 1.0, 0.9: 100.0}, "champion", 1, True, 1, largest_s=90.0)
    assert of.beyond_calibration
    assert of.waited(5.0).beyond_calibration
    assert of.waited(5.0).largest_s == 85.0
    assert not ReturnForecast(0.0, {0.5: 1.0, 0.9: 100.0}, "champion", 1, True, 1, largest_s=100.0).beyond_calibration
    assert ReturnForecast(0.0, {0.5: 1.0}, "champion", 1, True, 1).to_dict()["beyond_calibration"] is None


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_wait_that_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="expected a number of seconds"):
        ReturnForecast(0.0, {0.5: 1.0, 0.9: 2.0}, "champion", 1, True, 1).waited(wrong)


def test_an_artefact_answers_the_same_and_has_the_same_bytes_twice(fitted: ReturnTimePredictor, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fitted.save(tmp_path / name, {"digest": "sha256:0"})
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again, rows = ReturnTimePredictor.load(tmp_path / "a"), return_rows(sessions(5, 4), fitted.encoder)
    np.testing.assert_array_equal(again.predict(rows), fitted.predict(rows))
    np.testing.assert_array_equal(again.predict_end(rows), fitted.predict_end(rows))
    assert again.trained_on.tolist() == list(range(5))


def test_an_artefact_whose_encoder_lost_a_tool_is_refused(fitted: ReturnTimePredictor, tmp_path: Path) -> None:
    fitted.save(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    content = json.loads(path.read_text())
    content["config"]["encoder"]["tools"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(ArtefactError):
        ReturnTimePredictor.load(tmp_path / "m")


def test_traces_without_times_are_refused(fitted: ReturnTimePredictor) -> None:
    table = sessions(8, 5)
    for name in ("started_at", "ended_at"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pc.if_else(False, table[name], None))
    rows = return_rows(table, fitted.encoder)
    with pytest.raises(TraceError, match="expected started_at and ended_at"):
        ReturnTimePredictor().fit(rows, rows, encoder=fitted.encoder)


def test_steps_without_an_llm_step_are_refused(fitted: ReturnTimePredictor) -> None:
    with pytest.raises(InputError, match="no LLM step"):
        fitted.forecast([{"workflow_type": "coding", "workflow_id": "w", "agent": "grep", "kind": "tool"}])


def test_boosted_trees_cover_new_sessions_where_a_fold_is_too_small_to_tell_input_profiles_apart() -> None:
    """The final scale separates profiles, with a third more rows, and those of the folds do not."""
    fresh, covered = sessions(300, 999), []
    for seed in range(6):
        table = sessions(72, seed)
        encoder = ReturnEncoder.fit(table)
        estimator = BoostedQuantiles(text_columns=encoder.text_columns)
        estimator.fit(return_rows(table, encoder), (0.5, 0.9), encoder.observed)
        rows = return_rows(fresh, encoder)
        rows = rows.take(rows.labelled)
        covered.append((rows.label <= estimator.predict(rows)[:, 1]).mean())
    assert np.mean(covered) > 0.885  # of six times 72 sessions; with the level of the folds' scale .855
