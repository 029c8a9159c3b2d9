"""A further kind of predictor: one entry of `KINDS` makes it known to artefacts, commands, registry and report."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import pytest
from cli_samples import GOOD, Ran, run, write
from registry_database import new_database

from presage.cli.kinds import KindCommand
from presage.errors import ArtefactError
from presage.predictor_kinds import KINDS, Kind
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.registry.gates import Gate, plain
from presage.report.blocks import Document, Section, Text
from presage.report.files import write_report


class CountPredictor:
    """Forecasts how many steps there have been."""

    training_data: ClassVar[dict[str, Any]] = {"digest": "sha256:none"}

    @classmethod
    def load(cls, folder: Path) -> CountPredictor:
        read_artefact(folder, kind="count")
        return cls()

    def save(self, folder: Path) -> None:
        write_artefact(folder, kind="count", config={}, tensors={}, training_data=self.training_data)

    def forecast(self, steps: list[dict[str, Any]]) -> SimpleNamespace:
        forecast = {"source": "champion", "evidence": 0, "steps": len(steps)}
        return SimpleNamespace(to_dict=lambda: forecast, prediction=str(len(steps)))


def count(name: str = "counter") -> None:
    """Train the counter."""
    print(f"trained {name}")


def page(metrics: Mapping[str, Any]) -> Document:
    return Document("Counter", f"It counted {metrics['workflows']} workflows.", [Section("Figures", [Text("None.")])])


def evaluate(predictor: Any, table: Any, seed: int) -> SimpleNamespace:
    found = {"kind": "count", "workflows": 6}
    return SimpleNamespace(evaluation=SimpleNamespace(to_dict=lambda: found), latency_us=1.0)


def gates(*_: object) -> list[Gate]:
    return [plain("counts", True, "it does")]


COUNT = KindCommand(
    train=count,
    examples="",
    advice="",
    forecast=lambda data, called, rows: [f"{called}: {data['steps']} of {len(rows)}"],
)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The artefact of a kind that this module declares."""
    kind = Kind(
        "count",
        load=CountPredictor.load,
        evaluate=evaluate,
        gates=gates,
        report=page,
        headline=lambda _: {},
        legend="",
        command=f"{__name__}:COUNT",
        types=lambda _: ("t",),
        held_out=lambda table, _: (table, 0),
    )
    monkeypatch.setitem(KINDS, kind.name, kind)
    CountPredictor().save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # run as a module, and imported before
def test_one_declaration_makes_a_kind_known_everywhere(counter: Path, tmp_path: Path) -> None:
    app = runpy.run_module("presage.cli.train_predictor")["app"]
    assert "trained mine" in Ran(app, "count", "--name", "mine").out

    traces = write(tmp_path / "traces.jsonl", GOOD)
    assert run("evaluate", counter, traces, "--json").json["workflows"] == 6
    assert "It counted 6 workflows." in run("evaluate", counter, traces).out
    steps = write(tmp_path / "steps.jsonl", GOOD[:2])
    assert run("forecast", counter, steps, "--json").json["steps"] == 2
    assert f"{counter}: 2 of 2" in run("forecast", counter, steps).out

    write_report(tmp_path / "report", {"kind": "count", "workflows": 6})
    assert "It counted 6 workflows." in (tmp_path / "report" / "report.md").read_text()


def test_the_registry_serves_and_promotes_it(counter: Path, tmp_path: Path) -> None:
    import mlflow.pyfunc

    from presage.registry.connect import open_registry
    from presage.registry.package import register

    uri = new_database(tmp_path / "mlflow.db")
    registry = open_registry(uri)
    metrics = {"kind": "count", "workflows": 6}
    steps = GOOD[:3]
    register(registry, counter, name="counter", metrics=metrics, params={}, tags={}, input_example=steps)
    served = mlflow.pyfunc.load_model(registry.client.get_model_version_download_uri("counter", "1"))
    assert [one["steps"] for one in served.predict(pd.DataFrame(steps))["forecast"]] == [3]
    held = write(tmp_path / "held.jsonl", GOOD)
    promoted = run("promote", "counter", "--version", 1, "--traces", held, "--tracking-uri", uri, "--json")
    assert promoted.code == 0, promoted.err
    assert promoted.json["moved"]
    assert {gate["name"] for gate in promoted.json["gates"]} == {"counts", "baselines", "workflow-types"}


def test_a_kind_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ArtefactError,
        match="kinds next-agent, remaining-length, context-growth, return-time, profile, router",
    ):
        write_artefact(tmp_path / "model", kind="count", config={}, tensors={}, training_data={})
