"""What the metrics say after known requests, counted by hand, on vLLM's own scheduler."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from prefetch_samples import Idling, prefetching
from prefetch_samples import served as asked_of
from test_admission_in_engine import ALONE, Ticking, busy, told, work
from test_policies_in_engine import Clock, prompt, served
from vllm_samples import TIER, Engine, ask

from presage.predictor_kinds import ServedKind
from presage.serving_hooks.forecasting.champions import Champions
from presage.serving_hooks.forecasting.sources import Held
from presage.serving_hooks.metrics import HISTOGRAMS, METRICS
from presage.serving_hooks.policies.eviction import FreeOrder
from presage.serving_hooks.status import EngineStatus, as_json, read_status
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = pytest.mark.vllm


NOTHING_FOUND = dict.fromkeys((*get_args(ServedKind), "profile"), Held(None, None))


def reported(engine: Engine) -> EngineStatus:
    """As the API server reads it: what the engine's core sends is plain data that msgpack takes."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.scheduler.presage_status()))
    status = read_status(sent)
    assert status is not None
    return status


def metric(engine: Engine, name: str) -> Mapping[Any, float]:
    """Samples of one metric, by the values of its labels."""
    (found,) = [one for one in METRICS if one.name == name]
    samples = dict(found.read(reported(engine)))
    return {labels[0] if len(labels) == 1 else labels or None: value for labels, value in samples.items()}


def number(engine: Engine, name: str) -> float:
    return metric(engine, name)[None]


def spread(engine: Engine, name: str = "presage_request_held_seconds") -> tuple[float, float]:
    """How many a histogram has counted, and their seconds together."""
    (one,) = [one for one in HISTOGRAMS if one.name == name]
    found = one.read(reported(engine))
    assert found is not None
    return found.up_to_s["+Inf"], found.sum_s


def run(engine: Engine, name: str, tokens: list[int], **sent: object) -> None:
    engine.scheduler.add_request(ask(name, tokens, 2, **({"workflow_id": name[0], "agent": "planner"} | sent)))
    engine.run()


def test_blocks_given_up_are_counted_by_what_they_were(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, blocks=90)
    run(engine, "a1", prompt(0, 640))  # 40 whole blocks, and one that the cache does not know
    assert metric(engine, "presage_evicted_blocks_total") == {
        "blank": 41,
        "retired": 0,
        "unowned": 0,
        "unknown": 0,
        "forecast": 0,
    }
    run(engine, "b1", prompt(100, 640), workflow_end=True)
    run(engine, "c1", prompt(200, 624))  # 40 blocks: the 9 that hold nothing, then 31 of the ended workflow
    evicted = metric(engine, "presage_evicted_blocks_total")
    assert (evicted["blank"], evicted["retired"], evicted["forecast"]) == (41 + 41 + 9, 31, 0)
    run(engine, "d1", prompt(300, 640))  # 41: one that holds nothing, 9 retired, 31 of active workflows
    evicted = metric(engine, "presage_evicted_blocks_total")
    assert (evicted["blank"], evicted["retired"], evicted["forecast"]) == (41 + 41 + 10, 40, 31)


def test_blocks_of_nobody_and_of_workflows_without_a_forecast_have_classes_of_their_own(tmp_path: Path) -> None:
    engine, known = served(tmp_path, blocks=50)
    known.returns = None  # type: ignore[assignment]  # forecasting fails, and is off from the first step
    run(engine, "a1", prompt(0, 320))  # 20 whole blocks
    engine.scheduler.add_request(ask("nobody", prompt(100, 320), 2))
    engine.run()
    run(engine, "b1", prompt(200, 640))  # 41: 9 that hold nothing, nobody's 20, 12 of a
    evicted = metric(engine, "presage_evicted_blocks_total")
    assert (evicted["blank"], evicted["unowned"], evicted["unknown"]) == (21 + 21 + 9, 20, 12)
    assert evicted["forecast"] == evicted["retired"] == 0


def test_tails_tell_starts_later_steps_and_whole_workflows_apart(tmp_path: Path) -> None:
    """A second an iteration: a prompt of 300 takes two, 256 tokens each at most, and each output token one."""
    engine = Ticking(tmp_path, SyncWorkflowScheduler, step_s=1.0)
    engine.scheduler.add_request(ask("a1", [1] * 300, 2, workflow_id="a", agent="planner"))
    engine.scheduler.add_request(ask("nobody", [2] * 300, 2))
    engine.run()
    assert spread(engine, "presage_start_delay_seconds") == (1, pytest.approx(1.0))
    assert spread(engine, "presage_later_first_token_seconds") == (0, 0)
    began = engine.clock.now
    engine.scheduler.add_request(ask("a2", [3] * 300, 2, workflow_id="a", agent="planner", workflow_end=True))
    engine.run()
    count, seconds = spread(engine, "presage_later_first_token_seconds")
    assert (count, 1.0 <= seconds <= 3.0) == (1, True)
    assert spread(engine, "presage_start_delay_seconds")[0] == 1
    count, seconds = spread(engine, "presage_workflow_seconds")
    assert (count, began < seconds <= engine.clock.now) == (1, True)


def test_prompts_of_workflows_are_counted_by_where_they_came_from_and_no_others(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, blocks=90)
    run(engine, "a1", prompt(0, 640))
    run(engine, "a2", prompt(0, 656))
    engine.scheduler.add_request(ask("nobody", prompt(0, 656), 2))
    engine.run()
    assert number(engine, "presage_prompt_tokens_total") == 640 + 656
    assert metric(engine, "presage_hit_tokens_total") == {"local": 640, "external": 0}


def test_a_request_that_its_first_iteration_ends_is_counted_before_it_leaves(tmp_path: Path) -> None:
    """vLLM does not always ask for a grammar, so nothing may have been noted while the model ran."""
    engine, _ = served(tmp_path, blocks=90)
    engine.scheduler.get_grammar_bitmask = lambda output: None
    for name in ("a1", "a2"):
        engine.scheduler.add_request(ask(name, prompt(0, 176), 1, workflow_id="a", agent="planner"))
        engine.run()
    assert number(engine, "presage_prompt_tokens_total") == 2 * 176
    assert metric(engine, "presage_hit_tokens_total") == {"local": 160, "external": 0}
    assert metric(engine, "presage_forecasts_total")["remaining-length", "none"] == 2


@pytest.mark.parametrize("takes", [(0,), (3,)])
def test_what_another_tier_had_is_told_apart(tmp_path: Path, takes: tuple[int, ...]) -> None:
    engine, _ = served(tmp_path, blocks=90, connector=TIER)
    engine.scheduler.connector.takes = takes
    run(engine, "a1", prompt(0, 640))
    run(engine, "z1", prompt(100, 1200), workflow_end=True)  # takes 76 of 89 blocks; 13 of a's 40 are left
    run(engine, "a2", prompt(0, 656))
    assert number(engine, "presage_prompt_tokens_total") == 640 + 1200 + 656
    assert metric(engine, "presage_hit_tokens_total") == {"local": 13 * 16, "external": 27 * 16}


def test_a_preempted_step_is_counted_once(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, blocks=20)
    for name in ("a1", "b1"):
        engine.scheduler.add_request(ask(name, prompt(ord(name[0]), 100), 150, workflow_id=name, agent="planner"))
    engine.run()
    assert any(preempted for _, _, preempted in engine.log)
    assert number(engine, "presage_prompt_tokens_total") == 200


def test_forecasts_are_counted_by_kind_and_source(tmp_path: Path) -> None:
    engine, _ = served(tmp_path)
    assert set(metric(engine, "presage_forecasts_total").values()) == {0.0}
    run(engine, "a1", prompt(0, 40))
    assert {labels: times for labels, times in metric(engine, "presage_forecasts_total").items() if times} == {
        ("next-agent", "champion"): 2,
        ("remaining-length", "none"): 1,
    }


def test_workflows_are_alive_until_they_say_that_they_end_or_fall_silent(tmp_path: Path) -> None:
    clock = Clock()
    engine, _ = served(tmp_path, clock=clock, presage={"time_to_live_s": 10.0})
    for name in ("a1", "b1", "c1"):
        run(engine, name, prompt(0, 40))
    run(engine, "d1", prompt(0, 40), workflow_end=True)
    assert engine.scheduler.workflow_ended("", "a")
    assert not engine.scheduler.workflow_ended("", "a")
    assert number(engine, "presage_workflows") == 2
    clock.now = 11.0
    run(engine, "e1", prompt(0, 40))
    assert number(engine, "presage_workflows") == 1
    assert metric(engine, "presage_workflows_ended_total") == {"finished": 2, "expired": 2, "aborted": 0}


def test_what_ageing_moves_is_counted(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, left={"a": 1.0, "b": 900.0}, seqs=1, presage={"starved_after": 4, "quantum": 3})
    for name in "ab":
        engine.scheduler.add_request(ask(name, prompt(0, 20), 10, workflow_id=name))
    engine.run()
    # b waits ten iterations, so it rises after four and after eight; it then runs for ten and falls after three, twice.
    assert metric(engine, "presage_ageing_total") == {"promoted": 2, "demoted": 2}


def test_what_is_fetched_is_used_or_wasted(tmp_path: Path) -> None:
    engine: Idling = prefetching(tmp_path)
    asked_of(engine, "a1", prompt(0, 640))
    asked_of(engine, "a2", prompt(0, 640))
    asked_of(engine, "z1", prompt(100, 1200), workflow_end=True)
    engine.settle()
    assert metric(engine, "presage_prefetch_tokens_total") == {"fetched": 432, "used": 0, "wasted": 0}
    asked_of(engine, "a3", prompt(0, 660))
    engine.settle()
    assert metric(engine, "presage_prefetch_tokens_total") == {"fetched": 432, "used": 432, "wasted": 0}
    started = metric(engine, "presage_prefetch_requests_total")
    assert started["started"] > 0 == started["aborted"] == started["refused"]
    assert metric(engine, "presage_policy_on") == {"priority": 1, "eviction": 1, "admission": 1, "prefetch": 1}


def test_who_is_held_and_for_how_long_and_who_is_let_in_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, lambda workflow: workflow.id.endswith("b"))
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE)
    busy(engine, output=30)
    for name in ("b1", "a1", "a2"):
        engine.scheduler.add_request(work(name))
    for _ in range(20):
        engine.step()  # of 0.05 s
    assert number(engine, "presage_held_workflows") == 1
    assert number(engine, "presage_held_requests") == 2
    assert number(engine, "presage_paused_workflows") == 0
    assert number(engine, "presage_held_seconds_total") == pytest.approx(1.0, abs=0.11)
    assert number(engine, "presage_longest_held_seconds") == number(engine, "presage_held_seconds_total")
    assert metric(engine, "presage_admission_changes_total")["let in"] == 0
    assert spread(engine) == (0, 0)  # nobody who was held has begun
    held_s = number(engine, "presage_held_seconds_total")
    engine.abort("a2")
    assert spread(engine) == (1, pytest.approx(held_s))
    engine.run()  # the other request ends, and nothing runs
    held_s = number(engine, "presage_held_seconds_total")
    assert spread(engine) == (2, pytest.approx(held_s + 0.95, abs=0.11))  # b was never held
    assert metric(engine, "presage_admission_changes_total")["let in"] >= 1
    assert number(engine, "presage_held_workflows") == 0


def test_a_failure_is_an_error_by_its_kind_and_a_policy_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, known = served(tmp_path)
    known.returns = None  # type: ignore[assignment]
    run(engine, "a1", prompt(0, 40), step="x")
    assert metric(engine, "presage_errors_total") == {("forecasts of next agents", "AttributeError"): 1}
    assert metric(engine, "presage_metadata_left_out_total")["step", "no number from 0"] == 1

    def broken(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(FreeOrder, "pop", broken)
    run(engine, "b1", prompt(100, 40))
    assert metric(engine, "presage_errors_total")["eviction", "ValueError"] == 1
    assert metric(engine, "presage_policy_on") == {"priority": 1, "eviction": 0, "admission": 1, "prefetch": 0}


def test_every_metric_of_every_engine_has_its_labels_and_a_finite_number(tmp_path: Path) -> None:
    engine: Idling = prefetching(tmp_path)
    asked_of(engine, "a1", prompt(0, 640))
    status = reported(engine)
    for one in METRICS:
        for labels, value in one.read(status):
            assert len(labels) == len(one.labels), one.name
            assert value >= 0, one.name
        assert list(one.read(EngineStatus())) == [], one.name  # an engine that reports little
    assert all(one.read(EngineStatus()) is None for one in HISTOGRAMS)


def test_an_engine_tells_all_that_its_models_report() -> None:
    of_models = Champions(PresageConfig(), NOTHING_FOUND, None).status()
    status = read_status(of_models)
    assert status is not None
    told = as_json(status)
    for name, section in of_models.items():
        assert told[name].keys() == section.keys(), name


def test_what_an_engine_sends_is_read_as_what_it_was(tmp_path: Path) -> None:
    engine = prefetching(tmp_path, presage={"recorder": {"folder": str(tmp_path / "recording")}})
    asked_of(engine, "a1", prompt(0, 640))
    before, after = engine.scheduler.engine_status(), reported(engine)
    assert (after.recorder and after.recorder.instance) == (before.recorder and before.recorder.instance)
    # The recorder's thread may have written meanwhile.
    assert replace(after, tails=before.tails, admission=before.admission, recorder=before.recorder) == before
