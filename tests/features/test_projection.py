"""Projections against plain numpy, out of fold against planted noise; the bits and edges of the compiled product."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from word_samples import prefixes_in

from presage.features.prefixes import Prefixes
from presage.features.projection import (
    FOLDS,
    Projection,
    columns_of,
    fit_projection,
    project_state,
    project_states,
)

# Every entry of the matrix is rounded to float16, a relative 2^-11 of itself and no more than 2^-11 of its column's
# largest: over d entries and states of unit size an error of about sqrt(d) * 2^-11 of the scale.
HALF = 2.0**-11


def sample(workflows: int = 120, seed: int = 0) -> Prefixes:
    """Random walks over two agents."""
    rng = np.random.default_rng(seed)
    return prefixes_in(["".join(rng.choice(list("ab"), rng.integers(2, 7))) for _ in range(workflows)], "ab")


def low_rank(rows: int, rank: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    """Exactly `rank` directions around a mean far from zero, spread 4, 2, 1, …"""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    scores = rng.normal(size=(rows, rank)) * 2.0 ** np.arange(2, 2 - rank, -1)
    return (rng.normal(size=width) * 3 + scores @ basis.T).astype(np.float32)


@pytest.mark.parametrize("width", [12, 700])  # by eigenvectors, and by the randomised range finder
def test_components_are_those_of_a_plain_pca_of_unit_variance(width: int) -> None:
    prefixes = sample()
    states = low_rank(prefixes.steps, 3, width)
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": states}), "prefill", components=3, discriminants=0, seed=0
    )
    left, _, _ = np.linalg.svd(states.astype(float) - states.mean(axis=0, dtype=float), full_matrices=False)
    wanted = left[:, :3] * np.sqrt(prefixes.steps)
    assert projection.size == projected.shape[1] == 3
    assert (projection.matrix.dtype, projection.state_size) == (np.float16, width)
    for i in range(3):
        sign = np.sign(projected[:, i] @ wanted[:, i])
        assert np.abs(projected[:, i] * sign - wanted[:, i]).max() < 2 * np.sqrt(width) * HALF
    np.testing.assert_array_equal(projection(states), projected)


def test_more_components_than_directions_are_zero_and_stay_so_on_other_states() -> None:
    prefixes = sample()
    states = low_rank(prefixes.steps, 2, 10)
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": states}), "prefill", components=8, discriminants=4, seed=0
    )
    assert not projected[:, 2:8].any()
    elsewhere = np.random.default_rng(1).normal(size=(50, 10)).astype(np.float32) * 5
    assert np.abs(projection(elsewhere)).max() < 100  # nothing that never varied is blown up


def test_training_uses_the_rounded_matrix() -> None:
    prefixes = sample()
    states = np.random.default_rng(0).normal(size=(prefixes.steps, 20)).astype(np.float32)
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": states}), "prefill", components=5, discriminants=2, seed=0
    )
    again = Projection.from_tensors(projection.to_tensors())
    np.testing.assert_array_equal(again(states)[:, :5], projected[:, :5])
    np.testing.assert_array_equal(again.weights(), projection.matrix.astype(np.float32) * projection.scale)
    row = states[3] @ again.weights() + again.bias
    np.testing.assert_allclose(row, projected[3, :5].tolist() + projection(states[3:4])[0, 5:].tolist(), atol=1e-4)


def test_a_missing_state_projects_to_zero_and_teaches_nothing() -> None:
    prefixes = sample()
    states = np.random.default_rng(0).normal(size=(prefixes.steps, 12)).astype(np.float32)
    missing = np.arange(prefixes.steps) % 3 == 0
    holed = np.where(missing[:, None], np.nan, states).astype(np.float32)
    projection, projected = fit_projection(
        prefixes.with_states({"completion": holed}), "completion", components=4, discriminants=3, seed=0
    )
    assert not projected[missing].any()
    assert not projection(holed)[missing].any()
    assert np.isfinite(projected).all()
    other = np.where(missing[:, None], np.nan, states)
    other[:, 1:][missing] = 1e6  # what stands beside the NaN is not read
    second, _ = fit_projection(
        prefixes.with_states({"completion": other.astype(np.float32)}),
        "completion",
        components=4,
        discriminants=3,
        seed=0,
    )
    np.testing.assert_array_equal(projection.matrix, second.matrix)


def test_discriminants_find_what_tells_outcomes_apart_however_little_it_varies() -> None:
    prefixes = sample(300)
    rng = np.random.default_rng(0)
    states = rng.normal(size=(prefixes.steps, 30)).astype(np.float32) * 5
    is_b = prefixes.outcomes[:, 0] == 1
    states[:, 0] = rng.normal(size=prefixes.steps) * 0.5 + is_b
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": states}), "prefill", components=2, discriminants=2, seed=0
    )
    assert projection.size == 4
    told_apart = [abs(np.corrcoef(column, is_b)[0, 1]) for column in projected.T]
    assert max(told_apart[:2]) < 0.2
    assert max(told_apart[2:]) > 0.5


def test_training_rows_come_out_of_fold_and_no_task_leaks() -> None:
    # Each task is its own state; the outcomes are noise. Within the rows of a fit that is as good as a label.
    rng = np.random.default_rng(0)
    tasks = 60
    words = ["a" + str(rng.choice(list("ab"))) * 2 for _ in range(tasks) for _ in range(2)]
    words[1::2] = words[::2]  # two runs of a task go alike
    prefixes = prefixes_in(words, "ab")
    prefixes = replace(prefixes, task=np.repeat(np.arange(tasks), 2).astype(np.int32))
    of_task = np.eye(tasks, dtype=np.float32)[prefixes.task[prefixes.workflow]] * 10
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": of_task}), "prefill", components=0, discriminants=1, seed=0
    )
    first = prefixes.position == 0
    label = prefixes.outcomes[first, 0].astype(float)
    in_fold = projection(of_task)[first, 0]
    assert abs(np.corrcoef(in_fold, label)[0, 1]) > 0.9  # it flatters the rows it was fitted on
    out_of_fold = projected[first, 0]
    assert np.corrcoef(out_of_fold * np.sign(np.corrcoef(in_fold, label)[0, 1]), label)[0, 1] < 0.3
    assert not np.allclose(in_fold, out_of_fold)


def test_rows_of_one_task_are_projected_by_a_fit_that_never_saw_the_task() -> None:
    prefixes = sample(20)
    states = np.random.default_rng(0).normal(size=(prefixes.steps, 6)).astype(np.float32)
    one_task = replace(prefixes, task=np.zeros(20, np.int32))
    _, projected = fit_projection(
        one_task.with_states({"prefill": states}), "prefill", components=2, discriminants=2, seed=0
    )
    assert not projected[:, 2:].any()  # there is no other task to learn from
    assert FOLDS > 1


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_any_shape_fits_is_finite_and_repeats(workflows: int, width: int, seed: int) -> None:
    prefixes = sample(workflows, seed)
    states = np.random.default_rng(seed).normal(size=(prefixes.steps, width)).astype(np.float16).astype(np.float32)
    given_states = prefixes.with_states({"prefill": states})
    first, projected = fit_projection(given_states, "prefill", components=5, discriminants=3, seed=seed)
    second, again = fit_projection(given_states, "prefill", components=5, discriminants=3, seed=seed)
    assert projected.shape == (prefixes.steps, first.size)
    assert np.isfinite(projected).all()
    assert np.isfinite(first.weights()).all()
    np.testing.assert_array_equal(projected, again)
    np.testing.assert_array_equal(first.matrix, second.matrix)


@pytest.mark.filterwarnings("error")
def test_training_rows_without_any_state_give_an_empty_projection() -> None:
    prefixes = sample(5)
    states = np.full((prefixes.steps, 4), np.nan, np.float32)
    projection, projected = fit_projection(
        prefixes.with_states({"prefill": states}), "prefill", components=5, discriminants=3, seed=0
    )
    assert projected.shape == (prefixes.steps, projection.size)
    assert not projected.any()
    assert np.isfinite(projection(np.ones((2, 4), np.float32))).all()


@pytest.mark.parametrize("width", [1, 4, 5, 16])
def test_columns_are_filled_up_with_zeros(width: int) -> None:
    weights = np.arange(3 * width, dtype=np.float32).reshape(3, width) + 1
    columns = columns_of(weights)
    assert len(columns) % 4 == 0
    np.testing.assert_array_equal(columns[:width], weights.T)
    assert not columns[width:].any()


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 5), st.integers(0, 17), st.integers(1, 300), st.integers(0, 1000))
def test_a_state_has_the_bits_of_the_exact_sum_rounded_once(rows: int, width: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(rows, size)).astype(np.float16).astype(np.float32)
    weights, bias = rng.normal(size=(size, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    room = np.full((rows + 1, width), 7, np.float32)
    project_states(states, columns_of(weights), bias, room[:rows])
    wanted = (states.astype(np.float64) @ weights.astype(np.float64) + bias).astype(np.float32)
    np.testing.assert_array_equal(room[:rows], wanted)
    assert (room[rows:] == 7).all()
    alone = np.empty(width, np.float32)
    for state, row in zip(states, wanted, strict=True):
        project_state(state, columns_of(weights), bias, alone)
        np.testing.assert_array_equal(alone, row)


@pytest.mark.vllm
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_worker_projects_to_the_bits_of_training(batch: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; the worker's code belongs to its hooks")
    from presage.serving_hooks.vllm.hidden_states.connector import Projector, states_of

    rng = np.random.default_rng(batch)
    projection = Projection(
        rng.normal(size=(576, 24)).astype(np.float16),
        rng.random(24).astype(np.float32),
        rng.normal(size=24).astype(np.float32),
    )
    rows = torch.from_numpy(rng.normal(size=(batch, 576))).bfloat16()
    projector = Projector({"prefill": (projection.weights(), projection.bias)})
    found = projector.project("prefill", states_of(rows, range(batch)[::-1])).numpy()
    np.testing.assert_array_equal(found[::-1], projection(rows.half().float().numpy()))
