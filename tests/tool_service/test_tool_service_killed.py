"""A service that is killed and started again uses the tools in use further, and removes all others."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tool_services import SECRET, event, tools_process, until

SLOW = """
[tools.sandbox.subprocess]
command = ["sh", "-c", "setsid sleep 1000 & sleep 0.5; touch ready; exec sleep 1000"]
ready = ["test", "-e", "ready"]

[tools.quick]
setup_s = 0.1
[tools.quick.subprocess]
command = ["sleep", "1000"]

[tools.endless.subprocess]
command = ["sleep", "1000"]
ready = ["false"]
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    monkeypatch.delenv("PRESAGE_TOOLS_TOKEN", raising=False)


def test_killed_while_tools_are_prepared_used_and_removed_it_loses_and_leaks_none(tmp_path: Path) -> None:
    with tools_process(tmp_path, SLOW) as tools, ThreadPoolExecutor(2) as agents:
        used, ended = tools.acquire("used", "quick"), tools.acquire("ended", "quick")
        refused = agents.submit(httpx.post, tools.url + "/acquire", json={
            "tool": "sandbox", "workflow_type": "app", "workflow_id": "preparing",
        })  # fmt: skip
        until(lambda: tools.states() == ["preparing", "used", "used"])
        end = event("ended", "ended")
        tools.hear(end)
        tools.kill()
        with pytest.raises(httpx.TransportError):
            refused.result()
        tools.start()
        until(lambda: (tools.folders(), len(tools.processes())) == ([used["id"]], 1))
        assert tools.acquire("used", "quick")["id"] == used["id"]
        assert tools.acquire("used", "quick")["pid"] == used["pid"]
        tools.hear(end)  # comes again, as its sender got no answer
        assert tools.acquire("ended", "quick")["id"] != ended["id"]
        tools.hear(event("ended", "ended"))
        tools.release(used["id"])
        until(tools.nothing_left)


def test_a_tool_that_died_while_the_service_was_away_is_removed(tmp_path: Path) -> None:
    with tools_process(tmp_path, SLOW) as tools:
        first = tools.acquire("w", "quick")
        tools.kill()
        tools.remove_all()
        tools.start()
        until(tools.nothing_left)
        assert tools.acquire("w", "quick")["id"] != first["id"]


def test_a_service_that_is_told_to_stop_stops_though_tools_are_prepared_and_clients_wait(tmp_path: Path) -> None:
    with tools_process(tmp_path, SLOW) as tools, ThreadPoolExecutor(1) as agents:
        used = tools.acquire("used", "quick")
        waiting = agents.submit(tools.ask, "w", "endless")
        until(lambda: tools.states() == ["preparing", "used"])
        tools.kill(signal.SIGTERM)
        assert tools.process.returncode in (0, -signal.SIGTERM)
        assert waiting.exception() is not None or waiting.result().status_code >= 500
        tools.start()
        until(lambda: tools.folders() == [used["id"]])
        assert tools.states() == ["used"]


def test_what_it_has_learnt_survives_a_restart(tmp_path: Path) -> None:
    # Idle time is cheap, so that it is prepared for at once however slowly this machine answers.
    cheap = '[tools.cheap]\nwait_cost = 10000.0\n[tools.cheap.subprocess]\ncommand = ["sleep", "1000"]\n'
    with tools_process(tmp_path, cheap) as tools:
        tools.learn(tool="cheap")
        tools.kill(signal.SIGTERM)
        tools.start()
        tools.hear(event("step.started", "w", "planner"))
        tools.hear(event("expected", "w", "planner", next_agents={"coder": 0.95}, return_s={"0.5": 0.0}))
        until(lambda: tools.states() == ["ready"])
