"""The input vector by hand: token counts, states, means, distances; one step at a time against a whole trace."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.features.history import history_size
from presage.features.inputs import (
    NO_ANSWER,
    NO_EARLIER,
    NO_STATE,
    at_completion,
    at_prefill,
    begin,
    inputs_size,
    known,
    sums_size,
    unroll,
)

AGENTS, TOOLS, P, C = 2, 2, 2, 3
R = history_size(AGENTS)
CALLED, COUNT, KIND = slice(R, R + TOOLS), R + TOOLS, R + TOOLS + 1
SIZES = slice(KIND + 1, KIND + 3)
HERE = slice(KIND + 3, KIND + 3 + P)
DONE = slice(HERE.stop, HERE.stop + C)
MEAN_HERE = slice(DONE.stop, DONE.stop + P)
MEAN_DONE = slice(MEAN_HERE.stop, MEAN_HERE.stop + C)
FAR_HERE, FAR_DONE = MEAN_DONE.stop, MEAN_DONE.stop + 1
NOTHING = np.empty(0, np.float32)


@dataclass
class Running:
    """A workflow that moves step by step."""

    inputs: NDArray[np.float32]
    sums: NDArray[np.float32]

    @classmethod
    def of_type(cls, workflow_type: int) -> "Running":
        running = cls(np.full(inputs_size(AGENTS, TOOLS, P, C), 9, np.float32), np.full(sums_size(P, C), 9, np.float32))
        begin(running.inputs, running.sums, workflow_type, AGENTS, P, C)
        return running

    def prefill(self, agent: int, state: NDArray[np.float32], tokens: float = 0.0) -> None:
        at_prefill(self.inputs, self.sums, agent, tokens, state, AGENTS, P, C)

    def complete(self, state: NDArray[np.float32], tokens: float = 0.0, called: NDArray[np.float32] = NOTHING) -> None:
        at_completion(self.inputs, self.sums, tokens, state, called, AGENTS, P, C)


def numbers(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def test_the_layout_fills_the_vector() -> None:
    assert inputs_size(AGENTS, TOOLS, P, C) == FAR_DONE + 1 == len(Running.of_type(0).inputs)


def test_a_workflow_before_its_first_step() -> None:
    running = Running.of_type(4)
    assert running.inputs[KIND] == 4
    assert running.inputs[0] == -1
    assert running.inputs[COUNT] == NO_ANSWER
    assert not running.inputs[CALLED].any()
    assert not running.inputs[KIND + 1 :].any()
    assert not running.sums.any()


def test_two_steps_by_hand() -> None:
    running = Running.of_type(1)
    running.prefill(0, numbers(1, 3), tokens=2.5)
    x = running.inputs
    assert x[SIZES].tolist() == [2.5, 0]
    assert x[HERE].tolist() == x[MEAN_HERE].tolist() == [1, 3]
    assert x[DONE].tolist() == x[MEAN_DONE].tolist() == [0, 0, 0]
    assert x[[FAR_HERE, FAR_DONE]].tolist() == [NO_EARLIER, NO_STATE]

    running.complete(numbers(2, 0, 4), tokens=1.5)
    assert x[SIZES].tolist() == [2.5, 1.5]
    assert x[DONE].tolist() == x[MEAN_DONE].tolist() == [2, 0, 4]
    assert x[[FAR_HERE, FAR_DONE]].tolist() == [NO_EARLIER, NO_EARLIER]

    running.prefill(1, numbers(5, 0), tokens=1.0)
    assert x[SIZES].tolist() == [1, 0]  # the output is not known yet
    assert x[HERE].tolist() == [5, 0]
    assert x[MEAN_HERE].tolist() == [3, 1.5]
    assert x[DONE].tolist() == [0, 0, 0]
    assert x[MEAN_DONE].tolist() == [2, 0, 4]  # of the steps completed so far
    np.testing.assert_allclose(x[FAR_HERE], np.sqrt((4**2 + 3**2) / 2), rtol=1e-6)
    assert x[FAR_DONE] == NO_STATE

    running.complete(numbers(0, 0, 1))
    assert x[MEAN_DONE].tolist() == [1, 0, 2.5]
    np.testing.assert_allclose(x[FAR_DONE], np.sqrt((2**2 + 3**2) / 3), rtol=1e-6)
    assert x[:2].tolist() == [1, 0]
    assert x[KIND] == 1


def test_a_step_without_states_is_zero_and_leaves_the_means_alone() -> None:
    running = Running.of_type(0)
    running.prefill(0, numbers(1, 3))
    running.complete(numbers(2, 0, 4))
    running.prefill(1, NOTHING)
    x = running.inputs
    assert (x[HERE].tolist(), x[MEAN_HERE].tolist(), x[FAR_HERE]) == ([0, 0], [1, 3], NO_STATE)
    running.complete(NOTHING)
    assert (x[DONE].tolist(), x[MEAN_DONE].tolist(), x[FAR_DONE]) == ([0, 0, 0], [2, 0, 4], NO_STATE)
    running.prefill(1, numbers(2, 3))  # its distance is to the last state there was
    np.testing.assert_allclose(x[FAR_HERE], np.sqrt(1 / 2), rtol=1e-6)
    assert x[MEAN_HERE].tolist() == [1.5, 3]


def test_tools_are_those_of_the_latest_output_and_stay_until_the_next() -> None:
    running = Running.of_type(0)
    running.prefill(0, NOTHING)
    running.complete(NOTHING, called=numbers(2, 0, 1))
    x = running.inputs
    assert (x[COUNT], x[CALLED].tolist()) == (2, [0, 1])
    running.prefill(1, NOTHING)
    assert (x[COUNT], x[CALLED].tolist()) == (2, [0, 1])
    running.complete(NOTHING, called=numbers(0, 0, 0))
    assert (x[COUNT], x[CALLED].tolist()) == (0, [0, 0])
    assert known(x[None], 1, P, C)[2].all()
    running.complete(NOTHING)
    assert (x[COUNT], x[CALLED].tolist()) == (NO_ANSWER, [0, 0])
    assert not known(x[None], 1, P, C)[2].any()


@st.composite
def traces(draw: st.DrawFn) -> tuple[NDArray[np.int64], np.random.Generator]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return np.cumsum([0, *lengths]).astype(np.int64), np.random.default_rng(draw(st.integers(0, 1000)))


@given(traces())
def test_step_by_step_is_the_whole_trace_bit_for_bit(drawn: tuple[NDArray[np.int64], np.random.Generator]) -> None:
    offsets, rng = drawn
    n = int(offsets[-1])
    types = rng.integers(0, 3, len(offsets) - 1).astype(np.int32)
    agent = rng.integers(0, AGENTS + 1, n).astype(np.int32)
    sizes = np.where(rng.random((n, 2)) < 0.3, np.nan, rng.random((n, 2)) * 9).astype(np.float32)
    here, done = rng.normal(size=(n, P)).astype(np.float32), rng.normal(size=(n, C)).astype(np.float32)
    has_here, has_done = rng.random(n) < 0.7, rng.random(n) < 0.7
    called = np.where(rng.random((n, 1)) < 0.3, np.nan, rng.integers(0, 3, (n, 1 + TOOLS))).astype(np.float32)
    first, second = unroll(offsets, types, agent, sizes, called, here, has_here, done, has_done, AGENTS)
    tokens = np.nan_to_num(sizes)
    of_first, of_second = known(first, 0, P, C), known(second, 1, P, C)
    np.testing.assert_array_equal(of_first[1], has_here)
    np.testing.assert_array_equal(of_second[1], has_done)
    np.testing.assert_array_equal(of_first[0], tokens[:, 0] > 0)
    np.testing.assert_array_equal(of_second[0], tokens.max(axis=1) > 0)
    for w in range(len(types)):
        running = Running.of_type(types[w])
        seen: list[int] = []
        for row in range(offsets[w], offsets[w + 1]):
            running.prefill(agent[row], here[row] if has_here[row] else NOTHING, tokens[row, 0])
            np.testing.assert_array_equal(first[row], running.inputs)
            tools = NOTHING if np.isnan(called[row, 0]) else called[row]
            running.complete(done[row] if has_done[row] else NOTHING, tokens[row, 1], tools)
            np.testing.assert_array_equal(second[row], running.inputs)
            seen += [row] if has_done[row] else []
            mean = done[seen].mean(axis=0) if seen else np.zeros(C)
            np.testing.assert_allclose(second[row, MEAN_DONE], mean, rtol=1e-5, atol=1e-6)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()


def test_a_model_without_states_has_neither_means_nor_distances_to_speak_of() -> None:
    offsets = np.array([0, 2], np.int64)
    nothing, absent = np.zeros((2, 0), np.float32), np.zeros(2, bool)
    agent = np.array([0, 1], np.int32)
    sizes = np.full((2, 2), np.nan, np.float32)
    unknown = np.full((2, 1 + TOOLS), np.nan, np.float32)
    found = unroll(offsets, np.zeros(1, np.int32), agent, sizes, unknown, nothing, absent, nothing, absent, AGENTS)
    for moment in found:
        assert moment.shape == (2, inputs_size(AGENTS, TOOLS, 0, 0))
        assert not moment[:, SIZES].any()
        assert (moment[:, -2:] == NO_STATE).all()
