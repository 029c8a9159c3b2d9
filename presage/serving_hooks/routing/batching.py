"""Requests that come one by one, answered in batches: one call of the model for all that wait.

"Chimera", §3.8: a collector forms batches up to a size or a time, a worker runs them, the scheduler waits for nothing
but the answer it needs. Ours: an idle worker waits for nobody unless told to, since requests gather while it is busy.
And the worker is a thread, not a process, unless another executor is given: torch lets go of the interpreter while it
computes, and a thread shares the model's memory (`benchmarks/router_batching.py` measures both, with how late the event
loop gets). A process keeps the loop more punctual and costs a copy of the model.

Fails open: a missed deadline, an error in the model, a service that is closed are answers without a value, with a
reason that is counted, never exceptions. No text of a request is kept or told.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, Literal, Self, TypeVar

Request = TypeVar("Request")
Value = TypeVar("Value")

NO_ROOM: Final = "deadline missed before there was room in the queue"
TOO_LATE: Final = "deadline missed"
CLOSED: Final = "the service is closed"
WRONG_NUMBER: Final = "the model gave another number of answers than it was asked for"
ANSWERED: Final = "answered"


@dataclass(frozen=True, slots=True)
class Answer(Generic[Value]):
    """What became of a request.

    Attributes:
        value: of the model; None where there is none.
        reason: why there is none; of an error only the name, its message might repeat what the request says.
    """

    value: Value | None
    reason: str | None = None

    @property
    def source(self) -> Literal["model", "none"]:
        """Where the value is from."""
        return "model" if self.reason is None else "none"


@dataclass(slots=True)
class _Waiting(Generic[Request, Value]):
    request: Request
    arrived_s: float
    answer: asyncio.Future[Answer[Value]]


class BatchingService(Generic[Request, Value]):
    """Answers requests of one event loop by a function over many.

    `async with BatchingService(router.probabilities) as service: answer = await service.ask(prompt)`.

    Args:
        run: requests to as many values, in their order; called by one worker, one batch at a time.
        max_batch: requests a batch.
        max_wait_ms: how long the first of a batch waits for others while the worker is idle; while it is busy they
            gather by themselves.
        max_queued: requests that may wait. Past that `ask` waits for room: whoever asks is slowed down.
        deadline_ms: of a request, from when it is asked, unless it brings its own; None for none.
        executor: of one worker, for a process in place of a thread; not shut down here.

    Attributes:
        counts: requests answered, and reasons why others were not.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Request]], Sequence[Value]],
        *,
        max_batch: int = 32,
        max_wait_ms: float = 0.0,
        max_queued: int = 1024,
        deadline_ms: float | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._run, self._executor, self._own = run, executor, executor is None
        self._max_batch, self._max_wait_s, self._deadline_ms = max_batch, max_wait_ms / 1000, deadline_ms
        self._room = asyncio.Semaphore(max_queued)
        self._queue: deque[_Waiting[Request, Value]] = deque()
        self._running: list[_Waiting[Request, Value]] = []
        self._changed = asyncio.Event()
        self._closed = True
        self._collector: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        if self._own:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="presage-batch")
        self._closed = False
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(self, request: Request, deadline_ms: float | None = None) -> Answer[Value]:
        """The answer to a request, in its batch.

        Args:
            request: what the function reads.
            deadline_ms: from now; None for that of the service. A request whose deadline passed before its batch began
                is not computed.
        """
        wait_ms = self._deadline_ms if deadline_ms is None else deadline_ms
        reason = NO_ROOM
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                if not self._closed:
                    await self._room.acquire()
                    reason = TOO_LATE
                    if self._closed:
                        self._room.release()  # the next one waiting for room shall learn it too
                if self._closed:
                    return self._count(Answer(None, CLOSED))
                loop = asyncio.get_running_loop()
                waiting = _Waiting(request, loop.time(), loop.create_future())
                self._queue.append(waiting)
                self._changed.set()
                return self._count(await waiting.answer)
        except TimeoutError:
            return self._count(Answer(None, reason))

    async def close(self, grace_s: float = 10.0) -> None:
        """No request is taken any more; those that wait are answered, by the model as long as the grace lasts.

        A model that hangs keeps its thread until it returns; nobody waits for it any longer.
        """
        self._closed = True
        self._changed.set()
        if self._collector is not None:
            await asyncio.wait({self._collector}, timeout=grace_s)
            self._collector.cancel()
            self._collector = None
        for waiting in (*self._running, *self._queue):
            self._answer(waiting, Answer(None, CLOSED))
        for _ in range(len(self._queue)):
            self._room.release()
        self._queue.clear()
        if self._own and self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _collect(self) -> None:
        """Batch after batch, until the service is closed and nobody waits."""
        while self._queue or not self._closed:
            if not self._queue:
                await self._next_change()
                continue
            await self._fill()
            taken = [self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))]
            for _ in taken:
                self._room.release()
            self._running = [waiting for waiting in taken if not waiting.answer.done()]
            if self._running:
                await self._answer_all(self._running)
            self._running = []

    async def _fill(self) -> None:
        """Until a batch is full, its first request has waited long enough, or the service closes."""
        full_by = self._queue[0].arrived_s + self._max_wait_s
        while len(self._queue) < self._max_batch and not self._closed:
            left = full_by - asyncio.get_running_loop().time()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._next_change()
            except TimeoutError:
                return

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _answer_all(self, batch: Sequence[_Waiting[Request, Value]]) -> None:
        requests = [waiting.request for waiting in batch]
        try:
            values = await asyncio.get_running_loop().run_in_executor(self._executor, self._run, requests)
            answers = [Answer(value) for value in values]
            if len(answers) != len(batch):
                answers = [Answer(None, WRONG_NUMBER)] * len(batch)
        except Exception as error:  # whatever the model raises, requests go on without it
            answers = [Answer(None, type(error).__name__)] * len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            self._answer(waiting, answer)

    def _answer(self, waiting: _Waiting[Request, Value], answer: Answer[Value]) -> None:
        if not waiting.answer.done():  # it was cancelled, or too late
            waiting.answer.set_result(answer)

    def _count(self, answer: Answer[Value]) -> Answer[Value]:
        self.counts[answer.reason or ANSWERED] += 1
        return answer
