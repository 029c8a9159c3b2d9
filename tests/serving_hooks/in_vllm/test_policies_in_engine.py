"""Forecasts, ends and silences change what vLLM gives up and whom it runs first, and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from vllm_samples import NAMED, Engine, Scheduler, ask, build

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.forecasting.forecaster import Forecaster
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.engine import SchedulerSeam
from presage.serving_hooks.vllm.hooks import Hooks
from presage.serving_hooks.vllm.operator_calls import OperatorCalls
from presage.serving_hooks.vllm.prefetch.scheduler import Prefetching
from presage.serving_hooks.vllm.scheduler import Policies, SyncWorkflowScheduler
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.live import LiveForecast

pytestmark = pytest.mark.vllm


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Known:
    """Says of each workflow how likely its next step is the planner's, and what it has left."""

    def __init__(self, returns: Mapping[str, float], left: Mapping[str, float]) -> None:
        self.returns, self.left = returns, left
        self.told: list[tuple[object, ...]] = []

    def on_prefill(self, workflow: Workflow, agent: str, **more: Any) -> LiveForecast:
        workflow_id = workflow.step.workflow_id
        self.told.append(("begins", workflow_id, agent, more["step"], more["input_tokens"]))
        return self._answer(workflow_id, PREFILL)

    def on_completion(self, workflow: Workflow, **more: Any) -> LiveForecast:
        workflow_id = workflow.step.workflow_id
        self.told.append(("completes", workflow_id, more["output_tokens"]))
        return self._answer(workflow_id, COMPLETION)

    def close(self, workflow: Workflow) -> None:
        self.told.append(("closes", workflow.step.workflow_id))

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float | None:
        return self.left.get(step.workflow_id)

    def _answer(self, workflow_id: str, moment: Moment) -> LiveForecast:
        chance = self.returns.get(workflow_id, 0.5)
        return LiveForecast("champion", 9, moment, np.array([[chance, 1 - chance]], np.float32), ("planner",), 1)


class Told(SyncWorkflowScheduler):
    """Knows what a test says."""

    known: ClassVar[Known]

    def forecasts(self, config: PresageConfig) -> Forecasts:
        return Forecasts(self.known, self.known)


def served(
    folder: Path,
    *,
    returns: Mapping[str, float] | None = None,
    left: Mapping[str, float] | None = None,
    clock: Clock | None = None,
    **more: Any,
) -> tuple[Engine, Known]:
    known_ = Known(returns or {}, left or {})
    kind = type("Kind", (Told,), {"known": known_, "clock": clock or Clock()})
    presage = {**NAMED, **more.pop("presage", {})}
    return Engine(build(folder, kind, **{"blocks": 90, "presage": presage, **more})), known_


def prompt(start: int, tokens: int) -> list[int]:
    return [(start + i) % 500 for i in range(tokens)]


def step(engine: Engine, name: str, start: int, tokens: int, **sent: object) -> int:
    """A planner's step of the workflow its name begins with; prompt tokens it found in the cache."""
    engine.scheduler.add_request(
        ask(name, prompt(start, tokens), 2, workflow_type="t", workflow_id=name[0], agent="planner", **sent)
    )
    engine.run()
    return engine.hits[name]


def test_of_two_workflows_the_one_that_will_not_return_is_given_up(tmp_path: Path) -> None:
    for returning, leaving in ("ab", "ba"):
        engine, _ = served(tmp_path, returns={returning: 0.9, leaving: 0.1})
        step(engine, "a1", 0, 640)
        step(engine, "b1", 100, 640)
        step(engine, "c1", 200, 768)
        starts = {"a": 0, "b": 100}
        assert step(engine, f"{returning}2", starts[returning], 656) == 640
        assert step(engine, f"{leaving}2", starts[leaving], 656) == 0


def test_a_workflow_whose_request_waits_keeps_its_blocks_however_unlikely_the_request_was(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, returns={"a": 0.1, "b": 0.9}, left={"a": 1000.0, "c": 1.0}, seqs=1)
    step(engine, "a1", 0, 640)
    step(engine, "b1", 100, 640)
    engine.scheduler.add_request(ask("c1", prompt(200, 768), 2, workflow_type="t", workflow_id="c", agent="planner"))
    assert step(engine, "a2", 0, 656) == 640  # c runs before it, and takes its space from b
    assert engine.ended == ["a1", "b1", "c1", "a2"]
    assert step(engine, "b2", 100, 656) == 0


def test_a_silent_workflow_has_ended_after_its_time_and_an_ended_one_at_once(tmp_path: Path) -> None:
    for how in ("silence", "word"):
        clock = Clock()
        engine, known = served(tmp_path, clock=clock, presage={"time_to_live_s": 60}, returns={"b": 1.0, "a": 0.1})
        step(engine, "b1", 100, 640)
        clock.now = 50.0
        step(engine, "a1", 0, 640)
        clock.now = 70.0 if how == "silence" else 55.0
        if how == "word":
            assert engine.scheduler.workflow_ended("t", "b")
            assert not engine.scheduler.workflow_ended("t", "b")
            assert not engine.scheduler.workflow_ended("nobody", "knows")
        step(engine, "c1", 200, 768)
        assert ("closes", "b") in known.told
        assert step(engine, "a2", 0, 656) == 640  # though b was sure to return
        assert engine.scheduler.presage_status()["ended"]["expired"] == (how == "silence")


def test_a_workflow_that_ends_while_a_request_of_it_runs_ends_with_it_again(tmp_path: Path) -> None:
    engine, _ = served(tmp_path)
    names = {"workflow_type": "t", "workflow_id": "a", "agent": "planner"}
    engine.scheduler.add_request(ask("long", prompt(0, 64), 40, **names))
    engine.scheduler.add_request(ask("last", prompt(0, 64), 2, **names, workflow_end="true"))
    while "last" not in engine.ended:
        engine.step()
    assert engine.scheduler.debug_state()["workflows"] == 0
    engine.run()
    assert engine.ended == ["last", "long"]
    assert engine.scheduler.debug_state()["workflows with blocks"] == 0


def test_forecasts_are_told_what_happens(tmp_path: Path) -> None:
    engine, known = served(tmp_path)
    step(engine, "a1", 0, 40, step=0)
    engine.scheduler.add_request(ask("a2", prompt(0, 50), 9, workflow_type="t", workflow_id="a", agent="coder", step=1))
    engine.step()
    engine.abort("a2")
    engine.run()
    assert known.told == [("begins", "a", "planner", 0, 40), ("completes", "a", 2), ("begins", "a", "coder", 1, 50)]
    step(engine, "a3", 0, 40, workflow_end=1)
    assert known.told[-1] == ("closes", "a")


def test_the_forecaster_of_the_registry_is_one_of_them(tmp_path: Path) -> None:
    source = Forecaster(None)

    class Real(SyncWorkflowScheduler):
        def forecasts(self, config: PresageConfig) -> Forecasts:
            return Forecasts(source)

    engine = Engine(build(tmp_path, Real, blocks=90))
    step(engine, "a1", 0, 40)
    assert source.counts == {(kind, "none", "no model"): 2 for kind in ("next-agent", "remaining-length")}
    assert engine.scheduler.presage_status()["counts"] == {"forecast: none": 2, "forecast of lengths: none": 1}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_least_work_left_runs_first_and_what_waits_too_long_before_it(tmp_path: Path, policy: str) -> None:
    left = {"a": 5.0, "b": 900.0, "c": 10.0, "d": 20.0}

    def order(starved_after: int) -> list[str]:
        engine, _ = served(tmp_path, left=left, seqs=1, policy=policy, presage={"starved_after": starved_after})
        for number, name in enumerate("abcd"):
            request = ask(name, prompt(0, 20), 6, arrival=float(number), workflow_id=name)
            engine.scheduler.add_request(request)
            if name == "b":
                for _ in range(4):  # it waits four iterations more than c and d
                    engine.step()
        engine.run()
        return engine.ended

    assert order(1000) == ["a", "c", "d", "b"]
    assert order(4) == ["a", "b", "c", "d"]


def test_a_clients_class_comes_before_our_key_where_vllm_goes_by_priority(tmp_path: Path) -> None:
    def order(policy: str) -> list[str]:
        engine, _ = served(tmp_path, left={"a": 1.0, "b": 2.0, "c": 3.0}, seqs=1, policy=policy)
        for name, priority in (("c", 0), ("b", 0), ("a", 1)):
            engine.scheduler.add_request(ask(name, prompt(0, 20), 3, priority=priority, workflow_id=name))
        engine.run()
        return engine.ended

    assert order("fcfs") == ["a", "b", "c"]
    assert order("priority") == ["b", "c", "a"]


def test_without_prefix_caching_eviction_is_idle(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, caching=False)
    assert step(engine, "a1", 0, 640) == step(engine, "a2", 0, 640) == 0
    assert engine.scheduler.presage_status()["on"] == {"priority": True, "eviction": False, "admission": False}
    assert type(engine.scheduler.kv_cache_manager.block_pool).__name__ == "BlockPool"


def test_after_a_reset_of_the_cache_nothing_is_kept_and_all_is_free(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, returns={"a": 1.0})
    step(engine, "a1", 0, 640)
    assert engine.scheduler.reset_prefix_cache()
    scored = engine.scheduler.block_order
    assert len(scored.get_all_free_blocks()) == scored.spare(()) == scored.num_free_blocks == 89
    assert step(engine, "a2", 0, 640) == 0


def test_no_name_of_ours_is_one_of_vllms(tmp_path: Path) -> None:
    own = build(tmp_path, Scheduler, blocks=90)
    hooked = build(tmp_path, SyncWorkflowScheduler, blocks=90, presage={"prefetch": True})
    ours = {
        name
        for kind in (Prefetching, Policies, OperatorCalls, Hooks, SchedulerSeam)
        for name in vars(kind)
        if not name.startswith("__")
    }
    overridden = {"add_request", "schedule", "get_grammar_bitmask", "update_from_output", "_free_request"}
    overridden |= {"has_requests", "make_stats", "reset_prefix_cache", "shutdown"}
    assert ours & set(dir(own)) == overridden
    added = set(vars(hooked)) - set(vars(own))
    assert added == {
        "_answers",
        "_bookkeeping",
        "_parts",
        "_presage",
        "_webhook",
        "lifecycle",
        "_withdrawn",
        "_wait_bounds",
        "_returns",
        "_counts",
        "_last_forecasts",
        "_lifecycle_listener",
        "_listeners",
        "_models",
        "_modes",
        "_modes_applied",
        "_overview",
        "_recording",
        "_prepared",
        "_prompt_tokens",
        "_renewal",
        "_retention_target",
        "_state_layer",
        "_states",
        "_step_times",
        "_timing",
        "_unnoted",
        "_warned",
        "block_order",
        "engine_port",
        "identity",
        "left_out",
        "prefetcher",
        "queue_policies",
        "step_forecasts",
        "upkeep",
        "workflow_table",
    }
