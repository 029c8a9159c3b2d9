"""What happens to workflows on vLLM's own scheduler is told in order, and the engine serves as it does without."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from receiving_server import ReceivingServer
from test_admission_in_engine import ALONE, Ticking, busy, told, work
from test_policies_in_engine import Clock
from vllm_samples import NAMED, Engine, ask, build

from presage.errors import ConfigurationError
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.vllm.config import read_config
from presage.serving_hooks.vllm.http.plugin import call_scheduler
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.tenants import ARGUMENT

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

NO_MODELS = {"next_agent": None, "remaining_length": None, "return_time": None, "profile": None, "reload_s": None}
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


@pytest.fixture(autouse=True)
def no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)


def engine_of(folder: Path, ahead: bool = False, **presage: Any) -> tuple[Engine, Clock, list[LifecycleEvent]]:
    clock, heard = Clock(), list[LifecycleEvent]()
    kind = type("Kind", (WorkflowScheduler if ahead else SyncWorkflowScheduler,), {"clock": clock})
    scheduler = build(folder / "served", kind, blocks=90, presage={**NO_MODELS, **NAMED, **presage})
    scheduler.lifecycle.subscribe(heard.append)
    return Engine(scheduler, ahead), clock, heard


def step(engine: Engine, workflow: str, number: int, agent: str, **sent: object) -> None:
    named = {"workflow_type": "coding", "workflow_id": workflow, "agent": agent, **sent}
    engine.scheduler.add_request(ask(f"{workflow}-{number}", list(range(40)), 2, **named))
    engine.run()


def course(heard: Sequence[LifecycleEvent], workflow: str) -> list[tuple[str, int, str]]:
    found = [one for one in heard if one.workflow_id == workflow]
    assert [one.sequence for one in found] == list(range(len(found)))
    return [(one.kind, one.step, one.agent) for one in found]


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_workflow_is_told_from_its_start_to_its_end(tmp_path: Path, ahead: bool, mode: str) -> None:
    engine, clock, heard = engine_of(tmp_path, ahead, mode=mode)
    for number in range(10):
        step(engine, f"w{number}", 0, "planner")
        clock.now += 20.0
        step(engine, f"w{number}", 1, "coder", workflow_end=True)
    engine.scheduler.add_request(ask("nobody's", [1, 2, 3], 3))
    engine.run()
    assert course(heard, "w9") == [
        ("workflow.started", 0, "planner"),
        ("step.started", 0, "planner"),
        ("step.finished", 0, "planner"),
        ("expected", 0, "planner"),
        ("step.started", 1, "coder"),
        ("step.finished", 1, "coder"),
        ("ended", 1, "coder"),
    ]
    last = [one for one in heard if one.workflow_id == "w9"]
    assert (last[2].finish_reason, last[2].output_tokens, last[-1].reason) == ("length", 2, "finished")
    assert last[3].return_s is not None
    assert last[3].return_s["0.5"] == pytest.approx(20.0, rel=0.2)
    if mode == "on":
        assert last[3].next_agents is not None
        assert last[3].next_agents["coder"] > 0.5
    assert [kind for kind, *_ in course(heard, "w0")].count("expected") == 0, "nothing is known yet"
    assert {one.workflow_id for one in heard} == {f"w{number}" for number in range(10)}
    assert {one.source for one in heard} == {last[0].source}
    assert len({one.id for one in heard}) == len(heard)


def test_an_answer_renews_what_is_expected(tmp_path: Path) -> None:
    engine, clock, heard = engine_of(tmp_path)
    for number in range(10):
        step(engine, "w", number, "main", step=number)
        answered = ("coding", "w", "main", number, "tool_calls", ["search"], 0)
        assert call_scheduler(engine, "step_answered", answered)
        clock.now += 20.0
    kinds = [one.kind for one in heard][-4:]
    assert kinds == ["step.started", "step.finished", "expected", "expected"]
    assert heard[-1].return_s is not None
    assert heard[-1].return_s["0.5"] == pytest.approx(20.0, rel=0.2)


def test_steps_that_run_beside_each_other_are_numbered_and_what_follows_is_told_after_the_last(tmp_path: Path) -> None:
    engine, _, heard = engine_of(tmp_path)
    for name, tokens in (("a", 2), ("b", 6)):
        named = {"workflow_type": "coding", "workflow_id": "w", "agent": name}
        engine.scheduler.add_request(ask(name, list(range(40)), tokens, **named))
    engine.run()
    told_of = [one for one in course(heard, "w") if one[0].startswith("step")]
    assert told_of == [
        ("step.started", 0, "a"),
        ("step.started", 1, "b"),
        ("step.finished", 0, "a"),
        ("step.finished", 1, "b"),
    ]


def test_several_choices_are_one_step(tmp_path: Path) -> None:
    engine, _, heard = engine_of(tmp_path)
    for number in range(3):
        named = {"workflow_type": "coding", "workflow_id": "w", "agent": "main"}
        engine.scheduler.add_request(ask(f"{number}_one", list(range(40)), 2 + number, **named))
    engine.run()
    told_of = [one for one in heard if one.kind.startswith("step")]
    assert [(one.kind, one.step, one.output_tokens) for one in told_of] == [
        ("step.started", 0, None), ("step.finished", 0, 9),
    ]  # fmt: skip


def test_tenants_stand_beside_ids_and_not_in_them(tmp_path: Path) -> None:
    engine, _, heard = engine_of(tmp_path)
    step(engine, "w", 0, "main", **{ARGUMENT: "key-1"})
    assert scoped("key-1", "w") != "w"
    assert {(one.workflow_id, one.tenant) for one in heard} == {("w", "key-1")}


def test_an_idle_engine_that_is_asked_for_its_status_tells_who_has_expired(tmp_path: Path) -> None:
    engine, clock, heard = engine_of(tmp_path, time_to_live_s=30.0)
    step(engine, "w", 0, "main")
    clock.now += 31.0
    engine.scheduler.presage_status()
    assert (heard[-1].kind, heard[-1].reason) == ("ended", "expired")


def test_who_is_held_is_told_and_so_is_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: workflow.id.endswith("b"))
    engine = Ticking(tmp_path, SyncWorkflowScheduler, presage={**ALONE, "held_at_most_s": 50.0})
    heard: list[LifecycleEvent] = []
    engine.scheduler.lifecycle.subscribe(heard.append)
    busy(engine)
    for name in ("b1", "a1", "a2"):
        engine.scheduler.add_request(work(name))
    for _ in range(20):
        engine.step()
    told(monkeypatch, lambda workflow: True)
    engine.run()
    assert [kind for kind, *_ in course(heard, "b")][:2] == ["workflow.started", "step.started"]
    assert [one[0] for one in course(heard, "a") if one[0] != "expected"] == [
        "workflow.started", "step.started", "step.started", "held", "resumed", "step.finished", "step.finished",
    ]  # fmt: skip
    assert {one.at_most_s for one in heard if one.kind == "held"} == {50.0}


def test_a_subscriber_that_fails_is_called_no_more_and_nothing_else_changes(tmp_path: Path) -> None:
    logs = []
    for fails in (False, True):
        engine, _, heard = engine_of(tmp_path)

        def fail(event: LifecycleEvent) -> None:
            raise RuntimeError("a secret of a prompt")

        if fails:
            engine.scheduler.lifecycle.subscribe(fail)
        for number in range(5):
            step(engine, "w", number, "main", workflow_end=number == 4)
        logs.append((engine.log, [one.kind for one in heard]))
        errors = [key for key in engine.scheduler.presage_status()["counts"] if key.endswith("Error")]
        assert errors == (["lifecycle events: RuntimeError"] if fails else [])
    assert logs[0] == logs[1]


def test_events_of_an_engine_reach_a_receiver_and_what_is_left_is_delivered_at_its_end(tmp_path: Path) -> None:
    with ReceivingServer(SECRET) as receiver:
        webhook = {"url": receiver.url, "file": str(tmp_path / "events.sqlite"), "kinds": ["expected", "ended"]}
        engine, _, heard = engine_of(tmp_path, webhook=webhook)
        for number in range(20):
            step(engine, f"w{number % 4}", number, "main", workflow_end=number >= 16)
        engine.scheduler.shutdown()
        assert receiver.events == [one for one in heard if one.kind in webhook["kinds"]]
        status = engine.scheduler.presage_status()["webhook"]
        assert (status["sent"], status["dropped"], status["waiting"]) == (len(receiver.events), 0, 0)


@pytest.mark.parametrize(
    ("webhook", "message"),
    [
        ({"adress": "http://x"}, "presage.webhook.adress is unknown; the settings are batch, file, kinds"),
        ({"file": "x"}, "presage.webhook.url is missing"),
        ({"url": "nowhere"}, "presage.webhook.url is 'nowhere': value error, give an address such as"),
    ],
)
def test_wrong_settings_are_named(webhook: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_config({"presage": {"webhook": webhook}})
