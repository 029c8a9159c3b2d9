"""A predictor over its budget is switched off, said once with counts, and stays off until it is reset."""

import logging

import pytest
from serving_samples import Clock

from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.serving_hooks.guard import Budget, Guard, Refused
from presage.serving_hooks.live import SWITCHED_OFF

BUDGET = Budget(deadline_s=1.0, window=10, share=0.2, at_least=5)


def guarded() -> tuple[Guard, Clock]:
    clock = Clock()
    return Guard("next-agent version 3", BUDGET, clock), clock


def broken(error: Exception | None = None) -> str:
    raise error or RuntimeError("the text of a request")


def test_an_answer_passes_through_and_an_error_becomes_its_name() -> None:
    guard, _ = guarded()
    assert guard.ask(lambda: 7) == 7
    assert guard.ask(broken) == Refused("RuntimeError")
    assert guard.counts == {"calls": 2, "failed": 1, "late": 0}


def test_above_the_share_of_the_window_it_is_off_until_reset(caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guarded()
    calls = []
    with caplog.at_level(logging.ERROR):
        for _ in range(8):
            guard.ask(lambda: 1)
        for _ in range(2):
            guard.ask(broken)
        assert not guard.off, "2 of 10 are not above a fifth"
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        guard.ask(broken)
        assert guard.off
        assert guard.ask(lambda: calls.append(1)) == Refused(SWITCHED_OFF)
    assert (calls, len(caplog.records), guard.counts["switched off"]) == ([], 1, 1)
    said = caplog.records[0].getMessage()
    assert "next-agent version 3" in said
    assert "3 of its last 10" in said
    assert "request" not in said
    guard.reset()
    assert guard.ask(lambda: 2) == 2


def test_what_left_the_window_is_forgiven() -> None:
    guard, _ = guarded()
    for _ in range(8):
        for _ in range(10):
            guard.ask(lambda: 1)
        for _ in range(2):
            guard.ask(broken)
    assert not guard.off


def test_a_few_calls_conclude_nothing() -> None:
    guard, _ = guarded()
    for _ in range(4):
        guard.ask(broken)
    assert not guard.off
    guard.ask(lambda: 1)
    assert guard.off


def test_late_answers_are_used_and_counted_against_it() -> None:
    guard, clock = guarded()

    def slow(seconds: float) -> str:
        clock.now += seconds
        return "late"

    for _ in range(4):
        assert guard.ask(lambda: slow(1.0)) == "late"
    assert guard.counts["late"] == 0, "at the deadline is in time"
    for _ in range(2):
        assert guard.ask(lambda: slow(1.5)) == "late"
    assert (guard.off, guard.counts["late"]) == (True, 2)


def test_what_a_request_brings_wrong_is_not_held_against_the_predictor() -> None:
    guard, _ = guarded()
    for _ in range(20):
        assert guard.ask(lambda: broken(InputError("input_tokens is -1"))) == Refused("InputError")
    assert not guard.off
    for _ in range(20):
        guard.ask(lambda: broken(ArtefactError("the text encoder is gone")))
    assert guard.off


@pytest.mark.parametrize(
    "changes", [{"deadline_s": 0}, {"share": 1.0}, {"share": -0.1}, {"at_least": 0}, {"window": 3}]
)
def test_a_budget_that_is_none_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        Budget(**{"at_least": 5, "window": 10, **changes})  # type: ignore[arg-type]
