"""vLLM's own scheduler with the recorder on: what was served is what is read back, and no failure of it is felt."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_forecasts import read_forecasts
from test_hidden_states import ALONE, TOGETHER, WIDTH, Worked, hooked, number
from told import AGENTS, send, serve
from vllm_samples import NAMED, Engine, ask, build, token

from presage.datasets.read import read_traces
from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.recorder.recorder import Recorder
from presage.serving_hooks.vllm import engine as engine_port
from presage.serving_hooks.vllm.hidden_states import steps
from presage.serving_hooks.vllm.hidden_states.connector import States
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows.identity import scoped
from presage.serving_hooks.workflows.tenants import ARGUMENT
from presage.testing.forecasts import Noise

pytestmark = pytest.mark.vllm

OFF = {"priority": False, "eviction": False, "admission": False}


def recording(folder: Path, kind: type[Any] = SyncWorkflowScheduler, **more: Any) -> Any:
    """A scheduler that records into `folder`/r; `recorder` has more of its settings."""
    settings = {"folder": str(folder / "r"), **more.pop("recorder", {})}
    presage = {"next_agent": None, "remaining_length": None, "recorder": settings, **NAMED, **more.pop("presage", {})}
    return build(folder / "m", kind, presage=presage, **{"blocks": 400, **more})


def rows(folder: Path) -> list[dict[str, Any]]:
    table = read_traces([folder / "r"]).table
    found: list[dict[str, Any]] = table.to_pylist()
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_what_was_served_without_a_model_is_read_back_as_traces(tmp_path: Path, ahead: bool) -> None:
    scheduler = recording(tmp_path, WorkflowScheduler if ahead else SyncWorkflowScheduler)
    engine = Engine(scheduler, ahead)
    sent = serve(engine, 20)
    scheduler.add_request(ask("nobody's", [1, 2, 3], 3))
    engine.run()
    engine.drain()
    scheduler.shutdown()
    found = rows(tmp_path)
    assert len(found) == len(sent) == 60
    names = [f"{row['workflow_id'].split('@')[0]}.{row['step']}" for row in found]
    assert set(names) == set(sent)
    for name, row in zip(names, found, strict=True):
        step = row["step"]
        assert (row["agent"], row["workflow_type"]) == (AGENTS[step % 3], "retry")
        assert (row["input_tokens"], row["output_tokens"]) == (30 + 25 * step, 3)
        assert row["cached_input_tokens"] == engine.hits[name]
        assert row["finish_reason"] == "length"
        assert row["started_at"] <= row["ended_at"]
        assert row["complete"]
        assert row["input_text"] is row.get("prefill_state") is None
    assert sum(row["cached_input_tokens"] for row in found) > 0
    made = read_forecasts(tmp_path / "r")
    counts = scheduler.presage_status()["counts"]
    told = sum(count for name, count in counts.items() if name.startswith("forecast: "))
    assert made.num_rows == told == 120
    assert {*made["source"].to_pylist()} == {"none", "back-off"}, "counts learn as the engine serves"


@pytest.mark.parametrize(
    "tenants", [("",), ("key-0",), ("key-0", "key-1")], ids=["no key", "one tenant", "two tenants"]
)
def test_steps_are_recorded_whatever_keys_the_server_has(tmp_path: Path, tenants: tuple[str, ...]) -> None:
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    for tenant in tenants:
        for step in range(3):
            sent = {"workflow_type": "retry", "workflow_id": "w", "agent": AGENTS[step], "step": step}
            sent |= {ARGUMENT: tenant} if tenant else {}
            engine.scheduler.add_request(ask(f"{tenant}{step}", list(range(40)), 3, **sent))
            engine.run()
        assert scheduler.explain("retry", scoped(tenant, "w"))["workflow_id"] == "w"
        assert scheduler.workflow_ended("retry", scoped(tenant, "w"))
    status = scheduler.presage_status()["recorder"]
    scheduler.shutdown()
    assert (status["on"], status["losing"]) == (True, False)
    found = rows(tmp_path)
    assert [row["agent"] for row in found] == [*AGENTS[:3]] * len(tenants)
    assert [row["workflow_id"].split("@")[0] for row in found] == ["w"] * 3 * len(tenants)
    assert len({row["workflow_id"] for row in found}) == len(tenants), "each tenant's is a workflow of its own"
    assert all(row["complete"] for row in found)
    assert read_forecasts(tmp_path / "r").num_rows == 6 * len(tenants)


def test_parallel_steps_and_answers_with_several_choices_are_recorded_and_learnt_as_a_trace_of_them(
    tmp_path: Path,
) -> None:
    scheduler = recording(tmp_path, presage={**OFF, "eviction": True})  # requests begin in their order
    engine = Engine(scheduler)

    def asks(workflow: int, number: int, agent: str, choices: int, tokens: int) -> None:
        name, sent = f"w{workflow}.{number}", {"workflow_type": "t", "workflow_id": f"w{workflow}", "agent": agent}
        for choice in range(choices):
            child = f"{choice}_{name}" if choices > 1 else name
            ids = list(range(40 * number + 30))
            scheduler.add_request(ask(child, ids, tokens + choice, step=number, workflow_end=number == 3, **sent))

    for workflow in range(20):
        asks(workflow, 0, "plan", 2, 5)
        engine.run()
        asks(workflow, 1, "search", 1, 30)
        asks(workflow, 2, "code", 3, 2)  # it completes first
        engine.run()
        asks(workflow, 3, "join", 1, 4)
        engine.run()
    left = scheduler.debug_state()
    counts = scheduler.presage_status()["counts"]
    scheduler.shutdown()
    assert (left["choices"], left["workflows"]) == (0, 0)
    assert counts["forecast of lengths: none"] + counts["forecast of lengths: back-off"] == 4 * 20
    found = rows(tmp_path)
    steps = [(row["step"], row["agent"], row["output_tokens"], row["complete"]) for row in found]
    assert sorted(steps[:4]) == [
        (0, "plan", 11, True),
        (1, "search", 30, True),
        (2, "code", 9, True),
        (3, "join", 4, True),
    ]
    assert len(found) == 4 * 20
    made = read_forecasts(tmp_path / "r").to_pylist()
    late = [row for row in made if row["source"] == "back-off" and row["moment"] == PREFILL]
    assert {row["step"]: row["remaining_tokens"] for row in late} == {0: [54.0], 1: [43.0], 2: [13.0], 3: [4.0]}


def test_a_step_asked_for_again_is_one_step_for_forecasts_and_for_the_trace(tmp_path: Path) -> None:
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    steps = [(0, "plan", 0), (1, "search", 2), (2, "code", 0), (3, "join", 1)]
    for workflow in range(20):
        for step, agent, aborted in steps:
            sent = {"workflow_type": "t", "workflow_id": f"w{workflow}", "agent": agent, "step": step}
            for attempt in range(aborted + 1):
                name = f"w{workflow}.{step}.{attempt}"
                end = step == 3 and attempt == aborted
                scheduler.add_request(ask(name, list(range(40 * step + 30)), 5, workflow_end=end, **sent))
                if attempt < aborted:
                    engine.step()
                    engine.abort(name)
                else:
                    engine.run()
    counts = scheduler.presage_status()["counts"]
    scheduler.shutdown()
    found = rows(tmp_path)
    assert [row["agent"] for row in found] == [agent for _, agent, _ in steps] * 20
    assert {(row["step"], row["output_tokens"], row["complete"]) for row in found} == {(n, 5, True) for n in range(4)}
    assert not [name for name in counts if "missed" in name]
    made = read_forecasts(tmp_path / "r").to_pylist()
    (latest,) = {tuple(row["remaining_tokens"]) for row in made[-12:] if row["step"] == 0 and row["moment"] == PREFILL}
    assert latest == (20.0,), "four steps of five tokens, whatever was tried"


def test_the_tools_that_a_parsed_answer_calls_are_recorded_with_its_step(tmp_path: Path) -> None:
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    called = [["search", "read"], [], None]
    for step, tools in enumerate(called):
        sent = {"workflow_type": "retry", "workflow_id": "w", "agent": AGENTS[step], "step": step}
        scheduler.add_request(ask(f"r{step}", list(range(40)), 3, **sent))
        engine.run()
        if tools is not None:
            assert scheduler.step_answered("retry", "w", AGENTS[step], step, "tool_calls", tools, 0)
    assert scheduler.workflow_ended("retry", "w")
    scheduler.shutdown()
    assert [row["tools_called"] for row in rows(tmp_path)] == called


def test_an_engine_that_only_reads_the_prompt_records_and_learns_nothing_of_the_step(tmp_path: Path) -> None:
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    handed_over = {"do_remote_decode": True, "do_remote_prefill": False}
    for place, params in enumerate((handed_over, None)):
        sent = {"workflow_type": "t", "workflow_id": f"w{place}", "agent": "a", "workflow_end": True}
        scheduler.add_request(ask(f"r{place}", list(range(40)), 1, **sent, kv_transfer_params=params))
        engine.run()
    status = scheduler.presage_status()
    scheduler.shutdown()
    assert status["counts"]["steps that another engine answers"] == 1
    assert [row["workflow_id"].split("@")[0] for row in rows(tmp_path)] == ["w1"]
    assert engine.ended == ["r0", "r1"]


def test_counts_learn_the_end_of_workflows_that_say_so(tmp_path: Path) -> None:
    scheduler = recording(tmp_path)
    serve(Engine(scheduler), 16)
    scheduler.shutdown()
    made = read_forecasts(tmp_path / "r")
    ends = [
        row["probabilities"][len(row["agents"])]
        for row in made.to_pylist()
        if row["step"] == 2 and row["source"] == "back-off"
    ]
    assert ends[-1] > 0.8


def test_it_records_where_no_policy_is_on_and_changes_nothing(tmp_path: Path) -> None:
    logs = []
    for folder, settings in (("a", {}), ("b", {"recorder": {"folder": str(tmp_path / "b" / "r")}})):
        (tmp_path / folder).mkdir()
        presage = {**OFF, "next_agent": None, "remaining_length": None, **settings}
        scheduler = build(tmp_path / folder / "m", SyncWorkflowScheduler, blocks=60, presage=presage, seqs=8)
        engine = Engine(scheduler)
        serve(engine, 12)
        scheduler.shutdown()
        logs.append((engine.log, engine.said))
    assert logs[0] == logs[1]
    assert len(rows(tmp_path / "b")) == 36


def test_ends_are_told_as_they_came(tmp_path: Path) -> None:
    from turns import Clock

    clock = Clock()
    kind = type("Clocked", (SyncWorkflowScheduler,), {"clock": clock})
    scheduler = recording(tmp_path, kind)
    engine = Engine(scheduler)
    for workflow in ("said", "told", "silent", "aborted"):
        send(engine, workflow, 0, workflow_end=workflow == "said")
        if workflow == "aborted":
            for _ in range(2):
                engine.step()
            engine.abort("aborted.0")
        engine.run()
    assert scheduler.workflow_ended("retry", "told")
    clock.now = 601.0
    send(engine, "another", 0)
    engine.run()
    scheduler.shutdown()
    (folder,) = (tmp_path / "r").glob("engine-*")
    import pyarrow as pa

    ends = {}
    for path in folder.glob("ends-*"):
        with pa.OSFile(str(path)) as file:
            ends |= {row["workflow_id"]: row["how"] for row in pa.ipc.open_stream(file).read_all().to_pylist()}
    assert ends == {
        "said": RECORDED_FINISHED,
        "told": RECORDED_FINISHED,
        "silent": RECORDED_EXPIRED,
        "aborted": RECORDED_EXPIRED,
    }
    reasons = {row["workflow_id"].split("@")[0]: row["finish_reason"] for row in rows(tmp_path)}
    assert reasons["aborted"] == "abort"


def test_prompts_and_answers_are_recorded_only_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from presage.serving_hooks.vllm.engine import EngineConfig

    monkeypatch.setattr(EngineConfig, "decoder", lambda config: lambda ids: " ".join(map(str, ids)))
    scheduler = recording(tmp_path, recorder={"text": "on"})
    engine = Engine(scheduler)
    name = send(engine, "w", 0, workflow_end=True)
    prompt = list(scheduler.requests[name].prompt_token_ids)
    engine.run()
    scheduler.shutdown()
    (row,) = rows(tmp_path)
    assert row["input_text"] == " ".join(map(str, prompt))
    assert row["output_text"] == " ".join([str(token(name))] * 3)


@pytest.mark.parametrize("sent", [False, True], ids=["by reference", "pickled"])
@pytest.mark.parametrize("connector", [ALONE, TOGETHER], ids=["alone", "in a MultiConnector"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
@pytest.mark.parametrize("kept", ["prefill", "both"])
def test_whole_states_are_those_of_their_own_rows_with_nobody_who_reads_them(
    tmp_path: Path, kept: str, ahead: bool, connector: dict[str, Any], sent: bool
) -> None:
    kind = WorkflowScheduler if ahead else SyncWorkflowScheduler
    scheduler = recording(tmp_path, kind, recorder={"states": kept}, blocks=60, seqs=8, tokens=128, connector=connector)
    engine = Worked(scheduler, ahead, sent)
    prompts, outputs = {}, {}
    for n in range(40):
        prompts[f"r-{n}"] = [(n % 5) * 41 + i % 400 for i in range(20 + 13 * n)]
        outputs[f"r-{n}"] = 1 if n % 4 == 0 else 3 + n
        said = {"workflow_type": "t", "workflow_id": f"w-{n}", "agent": "coder", "workflow_end": True}
        scheduler.add_request(ask(f"r-{n}", prompts[f"r-{n}"], outputs[f"r-{n}"], arrival=float(n), **said))
    engine.run()
    assert any(preempted for _, _, preempted in engine.log)
    assert scheduler.presage_status()["states"] == steps.NOT_READ
    assert scheduler.presage_status()["recorder"]["states"] == steps.ON
    scheduler.shutdown()
    found = {f"r-{row['workflow_id'].split('@')[0].removeprefix('w-')}": row for row in rows(tmp_path)}
    assert len(found) == 40
    for name, prompt in prompts.items():
        at = len(prompt) - 1
        state = np.zeros(WIDTH, np.float16)
        state[:2] = number(name), at
        assert np.array_equal(np.asarray(found[name]["prefill_state"], np.float16), state)
        state[1] = at + outputs[name] - 1
        last = found[name].get("completion_state")
        assert last is None if kept == "prefill" else np.array_equal(np.asarray(last, np.float16), state)
    assert not scheduler.presage_status()["recorder"]["counts"].get("completion_state that never came")


def states_sent(scheduler: Any, engine: Worked) -> list[list[tuple[str, list[str]]]]:
    """Notes moments and request ids of the whole states that the worker sends, by iteration."""
    sent, build = list[list[tuple[str, list[str]]]](), engine.worker.build_connector_worker_meta

    def noted() -> Any:
        sent.append([])
        return build()

    def read(output: Any, computed: Any) -> Any:
        for states in engine_port.of_kind(States, engine_port.worker_metadata(computed)):
            sent[-1] += [(moment, list(ids)) for moment, (ids, _) in states.whole()]
        return update(output, computed)

    update, scheduler.update_from_output = scheduler.update_from_output, read
    engine.worker.build_connector_worker_meta = noted
    return sent


@pytest.mark.parametrize("kept", ["prefill", "both"])
def test_only_the_rows_of_finished_requests_are_sent_and_none_that_nobody_wants(tmp_path: Path, kept: str) -> None:
    scheduler = recording(tmp_path, recorder={"states": kept}, connector=ALONE)
    engine = Worked(scheduler)
    sent = states_sent(scheduler, engine)
    for name, tokens in (("r-7", 3), ("r-8", 5), ("r-9", 50)):
        scheduler.add_request(ask(name, list(range(40)), tokens, workflow_type="t", workflow_id=name, agent="coder"))
    scheduler.add_request(ask("nobody-1", list(range(40)), 3))
    for _ in range(8):
        engine.step()
    engine.abort("r-9")
    engine.run()
    scheduler.shutdown()
    last = [(COMPLETION, ["r-7"])], [], [(COMPLETION, ["r-8"])]
    assert sent[0] == [(PREFILL, ["r-7", "r-8", "r-9"])]
    assert sent[1:] == [[], [], *(last if kept == "both" else ([], [], [])), *([[]] * (len(sent) - 6))]
    counts = scheduler.presage_status()["recorder"]["counts"]
    assert counts.get("completion_state that never came") == (1 if kept == "both" else None), "of the aborted one"


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_a_worker_keeps_the_rows_of_iterations_that_are_not_read_and_of_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    kind = WorkflowScheduler if ahead else SyncWorkflowScheduler
    scheduler = recording(tmp_path, kind, recorder={"states": "both"}, connector=ALONE)
    engine = Worked(scheduler, ahead)
    scheduler.add_request(ask("r-7", list(range(40)), 200, workflow_type="t", workflow_id="w", agent="coder"))
    bind, unread, kept = engine.worker.bind_connector_metadata, set[int](), list[int]()

    def noted(meta: Any) -> None:
        unread.difference_update([iteration for iteration in unread if iteration <= meta.read])
        unread.update({meta.iteration} - {0})
        kept.append(len(unread))
        bind(meta)

    engine.worker.bind_connector_metadata = noted
    for _ in range(40):
        engine.step()
    assert max(kept) == 1 + ahead
    monkeypatch.setattr(steps.RequestStates, "read", lambda *_: None)
    for _ in range(40):
        engine.step()
    assert max(kept) == 16
    engine.run()
    scheduler.shutdown()
    (row,) = rows(tmp_path)
    assert (row["prefill_state"][:2], row.get("completion_state")) == ([7, 39], None), "a wrong row is worse than none"


def test_whole_states_come_beside_the_projected_ones(tmp_path: Path) -> None:
    from test_hidden_states import Reads

    reads = Reads()
    kind = hooked(SyncWorkflowScheduler, reads)
    scheduler = recording(tmp_path, kind, recorder={"states": "both"}, connector=ALONE)
    engine = Worked(scheduler)
    scheduler.add_request(ask("r-7", list(range(40)), 3, workflow_type="t", workflow_id="w-7", agent="coder"))
    engine.run()
    scheduler.shutdown()
    assert (reads.prefill, reads.completion) == ([("w-7", [7, 39])], [("w-7", [7, 41])])
    (row,) = rows(tmp_path)
    assert (row["prefill_state"][:2], row["completion_state"][:2]) == ([7, 39], [7, 41])


def test_without_a_way_for_states_that_is_said_and_the_rest_is_recorded(tmp_path: Path) -> None:
    scheduler = recording(tmp_path, recorder={"states": "both"})
    serve(Engine(scheduler), 2)
    assert scheduler.presage_status()["recorder"]["states"] == steps.NO_WAY
    scheduler.shutdown()
    assert len(rows(tmp_path)) == 6


@pytest.mark.parametrize("method", ["begun", "completed", "forecast", "ended"])
def test_a_recorder_that_raises_is_off_and_the_engine_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the text of a prompt")

    monkeypatch.setattr(Recorder, method, fail)
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    sent = serve(engine, 12)
    status = scheduler.presage_status()
    assert engine.ended == sorted(sent, key=engine.ended.index)
    assert len(engine.ended) == 36
    assert not status["recorder"]["on"]
    assert status["counts"]["recorder: RuntimeError"] == 1
    assert status["on"] == {"priority": True, "eviction": True, "admission": True}
    scheduler.shutdown()


def test_a_folder_that_is_removed_and_one_that_cannot_be_made_stop_no_request(tmp_path: Path) -> None:
    scheduler = recording(tmp_path)
    engine = Engine(scheduler)
    serve(engine, 8)
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
    (tmp_path / "r").write_text("a file where the folder was")
    serve(engine, 8, first=8)
    scheduler.shutdown()
    assert len(engine.ended) == 48
    counts = scheduler.presage_status()["recorder"]["counts"]
    assert sum(count for name, count in counts.items() if name.startswith(("lost", "not written", "dropped"))) > 0


def test_a_source_by_chance_is_recorded_as_it_was(tmp_path: Path) -> None:
    scheduler = recording(tmp_path, hooked(SyncWorkflowScheduler, Noise(0)))
    serve(Engine(scheduler), 4)
    scheduler.shutdown()
    made = read_forecasts(tmp_path / "r")
    expected = Noise(0)
    assert np.allclose(made["probabilities"].to_pylist()[0], expected.on_prefill().probabilities.ravel())
