"""The router: fit, forecast of a request, artefact, back-off, bad input."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from router_samples import fit, fresh, law_parts

from presage.errors import ArtefactError, ConfigurationError, InputError, TraceError
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.router.predictor import KIND, RouterConfig, RouterPredictor


@pytest.fixture(scope="module")
def router() -> RouterPredictor:
    return fit()


def test_probabilities_come_near_the_law(router: RouterPredictor) -> None:
    drawn = fresh()
    said = router.probabilities(drawn.outcomes.prompts)
    assert said.shape == drawn.probabilities.shape
    assert said.dtype == np.float32
    truth = drawn.probabilities
    error = ((said - truth) ** 2).mean()
    assert error < 0.4 * ((truth.mean(axis=0) - truth) ** 2).mean()
    assert np.abs(said.mean(axis=0) - truth.mean(axis=0)).max() < 0.05


def test_picks_beat_the_best_single_model_where_there_is_room(router: RouterPredictor) -> None:
    drawn = fresh()
    rows = np.arange(len(drawn.outcomes))
    picked = drawn.probabilities[rows, router.picks(router.probabilities(drawn.outcomes.prompts))].mean()
    assert picked > drawn.probabilities.mean(axis=0).max() + 0.03


def test_without_signal_the_best_single_model_is_picked() -> None:
    train, calibration = law_parts()
    rng = np.random.default_rng(0)
    chance = np.array([0.7, 0.68, 0.5, 0.69])
    labels = [(rng.random(part.correct.shape) < chance).astype(np.float32) for part in (train, calibration)]
    router = RouterPredictor().fit(train.prompts, labels[0], calibration.prompts, labels[1], models=train.models)
    said = router.probabilities(fresh().outcomes.prompts)
    assert router.trust == 0
    assert set(router.picks(said).tolist()) == {int(router.base.argmax())}
    assert np.abs(said - router.base).max() < 0.15


def test_a_request_is_answered_as_its_row(router: RouterPredictor) -> None:
    prompts = fresh().outcomes.prompts[:40]
    said = router.probabilities(prompts)
    picks = router.picks(said)
    for i, prompt in enumerate(prompts):
        forecast = router.forecast(prompt)
        assert list(forecast.probabilities) == list(router.models)
        np.testing.assert_array_equal(np.float32(list(forecast.probabilities.values())), said[i])
        assert forecast.pick == router.models[picks[i]]
        assert forecast.source == ("back-off" if router.evidence.far([prompt])[0] else "champion")


def test_a_prompt_far_from_all_training_prompts_gets_base_rates_and_says_so(router: RouterPredictor) -> None:
    for prompt in ("zzyzx qwrtp grmbl", "", "¡¿ 数学", "\ud800"):
        forecast = router.forecast(prompt)
        assert forecast.source == "back-off"
        assert forecast.known < 0.5
        np.testing.assert_allclose(list(forecast.probabilities.values()), router.base, atol=1e-6)
        assert forecast.pick == router.models[int(router.base.argmax())]
    known = router.forecast(fresh().outcomes.prompts[0])
    assert known.source == "champion"
    assert known.known == 1


def test_a_model_with_few_labels_gets_its_base_rate(router: RouterPredictor) -> None:
    train, calibration = law_parts()
    large, small = train.models.index("large"), train.models.index("small")
    labels = train.correct.copy()
    labels[30:, small] = np.nan
    held = np.where(np.arange(4) == small, np.nan, calibration.correct).astype(np.float32)
    few = RouterPredictor().fit(train.prompts, labels, calibration.prompts, held, models=train.models)
    forecast = few.forecast(fresh().outcomes.prompts[0])
    assert forecast.evidence["small"] == (~np.isnan(labels[:, small])).sum() < 50
    assert forecast.probabilities["small"] == pytest.approx(few.base[small])
    assert forecast.probabilities["large"] != pytest.approx(few.base[large])


def test_models_that_share_no_prompt_are_still_told_apart_from_chance() -> None:
    train, calibration = law_parts()
    labels = train.correct.copy()
    turn = np.arange(len(labels)) % 2 == 0
    labels[np.ix_(turn, [0, 1])] = np.nan
    labels[np.ix_(~turn, [2, 3])] = np.nan
    router = RouterPredictor().fit(train.prompts, labels, calibration.prompts, calibration.correct, models=train.models)
    truth = fresh().probabilities
    said = router.probabilities(fresh().outcomes.prompts)
    for m in range(4):
        assert np.corrcoef(said[:, m], truth[:, m])[0, 1] > 0.5


def test_an_artefact_answers_the_same_and_has_the_same_bytes_twice(router: RouterPredictor, tmp_path: Path) -> None:
    for name, of in (("a", router), ("b", fit())):
        of.save(tmp_path / name, {"digest": "sha256:0"})
    again = RouterPredictor.load(tmp_path / "a")
    prompts = fresh().outcomes.prompts
    np.testing.assert_array_equal(again.probabilities(prompts), router.probabilities(prompts))
    assert again.forecast(prompts[0]) == router.forecast(prompts[0])
    assert again.models == router.models
    assert again.trained_on.tolist() == router.trained_on.tolist()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_no_word_of_a_prompt_enters_the_artefact(router: RouterPredictor, tmp_path: Path) -> None:
    router.save(tmp_path / "model")
    content = b"".join(file.read_bytes() for file in (tmp_path / "model").iterdir())
    for word in (b"equation", b"museum", b"concurrent"):
        assert word not in content


@pytest.mark.slow
def test_a_fresh_process_answers_number_by_number(router: RouterPredictor, tmp_path: Path) -> None:
    router.save(tmp_path / "model")
    prompt = fresh().outcomes.prompts[3]
    code = (
        "import json, sys; from presage.predictors.router.predictor import RouterPredictor as P; "
        "f = P.load(sys.argv[1]).forecast(sys.argv[2]); print(json.dumps(f.to_dict())); "
        "assert not {'torch', 'transformers', 'mlflow', 'sklearn'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model"), prompt]
    answered = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(answered.stdout) == router.forecast(prompt).to_dict()


def test_learning_again_uses_calibration_prompts_and_keeps_calibration(router: RouterPredictor) -> None:
    once = fit(RouterConfig(refit=False))
    np.testing.assert_array_equal(once.calibration.slope, router.calibration.slope)
    prompts = fresh().outcomes.prompts
    assert (once.probabilities(prompts) != router.probabilities(prompts)).any()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"head": "magic"}, "linear, transformer"),
        ({"rank": 0}, "rank is 0"),
        ({"min_evidence": 0}, "min_evidence is 0"),
    ],
)
def test_a_configuration_out_of_range_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        fit(RouterConfig(**settings))  # type: ignore[arg-type]


def test_a_head_that_is_trained_elsewhere_has_to_be_handed_in(router: RouterPredictor) -> None:
    with pytest.raises(ConfigurationError, match="needs a fitted scorer"):
        fit(RouterConfig(head="transformer"))
    train, calibration = law_parts()
    parts = (train.prompts, train.correct, calibration.prompts, calibration.correct)
    with pytest.raises(ConfigurationError, match="the scorer is 'linear'"):
        RouterPredictor(RouterConfig(head="transformer")).fit(*parts, models=train.models, scorer=router.scorer)
    handed = RouterPredictor().fit(*parts, models=train.models, scorer=router.scorer)
    assert handed.scorer is router.scorer


def test_labels_that_are_none_are_refused() -> None:
    train, calibration = law_parts()
    for labels, told in (
        (np.full_like(train.correct, np.nan), "no label"),
        (train.correct + 1, "outside 0..1"),
        (train.correct[:, :2], "expected one each"),
    ):
        with pytest.raises(TraceError, match=told):
            RouterPredictor().fit(train.prompts, labels, calibration.prompts, calibration.correct, models=train.models)


def test_a_prompt_that_is_no_text_is_refused(router: RouterPredictor) -> None:
    with pytest.raises(InputError, match="type NoneType"):
        router.forecast(None)  # type: ignore[arg-type]


def test_an_artefact_that_lacks_or_mixes_tensors_is_refused(router: RouterPredictor, tmp_path: Path) -> None:
    router.save(tmp_path / "model")
    whole = read_artefact(tmp_path / "model", kind=KIND)
    changes: list[dict[str, np.ndarray | None]] = [
        {"scorer/weights": None},
        {"calibration/slope": None},
        {"evidence/words": None},
        {"base": np.full(4, 2.0)},
        {"labels": np.zeros(3, np.int64)},
        {"scorer/weights": whole.tensors["scorer/weights"][1:]},
        {"calibration/shift": np.zeros(3)},
    ]
    for change in changes:
        tensors = {name: of for name, of in (dict(whole.tensors) | change).items() if of is not None}
        write_artefact(tmp_path / "cut", kind=KIND, config=whole.config, tensors=tensors, training_data={})
        with pytest.raises(ArtefactError, match="cut"):
            RouterPredictor.load(tmp_path / "cut")
