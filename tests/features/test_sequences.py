"""Workflows as steps and parallel blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from profile_samples import rows_of, table_of

from presage.features.sequences import OTHER, Alphabet, Item, Parents, WorkflowSteps, sequences_of


def workflow(agents: str, parents: Sequence[Parents]) -> WorkflowSteps:
    return WorkflowSteps(list(agents), parents, True, slice(0, len(agents)))


@pytest.mark.parametrize(
    ("agents", "parents", "blocks"),
    [
        ("pssw", [None, None, None, None], [[0], [1], [2], [3]]),  # not recorded: one after the other
        ("pssw", [(), (0,), (0,), (1, 2)], [[0], [1, 2], [3]]),
        ("pssw", [None, (0,), (0,), None], [[0], [1, 2], [3]]),  # nobody waits for the first s: the next step joins it
        ("paabbw", [(), (0,), (0,), (1,), (2,), (3, 4)], [[0], [1, 2, 3, 4], [5]]),  # two branches of two steps
        ("abc", [(), (), ()], [[0, 1, 2]]),  # branches that never meet
        ("pxy", [(), (0,), (1,)], [[0], [1], [2]]),
        ("p", [()], [[0]]),
    ],
)
def test_steps_between_two_joins_are_one_block(
    agents: str, parents: Sequence[Parents], blocks: list[list[int]]
) -> None:
    assert workflow(agents, parents).blocks == blocks


def test_blocks_that_share_an_agent_are_one_symbol() -> None:
    wide = [(), (0,), (0,), (1, 2)]
    workflows = [workflow("pabw", wide), workflow("pbcw", wide), workflow("pdew", wide)]
    alphabet = Alphabet.of(workflows, None)
    assert alphabet.blocks == [("a", "b", "c"), ("d", "e")]
    assert alphabet.items(workflows[1]) == [Item("p"), Item(("a", "b", "c"), 2), Item("w")]
    assert alphabet.items(workflow("paaw", wide))[1] == Item(("a", "b", "c"), 2)
    assert alphabet.items(workflow("paxw", wide))[1] == Item(("a", "x"), 2)  # no known block has x


def test_agents_that_are_not_known_by_name_are_one_symbol() -> None:
    alphabet = Alphabet((), {"a"})
    assert alphabet.items(workflow("ab", [None, None])) == [Item("a"), Item(OTHER)]


def test_workflows_are_in_the_order_of_time_and_numbers_are_those_of_llm_steps() -> None:
    made = rows_of([["a", "t", "b"], ["a", "b"]])
    for row, (kind, start, end) in zip(
        made, [("llm", 10, 11), ("tool", 11, 12), ("llm", 13, 14), ("llm", 1, 2), ("llm", 5, 6)], strict=True
    ):
        row |= {"kind": kind, "start_time": float(start), "end_time": float(end), "output_tokens": start}
    import pyarrow as pa

    from presage.datasets.schema import conform

    found = sequences_of(conform(pa.Table.from_pylist(made), "sample"))["app"]
    assert [list(of.agents) for of in found.workflows] == [["a", "b"], ["a", "b"]]
    assert found.timed
    tokens, returns = found.numbers[:, 0], found.numbers[:, 1]
    assert tokens.tolist() == [10, 13, 1, 5]
    assert returns[[0, 2]].tolist() == pytest.approx([2.0, 3.0])  # the tool call's time is part of it
    assert np.isnan(returns[[1, 3]]).all()


def test_an_overlap_without_parents_is_counted() -> None:
    made = rows_of([["a", "b"]])
    for row, (start, end) in zip(made, [(0.0, 9.0), (1.0, 2.0)], strict=True):
        row |= {"start_time": start, "end_time": end}
    import pandas as pd

    from presage.datasets.read import read_traces

    assert sequences_of(read_traces(pd.DataFrame(made)).table)["app"].overlapping == 1
    assert sequences_of(table_of([["a", "b"]]))["app"].overlapping == 0
