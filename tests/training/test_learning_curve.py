"""Nested training sets of whole tasks, and the curve over them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from presage.datasets.ingest import append
from presage.datasets.read import read_traces
from presage.datasets.synthetic.workflows import generate
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError, TraceError
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.training.next_agent.study import NestedSets, Recipe, default_sizes, learning_curve

FAST = Recipe(NextAgentConfig(network=NetworkConfig(epochs=1), boosting=BoostingConfig(rounds=1)), horizon=2)


def drawn(workflows: int = 60, seed: int = 0, law: str = "retry") -> pa.Table:
    return generate(law, workflows, seed, state_size=16).table


@pytest.fixture(scope="module")
def two_types(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """90 workflows of one type in runs of three a task, 30 of another; in canonical order."""
    store = tmp_path_factory.mktemp("curve") / "store"
    table = drawn(90)
    number = [int(name.rsplit("-", 1)[-1]) // 3 for name in table["workflow_id"].to_pylist()]
    tasks = pa.array([f"task {n}" for n in number])
    append(table.set_column(table.schema.get_field_index("task"), table.schema.field("task"), tasks), store)
    append(drawn(30, 1, "triage"), store)
    return read_traces([store]).table


def test_sets_are_nested_of_whole_tasks_and_keep_the_types_in_proportion(two_types: pa.Table) -> None:
    sets = NestedSets.of(two_types, 0, 0)
    assert (len(sets.order), sets.held[-1]) == (60, 120)
    all_keys = task_keys(two_types)
    taken: list[set[int]] = []
    for size in (12, 24, 60, 120):
        count = sets.enough(size)
        assert size <= sets.held[count] < size + 3
        subset = sets.take(two_types, count)
        keys = set(task_keys(subset).tolist())
        assert len(keys) == count
        assert subset.num_rows == int(np.isin(all_keys, list(keys)).sum()), "whole tasks"
        share = pc.mean(pc.equal(subset["workflow_type"].filter(pc.equal(subset["step"], 0)), "triage")).as_py()
        assert share == pytest.approx(0.25, abs=0.09)
        taken.append(keys)
    assert all(small < large for small, large in pairwise(taken))
    assert sets.enough(1) == 2, "one task to learn from, one to decide when to stop"


def test_draws_differ_and_seeds_repeat(two_types: pa.Table) -> None:
    orders = [NestedSets.of(two_types, 0, draw).order.tolist() for draw in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(60))


def test_sizes_double_up_to_what_there_is() -> None:
    assert default_sizes(800) == [25, 50, 100, 200, 400, 800]
    assert default_sizes(5000) == [25, 50, 100, 200, 400, 800]
    assert default_sizes(110) == [25, 50, 110]
    assert default_sizes(110, whole_is_known=True) == [25, 50]
    assert default_sizes(10) == [10]
    assert default_sizes(800, largest=100) == [25, 50, 100]


@pytest.mark.slow
def test_the_curve_is_judged_on_the_same_workflows_at_every_point() -> None:
    train, test = drawn(), drawn(20, 9)
    told: list[tuple[str, float]] = []
    found = learning_curve(
        train,
        test,
        FAST,
        sizes=[20, 60, 20],
        draws=2,
        baselines=("markov-1",),
        share=lambda *what: told.append(what),
    )
    assert found["points"] == [
        {"tasks": 20, "workflows": 20.0, "draws": 2},
        {"tasks": 60, "workflows": 60.0, "draws": 1},
    ]
    assert list(found["models"]) == ["presage", "markov-1"]
    for of in found["models"].values():
        for moment in ("prefill", "completion"):
            for figure, shape in (("accuracy", (2, 2)), ("ci95", (2, 2, 2)), ("spread", (2, 2, 2))):
                assert np.shape(of[moment][figure]) == shape
            for accuracy, ends, spread in zip(*(of[moment][f] for f in ("accuracy", "ci95", "spread")), strict=True):
                for a, (low, high), (least, most) in zip(accuracy, ends, spread, strict=True):
                    assert low <= a <= high
                    assert least <= a <= most
            assert of[moment]["spread"][1] == [[a, a] for a in of[moment]["accuracy"][1]]
    last, curve = found["last_doubling"], found["models"]["presage"]
    assert (last["from"], last["to"]) == (20.0, 60.0)
    for moment, of in last["moments"].items():
        gained = np.subtract(curve[moment]["accuracy"][1], curve[moment]["accuracy"][0])
        assert of["difference"] == pytest.approx(gained.tolist())
        assert all(low <= gain <= high for gain, (low, high) in zip(of["difference"], of["ci95"], strict=True))
    # Markov-1 by hand: what mostly follows each agent in training, asked of every step of the test workflows.
    whole = FAST.train(train, test, ("markov-1",))
    by_hand = whole.evaluation.baselines["markov-1"]["prefill"].accuracy
    assert found["models"]["markov-1"]["prefill"]["accuracy"][1] == list(by_hand)
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] < 1
    assert "20 training workflows, draw 2 of 2: learning" in {what for what, _ in told}


def test_what_is_known_of_all_of_them_ends_the_curve() -> None:
    train, test = drawn(), drawn(20, 9)
    whole = FAST.train(train, test).evaluation
    found = learning_curve(train, test, FAST, baselines=(), whole=whole)
    assert [point["workflows"] for point in found["points"]] == [25.0, 60.0]
    assert found["models"]["presage"]["prefill"]["accuracy"][-1] == list(whole.moments["prefill"].accuracy)


def test_sets_with_too_little_in_them_are_left_out_and_named() -> None:
    train = drawn(40)
    first = pc.is_in(train["workflow_id"], pc.unique(NestedSets.of(train, 0, 0).take(train, 2)["workflow_id"]))
    agents = pc.if_else(first, "coder", train["agent"])
    train = train.set_column(train.schema.get_field_index("agent"), train.schema.field("agent"), agents)
    found = learning_curve(train, drawn(10, 9), FAST, sizes=[2, 40], draws=1, baselines=())
    assert [point["workflows"] for point in found["points"]] == [40.0]
    assert found["last_doubling"] is None
    assert found["left_out"][0]["workflows"] == 2
    assert "the traces name 1 agent" in found["left_out"][0]["reason"]
    with pytest.raises(TraceError, match="no training set of the curve"):
        learning_curve(train, drawn(10, 9), FAST, sizes=[2], draws=1, baselines=())


@pytest.mark.parametrize(("sizes", "draws"), [([1], 1), ([5, 10_000], 1), ([10], 0)])
def test_sizes_that_cannot_be_had_are_refused(sizes: list[int], draws: int) -> None:
    with pytest.raises(ConfigurationError, match="there are 60 workflows" if draws else "at least 1 draw"):
        learning_curve(drawn(), drawn(10, 9), FAST, sizes=sizes, draws=draws, baselines=())
