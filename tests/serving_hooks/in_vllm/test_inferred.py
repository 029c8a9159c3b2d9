"""Clients that name nothing: the engine infers their workflows, retains their blocks, and measures how well it does."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from vllm_samples import BLOCK, HASHER, Engine, Request, ask, build

from presage.datasets.read import read_traces
from presage.serving_hooks.identity.inference import MEASURED
from presage.serving_hooks.status import IdentityStatus, read_status
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.observed import OBSERVED, REQUEST
from presage.serving_hooks.workflows.tenants import ANONYMOUS, ARGUMENT

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

SYSTEM = random.Random(0).choices(range(500), k=5 * BLOCK)


def drawn(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=n)


class Loop:
    """A client in a loop: every prompt is the history so far.

    Attributes:
        workflow: type and id of the workflow of its latest request; None if that was of none.
    """

    def __init__(self, engine: Engine, number: int, **sent: Any) -> None:
        self.engine, self.number, self.turn, self.sent = engine, number, 0, sent
        self.history = SYSTEM + drawn(number, 40)
        self.workflow: tuple[str, str] | None = None

    def step(self, salt: str | None = None) -> None:
        name = f"{self.number}-{self.turn}"
        self.engine.scheduler.add_request(asked(name, self.history, salt, **self.sent))
        running = self.engine.scheduler.workflow_table.step(name)
        self.workflow = None if running is None else (running.step.sent[0], running.step.workflow_id)
        self.engine.run()
        self.turn += 1
        self.history = [*self.history, *self.engine.said[name], *drawn(1000 * self.number + self.turn, 30)]


def asked(name: str, prompt: Sequence[int], salt: str | None = None, **sent: Any) -> Request:
    request = ask(name, list(prompt), 20, **sent)
    if salt is None:
        return request
    return Request(name, list(prompt), request.sampling_params, None, 0.0, cache_salt=salt, block_hasher=HASHER)


def identity(engine: Engine) -> IdentityStatus:
    status = read_status(engine.scheduler.presage_status())
    assert status is not None
    assert status.identity is not None
    return status.identity


def built(tmp_path: Path, kind: type[Any] = SyncWorkflowScheduler, **presage: Any) -> Engine:
    return Engine(build(tmp_path, kind, blocks=400, presage=presage), ahead=kind is WorkflowScheduler)


@pytest.mark.parametrize("kind", [SyncWorkflowScheduler, WorkflowScheduler])
def test_unchanged_clients_in_loops_are_workflows_whose_blocks_are_known(tmp_path: Path, kind: type[Any]) -> None:
    engine = built(tmp_path, kind)
    loops = [Loop(engine, number) for number in range(1, 6)]
    for _ in range(3):
        for loop in loops:
            loop.step()
    assert len({loop.workflow for loop in loops}) == len(engine.scheduler.workflow_table) == 5
    assert identity(engine) == IdentityStatus(True, 5, {"new": 5, "answered": 10})
    for loop in loops:
        assert loop.workflow is not None
        blocks = engine.scheduler.explain(*loop.workflow)["blocks"]
        assert blocks["blocks"] >= (len(loop.history) - 50) // BLOCK


def test_workflows_that_are_known_from_their_first_step_on_are_recorded(tmp_path: Path) -> None:
    engine = built(tmp_path, recorder={"folder": str(tmp_path / "recording")})
    for number in range(1, 7):
        loop = Loop(engine, number)
        for _ in range(3):
            loop.step()
    assert loop.workflow is not None
    for workflow in list(engine.scheduler.workflow_table):
        engine.scheduler.workflow_table.end(workflow.key, EndReason.FINISHED)
    engine.scheduler.shutdown()
    table = read_traces([tmp_path / "recording"]).table
    rows = [row for row in table.to_pylist() if row["workflow_id"].startswith(f"{loop.workflow[1]}@")]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["agent"] for row in rows} == {f"agent-{loop.workflow[0].removeprefix('app-')}"}


def test_a_recording_tells_which_answer_each_step_goes_on_from(tmp_path: Path) -> None:
    engine = built(tmp_path, recorder={"folder": str(tmp_path / "recording")})
    loop = Loop(engine, 1)
    loop.step()
    branches = {name: [*loop.history, *drawn(seed, 30)] for seed, name in enumerate(("left", "right"))}
    for turn in range(2):
        for name, history in branches.items():
            engine.scheduler.add_request(asked(f"{name}-{turn}", history))
        engine.run()
        for name, history in branches.items():
            history += [*engine.said[f"{name}-{turn}"], *drawn(turn, 30)]
    engine.scheduler.shutdown()
    [path] = (tmp_path / "recording").rglob("steps-*.arrows")
    steps = pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    assert {row["step"]: row["goes_on_from"] for row in steps} == {0: None, 1: 0, 2: 0, 3: 1, 4: 2}


def test_the_answer_to_an_unnamed_request_is_told_by_the_servers_name_of_it(tmp_path: Path) -> None:
    engine = built(tmp_path)
    loop = Loop(engine, 1)
    for turn in range(3):
        loop.sent = {REQUEST: f"name-{turn}"}
        loop.step()
    scheduler = engine.scheduler
    for earlier in ("name-0", "name-1"):
        assert not scheduler.request_answered(earlier, "stop", []), "another step has come since"
    assert scheduler.request_answered("name-2", "tool_calls", ["bash"])
    assert not scheduler.request_answered("nobody's", "stop", [])


@pytest.mark.parametrize("apart", ["salt", "tenant", "setting", "anonymous"])
def test_what_keeps_workflows_apart(tmp_path: Path, apart: str) -> None:
    engine = built(tmp_path, **({"infer_workflows": False} if apart == "setting" else {}))
    loop = Loop(engine, 1, **({ARGUMENT: "key-0"} if apart == "tenant" else {}))
    loop.step(salt="one" if apart == "salt" else None)
    if apart == "tenant":
        loop.sent = {ARGUMENT: "key-1"}
    if apart == "anonymous":
        loop.sent = {ARGUMENT: ANONYMOUS}
    first = loop.workflow
    loop.step(salt="other" if apart == "salt" else None)
    if apart in ("salt", "tenant"):
        assert loop.workflow != first
    else:
        assert loop.workflow is None


def test_a_session_that_the_server_saw_is_a_workflow_at_once(tmp_path: Path) -> None:
    engine = built(tmp_path)
    observed = {"session": "s1", "agent": ["planner", 0.95], "workflow_type": "app-1"}
    loop = Loop(engine, 1, **{OBSERVED: observed})
    loop.step()
    assert loop.workflow == ("app-1", "s1")


def test_names_of_clients_win_and_measure_the_inference(tmp_path: Path) -> None:
    engine = built(tmp_path)
    loops = [
        Loop(engine, number, workflow_type="t", workflow_id=f"w{number}", agent="a") for number in range(8 * MEASURED)
    ]
    for _ in range(3):
        for loop in loops:
            loop.step()
            assert loop.workflow == ("t", f"w{loop.number}")
    found = identity(engine)
    assert (found.inferred, found.sources) == (0, {})
    assert found.checked.keys() == {"right"}
    assert found.precision == 1.0


def test_a_failure_of_the_inference_leaves_requests_without_a_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built(tmp_path)

    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("presage.serving_hooks.vllm.engine.prompt_of", fails)
    loop = Loop(engine, 1)
    for _ in range(2):
        loop.step()
    assert loop.workflow is None
    assert not identity(engine).on
    named = Loop(engine, 2, workflow_type="t", workflow_id="w", agent="a")
    named.step()
    assert named.workflow == ("t", "w")
