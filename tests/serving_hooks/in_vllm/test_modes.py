"""Off and in shadow each step is vLLM's own; shadow says what would have been done; on at run time acts."""

from pathlib import Path
from typing import Any

import pytest
from test_admission_in_engine import Ticking, told
from test_fuzz import GuessingAsync, GuessingSync, answered, pressed, there_was_something_to_decide
from test_policies_in_engine import prompt, served, step
from turns import Turns, draw
from vllm_samples import AsyncScheduler, Engine, Scheduler, ask, build, everything_is_free

from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows.live import LiveForecast
from presage.testing.forecasts import Noise

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]
BOTH = [(Scheduler, GuessingSync, False), (AsyncScheduler, GuessingAsync, True)]


class Listens(Noise):
    """Counts the steps it hears of to their end."""

    ended = 0

    def on_completion(self, *_: object, **__: object) -> LiveForecast:
        self.ended += 1
        return super().on_completion()


@pytest.mark.parametrize(("off", "heard"), [(("eviction",), 1), (("eviction", "priority", "admission"), 0)])
def test_who_ranks_hears_of_steps_where_eviction_is_off(tmp_path: Path, off: tuple[str, ...], heard: int) -> None:
    source = Listens(0)
    kind = type("Told", (SyncWorkflowScheduler,), {"forecasts": lambda *_: Forecasts(source, source)})
    modes = {"mode": {"policies": dict.fromkeys(off, "off")}, "prefetch": False}
    engine = Engine(build(tmp_path, kind, blocks=70, presage=modes))
    engine.scheduler.add_request(ask("a1", [1] * 40, 3, workflow_type="t", workflow_id="a", agent="coder"))
    engine.run()
    assert source.ended == heard


@pytest.mark.parametrize(("stock", "ours", "ahead"), BOTH)
@pytest.mark.parametrize(("mode", "policy"), [("off", "priority"), ("shadow", "fcfs"), ("shadow", "priority")])
def test_off_and_in_shadow_each_step_is_vllms_own(
    tmp_path: Path, stock: type[Any], ours: type[Any], ahead: bool, policy: str, mode: str
) -> None:
    logs = []
    for kind, presage in ((stock, None), (ours, {"mode": mode, "starved_after": 5, "quantum": 3, "prefetch": True})):
        engine = Engine(build(tmp_path, kind, blocks=70, presage=presage, policy=policy), ahead)
        answered(engine, pressed(engine, 300, seed=2))
        logs.append(engine.log)
    assert logs[0] == logs[1]
    there_was_something_to_decide(logs[0])
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert not any(status["on"].values())
    assert set(status["modes"]["policies"].values()) == {mode}
    assert not [reason for reason in status["counts"] if reason.endswith("Error")]
    would = status["modes"]["would"]
    if mode == "off":
        assert would == {"priority": {}, "eviction": {}}
        assert not [name for name in status["counts"] if name.startswith("forecast")]
        assert status["workflows"] == 0
    else:
        assert 20 < would["priority"]["otherwise"] < would["priority"]["begun"]
        assert 20 < would["eviction"]["otherwise"] < would["eviction"]["given up"]
        assert status["counts"]["forecast: champion"] > 100


def test_admission_in_shadow_decides_and_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: hash(workflow.id) % 2 == 0)
    logs = []
    for kind, presage in ((Scheduler, None), (SyncWorkflowScheduler, {"mode": "shadow"})):
        engine = Ticking(tmp_path, kind, presage=presage)
        answered(engine, pressed(engine, 300, seed=2))
        logs.append(engine.log)
    assert logs[0] == logs[1]
    status = engine.scheduler.presage_status()["admission"]
    assert (status["held"], status["held_s"]) == (0, 0.0)


@pytest.mark.slow
def test_in_shadow_the_load_that_losses_are_measured_at_is_everybodys(tmp_path: Path) -> None:
    """History-first prompts on a small cache, where the gate acts when it is on."""
    stock = Turns(tmp_path / "stock", Scheduler, draw(60, 0), "shared", 40, blocks=2500)
    shadow = Turns(
        tmp_path / "s", SyncWorkflowScheduler, draw(60, 0), "shared", 40, blocks=2500, presage={"mode": "shadow"}
    )
    assert shadow.makespan() == stock.makespan()
    status = shadow.engine.scheduler.presage_status()["admission"]
    assert status["decisions"]["decisions that held somebody"] > 20
    assert (status["held"], status["longest_held_s"]) == (0, 0.0)


def test_at_run_time_a_policy_goes_off_and_comes_back(tmp_path: Path) -> None:
    """Of two workflows the one that will return is kept, when eviction acts; without it neither is."""
    engine, _ = served(tmp_path, returns={"a": 0.9, "b": 0.1})
    found = []
    for number, mode in enumerate(("on", "off", "on", "shadow", "on")):
        engine.scheduler.set_mode(mode, "eviction", None)
        engine.scheduler.reset_prefix_cache()
        step(engine, f"a{number}x", 0, 640)
        step(engine, f"b{number}x", 100, 640)
        step(engine, f"c{number}x", 200, 768)
        found.append(step(engine, f"a{number}y", 0, 656))
        assert everything_is_free(engine.scheduler)
    assert found == [640, 0, 640, 0, 640]
    assert engine.scheduler.presage_status()["on"]["eviction"]


def test_one_word_switches_all_off_and_the_order_of_arrival_is_back(tmp_path: Path) -> None:
    left = {"a": 5.0, "b": 900.0, "c": 10.0, "d": 20.0}
    for policy in ("fcfs", "priority"):
        for mode, order in (("on", "acdb"), ("off", "abcd"), ("shadow", "abcd")):
            engine, _ = served(tmp_path, left=left, seqs=1, policy=policy)
            for number, name in enumerate("abcd"):
                engine.scheduler.add_request(ask(name, prompt(0, 20), 6, arrival=float(number), workflow_id=name))
            engine.scheduler.set_mode("shadow", "priority", None)
            engine.step()
            engine.scheduler.set_mode(mode, None, None)
            engine.run()
            assert engine.ended == list(order)
            assert engine.scheduler.presage_status()["modes"]["rules"] == []


def test_the_first_request_after_a_change_is_treated_by_it(tmp_path: Path) -> None:
    engine, known = served(tmp_path)
    engine.scheduler.set_mode("off", None, None)
    step(engine, "a1", 0, 40)
    assert (known.told, engine.scheduler.debug_state()["workflows"]) == ([], 0)
    engine.scheduler.set_mode("on", None, None)
    step(engine, "a2", 0, 40)
    assert ([told[0] for told in known.told], engine.scheduler.debug_state()["workflows"]) == (
        ["begins", "completes"],
        1,
    )


def test_who_came_while_priority_was_off_is_ranked_when_it_is_on_and_nobody_is_lost(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, left={"d": 1.0}, seqs=1, presage={"mode": "off"})
    for name in "abc":
        engine.scheduler.add_request(ask(name, prompt(0, 20), 6, arrival=float(ord(name)), workflow_id=name))
    engine.step()
    engine.scheduler.set_mode("on", None, None)
    engine.step()
    engine.scheduler.add_request(ask("d", prompt(0, 20), 6, arrival=500.0, workflow_id="d"))
    engine.run()
    assert engine.ended == ["a", "d", "b", "c"]  # what nobody knows comes behind what is short
    assert everything_is_free(engine.scheduler)


def test_a_type_in_shadow_stands_where_the_unknown_stand_and_others_are_ranked(tmp_path: Path) -> None:
    left = {"a": 900.0, "b": 500.0, "c": 1.0, "d": 100.0}

    def order(mode: Any) -> list[str]:
        engine, _ = served(tmp_path, left=left, seqs=1, presage={"mode": mode})
        for number, name in enumerate("xabcd"):
            names = {"workflow_id": name, "workflow_type": "new" if name == "c" else "old"}
            engine.scheduler.add_request(ask(name, prompt(0, 20), 4, arrival=float(number), **names))
            if name == "x":
                engine.step()
        engine.run()
        return engine.ended

    assert order("on") == ["x", "c", "d", "b", "a"]
    assert order({"workflow_types": {"new": "shadow"}}) == ["x", "d", "b", "a", "c"]
    assert order({"default": "shadow", "workflow_types": {"old": "on"}}) == ["x", "d", "b", "a", "c"]
    assert order({"policies": {"priority": "off"}, "workflow_types": {"old": "on"}}) == ["x", "a", "b", "c", "d"]


def test_the_forecasts_of_a_type_in_shadow_are_made_and_not_used(tmp_path: Path) -> None:
    """b will hardly return, but its type is in shadow: its blocks count as unknown, which is sure for one step."""
    found = {}
    for mode in ("on", "shadow", "off"):
        engine, known = served(
            tmp_path, returns={"a": 0.6, "b": 0.1}, presage={"mode": {"workflow_types": {"u": mode}}}
        )
        step(engine, "a1", 0, 640)
        engine.scheduler.add_request(
            ask("b1", prompt(100, 640), 2, workflow_type="u", workflow_id="b", agent="planner")
        )
        engine.run()
        step(engine, "c1", 200, 768)
        found[mode] = step(engine, "a2", 0, 656)
        assert (("begins", "b", "planner", None, 640) in known.told) is (mode != "off")
    assert found == {"on": 640, "shadow": 0, "off": 0}


def test_modes_change_under_pressure_and_every_request_is_answered(tmp_path: Path) -> None:
    engine = Engine(build(tmp_path, GuessingSync, blocks=70, presage={"prefetch": True}, policy="priority"))
    due = {}
    said = [("off", None, None), ("on", "eviction", None), ("shadow", None, "review"), ("on", None, None)]
    said += [("off", "admission", "search"), ("shadow", None, None), ("on", "priority", None), ("off", None, "search")]
    schedule, number = engine.scheduler.schedule, [0]

    def changing(*args: Any) -> Any:
        number[0] += 1
        if number[0] % 7 == 0:
            engine.scheduler.set_mode(*said[number[0] // 7 % len(said)])
        return schedule(*args)

    engine.scheduler.schedule = changing
    due = pressed(engine, 800, seed=4)
    answered(engine, due)
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert not [reason for reason in status["counts"] if reason.endswith("Error")]
    assert not engine.scheduler.deferred_waiting
    assert not engine.scheduler.debug_state()["requests"]
