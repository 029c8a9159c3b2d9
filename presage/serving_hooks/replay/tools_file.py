"""Files of the tools of a replay: those of the tool service, of which a replay starts nothing.

A tool needs no driver here, and may have a table of its own:

[tools.sandbox]
setup_s = 30.0                  # the median
most = 16

[tools.sandbox.replay]
calls = ["bash*", "python"]     # which calls of the traces run in it
setup_sigma = 0.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from presage.errors import ConfigurationError
from presage.serving_hooks.replay.workload import ReplayJob
from presage.serving_hooks.tool_service.config import ToolName, ToolServiceConfig, ToolSettings, read_config


class ReplayedTool(ToolSettings):
    """One tool; what starts it is not read."""

    @model_validator(mode="after")
    def _one_driver(self) -> Self:
        return self


class ReplayedTools(ToolServiceConfig):
    """The whole file."""

    tools: Annotated[Mapping[ToolName, ReplayedTool], Field(min_length=1)]


def read_tools(file: Path) -> Mapping[str, ToolSettings]:
    """The tools of a file, by name.

    Raises:
        ConfigurationError: it cannot be read, or a value is not what is wanted.
    """
    return read_config(file, ReplayedTools).tools


def described_tools(tools: Mapping[str, ToolSettings]) -> dict[str, Any]:
    """What a replay reads of each tool, as a report shows it."""
    names = ("setup_s", "most", "most_per_tenant", "idle_cost", "wait_cost")
    return {
        name: {of_name: getattr(of, of_name) for of_name in names} | of.replay.model_dump()
        for name, of in tools.items()
    }


def tool_of(call: str, tools: Mapping[str, ToolSettings]) -> str | None:
    """The first tool of the file in which a call of this name runs; None if it needs none of them."""
    for name, of in tools.items():
        if any(fnmatchcase(call, pattern) for pattern in of.replay.calls):
            return name
    return None


def check_called(jobs: Sequence[ReplayJob], tools: Mapping[str, ToolSettings]) -> None:
    """Checks that the workflows use every tool.

    Raises:
        ConfigurationError: one is used by no call.
    """
    called = {one.tool for job in jobs for step in job.steps for one in step.after_tools}
    if not called:
        raise ConfigurationError(
            'no request of these traces waits for a tool: they have no rows of kind "tool" between requests; record '
            "them, or leave --tools out"
        )
    used = {tool_of(call, tools) for call in called}
    for name, of in tools.items():
        if name not in used:
            most = sorted(called)[:8]
            raise ConfigurationError(
                f"tools.{name}: no call of these traces runs in it (replay.calls: {', '.join(of.replay.calls)}); they "
                f"call {', '.join(most)}{' and others' if len(called) > len(most) else ''}"
            )
