"""CrewAI and AutoGen, unchanged, before a gateway: what it recognises of their workflows and agents.

Each runs in a Python of its own, since both pin much:

    python -m venv crewai && crewai/bin/pip install crewai opentelemetry-instrumentation-{openai,httpx,crewai}
    python -m venv autogen && autogen/bin/pip install autogen-agentchat "autogen-ext[openai]" \
        opentelemetry-sdk opentelemetry-instrumentation-{openai,httpx}
    CREWAI_PYTHON=crewai/bin/python AUTOGEN_PYTHON=autogen/bin/python \
        pytest -s -m slow tests/gateway/test_frameworks.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from client_apps import Behind, Model, behind_gateway
from framework_apps import CREWS, TEAMS

from presage.gateway.simulated_engine import Reply

APPLICATIONS = [*CREWS, *TEAMS]
SPEAKERS = ("researcher", "writer", "critic")


def python_with(application: str) -> str:
    """The Python that has the library of an application; skips the test without one."""
    library, variable = ("crewai", "CREWAI_PYTHON") if application in CREWS else ("autogen_ext", "AUTOGEN_PYTHON")
    if variable in os.environ:
        return os.environ[variable]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed, and {variable} names no Python that has it")
    return sys.executable


def replies(model: Model) -> Reply:
    """Calls each offered tool once, handoffs last; selects speakers in turn; else answers."""

    def reply(body: Mapping[str, Any]) -> str | Mapping[str, Any]:
        given = json.dumps(body["messages"])
        if "Only return the role" in given:
            return min(SPEAKERS, key=lambda name: given.count(f"{name}: "))
        offered = [tool["function"] for tool in body.get("tools") or ()]
        left = [tool for tool in offered if f'"{tool["name"]}"' not in given]
        if not left:
            return model.text()
        tool = min(left, key=lambda one: str(one["name"]).startswith("transfer"))
        takes = tool.get("parameters", {}).get("properties", {})
        return model.call(tool["name"], **{key: "Writer" if key == "coworker" else model.text()[:60] for key in takes})

    return reply


@contextmanager
def after(application: str, *options: str) -> Iterator[Behind]:
    """The gateway after runs of an application."""
    python = python_with(application)
    with behind_gateway(replies(Model())) as behind:
        script = Path(__file__).with_name("framework_apps.py")
        done = subprocess.run(
            [python, str(script), application, behind.url, *options],
            check=False, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield behind


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True], ids=["not traced", "traced"])
@pytest.mark.parametrize("same", [False, True], ids=["questions differ", "one question"])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_twenty_runs_eight_at_a_time(application: str, same: bool, traced: bool) -> None:
    options = [*(["--same"] if same else []), *(["--traced"] if traced else [])]
    with after(application, "--runs", "20", "--at-once", "8", *options) as behind:
        precision, recall = behind.sent.scores()
        right = behind.sent.agents_are_right()
        print(f"\n{application} {' '.join(options)}: precision {precision:.3f}, recall {recall:.3f}, agents {right}")
        assert right
        assert precision == 1
        joined = traced or application in ("crew", "swarm") or (application == "group-chat" and not same)
        assert recall == 1 or not joined  # else a tool's result or the question first shows in another agent's prompt
        if traced:  # one trace a run
            traces = {(headers["x-test-run"], headers["traceparent"][3:35]) for _, headers in behind.engine.seen}
            assert len(traces) == 20
