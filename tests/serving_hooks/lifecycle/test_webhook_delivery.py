"""What is in the file is delivered: through outages, restarts and SIGKILL, with the same ids; and never waited for."""

from __future__ import annotations

import base64
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from receiving_server import ReceivingServer

from presage.errors import ConfigurationError
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.outbox import Outbox
from presage.serving_hooks.lifecycle.sender import Sender, SenderReport
from presage.serving_hooks.lifecycle.webhook import Webhook

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)


def event(number: int, kind: Any = "step.started") -> LifecycleEvent:
    return LifecycleEvent(f"e-{number}", kind, "/presage/engine/e", time.time(), "t", "w", number, number, "agent")


def config(folder: Path, url: str, **given: Any) -> WebhookConfig:
    return WebhookConfig(**{"url": url, "file": str(folder / "events.sqlite"), "longest_retry_s": 0.2, **given})


def until(reached: Callable[[], bool]) -> None:
    for _ in range(6000):
        if reached():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to that within a minute")


def test_events_come_in_order_signed_and_in_batches(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url, batch=100)).start()
        for number in range(1000):
            webhook(event(number))
        webhook.close()
        assert receiver.delivered == [f"e-{number}" for number in range(1000)]
        assert 10 <= len(receiver.headers) < 100
        assert {one["content-type"] for one in receiver.headers} == {"application/cloudevents-batch+json"}
        status = webhook.status()
        assert (status.sent, status.failed, status.dropped, status.waiting, status.problem) == (1000, 0, 0, 0, None)


def test_batches_of_one_are_single_cloud_events_with_the_id_of_the_event(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url, batch=1)).start()
        for number in range(3):
            webhook(event(number))
        webhook.close()
        assert [one["webhook-id"] for one in receiver.headers] == receiver.delivered == ["e-0", "e-1", "e-2"]
        assert {one["content-type"] for one in receiver.headers} == {"application/cloudevents+json"}


def test_a_name_that_is_no_text_is_dropped_and_holds_up_nothing(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url)).start()
        for number, agent in enumerate(("a", "\ud800", "b")):
            webhook(msgspec.structs.replace(event(number), agent=agent))
        webhook.close()
        assert receiver.delivered == ["e-0", "e-2"]
        assert webhook.status().dropped == 1


def test_only_the_kinds_that_are_wanted_are_delivered(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url, kinds=["expected", "ended"])).start()
        for number, kind in enumerate(("step.started", "expected", "ended")):
            webhook(event(number, kind))
        webhook.close()
        assert [one.kind for one in receiver.events] == ["expected", "ended"]


@pytest.mark.parametrize("how", ["answers 503", "is gone"])
def test_an_outage_of_the_receiver_loses_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, f"{receiver.url}?token=private")).start()
        webhook(event(0))
        until(lambda: receiver.delivered == ["e-0"])
        receiver.status = 503
    if how == "answers 503":
        receiver.__enter__()
    for number in range(1, 500):
        webhook(event(number))
    until(lambda: webhook.status().failed > 500 and webhook.status().waiting == 499)
    assert webhook.status().problem == ("HTTP 503" if how == "answers 503" else "ConnectionError")
    receiver.status = 200
    if how == "is gone":
        receiver.__enter__()
    until(lambda: len(receiver.events) == 500 and webhook.status().problem is None)
    assert [one.id for one in receiver.events] == [f"e-{number}" for number in range(500)]
    webhook.close()
    receiver.__exit__()
    assert [record.getMessage().split("; ")[-1] for record in caplog.records] == [
        "events wait in the file", f"127.0.0.1:{receiver.port} takes events again".join(("webhook: ", "")),
    ]  # fmt: skip
    assert "private" not in caplog.text


def test_a_sender_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url, batch=50)).start()
        killed: set[int] = set()
        for number in range(3000):
            webhook(event(number))
            if number % 500 == 250:
                until(lambda: bool(set(senders()) - killed))
                for process in set(senders()) - killed:
                    os.kill(process, signal.SIGKILL)
                    killed.add(process)
        until(lambda: len(receiver.events) == 3000 and webhook.status().waiting == 0)
        assert len(killed) == 6
        assert {*receiver.delivered} == {f"e-{number}" for number in range(3000)}
        webhook.close()


def senders() -> list[int]:
    """The processes that deliver for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"lifecycle.sender" in command and parent == str(os.getpid()):
            found.append(int(folder.name))
    return found


SERVER = """
import sys, time
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.webhook import Webhook

url, file, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
webhook = Webhook(WebhookConfig(url=url, file=file, longest_retry_s=0.2)).start()
for number in range(first, first + count):
    webhook(LifecycleEvent(f"e-{number}", "step.started", "s", time.time(), "t", "w", number, number, "agent"))
while webhook.status().waiting < count and not webhook.status().sent:
    time.sleep(0.01)
print("written", flush=True)
time.sleep(600)
"""


def test_what_a_killed_server_had_in_the_file_is_delivered_by_the_next(tmp_path: Path) -> None:
    receiver = ReceivingServer(SECRET)
    with receiver:
        pass  # it has a port now, and is away
    file = str(tmp_path / "events.sqlite")
    for first in (0, 100):
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, receiver.url, file, str(first), "100"], stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"written\n"
            until(lambda expected=first + 100: waiting(file) == expected)  # type: ignore[misc]
            server.kill()
    with receiver:
        webhook = Webhook(config(tmp_path, receiver.url)).start()
        until(lambda: len(receiver.events) == 200)
        assert [one.id for one in receiver.events] == [f"e-{number}" for number in range(200)]
        webhook.close()


def waiting(file: str) -> int:
    outbox = Outbox(Path(file))
    try:
        return outbox.waiting
    finally:
        outbox.close()


def test_several_processes_share_a_file_and_one_delivers(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        both = [Webhook(config(tmp_path, receiver.url)).start() for _ in range(2)]
        for number in range(400):
            both[number % 2](event(number))
        until(lambda: len(receiver.events) == 400)
        assert len(receiver.delivered) == 400
        sent = [one.status().sent for one in both]
        assert sorted(sent)[0] == 0
        both.pop(sent.index(max(sent))).close()
        both[0](event(400))
        until(lambda: len(receiver.events) == 401)
        both[0].close()


def test_beyond_the_bound_the_oldest_are_dropped_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = ReceivingServer(SECRET)
    with receiver:
        pass
    webhook = Webhook(config(tmp_path, receiver.url, most_waiting=100)).start()
    for number in range(250):
        webhook(event(number))
        if number % 50 == 0:
            time.sleep(0.03)
    until(lambda: webhook.status().dropped == 150)
    with receiver:
        until(lambda: len(receiver.events) == 100)
        assert [one.id for one in receiver.events] == [f"e-{number}" for number in range(150, 250)]
        webhook.close()
    assert len([one for one in caplog.records if "dropped" in one.getMessage()]) == 1


def test_a_full_queue_in_memory_drops_at_once_and_counts(tmp_path: Path) -> None:
    webhook = Webhook(config(tmp_path, "http://127.0.0.1:9", most_in_memory=10))  # not started: nobody writes
    for number in range(25):
        webhook(event(number))
    status = webhook.status()
    assert (status.waiting, status.dropped) == (10, 15)


def test_while_the_disk_fails_events_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [True]
    append = Outbox.append

    def full(self: Outbox, events: Any, most: int) -> int:
        if fails[0]:
            raise sqlite3.OperationalError("database or disk is full")
        return append(self, events, most)

    monkeypatch.setattr(Outbox, "append", full)
    with ReceivingServer(SECRET) as receiver:
        webhook = Webhook(config(tmp_path, receiver.url)).start()
        webhook(event(0))
        time.sleep(0.1)
        assert webhook.status().waiting == 1
        fails[0] = False
        until(lambda: receiver.delivered == ["e-0"])
        webhook.close()


@pytest.mark.parametrize(("answer", "after", "waits_s"), [(503, "7", 7.0), (429, "900", 30.0), (500, "soon", 0.5)])
def test_tries_are_twice_as_far_apart_each_time_and_as_the_receiver_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, after: str, waits_s: float
) -> None:
    import requests

    def post(*_: Any, **__: Any) -> requests.Response:
        found = requests.Response()
        found.status_code = answer
        found.headers["retry-after"] = after
        return found

    monkeypatch.setattr(requests.Session, "post", post)
    outbox = Outbox(tmp_path / "o.sqlite")
    outbox.append([("e-0", b"{}")], 10)
    waited: list[float] = []
    reports: list[SenderReport] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(reports) > 200

    settings = config(tmp_path, "http://127.0.0.1:9", longest_retry_s=30.0)
    Sender(settings, outbox, wait, lambda made: reports.append(made), lambda: 1.79e9, lambda: 0.0).run()
    assert sum(waited[: max(1, int(waits_s))]) == waits_s
    assert outbox.waiting == 1
    if after == "soon":
        assert waited[:4] == [0.5, 1.0, 1.0, 1.0]  # .5, 1 and 2 s, reported each second
        assert reports[-1].failed <= 13


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "ftp://x"}, "give an address such as"),
        ({"url": "http://user:secret@x"}, "without user name"),
        ({"url": "http://x", "kinds": ["begun"]}, "Input should be 'workflow.started'"),
        ({"url": "http://x", "batch": 0}, "greater than or equal to 1"),
        ({"url": "http://x", "secret": SECRET}, "Extra inputs"),
        ({"url": "http://x"}, r"file\n  Field required"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WebhookConfig.model_validate(given)


def test_a_missing_secret_a_file_of_it_and_an_unusable_outbox_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRESAGE_WEBHOOK_SECRET")
    with pytest.raises(ConfigurationError, match=r"PRESAGE_WEBHOOK_SECRET: the secret .*; give whsec_"):
        Webhook(config(tmp_path, "http://127.0.0.1:9"))
    with pytest.raises(ConfigurationError, match=r"secret_file is .*correct the path"):
        Webhook(config(tmp_path, "http://127.0.0.1:9", secret_file=str(tmp_path / "none")))
    (tmp_path / "secret").write_text(SECRET + "\n", encoding="utf-8")
    (tmp_path / "events.sqlite").write_text("something else entirely, and long enough to be looked at" * 99)
    with pytest.raises(ConfigurationError, match=r"webhook.file is .*not a database.*give a file"):
        Webhook(config(tmp_path, "http://127.0.0.1:9", secret_file=str(tmp_path / "secret")))


def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    Outbox(tmp_path / "new" / "events.sqlite").append([("e-0", b"{}")], 10)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert set(modes.values()) == {0o600}
    assert {"events.sqlite", "events.sqlite-wal"} <= modes.keys()
