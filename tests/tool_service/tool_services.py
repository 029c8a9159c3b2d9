"""Tool services of the tests: in a thread of this process, or in a process of their own that can be killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event, batched
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.signature import secret_keys, signed_headers
from presage.testing.servers import free_port
from presage.tool_service.app import build
from presage.tool_service.config import ToolServiceConfig

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
AT_ONCE = {"subprocess": {"command": ["sleep", "1000"]}}
_numbers = count()


def slow(seconds: float) -> dict[str, Any]:
    """Settings of a tool whose set-up takes so long."""
    script = f"sleep {seconds}; touch ready; exec sleep 1000"
    return {"subprocess": {"command": ["sh", "-c", script], "ready": ["test", "-e", "ready"]}}


def until(reached: Callable[[], Any]) -> None:
    for _ in range(3000):
        if reached():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to that within half a minute")


def event(kind: Any, workflow: str, agent: str = "", at: float | None = None, **given: Any) -> LifecycleEvent:
    at = round(time.time() if at is None else at, 6)
    of = {"workflow_type": "app", "workflow_id": workflow, "agent": agent, "sequence": 0, "step": 0, **given}
    return LifecycleEvent(id=f"e-{next(_numbers)}", kind=kind, source="/presage/gateway/g", at=at, **of)


class Tools:
    """A service, seen from outside."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def hear(self, *events: LifecycleEvent) -> None:
        body = batched([as_cloud_event(one) for one in events])
        headers = signed_headers(secret_keys(SECRET), f"w-{next(_numbers)}", int(time.time()), body)
        assert httpx.post(self.url + "/events", content=body, headers=headers).status_code == 204

    def ask(self, workflow: str, tool: str = "sandbox", timeout_s: float = 20, **given: Any) -> httpx.Response:
        body = {"tool": tool, "workflow_type": "app", "workflow_id": workflow, "timeout_s": timeout_s, **given}
        return httpx.post(self.url + "/acquire", json=body, timeout=60)

    def acquire(self, workflow: str, tool: str = "sandbox", **given: Any) -> dict[str, Any]:
        answer = self.ask(workflow, tool, **given)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def release(self, resource_id: str) -> None:
        assert httpx.post(self.url + "/release", json={"id": resource_id}).status_code == 204

    def states(self) -> list[str]:
        return sorted(of["state"] for of in httpx.get(self.url + "/resources").json()["resources"])

    def counts(self, tool: str = "sandbox") -> Mapping[str, int]:
        found: Mapping[str, int] = httpx.get(self.url + "/status").json()["tools"][tool]["counts"]
        return found

    def processes(self) -> list[int]:
        """Pids of all that any tool has started and that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                of = process.environ().get("PRESAGE_TOOL_FOLDER", "")
                if of.startswith(str(self.folder)) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found

    def rows(self) -> list[tuple[str, str, str]]:
        """Id, state and workflow of each row of the database."""
        with closing(sqlite3.connect(self.folder / "tools.sqlite")) as database:
            return database.execute("SELECT id, state, workflow_id FROM resources").fetchall()

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def left(self) -> tuple[list[int], list[Any], list[str]]:
        return self.processes(), self.rows(), self.folders()

    def nothing_left(self) -> bool:
        return self.left() == ([], [], [])

    def learn(self, times: int = 8, tool: str = "sandbox") -> None:
        """The coder of some workflows has needed the tool, the planner has not."""
        for number in range(times):
            name = f"learn{number}"
            self.hear(event("step.started", name, "planner"), event("step.started", name, "coder"))
            self.acquire(name, tool)
            self.hear(event("ended", name))
        until(self.nothing_left)

    def remove_all(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def tools_service(folder: Path, tools: Mapping[str, Any], keep: bool = False, **given: Any) -> Iterator[Tools]:
    """A service in a thread; with `keep`, its tools stay. PRESAGE_WEBHOOK_SECRET is in its environment."""
    config = ToolServiceConfig.model_validate({"folder": str(folder / "tools"), "tools": tools, **given})
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(build(config), log_level="error", lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert server.started
    service = Tools(f"http://127.0.0.1:{listening.getsockname()[1]}", folder / "tools")
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        if not keep:
            service.remove_all()


class ToolsProcess(Tools):
    """`presage tools serve` in a process of its own."""

    def __init__(self, folder: Path, file: str) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", folder / "tools")
        self.file = folder / "tools.toml"
        head = f"listen = {json.dumps(f'127.0.0.1:{self.port}')}\nfolder = {json.dumps(str(self.folder))}\n"
        self.file.write_text(head + file)

    def start(self) -> None:
        code = "from presage.cli.presage import app; app()"
        self.process = subprocess.Popen([sys.executable, "-c", code, "tools", "serve", str(self.file)])
        until(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.process.returncode
        try:
            return httpx.get(self.url + "/status").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


@contextmanager
def tools_process(folder: Path, file: str) -> Iterator[ToolsProcess]:
    service = ToolsProcess(folder, file)
    service.start()
    try:
        yield service
    finally:
        service.kill()
        service.remove_all()
