"""The receivers of docs/programs.md run as they stand: they verify, and handle each event once."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event, batched
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.signature import secret_keys, signed_headers
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.testing.servers import free_port

PAGE = (Path(__file__).resolve().parents[3] / "docs/programs.md").read_text("utf-8")
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
EVENTS = [
    LifecycleEvent("a-0", "step.finished", "s", time.time(), "t", "run-7", 2, 0, "planner"),
    LifecycleEvent("a-1", "expected", "s", time.time(), "t", "run-7", 3, 0, "planner", next_agents={"coder": 0.9}),
]


def example(words: str) -> str:
    (found,) = [one for one in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if words in one]
    return found


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)


@contextmanager
def running(code: str) -> Iterator[tuple[str, IO[str]]]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", code, str(port)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{port}/events"
        for _ in range(1000):
            try:
                httpx.post(url, content=b"")
                break
            except httpx.TransportError:
                time.sleep(0.02)
        yield url, process.stdout
        process.kill()


def test_the_receiver_of_the_page_takes_what_is_delivered_once(tmp_path: Path) -> None:
    with running(example("HTTPServer")) as (url, printed):
        webhook = Webhook(WebhookConfig(url=url, file=str(tmp_path / "events.sqlite"))).start()
        for event in (*EVENTS, EVENTS[0]):
            webhook(event)
        assert printed.readline() == "presage.step.finished run-7 \n"
        assert printed.readline() == "presage.expected run-7 {'coder': 0.9}\n"
        webhook.close()
        assert webhook.status().sent == 3


def test_the_receiver_of_the_page_refuses_what_is_forged_or_old() -> None:
    body = batched([as_cloud_event(one) for one in EVENTS])
    with running(example("HTTPServer")) as (url, _):
        for at, sent, status in (
            (time.time(), body, 204),
            (time.time(), body.replace(b"coder", b"thief"), 401),
            (time.time() - 301, body, 401),
        ):
            headers = signed_headers(secret_keys(SECRET), "id", int(at), body)
            assert httpx.post(url, content=sent, headers=headers).status_code == status
        assert httpx.post(url, content=body).status_code == 401


def test_the_helper_of_the_page_prepares_and_releases() -> None:
    asked: list[tuple[Any, ...]] = []

    class Tools:
        def prepare(self, *what: Any) -> None:
            asked.append(what)

        release = prepare

    names: dict[str, Any] = {}
    exec(example("WebhookReceiver"), names)
    ended = LifecycleEvent("a-2", "ended", "s", time.time(), "t", "run-7", 4, 0, "planner")
    body = batched([as_cloud_event(one) for one in (*EVENTS, ended)])
    headers = signed_headers(secret_keys(os.environ["PRESAGE_WEBHOOK_SECRET"]), "id", int(time.time()), body)
    delivered, tools = names["delivered"], Tools()
    assert delivered(tools, headers, body) == (204, "")
    assert delivered(tools, headers, body) == (204, "")
    assert asked == [("run-7", {"coder": 0.9}, None), ("run-7",)]
    assert delivered(tools, {**headers, "webhook-id": "other"}, body)[0] == 400
