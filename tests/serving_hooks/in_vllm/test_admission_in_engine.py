"""Workflows are held where it pays and nowhere else; whoever is held is counted, can go, and is answered."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import turns
from crowds import Workflow, rows
from test_fuzz import GuessingAsync, GuessingSync, answered, drawn, pressed
from turns import Clock, Turns, draw
from vllm_samples import NAMED, Engine, Scheduler, ask, build, everything_is_free

from presage.serving_hooks.policies.accounts import Account
from presage.serving_hooks.policies.admission import Admission, Decision, Outlook, Phase, WorkflowColumns
from presage.serving_hooks.policies.workload import IterationCost, WorkloadMeans
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.iteration_times import IterationTimes
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]
ALONE = {"priority": False, "eviction": False}
NOTHING = Outlook(0)


class Ticking(Engine):
    """Each step takes some of its clock's time."""

    def __init__(self, folder: Path, kind: type[Any], *, ahead: bool = False, step_s: float = 0.05, **more: Any):
        self.clock = Clock()
        made = type(kind.__name__, (kind,), {"clock": self.clock})
        presage = more.pop("presage", {})
        presage = None if presage is None else {**NAMED, **presage}
        super().__init__(build(folder, made, **{"blocks": 70, "presage": presage, **more}), ahead)
        self.step_s = step_s

    def step(self) -> None:
        self.clock.now += self.step_s
        super().step()


def told(monkeypatch: pytest.MonkeyPatch, runs: Callable[[Workflow], bool]) -> None:
    """What the policy decides is decided here."""

    def decide(self: Admission, now: float) -> Decision:
        there = {of: replace(row, id=of.key) for of, row in zip(self.workflows, rows(self.workflows), strict=True)}
        held = {of: "so it is told" for of, row in there.items() if not runs(row)}
        return Decision(frozenset(there) - set(held), held, 0, 0, NOTHING, NOTHING)

    monkeypatch.setattr(Admission, "decide", decide)


def work(name: str, *, output: int = 4, **sent: Any) -> Any:
    return ask(name, [len(name), *range(60)], output, workflow_type="t", workflow_id=name[0], agent="coder", **sent)


def busy(engine: Engine, name: str = "other", output: int = 400) -> None:
    """A request without a workflow keeps the engine from standing still."""
    engine.scheduler.add_request(ask(name, [9] * 20, output))


def held_by(engine: Engine) -> dict[str, Any]:
    status = engine.scheduler.presage_status()["admission"]
    assert isinstance(status, dict)
    return status


@pytest.mark.slow
def test_with_the_history_first_and_a_small_cache_some_are_held_and_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PREFILL_S", 1.2e-3)  # what is lost is dear
    ours = Turns(tmp_path, SyncWorkflowScheduler, draw(60, 0), "shared", 40, blocks=2500, presage={})
    ours.makespan()
    assert len(ours.finished) == 60
    assert everything_is_free(ours.engine.scheduler)
    status = held_by(ours.engine)
    assert status["decisions"]["held"] > 5
    assert status["rates"]["prefill_token_s"] == pytest.approx(1.2e-3, rel=0.05)
    assert status["rates"]["iteration_s"] == pytest.approx(0.012, rel=0.05)
    assert (status["held"], status["paused"]) == (0, 0)
    assert 0 < status["longest_held_s"] < status["held_s"]


@pytest.mark.slow
def test_a_tenants_crowd_keeps_no_other_tenant_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty workflows come at once, and a minute later six others: with the same key they wait behind the fifty."""
    monkeypatch.setattr(turns, "PREFILL_S", 1.2e-3)
    took: dict[str, float] = {}
    for key in ("key-0", "key-1"):
        crowd, few = draw(56, 0)[:50], draw(56, 0)[50:]
        for work in crowd:
            work.tenant = "key-0"
        ours = Turns(tmp_path / key, SyncWorkflowScheduler, crowd, "shared", 50, blocks=2500, presage=ALONE)
        for work in few:
            work.tenant = key
            ours.comes(work, 60.0)
        ours.makespan()
        assert len(ours.finished) == 56
        took[key] = fmean(ours.finished[work.name] for work in few)
    assert took["key-1"] < 0.6 * took["key-0"]


@pytest.mark.slow
def test_with_own_conversations_and_a_small_cache_all_is_done(tmp_path: Path) -> None:
    ours = Turns(tmp_path, SyncWorkflowScheduler, draw(60, 0), "own", 40, blocks=2500, presage=ALONE)
    ours.makespan()
    assert len(ours.finished) == 60
    assert everything_is_free(ours.engine.scheduler)
    assert held_by(ours.engine)["held"] == 0


@pytest.mark.parametrize("prompts", ["shared", "own"])
def test_an_engine_with_room_does_step_by_step_what_vllm_does(tmp_path: Path, prompts: str) -> None:
    logs = []
    for kind, presage in ((Scheduler, None), (SyncWorkflowScheduler, ALONE)):
        of = Turns(tmp_path / kind.__name__, kind, draw(20, 1), prompts, 6, blocks=4000, presage=presage)
        of.makespan()
        logs.append(of.engine.log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_while_nobody_is_held_vllms_own_order_holds_under_pressure(tmp_path: Path, policy: str) -> None:
    logs = []
    for kind, presage in ((Scheduler, None), (SyncWorkflowScheduler, ALONE)):
        engine = Ticking(tmp_path, kind, presage=presage, policy=policy)
        answered(engine, pressed(engine, 300, seed=2))
        logs.append(engine.log)
    assert logs[0] == logs[1]
    assert sum(len(preempted) for *_, preempted in logs[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "more"),
    [
        (GuessingSync, "priority", ALONE),
        (GuessingAsync, "fcfs", ALONE),
        (GuessingAsync, "priority", {"starved_after": 5, "quantum": 3}),
    ],
)
def test_whatever_is_decided_every_request_is_answered_and_every_block_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], policy: str, more: dict[str, Any]
) -> None:
    draws = random.Random(4)
    told(monkeypatch, lambda workflow: draws.random() < 0.4)
    said = {**more, "time_to_live_s": 3.0, "held_at_most_s": 8.0}
    engine = Ticking(tmp_path, kind, ahead=kind is GuessingAsync, policy=policy, presage=said)
    answered(engine, pressed(engine, 700, seed=1))
    assert sum(len(preempted) for *_, preempted in engine.log) > 5
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert status["on"]["admission"]
    assert not [reason for reason in status["counts"] if reason.endswith("Error")]
    assert (status["admission"]["held"], status["admission"]["held_requests"]) == (0, 0)
    assert 0 < status["admission"]["longest_held_s"] < status["admission"]["held_s"]
    assert not engine.scheduler.requests
    assert not engine.scheduler.deferred_waiting
    engine.clock.now += 10
    engine.scheduler.schedule()
    engine.scheduler.queue_policies.admission.decide(idle=False)
    assert engine.scheduler.debug_state()["admission requests"] == 0


def test_who_is_held_is_counted_seen_and_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: workflow.id.endswith("b"))
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE)
    busy(engine)
    for name in ("b1", "a1", "a2", "b2"):
        engine.scheduler.add_request(work(name))
    for _ in range(20):
        engine.step()
    assert engine.ended == ["b1", "b2"]
    scheduler = engine.scheduler
    assert scheduler.get_request_counts() == (1, 2)
    assert scheduler.get_num_unfinished_requests() == len(scheduler.requests) == 3
    assert [request.request_id for request in scheduler.waiting] == ["a1", "a2"]
    assert {request.request_id for request in scheduler.deferred_waiting} == {"a1", "a2"}
    status = held_by(engine)
    assert (status["held"], status["held_requests"], status["paused"]) == (1, 2, 0)
    assert status["held_s"] == status["longest_held_s"] == pytest.approx(1.0, abs=0.11)
    assert status["reasons"] == {"so it is told": 1}
    engine.abort("a1")
    assert scheduler.get_num_unfinished_requests() == 2
    assert [request.request_id for request in scheduler.deferred_waiting] == ["a2"]
    told(monkeypatch, lambda workflow: True)
    engine.run()
    assert engine.said.keys() == {"b1", "b2", "a2", "other"}
    assert everything_is_free(scheduler)


def test_whoever_came_while_its_tool_ran_and_was_paused_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: workflow.phase is not Phase.TOOL)
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE)
    busy(engine)
    engine.scheduler.add_request(work("a1"))
    for _ in range(20):
        engine.step()
    assert engine.ended == ["a1"]
    assert (held_by(engine)["held"], held_by(engine)["paused"]) == (0, 1)
    engine.scheduler.add_request(work("a2"))
    assert (held_by(engine)["held"], held_by(engine)["paused"]) == (1, 0)
    for _ in range(20):
        engine.step()
    assert engine.ended == ["a1", "a2"]


def test_a_newcomer_waits_a_moment_where_some_are_held_and_not_at_all_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for holding in (False, True):
        told(monkeypatch, lambda workflow, holding=holding: not holding or "n" in workflow.id)  # type: ignore[misc]
        engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE, step_s=0.001)
        busy(engine)
        engine.scheduler.add_request(work("a1"))
        engine.step()
        engine.step()
        engine.clock.now += 1
        engine.step()
        engine.scheduler.add_request(work("n1"))
        engine.step()
        assert ("n1" in engine.hits) is not holding
        engine.clock.now += 0.06
        engine.step()  # while its model runs, it is decided
        engine.step()
        assert "n1" in engine.hits


def choose_nobody(self: Admission, *measured: Any) -> None:
    self.limit = 0


def test_nobody_is_held_for_longer_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "choose", choose_nobody)
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage={**ALONE, "held_at_most_s": 10.0})
    busy(engine, output=2000)
    engine.scheduler.add_request(work("a1"))
    while "a1" not in engine.ended:
        engine.step()
        assert engine.clock.now < 11
    assert engine.clock.now > 10
    engine.scheduler.add_request(work("a2"))  # the bound is on its life
    for _ in range(8):
        engine.step()
    assert engine.ended == ["a1", "a2"]
    assert held_by(engine)["longest_held_s"] == pytest.approx(10, abs=0.5)


def test_an_engine_never_stands_still_while_a_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: False)
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE)
    for number in range(30):
        engine.scheduler.add_request(work(f"{chr(97 + number % 10)}{number}"))
    engine.run()
    assert len(engine.ended) == 30
    assert all(scheduled for scheduled, *_ in engine.log)


def test_what_has_begun_is_never_held_nor_what_belongs_to_no_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, lambda workflow: True)
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE)
    busy(engine)
    engine.scheduler.add_request(work("a1", output=60))
    engine.step()
    assert "a1" in engine.hits
    told(monkeypatch, lambda workflow: False)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts all
    before = len(engine.said.get("a1", ()))
    for _ in range(5):
        engine.step()
    assert len(engine.said["a1"]) >= before + 3
    elsewhere = work("z1", kv_transfer_params={"do_remote_prefill": False})
    engine.scheduler.add_request(elsewhere)
    engine.step()
    assert "z1" in engine.hits


def breaks(monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str, after: int) -> None:
    whole, calls = getattr(kind, method), [0]

    def half(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < after:
            return whole(*args, **kwargs)
        raise RuntimeError("what the prompt says")

    monkeypatch.setattr(kind, method, half)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Admission, "decide"),
        (WorkflowColumns, "drop"),
        (IterationCost, "fit"),
        *((Account, method) for method in ("arrives", "begins", "leaves", "hold", "own_tokens")),
        *((AdmissionController, f"request_{event}") for event in ("arrived", "scheduled", "finished")),
        *((IterationTimes, method) for method in ("scheduled", "updated")),
    ],
)
def test_when_it_fails_all_run_at_once_and_other_policies_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Any], method: str
) -> None:
    told(monkeypatch, lambda workflow: workflow.phase is Phase.STEP)
    breaks(monkeypatch, kind, method, after=4)
    engine = Ticking(tmp_path, GuessingSync, presage={"time_to_live_s": 1.0}, step_s=0.3)
    answered(engine, pressed(engine, 150, seed=5))
    assert everything_is_free(engine.scheduler)
    status = engine.scheduler.presage_status()
    assert not status["on"]["admission"]
    assert status["on"]["priority"]
    assert status["on"]["eviction"]
    assert (status["admission"]["held"], status["admission"]["held_requests"]) == (0, 0)
    assert "admission is switched off: RuntimeError" in caplog.text
    assert "what the prompt says" not in caplog.text
    assert not engine.scheduler.deferred_waiting


def test_when_priority_fails_who_is_held_stays_held_in_vllms_own_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, lambda workflow: workflow.id.endswith("b"))
    engine = Ticking(tmp_path, GuessingSync)
    busy(engine, output=60)
    for name in ("a1", "b1"):
        engine.scheduler.add_request(work(name))
    engine.step()
    engine.scheduler.queue_policies.priorities.switch.off(RuntimeError())
    for _ in range(20):
        engine.step()
    assert engine.ended == ["b1"]
    assert len(engine.scheduler.waiting) == 1
    told(monkeypatch, lambda workflow: True)
    engine.run()
    assert sorted(engine.ended) == ["a1", "b1", "other"]


def test_tokens_that_were_lost_are_those_the_workflow_had_computed_and_the_cache_no_longer_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE, blocks=90)
    seen: list[tuple[float, float]] = []
    reuses = WorkloadMeans.reuses

    def observed(workload: WorkloadMeans, tokens: float, lost_tokens: float, cache_tokens: float) -> None:
        seen.append((lost_tokens, tokens))
        reuses(workload, tokens, lost_tokens, cache_tokens)

    monkeypatch.setattr(WorkloadMeans, "reuses", observed)

    def step(name: str, start: int, tokens: int) -> None:
        prompt = [(start + i) % 500 for i in range(tokens)]
        engine.scheduler.add_request(ask(name, prompt, 2, workflow_type="t", workflow_id=name[0], agent="coder"))
        engine.run()

    step("a1", 0, 640)
    step("a2", 0, 656)  # all of it is there
    step("b1", 100, 768)
    step("b2", 150, 768)  # takes what a had
    step("a3", 0, 672)  # a2 had computed 656
    assert [one for one in seen if one[1]] == [(0, 640), (656, 656)]
    admission = engine.scheduler.queue_policies.admission
    engine.clock.now += 10
    admission.decide(idle=False)
    told = admission.explain(engine.scheduler.workflow_table.get("t\0a"))
    assert told is not None
    assert told["own_tokens"] == 672
    # It has taken three steps of six, and a step of the type has added 16, 768 (b begins anew) and 16 tokens.
    assert told["context_tokens"] == pytest.approx(672 + (6 - 3) / 2 * (16 + 768 + 16) / 3, abs=1)


def test_a_conversation_of_its_own_is_used_again_when_its_agent_comes_back_and_a_history_in_every_step() -> None:
    account = Account("t", 0.0)
    for number, (agent, blocks) in enumerate((("coder", 10), ("tester", 12), ("reader", 14))):
        account.arrives(str(number), agent, 16 * blocks, 0, float(number))
        account.begins(str(number), [bytes([number, at]) for at in range(blocks)], float(number))
        account.leaves(str(number), [bytes([number, at]) for at in range(blocks + 2)], float(number))
    assert account.apart("coder", 12) == 3, "its prompt and answer, three steps ago"
    assert account.apart("reader", 16) == 1
    assert account.apart("coder", 15) == 1, "others have added to it since"
    assert account.apart("writer", 9) == 1, "it is new, and reads what others wrote"


def test_what_workflows_share_is_counted_once_and_off_the_cache(tmp_path: Path) -> None:
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=ALONE, blocks=200)
    opening = list(range(160))
    for name, own in (("a1", 1), ("b1", 2), ("c1", 3)):
        prompt = [*opening, *([own] * 320)]
        engine.scheduler.add_request(ask(name, prompt, 2, workflow_type="t", workflow_id=name, agent="coder"))
        engine.run()
    admission = engine.scheduler.queue_policies.admission
    engine.clock.now += 10
    admission.decide(idle=False)
    assert held_by(engine)["shared_tokens"] == 160
    table = engine.scheduler.workflow_table
    own = [(admission.explain(table.get(f"t\0{name}")) or {})["own_tokens"] for name in ("a1", "b1", "c1")]
    assert own == [480, 320, 320], "of the first, nobody knows yet what others share"


def test_a_common_history_is_counted_once_and_own_conversations_each(tmp_path: Path) -> None:
    sizes = {}
    for prompts in ("shared", "own"):
        of = Turns(tmp_path / prompts, SyncWorkflowScheduler, draw(1, 3), prompts, 1, blocks=4000)
        works = draw(1, 3)[0]
        of.makespan()
        scheduler = of.engine.scheduler
        admission = scheduler.queue_policies.admission
        (workflow,) = (one for one in admission.workflows if one.key == "loop\0w0")  # it has ended
        known = admission.explain(workflow)["known_tokens"]
        said = sum(len(new) + output for _, new, output, _ in works.steps)
        agents = len({agent for agent, *_ in works.steps})
        # Where an instruction stands at the end, the answer behind it is not where the next prompt has it.
        aside = sum(output + 40 for _, _, output, _ in works.steps)
        expected = 300 + said + (aside if prompts == "shared" else 200 * agents)
        sizes[prompts] = known / expected
    assert sizes == {"shared": pytest.approx(1, abs=0.1), "own": pytest.approx(1, abs=0.1)}


@pytest.mark.parametrize("ahead", [False, True])
def test_iterations_take_what_the_engine_took_also_where_they_overlap(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.1 s; ahead, the next is scheduled 0.07 s before the last is done."""
    times, seen = IterationTimes(), []
    monkeypatch.setattr(IterationCost, "observe", lambda cost, *one: seen.append(one))
    outputs = [object() for _ in range(5)]
    for number, output in enumerate(outputs):
        times.scheduled(output, (3, 100), 0.1 * number + (0.03 - 0.1 if ahead and number else 0.0))
        if not ahead:
            times.updated(output, 0.1 * (number + 1))
        elif number:
            times.updated(outputs[number - 1], 0.1 * number)
    assert [round(seconds, 6) for *_, seconds in seen] == [0.1] * (4 if ahead else 5)
    times.scheduled(outputs[0], (1, 0), 9.0)  # after an idle time, one update having been missed
    times.updated(outputs[0], 9.1)
    assert seen[-1] == (1, 0, pytest.approx(0.1))


def test_without_prefix_caching_admission_is_idle(tmp_path: Path) -> None:
    engine = Engine(build(tmp_path, SyncWorkflowScheduler, blocks=70, caching=False))
    engine.scheduler.add_request(drawn(random.Random(0), 1))
    engine.run()
    status = engine.scheduler.presage_status()
    assert (status["on"]["admission"], status["admission"]) == (False, None)


def test_workflows_that_have_ended_met_or_missed_their_deadline(tmp_path: Path) -> None:
    """Four steps of 50 ms: one second is enough, and 100 ms are not."""
    of = {"workflow_types": {"slow": {"deadline_s": 1.0}, "quick": {"deadline_s": 0.1}}}
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage={"objectives": of})
    for kind, name in (("slow", "a"), ("quick", "b"), ("none", "c"), ("slow", "d")):
        engine.scheduler.add_request(
            ask(name, [ord(name), *range(60)], 4, workflow_type=kind, workflow_id=name, agent="coder")
        )
    for _ in range(8):
        engine.step()
    for kind, name in (("slow", "a"), ("quick", "b"), ("none", "c")):
        assert engine.scheduler.workflow_ended(kind, name)
    engine.scheduler.add_request(ask("e", [5, *range(60)], 2, workflow_type="none", workflow_id="e", agent="coder"))
    for _ in range(8):
        engine.step()
    decisions = held_by(engine)["decisions"]
    assert (decisions["deadline met"], decisions["deadline missed"]) == (1, 1)


def test_an_end_is_expected_to_be_told_of_named_workflows_until_theirs_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can end a workflow that has no name."""
    silent: dict[str, float] = {}

    def runs(workflow: Workflow) -> bool:
        silent[workflow.id] = workflow.silent
        return True

    told(monkeypatch, runs)
    settings = {**ALONE, "infer_workflows": True, "time_to_live_s": 30.0}
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage=settings)

    def asks(name: str, **sent: Any) -> float:
        engine.scheduler.add_request(ask(name, [sum(map(ord, name)) % 400] * 60, 2, **sent))
        before = set(silent)
        for _ in range(4):
            engine.step()
        (new,) = set(silent) - before
        return silent[new]

    def named(name: str, **sent: Any) -> float:
        return asks(name, workflow_type="t", workflow_id=name, agent="a", **sent)

    assert asks("nobody's") == 1.0
    assert [named("a", workflow_end=True), named("b", workflow_end=True), named("c")] == [0.0] * 3
    engine.clock.now += 60.0
    busy(engine, "wakes")
    for _ in range(4):
        engine.step()
    assert 0.0 < named("d") < 0.5, "one of three ends was not told"
    assert asks("nobody's either") == 1.0
