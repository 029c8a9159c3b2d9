"""Lengths that are told who is expected next: by no model that learnt from the task, and whole in one artefact."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from presage.datasets.length_law import generate_lengths
from presage.datasets.tasks import task_keys
from presage.errors import ArtefactError, TraceError
from presage.features.lengths import LengthEncoder
from presage.predictors.ahead import AgentsAhead, GivenModel
from presage.predictors.artefact import artefact_digest, read_artefact, write_artefact
from presage.predictors.boosting import BoostingConfig
from presage.predictors.network_weights import NetworkConfig
from presage.predictors.next_agent import NextAgentPredictor
from presage.predictors.parts import NextAgentConfig
from presage.predictors.remaining_length import KIND, RemainingLengthConfig, RemainingLengthPredictor
from presage.training.lengths import ahead as module
from presage.training.lengths.ahead import FOLDS, NEXT_AGENT_TASKS, expected_out_of_fold, folds_of
from presage.training.lengths.train import LengthTraining, evaluate_lengths, train_lengths
from presage.training.next_agent import train
from presage.training.sets import held_out

SMALL = NextAgentConfig(network=NetworkConfig(epochs=2), boosting=BoostingConfig(rounds=3))


def silent(_: str, __: float | None) -> None:
    """Nobody is told."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A next-agent model of 60 workflows of the law, two steps ahead."""
    made = tmp_path_factory.mktemp("next") / "model"
    drawn = generate_lengths(60, 0).table
    train(drawn, generate_lengths(20, 5).table, SMALL, horizon=2, states="none", baselines=()).save(made)
    return made


@pytest.fixture(scope="module")
def given(folder: Path) -> GivenModel:
    return GivenModel.load(folder, "who-is-next version 2")


def tasks_of_two(table: pa.Table) -> pa.Table:
    """The same workflows, two of each type a task."""
    names = [f"task {int(name.rsplit('-', 1)[1]) // 2}" for name in table["workflow_id"].to_pylist()]
    return table.set_column(table.schema.get_field_index("task"), table.schema.field("task"), pa.array(names))


def test_folds_keep_tasks_whole_and_spread_each_type() -> None:
    table = tasks_of_two(generate_lengths(120, 0).table)
    keys = task_keys(table)
    fold = folds_of(keys, table["workflow_type"], 0)
    assert all(len(np.unique(fold[keys == key])) == 1 for key in np.unique(keys))
    types = np.array(table["workflow_type"].to_pylist())
    for kind in np.unique(types):
        sizes = [len(np.unique(keys[(fold == number) & (types == kind)])) for number in range(FOLDS)]
        assert max(sizes) - min(sizes) <= 2, (kind, sizes)
    np.testing.assert_array_equal(fold, folds_of(keys, table["workflow_type"], 0))
    assert (fold != folds_of(keys, table["workflow_type"], 1)).any()


def test_no_row_is_told_by_a_model_that_learnt_from_its_task(
    given: GivenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the workflows are among what the model learnt from: these come from copies that never saw them."""
    table = generate_lengths(60, 0).table
    keys = task_keys(table)
    some = np.unique(keys)[::2]
    given.predictor.trained_on, kept = some, given.predictor.trained_on
    saw: list[np.ndarray] = []

    class Copy:
        """A copy that says which it is."""

        vocabulary, horizon = given.predictor.vocabulary, given.predictor.horizon

        def __init__(self, learnt: pa.Table) -> None:
            saw.append(np.unique(task_keys(learnt)))
            self.number = len(saw)

        def without_states(
            self, offsets: Any, workflow_type: Any, agent: Any, sizes: Any, *, last: bool = False
        ) -> Any:
            said = np.zeros((len(agent), self.horizon, self.vocabulary.outcomes), np.float32)
            said[:, 0, -1] = 10 * self.number  # no probability that a model would give
            said[:, 0, 0] = 100 + agent
            return said

    monkeypatch.setattr(module, "_copy", lambda _, learnt: Copy(learnt))
    ahead = AgentsAhead.fit(given, table, LengthEncoder.fit(table))
    found = expected_out_of_fold(table, ahead, 0, silent)
    given.predictor.trained_on = kept
    assert found.copies == FOLDS
    assert found.workflows == len(some)
    by = (found.numbers[:, 1] / 10).round().astype(int)  # which copy answered, 0 for the model itself
    learnt = np.isin(keys, some)
    assert (by[learnt] > 0).all()
    assert not any(np.isin(keys[row], saw[copy - 1]) for row, copy in enumerate(by) if copy)
    np.testing.assert_array_equal(found.numbers[~learnt], ahead.of_table(table)[~learnt])
    # ... of its own step, and of no other row.
    first = ahead.names.index("calls_ahead_0")
    agent = given.predictor.vocabulary.encode_agents(table["agent"])
    np.testing.assert_array_equal(found.numbers[learnt, first], 100 + agent[learnt])


def test_a_model_that_learnt_from_other_tasks_answers_itself(given: GivenModel) -> None:
    table = generate_lengths(20, 9).table
    ahead = AgentsAhead.fit(given, table, LengthEncoder.fit(table))
    found = expected_out_of_fold(table, ahead, 0, silent)
    assert (found.copies, found.workflows) == (0, 0)
    np.testing.assert_array_equal(found.numbers, ahead.of_table(table))
    assert "learnt from none of these tasks" in found.facts(table)["out of fold"]


def test_copies_have_the_configuration_horizon_and_agents_of_the_model(given: GivenModel) -> None:
    copy = module._copy(given.predictor, generate_lengths(20, 0).table)
    assert isinstance(copy, NextAgentPredictor)
    assert copy.config == given.predictor.config == SMALL
    assert (copy.horizon, copy.seed, copy.vocabulary) == (2, 0, given.predictor.vocabulary)
    assert copy.source.kind == "none"


def test_too_few_tasks_for_a_copy_are_refused(given: GivenModel) -> None:
    table = generate_lengths(60, 0).table
    two = table.filter(pc.is_in(table["workflow_id"], pc.unique(table["workflow_id"]).slice(0, 2)))
    ahead = AgentsAhead.fit(given, two, LengthEncoder.fit(two))
    with pytest.raises(TraceError, match="a single task is left"):
        expected_out_of_fold(two, ahead, 0, silent)


@pytest.fixture(scope="module")
def training(given: GivenModel) -> LengthTraining:
    """Learns from what the model learnt from, and is judged on twenty such workflows and twenty others."""
    same, other = generate_lengths(60, 0).table, generate_lengths(20, 8).table
    ids = pc.unique(same["workflow_id"]).slice(0, 20)
    judged = pa.concat_tables([same.filter(pc.is_in(same["workflow_id"], ids)), other])
    judged = judged.sort_by([(name, "ascending") for name in ("workflow_type", "workflow_id", "step")])
    config = RemainingLengthConfig(estimator="boosted")
    return train_lengths(same, judged, config, texts="text", next_agent=given, baselines=("ridge",), name="lengths")


@pytest.mark.slow
def test_the_metrics_tell_which_model_what_it_cost_and_what_it_had_seen(
    training: LengthTraining, given: GivenModel
) -> None:
    data = training.metrics["data"]
    assert data["next-agent model"] == "who-is-next version 2"
    assert data["digest of the next-agent model"] == given.digest
    assert data[NEXT_AGENT_TASKS] == 20
    assert data["out of fold"].startswith("3 copies in ")
    assert data["out of fold"].endswith(" s for the 60 workflows it had learnt from")
    assert training.metrics["config"]["next_agent"] == "who-is-next version 2"
    json.dumps(training.metrics, allow_nan=False)


@pytest.mark.slow
def test_one_artefact_holds_both_and_says_which_model(
    training: LengthTraining, given: GivenModel, tmp_path: Path
) -> None:
    training.save(tmp_path / "model")
    held = read_artefact(tmp_path / "model", kind=KIND)
    assert held.config["next_agent"]["model"] == "who-is-next version 2"
    assert held.config["next_agent"]["digest"] == given.digest
    assert {name.split("/")[0] for name in held.tensors} == {"encoder", "estimator", "next_agent", "training"}
    again = RemainingLengthPredictor.load(tmp_path / "model")
    fresh = generate_lengths(10, 11).table
    steps = fresh.slice(0, 2).to_pylist()
    assert again.forecast(steps) == training.predictor.forecast(steps)
    figures = [evaluate_lengths(one, fresh, 0).evaluation.to_dict() for one in (again, training.predictor)]
    assert figures[0] == figures[1]
    training.save(tmp_path / "twice")
    assert artefact_digest(tmp_path / "model") == artefact_digest(tmp_path / "twice")


@pytest.mark.slow
def test_what_the_model_inside_learnt_from_is_left_out_of_later_judgements(
    training: LengthTraining, given: GivenModel
) -> None:
    narrow = replace(training.predictor.encoder, ahead=None)
    assert training.predictor.encoder.names[: len(narrow.names)] == narrow.names
    assert set(given.predictor.trained_on.tolist()) <= set(training.predictor.trained_on.tolist())
    with pytest.raises(TraceError, match="prove"):
        held_out(generate_lengths(60, 0).table, training.predictor)


@pytest.mark.slow
def test_an_artefact_whose_model_inside_is_lost_or_another_is_refused(training: LengthTraining, tmp_path: Path) -> None:
    training.predictor.save(tmp_path / "model")
    whole = read_artefact(tmp_path / "model", kind=KIND)
    inside = {name: array for name, array in whole.tensors.items() if name.startswith("next_agent/")}

    def broken(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        write_artefact(tmp_path / "cut", kind=KIND, config=config, tensors=tensors, training_data={})
        with pytest.raises(ArtefactError, match="not a complete remaining-length artefact"):
            RemainingLengthPredictor.load(tmp_path / "cut")

    for lost in ("next_agent/ahead/llm", "next_agent/n-gram/table", *sorted(inside)[:1]):
        if lost in inside:
            broken(whole.config, {name: array for name, array in whole.tensors.items() if name != lost})
    broken({**whole.config, "next_agent": None}, whole.tensors)  # the estimator asks for more numbers than there are
    inner = {**whole.config["next_agent"], "counted": whole.config["next_agent"]["counted"][:-1]}
    broken({**whole.config, "next_agent": inner}, whole.tensors)
