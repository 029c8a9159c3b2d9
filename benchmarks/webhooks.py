"""How many lifecycle events a second reach a receiver, is any lost while it is away, and what does emitting cost?

One thread plays the gateway: it emits the four events of a step at a rate, each workflow has ten steps, and the webhook
delivers them to a receiver in another process, which verifies each signature and appends the ids that it got to a file
before it answers. Three parts:

- steady: events come at the rate; how late they are received, and what emitting one costs the thread, waits for the
  interpreter's lock included, beside the same events with a subscriber in process alone
- outage: the receiver is killed (SIGKILL) and is back `--away` seconds later, while events go on; then the process that
  delivers is killed too
- most: events that wait in the file are delivered as fast as possible

    python benchmarks/webhooks.py [--rate 5000] [--seconds 20] [--away 60] [--waiting 200000]

Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.emitter import LifecycleEvents
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.outbox import Outbox
from presage.serving_hooks.lifecycle.receiver import WebhookReceiver
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step
from presage.testing.servers import free_port

STEPS = 10
SECRET = "PRESAGE_WEBHOOK_SECRET"


def receive(port: int, file: str) -> None:
    """The receiver's process."""
    receiver, path = WebhookReceiver(os.environ[SECRET], most=10), Path(file)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with receiver.received(dict(self.headers), body) as events:
                now = time.time()
                with path.open("a", encoding="utf-8") as log:
                    log.write("".join(f"{event.id} {now - event.at:.6f} {now:.6f}\n" for event in events))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class Receiver:
    """The receiver's process, and what it has got: id, seconds from the event to its receipt, time of the receipt."""

    def __init__(self, folder: Path) -> None:
        self.port, self.file = free_port(), folder / "received"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--receive", str(self.port), str(self.file)])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def got(self) -> list[tuple[str, float, float]]:
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        cells = [line.split() for line in lines]
        return [(name, float(late), float(at)) for name, late, at in cells]


class Workflows:
    """Emits the events of steps, one after the other: three or four each."""

    def __init__(self, events: LifecycleEvents) -> None:
        self._events, self._table, self._number = events, WorkflowTable(3600.0, time.monotonic), 0

    def step(self) -> None:
        events, request = self._events, str(self._number)
        last = self._number % STEPS == STEPS - 1
        step = Step("application", f"run-{self._number // STEPS}", f"agent-{self._number % 7}", last=last)
        running = self._table.arrived(request, step)
        assert running is not None
        began = time.perf_counter()
        events.attempt(events.arrived, running)
        self._table.finished(request)
        events.attempt(events.finished, running, "stop", 120)
        if last:
            events.attempt(events.ended, running.workflow, EndReason.FINISHED)
        self.spent_s = time.perf_counter() - began
        if last:
            self._table.end(step.workflow, EndReason.FINISHED)
        self._number += 1


def emit(events: LifecycleEvents, rate: float, seconds: float, during: Callable[[float], object]) -> dict[str, float]:
    """Emits at a rate; µs that the events of a step took."""
    workflows, began, made, took = Workflows(events), time.perf_counter(), [0], []
    events.subscribe(lambda _: made.__setitem__(0, made[0] + 1))
    while (passed := time.perf_counter() - began) < seconds:
        during(passed)
        if made[0] > rate * passed:
            time.sleep(0.001)
            continue
        workflows.step()
        took.append(workflows.spent_s * 1e6)
    took.sort()
    per_step = made[0] / len(took)
    return {
        "events": made[0],
        "mean_us": statistics.fmean(took) / per_step,
        "p50_us": took[len(took) // 2] / per_step,
        "p99_us": took[len(took) * 99 // 100] / per_step,
        "rate": made[0] / (time.perf_counter() - began),
    }


def settle(webhook: Webhook, receiver: Receiver, events: int, most_s: float) -> None:
    """Waits until everything was received, at most so long."""
    began = time.perf_counter()
    while time.perf_counter() - began < most_s:
        if webhook.status().waiting == 0 and len({one for one, *_ in receiver.got()}) >= events:
            break
        time.sleep(0.2)


def judged(receiver: Receiver, emitted: list[str]) -> dict[str, float]:
    got = receiver.got()
    times = Counter(one for one, *_ in got)
    late = sorted(seconds for _, seconds, _ in got)
    return {
        "lost": len(set(emitted) - times.keys()),
        "again": sum(times.values()) - len(times),
        "late_p50_ms": 1000 * late[len(late) // 2],
        "late_p99_ms": 1000 * late[len(late) * 99 // 100],
    }


def sender_of(webhook_process: int) -> list[int]:
    """The processes that deliver for this one."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(webhook_process)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "lifecycle.sender" in line]


def webhook_to(receiver: Receiver, folder: Path) -> Webhook:
    url = f"http://127.0.0.1:{receiver.port}/"
    return Webhook(WebhookConfig(url=url, file=str(folder / "events.sqlite"))).start()


def run(name: str, folder: Path, seconds: float, rate: float, away: tuple[float, float] | None) -> dict[str, Any]:
    """One part: `away` is from when on the receiver is gone, and for how long."""
    receiver = Receiver(folder)
    time.sleep(1.0)
    webhook = Webhook(
        WebhookConfig(url=f"http://127.0.0.1:{receiver.port}/", file=str(folder / "events.sqlite"))
    ).start()
    events, emitted = LifecycleEvents("gateway", None, EventCounts()), list[str]()
    events.subscribe(webhook)
    events.subscribe(lambda event: emitted.append(event.id))
    most, back_at = [0], [0.0]

    def back() -> None:
        receiver.start()
        back_at[0] = time.time()

    todo = [] if away is None else [
        (away[0], receiver.kill),
        (away[0] + away[1], back),
        (away[0] + away[1] + 2.0, lambda: [os.kill(one, signal.SIGKILL) for one in sender_of(os.getpid())]),
    ]  # fmt: skip

    def during(passed: float) -> None:
        while todo and passed >= todo[0][0]:
            todo.pop(0)[1]()
        most[0] = max(most[0], webhook.status().waiting)

    made = emit(events, rate, seconds, during)
    settle(webhook, receiver, len(emitted), 120.0)
    status = webhook.status()
    webhook.close()
    receiver.kill()
    found = {"part": name, **made, **judged(receiver, emitted), "most_waiting": most[0]}
    if away is not None:
        found["caught_up_s"] = max(at for _, late, at in receiver.got() if late > 1.0) - back_at[0]
    return {**found, "dropped": status.dropped, "failed": status.failed}


def fastest(folder: Path, waiting: int) -> dict[str, Any]:
    """Events a second from the file to the receiver, and their bytes."""
    outbox, now = Outbox(folder / "events.sqlite"), time.time()
    for first in range(0, waiting, 1000):
        made = [
            LifecycleEvent(
                f"w-{n}", "step.started", "/presage/gateway/w", now, "application", f"run-{n}", n, 0, "agent"
            )
            for n in range(first, min(waiting, first + 1000))
        ]
        outbox.append([(event.id, as_cloud_event(event)) for event in made], waiting)
    size = sum(path.stat().st_size for path in folder.glob("events.sqlite*"))
    receiver = Receiver(folder)
    time.sleep(2.0)
    webhook = webhook_to(receiver, folder)
    while webhook.status().sent < waiting:
        time.sleep(0.1)
    webhook.close()
    receiver.kill()
    at = [at for *_, at in receiver.got()]
    return {"part": "most", "events": waiting, "rate": waiting / (at[-1] - at[0]), "bytes_an_event": size / waiting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5000.0, help="events a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steady part")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without a receiver")
    parser.add_argument("--waiting", type=int, default=200_000, help="events to deliver as fast as possible")
    parser.add_argument("--receive", nargs=2, metavar=("PORT", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receive is not None:
        receive(int(given.receive[0]), given.receive[1])
        return
    os.environ[SECRET] = "whsec_" + b64encode(secrets.token_bytes(32)).decode()
    alone = emit(LifecycleEvents("gateway", None, EventCounts()), given.rate, 5.0, lambda _: None)
    parts: list[dict[str, Any]] = [{"part": "in process alone", **alone}]
    for name, seconds, away in (
        ("steady", given.seconds, None),
        ("outage", given.away + 20.0, (5.0, given.away)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            parts.append(run(name, Path(folder), seconds, given.rate, away))
    with tempfile.TemporaryDirectory() as folder:
        parts.append(fastest(Path(folder), given.waiting))
    columns = (
        ("events", "events", "{:,.0f}"),
        ("rate", "a second", "{:,.0f}"),
        ("mean_us", "µs each", "{:.1f}"),
        ("p99_us", "p99", "{:.1f}"),
        ("late_p50_ms", "received after ms", "{:.0f}"),
        ("late_p99_ms", "p99", "{:,.0f}"),
        ("lost", "lost", "{:.0f}"),
        ("again", "again", "{:.0f}"),
        ("most_waiting", "most waiting", "{:,.0f}"),
        ("caught_up_s", "caught up in s", "{:.1f}"),
    )
    print("| | " + " | ".join(title for _, title, _ in columns) + " |\n|---|" + "---|" * len(columns))
    for part in parts:
        cells = [form.format(part[name]) if name in part else "" for name, _, form in columns]
        print(f"| {part['part']} | " + " | ".join(cells) + " |")
    print(json.dumps({"rate": given.rate, "away_s": given.away, "parts": parts}))


if __name__ == "__main__":
    main()
