"""A projected state has the same bits whatever adds it up: a state alone, a whole trace, NumPy in float64, torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.features.project_rows import columns_of, project_state, project_states
from presage.features.projection import Projection


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
    from presage.serving_hooks.vllm.tap.rows import Projector

    rng = np.random.default_rng(batch)
    projection = Projection(
        rng.normal(size=(576, 24)).astype(np.float16),
        rng.random(24).astype(np.float32),
        rng.normal(size=24).astype(np.float32),
    )
    states = torch.from_numpy(rng.normal(size=(batch, 576))).bfloat16()
    found, _ = Projector({"prefill": (projection.weights(), projection.bias)}).project(
        "prefill", states, range(batch)[::-1]
    )
    np.testing.assert_array_equal(found[::-1], projection(states.half().float().numpy()))
