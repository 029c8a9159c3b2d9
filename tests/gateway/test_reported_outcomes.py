"""What applications report at the gateway becomes outcomes of the ingested trace, and what a router learns from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from by_name import Recorder
from served import gateway, served

from presage.datasets.ingest import ingest
from presage.datasets.outcomes.split import choose_models, split_outcomes
from presage.datasets.outcomes.traced import outcomes_of
from presage.datasets.read import read_traces
from presage.gateway.front import Front
from presage.gateway.outcomes import LATE_S, ReportableOutcomes, outcome_report
from presage.gateway.refusal import Refusal
from presage.gateway.simulated_engine import SimulatedEngine
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.modes import Switch
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.training.router.train import fit_router

CHAT = "/v1/chat/completions"


@contextmanager
def recording(folder: Path, **given: Any) -> Iterator[tuple[str, Front]]:
    """A gateway that records, texts included, before an engine with two models."""
    forecasts = {"recorder": {"folder": str(folder), "text": "on"}, **given.pop("forecasts", {})}
    engine = served(SimulatedEngine(("small", "large"), token_s=0.0, prefill_s=0.0).app())
    with engine as upstream, gateway(upstream, forecasts=forecasts, **given) as (url, front):
        yield url, front


def ask(url: str, workflow_id: str, text: str, **more: Any) -> dict[str, Any]:
    """A chat answer of a named workflow."""
    names = {"workflow_type": "t", "workflow_id": workflow_id, "agent": "a", **more.pop("names", {})}
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]
    body = {"model": "small", "messages": messages, "vllm_xargs": names, **more.pop("body", {})}
    answer = httpx.post(url + CHAT, json=body, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tell(url: str, key: str = "", **report: Any) -> tuple[int, Any]:
    """Status and body of the answer to a report; an error's code for its body."""
    answer = httpx.post(url + "/v1/outcomes", json=report, headers={"authorization": f"Bearer {key}"} if key else {})
    body = answer.json()
    return answer.status_code, body["error"]["code"] if "error" in body else body


NEW, AGAIN = (200, {"recorded": True, "repeated": False}), (200, {"recorded": True, "repeated": True})


def judged(folder: Path) -> dict[str, list[tuple[bool | None, float | None]]]:
    """Success and score of each step, by the workflow's id as its client sent it."""
    found: dict[str, list[tuple[bool | None, float | None]]] = {}
    for row in read_traces([folder]).table.to_pylist():
        found.setdefault(row["workflow_id"].partition("@")[0], []).append((row["success"], row["step_score"]))
    return found


def test_reports_of_workflows_and_of_answers_are_in_the_ingested_trace(tmp_path: Path) -> None:
    with recording(tmp_path) as (url, _):
        for name in ("whole", "last", "first", "both", "none"):
            first = ask(url, name, "one")
            last = ask(url, name, "two", names={"workflow_end": "true"})
            if name in ("whole", "both"):
                assert tell(url, workflow_id=name, workflow_type="t", success=name == "whole") == NEW
            if name in ("last", "both"):
                assert tell(url, response_id=last["id"], success=True, score=0.75) == NEW
            if name == "first":
                assert tell(url, response_id=first["id"], success=False) == NEW
    assert judged(tmp_path) == {
        "whole": [(True, None), (True, None)],
        "last": [(True, None), (True, 0.75)],
        "first": [(None, 0.0), (None, None)],
        "both": [(False, None), (False, 0.75)],
        "none": [(None, None), (None, None)],
    }


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_names_nothing_reports_by_the_id_of_its_answer(tmp_path: Path, path: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"prompt": "Hello"} if path == "/v1/completions" else {"input": "Hello"}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": "Hello"}]}
    with recording(tmp_path, forecasts={"time_to_live_s": 0.05}) as (url, front):
        answer = httpx.post(url + path, json={"model": "small", "stream": streamed, **asked}).text
        if streamed:
            events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            response_id = next(one.get("id") or one["response"]["id"] for one in events)
        else:
            response_id = json.loads(answer)["id"]
        while len(front.decisions.table):  # it ends before the report
            time.sleep(0.05)
        assert tell(url, response_id=response_id, success=True) == NEW
    ((of,),) = judged(tmp_path).values()
    assert of == (True, 1.0)


def test_the_openai_client_reports_through_its_own_connection(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
    with recording(tmp_path) as (url, _), openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hello"}])
        told = client.post("/outcomes", cast_to=object, body={"response_id": answer.id, "success": True})
        assert told == {"recorded": True, "repeated": False}
        with pytest.raises(openai.NotFoundError, match="knows no such response"):
            client.post("/outcomes", cast_to=object, body={"response_id": "another", "success": True})


def test_the_first_report_stands(tmp_path: Path) -> None:
    with recording(tmp_path) as (url, _):
        answer = ask(url, "w", "one")
        for _ in range(2):
            assert tell(url, workflow_id="w", workflow_type="t", success=True)[0] == 200
        assert tell(url, workflow_id="w", workflow_type="t", success=True) == AGAIN
        assert tell(url, workflow_id="w", workflow_type="t", success=False) == (409, "contradictory_outcome")
        assert tell(url, response_id=answer["id"], success=True) == NEW
        assert tell(url, response_id=answer["id"], success=True, score=1) == AGAIN
        assert tell(url, response_id=answer["id"], success=True, score=0.9) == (409, "contradictory_outcome")
        ask(url, "w", "two", names={"workflow_end": "true"})
        assert tell(url, workflow_id="w", workflow_type="t", success=True) == AGAIN
        ask(url, "w", "another run", names={"workflow_end": "true"})
        assert tell(url, workflow_id="w", workflow_type="t", success=False) == NEW  # of the latest run of that name
    rows = read_traces([tmp_path]).table.to_pylist()
    assert [(row["input_text"], row["success"], row["step_score"]) for row in rows] == [
        ("one", True, 1.0),
        ("two", True, None),
        ("another run", False, None),
    ]


def test_a_late_report_completes_what_a_store_already_has(tmp_path: Path) -> None:
    store = tmp_path / "store"
    forecasts = {"recorder": {"folder": str(tmp_path / "r"), "flush_s": 0.01}}
    with recording(tmp_path / "r", forecasts=forecasts) as (url, _):
        answer = ask(url, "w", "one")
        ask(url, "w", "two", names={"workflow_end": "true"})
        time.sleep(0.5)
        assert ingest([tmp_path / "r"], store).workflows == 1
        assert set(read_traces([store]).table["success"].to_pylist()) == {None}
        assert tell(url, workflow_id="w", workflow_type="t", success=True) == NEW
        assert tell(url, response_id=answer["id"], success=True, score=0.5) == NEW
    assert ingest([tmp_path / "r"], store).extended == 1
    assert judged(store) == {"w": [(True, 0.5), (True, None)]}
    assert ingest([tmp_path / "r"], store).already_present == 1


def test_no_tenant_reports_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", "alpha-key,beta-key")
    with recording(tmp_path, keys_variable="GATEWAY_KEYS") as (url, front):
        alpha = {"headers": {"authorization": "Bearer alpha-key"}}
        answer = ask(url, "w", "one", **alpha, names={"workflow_end": "true"})
        about: list[dict[str, Any]] = [{"workflow_id": "w", "workflow_type": "t"}, {"response_id": answer["id"]}]
        for of in about:
            assert tell(url, **of, success=True) == (401, "invalid_api_key")
            assert tell(url, "beta-key", **of, success=False) == (404, "not_found")
            assert tell(url, "beta-key", workflow_id="key-0\xa0w", workflow_type="t", success=True)[0] == 404
            assert tell(url, "alpha-key", **of, success=True) == NEW
        assert front.decisions.debug_state()["reportable outcomes"] == 2
    assert judged(tmp_path) == {"w": [(True, 1.0)]}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, "neither of response_id and workflow_id"),
        ({"success": True}, "neither of response_id and workflow_id"),
        ({"workflow_id": "w", "response_id": "r", "success": True}, "both of"),
        ({"workflow_id": ["w"], "success": True}, "workflow_id is a JSON list; send a string"),
        ({"response_id": 7, "success": True}, "response_id is a JSON int"),
        ({"workflow_id": "w", "workflow_type": {}, "success": True}, "workflow_type is a JSON dict"),
        ({"workflow_id": "w"}, "success is missing; send true or false"),
        ({"workflow_id": "w", "success": "my secret"}, "success is a JSON str; send true or false"),
        ({"workflow_id": "w", "success": True, "score": 0.5}, "A score is of one answer"),
        ({"response_id": "r", "workflow_type": "t", "success": True}, "workflow_type goes with a workflow_id"),
        ({"response_id": "r", "success": True, "score": 1.5}, "score is 1.5; send a number from 0 to 1"),
        ({"response_id": "r", "success": True, "score": float("nan")}, "score is nan"),
        ({"response_id": "r", "success": True, "score": True}, "score is a JSON bool"),
        ({"response_id": "r", "sucess": True}, "Unknown field 'sucess'; did you mean success?"),
    ],
)
def test_a_malformed_report_says_what_to_send(report: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as refused:
        outcome_report(report, "")
    assert (refused.value.status, refused.value.code) == (400, "invalid_outcome")
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_bad_reports_are_errors_of_the_api(tmp_path: Path) -> None:
    with recording(tmp_path, limits={"body_mb": 1}) as (url, front):
        for content, status, code in (
            (b"[1]", 400, "invalid_json"),
            (b"{", 400, "invalid_json"),
            (b'{"success": true}', 400, "invalid_outcome"),
            (b'{"workflow_id": "w", "success": true}', 404, "not_found"),
            (b'{"response_id": "r", "success": true}', 404, "not_found"),
            (b'{"response_id": "' + b"r" * 2**20 + b'"}', 413, "request_too_large"),
        ):
            answer = httpx.post(url + "/v1/outcomes", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert httpx.get(url + "/v1/outcomes").status_code == 404
        front.draining = True
        assert httpx.post(url + "/v1/outcomes", json={}).status_code == 503
        front.draining = False


def test_without_a_recorder_a_report_says_how_to_start_one() -> None:
    with served(SimulatedEngine().app()) as upstream, gateway(upstream) as (url, _):
        answer = httpx.post(url + "/v1/outcomes", json={"response_id": "r", "success": True})
    assert answer.status_code == 404
    assert "--record FOLDER" in answer.json()["error"]["message"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reportable(folder: Path, most: int, **settings: Any) -> tuple[ReportableOutcomes, Recorder, Clock]:
    clock = Clock()
    recorder = Recorder(RecorderConfig(folder=str(folder), **settings))
    return ReportableOutcomes(recorder, most, clock, Switch("recorder", EventCounts())), recorder, clock


def serve(of: ReportableOutcomes, recorder: Recorder, tenant: str, number: int, response_id: str) -> None:
    step = Step("t", scoped(tenant, f"w{number}"), "a")
    recorded = recorder.begun(f"{tenant}-{number}-{response_id}", step)
    assert recorded is not None
    of.began(step, recorded)
    of.answered(step, response_id, recorded)


def status_of(of: ReportableOutcomes, tenant: str, **report: Any) -> int:
    try:
        of.report(tenant, outcome_report({"success": True, **report}, tenant))
    except Refusal as refusal:
        return refusal.status
    return 200


def test_an_answer_can_be_reported_on_for_a_day(tmp_path: Path) -> None:
    of, recorder, clock = reportable(tmp_path, 100)
    serve(of, recorder, "", 0, "early")
    clock.now = LATE_S - 1
    serve(of, recorder, "", 1, "late")
    of.expire()
    assert status_of(of, "", response_id="early") == 200
    clock.now = LATE_S + 1
    of.expire()
    assert (status_of(of, "", response_id="early"), status_of(of, "", response_id="late")) == (404, 200)
    clock.now *= 3
    of.expire()
    assert len(of) == 0


def test_what_can_be_reported_on_is_bounded_and_a_busy_tenant_pushes_out_its_own(tmp_path: Path) -> None:
    of, recorder, _ = reportable(tmp_path, 20)
    serve(of, recorder, "quiet", 0, "r0")
    for number in range(500):
        serve(of, recorder, "busy", number, f"r{number}")
    assert len(of) == 20
    assert status_of(of, "quiet", response_id="r0") == 200
    assert (status_of(of, "busy", response_id="r0"), status_of(of, "busy", response_id="r499")) == (404, 200)


def test_answers_of_one_id_are_told_apart_by_their_workflows_alone(tmp_path: Path) -> None:
    of, recorder, _ = reportable(tmp_path, 20)
    serve(of, recorder, "", 0, "same")
    serve(of, recorder, "", 1, "same")
    assert status_of(of, "", response_id="same") == 409
    assert status_of(of, "", workflow_id="w0", workflow_type="t") == 200


def test_a_report_that_cannot_be_recorded_may_be_sent_again(tmp_path: Path) -> None:
    of, recorder, _ = reportable(tmp_path, 20, queue_rows=1)
    serve(of, recorder, "", 0, "r0")
    other = recorder.begun("another", Step("t", "another", "a"))
    assert other is not None
    while recorder.outcome(other, True, None):
        pass  # the writer is not running: the buffer fills
    assert [status_of(of, "", response_id="r0") for _ in range(2)] == [503, 503]
    recorder.writer.turn(0.0)
    assert status_of(of, "", response_id="r0") == 200


WORDS = ("primes", "rivers", "graphs", "trains", "clouds", "letters", "engines", "gardens", "planets", "bridges")
LEARNT = range(100, 340)


def question(number: int) -> tuple[str, bool]:
    """A question, and whether it is hard."""
    hard = number % 2 == 1
    first, second = (WORDS[number // divisor % len(WORDS)] for divisor in (2, 20))
    what = f"Prove the theorem about {first} and {second}" if hard else f"Say which colour {first} has beside {second}"
    return f"{what}, case {number} of the day", hard


@pytest.mark.slow
def test_a_router_learns_from_what_was_reported_and_the_gateway_chooses_by_it(tmp_path: Path) -> None:
    folder, learnt = tmp_path / "served", tmp_path / "router"
    with recording(folder) as (url, _):
        for number in LEARNT:
            text, hard = question(number)
            model = ("small", "large")[number // 2 % 2]
            names = {"agent": "solver", "workflow_end": "true"}
            answer = ask(url, f"w{number}", text, body={"model": model}, names=names)
            assert tell(url, response_id=answer["id"], success=model == "large" or not hard)[0] == 200
    found = outcomes_of(read_traces([folder]).table)
    assert found.skipped == {}
    assert (found.rows, found.outcomes.models) == (240, ("large", "small"))
    assert set(found.outcomes.prompts) == {question(number)[0] for number in LEARNT}  # without the system prompt
    assert set(found.outcomes.task) == {"t/solver"}
    fitted = fit_router(choose_models(found.outcomes)).predictor
    fitted.save(learnt)

    pool = {"name": "presage/auto", "models": ["small", "large"], "default": "small", "price": 0.0}
    upstream = {"models": ["small", "large"]}
    with recording(tmp_path / "chosen", pools=[pool], router=str(learnt), upstream=upstream) as (url, front):
        while front.upstreams.status()["router"]["version"] is None and not _loaded(front):
            time.sleep(0.05)
        served_by = {}
        for number in range(500, 502):
            text, hard = question(number)
            served_by[hard] = _chosen(url, text, number)
    assert served_by[True][0] == "large", served_by
    for model, told, explained in served_by.values():
        assert (told["model"], told["model_reason"]) == (model, "most confident model, net of the price of waiting")
        assert f"model {model}: most confident model, net of the price of waiting" in explained
    assert {row["model"] for row in read_traces([tmp_path / "chosen"]).table.to_pylist()} >= {"large"}


def _loaded(front: Front) -> bool:
    status: Mapping[str, Any] = front.upstreams.status()["router"]
    return status["starts"] > 0 and status["reason"] is None


def _chosen(url: str, text: str, number: int) -> tuple[str, dict[str, Any], str]:
    """The model that answered, what the header of the answer says, and the explanation; once the router is in time."""
    for attempt in range(100):
        name = f"chosen-{number}-{attempt}"
        names = {"workflow_type": "t", "workflow_id": name, "agent": "solver"}
        messages = [{"role": "user", "content": text}]
        body = {"model": "presage/auto", "messages": messages, "vllm_xargs": names}
        answer = httpx.post(url + CHAT, json=body, headers={"x-presage-forecast": "1"})
        told = json.loads(answer.headers["x-presage-forecast"])
        if "net of the price" in told["model_reason"]:
            break
    explained = httpx.get(f"{url}/v1/workflows/{name}/explain?workflow_type=t").json()["engines"][0]["reasons"]
    return answer.json()["model"], told, " ".join(explained)


def test_in_shadow_the_reason_says_which_model_would_serve(tmp_path: Path) -> None:
    pool = {"name": "presage/auto", "models": ["small", "large"], "default": "small"}
    shadow = {"policies": {"model-choice": "shadow"}}
    upstream = {"models": ["small", "large"]}
    with recording(tmp_path, pools=[pool], router=None, modes=shadow, upstream=upstream) as (url, _):
        asked = {"model": "presage/auto", "messages": [{"role": "user", "content": "Hello"}]}
        answer = httpx.post(url + CHAT, json=asked, headers={"x-presage-forecast": "1"})
    reason = json.loads(answer.headers["x-presage-forecast"])["model_reason"]
    assert reason == "model choice is in shadow; it would choose small: no router is loaded"


def test_prompts_of_one_task_stay_on_one_side_of_every_split(tmp_path: Path) -> None:
    rows = []
    for number in range(60):  # two runs of each of thirty questions, three steps each
        for step in range(3):
            text = f"question {number // 2}" if step == 0 else f"question {number // 2}, attempt {number}, step {step}"
            rows.append(
                {
                    "workflow_type": "t", "workflow_id": f"w{number:02}", "step": step, "agent": f"a{step}",
                    "model": "m", "input_text": text, "success": number % 2 == 0,
                }
            )  # fmt: skip
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = outcomes_of(read_traces([path]).table)
    assert (found.rows, found.duplicates, found.contradictions) == (180, 30, 30)
    for seed in range(20):
        kept, apart = split_outcomes(found.outcomes, 0.3, seed)
        asked = [{prompt.partition(",")[0] for prompt in part.prompts} for part in (kept, apart)]
        assert not asked[0] & asked[1]
    assert np.allclose(found.outcomes.correct[[prompt.endswith("n 0") for prompt in found.outcomes.prompts]], 0.5)


def test_only_steps_with_a_prompt_a_model_and_an_outcome_are_taken(tmp_path: Path) -> None:
    base = {"workflow_type": "t", "agent": "a", "model": "m", "input_text": "in", "success": True}
    changes: list[dict[str, Any]] = [
        {}, {"model": None}, {"input_text": None}, {"success": None}, {"finish_reason": "abort"}, {"kind": "tool"},
        {"input_text": None, "system_prompt": "alone"}, {"success": None, "step_score": 0.25, "input_text": "scored"},
    ]  # fmt: skip
    rows = [{**base, "workflow_id": f"w{n}", "step": 0, **change} for n, change in enumerate(changes)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = outcomes_of(read_traces([path]).table)
    labels = dict(zip(found.outcomes.prompts, found.outcomes.correct[:, 0].tolist(), strict=True))
    assert labels == {"in": 1.0, "alone": 1.0, "scored": 0.25}
    assert found.skipped == {
        "step without a model": 1, "step without a prompt": 1, "step without an outcome": 1, "aborted step": 1,
    }  # fmt: skip


def test_a_recording_with_outcomes_holds_no_text_of_a_report(tmp_path: Path) -> None:
    with recording(tmp_path) as (url, _):
        answer = ask(url, "w", "one", names={"workflow_end": "true"})
        tell(url, response_id=answer["id"], success=True)
    (path,) = tmp_path.rglob("outcomes-*.arrows")
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert [(row["run"], row["step"], row["success"], row["score"]) for row in table.to_pylist()] == [(0, 0, True, 1.0)]
