"""A running scheduler follows its registry: newer versions take over between two iterations, bad ones do not."""

import logging
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from registry_database import new_database
from test_hidden_states import ALONE, WIDTH, Reads, Worked
from tiny_model import STATE_SIZE, Tiny
from told import send, serve
from vllm_samples import Engine, ask, build

from presage.features.moment import COMPLETION, PREFILL
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.registry.connect import Registry, open_registry
from presage.registry.package import register
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow, pytest.mark.usefixtures("patient")]

ROW = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
BROKEN = 3
"""A version whose files are sound; the text encoder that it was trained with is gone."""


@pytest.fixture(scope="module")
def registry(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    root = tmp_path_factory.mktemp("registry")
    opened = open_registry(new_database(root / "mlflow.db"))
    artefact = read_artefact(tiny.folder)
    states = {"kind": "encoder", "sizes": {"prefill": STATE_SIZE, "completion": STATE_SIZE}}
    states |= {"encoder": str(root / "gone"), "encoder_digest": "sha256:0"}
    config = artefact.config | {"states": states}
    write_artefact(root / "broken", kind="next-agent", config=config, tensors=artefact.tensors, training_data={})
    for folder in (tiny.folder, tiny.folder, root / "broken"):
        register(opened, folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[ROW])
    return opened


def following(registry: Registry, folder: Path, **more: Any) -> tuple[Any, Engine]:
    """Looks are taken by hand: none comes by itself within a test."""
    settings = {"registry": registry.uri, "remaining_length": None, "reload_s": 1e6, **more}
    scheduler = build(folder / "m", SyncWorkflowScheduler, blocks=400, presage=settings)
    return scheduler, Engine(scheduler)


def promote(registry: Registry, version: int | None) -> None:
    if version is None:
        registry.client.delete_registered_model_alias("next-agent", "champion")
    else:
        registry.client.set_registered_model_alias("next-agent", "champion", str(version))


def said(scheduler: Any) -> str:
    return str(scheduler.presage_status()["models"]["next-agent"])


def test_an_engine_without_a_model_gets_one_a_newer_one_and_never_a_broken_one(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    promote(registry, None)
    scheduler, engine = following(registry, tmp_path)
    look = scheduler.upkeep.reload.look
    serve(engine, 2)
    assert said(scheduler).startswith("none: ")
    assert "forecast: champion" not in scheduler.presage_status()["counts"]

    promote(registry, 1)
    look()
    assert said(scheduler).endswith("version 1"), "an idle engine takes over too"
    serve(engine, 2, first=2)
    assert scheduler.presage_status()["counts"]["forecast: champion"] == 12

    send(engine, "over", 0)
    engine.run()
    promote(registry, 2)
    look()
    send(engine, "new", 0)  # between two iterations nothing has changed yet
    engine.run()
    assert said(scheduler).endswith("version 2")
    assert scheduler.presage_status()["reload"]["workflows_under_older"] == 2
    for step in (1, 2):
        for workflow in ("over", "new"):
            send(engine, workflow, step, workflow_end=step == 2)
        engine.run()
    status = scheduler.presage_status()
    assert (status["reload"]["workflows_under_older"], status["reload"]["renewed"]) == (0, 2)
    assert status["counts"]["forecast: champion"] == 24
    serve(engine, 2, first=4)

    promote(registry, BROKEN)
    with caplog.at_level(logging.WARNING):
        look()
        look()
    assert said(scheduler).endswith("version 2")
    assert list(scheduler.presage_status()["reload"]["refused"]) == ["next-agent version 3"]
    (refusal,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert refusal.startswith("next-agent version 3 is refused, version 2 stays: ")
    serve(engine, 2, first=6)
    assert scheduler.presage_status()["counts"]["forecast: champion"] == 48

    promote(registry, 1)
    look()
    assert said(scheduler).endswith("version 1"), "rolled back"
    promote(registry, None)
    look()
    status = scheduler.presage_status()
    assert status["models"]["next-agent"].endswith("version 1")
    assert "version 1 stays" in status["reload"]["troubles"]["next-agent"]
    assert all(status["on"].values())
    assert "reload of models" not in " ".join(status["counts"])
    live = status["monitor"]["workflow_types"]["retry"]
    assert set(live) == {"counts", "version 1", "version 2"} or set(live) == {"version 1", "version 2"}
    scheduler.shutdown()


def test_never_is_never(registry: Registry, tmp_path: Path) -> None:
    promote(registry, 1)
    before = set(threading.enumerate())  # those of other tests may not have ended yet
    scheduler, _ = following(registry, tmp_path, reload_s=None)
    promote(registry, 2)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "presage-reload"]
    assert said(scheduler).endswith("version 1")
    assert scheduler.presage_status()["reload"]["on"] is False


def test_a_changed_workflow_type_is_noticed_told_once_and_forecast_by_counts(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    promote(registry, 1)
    scheduler, engine = following(registry, tmp_path)
    with caplog.at_level(logging.WARNING):
        serve(engine, 320)
        assert scheduler.presage_status()["monitor"]["alarms"] == {}
        for first in range(320, 520, 8):
            for step in range(3):
                for number in range(first, first + 8):
                    agent = "stranger" if step == 1 else ("planner", "", "tester")[step]
                    send(engine, f"w{number}", step, agent=agent, workflow_end=step == 2)
                engine.run()
            status = scheduler.presage_status()
            if status["monitor"]["alarms"]:
                break
    assert list(status["monitor"]["alarms"]) == ["retry"]
    before = status["counts"]["forecast: back-off"]
    champions = status["counts"]["forecast: champion"]
    serve(engine, 4, first=1000)
    status = scheduler.presage_status()
    assert status["counts"]["forecast: champion"] == champions
    assert status["counts"]["forecast: back-off"] == before + 24
    assert sum("'retry' has changed" in record.getMessage() for record in caplog.records) == 1
    promote(registry, 2)
    scheduler.upkeep.reload.look()
    assert scheduler.presage_status()["monitor"]["alarms"] == {}, "another version is held against figures of its own"
    serve(engine, 1, first=2000)
    assert scheduler.presage_status()["counts"]["forecast: champion"] == champions + 6


def test_truth_can_be_switched_off(registry: Registry, tmp_path: Path) -> None:
    promote(registry, 1)
    scheduler, engine = following(registry, tmp_path, truth=False)
    serve(engine, 2)
    assert scheduler.presage_status()["monitor"] is None


class Turned(Reads):
    """After a renewal it reads other numbers of a state: the second, then the first."""

    turned: ClassVar[Any] = {
        moment: (np.eye(WIDTH, 2, dtype=np.float32)[:, ::-1].copy(), np.zeros(2, np.float32))
        for moment in (PREFILL, COMPLETION)
    }

    def __init__(self) -> None:
        super().__init__()
        self.new = False

    def start(self) -> None:
        pass

    def renew(self) -> bool:
        new, self.new = self.new, False
        if new:
            self.projections = self.turned  # type: ignore[misc]
        return new

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def test_states_are_projected_for_the_version_that_reads_them(tmp_path: Path) -> None:
    reads = Turned()

    class Hooked(SyncWorkflowScheduler):
        def forecasts(self, config: PresageConfig) -> Forecasts:
            return Forecasts(reads, None, upkeep=reads)

    scheduler = build(tmp_path / "m", Hooked, blocks=200, presage={}, connector=ALONE)
    engine = Worked(scheduler)
    for n in (1, 2):
        scheduler.add_request(ask(f"r-{n}", list(range(40)), 3, workflow_type="t", workflow_id=f"w-{n}", agent="a"))
        engine.run()
        reads.new = True
    assert reads.prefill == [("w-1", [1, 39]), ("w-2", [39, 2])]
    assert reads.completion == [("w-1", [1, 41]), ("w-2", [41, 2])]
    assert scheduler.presage_status()["states"] == "on"
