"""A predictor over its budget is switched off, logged once with counts, and tried again after a while.

One that does not come back is left behind; it makes no other call until it is back.
"""

import gc
import logging
import threading
import time
from dataclasses import replace

import pytest
from serving_samples import Clock

from presage.errors import ArtefactError, InputError
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.workflows.live import NOT_BACK, SWITCHED_OFF

BUDGET = Budget(deadline_s=1.0, window=10, share=0.2, at_least=5)


def guarded() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker("next-agent version 3", BUDGET, clock, clock), clock


def broken(error: BaseException | None = None) -> str:
    raise error or RuntimeError("the text of a request")


def test_an_answer_passes_through_and_an_error_becomes_its_name() -> None:
    guard, _ = guarded()
    assert guard.call(lambda: 7) == 7
    assert guard.call(broken) == Refused("RuntimeError")
    assert (guard.calls, guard.failed, guard.late) == (2, 1, 0)


def test_above_the_share_of_the_window_it_is_off_until_reset(caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guarded()
    calls = []
    with caplog.at_level(logging.ERROR):
        for _ in range(8):
            guard.call(lambda: 1)
        for _ in range(2):
            guard.call(broken)
        assert not guard.off, "2 of 10 are not above a fifth"
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        guard.call(broken)
        assert guard.off
        assert guard.call(lambda: calls.append(1)) == Refused(SWITCHED_OFF)
    assert (calls, len(caplog.records)) == ([], 1)
    message = caplog.records[0].getMessage()
    assert "next-agent version 3" in message
    assert "3 of its last 10" in message
    assert "request" not in message
    guard.reset()
    assert guard.call(lambda: 2) == 2


def test_what_left_the_window_is_forgiven() -> None:
    guard, _ = guarded()
    for _ in range(8):
        for _ in range(10):
            guard.call(lambda: 1)
        for _ in range(2):
            guard.call(broken)
    assert not guard.off


def test_a_few_calls_conclude_nothing() -> None:
    guard, _ = guarded()
    for _ in range(4):
        guard.call(broken)
    assert not guard.off
    guard.call(lambda: 1)
    assert guard.off


def test_late_answers_are_used_and_counted_against_it() -> None:
    guard, clock = guarded()

    def slow(seconds: float) -> str:
        clock.now += seconds
        return "late"

    for _ in range(4):
        assert guard.call(lambda: slow(1.0)) == "late"
    assert guard.late == 0, "at the deadline is in time"
    for _ in range(2):
        assert guard.call(lambda: slow(1.5)) == "late"
    assert (guard.off, guard.late) == (True, 2)


def test_what_a_request_brings_wrong_is_not_held_against_the_predictor() -> None:
    guard, _ = guarded()
    for _ in range(20):
        assert guard.call(lambda: broken(InputError("input_tokens is -1"))) == Refused("InputError")
    assert not guard.off
    for _ in range(20):
        guard.call(lambda: broken(ArtefactError("the text encoder is gone")))
    assert guard.off


def threads_of(called: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == called]


def test_after_a_while_it_is_tried_again_and_the_pause_doubles_while_it_fails() -> None:
    clock = Clock()
    guard = CircuitBreaker("fails", replace(BUDGET, retry_s=10.0, hang_s=None), clock)
    for pause_s in (10.0, 20.0, 40.0):
        for _ in range(BUDGET.at_least):
            assert guard.call(broken) == Refused("RuntimeError")
        clock.now += pause_s - 1.0
        assert guard.call(lambda: 1) == Refused(SWITCHED_OFF)
        clock.now += 1.0
    for _ in range(BUDGET.at_least):
        assert guard.call(lambda: 1) == 1
    for _ in range(2):
        guard.call(broken)
    assert guard.off, "2 of 7"
    clock.now += 10.0
    assert guard.call(lambda: 2) == 2, "it had recovered, so the first pause holds again"


def test_the_deadline_is_in_time_of_the_cpu() -> None:
    clock, cpu = Clock(), Clock()
    guard = CircuitBreaker("waits for a core", replace(BUDGET, hang_s=None), clock, cpu)

    def waits() -> None:
        clock.now += 100.0
        cpu.now += 0.1

    for _ in range(20):
        guard.call(waits)
    assert (guard.off, guard.late) == (False, 0)


def abandoned(guard: CircuitBreaker) -> threading.Event:
    """The call of this event did not return in time."""
    comes_back = threading.Event()
    assert guard.call(comes_back.wait) == Refused(NOT_BACK)
    return comes_back


def comes_back(event: threading.Event, guard: CircuitBreaker) -> object:
    """The abandoned call returns; the result of the next one."""
    event.set()
    until = time.monotonic() + 60.0
    while (found := guard.call(lambda: 5)) == Refused(NOT_BACK):
        assert time.monotonic() < until
    return found


def test_one_pause_costs_the_calls_of_that_pause_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    guard = CircuitBreaker("pauses", replace(BUDGET, hang_s=0.02, first_hang_s=0.02), Clock())
    called: list[int] = []
    with caplog.at_level(logging.WARNING):
        event = abandoned(guard)
        assert guard.call(lambda: called.append(1)) == Refused(NOT_BACK)
        guard.reset()
        assert guard.call(lambda: called.append(1)) == Refused(NOT_BACK), "its thread may still change what it holds"
    assert (called, guard.off, guard.hung, guard.calls) == ([], False, True, 1)
    assert [record.getMessage()[:35] for record in caplog.records] == ["pauses has no forecasts until its c"]
    assert comes_back(event, guard) == 5
    assert (guard.off, guard.hung) == (False, False)


def test_a_call_that_never_returns_is_left_behind() -> None:
    guard = CircuitBreaker("hangs", replace(BUDGET, hang_s=0.02, first_hang_s=0.02, retry_s=1.0), clock := Clock())
    event = abandoned(guard)
    clock.now += 1e6
    assert guard.call(lambda: 1) == Refused(NOT_BACK)
    (left,) = threads_of("hangs")
    assert left.daemon, "an engine that stops does not wait for it"
    del guard
    gc.collect()
    event.set()
    left.join(60.0)
    assert not threads_of("hangs"), "once it comes back, it finds nobody and ends"


def test_repeated_pauses_switch_it_off_for_a_while() -> None:
    guard = CircuitBreaker("stalls", replace(BUDGET, hang_s=0.02, first_hang_s=0.02, hangs=1), clock := Clock())
    assert comes_back(abandoned(guard), guard) == 5
    event = abandoned(guard)
    assert guard.call(lambda: 1) == Refused(SWITCHED_OFF)
    clock.now += BUDGET.retry_s
    event.set()
    until = time.monotonic() + 60.0
    while guard.call(lambda: 1) == Refused(SWITCHED_OFF):
        assert time.monotonic() < until
    assert not guard.off


def test_a_newer_breaker_of_the_same_predictor_waits_for_the_same_thread() -> None:
    old = CircuitBreaker("old", replace(BUDGET, hang_s=0.02, first_hang_s=0.02), Clock())
    event = abandoned(old)
    new = CircuitBreaker("new", BUDGET, Clock())
    new.follow(old)
    assert new.call(lambda: 1) == Refused(NOT_BACK)
    assert comes_back(event, new) == 5


def test_first_calls_may_compile() -> None:
    guard = CircuitBreaker("compiles", replace(BUDGET, hang_s=0.02, first_hang_s=60.0), Clock())
    compiled = threading.Event()
    threading.Timer(0.2, compiled.set).start()
    assert guard.call(compiled.wait) is True
    for _ in range(BUDGET.at_least):
        guard.call(lambda: 1)
    assert guard.call(threading.Event().wait) == Refused(NOT_BACK)


def test_calls_are_made_on_a_thread_that_ends_with_the_guard() -> None:
    guard, here = CircuitBreaker("of its own", BUDGET, Clock()), threading.get_ident()
    assert len({guard.call(threading.get_ident) for _ in range(20)} - {here}) == 1
    (thread,) = threads_of("of its own")
    del guard
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_without_a_limit_calls_are_made_where_they_are_asked_for() -> None:
    guard = CircuitBreaker("unwatched", replace(BUDGET, hang_s=None), Clock())
    assert guard.call(threading.get_ident) == threading.get_ident()
    assert guard.call(broken) == Refused("RuntimeError")
    assert not threads_of("unwatched")


def test_what_is_no_error_of_the_predictor_reaches_the_caller() -> None:
    guard, _ = guarded()
    with pytest.raises(KeyboardInterrupt):
        guard.call(lambda: broken(KeyboardInterrupt()))
    assert guard.call(lambda: 3) == 3
