"""After a release that renames agents and leaves their system prompts, models are judged as before it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from text_samples import prompted_table, text_lengths
from tool_samples import QUICK, llm, trace

from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.vocabulary import Vocabulary
from presage.training.length.train import evaluate_lengths
from presage.training.next_agent.change import by_role
from presage.training.next_agent.train import evaluate_model, fit_predictor


def replaced(table: pa.Table, column: str, values: list[str | None]) -> pa.Table:
    at = table.schema.get_field_index(column)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


@pytest.fixture(scope="module")
def test() -> pa.Table:
    return prompted_table(30, 1)


@pytest.fixture(scope="module")
def renamed(test: pa.Table) -> pa.Table:
    agents = test["agent"].to_pylist()
    names = sorted(set(agents))
    new = names[: max(1, round(0.3 * len(names)))]
    return replaced(test, "agent", [f"{name} v2" if name in new else name for name in agents])


def test_next_agents_are_forecast_as_well_as_before_at_every_horizon(test: pa.Table, renamed: pa.Table) -> None:
    predictor = fit_predictor(prompted_table(60, 0), QUICK, states="none").predictor
    before, after = (evaluate_model(predictor, table, 0, profile="engine").evaluation for table in (test, renamed))
    unread = replaced(renamed, "system_prompt", [None] * renamed.num_rows)
    unknown = evaluate_model(predictor, unread, 0, profile="engine").evaluation
    for moment in MOMENTS:
        assert np.array_equal(before.moments[moment].correct, after.moments[moment].correct)
        assert after.moments[moment].accuracy == before.moments[moment].accuracy
        assert unknown.moments[moment].accuracy[0] < before.moments[moment].accuracy[0]


def test_one_workflow_is_forecast_as_before(test: pa.Table, renamed: pa.Table) -> None:
    predictor = fit_predictor(prompted_table(60, 0), QUICK, states="none").predictor
    before, after = (table.slice(0, 6).to_pylist() for table in (test, renamed))
    first = before[0]["workflow_id"]
    of = [[step for step in steps if step["workflow_id"] == first] for steps in (before, after)]
    assert [step["agent"] for step in of[0]] != [step["agent"] for step in of[1]]
    assert predictor.forecast(of[0]) == predictor.forecast(of[1])
    without = [{name: value for name, value in step.items() if name != "system_prompt"} for step in of[1]]
    assert predictor.forecast(without) != predictor.forecast(of[0])
    odd = [{**step, "system_prompt": 7} for step in of[1]]
    assert predictor.forecast(odd) == predictor.forecast(without)


def test_lengths_are_judged_as_before(test: pa.Table, renamed: pa.Table) -> None:
    before, after = (evaluate_lengths(text_lengths(), table, 0) for table in (test, renamed))
    assert before.evaluation.to_dict() == after.evaluation.to_dict()


def test_what_is_forecast_of_a_renamed_agent_by_its_number_counts_as_of_the_agent_that_it_was() -> None:
    vocabulary = Vocabulary(("app",), ("code", "plan", "<new agent 1>", "<new agent 2>"), numbered=("app",))
    before = trace([llm("plan"), llm("x"), llm("code"), llm("x")])
    after = replaced(before, "agent", ["plan", "x", "implement", "x"])
    unchanged, seen = (prefixes_of(table, vocabulary, 1) for table in (before, after))
    assert unchanged.named_outcomes[:, 0].tolist() == [vocabulary.unseen, 0, 2, vocabulary.end]
    assert seen.agent.tolist() == [1, 2, 3, 2]

    def predict(prefixes: Prefixes, moment: Moment) -> np.ndarray:
        return np.tile(np.array([0.1, 0.2, 0.3, 0.35, 0.05], np.float32), (prefixes.steps, 1, 1))

    found = by_role(predict, unchanged, seen)(seen, MOMENTS[1])[:, 0]
    assert found[:2] == pytest.approx(predict(seen, MOMENTS[1])[:2, 0]), "nobody knows before its first call"
    assert found[2:] == pytest.approx(np.tile(np.array([0.45, 0.2, 0.3, 0, 0.05], np.float32), (2, 1)))
