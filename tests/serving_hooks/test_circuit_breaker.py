"""A predictor over its budget is switched off, logged once with counts, and stays off until it is reset.

One that does not come back is left behind, and off for good.
"""

import gc
import logging
import threading
from dataclasses import replace

import pytest
from serving_samples import Clock

from presage.errors import ArtefactError, InputError
from presage.serving_hooks.forecasting.circuit_breaker import Budget, CircuitBreaker, Refused
from presage.serving_hooks.forecasting.live import NOT_BACK, SWITCHED_OFF

BUDGET = Budget(deadline_s=1.0, window=10, share=0.2, at_least=5)


def guarded() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker("next-agent version 3", BUDGET, clock), clock


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


def test_a_call_that_never_comes_back_is_left_and_the_predictor_off_for_good(caplog: pytest.LogCaptureFixture) -> None:
    guard = CircuitBreaker("hangs", replace(BUDGET, hang_s=0.02, first_hang_s=0.02), Clock())
    comes_back, called = threading.Event(), []
    with caplog.at_level(logging.ERROR):
        assert guard.call(comes_back.wait) == Refused(NOT_BACK)
        assert guard.call(lambda: called.append(1)) == Refused(SWITCHED_OFF)
        guard.reset()
        assert guard.call(lambda: called.append(1)) == Refused(SWITCHED_OFF), (
            "its thread may still change what it holds"
        )
    assert (called, guard.off, guard.hung, guard.calls) == ([], True, True, 1)
    assert [record.getMessage()[:32] for record in caplog.records] == ["hangs is switched off for good: "]
    (left,) = threads_of("hangs")
    assert left.daemon, "an engine that stops does not wait for it"
    comes_back.set()
    left.join(10.0)
    assert not threads_of("hangs"), "once it comes back, it finds nobody and ends"


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
