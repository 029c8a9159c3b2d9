"""Runs an application of an SDK in its own environment, and compares what is read of its spans with what it did."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from presage.datasets.read import read_traces

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".venv-sdk"
READ_WRONGLY = ("attribute not read", "span not read", "value dropped")


@dataclass(frozen=True)
class Sdk:
    """An application with an instrumentation.

    `lacks` is what its spans do not tell: "cached" tokens, "agents", or the model of a "failed" request. `suffix` is
    what its spans add to the names of agents.
    """

    environment: str
    application: str
    instrumentation: str
    lacks: str = ""
    suffix: str = ""


def scenarios(*sdks: tuple[Sdk, str]) -> list[Any]:
    """Parameters for pytest, one a scenario of an SDK."""
    return [
        pytest.param(sdk, name, id=f"{sdk.application}-{sdk.environment}-{sdk.instrumentation}-{name}")
        for sdk, names in sdks
        for name in names.split()
    ]


@functools.cache
def _recorded(environment: str, application: str, instrumentation: str) -> Path:
    """The folder of spans and truths that the application left; it runs once in a process of tests."""
    folder = Path(tempfile.mkdtemp(prefix="presage-sdk-"))
    python = ENVIRONMENTS / environment / "bin" / "python"
    command = [str(python), f"app_{application}.py", str(folder), instrumentation]
    ran = subprocess.run(command, cwd=HERE / "apps", capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


Step = tuple[Any, ...]


def truth(sdk: Sdk, scenario: str) -> dict[str, Any]:
    """What happened in a scenario, which went as it was scripted."""
    if not (ENVIRONMENTS / sdk.environment / ".installed").exists():
        pytest.skip(f"no environment {ENVIRONMENTS.name}/{sdk.environment}: make sdk")
    folder = _recorded(sdk.environment, sdk.application, sdk.instrumentation)
    happened: dict[str, Any] = json.loads((folder / f"{scenario}.truth").read_text(encoding="utf-8"))
    assert happened["unused"] == 0, "the application asked less than its script answers"
    assert not happened["unexpected"], "the application asked more than its script answers"
    return happened


def check(sdk: Sdk, scenario: str) -> None:
    """The steps that are read are those that the scenario took."""
    happened = truth(sdk, scenario)
    folder = _recorded(sdk.environment, sdk.application, sdk.instrumentation)
    found = read_traces([folder / f"{scenario}.json"])
    assert not [what for what in found.notices if what.startswith(READ_WRONGLY)]
    rows = found.table.to_pylist()
    workflows: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        workflows.setdefault(row["workflow_id"], []).append(row)
    events = happened["events"]
    expected = [[e for e in events if e["workflow"] == n] for n in sorted({e["workflow"] for e in events})]
    read = sorted(workflows.values(), key=lambda steps: steps[0]["started_at"])
    assert len(read) == len(expected)
    for steps, took in zip(read, expected, strict=True):
        _check_workflow(sdk, steps, took)
        assert {row["complete"] for row in steps} == {happened["raised"] is None}
        assert {row["success"] for row in steps} <= ({None} if happened["raised"] is None else {None, False})


def _check_workflow(sdk: Sdk, rows: list[dict[str, Any]], happened: list[dict[str, Any]]) -> None:
    took = [e for i, e in enumerate(happened) if not e.get("failed") or i == len(happened) - 1]  # attempts are none
    tools = {e["agent"] for e in took if e["kind"] == "tool"}
    parents: dict[int, list[int]] = {}
    kept: list[dict[str, Any]] = []
    for row in rows:
        waited = sorted({one for parent in row["parent_steps"] for one in parents.get(parent, [parent])})
        if row["kind"] == "tool" and row["agent"] not in tools:  # a call that the SDK itself answers, as a handoff
            called = {name for e in took for name in e.get("calls", ())}
            assert row["agent"] in called or row["agent"].startswith("handoff to")
            parents[row["step"]] = waited
        else:
            kept.append(row | {"parent_steps": waited})
    free = tools | {e["agent"] for e in took if e.get("at_once")}
    assert _ordered([_told(sdk, row) for row in kept], free) == _ordered([_true(sdk, event) for event in took], free)
    before: set[int] = set()
    for _, group in groupby(zip(kept, took, strict=True), key=_Groups()):
        rows_of = [row for row, _ in group]
        now = {row["step"] for row in rows_of}
        for row in rows_of:
            assert bool(row["parent_steps"]) == bool(before)
            assert set(row["parent_steps"]) <= before | now
        before = now


class _Groups:
    """Numbers groups of steps: tools called after one request, and requests that the script lets run at once."""

    def __init__(self) -> None:
        self.last: Any = None
        self.number = 0

    def __call__(self, pair: tuple[Any, dict[str, Any]]) -> int:
        event = pair[1]
        kind = "tool" if event["kind"] == "tool" else "at once" if event.get("at_once") else None
        if kind is None or kind != self.last:
            self.number += 1
        self.last = kind
        return self.number


def _told(sdk: Sdk, row: dict[str, Any]) -> Step:
    agent = row["agent"].removesuffix(sdk.suffix) if row["kind"] == "llm" else row["agent"]
    agent = None if "agents" in sdk.lacks and row["kind"] == "llm" else agent
    cached = None if "cached" in sdk.lacks else row["cached_input_tokens"] or None
    answered = row["output_tokens"] is not None or row["output_text"] or "failed" not in sdk.lacks
    return agent, row["kind"], row["model"] if answered else None, row["input_tokens"], row["output_tokens"], cached


def _true(sdk: Sdk, event: dict[str, Any]) -> Step:
    agent = None if "agents" in sdk.lacks and event["kind"] == "llm" else event["agent"]
    model = None if event.get("failed") and "failed" in sdk.lacks else event.get("model")
    cached = None if "cached" in sdk.lacks else event.get("cached") or None
    return agent, event["kind"], model, event.get("input"), event.get("output"), cached


def _ordered(steps: list[Step], free: set[str]) -> list[Step]:
    """Steps, with neighbours that may begin in any order, as tools that were called together, sorted by name."""
    ordered: list[Step] = []
    for any_order, group in groupby(steps, key=lambda step: step[0] in free):
        found = list(group)
        ordered += sorted(found, key=str) if any_order else found
    return ordered
