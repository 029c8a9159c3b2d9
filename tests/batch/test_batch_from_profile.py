"""Plans from workflow profiles: they load, they are what the traces show, and what is missing is marked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from batch_samples import ENGINE, Echo
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st
from profile_samples import coding, profile, table_of
from prompt_samples import STEMS, prompted

from presage.batch.from_profile import plan_file
from presage.batch.load import load_plan
from presage.batch.operators import Call
from presage.batch.plan import Plan
from presage.batch.run import BatchRun, RunSettings
from presage.datasets.read import read_traces
from presage.errors import ConfigurationError
from presage.predictors.profile.expression import Expression, OneStep, ParallelSteps, chain, choice, repeat
from presage.predictors.profile.profile import ProfileConfig
from presage.training.profile.train import fit_profiles

CODING = profile(table_of(coding(40)))


def loaded(text: str, folder: Path) -> Plan:
    path = folder / "plan.py"
    path.write_text(text, encoding="utf-8")
    return load_plan(str(path))


def agents(plan: Plan) -> list[str]:
    return [node.operator.agent for node in plan.calls if isinstance(node.operator, Call)]


def ran(plan: Plan, rows: list[dict[str, Any]], folder: Path, server: Echo) -> list[dict[str, Any]]:
    run = BatchRun(plan, rows, [ENGINE], folder, settings=RunSettings(attempts=1), transport=server)
    try:
        asyncio.run(run.run())
        return list(run.results())
    finally:
        run.close()


def test_a_plan_asks_what_the_traces_show_and_runs_as_it_is(tmp_path: Path) -> None:
    predictor = fit_profiles(read_traces(pd.DataFrame(prompted(60))).table, ProfileConfig(keep_stems=True)).predictor
    plan = loaded(plan_file("loop", predictor.profiles["loop"], predictor.templates["loop"]), tmp_path)
    assert (plan.name, plan.fields) == ("loop", ["task"])
    assert sorted(agents(plan)) == ["coder"] * 4 + ["tester"] * 3  # coder (tester coder){1,3}
    server = Echo(lambda messages: f"answer {len(server.asked)}")
    results = ran(plan, [{"task": "do it"}], tmp_path / "run", server)
    assert results[0]["answer"] == "answer 7"
    assert server.prompts() == [
        f"{STEMS[0]}do it",
        *(f"{STEMS[1 if n % 2 else 2]}answer {n}" for n in range(1, 7)),
    ]


def test_bounds_branches_and_lengths_are_those_of_the_profile(tmp_path: Path) -> None:
    lengths = profile(table_of(coding(40), output_tokens=300))
    text = plan_file("coding", lengths, None, prompts=False)
    plan = loaded(text, tmp_path)
    found = agents(plan)
    assert (found.count("planner"), found.count("explorer"), found.count("reviewer")) == (1, 12, 1)
    assert found.count("coder") == found.count("tester") == 4
    calls = [node.operator for node in plan.calls if isinstance(node.operator, Call)]
    assert {(call.parameters["max_tokens"], call.output_tokens) for call in calls} == {(300, 300.0)}
    assert text.count("# EDIT") == 3  # two loops and a branch
    results = ran(plan, [{"task": "do it"}], tmp_path / "run", Echo())
    assert str(results[0]["error"]).startswith("function whether_reviewer_runs raised NotImplementedError: ")
    edited = loaded(text.replace('raise NotImplementedError("whether_reviewer_runs")', "return False"), tmp_path)
    server = Echo()
    assert ran(edited, [{"task": "do it"}], tmp_path / "edited", server)[0]["error"] is None
    assert "reviewer" not in {agent for _, _, agent in server.names}


def test_fan_outs_of_one_agent_run_over_a_list_and_of_several_side_by_side(tmp_path: Path) -> None:
    of = chain(OneStep("a"), ParallelSteps(("b",), 2, 5), ParallelSteps(("c", "d e"), 2, 2), OneStep("end"))
    text = plan_file("fan", replace(CODING, expression=of), None, prompts=False)
    server = Echo(lambda messages: messages[-1]["content"] + "!")
    edited = text.replace("return [answer]", "return list(answer)")
    plan = loaded(edited, tmp_path)
    assert sorted(agents(plan)) == ["a", "b", "c", "d e", "end"]
    results = ran(plan, [{"task": "xy"}], tmp_path / "run", server)
    assert server.prompts()[1:4] == ["x", "y", "!"]
    assert results[0]["answer"] == "x!\n\ny!\n\n!!!\n\nx!\n\ny!\n\n!!!!"


steps = st.builds(OneStep, st.sampled_from(["a", "b", "class", "1st", "<other>", "a b", "ü", "plan"]))
blocks = st.builds(
    lambda names, low: ParallelSteps(tuple(sorted(names)), low, low + 2),
    st.sets(st.sampled_from("xyz"), min_size=1),
    st.integers(1, 3),
)
expressions = st.recursive(
    steps | blocks,
    lambda inner: st.one_of(
        st.builds(chain, inner, inner),
        st.builds(choice, inner, inner, inner),
        st.builds(lambda of, low, more: repeat(of, low, low + more), inner, st.integers(0, 2), st.integers(0, 2)),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given_that(of=expressions)
def test_every_expression_gives_a_plan_that_loads_and_has_its_agents(
    of: Expression, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    shown = replace(CODING, expression=of)
    text = plan_file("some", shown, None, prompts=False)
    if shown.text:  # the empty expression has no call
        plan = loaded(text, folder)
        assert all(f"{name!r}" in text for name in agents(plan))
        assert plan.fields == ["task"]


def test_a_profile_without_texts_says_what_is_missing() -> None:
    table = read_traces(pd.DataFrame(prompted(30))).table
    forgetful = fit_profiles(table, ProfileConfig()).predictor
    with pytest.raises(
        ConfigurationError, match="keeps no texts of prompts: learn it again with --set keep_stems=true"
    ):
        plan_file("loop", forgetful.profiles["loop"], forgetful.templates["loop"])
    with pytest.raises(ConfigurationError, match="learnt no prompts: traces with input_text are needed"):
        plan_file("coding", CODING, None)
