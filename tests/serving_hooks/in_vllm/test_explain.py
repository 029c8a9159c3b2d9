"""One workflow is explained: its forecasts, where its request waits and why, its blocks; to its own client alone."""

import json
from pathlib import Path

import pytest
from profile_samples import coding, table_of
from test_admission_in_engine import ALONE, Ticking, busy, told, work
from test_policies_in_engine import Clock, prompt, served, step
from vllm_samples import Engine, ask, build

from presage.features.sequences import sequences_of
from presage.predictors.profile.predictor import ProfilePredictor
from presage.serving_hooks import explain
from presage.serving_hooks.explain import MOST_ANSWERS, MOST_SHOWN, RecentAnswers
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.vllm.waiting import WaitingQueue
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.tenants import ARGUMENT

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]


def test_forecasts_and_blocks_are_told_with_where_they_stand(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, returns={"a": 0.9, "b": 0.1})
    step(engine, "a1", 0, 640, step=0)
    step(engine, "b1", 100, 320)
    told = engine.scheduler.explain("t", "a")
    assert (told["workflow_type"], told["workflow_id"], told["alive"], told["requests"]) == ("t", "a", True, [])
    assert [(made["agent"], made["step"], made["moment"]) for made in told["forecasts"]] == [
        ("planner", 0, "prefill"),
        ("planner", 0, "completion"),
    ]
    assert told["forecasts"][-1]["horizons"] == [{"agents": {"planner": 0.9}, "end": 0.1}]
    assert (told["forecasts"][-1]["source"], told["forecasts"][-1]["version"]) == ("champion", 1)
    (group,) = told["blocks"]["groups"]
    blank = 89 - 40 - 20
    wait_s = group.pop("wait_s")
    assert group == {"blocks": 40, "free": 40, "agents": ["planner"], "users": 1, "before": blank + 20}
    (other,) = engine.scheduler.explain("t", "b")["blocks"]["groups"]
    assert (other["blocks"], other["before"]) == (20, blank)
    assert other["wait_s"] > 5 * wait_s > 0
    assert told["modes"] == dict.fromkeys(("priority", "eviction", "admission", "prefetch"), "on")
    json.dumps(told, allow_nan=False)


def test_a_waiting_request_is_told_its_place_and_its_key(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, left={"a": 5.0, "b": 900.0, "c": 10.0}, seqs=1)
    for name in "abc":
        engine.scheduler.add_request(ask(name, prompt(0, 20), 6, workflow_id=name, agent="planner"))
    engine.step()
    (request,) = engine.scheduler.explain("", "b")["requests"]
    assert (request["state"], request["place"], request["waiting"], request["held"]) == ("WAITING", 2, 2, False)
    assert request["key"] == {"class": 0, "level": 0, "remaining_tokens": 900.0}
    assert "a request of agent 'planner' waits, 2 of 2" in engine.scheduler.explain("", "b")["reasons"]


def test_of_many_requests_few_are_explained_and_the_queue_is_not_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served(tmp_path, seqs=1, presage={"explain": 500})
    for number in range(150):
        engine.scheduler.add_request(ask(f"a{number}", prompt(number, 20), 2, workflow_id="a", agent="planner"))
    engine.run()
    for number in range(150, 300):
        engine.scheduler.add_request(ask(f"a{number}", prompt(number, 20), 2, workflow_id="a", agent="planner"))
    plain: list[object] = []
    monkeypatch.setattr(explain, "lengths_as_plain", plain.append)
    monkeypatch.setattr(WaitingQueue, "__iter__", None)
    explained = engine.scheduler.explain("", "a")
    assert explained["in_engine"] == 150
    assert [request["place"] for request in explained["requests"]] == list(range(1, MOST_SHOWN + 1))
    assert len(explained["forecasts"]) == len(plain) == MOST_SHOWN
    assert "it has 150 requests in the engine; the first 50 are shown" in explained["reasons"]


def test_whoever_asks_often_is_told_the_same_for_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "FRESH_S", 1.0)
    clock = Clock()
    engine, _ = served(tmp_path, clock=clock)
    step(engine, "a1", 0, 40)
    status, explained = engine.scheduler.presage_status(), engine.scheduler.explain("t", "a")
    step(engine, "a2", 0, 40)
    step(engine, "b1", 0, 40)
    clock.now += 0.9
    assert engine.scheduler.presage_status() is status
    assert engine.scheduler.explain("t", "a") is explained
    assert engine.scheduler.explain("t", "b")["alive"]
    clock.now += 0.2
    assert (status["workflows"], engine.scheduler.presage_status()["workflows"]) == (1, 2)
    assert len(engine.scheduler.explain("t", "a")["forecasts"]) == 2 * len(explained["forecasts"])


def test_who_is_held_is_told_why_and_in_shadow_that_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda workflow: False)
    for mode in ("on", "shadow"):
        engine = Ticking(tmp_path, SyncWorkflowScheduler, presage={**ALONE, "mode": {"policies": {"admission": mode}}})
        busy(engine)
        engine.step()
        engine.scheduler.add_request(work("a1", output=60))
        for _ in range(20):
            engine.step()
        explained = engine.scheduler.explain("t", "a")
        assert explained["admission"]["held"] is (mode == "on")
        reasons = " ".join(explained["reasons"])
        assert ("it is held: so it is told; for" in reasons) is (mode == "on")
        assert ("admission would hold it (so it is told), but does not act on it" in reasons) is (mode == "shadow")
        assert ("admission is shadow for this workflow type" in reasons) is (mode == "shadow")


def test_workflows_and_agents_are_listed(tmp_path: Path) -> None:
    engine, _ = served(tmp_path)
    step(engine, "a1", 0, 40)
    step(engine, "a2", 0, 40, workflow_end=1)
    step(engine, "b1", 0, 40)
    assert engine.scheduler.workflow_paused("t", "b")
    listed = engine.scheduler.workflows("", 0, 9)
    states = [(workflow["workflow_id"], workflow["state"], workflow["steps"]) for workflow in listed["workflows"]]
    assert states == [("b", "paused", 1), ("a", "finished", 2)]
    (agent,) = engine.scheduler.agents("")["agents"]
    assert (agent["workflow_type"], agent["steps"]) == ("t", 3)
    assert agent["model"]


def test_a_workflow_that_has_ended_is_told_until_the_ring_has_gone_round(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, presage={"explain": 6})
    step(engine, "a1", 0, 40)
    step(engine, "a2", 0, 40, workflow_end=1)
    gone = engine.scheduler.explain("t", "a")
    assert (gone["alive"], len(gone["forecasts"]), gone["blocks"]["groups"]) == (False, 4, [])
    assert gone["reasons"][-1].startswith("it is not running")
    for number in range(3):
        step(engine, f"b{number}", 0, 40)
    assert engine.scheduler.explain("t", "a")["forecasts"] == []
    assert engine.scheduler.debug_state()["recent forecasts"] == 6


def test_nothing_is_kept_where_nobody_may_ask(tmp_path: Path) -> None:
    engine, _ = served(tmp_path, presage={"explain": 0})
    step(engine, "a1", 0, 40)
    assert engine.scheduler.debug_state()["recent forecasts"] == 0
    assert engine.scheduler.explain("t", "a")["forecasts"] == []


def test_each_tenant_is_told_of_its_own_under_the_name_it_gave(tmp_path: Path) -> None:
    engine, _ = served(tmp_path)
    for tenant, tokens in (("key-0", 160), ("key-1", 320)):
        sent = {"workflow_type": "t", "workflow_id": "w", "agent": "planner", ARGUMENT: tenant}
        engine.scheduler.add_request(ask(f"r-{tenant}", prompt(len(tenant) + tokens, tokens), 2, **sent))
        engine.run()
    for tenant, blocks in (("key-0", 10), ("key-1", 20)):
        told = engine.scheduler.explain("t", scoped(tenant, "w"))
        assert (told["workflow_id"], told["blocks"]["blocks"]) == ("w", blocks)
        assert "key-" not in json.dumps(told)
    assert not engine.scheduler.explain("t", "w")["alive"]


def test_a_workflow_is_told_where_it_is_on_the_profile_of_its_type(tmp_path: Path) -> None:
    ProfilePredictor().fit(sequences_of(table_of(coding(100)))).save(tmp_path / "profile")
    without = dict.fromkeys(("next_agent", "remaining_length", "return_time", "context_growth"))
    presage = {**without, "profile": str(tmp_path / "profile"), "reload_s": None, "forecast_deadline_ms": 1000.0}
    engine = Engine(build(tmp_path / "served", SyncWorkflowScheduler, blocks=90, presage=presage))
    for number, agent in enumerate(("planner", "explorer", "explorer")):
        of = {"workflow_type": "app", "workflow_id": "w", "agent": agent, "step": number}
        engine.scheduler.add_request(ask(f"w-{number}", prompt(0, 40 + number), 2, **of))
        engine.run()
    explained = engine.scheduler.explain("app", "w")
    assert (explained["position"]["at"], explained["position"]["on_graph"]) == (["explorer"], True)
    assert explained["forecasts"][-1]["source"] == "profile"
    assert any(told.startswith("workflows of its type run planner explorer{3,12} ") for told in explained["reasons"])
    status = engine.scheduler.presage_status()
    assert status["counts"]["forecast: profile"] == 6
    assert status["models"]["profile"] == str(tmp_path / "profile")
    engine.scheduler.add_request(ask("w-3", prompt(0, 44), 2, **{**of, "step": 3}, workflow_end=True))
    engine.run()
    assert engine.scheduler.explain("app", "w")["position"] is None


def test_answers_are_kept_for_a_bounded_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "FRESH_S", 1.0)
    asked: list[int] = []
    answers = RecentAnswers(lambda: 0.0)
    for question in [*range(MOST_ANSWERS + 1), 0, MOST_ANSWERS]:
        answers.answer(question, lambda question=question: asked.append(question) or {})
    assert asked == [*range(MOST_ANSWERS + 1), 0]
