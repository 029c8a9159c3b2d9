"""The webhook as the thread that serves sees it: a subscriber that appends to a bounded queue in memory.

A thread moves the queue to a file (`outbox.py`), and a process delivers the file (`sender.py`), so neither the disk nor
the receiver is ever waited for. Another thread reads the process's reports and starts it again if it ends.
"""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.outbox import Outbox
from presage.serving_hooks.lifecycle.sender import SenderReport
from presage.serving_hooks.status import WebhookStatus

_log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.02
_AT_ONCE: Final = 256
"""Events encoded before the interpreter is yielded to the thread that serves."""
_YIELD_S: Final = 0.0005
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 5.0
_COMMAND: Final = (sys.executable, "-m", "presage.serving_hooks.lifecycle.sender")


class Webhook:
    """Delivers events; calling it queues one, and never blocks.

    Raises:
        ConfigurationError: the secret is missing or the file cannot be used.
    """

    def __init__(self, config: WebhookConfig) -> None:
        config.keys()  # the process reads them; an error is to be seen here
        self._config, self._kinds = config, frozenset(config.kinds)
        self._outbox, self._most = Outbox(Path(config.file)), config.most_waiting
        self._queue: deque[LifecycleEvent] = deque()
        self._dropped = self._dropped_here = 0
        self._reported, self._earlier = SenderReport(), SenderReport()
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer = threading.Thread(target=self._write, name="presage-events", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="presage-webhook", daemon=True)

    def start(self) -> Self:
        """Starts threads and process."""
        self._writer.start()
        self._watcher.start()
        return self

    def __call__(self, event: LifecycleEvent) -> None:
        """Queues an event."""
        if event.kind not in self._kinds:
            return
        if len(self._queue) >= self._config.most_in_memory:
            self._dropped_here += 1
            return
        self._queue.append(event)

    def status(self) -> WebhookStatus:
        """What became of the events of this process; where several share a file, the one that delivers counts all."""
        made, earlier = self._reported, self._earlier
        return WebhookStatus(
            sent=earlier.sent + made.sent,
            failed=earlier.failed + made.failed,
            dropped=self._dropped + self._dropped_here,
            waiting=made.waiting + len(self._queue),
            problem=made.problem,
        )

    def close(self) -> None:
        """Writes what is queued; waits some seconds for its delivery, which fails at once if the receiver is away."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._writer.join(_CLOSE_S)
        if self._process is not None:
            _end(self._process)
        self._watcher.join(_CLOSE_S)

    def _write(self) -> None:
        """Moves the queue to the file."""
        failing = warned = stopping = False
        while not stopping or self._queue:
            stopping = self._stop.wait(_YIELD_S if len(self._queue) >= _AT_ONCE else _PAUSE_S)
            events = [self._queue[place] for place in range(min(_AT_ONCE, len(self._queue)))]
            if not events:
                continue
            try:
                beyond = self._outbox.append(filter(None, map(self._encoded, events)), self._most)
            except sqlite3.Error as error:
                if not failing:
                    _log.error("webhook: events cannot be written (%s); they wait in memory", type(error).__name__)
                failing = True
                if self._stop.wait(_RETRY_S):
                    break
                continue
            self._dropped += beyond
            failing = False
            for _ in events:
                self._queue.popleft()
            if (beyond or self._dropped_here) and not warned:
                warned = True
                _log.error(
                    "webhook: events are dropped, as the receiver %s takes too few; presage_webhook_events_total "
                    "counts them",
                    self._config.host,
                )
        self._outbox.close()

    def _encoded(self, event: LifecycleEvent) -> tuple[str, bytes] | None:
        try:
            return event.id, as_cloud_event(event)
        except (UnicodeError, msgspec.MsgspecError):  # a name that is no text
            self._dropped += 1
            return None

    def _watch(self) -> None:
        """Runs the process, again and again, and reads its reports."""
        while not self._stop.is_set():
            try:
                code: object = self._run()
            except OSError as error:
                code = type(error).__name__
            made, earlier = self._reported, self._earlier
            self._earlier = SenderReport(earlier.sent + made.sent, earlier.failed + made.failed)
            self._reported = SenderReport(waiting=made.waiting, problem=made.problem)
            if not self._stop.is_set():
                _log.warning("webhook: the sender has ended (%s) and is started again", code)
                self._stop.wait(_RETRY_S)

    def _run(self) -> int:
        process = self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            process.stdin.write(self._config.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            if self._stop.is_set():  # `close` may not have seen this process
                _end(process)
            for line in process.stdout:
                with suppress(msgspec.MsgspecError):  # what else was printed
                    self._take(msgspec.json.decode(line, type=SenderReport))
        _end(process)
        return process.wait()

    def _take(self, report: SenderReport) -> None:
        before, self._reported = self._reported, report
        if report.problem is not None and before.problem is None:
            _log.warning("webhook: %s: %s; events wait in the file", self._config.host, report.problem)
        elif report.problem is None and before.problem is not None:
            _log.warning("webhook: %s takes events again", self._config.host)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tells a process to end, by the end of its input."""
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
