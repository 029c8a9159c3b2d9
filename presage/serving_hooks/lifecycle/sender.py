"""The process beside an engine or a gateway that delivers what waits in the file; `webhook.py` starts it.

The first line of standard input is the settings, a `WebhookConfig` as JSON. After each change the process writes a line
to standard output:

    {"sent": 1200, "failed": 500, "waiting": 0, "problem": null}

An event leaves the file once the receiver has answered 2xx. Anything else is tried again, the same event with the same
id: half a second later, then after twice as long each time, less up to half of it at random. Where several processes
share a file, one of them delivers and the others wait for its end. When standard input ends, so has the engine: the
process delivers what waits until a try fails, and ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import requests

from presage.errors import InputError
from presage.serving_hooks.lifecycle.cloud_events import BATCH, ONE, batched
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.lifecycle.outbox import Outbox, WaitingEvent
from presage.serving_hooks.lifecycle.signature import signed_headers

_POLL_S: Final = 0.02
_FIRST_RETRY_S: Final = 0.5
_REPORT_S: Final = 1.0


class SenderReport(msgspec.Struct):
    """What a sender has done since it started.

    Attributes:
        sent: events delivered.
        failed: events whose delivery failed, counted at each try.
        waiting: events in the file; 0 while another process delivers.
        problem: why the latest delivery failed, an HTTP status or the kind of exception; None if it did not.
    """

    sent: int = 0
    failed: int = 0
    waiting: int = 0
    problem: str | None = None


class Sender:
    """Delivers the events of a file.

    Args:
        wait: waits for so many seconds; returns True, at once, when the engine has ended.
        report: takes each report.
        now: seconds since 1970.
        draw: a random number from 0 to 1.
    """

    def __init__(
        self,
        config: WebhookConfig,
        outbox: Outbox,
        wait: Callable[[float], bool],
        report: Callable[[SenderReport], object],
        now: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config, self._outbox, self._keys = config, outbox, config.keys()
        self._wait, self._report, self._now, self._draw = wait, report, now, draw
        self._made = SenderReport()
        self._http = requests.Session()
        self._ended = False

    def run(self) -> None:
        """Delivers until the engine has ended and nothing waits, or a try has failed then."""
        tries = 0
        while True:
            last = self._ended
            try:
                problem, least_s, events = self._deliver()
            except sqlite3.Error as error:
                problem, least_s, events = type(error).__name__, 0.0, 0
            self._made.problem = problem
            if problem is None:
                tries, self._made.sent = 0, self._made.sent + events
                pause_s = 0.0 if events else _POLL_S
            else:
                tries, self._made.failed = tries + 1, self._made.failed + events
                pause_s = _FIRST_RETRY_S * 2 ** min(tries - 1, 16) * (1 - self._draw() / 2)
                pause_s = min(self._config.longest_retry_s, max(pause_s, least_s))
            if last and (problem is not None or not events):
                return
            self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        """Reports, and waits unless the engine has ended."""
        while True:
            with suppress(sqlite3.Error):
                self._made.waiting = self._outbox.waiting
            self._report(self._made)
            if seconds <= 0 or self._ended:
                return
            self._ended = self._wait(min(seconds, _REPORT_S))
            seconds -= _REPORT_S

    def _deliver(self) -> tuple[str | None, float, int]:
        """Delivers the oldest events: as `_post`, and how many they were."""
        events = self._outbox.oldest(self._config.batch)
        if not events:
            return None, 0.0, 0
        problem, least_s = self._post(events)
        if problem is None:
            self._outbox.delivered(events[-1].number)
        return problem, least_s, len(events)

    def _post(self, events: Sequence[WaitingEvent]) -> tuple[str | None, float]:
        """Why a delivery failed, None if it did not; and the seconds for which the receiver asks us to wait."""
        alone = self._config.batch == 1
        body = events[0].body if alone else batched([event.body for event in events])
        # A batch that is tried again may have grown: another message, with events of the same ids.
        webhook_id = events[0].id if len(events) == 1 else f"{events[0].id}-{len(events)}"
        headers = signed_headers(self._keys, webhook_id, int(self._now()), body)
        headers["content-type"] = ONE if alone else BATCH
        try:
            answer = self._http.post(
                self._config.url, body, headers=headers, timeout=self._config.timeout_s, allow_redirects=False
            )
        except requests.RequestException as error:
            return type(error).__name__, 0.0
        if 200 <= answer.status_code < 300:
            return None, 0.0
        after = answer.headers.get("retry-after", "")
        return f"HTTP {answer.status_code}", float(after) if after.isascii() and after.isdigit() else 0.0


def _engine_ended(seconds: float) -> bool:
    """Waits for so long, or until standard input ends."""
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable) and not os.read(0, 4096)


def main() -> None:
    """The process; see the module's documentation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the engine ends this process
    config = WebhookConfig.model_validate_json(sys.stdin.buffer.readline())
    try:
        with Path(f"{config.file}.lock").open("w") as lock:
            while not _locked(lock.fileno()):
                if _engine_ended(_REPORT_S):
                    return
            Sender(config, Outbox(Path(config.file)), _engine_ended, _Reports().write).run()
    except (InputError, OSError) as error:
        sys.exit(f"webhook: {error}")


class _Reports:
    """Writes each report that differs from the one before; the engine may have ended."""

    def __init__(self) -> None:
        self._last = b""

    def write(self, made: SenderReport) -> None:
        line = msgspec.json.encode(made) + b"\n"
        if line != self._last:
            self._last = line
            with suppress(BrokenPipeError):
                os.write(1, line)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main()
