"""A thread that calls for others, who wait only so long: Python cannot break a call off, but a caller can leave it.

A call that lets go of the interpreter's lock, as all that waits for a lock, a file or a network does, can be left, and
so can a loop in Python. One that loops in compiled code and keeps that lock stops every thread, its caller's too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class NotBack(Exception):  # noqa: N818  nothing has failed yet
    """The call has not come back in time; its thread is left to itself."""


class _Job:
    __slots__ = ("answer", "back", "call", "error")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answer: Any = None
        self.error: BaseException | None = None
        self.back = threading.Lock()
        self.back.acquire()


class OwnThread:
    """One daemon thread, started with the first call; it ends when nobody holds this object any more.

    Args:
        name: of the thread, for whoever looks at a process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def call(self, what: Callable[[], Any], most_s: float) -> Any:
        """What the call answers or raises.

        The wait is cut in two: where the whole process stood still, the first half is over at once when it goes on,
        and the second is there for the call.

        Raises:
            NotBack: it has taken longer than `most_s` seconds. What is called next would wait behind it: call no more.
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
        return job.answer


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.answer = job.call()
        except BaseException as error:  # the caller is to see it, whatever it is
            job.error = error
        job.back.release()
        del job  # what was asked and answered is the caller's
