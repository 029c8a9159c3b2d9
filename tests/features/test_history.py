"""The history vector by hand, by a plain loop, and at its caps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from presage.features.history import LONGEST, NEVER, RECENT, advance, begin, histories, history_size

WALKS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4)


def after(agents: list[int], known: int) -> NDArray[np.float32]:
    """The history after these agents of a vocabulary of `known`."""
    history = np.empty(history_size(known), np.float32)
    begin(history, known)
    for agent in agents:
        advance(history, agent, known)
    return history


def test_the_empty_history() -> None:
    assert after([], 2).tolist() == [-1] * 5 + [0, 0, 0] + [NEVER] * 3 + [-1, 0]


def test_a_short_walk_by_hand() -> None:
    # agents a = 0, b = 1, unknown = 2; latest first | counts | steps since | position | run
    assert after([0], 2).tolist() == [0, -1, -1, -1, -1, 1, 0, 0, 0, NEVER, NEVER, 0, 1]
    assert after([0, 1], 2).tolist() == [1, 0, -1, -1, -1, 1, 1, 0, 1, 0, NEVER, 1, 1]
    assert after([0, 1, 1], 2).tolist() == [1, 1, 0, -1, -1, 1, 2, 0, 2, 0, NEVER, 2, 2]
    assert after([0, 1, 1, 2, 0, 1], 2).tolist() == [1, 0, 2, 1, 1, 2, 3, 1, 1, 0, 2, 5, 1]


def plainly(walk: list[int], known: int) -> list[float]:
    latest = [*walk[::-1], -1, -1, -1, -1, -1][:RECENT]
    counts = [walk.count(agent) for agent in range(known + 1)]
    since = [walk[::-1].index(agent) if agent in walk else NEVER for agent in range(known + 1)]
    run = next((i for i, agent in enumerate(walk[::-1]) if agent != walk[-1]), len(walk))
    return [*latest, *counts, *since, len(walk) - 1, run]


@given(WALKS)
def test_every_step_is_what_a_plain_loop_says(walks: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, walks)]).astype(np.int64)
    found = histories(np.array([agent for walk in walks for agent in walk], np.int32), offsets, 3)
    wanted = [plainly(walk[: step + 1], 3) for walk in walks for step in range(len(walk))]
    assert found.tolist() == wanted


def test_the_caps_hold_and_change_nothing_else() -> None:
    history = after([0] + [1] * 150, 2)
    assert history[RECENT + 3] == NEVER  # a was called 150 steps ago
    assert history[-1] == 150
    counts, run, position = RECENT + 1, -1, -2
    history[[counts, run, position]] = LONGEST
    advance(history, 1, 2)
    assert history[[counts, run, position]].tolist() == [LONGEST] * 3


def test_nothing_is_written_past_the_history() -> None:
    row = np.full(history_size(2) + 3, 7.0, np.float32)
    begin(row, 2)
    for agent in (0, 1, 2):
        advance(row, agent, 2)
    assert row[-3:].tolist() == [7, 7, 7]
