"""States mean the same in training and in serving, whatever their source."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_samples import save_bert

from presage.datasets.schema import conform
from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.features.moment import MOMENTS
from presage.features.prefixes import prefixes_of
from presage.features.states import StateSource, StepTexts, candidates, captured_source, encoder_source
from presage.features.vocabulary import Vocabulary

SIZE = 6


def steps(**columns: list[Any]) -> pa.Table:
    """A trace of 8 steps with these columns."""
    rows = 8
    base = {
        "workflow_type": ["t"] * rows,
        "workflow_id": [f"w{i // 2}" for i in range(rows)],
        "step": [0, 1] * 4,
        "agent": ["planner", "writer"] * 4,
    }
    return conform(pa.table(base | columns), "test")


def vectors(seed: int, size: int = SIZE) -> list[list[float] | None]:
    rows = np.random.default_rng(seed).normal(size=(8, size)).astype(np.float16).astype(float).tolist()
    return [None if i == 3 else row for i, row in enumerate(rows)]


def with_texts() -> pa.Table:
    texts = [f"plan the answer {i % 3}\n" for i in range(8)]
    return steps(input_text=[*texts[:-1], None], output_text=["done: writer", *texts[1:-2], None, None])


def with_states() -> pa.Table:
    return steps(prefill_state=vectors(0), completion_state=vectors(1, 4), input_text=["plan it"] * 8)


def sketched(table: pa.Table) -> StateSource:
    """A sketch fitted on all steps."""
    texts = StepTexts.of(table, prefixes_of(table, Vocabulary.from_table(table), 3))
    return texts.fit(np.ones(len(table), bool), np.arange(len(table)) // 2, relevant=False, seed=0)[0]


def again(source: StateSource) -> StateSource:
    """As a fresh process finds it in an artefact."""
    return StateSource.from_artefact(json.loads(json.dumps(source.to_config())), source.to_tensors())


def assert_steps_agree(source: StateSource, table: pa.Table, atol: float = 0.0) -> None:
    found = source.states(table)
    for moment in MOMENTS:
        for i, step in enumerate(table.to_pylist()):
            one = source.of_step(step, moment)
            if moment not in found or np.isnan(found[moment][i]).all():
                assert one is None
            else:
                assert one is not None
                assert one.dtype == found[moment].dtype == np.float32
                np.testing.assert_allclose(one, found[moment][i], rtol=0, atol=atol)


def test_captured_states_are_the_columns() -> None:
    source = captured_source(with_states())
    assert source.kind == "captured"
    assert source.sizes == {"prefill": SIZE, "completion": 4}
    found = source.states(with_states())
    wanted = np.array([row or [np.nan] * SIZE for row in vectors(0)], np.float32)
    np.testing.assert_array_equal(found["prefill"], wanted)
    assert_steps_agree(again(source), with_states())
    assert source.to_tensors() == {}


def test_captured_states_of_chunks_and_slices() -> None:
    table = with_states()
    pieces = pa.concat_tables([table.slice(0, 2), table.slice(2, 3), table.slice(5)])
    source = captured_source(table)
    whole = source.states(table)["prefill"]
    np.testing.assert_array_equal(source.states(pieces)["prefill"], whole)
    np.testing.assert_array_equal(source.states(table.slice(2, 4))["prefill"], whole[2:6])


@pytest.mark.parametrize("given_as", [list, np.float64, np.float32, np.float16])
def test_a_state_is_rounded_as_the_trace_keeps_it(given_as: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.abs(values) < 65504], [0.1, 2**-14, 2**-25, 65519.99]]).astype(np.float64)
    if given_as is not list:
        values = values.astype(given_as).astype(np.float64)
    wanted = StateSource("captured", {"prefill": len(values)}).states(steps(prefill_state=[values.tolist()] * 8))
    step = {"prefill_state": values.tolist() if given_as is list else values.astype(given_as)}
    found = StateSource("captured", {"prefill": len(values)}).of_step(step, "prefill")
    np.testing.assert_array_equal(found, wanted["prefill"][0])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0] * 5, "5 numbers.*trained with 3"),
        ([], "0 numbers.*trained with 3"),
        ([[1.0] * 3], "1×3 numbers.*trained with 3"),
        (1.0, "no numbers.*trained with 3"),
        ([1.0, float("nan"), 0.0], "NaN"),
        ([1.0, float("inf"), float("-inf")], "NaN, infinity"),
        ([1.0, 1e9, 0.0], "65504"),
        ([1.0, None, 0.0], "not a list of numbers"),
        ([[1.0], [1.0, 2.0]], "not a list of numbers"),
        (np.array([1.0, 7e4, 0.0], np.float32), "65504"),
        (np.array([1.0, np.nan, 0.0], np.float32), "NaN"),
        ("secretword", "not a list of numbers"),
        (["secretword"] * 3, "not a list of numbers"),
    ],
)
def test_a_state_that_cannot_be_meant_is_refused(value: Any, message: str) -> None:
    source = StateSource("captured", {"prefill": 3})
    with pytest.raises(InputError, match=message) as caught:
        source.of_step({"prefill_state": value}, "prefill")
    assert "secretword" not in str(caught.value)


def test_states_of_another_width_are_refused() -> None:
    source = captured_source(with_states())
    with pytest.raises(InputError, match=r"completion_state has 5 numbers.*trained with 4"):
        source.states(steps(completion_state=vectors(0, 5)))


def test_a_state_that_is_not_finite_is_refused_with_its_row() -> None:
    broken = np.zeros((8, 3), np.float16)
    broken[5, 1] = np.nan
    table = steps().append_column("prefill_state", pa.FixedSizeListArray.from_arrays(pa.array(broken.ravel()), 3))
    with pytest.raises(InputError, match="row 5, prefill_state"):
        StateSource("captured", {"prefill": 3}).states(table)


def test_many_captured_states_are_those_of_the_trace() -> None:
    halves = np.random.default_rng(0).normal(size=(2_000, 5_120)).astype(np.float16)
    column = pa.FixedSizeListArray.from_arrays(pa.array(halves.ravel()), 5_120)
    table = pa.table({"prefill_state": column})
    source = StateSource("captured", {"prefill": 5_120})
    found = source.states(table)["prefill"]
    np.testing.assert_array_equal(found[::100], halves[::100].astype(np.float32))


def test_sketched_states_agree_to_the_last_bit() -> None:
    table = with_texts()
    source = sketched(table)
    assert source.kind == "sketch"
    assert set(source.sizes) == set(MOMENTS)
    found = source.states(table)
    assert np.isnan(found["prefill"]).any(axis=1).tolist() == [False] * 7 + [True]
    np.testing.assert_array_equal(found["prefill"][1], found["completion"][1])
    assert_steps_agree(source, table)
    assert_steps_agree(again(source), table)


def test_embedded_states(tmp_path: Any) -> None:
    table, done = with_texts(), []
    folder = save_bert(tmp_path / "bert")
    source = encoder_source(table, str(folder), cache=tmp_path / "cache", progress=done.append)
    assert source.kind == "encoder"
    assert source.sizes == {"prefill": 24, "completion": 24}
    assert sum(done) == 4, "distinct texts"
    assert source.to_tensors() == {}
    assert_steps_agree(source, table)
    fresh = StateSource.from_artefact(source.to_config(), {}, cache=tmp_path / "empty")
    for moment, states in source.states(table).items():
        np.testing.assert_allclose(fresh.states(table)[moment], states, atol=1e-5)
    assert_steps_agree(again(source), table, atol=1e-5)


def test_another_encoder_than_trained_with_is_refused(tmp_path: Any) -> None:
    folder = save_bert(tmp_path / "bert")
    cache = tmp_path / "cache"
    source = encoder_source(with_texts(), str(folder), cache=cache)
    save_bert(folder, seed=1)
    loaded = StateSource.from_artefact(source.to_config(), {}, cache=cache)
    assert loaded.of_step({}, "prefill") is None, "without a text nothing is loaded"
    with pytest.raises(ArtefactError, match="put the files it was trained with back"):
        loaded.of_step({"input_text": "plan"}, "prefill")


@pytest.mark.parametrize(
    ("table", "states", "wanted"),
    [
        (with_states(), "auto", ("none", "captured", "relevant text", "text")),
        (with_texts(), "auto", ("none", "relevant text", "text")),
        (steps(), "auto", ("none",)),
        (with_states(), "captured", ("captured",)),
        (with_states(), "text", ("relevant text", "text")),
        (with_states(), "none", ("none",)),
    ],
    ids=["all", "texts", "neither", "captured", "text", "none"],
)
def test_the_sources_that_may_be_read(table: pa.Table, states: Any, wanted: tuple[str, ...]) -> None:
    assert candidates(table, states) == wanted


def test_an_encoder_is_one_source() -> None:
    assert candidates(with_texts(), "auto", "some/encoder") == ("none", "text")


def test_steps_that_a_sketch_was_not_fitted_on_are_seen_as_fresh_ones() -> None:
    table = with_texts()
    texts = StepTexts.of(table, prefixes_of(table, Vocabulary.from_table(table), 3))
    fitted_on = np.arange(8) < 6
    source, states = texts.fit(fitted_on, np.arange(8) // 2, relevant=False, seed=0)
    fresh = source.states(table)
    for moment in MOMENTS:
        np.testing.assert_array_equal(states[moment][~fitted_on], fresh[moment][~fitted_on])


@pytest.mark.parametrize(
    ("models", "wanted"),
    [
        (["m"] * 8, "m"),
        ([*["m"] * 6, None, "other"], "m"),
        (["m", "n"] * 4, None),
        ([None] * 8, None),
        (["m", None] * 4, None),
    ],
    ids=["one", "one where there are states", "two", "none named", "one and one unnamed"],
)
def test_captured_states_belong_to_the_one_model_that_is_named(models: list[str | None], wanted: str | None) -> None:
    states = [*vectors(0)[:6], None, None] if models[-1] == "other" else vectors(0)
    source = captured_source(steps(prefill_state=states, model=models))
    assert source.served_model == again(source).served_model == wanted
    assert sketched(steps(input_text=["plan it"] * 8, model=models)).served_model is None


@pytest.mark.parametrize("layer", [None, 20])
def test_captured_states_keep_their_layer_and_those_of_another_are_refused(layer: int | None) -> None:
    table = steps(prefill_state=vectors(0), state_layer=[layer] * 8)
    source = captured_source(table)
    assert source.layer == again(source).layer == layer
    assert ("layer" in source.to_config()) == (layer is not None)  # as artefacts of before there were layers
    assert source.states(table)["prefill"].shape == (8, SIZE)
    assert again(source).states(steps(state_layer=[7] * 8)) == {}
    with pytest.raises(InputError, match="those after layer 7; the predictor was trained with those after "):
        again(source).states(steps(prefill_state=vectors(0), state_layer=[7] * 8))


def test_states_of_several_layers_are_refused_and_steps_without_one_have_none() -> None:
    with pytest.raises(InputError, match="several layers in one trace: those after layer 20 and after the final norm"):
        captured_source(steps(prefill_state=vectors(0), state_layer=[20, None] * 4))
    some = [*vectors(0)[:6], None, None]
    assert captured_source(steps(prefill_state=some, state_layer=[20] * 6 + [None, 7])).layer == 20


def test_none_has_no_states() -> None:
    source = again(StateSource("none"))
    assert source.states(with_states()) == {}
    assert source.of_step(with_states().to_pylist()[0], "prefill") is None


@pytest.mark.parametrize("states", ["captured", "text"])
def test_asked_for_but_absent(states: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"--states {states}, but no step .* use --states"):
        candidates(steps(), states)


def test_a_moment_absent_is_left_out() -> None:
    table = steps(input_text=["plan it", "read it"] * 4)
    source = sketched(table)
    assert list(source.states(table)) == ["prefill"]
    assert list(source.states(with_texts())) == ["prefill"], "training had no outputs"
    assert source.of_step({"output_text": "plan it"}, "completion") is None
    assert source.states(steps()) == {}


def test_a_text_that_is_none_is_refused() -> None:
    source = sketched(with_texts())
    with pytest.raises(InputError, match="input_text is a int; expected a string"):
        source.of_step({"input_text": 3}, "prefill")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kind": "pickle", "sizes": {}},
        {"kind": "captured", "sizes": [3]},
        {"kind": "captured", "sizes": {"prefill": "3"}},
        {"kind": "captured", "sizes": {"later": 3}},
        {"kind": "captured", "sizes": {"prefill": 0}},
        {"kind": "sketch", "sizes": {"prefill": 3}},
        {"kind": "encoder", "sizes": {"prefill": 3}, "encoder": "x"},
    ],
    ids=json.dumps,
)
def test_a_configuration_that_is_none_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ArtefactError):
        StateSource.from_artefact(config, {})


def test_a_sketch_of_another_width_than_its_configuration_is_refused() -> None:
    source = sketched(with_texts())
    config = source.to_config() | {"sizes": {"prefill": 999}}
    with pytest.raises(ArtefactError, match="999"):
        StateSource.from_artefact(config, source.to_tensors())
