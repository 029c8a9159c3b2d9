"""Features of texts that another process has computed: the numbers are those of the texts themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_name import Forecaster, VersionedForecaster
from numpy.typing import NDArray
from text_samples import Steps, so_far, text_lengths, text_predictor, text_workflows

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.features.states import TEXT_COLUMN
from presage.predictors.common.artefact import artefact_digest
from presage.predictors.quantiles.choice import QuantileConfig
from presage.serving_hooks.forecasting.champions import load_forecasts
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecasts import ReadsTexts, TextModel
from presage.serving_hooks.monitoring.drift import Drift
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.monitor import ForecastMonitor
from presage.serving_hooks.settings import ForecastSettings
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import NOT_AWAITED, LiveForecast
from presage.training.length.train import fit_lengths

PATIENT = Budget(deadline_s=60.0)
MODEL = {"next-agent": TextModel(Path("model"), "sha256:0", {PREFILL: 1, COMPLETION: 1})}


def features(step: dict[str, Any], moment: Moment) -> NDArray[np.float32]:
    predictor = text_predictor()
    return predictor.project(moment, predictor.source.of_step({TEXT_COLUMN[moment]: step[TEXT_COLUMN[moment]]}, moment))


def awaiting(**given: Any) -> VersionedForecaster:
    asked = VersionedForecaster(Forecaster(text_predictor(), 3, text_models=MODEL, budget=PATIENT, **given))
    assert isinstance(asked, ReadsTexts)
    asked.await_answers()
    return asked


def begin(asked: VersionedForecaster, step: dict[str, Any], arrives: bool = False) -> LiveForecast:
    names, projected = (step["workflow_type"], step["workflow_id"], step["agent"]), features(step, PREFILL)
    if arrives:
        asked.remaining_tokens(Step(*names, number=step["step"]), step["input_tokens"], projected=projected)
    return asked.on_prefill(*names, step=step["step"], input_tokens=step["input_tokens"], projected=projected)


def end(asked: VersionedForecaster, step: dict[str, Any]) -> LiveForecast:
    return asked.on_completion(step["workflow_type"], step["workflow_id"], output_tokens=step["output_tokens"])


def answer(asked: VersionedForecaster, step: dict[str, Any], of: LiveForecast) -> LiveForecast | None:
    state = features(step, COMPLETION)
    return asked.on_completion_state(step["workflow_type"], step["workflow_id"], state, of)


def same(live: LiveForecast | None, steps: Steps) -> None:
    assert live is not None
    whole = text_predictor().forecast(steps)
    assert (live.source, live.evidence, live.moment, live.reason) == (whole.source, whole.evidence, whole.moment, None)
    assert live.probabilities[:, -1].tolist() == list(whole.end)
    for row, agents in zip(live.probabilities, whole.agents, strict=True):
        assert dict(zip(live.agents, row[:-1].tolist(), strict=True)) == agents


@pytest.mark.parametrize("arrives", [False, True])
def test_forecasts_with_features_are_those_of_the_texts(arrives: bool) -> None:
    monitor = ForecastMonitor(Drift({}), LiveAccuracy())
    asked = awaiting(monitor=monitor)
    for steps in text_workflows():
        for index, step in enumerate(steps):
            same(begin(asked, step, arrives), so_far(steps, index, False))
            without = end(asked, step)
            live = answer(asked, step, without)
            same(live, so_far(steps, index, True))
            assert live is not None
            assert live.probabilities.tolist() != without.probabilities.tolist()
    assert asked.latest.states == {None: sum(map(len, text_workflows()))}
    assert asked.latest.inputs["text"] == asked.latest.inputs["steps"]
    assert not asked.latest.errors


def test_an_answer_that_comes_after_the_next_step_changes_nothing() -> None:
    asked, (steps, *_) = awaiting(), text_workflows()
    begin(asked, steps[0])
    done = end(asked, steps[0])
    live = begin(asked, steps[1])
    assert answer(asked, steps[0], done) is None
    assert asked.latest.states == {NOT_AWAITED: 1}
    unread = {**steps[0], "output_text": None}
    same(live, so_far([unread, *steps[1:]], 1, False))


def test_a_workflow_of_an_older_version_gets_no_features_of_the_latest() -> None:
    asked, (steps, *_) = awaiting(), text_workflows()
    begin(asked, steps[0])
    done = end(asked, steps[0])
    asked.take_over(Forecaster(text_predictor(), 4, text_models=MODEL, budget=PATIENT))
    assert answer(asked, steps[0], done) is None
    unread = [{**step, "input_text": None if index else step["input_text"], "output_text": None}
              for index, step in enumerate(steps)]  # fmt: skip
    same(begin(asked, steps[1], True), so_far(unread, 1, False))


SERVED = "synthetic"
COUNTED = {"input_text": None, "system_prompt": None, "model": None}


def reads_lengths(version: int = 3) -> Forecaster:
    return Forecaster(None, lengths=text_lengths(), lengths_version=version, served_model=SERVED, budget=PATIENT)


def begin_read(asked: VersionedForecaster, step: dict[str, Any], arrives: bool, read: Any = None) -> LiveForecast:
    names = step["workflow_type"], step["workflow_id"], step["agent"]
    read = text_lengths().encoder.read_prompt(step) if read is None else read
    if arrives:
        asked.remaining_tokens(Step(*names, number=step["step"]), step["input_tokens"], prompt_read=read)
    return asked.on_prefill(*names, step=step["step"], input_tokens=step["input_tokens"], prompt_read=read)


def answer_read(asked: VersionedForecaster, step: dict[str, Any]) -> bool:
    read = text_lengths().encoder.read_answer(step)
    return asked.on_answer_read(step["workflow_type"], step["workflow_id"], read)


def same_lengths(live: LiveForecast, steps: Steps) -> None:
    whole = text_lengths().forecast(steps)
    assert (live.remaining.source, live.remaining.evidence) == (whole.source, whole.evidence)
    assert dict(zip(live.remaining.quantiles, live.remaining.tokens, strict=True)) == whole.quantiles


@pytest.mark.parametrize("arrives", [False, True])
def test_lengths_with_features_are_those_of_the_texts(arrives: bool) -> None:
    asked, without = VersionedForecaster(reads_lengths()), 0
    for steps in text_workflows():
        for index, step in enumerate(steps):
            live = begin_read(asked, step, arrives)
            same_lengths(live, so_far(steps, index, False))
            bare = [*steps[:index], {**steps[index], **COUNTED}]
            without += dict(text_lengths().forecast(bare).quantiles) != dict(
                zip(live.remaining.quantiles, live.remaining.tokens, strict=True)
            )
            end(asked, step)
            assert answer_read(asked, step)
    assert without, "the texts make a difference"
    assert asked.latest.inputs["text"] == asked.latest.inputs["steps"]


def test_only_models_that_read_texts_are_named_with_the_numbers_that_they_read(tmp_path: Path) -> None:
    text_lengths().save(tmp_path / "texts")
    config = QuantileConfig(estimator="ridge", refit=False)
    fit_lengths(generate("retry", 20, 0).table, config, texts="none").predictor.save(tmp_path / "none")
    found: dict[str, Any] = {}
    for name in ("texts", "none"):
        settings = {
            "next_agent": None,
            "return_time": None,
            "profile": None,
            "reload_s": None,
            "remaining_length": str(tmp_path / name),
        }
        source = load_forecasts(ForecastSettings(**settings)).next_agents
        assert isinstance(source, ReadsTexts)
        found[name] = source.text_models
    size, digest = text_lengths().encoder.answer_size, artefact_digest(tmp_path / "texts")
    widths = {PREFILL: 2 + size, COMPLETION: size}
    assert found == {"texts": {"remaining-length": TextModel(tmp_path / "texts", digest, widths)}, "none": {}}


def test_what_is_read_of_an_answer_after_the_next_step_began_changes_nothing() -> None:
    asked, (steps, *_) = VersionedForecaster(reads_lengths()), text_workflows()
    begin_read(asked, steps[0], False)
    end(asked, steps[0])
    begin_read(asked, steps[1], True)
    assert not answer_read(asked, steps[0])
    assert not asked.on_answer_read("retry", "nobody", text_lengths().encoder.read_answer(steps[0]))
    end(asked, steps[1])
    assert answer_read(asked, steps[1])
    unread = [{**steps[0], "output_text": None}, *steps[1:]]
    same_lengths(begin_read(asked, steps[2], False), so_far(unread, 2, False))


def test_lengths_of_a_workflow_of_an_older_version_get_nothing_read_by_the_latest() -> None:
    asked, (steps, *_) = VersionedForecaster(reads_lengths()), text_workflows()
    begin_read(asked, steps[0], False)
    end(asked, steps[0])
    asked.take_over(reads_lengths(4))
    assert not answer_read(asked, steps[0])
    unread = [{**steps[0], "output_text": None}, {**steps[1], **COUNTED}]
    same_lengths(begin_read(asked, steps[1], True), so_far(unread, 1, False))


@pytest.mark.parametrize("wrong", [lambda read: read[1:], lambda read: read.astype(float), lambda read: read + np.inf])
def test_what_another_predictor_read_costs_a_workflow_its_lengths_alone(wrong: Callable[[Any], Any]) -> None:
    read = wrong(np.zeros(2 + text_lengths().encoder.answer_size, np.float32))
    asked, (steps, other, *_) = VersionedForecaster(reads_lengths()), text_workflows()
    assert begin_read(asked, steps[0], False, read).remaining.source == "none"
    end(asked, steps[0])
    assert not answer_read(asked, steps[0])
    same_lengths(begin_read(asked, other[0], False), so_far(other, 0, False))
