"""The remaining-length predictor: fit, forecast of a request, artefact, back-off, bad input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from length_samples import QUANTILES, fresh_rows, law_rows, pinball, with_labels

from presage.datasets.synthetic.lengths import generate_lengths
from presage.errors import ArtefactError, ConfigurationError, InputError, TraceError
from presage.features.lengths import length_rows
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.length.baselines import LENGTH_BASELINES
from presage.predictors.length.predictor import KIND, RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig

STEP = {"workflow_type": "research", "workflow_id": "w", "agent": "planner", "model": "model-7b", "input_tokens": 1300}


def fit(estimator: str = "forest", **more: object) -> RemainingLengthPredictor:
    encoder, train, calibration = law_rows()
    config = QuantileConfig(estimator=estimator, **more)  # type: ignore[arg-type]
    tasks = np.arange(7, dtype=np.uint64)
    return RemainingLengthPredictor(config, 0).fit(train, calibration, encoder=encoder, trained_on=tasks)


@pytest.fixture(scope="module")
def forest() -> RemainingLengthPredictor:
    return fit()


def test_a_request_is_answered_as_its_row_of_a_trace(forest: RemainingLengthPredictor) -> None:
    table = generate_lengths(20, 99).table
    said = forest.predict(length_rows(table, forest.encoder))
    steps = table.to_pylist()
    for at in range(0, len(table), 3):
        request = [dict(s) for s in steps[at - steps[at]["step"] : at + 1]]
        request[-1]["output_tokens"] = None
        forecast = forest.forecast(request)
        assert list(forecast.quantiles) == list(QUANTILES)
        np.testing.assert_array_equal(list(forecast.quantiles.values()), said[at])


def test_a_running_workflow_is_answered_as_its_steps_are(forest: RemainingLengthPredictor) -> None:
    steps = [dict(step) for step in generate_lengths(30, 98).table.to_pylist()]
    steps[4]["output_tokens"] = steps[7]["input_text"] = steps[9]["output_text"] = None
    steps[6]["agent"] = steps[12]["workflow_type"] = "never seen"
    for at, step in enumerate(steps):
        if step["step"] == 0:
            running = forest.open(step["workflow_type"])
        if {before["workflow_type"] for before in steps[at - step["step"] : at + 1]} == {step["workflow_type"]}:
            assert forest.begun(running, step) == forest.forecast(steps[at - step["step"] : at + 1])
        running.completed(step)


def test_auto_keeps_the_one_that_lost_least_on_the_calibration_part() -> None:
    fitted = fit("auto")
    assert set(fitted.losses) == {"forest", "boosted", "ridge"}
    assert fitted.estimator.name == min(fitted.losses, key=lambda name: sum(fitted.losses[name]))


@pytest.mark.parametrize("estimator", ["forest", "boosted"])
def test_an_artefact_answers_the_same_and_has_the_same_bytes_twice(estimator: str, tmp_path: Path) -> None:
    fitted = fit(estimator)
    for name in ("a", "b"):
        fitted.save(tmp_path / name, {"digest": "sha256:0"})
    again = RemainingLengthPredictor.load(tmp_path / "a")
    np.testing.assert_array_equal(again.predict(fresh_rows()), fitted.predict(fresh_rows()))
    assert again.forecast([STEP]) == fitted.forecast([STEP])
    assert again.quantiles == fitted.quantiles
    assert again.trained_on.tolist() == list(range(7))
    assert again.target == "remaining"
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.slow
def test_a_fresh_process_answers_number_by_number(forest: RemainingLengthPredictor, tmp_path: Path) -> None:
    forest.save(tmp_path / "model")
    code = (
        "import json, sys; from presage.predictors.length.predictor import RemainingLengthPredictor as P; "
        "f = P.load(sys.argv[1]).forecast([json.loads(sys.argv[2])]); print(json.dumps(f.to_dict())); "
        "assert not {'torch', 'mlflow', 'sklearn', 'lightgbm', 'quantile_forest'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model"), json.dumps(STEP)]
    answered = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(answered.stdout) == forest.forecast([STEP]).to_dict()


def test_known_is_champion_and_unknown_backs_off_wide_and_marked(forest: RemainingLengthPredictor) -> None:
    known = forest.forecast([STEP])
    assert (known.source, known.calibrated) == ("champion", True)
    assert known.evidence > 50
    for change in ({"workflow_type": "new"}, {"agent": "new"}):
        unknown = forest.forecast([STEP | change])
        assert (unknown.source, unknown.evidence, unknown.calibrated) == ("back-off", 0, False)
        assert unknown.quantiles[0.99] / unknown.quantiles[0.5] > known.quantiles[0.99] / known.quantiles[0.5]


def fit_large(estimator: str) -> RemainingLengthPredictor:
    """On so many rows that workflows with unknown agents have an estimator of their own."""
    encoder, train, calibration = law_rows(1200)
    return RemainingLengthPredictor(QuantileConfig(estimator=estimator), 0).fit(  # type: ignore[arg-type]
        train, calibration, encoder=encoder
    )


@pytest.mark.parametrize("estimator", ["forest", "boosted", "ridge"])
def test_quantiles_hold_in_workflows_whose_agents_a_release_renamed(estimator: str) -> None:
    fitted, (encoder, train, _) = fit_large(estimator), law_rows(1200)
    rows = encoder.with_unknown_names(fitted.rows(generate_lengths(300, 99).table), np.random.default_rng(3))
    rows = rows.take(rows.workflow_type < len(rows.vocabulary.workflow_types))
    after, constant = fitted.predict(rows), LENGTH_BASELINES["constant"](train, QUANTILES)(rows)
    for at, quantile in enumerate(QUANTILES):
        assert pinball(rows.label, after[:, at], quantile) < 0.9 * pinball(rows.label, constant[:, at], quantile)
    assert 0.84 < (rows.label <= after[:, 1]).mean() < 0.97
    for at in range(0, len(rows), 50):
        alone = fitted.predict_one(rows.workflow_type[at], rows.agent[at], rows.model[at], rows.numbers[at])
        np.testing.assert_array_equal(alone, after[at])


def test_workflows_without_unknown_agents_are_forecast_as_without_a_second_estimator(tmp_path: Path) -> None:
    fitted = fit_large("ridge")
    fitted.save(tmp_path / "model")
    whole = read_artefact(tmp_path / "model", kind=KIND)
    tensors = {name: of for name, of in whole.tensors.items() if not name.startswith("unknown/")}
    write_artefact(tmp_path / "before", kind=KIND, config=whole.config, tensors=tensors, training_data={})
    models = [RemainingLengthPredictor.load(tmp_path / name) for name in ("model", "before")]
    rows = fitted.rows(generate_lengths(100, 99).table)
    renamed = fitted.encoder.with_unknown_names(rows, np.random.default_rng(3))
    for model in models:
        np.testing.assert_array_equal(model.predict(rows), fitted.predict(rows))
    np.testing.assert_array_equal(models[0].predict(renamed), fitted.predict(renamed))
    assert (models[1].predict(renamed) != fitted.predict(renamed)).any()
    broken = {**tensors, "unknown/line/start": np.array(0.0)}
    write_artefact(tmp_path / "broken", kind=KIND, config=whole.config, tensors=broken, training_data={})
    with pytest.raises(ArtefactError):
        RemainingLengthPredictor.load(tmp_path / "broken")


def test_a_quantile_above_all_that_calibrated_it_says_so(forest: RemainingLengthPredictor) -> None:
    train = law_rows()[1]
    known, unknown = (forest.forecast([STEP | change]) for change in ({}, {"workflow_type": "new"}))
    own = train.workflow_type == train.vocabulary.workflow_types.index(STEP["workflow_type"])
    assert (known.largest, unknown.largest) == (train.label[own].max(), train.label.max())
    for forecast in (known, unknown):
        assert forecast.beyond_calibration == (round(forecast.quantiles[0.99]) > forecast.largest)
    assert replace(known, largest=round(known.quantiles[0.99])).beyond_calibration is False
    assert replace(known, largest=known.quantiles[0.99] - 1.0).beyond_calibration is True
    assert replace(known, largest=None).to_dict()["beyond_calibration"] is None


def test_an_artefact_of_before_the_largest_was_kept_is_read(forest: RemainingLengthPredictor, tmp_path: Path) -> None:
    forest.save(tmp_path / "model")
    of = read_artefact(tmp_path / "model")
    tensors = {name: array for name, array in of.tensors.items() if name != "estimator/largest"}
    write_artefact(tmp_path / "old", kind=of.kind, config=of.config, tensors=tensors, training_data={})
    old = RemainingLengthPredictor.load(tmp_path / "old").forecast([STEP])
    assert (old.largest, old.beyond_calibration) == (None, None)
    assert old.quantiles == forest.forecast([STEP]).quantiles


def test_rows_that_chose_the_estimator_are_learnt_from_and_do_not_calibrate() -> None:
    once, again = fit("boosted", refit=False), fit("boosted")
    train, selection = law_rows()[1:]
    assert once.estimator.evidence.sum() == len(train)
    assert again.estimator.evidence.sum() == len(train) + len(selection)
    for fitted in (once, again):
        assert fitted.estimator.conformal.rows.sum() == len(train)
    assert once.losses == again.losses  # judged before they were learnt from
    assert (once.predict(fresh_rows()) != again.predict(fresh_rows())).any()


def test_a_model_never_seen_is_answered_as_usual(forest: RemainingLengthPredictor) -> None:
    assert forest.forecast([STEP | {"model": "new"}]).source == "champion"


def test_a_type_below_the_floor_is_marked_and_wide(forest: RemainingLengthPredictor) -> None:
    rare = forest.forecast([STEP | {"workflow_type": "translation", "agent": "translator"}])
    assert rare.evidence >= 5
    assert rare.calibration < 100
    assert not rare.calibrated


@pytest.mark.parametrize("text", [None, "", "word " * 200_000, "\ud800"])
def test_any_prompt_is_answered(forest: RemainingLengthPredictor, text: str | None) -> None:
    said = list(forest.forecast([STEP | {"input_text": text}]).quantiles.values())
    assert np.isfinite(said).all()
    assert said == sorted(said)


def test_the_length_of_a_step_alone_can_be_the_target() -> None:
    table = generate_lengths(200, 1).table
    encoder = law_rows()[0]
    rows = length_rows(table, encoder, "step")
    held = rows.task % 4 == 0
    config = QuantileConfig(estimator="forest")
    fitted = RemainingLengthPredictor(config).fit(rows.take(~held), rows.take(held), encoder=encoder)
    assert fitted.target == "step"
    assert fitted.forecast([STEP]).quantiles[0.5] < 600  # a planner's plan, not the whole workflow


def test_other_quantiles_can_be_asked_for() -> None:
    fitted = fit(quantiles=(0.25, 0.75))
    assert list(fitted.forecast([STEP]).quantiles) == [0.25, 0.75]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quantiles": ()}, "quantiles"),
        ({"quantiles": (0.9, 0.5)}, "rising"),
        ({"quantiles": (0.5, 1.0)}, "between 0 and 1"),
        ({"estimator": "magic"}, "forest, boosted, ridge, auto"),
        ({"floor": 0}, "floor is 0"),
    ],
)
def test_a_configuration_out_of_range_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        fit(**settings)  # type: ignore[arg-type]


def test_traces_without_output_tokens_are_refused() -> None:
    encoder, train, calibration = law_rows()
    blank = with_labels(train, np.full(len(train), np.nan, np.float32))
    with pytest.raises(TraceError, match="expected output_tokens"):
        RemainingLengthPredictor().fit(blank, calibration, encoder=encoder)


def test_a_negative_count_in_a_request_is_refused(forest: RemainingLengthPredictor) -> None:
    with pytest.raises(InputError, match="0 or more"):
        forest.forecast([STEP | {"input_tokens": -3}])


def test_an_artefact_that_lacks_a_tensor_is_refused(forest: RemainingLengthPredictor, tmp_path: Path) -> None:
    forest.save(tmp_path / "model")
    whole = read_artefact(tmp_path / "model", kind=KIND)
    for lost in ("estimator/forest/starts", "estimator/evidence", "encoder/sketch.terms"):
        tensors = {name: array for name, array in whole.tensors.items() if name != lost}
        write_artefact(tmp_path / "cut", kind=KIND, config=whole.config, tensors=tensors, training_data={})
        with pytest.raises(ArtefactError):
            RemainingLengthPredictor.load(tmp_path / "cut")


def test_an_artefact_that_reads_a_next_agent_model_is_refused(forest: RemainingLengthPredictor, tmp_path: Path) -> None:
    forest.save(tmp_path / "model")
    whole = read_artefact(tmp_path / "model", kind=KIND)
    config = {**whole.config, "next_agent": {"model": "next-agent version 3"}}
    write_artefact(tmp_path / "old", kind=KIND, config=config, tensors=whole.tensors, training_data={})
    with pytest.raises(ArtefactError, match="no longer supported"):
        RemainingLengthPredictor.load(tmp_path / "old")
