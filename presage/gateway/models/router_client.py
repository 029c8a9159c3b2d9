"""Asks the process that runs the router (`router_process.py`), within a deadline.

Each version has a process of its own, which takes over once the version has passed its trial there. If it ends or hangs
it is started again, after waits that double until it answers. Whatever is wrong with it, a forecast is skipped with a
reason: no request waits longer than the deadline. Where a transformer is late or has too many prompts waiting, the
linear head that was trained beside it answers. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from presage.errors import ArtefactError, why
from presage.serving_hooks.forecasting.reload import MOST_S, ProcessEnded

MOST_CHARS: Final = 16_000
"""Of a longer prompt, both ends are sent: more than either head reads, so that only its length is another."""

MOST_WAITING: Final = 64
"""Unanswered forecasts, late ones included; further ones are the linear head's, up to as many, or skipped at once."""

_HANG_S: Final = 30.0
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 300.0
_LONGEST_LINE: Final = 1 << 20
_COMMAND: Final = (sys.executable, "-P", "-m", "presage.gateway.models.router_process")

_log = logging.getLogger(__name__)

Skipped = Literal["no router", "late", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """The forecast of one prompt.

    Attributes:
        probabilities: that each model solves it, calibrated; only of models with enough labels.
        far: the prompt is too far from the training prompts (`source` back-off).
        fallback: by the linear head in place of the transformer, which was too late.
    """

    probabilities: dict[str, float]
    far: bool
    fallback: bool = False


@dataclass(slots=True)
class _Asked:
    """A query: its answer, which raises ProcessEnded if the process ends first, and the linear head's before it."""

    answer: asyncio.Future[dict[str, Any]]
    early: dict[str, Any] | None = None


class _Process:
    """One process with one version."""

    def __init__(self, process: asyncio.subprocess.Process, clock: Callable[[], float]) -> None:
        self.process, self._clock = process, clock
        self.unanswered: dict[int, _Asked] = {}
        self.fallback = False
        """Whether its version has a linear head beside a transformer."""
        self.progress_s = clock()
        self.ended, self._next = False, 0
        self.reader = asyncio.create_task(self._read())

    def ask(self, query: dict[str, Any]) -> _Asked:
        """Sends a query."""
        assert self.process.stdin is not None
        asked = _Asked(asyncio.get_running_loop().create_future())
        if self.ended:
            asked.answer.set_exception(ProcessEnded("the router process has ended"))
            return asked
        if not self.unanswered:
            self.progress_s = self._clock()
        self._next += 1
        self.unanswered[self._next] = asked
        self.process.stdin.write(json.dumps({"id": self._next, **query}).encode() + b"\n")
        return asked

    def end(self) -> None:
        """Ends it; `_read` does the rest."""
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                answer = json.loads(line)
                if "early" in answer:
                    if answer["id"] in self.unanswered:
                        self.unanswered[answer["id"]].early = answer
                    continue
                self.progress_s = self._clock()
                asked = self.unanswered.pop(answer["id"], None)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result(answer)
        except (ValueError, LookupError, TypeError, OSError):  # a line that is too long, or no answer
            self.end()
        self.ended = True
        for asked in self.unanswered.values():
            if not asked.answer.done():
                asked.answer.set_exception(ProcessEnded("the router process has ended"))
                asked.answer.exception()  # nobody may wait for it any more
        await self.process.wait()


class RouterClient:
    """Runs the router in a process.

    Args:
        clock: monotonic seconds.
        deadline_s: of one forecast.
        command: that starts the process.

    Attributes:
        starts: how often a process was started.
    """

    def __init__(
        self, clock: Callable[[], float], deadline_s: float = 0.05, command: tuple[str, ...] = _COMMAND
    ) -> None:
        self._clock, self._deadline_s, self._command = clock, deadline_s, command
        self.starts = 0
        self._processes: set[_Process] = set()
        self._running: _Process | None = None
        self._version: tuple[str, str] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._ended, self._not_before = 0, float("-inf")

    @property
    def process_id(self) -> int | None:
        """Of the process that answers; None without one."""
        return None if self._running is None else self._running.process.pid

    async def load(self, folder: str, digest: str) -> tuple[str, ...]:
        """Loads and tries a version in a new process, which then takes over; returns its models.

        Raises:
            ArtefactError: it is broken, of another kind, or not the one with this digest.
            ProcessEnded: the process has ended or hangs.
        """
        running, models = await self._started(folder, digest)
        before, self._running, self._version = self._running, running, (folder, digest)
        if before is not None:
            before.end()
        return models

    async def forecast(self, prompt: str) -> RouterAnswer | Skipped:
        """Forecasts one prompt, or says why not. Does not raise."""
        running = self._running
        if running is None or running.ended:
            self._restart()
            return "no router"
        full = len(running.unanswered) >= MOST_WAITING
        if full:
            self._end_if_hung(running)
            if not running.fallback or len(running.unanswered) >= 2 * MOST_WAITING:
                return "overloaded"
        if len(prompt) > MOST_CHARS:
            prompt = prompt[: MOST_CHARS // 2] + " " + prompt[-MOST_CHARS // 2 :]
        asked = running.ask({"prompt": prompt, "within_s": self._deadline_s, "quick": full})
        done, _ = await asyncio.wait((asked.answer,), timeout=self._deadline_s)
        if not done:
            self._end_if_hung(running)
        try:
            answer, late = (asked.answer.result(), full) if done else (asked.early, True)
            if answer is None:
                return "late"
            forecast = RouterAnswer(answer["probabilities"], answer["far"], late)
        except (ProcessEnded, LookupError):
            return "failed"
        self._ended = 0
        return forecast

    async def close(self) -> None:
        """Ends all processes for good."""
        self._closed, self._running = True, None
        ending = list(self._processes)
        for running in ending:
            running.end()
        await asyncio.gather(*(running.reader for running in ending))
        if self._starting is not None:
            await self._starting

    async def _started(self, folder: str, digest: str) -> tuple[_Process, tuple[str, ...]]:
        if self._closed:
            raise ProcessEnded("the gateway shuts down", queried=False)
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            env={**os.environ, "NUMBA_NUM_THREADS": "1"},
        )
        running = _Process(process, self._clock)
        self._processes.add(running)
        running.reader.add_done_callback(lambda _: self._processes.discard(running))
        try:
            async with asyncio.timeout(MOST_S):
                answer = await running.ask({"load": folder, "digest": digest}).answer
            if "error" in answer:
                raise ArtefactError(answer["error"])
            if self._closed:
                raise ProcessEnded("the gateway shuts down", queried=False)
            running.fallback = answer.get("fallback", False)
            return running, tuple(answer["models"])
        except BaseException as error:
            running.end()
            if isinstance(error, TimeoutError):
                raise ProcessEnded(f"the router process has loaded nothing within {MOST_S:g} s", late=True) from None
            raise

    def _restart(self) -> None:
        """Starts the process again in the background, if it has ended and it is time."""
        if self._running is not None:
            self._running = None
            self._back_off()
        idle = self._starting is None or self._starting.done()
        if self._version is not None and idle and not self._closed and self._clock() >= self._not_before:
            self._starting = asyncio.create_task(self._start_again(self._version))

    async def _start_again(self, version: tuple[str, str]) -> None:
        try:
            running, _ = await self._started(*version)
        except (ArtefactError, ProcessEnded, OSError) as error:
            self._back_off()
            _log.warning("the router process cannot be started again: %s", why(error))
            return
        if self._running is None and self._version == version:
            self._running = running
        else:
            running.end()

    def _back_off(self) -> None:
        self._not_before = self._clock() + min(_FIRST_WAIT_S * 2.0 ** min(self._ended, 32), _LONGEST_WAIT_S)
        self._ended += 1

    def _end_if_hung(self, running: _Process) -> None:
        if self._clock() - running.progress_s > _HANG_S:
            running.end()
