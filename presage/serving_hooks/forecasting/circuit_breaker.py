"""A circuit breaker: switches off a predictor whose calls fail or exceed the deadline too often.

A late result is still used. Calls run on the breaker's own thread. A call that does not return within `hang_s` is
abandoned; no other is made until its thread is back, since it may still change the predictor's state. One such pause is
counted like a late call, as a busy machine causes it; more than `hangs` of them in a window switch the predictor off.

After `retry_s` an open breaker is half open: calls are made again, and the first `at_least` decide. Each time in a row
that it opens, the pause doubles, up to an hour. The deadline is in CPU time of the thread, which another process on
the same cores does not lengthen; `hang_s` is real time.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from presage.errors import InputError
from presage.serving_hooks.workflows.live import NOT_BACK, SWITCHED_OFF

Result = TypeVar("Result")

HANG_S: Final = 0.25
"""The default: a thousand times what a forecast takes, and still hardly noticeable to a client."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """The limits of a predictor.

    Attributes:
        deadline_s: seconds of CPU time after which a call is late.
        window: latest calls considered.
        share: of those calls that may fail or be late; above it the predictor is switched off.
        at_least: calls before a predictor can be switched off for that.
        hang_s: seconds after which a call is abandoned. None waits for ever and runs calls on the caller's thread,
            which saves the time of waking another, 20 to 60 µs.
        first_hang_s: the same for the first `at_least` calls, which may include compilation.
        hangs: calls of the window that may be abandoned.
        retry_s: seconds until a predictor that was switched off is tried again.
    """

    deadline_s: float = 0.005
    window: int = 1000
    share: float = 0.05
    at_least: int = 50
    hang_s: float | None = HANG_S
    first_hang_s: float = 60.0
    hangs: int = 2
    retry_s: float = 60.0


LONGEST_RETRY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A call without a result, and why there is none."""

    reason: str


class CircuitBreaker:
    """Makes the calls of one predictor, which the log calls `called`, such as "next-agent version 3".

    Args:
        clock: seconds, for `retry_s`.
        cpu_clock: seconds of CPU time of the thread that reads it.

    Attributes:
        off: whether it is open.
        hung: whether the thread of an abandoned call was not back when it was last looked at.
        calls, failed, late: how many calls were made, and how many of these failed and were late.
    """

    def __init__(
        self,
        called: str,
        budget: Budget,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.called, self.budget, self.clock, self._cpu_clock = called, budget, clock, cpu_clock
        self.off = self.hung = False
        self.calls = self.failed = self.late = 0
        self._thread = OwnThread(called) if budget.hang_s is not None else None
        self._window: deque[bool] = deque(maxlen=budget.window)
        self._hangs: deque[int] = deque(maxlen=budget.hangs + 1)
        self._failures = 0
        self._took = 0.0
        self._retry_s, self._retry_at = budget.retry_s, 0.0

    def call(self, call: Callable[[], Result]) -> Result | Refused:
        """The result of the call, or `Refused`. Invalid input (`InputError`) does not count as a failure."""
        if (self.off or self.hung) and not self._again():
            return Refused(SWITCHED_OFF if self.off else NOT_BACK)
        try:
            timed, thread, budget = partial(self._timed, call), self._thread, self.budget
            if thread is None or budget.hang_s is None:
                result = timed()
            else:
                result = thread.call(timed, budget.first_hang_s if self.calls < budget.at_least else budget.hang_s)
        except NotBack:
            self._left()
            return Refused(NOT_BACK)
        except Exception as error:
            self._count(failed=type(error) is not InputError, late=self._took > self.budget.deadline_s)
            return Refused(type(error).__name__)  # the message might contain text of the request
        self._count(failed=False, late=self._took > self.budget.deadline_s)
        return result

    def follow(self, other: CircuitBreaker) -> None:
        """Takes over the state of the breaker that called the same predictor before."""
        self._thread, self.off, self.hung = other._thread, other.off, other.hung
        self._retry_s, self._retry_at = other._retry_s, other._retry_at

    def reset(self) -> None:
        """Closes the breaker and clears its window; no call is made while the thread of an abandoned one runs."""
        self.off, self._failures = False, 0
        self._window.clear()
        self._hangs.clear()

    def _again(self) -> bool:
        """Whether a call may be made although the breaker was open or a call abandoned."""
        if self.hung:
            self.hung = self._thread is not None and self._thread.busy
        if self.hung or (self.off and self.clock() < self._retry_at):
            return False
        if self.off:
            self.reset()
            _log.info("%s is tried again", self.called)
        return True

    def _left(self) -> None:
        """A call was abandoned."""
        self.hung = True
        self._hangs.append(self.calls)
        self._count(failed=False, late=True)
        if not self.off and len(self._hangs) > self.budget.hangs and self._hangs[0] > self.calls - self.budget.window:
            self._open(f"{len(self._hangs)} of its last {self.budget.window} calls did not return in time")
        elif not self.off:
            _log.warning(
                "%s has no forecasts until its call number %d returns. If it never does, restart the engine, or "
                "promote another version, to use it again.",
                self.called,
                self.calls,
            )

    def _timed(self, call: Callable[[], Result]) -> Result:
        """Measures the call on the thread that runs it, so that the time excludes the handover."""
        started = self._cpu_clock()
        try:
            return call()
        finally:
            self._took = self._cpu_clock() - started

    def _count(self, failed: bool, late: bool) -> None:
        self.calls += 1
        self.failed += failed
        self.late += late
        if len(self._window) == self.budget.window:
            self._failures -= self._window[0]
        self._window.append(failed or late)
        self._failures += self._window[-1]
        if len(self._window) < self.budget.at_least:
            return
        if self._failures <= self.budget.share * len(self._window):
            self._retry_s = self.budget.retry_s
            return
        self._open(
            f"{self._failures} of its last {len(self._window)} calls failed or took longer than "
            f"{self.budget.deadline_s:g} s of CPU time; since the start {self.failed} of {self.calls} failed and "
            f"{self.late} were late"
        )

    def _open(self, reason: str) -> None:
        self.off, self._retry_at = True, self.clock() + self._retry_s
        _log.error("%s is switched off: %s. It is tried again in %g s.", self.called, reason, self._retry_s)
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)


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
        self._left: threading.Lock | None = None  # released when the abandoned call returns
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def busy(self) -> bool:
        """Whether it still makes a call that was abandoned."""
        return self._left is not None and self._left.locked()

    def call(self, what: Callable[[], Result], most_s: float) -> Result:
        """The result of the call; raises what it raises.

        It waits twice for half the time: if the whole process was suspended, the first wait is over at once, and the
        call still has the second.

        Raises:
            NotBack: the call took longer than `most_s` seconds. While it is `busy`, further calls would wait behind it.
        """
        if not self._started:
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
            self._started = True
        job = _Job(what)
        self._jobs.put(job)
        if not (job.back.acquire(timeout=most_s / 2) or job.back.acquire(timeout=most_s / 2)):
            self._left = job.back
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
