"""Every request gets one answer: of the model in its batch, or none with a reason that is counted."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoder import MODELS, planted, save_encoder

from presage.serving_hooks.routing.batching import (
    ANSWERED,
    CLOSED,
    NO_ROOM,
    TOO_LATE,
    WRONG_NUMBER,
    Answer,
    BatchingService,
)


class Doubling:
    """Answers numbers with their doubles and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, requests: Sequence[int]) -> list[int]:
        self.batches.append(list(requests))
        return [2 * request for request in requests]


class Held(Doubling):
    """Begins each batch only when let go, and tells that it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, requests: Sequence[int]) -> list[int]:
        self.begun.set()
        assert self.go.wait(30)
        return super().__call__(requests)

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.begun.wait, 30)


async def settled() -> None:
    """Whatever can go on without time passing has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


@given(
    requests=st.lists(st.integers(), max_size=40),
    max_batch=st.integers(1, 9),
    max_queued=st.integers(1, 9),
)
def test_each_request_gets_its_own_answer_whatever_the_batches(
    requests: list[int], max_batch: int, max_queued: int
) -> None:
    model = Doubling()

    async def ask_all() -> list[Answer[int]]:
        async with BatchingService(model, max_batch=max_batch, max_wait_ms=0, max_queued=max_queued) as service:
            answers = await asyncio.gather(*map(service.ask, requests))
            assert service.counts[ANSWERED] == len(requests)
            return answers

    answers = asyncio.run(ask_all())
    assert answers == [Answer(2 * request) for request in requests]
    assert all(answer.source == "model" for answer in answers)
    assert all(len(batch) <= max_batch for batch in model.batches)
    assert [request for batch in model.batches for request in batch] == requests


def test_what_comes_while_the_model_is_busy_is_one_batch() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_batch=16, max_wait_ms=0) as service:
            first = asyncio.create_task(service.ask(0))
            await model.has_begun()
            rest = [asyncio.create_task(service.ask(i)) for i in range(1, 10)]
            await settled()
            model.go.set()
            await asyncio.gather(first, *rest)
        assert model.batches == [[0], list(range(1, 10))]

    asyncio.run(scenario())


def test_a_batch_that_is_full_does_not_wait_and_one_that_is_not_waits_for_others() -> None:
    async def scenario() -> None:
        model = Doubling()
        async with BatchingService(model, max_batch=3, max_wait_ms=60_000) as service:
            async with asyncio.timeout(30):
                first = asyncio.create_task(service.ask(1))
                await settled()
                assert model.batches == []
                await asyncio.gather(first, service.ask(2), service.ask(3))
        assert model.batches == [[1, 2, 3]]

    asyncio.run(scenario())


def test_a_missed_deadline_is_no_answer_and_is_not_computed() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_wait_ms=0) as service:
            first = asyncio.create_task(service.ask(1, deadline_ms=60_000))
            await model.has_begun()
            late = await service.ask(2, deadline_ms=1)
            assert (late, late.source) == (Answer(None, TOO_LATE), "none")
            model.go.set()
            assert await first == Answer(2)
            assert await service.ask(3) == Answer(6)
            assert service.counts == {TOO_LATE: 1, ANSWERED: 2}
        assert model.batches == [[1], [3]]

    asyncio.run(scenario())


def test_a_deadline_missed_while_the_model_runs_is_no_answer_either() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_wait_ms=0, deadline_ms=300) as service:
            assert await service.ask(1) == Answer(None, TOO_LATE)
            assert model.begun.is_set()
            model.go.set()
            assert await service.ask(2, deadline_ms=60_000) == Answer(4)

    asyncio.run(scenario())


def test_a_full_queue_slows_those_who_ask_and_loses_none() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_batch=2, max_wait_ms=0, max_queued=2) as service:
            first = asyncio.create_task(service.ask(0))
            await model.has_begun()
            rest = [asyncio.create_task(service.ask(i)) for i in range(1, 6)]  # two wait in the queue, three for room
            await settled()
            assert await service.ask(9, deadline_ms=1) == Answer(None, NO_ROOM)
            model.go.set()
            assert await asyncio.gather(first, *rest) == [Answer(2 * i) for i in range(6)]
        assert model.batches == [[0], [1, 2], [3, 4], [5]]

    asyncio.run(scenario())


def test_an_error_in_the_model_is_no_answer_and_the_next_batch_is_computed() -> None:
    def odd_only(requests: Sequence[int]) -> list[int]:
        if any(request % 2 == 0 for request in requests):
            raise KeyError("the text of a request")
        return list(requests)

    async def scenario() -> None:
        async with BatchingService(odd_only, max_batch=2, max_wait_ms=0) as service:
            answers = await asyncio.gather(*map(service.ask, [1, 2, 3, 5]))
            assert answers == [Answer(None, "KeyError")] * 2 + [Answer(3), Answer(5)]
            assert service.counts == {"KeyError": 2, ANSWERED: 2}

    asyncio.run(scenario())


@pytest.mark.parametrize("given", [[], [1], [1, 2, 3]])
def test_another_number_of_answers_is_none_for_all(given: list[int]) -> None:
    async def scenario() -> list[Answer[int]]:
        async with BatchingService(lambda _: given, max_batch=2, max_wait_ms=60_000) as service:
            return await asyncio.gather(service.ask(1), service.ask(2))

    assert asyncio.run(scenario()) == [Answer(None, WRONG_NUMBER)] * 2


def test_a_caller_that_is_cancelled_disturbs_nobody() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_wait_ms=0) as service:
            running = asyncio.create_task(service.ask(1))
            await model.has_begun()
            queued, kept = asyncio.create_task(service.ask(2)), asyncio.create_task(service.ask(3))
            await settled()
            running.cancel()
            queued.cancel()
            model.go.set()
            assert await kept == Answer(6)
            assert running.cancelled()
            assert queued.cancelled()
        assert model.batches == [[1], [3]]

    asyncio.run(scenario())


def test_closing_answers_those_who_wait_and_takes_no_more() -> None:
    async def scenario() -> None:
        model = Held()
        service: BatchingService[int, int] = BatchingService(model, max_batch=2, max_wait_ms=60_000, max_queued=3)
        assert await service.ask(0) == Answer(None, CLOSED)  # not open yet
        async with service:
            full = [asyncio.create_task(service.ask(i)) for i in range(2)]
            await model.has_begun()
            asked = [asyncio.create_task(service.ask(i)) for i in range(2, 7)]  # three queued, two wait for room
            await settled()
            closing = asyncio.create_task(service.close())
            await settled()
            assert await service.ask(8) == Answer(None, CLOSED)
            model.go.set()
            await closing
            async with asyncio.timeout(30):
                assert await asyncio.gather(*full) == [Answer(0), Answer(2)]
                found = await asyncio.gather(*asked)
        assert found == [Answer(4), Answer(6), Answer(8), Answer(None, CLOSED), Answer(None, CLOSED)]
        assert await service.ask(9) == Answer(None, CLOSED)
        await service.close()  # a second time is no error

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_model_that_hangs() -> None:
    async def scenario() -> None:
        model = Held()
        service: BatchingService[int, int] = BatchingService(model, max_batch=1, max_wait_ms=0)
        async with service:
            asked = [asyncio.create_task(service.ask(i)) for i in range(3)]
            await model.has_begun()
            await service.close(grace_s=0.01)
            async with asyncio.timeout(30):
                assert await asyncio.gather(*asked) == [Answer(None, CLOSED)] * 3
        model.go.set()  # or the thread would outlive the test

    asyncio.run(scenario())


def test_the_event_loop_goes_on_while_the_model_computes() -> None:
    async def scenario() -> None:
        model = Held()
        async with BatchingService(model, max_wait_ms=0) as service:
            asked = asyncio.create_task(service.ask(1))
            await model.has_begun()  # the model is held, and here we are
            assert not asked.done()
            model.go.set()
            assert await asked == Answer(2)

    asyncio.run(scenario())


def test_a_transformer_answers_in_batches_as_it_does_alone(tmp_path: Path) -> None:
    from presage.predictors.routing.transformer import TransformerScorer

    folder = save_encoder(tmp_path)
    scorer = TransformerScorer.from_encoder(str(folder), models=MODELS, head_tokens=60, tail_tokens=60)
    prompts = planted(40, 0)[0]
    sizes: list[int] = []

    def run(batch: Sequence[str]) -> Any:
        sizes.append(len(batch))
        return scorer.logits(batch)

    async def scenario() -> list[Answer[Any]]:
        async with BatchingService(run, max_batch=16, max_wait_ms=60_000, deadline_ms=60_000) as service:
            return await asyncio.gather(*map(service.ask, [*prompts, *prompts[:8]]))

    answers = asyncio.run(scenario())
    assert sizes == [16, 16, 16]
    for prompt, answer in zip([*prompts, *prompts[:8]], answers, strict=True):
        assert answer.value is not None
        np.testing.assert_allclose(answer.value, scorer.logits([prompt])[0], atol=1e-5)
