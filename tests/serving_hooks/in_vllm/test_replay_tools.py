"""Tools in virtual time before vLLM's own scheduler: reckoned by hand, and laws of every preparation."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from presage.errors import EngineError
from presage.serving_hooks.replay.engine_file import EngineFile
from presage.serving_hooks.replay.fleet_file import FleetMember
from presage.serving_hooks.replay.metrics import PolicyRun
from presage.serving_hooks.replay.policies import POLICIES, PREPARATIONS, ROUTING, Policy, prepared
from presage.serving_hooks.replay.runs import Done, Setting, run_one
from presage.serving_hooks.replay.tools_file import ReplayedTool
from presage.serving_hooks.replay.workload import (
    Arrivals,
    PromptConvention,
    RecordedRequest,
    ReplayJob,
    ToolCall,
    assemble,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

CONVENTION = PromptConvention("own-conversation")
COST = {"source": "a test", "iteration_s": 1.0, "prefill_token_s": 0.0, "decode_token_s": 0.0, "context_token_s": 0.0}
ENGINE = EngineFile.model_validate(
    {"cache_tokens": 20_000, "most_requests": 32, "most_tokens": 4096, "cost": COST, "block_tokens": 16}
)
"""Every iteration takes a second, and so does every output token."""


def job(number: int, arrives_s: float, *calls: ToolCall) -> ReplayJob:
    """p answers for two seconds, then come the calls within a second, then q answers for two seconds."""
    asked = [
        RecordedRequest("p", 40, 2, (), 0.0),
        RecordedRequest("q", 90, 2, (0,), 1.0, after_tools=calls),
    ]
    return ReplayJob("t", f"w{number}", assemble(asked, CONVENTION), arrives_s)


def tool(**given: Any) -> ReplayedTool:
    return ReplayedTool.model_validate({"setup_s": 3.0, **given})


def played(
    jobs: tuple[ReplayJob, ...],
    preparation: str | None,
    policy: Policy = POLICIES["stock"],
    seed: int = 0,
    arrivals: Arrivals | None = None,
    engine: EngineFile = ENGINE,
    fleet: tuple[FleetMember, ...] = (),
    **tools: ReplayedTool,
) -> tuple[PolicyRun, Done]:
    of = policy if preparation is None else prepared([policy], preparation)[0]
    runs: list[PolicyRun] = []
    arrivals = arrivals or Arrivals(as_recorded=True)
    setting = Setting(jobs, CONVENTION, arrivals, engine, "counts", tools=tools, fleet=fleet)
    done = run_one(setting, of, seed, on_run=runs.append)
    return runs[0], done


NEED = ToolCall("bash", 0.5)


@pytest.mark.parametrize(
    ("preparation", "ends_s", "waited_s", "held_s"),
    [
        ("on-demand", 8.0, 3.0, 5.5),  # needed at 2.5, ready at 5.5: q comes 3 late, at 6
        ("at-start", 5.5, 0.5, 5.5),  # ready at 3
        ("expected", 8.0, 3.0, 5.5),  # nothing is known yet
        ("no-setup", 5.0, 0.0, 2.5),
    ],
)
def test_a_late_tool_makes_the_next_request_as_late(
    preparation: str, ends_s: float, waited_s: float, held_s: float
) -> None:
    run, done = played((job(0, 0.0, NEED),), preparation, sandbox=tool())
    assert run.end_s == pytest.approx(ends_s)
    found = done.figures
    assert found["completion_mean_s"] == pytest.approx(4.0 + waited_s)  # two answers, no pause
    assert found["tool_setup_waited_s"] == pytest.approx(waited_s)
    assert found["tool_held_s"] == pytest.approx(held_s)
    assert (found["tools_set_up"], found["tools_unused"], found["tool_idle_s"]) == (1, 0, 0)
    if preparation == "no-setup":
        assert "tool_hidden_share" not in found
    else:
        assert found["tool_hidden_share"] == pytest.approx(1 - waited_s / 3)


def test_a_step_that_will_probably_need_a_tool_gets_it_set_up_as_it_begins() -> None:
    two = (job(0, 0.0, NEED), job(1, 20.0, NEED))
    run, done = played(two, "expected", sandbox=tool())
    first, second = run.tools
    assert (first.began_s, first.needed_s) == (2.5, 2.5)
    # One of one steps of p needed it, after 2.5 s: probability 1/2. Begun at once it is half a second late.
    assert (second.began_s, second.ready_s, second.needed_s, second.waited_s) == (20.0, 23.0, 22.5, 0.5)
    assert second.gone_s == run.end_s == pytest.approx(25.5)
    assert done.figures["tool_hidden_share"] == pytest.approx(1 - 3.5 / 6)


def test_a_tool_that_is_set_up_quickly_is_begun_as_late_as_it_may_be() -> None:
    three = tuple(job(number, 20.0 * number, NEED) for number in range(3))
    run, _ = played(three, "expected", sandbox=tool(setup_s=0.5, wait_cost=100.0))
    assert [life.began_s for life in run.tools] == pytest.approx([2.5, 22.0, 42.0])
    at_start, _ = played(three, "at-start", sandbox=tool(setup_s=0.5))
    assert [life.began_s for life in at_start.tools] == [0.0, 20.0, 40.0]


def test_at_the_limit_workflows_wait_for_one_another() -> None:
    two = (job(0, 0.0, NEED), job(1, 0.0, NEED))
    run, done = played(two, "on-demand", sandbox=tool(most=1))
    # The second gets none before the first ends, at 8; it is ready at 11, which is 8.5 late.
    assert sorted(run.completions_s) == pytest.approx([8.0, 13.5])
    found = done.figures
    assert (found["tool_limit_waits"], found["tools_at_once"]) == (1, 1)
    assert found["tool_limit_waited_s"] == pytest.approx(5.5)
    assert found["tool_setup_waited_s"] == pytest.approx(6.0)
    early, done = played(two, "at-start", sandbox=tool(most=1))
    # The first needs it at 2.5 and has it at 3, so it ends at 5.5; the second has it from 8.5.
    assert sorted(early.completions_s) == pytest.approx([5.5, 11.0])
    assert done.figures["tool_limit_waited_s"] == pytest.approx(3.0)


def test_a_tool_that_a_workflow_never_needs_is_set_up_in_vain() -> None:
    both = (job(0, 0.0, NEED, ToolCall("edit", 0.75)), job(1, 20.0, NEED))
    tools = {"shell": tool(replay={"calls": ["bash"]}), "editor": tool(replay={"calls": ["edit"]})}
    _, done = played(both, "at-start", **tools)
    assert (done.figures["tools_set_up"], done.figures["tools_unused"]) == (4, 1)
    # The first editor is ready at 3 and needed at 3.25, after a shell that was late; the second is there from 23 until
    # its workflow ends at 25.5.
    assert done.figures["tool_idle_s"] == pytest.approx(2.75)
    _, done = played(both, "on-demand", **tools)
    assert (done.figures["tools_set_up"], done.figures["tools_unused"]) == (3, 0)


def test_workflows_that_keep_what_others_wait_for_are_an_error() -> None:
    crossing = (
        job(0, 0.0, NEED, ToolCall("edit", 0.75)),
        job(1, 0.0, ToolCall("edit", 0.5), ToolCall("bash", 0.75)),
    )
    tools = {"shell": tool(most=1, replay={"calls": ["bash"]}), "editor": tool(most=1, replay={"calls": ["edit"]})}
    with pytest.raises(EngineError, match=r"2 workflows wait for editor and shell.* Raise most"):
        played(crossing, "on-demand", **tools)


def test_times_of_set_up_are_drawn_about_their_median_and_alike_under_every_preparation() -> None:
    many = tuple(job(number, 40.0 * number, NEED) for number in range(25))
    drawn = {
        name: [
            life.ready_s - life.began_s
            for life in sorted(played(many, name, sandbox=tool(replay={"setup_sigma": 0.5}))[0].tools, key=_job)
        ]
        for name in ("on-demand", "at-start")
    }
    assert drawn["on-demand"] == pytest.approx(drawn["at-start"])
    assert 2.0 < sorted(drawn["at-start"])[12] < 4.5
    assert len(set(drawn["at-start"])) == 25
    other, _ = played(many, "at-start", seed=1, sandbox=tool(replay={"setup_sigma": 0.5}))
    assert [life.ready_s - life.began_s for life in other.tools] != pytest.approx(drawn["at-start"])


def _job(life: Any) -> int:
    return int(life.job)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[ReplayJob, ...]:
    """Workflows of every shape, whose steps wait for one or two of those before and for calls of two tools."""
    made = []
    for number in range(draw(st.integers(1, 7))):
        asked = []
        for step in range(draw(st.integers(1, 5))):
            parents = draw(st.sets(st.integers(0, step - 1), min_size=1, max_size=2)) if step else ()
            pause_s = draw(st.sampled_from((0.0, 0.3, 2.0)))
            times = sorted(draw(st.lists(st.sampled_from((0.0, 0.2, 5.0)), max_size=3)) if step else [])
            calls = tuple(ToolCall(draw(st.sampled_from(("bash", "bash", "none"))), min(at, pause_s)) for at in times)
            asked.append(
                RecordedRequest(
                    draw(st.sampled_from("pq")),
                    draw(st.integers(1, 200)),
                    draw(st.integers(1, 12)),
                    tuple(sorted(parents)),
                    pause_s if parents else 0.0,
                    after_tools=calls,
                )
            )
        arrives_s = draw(st.sampled_from((0.0, 0.0, 1.0, 7.3)))
        made.append(ReplayJob("t", f"w{number}", assemble(asked, CONVENTION), arrives_s))
    return tuple(made)


GENERATED = settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
"""Nothing is shrunk, which would take minutes: each example starts vLLM's scheduler twice."""

QUICK = ENGINE.model_copy(update={"cost": ENGINE.cost.model_copy(update={"iteration_s": 0.05})})


@GENERATED
@given(workloads(), st.sampled_from(PREPARATIONS), st.integers(1, 3), st.sampled_from((0.1, 2.0, 30.0)), st.booleans())
def test_never_are_more_there_than_may_be_and_none_outlives_its_workflow(
    jobs: tuple[ReplayJob, ...], preparation: str, most: int, setup_s: float, spread: bool
) -> None:
    sandbox = tool(setup_s=setup_s, most=most, replay={"calls": ["bash"], "setup_sigma": 0.4 * spread})
    run, done = played(jobs, preparation, engine=QUICK, sandbox=sandbox)
    assert len(run.completions_s) == len(jobs)
    assert done.figures["tools_at_once"] <= most
    ends_s = {number: max(one.ended_s or 0.0 for one in run.asked if one.job == number) for number in range(len(jobs))}
    needing = {
        number
        for number, one in enumerate(jobs)
        if any(call.tool == "bash" for step in one.steps for call in step.after_tools)
    }
    needed = [life for life in run.tools if life.needed_s is not None]
    assert len(needed) == len(needing)  # one each
    assert Counter(life.gone_s for life in needed) == Counter(ends_s[number] for number in needing)
    for life in run.tools:
        assert life.began_s <= life.ready_s
        assert life.gone_s < float("inf")
    if preparation in ("on-demand", "no-setup"):
        assert done.figures["tools_unused"] == 0
    again, _ = played(jobs, preparation, engine=QUICK, sandbox=sandbox)
    assert again == run


@GENERATED
@given(workloads(), st.sampled_from(("stock", "next-use", "belady")))
def test_tools_that_take_no_time_change_nothing(jobs: tuple[ReplayJob, ...], policy: str) -> None:
    _, without = played(jobs, None, POLICIES[policy], engine=QUICK)
    _, free = played(jobs, "no-setup", POLICIES[policy], engine=QUICK, sandbox=tool())
    figures = {name: value for name, value in free.figures.items() if not name.startswith("tool")}
    assert replace(free, policy=policy, figures=figures) == without


def test_a_fleet_waits_for_its_tools_too() -> None:
    jobs = tuple(job(number, 3.0 * number, NEED) for number in range(8))
    members = tuple(FleetMember(name, ENGINE, POLICIES["lifecycle"]) for name in ("a", "b"))
    run, done = played(jobs, "on-demand", ROUTING["round-robin"], fleet=members, sandbox=tool())
    assert len(run.completions_s) == 8
    assert done.figures["tool_setup_waited_s"] == pytest.approx(24.0)
    assert {one.engine for one in run.asked} == {0, 1}
