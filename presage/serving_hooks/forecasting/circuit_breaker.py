"""A circuit breaker: switches off a predictor whose calls fail or exceed the deadline too often.

A late result is still used. Calls run on the breaker's own thread. A call that does not return within `hang_s` is
abandoned and its predictor switched off for good, since the thread may still change the predictor's state. Switching
off is logged once. The deadline uses the caller's clock, `hang_s` real time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from presage.errors import InputError
from presage.serving_hooks.forecasting.live import NOT_BACK, SWITCHED_OFF

Result = TypeVar("Result")

HANG_S: Final = 0.25
"""The default: a thousand times what a forecast takes, and still hardly noticeable to a client."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """The limits of a predictor.

    Attributes:
        window: latest calls considered.
        share: of those calls that may fail or be late; above it the predictor is switched off.
        at_least: calls before a predictor can be switched off.
        hang_s: seconds after which a call is abandoned and the predictor switched off for good. None waits for
            ever and runs calls on the caller's thread, which is faster (benchmarks/circuit_breaker.py).
        first_hang_s: the same for the first `at_least` calls, which may include compilation.
    """

    deadline_s: float = 0.005
    window: int = 1000
    share: float = 0.05
    at_least: int = 50
    hang_s: float | None = HANG_S
    first_hang_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A call without a result, and why there is none."""

    reason: str


class CircuitBreaker:
    """Makes the calls of one predictor, which the log calls `called`, such as "next-agent version 3".

    Attributes:
        hung: whether a call was abandoned; then no other is made.
        calls, failed, late: how many calls were made, and how many of these failed and were late.
    """

    def __init__(self, called: str, budget: Budget, clock: Callable[[], float]) -> None:
        self.called, self.budget, self.clock = called, budget, clock
        self.off = self.hung = False
        self.calls = self.failed = self.late = 0
        self._thread = OwnThread(called) if budget.hang_s is not None else None
        self._window: deque[bool] = deque(maxlen=budget.window)
        self._failures = 0
        self._took = 0.0

    def call(self, call: Callable[[], Result]) -> Result | Refused:
        """The result of the call, or `Refused`. Invalid input (`InputError`) does not count as a failure."""
        if self.off:
            return Refused(SWITCHED_OFF)
        try:
            timed, thread, budget = partial(self._timed, call), self._thread, self.budget
            if thread is None or budget.hang_s is None:
                result = timed()
            else:
                result = thread.call(timed, budget.first_hang_s if self.calls < budget.at_least else budget.hang_s)
        except NotBack:
            self.off = self.hung = True
            self._thread = None  # a late result is dropped
            self.calls += 1
            _log.error(
                "%s is switched off for good: its call number %d did not return. Restart the engine, or promote "
                "another version, to use it again.",
                self.called,
                self.calls,
            )
            return Refused(NOT_BACK)
        except Exception as error:
            self._count(failed=type(error) is not InputError)
            return Refused(type(error).__name__)  # the message might contain text of the request
        self._count(failed=False)
        return result

    def _timed(self, call: Callable[[], Result]) -> Result:
        """Measures the call on the thread that runs it, so that the time excludes the handover."""
        started = self.clock()
        try:
            return call()
        finally:
            self._took = self.clock() - started

    def _count(self, failed: bool) -> None:
        late = self._took > self.budget.deadline_s
        self.calls += 1
        self.failed += failed
        self.late += late
        if len(self._window) == self.budget.window:
            self._failures -= self._window[0]
        self._window.append(failed or late)
        self._failures += self._window[-1]
        if len(self._window) >= self.budget.at_least and self._failures > self.budget.share * len(self._window):
            self.off = True
            _log.error(
                "%s is switched off: %d of its last %d calls failed or took longer than %g s; since the start %d of "
                "%d failed and %d were late. It stays off until the breaker is reset.",
                self.called,
                self._failures,
                len(self._window),
                self.budget.deadline_s,
                self.failed,
                self.calls,
                self.late,
            )

    def reset(self) -> None:
        """Closes the breaker and clears its window; a breaker whose predictor hung stays open."""
        self.off, self._failures = self.hung, 0
        self._window.clear()


class NotBack(Exception):  # noqa: N818  the call may still succeed
    """The call has not returned in time; its thread is abandoned."""


class _Job:
    __slots__ = ("back", "call", "error", "result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.back = threading.Lock()
        self.back.acquire()


class OwnThread:
    """A daemon thread, started with the first call, that ends when this object is collected.

    A caller can abandon a call that loops in Python or releases the interpreter lock, as waiting for a lock, a file or
    a network does. Compiled code that loops and keeps the lock stops every thread, the caller's too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def call(self, what: Callable[[], Result], most_s: float) -> Result:
        """The result of the call; raises what it raises.

        It waits twice for half the time: if the whole process was suspended, the first wait is over at once, and the
        call still has the second.

        Raises:
            NotBack: the call took longer than `most_s` seconds. Make no further calls: they would wait behind it.
        """
        if not self._started:
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
            self._started = True
        job = _Job(what)
        self._jobs.put(job)
        if not (job.back.acquire(timeout=most_s / 2) or job.back.acquire(timeout=most_s / 2)):
            raise NotBack
        if job.error is not None:
            raise job.error
        result: Result = job.result
        return result


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.result = job.call()
        except BaseException as error:  # raised again in the caller
            job.error = error
        job.back.release()
        del job  # keep no reference to the caller's objects
