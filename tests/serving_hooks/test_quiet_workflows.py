"""A workflow that is quiet for longer than its type ever is has ended, though nobody says so."""

import math
import random

import pytest
from serving_samples import Clock

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.quiet import LEAST_RETURNS, SURE, QuietLimits


def with_returns(seconds: list[float], longest: int) -> QuietLimits:
    limits = QuietLimits()
    for one in seconds:
        limits.returned("t", one, longest)
    return limits


def test_the_limit_is_where_an_end_is_as_likely_as_promised() -> None:
    returns = [float(n) for n in range(1, 201)]
    limit = with_returns(returns, longest=4).seconds("t")
    last = 1 / 5

    def ended(quiet_s: float) -> float:
        longer = (sum(one > quiet_s for one in returns) + 0.5) / (len(returns) + 1)
        return last / (last + (1 - last) * longer)

    assert ended(limit) >= SURE > ended(limit - 1)


def test_few_returns_long_workflows_and_ends_that_are_told_leave_the_time_to_live() -> None:
    assert with_returns([1.0] * (LEAST_RETURNS - 1), 2).seconds("t") == math.inf
    assert with_returns([1.0] * LEAST_RETURNS, 2).seconds("t") == 1.0
    assert with_returns([1.0] * LEAST_RETURNS, 500).seconds("t") == math.inf
    limits = with_returns([1.0] * 100, 2)
    limits.told("t")
    assert limits.seconds("t") == limits.seconds("unknown") == math.inf


def test_only_the_latest_returns_count() -> None:
    limits = with_returns([100.0] * 600, 2)
    for _ in range(600):
        limits.returned("t", 2.0, 2)
    assert limits.seconds("t") == 2.0


class Served:
    """A table whose clients never end a workflow."""

    def __init__(self) -> None:
        self.clock, self.ended, self.counts = Clock(), list[str](), EventCounts()
        self.table = WorkflowTable(600, self.clock, self.counts)
        self.table.subscribe(lambda workflow, reason: self.ended.append(workflow.step.workflow_id))

    def step(self, workflow: str, number: int, at: float) -> None:
        self.clock.now = at
        self.table.expire()
        self.table.arrived(f"{workflow}.{number}", Step("t", workflow, "a"))
        self.table.finished(f"{workflow}.{number}")


def test_workflows_of_a_quick_type_end_in_seconds_and_one_that_comes_back_is_counted() -> None:
    of, rng = Served(), random.Random(1)
    for run in range(20):
        for number in range(4):
            of.step(f"w{run}", number, 100 * run + number * rng.uniform(2.0, 2.1))
    before = len(of.ended)
    of.clock.now = 2100
    of.table.expire()
    assert before >= 10
    assert len(of.table) == 0
    of.step("w19", 4, 2110)
    assert of.table.get("t\0w19") is not None
    assert of.counts.by_key()["workflows that came back after their end"] >= 1


@pytest.mark.parametrize("quiet_s", [5.0, 50.0])
def test_a_client_that_ends_its_workflows_is_taken_at_its_word(quiet_s: float) -> None:
    of = Served()
    for run in range(20):
        for number in range(4):
            of.step(f"w{run}", number, 100 * run + number)
        of.table.end(f"t\0w{run}", EndReason.FINISHED)
    of.step("last", 0, 3000)
    of.clock.now = 3000 + quiet_s
    of.table.expire()
    assert "last" not in of.ended
