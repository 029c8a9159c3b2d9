"""Rows go to the worker's end and back on vLLM's own scheduler: the right ones, in time, of the right requests.

What the model would compute is made up: a row says whose it is and at which position it stands.
"""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its own scheduler")

from vllm.config import ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm_samples import QWEN, AsyncScheduler, Engine, Scheduler, ask, build

from presage.errors import EngineError
from presage.features.moment import COMPLETION, PREFILL
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm import engine, engine_worker
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.hidden_states import steps
from presage.serving_hooks.vllm.hidden_states.connector import States, StatesConnector
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler
from presage.serving_hooks.vllm.start import engine_check
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.live import LiveForecast
from presage.testing.forecasts import Noise

pytestmark = pytest.mark.vllm

ALONE = {
    "kv_connector": "StatesConnector",
    "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
    "kv_role": "kv_producer",
}
TOGETHER = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [ALONE, ALONE]},
}
WIDTH = int(str(QWEN["hidden_size"]))
FIRST_TWO = np.eye(WIDTH, 2, dtype=np.float32)


class Reads(Noise):
    """Forecasts by chance of somebody who reads states: whose, and at which position."""

    projections: ClassVar[Any] = {moment: (FIRST_TWO, np.zeros(2, np.float32)) for moment in (PREFILL, COMPLETION)}

    def __init__(self) -> None:
        super().__init__(0)
        self.awaits = False
        self.prefill: list[tuple[str, list[float]]] = []
        self.completion: list[tuple[str, list[float]]] = []

    def await_states(self) -> None:
        self.awaits = True

    def on_prefill_state(self, workflow: Workflow, projected: Any, of: LiveForecast) -> LiveForecast:
        self.prefill.append((workflow.step.workflow_id, projected.tolist()))
        return self.on_prefill()

    def on_completion(self, workflow: Workflow, **told: Any) -> LiveForecast:
        if "projected" in told:
            self.completion.append((workflow.step.workflow_id, told["projected"].tolist()))
        return self.on_prefill()


class OtherWidth(Reads):
    """Learnt of a wider model."""

    projections: ClassVar[Any] = {PREFILL: (np.eye(2 * WIDTH, 2, dtype=np.float32), np.zeros(2, np.float32))}


class Worked(Engine):
    """With the worker's end of the connector, which computes nothing before its metadata is asked for.

    `sent` pickles what comes back, as an engine with processes of its own does.
    """

    def __init__(self, scheduler: Any, ahead: bool = False, sent: bool = False, spoiled: float = 0.0) -> None:
        super().__init__(scheduler, ahead)
        self.worker = KVConnectorFactory.create_connector(
            config=scheduler.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=scheduler.kv_cache_config
        )
        self.sent, self.spoiled = sent, spoiled
        self.back = 0

    def run(self, most: int = 100_000) -> None:
        """As the engine's loop, which tells its worker of the last requests that have finished."""
        super().run(most)
        self.step()
        self.drain()
        del self.log[-1]  # of nothing

    def _computed(self, output: Any) -> Any:
        computed = super()._computed(output)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        meta = self.worker.build_connector_worker_meta()
        reached = dict(engine.reached(output))
        rows = torch.stack([self.row(name, reached[name] - 1) for name in computed.req_ids] or [torch.empty(WIDTH)])
        for tap in engine.of_kind(StatesConnector, self.worker):
            tap.captured(computed.req_ids, lambda: rows)
        self.back += meta is not None
        computed.kv_connector_output = KVConnectorOutput(
            kv_connector_worker_meta=pickle.loads(pickle.dumps(meta)) if self.sent else meta
        )
        return computed

    def row(self, request_id: str, position: int) -> torch.Tensor:
        """What the model computes of a request at a position, float32 [WIDTH]."""
        row = torch.full((WIDTH,), self.spoiled)
        row[0], row[1] = number(request_id), position
        return row


def number(name: str) -> int:
    return int(name.rsplit("-", 1)[-1])


def hooked(kind: type[Any], reads: Any) -> type[Any]:
    class Hooked(kind):  # type: ignore[misc]
        def forecasts(self, config: PresageConfig) -> Forecasts:
            return Forecasts(reads, None)

    return Hooked


def served(scheduler: Any, engine: Engine) -> dict[str, tuple[list[float], list[float]]]:
    """Runs 40 workflows of one step; what their states must say. Some are aborted."""
    wanted = {}
    for n in range(40):
        prompt = [(n % 5) * 41 + i % 400 for i in range(20 + 13 * n)]
        tokens = 1 if n % 4 == 0 else 3 + n
        sent = {} if n % 10 == 9 else {"workflow_type": "t", "workflow_id": f"w-{n}", "agent": "coder"}
        scheduler.add_request(ask(f"r-{n}", prompt, tokens, arrival=float(n), **sent))
        if sent:
            at = len(prompt) - 1
            wanted[f"w-{n}"] = [n, at], [n, at + tokens - 1]
    for _ in range(6):
        engine.step()
    engine.abort("r-6", "r-31")
    engine.run()
    for name in ("w-6", "w-31"):
        del wanted[name]
    return wanted


@pytest.mark.parametrize("sent", [False, True], ids=["by reference", "pickled"])
@pytest.mark.parametrize("connector", [ALONE, TOGETHER], ids=["alone", "in a MultiConnector"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
def test_every_step_has_the_states_of_its_own_rows(
    tmp_path: Path, ahead: bool, connector: dict[str, Any], sent: bool
) -> None:
    reads = Reads()
    kind = hooked(WorkflowScheduler if ahead else SyncWorkflowScheduler, reads)
    presage = {"infer_workflows": False}  # each request is of the workflow that it names
    scheduler = build(tmp_path / "m", kind, blocks=60, presage=presage, seqs=8, tokens=128, connector=connector)
    engine = Worked(scheduler, ahead, sent)
    wanted = served(scheduler, engine)
    assert reads.awaits
    assert any(preempted for _, _, preempted in engine.log)
    assert {name: state for name, state in reads.prefill if name in wanted} == {n: [*p] for n, (p, _) in wanted.items()}
    assert len(reads.prefill) == len(dict(reads.prefill))
    assert dict(reads.completion) == {name: [*last] for name, (_, last) in wanted.items()}
    counts = scheduler.presage_status()["counts"]
    assert scheduler.presage_status()["states"] == "on"
    assert counts["completion states: used"] == len(wanted)
    assert "prefill states: missing" not in counts
    assert all(scheduler.presage_status()["on"].values())


def test_what_is_no_number_is_left_out_and_the_engine_goes_on(tmp_path: Path) -> None:
    reads = Reads()
    scheduler = build(tmp_path / "m", hooked(SyncWorkflowScheduler, reads), blocks=200, presage={}, connector=ALONE)
    engine = Worked(scheduler, spoiled=float("nan"))
    served(scheduler, engine)
    assert (reads.prefill, reads.completion) == ([], [])
    assert scheduler.presage_status()["counts"]["completion states: missing"] > 30
    assert len(engine.ended) >= 38


def test_a_worker_that_fails_stops_telling_and_nothing_else(tmp_path: Path) -> None:
    reads = Reads()
    scheduler = build(tmp_path / "m", hooked(SyncWorkflowScheduler, reads), blocks=200, presage={}, connector=ALONE)
    engine = Worked(scheduler)
    engine.worker.captured = lambda ids, rows: StatesConnector.captured(engine.worker, ids, lambda: rows()[:, :3])
    served(scheduler, engine)
    assert (reads.prefill, reads.completion) == ([], [])
    assert len(engine.ended) >= 38


@pytest.mark.parametrize(
    ("reads", "connector", "presage", "told"),
    [
        (Noise(0), ALONE, {}, steps.NOT_READ),
        (Reads(), None, {}, steps.NO_CONNECTOR),
        (Reads(), ALONE, {"eviction": False}, steps.NO_EVICTION),
        (OtherWidth(), ALONE, {}, steps.OTHER_WIDTH),
    ],
    ids=["nobody reads", "no connector", "no eviction", "another width"],
)
def test_where_states_are_of_no_use_nothing_is_tapped(
    tmp_path: Path, reads: Any, connector: Any, presage: dict[str, Any], told: str
) -> None:
    kind = hooked(SyncWorkflowScheduler, reads)
    scheduler = build(tmp_path / "m", kind, blocks=200, presage=presage, connector=connector)
    assert scheduler.presage_status()["states"] == told
    engine = Worked(scheduler) if connector else Engine(scheduler)
    served(scheduler, engine)
    assert getattr(engine, "back", 0) == 0
    assert not [name for name in scheduler.presage_status()["counts"] if "states" in name]


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_under_another_scheduler_the_connector_does_nothing(tmp_path: Path, kind: type[Any]) -> None:
    scheduler = build(tmp_path / "m", kind, blocks=200, connector=ALONE)
    engine = Worked(scheduler, ahead=kind is AsyncScheduler)
    served(scheduler, engine)
    assert engine.back == 0


def test_decisions_are_those_of_an_engine_without_a_tap(tmp_path: Path) -> None:
    logs = []
    for connector in (None, ALONE):
        kind, presage = hooked(SyncWorkflowScheduler, Noise(0)), {"infer_workflows": False}
        scheduler = build(tmp_path / "m", kind, blocks=60, presage=presage, seqs=8, connector=connector)
        engine = Worked(scheduler) if connector else Engine(scheduler)
        served(scheduler, engine)
        logs.append((engine.log, engine.said))
    assert logs[0] == logs[1]


def test_states_of_two_workers_are_put_together() -> None:
    one, two = States(), States()
    one.add(PREFILL, ["a"], torch.ones(1, 2))
    two.add(PREFILL, ["b"], torch.zeros(1, 2))
    assert [(name, row.tolist()) for name, row in one.aggregate(two).rows(PREFILL)] == [("a", [1, 1]), ("b", [0, 0])]
    assert not list(one.rows(COMPLETION))


class Event:
    """Of a copy that is under way."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_row_is_waited_for_when_it_is_read_and_those_that_nobody_reads_are_not() -> None:
    states, prefill, completion = States(), Event(), Event()
    states.add(PREFILL, ["a"], torch.ones(1, 2), prefill)
    states.add(COMPLETION, ["b", "c"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), completion)
    states.add(PREFILL, ["d"], torch.ones(1, 2), whole=True)
    assert states.row(COMPLETION, "d") is states.row(PREFILL, "d") is None
    assert (prefill.waited, completion.waited) == (0, 0)
    assert [(moment, ids, rows.tolist()) for moment, (ids, rows) in states.whole()] == [(PREFILL, ["d"], [[1, 1]])]
    for _ in range(2):
        row = states.row(COMPLETION, "c")
        assert row is not None
        assert row.tolist() == [3, 4]
    assert (prefill.waited, completion.waited) == (0, 1)
    again = pickle.loads(pickle.dumps(states))
    assert (prefill.waited, completion.waited) == (1, 1), "what is sent has arrived"
    assert again.row(PREFILL, "a").tolist() == [1, 1]


class Bare(torch.nn.Module):
    """A model class that hands out no layers."""


def test_a_model_that_hands_out_no_layers_is_refused_before_it_serves() -> None:
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=Bare), vllm_config=SimpleNamespace(parallel_config=ParallelConfig())
    )
    with pytest.raises(EngineError, match=r"state_layer is 3, but .*: vLLM's Bare does not implement SupportsEagle3"):
        engine_worker.capture_layer(worker, 3)


def test_the_installed_workers_are_those_we_know() -> None:
    assert engine_check.differences(signatures=engine_worker.SIGNATURES, methods={}) == []
