"""What was evicted is back before it is asked for, out of what lay idle, and nobody else notices."""

from pathlib import Path

import pytest
from prefetch_samples import Idling, asked, prefetching, prompt, served, status
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm_samples import TIER, ask, everything_is_free

from presage.serving_hooks.vllm.prefetch.prefetcher import Pace

pytestmark = pytest.mark.vllm
BOTH = pytest.mark.parametrize("ahead", [False, True])


def evicted(engine: Idling, **more: object) -> None:
    """The planner of `a` is asked twice the same; then one that ends takes of its space and leaves it retired."""
    served(engine, "a1", prompt(0, 640), **more)
    served(engine, "a2", prompt(0, 640), **more)
    served(engine, "z1", prompt(100, 1200), workflow_end=True)
    assert status(engine)["started"] == 0


@BOTH
def test_what_was_evicted_is_fetched_while_the_engine_is_idle_and_found(tmp_path: Path, ahead: bool) -> None:
    engine = prefetching(tmp_path, ahead=ahead)
    evicted(engine)
    engine.settle()
    assert status(engine)["tokens"] == 432  # 76 of 89 blocks were taken, 13 of 40 are left
    assert served(engine, "a3", prompt(0, 660)) == 640
    engine.settle()
    said = status(engine)
    assert (said["used_tokens"], said["wasted_tokens"]) == (432, 0)
    assert not engine.scheduler.requests
    assert everything_is_free(engine.scheduler)


def test_without_it_nothing_is_fetched(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, presage={"prefetch": False})
    served(engine, "a1", prompt(0, 640))
    served(engine, "z1", prompt(100, 1200), workflow_end=True)
    assert engine.settle() <= 2
    assert served(engine, "a3", prompt(0, 660)) == 208
    assert not any(status(engine).values())


@BOTH
def test_clients_are_told_of_their_own_requests_alone(tmp_path: Path, ahead: bool) -> None:
    engine = prefetching(tmp_path, ahead=ahead, stats=True)
    told: list[str] = []
    queried = running = 0
    whole = engine.scheduler.update_from_output

    def watched(*args: object) -> object:
        nonlocal queried, running
        answers = whole(*args)
        for client in answers.values():
            told.extend(output.request_id for output in client.outputs)
            told.extend(client.finished_requests or ())
            queried += client.scheduler_stats.prefix_cache_stats.queries
            running += client.scheduler_stats.num_running_reqs
        return answers

    engine.scheduler.update_from_output = watched
    evicted(engine)
    running = 0
    engine.settle()
    assert status(engine)["tokens"] == 432
    assert set(told) == {"a1", "a2", "z1"} == set(engine.ended)
    assert queried == 640 + 640 + 1200  # tokens
    assert running == 0


def test_the_moment_a_request_comes_the_prefetch_is_gone_and_has_cost_it_nothing(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, ahead=True)
    evicted(engine)
    while not status(engine)["started"]:
        engine.step()
    under_way = engine.scheduler.requests.keys() - {"z1"}
    assert len(under_way) == 1
    asked(engine, "r1", prompt(300, 1380), output=8)  # 87 of 89 blocks
    engine.step()
    assert engine.scheduler.requests.keys() == {"r1"}
    assert engine.log[-1][0] == {"r1": 256}  # as much as an iteration takes
    while "r1" not in engine.ended:
        engine.step()
    assert not any(preempted for *_, preempted in engine.log)
    assert status(engine)["aborted"] == 1


@BOTH
def test_beside_a_request_that_decodes_nothing_is_prefilled(tmp_path: Path, ahead: bool) -> None:
    engine = prefetching(tmp_path, ahead=ahead)
    evicted(engine)
    asked(engine, "r1", prompt(300, 20), output=30)
    while "r1" not in engine.ended:
        engine.step()
        assert status(engine)["started"] == 0
    engine.settle()
    assert status(engine)["tokens"] > 300


@BOTH
def test_an_iteration_fetches_no_more_than_a_decode_step_has_time_for(
    tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prefetching(tmp_path, ahead=ahead)
    evicted(engine)
    most = 100  # prompt tokens take as long as a decode step
    monkeypatch.setattr(Pace, "step_s", property(lambda pace: most / pace.prefilled_per_s))
    begun = len(engine.log)
    engine.settle()
    fetched = [sum(tokens.values()) for tokens, *_ in engine.log[begun:]]
    assert sum(fetched) == 432
    assert max(fetched) <= most


@BOTH
def test_beside_a_request_that_decodes_it_loads_what_a_tier_has_and_leaves_the_rest(
    tmp_path: Path, ahead: bool
) -> None:
    for has in (True, False):
        engine = prefetching(tmp_path, ahead=ahead, connector=TIER, stats=True)
        evicted(engine)
        tier = engine.scheduler.connector
        tier.has = tier.has if has else set()
        asked(engine, "r1", prompt(300, 20), output=60)
        begun = len(engine.log)
        while "r1" not in engine.ended:
            engine.step()
        beside = status(engine)["tokens"]
        assert beside == (432 if has else 0)
        assert all(len(tokens) == sum(tokens.values()) for tokens, *_ in engine.log[begun + 1 :])  # one token each
        engine.settle()
        assert status(engine)["tokens"] == 432  # what is not there is prefilled by an idle engine
        assert served(engine, "a3", prompt(0, 660)) == 640
        assert status(engine)["used_tokens"] == 432
        assert everything_is_free(engine.scheduler)


@pytest.mark.parametrize(
    ("rule", "back_s", "beside"),
    [("next-use", 0.01, 432), ("next-use", 0.8, 432), ("next-use", 3600.0, 0), ("pbkv", 3600.0, 432)],
)
def test_beside_a_request_that_decodes_it_waits_until_the_workflow_may_return(
    tmp_path: Path, rule: str, back_s: float, beside: int
) -> None:
    presage = {"eviction_rule": rule}
    engine = prefetching(tmp_path, ahead=True, connector=TIER, stats=True, back_s=back_s, presage=presage)
    clock = type(engine.scheduler).clock
    served(engine, "a1", prompt(0, 640))
    served(engine, "a2", prompt(0, 640))
    away_since = clock.now
    served(engine, "z1", prompt(100, 1200), workflow_end=True)
    asked(engine, "r1", prompt(300, 20), output=200)
    first_s = None
    while "r1" not in engine.ended:
        engine.step()
        if first_s is None and status(engine)["started"]:
            first_s = clock.now - away_since
    assert status(engine)["tokens"] == beside
    if beside:
        assert first_s is not None
        assert (first_s > 0.9 * back_s) is (rule == "next-use")  # earlier by the time that it takes to move
        assert first_s < back_s + 0.2
    engine.settle()
    assert status(engine)["tokens"] == 432  # a sleeping engine would not wake in time
    assert served(engine, "a3", prompt(0, 660)) == 640


def test_only_what_nobody_active_uses_makes_room(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    served(engine, "a1", prompt(0, 640))
    served(engine, "a2", prompt(0, 640))
    served(engine, "b1", prompt(100, 1000))  # goes on, and is as likely
    assert engine.settle() < 10
    assert status(engine)["tokens"] == 16  # the block that b1 did not fill
    assert engine.scheduler.workflow_ended("t", "b")
    engine.settle()
    assert status(engine)["tokens"] > 16
    assert served(engine, "a3", prompt(0, 650)) == 640


def test_what_is_unlikely_or_over_is_not_fetched(tmp_path: Path) -> None:
    for chances, over in (({"a": (0.1, 0.0, 0.9)}, False), ({}, True)):
        engine = prefetching(tmp_path, chances=chances)
        evicted(engine)
        if over:
            engine.scheduler.workflow_ended("t", "a")
        assert engine.settle() < 10
        assert status(engine)["started"] == 0


def test_requests_without_a_workflow_are_not_remembered(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    for number in range(3):
        engine.scheduler.add_request(ask(f"r{number}", prompt(0, 640), 2))
        engine.settle()
    assert status(engine)["memory_bytes"] == status(engine)["started"] == 0


def test_a_workflow_that_ends_during_its_prefetch_leaves_only_retired_blocks(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, ahead=True)
    evicted(engine)
    while not status(engine)["started"]:
        engine.step()
    engine.scheduler.workflow_ended("t", "a")
    engine.step()  # aborted before it is scheduled
    assert not [name for name in engine.scheduler.requests if name.startswith("presage")]
    engine.settle()
    order = engine.scheduler.block_order
    assert order.spare(()) == len(order.get_all_free_blocks()) == 89
    assert everything_is_free(engine.scheduler)


def test_fetched_blocks_belong_to_the_workflow_they_were_fetched_for(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    evicted(engine)
    engine.settle()
    found = engine.scheduler.block_order.explain("t\0a")
    assert {group["users"] for group in found["groups"]} == {1}
    assert found["blocks"] == 40


def test_a_salted_prompt_is_fetched_for_those_who_have_the_salt(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    evicted(engine, salt="s")
    engine.settle()
    assert status(engine)["tokens"] == 432
    assert served(engine, "b1", prompt(0, 660)) == 0
    assert served(engine, "a3", prompt(0, 660), salt="s") == 640


def test_what_an_adapter_computed_is_left_alone(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    evicted(engine, adapter=LoRARequest("l", 1, "/nowhere"))
    assert engine.settle() < 10
    assert status(engine)["started"] == 0


def test_prompts_that_begin_with_the_common_history_are_known_whoever_comes(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, blocks=260, chances={"a": (0.0, 1.0, 0.0)})
    for flow in "bcd":
        history = prompt(ord(flow), 480)
        for number in range(8):
            name = f"{flow}{number}"
            served(engine, name, history, agent=("planner", "coder")[number % 2], output=16)
            history = history + engine.said[name]
        engine.scheduler.workflow_ended("t", flow)
    served(engine, "a0", prompt(0, 640), output=16)  # the planner's; the coder has not been there
    served(engine, "z1", prompt(100, 3600), workflow_end=True)
    assert status(engine)["started"] == 0
    engine.settle()
    assert status(engine)["tokens"] > 0
    assert served(engine, "a1", [*prompt(0, 640), *engine.said["a0"], 1], agent="coder") == 640


@pytest.mark.parametrize("how", ["no caching", "no eviction"])
def test_where_it_cannot_be_it_is_off(tmp_path: Path, how: str) -> None:
    more = {"caching": False} if how == "no caching" else {"presage": {"eviction": False}}
    engine = prefetching(tmp_path, **more)
    for name in ("a1", "a2"):
        served(engine, name, prompt(0, 640))
    assert engine.settle() < 3
    assert not any(status(engine).values())


def test_an_engine_told_to_hold_still_sleeps(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, ahead=True)
    evicted(engine)
    while not status(engine)["started"]:
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert engine.settle() < 5
    assert not engine.scheduler.requests
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.settle()
    assert status(engine)["tokens"] >= 432


def test_a_reset_of_the_cache_is_not_refused_for_its_sake(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, ahead=True)
    evicted(engine)
    while not status(engine)["started"]:
        engine.step()
    assert "z1" not in engine.scheduler.requests
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    assert everything_is_free(engine.scheduler)


def test_what_is_not_used_is_counted_as_wasted(tmp_path: Path) -> None:
    engine = prefetching(tmp_path)
    evicted(engine)
    engine.settle()
    served(engine, "y1", prompt(200, 1400))
    said = status(engine)
    assert (said["tokens"], said["used_tokens"], said["wasted_tokens"]) == (432, 0, 432)
