"""A training that starts from an older model: it learns new names from few traces and keeps the old ones."""

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.datasets.schema.names import NameMapping
from presage.datasets.synthetic.workflows import generate
from presage.datasets.tasks import task_keys
from presage.errors import ConfigurationError
from presage.features.moment import COMPLETION
from presage.features.prefixes import prefixes_of
from presage.predictors.common.artefact import artefact_digest, artefact_size_bytes
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.training.next_agent.continual import continue_predictor, places_taken, train_further
from presage.training.next_agent.train import OLD, OldModel, fit_predictor

FAST = NextAgentConfig(network=NetworkConfig(epochs=6), boosting=BoostingConfig(rounds=40))
NAMES = {"planner": "architect", "coder": "engineer"}


@cache
def old() -> NextAgentPredictor:
    return fit_predictor(week(150, 0), FAST).predictor


def week(workflows: int, seed: int, names: dict[str, str] | None = None) -> pa.Table:
    table = generate("retry", workflows, seed, state_size=16).table
    agents = [(names or {}).get(name, name) for name in table["agent"].to_pylist()]
    at = table.schema.get_field_index("agent")
    return table.set_column(at, table.schema.field(at), pa.array(agents, table.schema.field(at).type))


@cache
def continued() -> NextAgentPredictor:
    return continue_predictor(old(), week(30, 1, NAMES)).predictor


def accuracy(predictor: NextAgentPredictor, table: pa.Table) -> float:
    held = prefixes_of(table, predictor.vocabulary, 3).with_states(predictor.source.states(table))
    right = predictor.predict(held, COMPLETION)[:, 0].argmax(axis=1) == held.outcomes[:, 0]
    return float(right[held.outcomes[:, 0] >= 0].mean())


def test_renamed_agents_are_recognised_by_who_comes_before_and_after() -> None:
    assert places_taken(old(), week(30, 1, NAMES)) == {new: name for name, new in NAMES.items()}
    assert places_taken(old(), week(30, 1)) == {}
    both = pa.concat_tables([week(30, 1), week(30, 2, NAMES)])
    assert places_taken(old(), both) == {}, "who still comes has not lost its place"


def test_renamed_agents_are_recognised_by_their_system_prompts_first() -> None:
    def prompted(table: pa.Table, of: dict[str, str]) -> pa.Table:
        names = {new: name for name, new in of.items()}
        prompts = [f"You are the {names.get(agent, agent)} of a team." for agent in table["agent"].to_pylist()]
        at = table.schema.get_field_index("system_prompt")
        return table.set_column(at, table.schema.field(at), pa.array(prompts, table.schema.field(at).type))

    before = fit_predictor(prompted(week(60, 0), {}), FAST, states="none").predictor
    after = prompted(pa.concat_tables([week(30, 1), week(30, 2, NAMES)]), NAMES)
    assert places_taken(before, after) == {new: name for name, new in NAMES.items()}, "although old names still come"
    swapped = prompted(week(30, 1, NAMES), {"coder": "architect", "planner": "engineer"})
    assert places_taken(before, swapped) == {"architect": "coder", "engineer": "planner"}


def test_new_names_are_learnt_and_old_ones_kept() -> None:
    new, before = week(80, 5, NAMES), week(80, 5)
    few = fit_predictor(week(30, 1, NAMES), FAST).predictor
    assert accuracy(continued(), new) > accuracy(few, new) - 0.01
    assert accuracy(continued(), new) > accuracy(old(), new) + 0.2
    assert accuracy(continued(), before) > accuracy(old(), before) - 0.05


def test_evidence_and_tasks_add_up() -> None:
    found, newer = continued(), week(30, 1, NAMES)
    at = found.vocabulary.agents.index
    steps = newer["agent"].to_pylist().count
    tester, before = at("tester"), old().vocabulary.agents.index("tester")
    assert found.parts.evidence[0, tester] == old().parts.evidence[0, before] + steps("tester")
    assert found.parts.evidence[0, at("architect")] == steps("architect")
    assert (found.parts.evidence[:, -1] == 0).all()
    np.testing.assert_array_equal(found.trained_on, np.union1d(old().trained_on, task_keys(newer)))


def test_the_same_seed_gives_the_same_bytes_and_they_load_again(tmp_path: Path) -> None:
    old().save(tmp_path / "old")
    for name in ("first", "second"):
        loaded = NextAgentPredictor.load(tmp_path / "old")
        continue_predictor(loaded, week(30, 1, NAMES), seed=3).predictor.save(tmp_path / name)
    assert artefact_digest(tmp_path / "first") == artefact_digest(tmp_path / "second")
    assert artefact_size_bytes(tmp_path / "first") < 2 * artefact_size_bytes(tmp_path / "old")
    again, held = NextAgentPredictor.load(tmp_path / "first"), week(10, 5, NAMES)
    prefixes = prefixes_of(held, again.vocabulary, 3).with_states(again.source.states(held))
    third = continue_predictor(again, week(20, 2, NAMES)).predictor
    assert third.vocabulary == again.vocabulary
    assert np.isfinite(third.predict(prefixes, COMPLETION)).all()


@pytest.mark.parametrize("missing", ["states", "tokens"])
def test_newer_traces_may_lack_an_input(missing: str) -> None:
    table = week(30, 1, NAMES)
    columns = ["input_tokens", "output_tokens"] if missing == "tokens" else ["prefill_state", "completion_state"]
    for name in columns:
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.nulls(len(table), table.schema.field(at).type))
    found = continue_predictor(old(), table).predictor
    assert accuracy(found, week(80, 5)) > accuracy(old(), week(80, 5)) - 0.08


def test_old_and_new_model_are_judged_on_both_weeks() -> None:
    origin = OldModel(old(), "models:/m/1", "sha256:0", week(40, 9))
    training = train_further(week(40, 1, NAMES), None, origin, baselines=("markov-1",))
    found = training.metrics
    assert list(found["baselines"]) == [OLD, "markov-1"]
    assert found["moments"]["completion"]["accuracy"][0] > found["baselines"][OLD]["completion"]["accuracy"][0]
    on_old = found["started_from"]["old_test"]
    assert on_old["workflows"] == 40
    lost = on_old["baselines"][OLD]["completion"]["accuracy"][0] - on_old["moments"]["completion"]["accuracy"][0]
    assert on_old["forgotten"]["completion"]["difference"][0] == pytest.approx(lost)
    said = {key: training.training_data[key] for key in ("started_from", "started_from_digest")}
    assert said == {"started_from": "models:/m/1", "started_from_digest": "sha256:0"}
    assert found["data"]["started from"] == "models:/m/1, sha256:0"


def test_names_folded_otherwise_are_refused() -> None:
    folded = NameMapping((("x-.*", "x"),)).on(week(30, 1))
    with pytest.raises(
        ConfigurationError, match=r"folded by x-\.\*=x, those of the model to start from by no patterns"
    ):
        continue_predictor(old(), folded)
