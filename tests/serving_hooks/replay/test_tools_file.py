"""Files of tools for a replay: those of the tool service, and what is said of bad ones."""

from pathlib import Path
from typing import Any

import pytest
from replay_samples import row, table

from presage.errors import ConfigurationError
from presage.serving_hooks.replay.policies import POLICIES, ends, prepared
from presage.serving_hooks.replay.tools_file import check_called, described_tools, read_tools, tool_of
from presage.serving_hooks.replay.workload import PromptConvention, ReplayJob, ToolCall, workload

TOOL: dict[str, Any] = {"kind": "tool", "input_tokens": None, "output_tokens": None}


def written(folder: Path, text: str) -> Path:
    (folder / "tools.toml").write_text(text)
    return folder / "tools.toml"


def jobs(*calls: str) -> tuple[ReplayJob, ...]:
    rows = [row("a", 0, "p", 0.0, input_tokens=100)]
    rows += [row("a", 1 + number, call, 1.5 + number, took_s=0.5, **TOOL) for number, call in enumerate(calls)]
    rows.append(row("a", 1 + len(calls), "q", 9.0, input_tokens=200))
    return workload(table(*rows), PromptConvention("history-first")).jobs


def test_a_file_of_the_tool_service_is_one_of_a_replay(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
listen = "127.0.0.1:8791"
[tools.sandbox]
setup_s = 30.0
most = 4
[tools.sandbox.subprocess]
command = ["sleep", "1000"]
[tools.sandbox.replay]
calls = ["bash:*", "python"]
[tools.other]
""",
    )
    tools = read_tools(file)
    assert [tool_of(call, tools) for call in ("bash:grep", "python", "pythons", "bash")] == [
        "sandbox",
        "sandbox",
        "other",
        "other",
    ]
    assert tool_of("submit", {"sandbox": tools["sandbox"]}) is None
    assert described_tools(tools)["sandbox"] == {
        "setup_s": 30.0,
        "most": 4,
        "most_per_tenant": None,
        "idle_cost": 1.0,
        "wait_cost": 10.0,
        "calls": ["bash:*", "python"],
        "setup_sigma": 0.0,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tools: Field required"),
        ("[tools]", "tools: "),
        ("[tools.a]\nsetup_s = -1", "tools.a.setup_s: Input should be greater than 0"),
        ("[tools.a]\nmost = 0", "tools.a.most: "),
        ("[tools.a.replay]\nsetup_sigma = -0.1", "tools.a.replay.setup_sigma: "),
        ("[tools.a.replay]\ncall = ['b']", "tools.a.replay.call: "),
        ("[tools.a.replay]\ncalls = []", "tools.a.replay.calls: "),
        ("[tools.a", "is no TOML"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        read_tools(written(tmp_path, text))
    assert str(found.value).startswith(f"{tmp_path / 'tools.toml'}: {said}")


def test_a_tool_that_no_call_needs_is_a_mistake(tmp_path: Path) -> None:
    tools = read_tools(written(tmp_path, "[tools.a.replay]\ncalls = ['bash']\n[tools.b.replay]\ncalls = ['edit']"))
    check_called(jobs("bash", "edit"), tools)
    with pytest.raises(ConfigurationError, match=r"tools.b: no call .*replay.calls: edit.* they call bash, submit"):
        check_called(jobs("bash", "submit"), tools)
    with pytest.raises(ConfigurationError, match="no request of these traces waits for a tool"):
        check_called(jobs(), tools)


def test_a_request_waits_for_the_calls_since_the_requests_before_it() -> None:
    (job,) = jobs("bash", "edit")
    assert job.steps[0].after_tools == ()
    assert job.steps[1].after_tools == (ToolCall("bash", 0.5), ToolCall("edit", 1.5))


def test_branches_wait_for_their_own_calls_and_a_join_for_all() -> None:
    rows = [
        row("a", 0, "p", 0.0, parent_steps=[]),
        row("a", 1, "x", 2.0, parent_steps=[0], **TOOL),
        row("a", 2, "y", 1.5, parent_steps=[0], **TOOL),
        row("a", 3, "q", 4.0, parent_steps=[1]),
        row("a", 4, "r", 4.0, parent_steps=[1, 2]),
        row("a", 5, "s", 6.0, parent_steps=[3, 4]),
    ]
    steps = workload(table(*rows), PromptConvention("history-first")).jobs[0].steps
    x, y = ToolCall("x", 1.0), ToolCall("y", 0.5)
    assert [step.after_tools for step in steps] == [(), (x,), (y, x), ()]


def test_without_their_times_calls_come_right_after_the_answer_and_never_after_the_pause() -> None:
    rows = [row("a", 0, "p", 0.0), row("a", 1, "x", None, **TOOL), row("a", 2, "q", 4.0)]
    assert workload(table(*rows), PromptConvention()).jobs[0].steps[1].after_tools == (ToolCall("x", 0.0),)
    rows = [row("a", 0, "p", 0.0), row("a", 1, "x", 30.0, **TOOL), row("a", 2, "q", 4.0)]
    assert workload(table(*rows), PromptConvention()).jobs[0].steps[1].after_tools == (ToolCall("x", 3.0),)
    drawn = workload(table(*rows), PromptConvention(), pause_s=5.0).jobs[0].steps[1]
    assert drawn.after_tools == (ToolCall("x", 0.0),)


def test_every_policy_is_crossed_with_every_preparation() -> None:
    made = prepared([POLICIES["stock"], POLICIES["next-use"]], "on-demand, expected,no-setup")
    assert [one.name for one in made][:3] == ["stock+on-demand", "stock+expected", "stock+no-setup"]
    assert [one.is_bound for one in made[:3]] == [False, False, True]
    assert ["asked" in one.sources for one in made[:3]] == [False, True, False]
    assert ends("full+stjf+expected") == ("full+stjf+on-demand", "full+stjf+no-setup")
    with pytest.raises(ConfigurationError, match="--prepare 'early' is unknown; there are on-demand, at-start"):
        prepared([POLICIES["stock"]], "early")
