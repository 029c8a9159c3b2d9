"""Errors counted by hand: what was forecast, what came, after whom; a cut is no error."""

from __future__ import annotations

import json

import numpy as np
import pytest

from presage.datasets.synthetic.workflows import generate
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.training.next_agent.evaluate import EXAMPLES, PAIRS, PREFIX, confusions

VOCABULARY = Vocabulary(("t",), ("a", "b", "c"))
A, B, C, END, UNSEEN, CUT = 0, 1, 2, 3, 4, -1


def prefixes(*workflows: tuple[list[int], list[int]]) -> Prefixes:
    """A workflow a pair: its agents (3: one that training never saw), and what came after each step."""
    agents = [agent for of, _ in workflows for agent in of]
    return Prefixes(
        vocabulary=VOCABULARY,
        offsets=np.cumsum([0, *(len(of) for of, _ in workflows)]).astype(np.int64),
        workflow_type=np.zeros(len(workflows), np.int32),
        task=np.arange(len(workflows), dtype=np.int32),
        agent=np.array(agents, np.int32),
        outcomes=np.array([[came] for _, outcomes in workflows for came in outcomes], np.int32),
        sizes=np.zeros((len(agents), 4), np.float32),
        called=np.full((len(agents), 1), np.nan, np.float32),
        states={},
    )


def sure_of(outcomes: list[int], probability: float = 0.7) -> np.ndarray:
    rest = (1 - probability) / 3
    made = np.full((len(outcomes), 1, 4), rest, np.float32)
    made[np.arange(len(outcomes)), 0, outcomes] = probability
    return made


def test_errors_by_hand() -> None:
    held = prefixes(([A, B, A], [B, A, END]), ([A, B, C], [B, C, CUT]), ([3, B], [B, UNSEEN]))
    found = confusions(sure_of([B, C, B, B, A, A, A, A]), held)
    assert (found["positions"], found["errors"]) == (7, 5)
    assert [(p["forecast"], p["came"], p["positions"]) for p in found["pairs"]] == [
        ("a", "b", 1),
        ("a", "c", 1),
        ("a", None, 1),
        ("b", "END", 1),
        ("c", "a", 1),
    ]
    assert found["pairs"][0]["examples"] == [{"prefix": [None], "earlier": False, "positions": 1}]
    assert found["pairs"][2]["examples"] == [{"prefix": [None, "b"], "earlier": False, "positions": 1}]
    assert found["pairs"][3]["examples"] == [{"prefix": ["a", "b", "a"], "earlier": False, "positions": 1}]
    assert all(p["confidence"] == pytest.approx(0.7) for p in found["pairs"])
    assert found["by_agent"] == [
        {"agent": "b", "positions": 3, "errors": 3},
        {"agent": "a", "positions": 3, "errors": 1},
        {"agent": None, "positions": 1, "errors": 1},
    ]
    json.dumps(found, allow_nan=False)


def test_a_cut_is_no_error_and_no_end() -> None:
    held = prefixes(([A, B], [B, CUT]))
    found = confusions(sure_of([B, A]), held)
    assert (found["positions"], found["errors"], found["pairs"], found["by_agent"]) == (1, 0, [], [])


def test_the_most_frequent_prefix_is_the_example_and_long_ones_are_cut_short() -> None:
    long = ([A, B, A, B, A, B], [B, A, B, A, B, C])
    held = prefixes(long, long, ([B], [C]))
    forecast = [*[came for _ in range(2) for came in (B, A, B, A, B, A)], A]
    pair = confusions(sure_of(forecast), held)["pairs"][0]
    assert (pair["forecast"], pair["came"], pair["positions"]) == ("a", "c", 3)
    assert pair["examples"] == [
        {"prefix": ["a", "b", "a", "b"], "earlier": True, "positions": 2},
        {"prefix": ["b"], "earlier": False, "positions": 1},
    ]


def test_against_a_plain_loop_on_a_law_with_cut_workflows() -> None:
    drawn = generate("retry", 60, 0, censored=0.5)
    held = prefixes_of(drawn.table, Vocabulary.from_table(drawn.table), 2)
    probabilities = drawn.forecasts["prefill"][:, :2].astype(np.float32)
    found = confusions(probabilities, held)
    names = (*held.vocabulary.agents, "END")
    wrong: dict[tuple[str, str], int] = {}
    for row in range(held.steps):
        came, forecast = int(held.outcomes[row, 0]), int(probabilities[row, 0].argmax())
        if came >= 0 and came != forecast:
            pair = names[forecast], names[came]
            wrong[pair] = wrong.get(pair, 0) + 1
    assert found["errors"] == sum(wrong.values())
    told = {(p["forecast"], p["came"]): p["positions"] for p in found["pairs"]}
    assert told == {pair: wrong[pair] for pair in told}
    assert sorted(told.values()) == sorted(wrong.values())[-PAIRS:]
    for pair in found["pairs"]:
        assert 0 < len(pair["examples"]) <= EXAMPLES
        assert all(0 < len(example["prefix"]) <= PREFIX for example in pair["examples"])
