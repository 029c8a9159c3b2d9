"""A workflow that falls silent is ended after its time to live, one that works or was just heard of is not."""

import pytest

from presage.errors import ConfigurationError
from presage.serving_hooks.policies.lifecycle import Lifecycle


def test_the_silent_expire_in_order_and_once() -> None:
    alive = Lifecycle(time_to_live_s=10)
    for at, workflow in enumerate(("a", "b", "c")):
        alive.begin(workflow, at)
        alive.finish(workflow, at)
    assert alive.expire(10.5) == ["a"]
    assert alive.expire(12.0) == ["b", "c"]
    assert (alive.expire(99), alive.expired, len(alive)) == ([], 3, 0)


def test_a_request_in_the_engine_keeps_its_workflow_alive_however_long_it_takes() -> None:
    alive = Lifecycle(time_to_live_s=10)
    alive.begin("long", 0)
    alive.begin("long", 1)
    alive.finish("long", 2)
    assert alive.expire(50) == []
    alive.finish("long", 55)
    assert (alive.expire(64), alive.expire(65)) == ([], ["long"])


def test_whoever_says_so_has_ended_and_may_come_back_as_a_new_one() -> None:
    alive = Lifecycle()
    alive.begin("a", 0)
    assert (alive.end("a"), alive.end("a"), "a" in alive) == (True, False, False)
    alive.finish("a", 1)
    assert len(alive) == 0
    alive.begin("a", 2)
    assert "a" in alive


def test_requests_of_an_ended_workflow_do_not_keep_the_one_that_comes_back_alive() -> None:
    alive = Lifecycle(time_to_live_s=10)
    alive.begin("a", 0)
    alive.begin("a", 0)
    alive.end("a")
    alive.begin("a", 1)
    alive.finish("a", 2)
    assert (alive.expire(11), alive.expire(12)) == ([], ["a"])


def test_no_time_to_live_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="time_to_live_s"):
        Lifecycle(0)
