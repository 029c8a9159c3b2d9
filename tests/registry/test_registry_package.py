"""A registered version: complete in the registry, data only, and served by MLflow as a table of steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
from registry_samples import METRICS, STEPS, EchoPredictor

from presage.errors import ArtefactError, RegistryError, TraceError
from presage.predictors.common.artefact import artefact_digest, find_pickles
from presage.registry.connect import Registry, attach, attached
from presage.registry.package import RegisteredVersion, headline, register
from presage.registry.promote import list_models
from presage.registry.resolve import resolve
from presage.registry.table import example_table, forecast_workflows, predict_steps

Register = Callable[[str], RegisteredVersion]


def local_folder(registry: Registry, made: RegisteredVersion) -> Path:
    return Path(registry.client.get_model_version_download_uri(made.name, str(made.version)))


def test_versions_are_counted_and_carry_the_facts(
    registry: Registry, registered: Register, artefact_folder: Path
) -> None:
    first, second = registered("counted"), registered("counted")
    assert (first.uri, second.uri) == ("models:/counted/1", "models:/counted/2")
    tags = registry.version("counted", 1).tags
    assert tags == {
        "presage.kind": "next-agent",
        "presage.digest": artefact_digest(artefact_folder),
        "presage.headline": "prefill 0.900 0.800",
    }
    run = registry.client.get_run(first.run_id)
    assert run.data.tags.items() >= tags.items()
    assert run.data.tags["presage.data_digest"] == "sha256:training"
    assert run.data.tags["team"] == "search"
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "0"
    assert run.data.params["version.mlflow"]
    assert run.data.metrics == {"workflows": 12.0, "prefill_accuracy_1": 0.9, "prefill_accuracy_2": 0.8}
    kept = {item.path for item in registry.client.list_artifacts(first.run_id)}
    assert kept == {"metrics.json", "report.md", "report.html"}


def test_only_the_registry_that_was_passed_in_is_touched(
    registry: Registry, registered: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow's global default, ./mlflow.db, would appear
    registered("confined")
    resolve("models:/confined/1", lambda: registry)
    list_models(registry)
    assert not list(tmp_path.iterdir())


def test_a_version_holds_code_as_text_and_data_and_nothing_else(registry: Registry, registered: Register) -> None:
    folder = local_folder(registry, registered("contents"))
    package = folder / "artifacts" / "package.zip"
    assert find_pickles(folder) == [package], "a zip archive, but of source"
    with ZipFile(package) as archive:
        assert {Path(name).suffix for name in archive.namelist()} == {".py"}
    assert {path.name for path in (folder / "artifacts" / "artefact").iterdir()} == {"config.json", "model.safetensors"}
    assert {path.name for path in (folder / "artifacts").iterdir()} == {"artefact", "package.zip"}
    assert (folder / "input_example.json").exists()
    required = (folder / "requirements.txt").read_text()
    assert "numba==" in required
    assert "torch" not in required
    assert "presage" not in required, "in no package index"


def test_mlflow_loads_and_serves_it_without_pickle(
    registry: Registry, registered: Register, echo: type[EchoPredictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc

    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    model = mlflow.pyfunc.load_model(str(local_folder(registry, registered("served"))))
    assert model.metadata.signature is not None
    answers = model.predict(pd.DataFrame(STEPS))
    assert answers[["workflow_id", "source", "evidence"]].to_dict("records") == [
        {"workflow_id": "w-1", "source": "champion", "evidence": 2},
        {"workflow_id": "w-2", "source": "champion", "evidence": 1},
    ]
    assert answers["forecast"][0]["horizons"] == [{"agents": {"planner": 0.75, "coder": 0.75}, "end": 0.25}]
    states = pd.DataFrame([{**step, "prefill_state": [0.5, 0.25], "unheard_of": 1} for step in STEPS])
    assert len(model.predict(states)) == 2
    some = pd.DataFrame([{**STEPS[0], "prefill_state": [0.5, 0.25]}, {**STEPS[1], "prefill_state": None}])
    assert len(model.predict(some)) == 1


def test_steps_reach_the_predictor_in_order_and_typed() -> None:
    predictor = EchoPredictor(0.5)
    table = pd.DataFrame(
        [
            {"workflow_type": "w", "workflow_id": "1", "step": 1, "agent": "b", "input_tokens": 3.0, "model": None},
            {
                "workflow_type": "v",
                "workflow_id": "1",
                "step": 0,
                "agent": "c",
                "prefill_state": np.ones(2, np.float16),
            },
            {"workflow_type": "w", "workflow_id": "1", "step": 0, "agent": "a", "noise": 9},
        ]
    )
    answers = forecast_workflows(predictor, table)
    first, second = predictor.seen
    assert first == [
        {"workflow_type": "w", "workflow_id": "1", "step": 0, "agent": "a"},
        {"workflow_type": "w", "workflow_id": "1", "step": 1, "agent": "b", "input_tokens": 3},
    ]
    assert isinstance(first[1]["input_tokens"], int)
    assert second[0]["prefill_state"].dtype == np.float32
    assert answers["workflow_id"].tolist() == ["1", "1"]


def test_a_table_without_a_column_or_a_value_is_named() -> None:
    with pytest.raises(TraceError, match="wanted agent as well"):
        forecast_workflows(EchoPredictor(0.5), pd.DataFrame(STEPS).drop(columns="agent"))
    with pytest.raises(TraceError, match="row 1: found no value for agent"):
        forecast_workflows(EchoPredictor(0.5), pd.DataFrame([STEPS[0], {**STEPS[1], "agent": None}]))
    with pytest.raises(TraceError, match="input example lacks workflow_type"):
        example_table([])


def test_predictions_are_one_a_row_in_the_order_of_the_table() -> None:
    table = pd.DataFrame([STEPS[1], STEPS[2], STEPS[0]], index=[7, 5, 3])
    predictor = EchoPredictor(0.5)
    assert predict_steps(predictor, table).to_dict() == {7: "coder", 5: "planner", 3: "planner"}
    assert [[step["agent"] for step in steps] for steps in predictor.seen] == [
        ["planner"],
        ["planner", "coder"],
        ["planner"],
    ]


def test_an_empty_table_has_no_answers() -> None:
    assert forecast_workflows(EchoPredictor(0.5), pd.DataFrame(STEPS).iloc[:0]).empty


def test_the_example_keeps_the_columns_of_the_signature() -> None:
    example = example_table([{**STEPS[0], "prefill_state": np.ones(2, np.float16), "output_tokens": None, "other": 1}])
    assert list(example.columns) == ["workflow_type", "workflow_id", "step", "agent", "input_tokens", "prefill_state"]
    assert example["prefill_state"][0] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a@b", "x" * 300])
def test_a_name_that_is_none_leaves_nothing(registry: Registry, artefact_folder: Path, name: str) -> None:
    with pytest.raises(RegistryError, match="wanted letters"):
        register(registry, artefact_folder, name=name, metrics={}, params={}, tags={}, input_example=STEPS)


def test_a_broken_artefact_is_not_registered(registry: Registry, artefact_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(artefact_folder, broken)
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(ArtefactError):
        register(registry, broken, name="broken", metrics={}, params={}, tags={}, input_example=STEPS)
    with pytest.raises(RegistryError, match="no model 'broken'"):
        registry.versions("broken")


def test_a_failure_on_the_way_leaves_no_version_and_a_failed_run(
    registry: Registry, artefact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refuse(*_: Any, **__: Any) -> None:
        raise MlflowException("out of luck")

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", refuse)
    with pytest.raises(RegistryError, match=r"registering 'unlucky' in sqlite.*: out of luck"):
        register(registry, artefact_folder, name="unlucky", metrics={}, params={}, tags={}, input_example=STEPS)
    with pytest.raises(RegistryError, match="no model 'unlucky'"):
        registry.versions("unlucky")
    experiment = registry.client.get_experiment_by_name("presage")
    last = registry.client.search_runs([experiment.experiment_id], order_by=["start_time DESC"], max_results=1)[0]
    assert last.info.status == "FAILED"


def test_the_headline_is_flat_and_numbers_only() -> None:
    assert headline(METRICS) == {"workflows": 12.0, "prefill_accuracy_1": 0.9, "prefill_accuracy_2": 0.8}
    assert headline({"kind": "router", "macro_map": 0.5, "version": 3, "by_model": {"a": 1}}) == {"macro_map": 0.5}
    json.dumps(headline(METRICS))


def test_a_file_put_beside_a_version_is_read_again_and_replaced(
    registry: Registry, registered: Register, tmp_path: Path
) -> None:
    registered("beside"), registered("beside")
    assert attached(registry, "beside", 1, "truth", "figures.json") is None
    for content in (b"the first one", b"the second"):
        (tmp_path / "figures.json").write_bytes(content)
        attach(registry, "beside", 1, [tmp_path / "figures.json"], "truth")
        assert attached(registry, "beside", 1, "truth", "figures.json") == content
    assert attached(registry, "beside", 1, "truth", "others.json") is None
    assert attached(registry, "beside", 2, "truth", "figures.json") is None, "of each version its own"
    with pytest.raises(RegistryError, match="no version 9"):
        attached(registry, "beside", 9, "truth", "figures.json")
