"""What an engine starts with: whole predictors from a folder or the registry, or a reason, and never an exception."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from by_name import Forecaster
from registry_database import new_database
from serving_samples import lengths_of
from tiny_model import STATE_SIZE, Tiny

from presage.errors import RegistryError
from presage.predictors.common.artefact import CONFIG_FILE, artefact_digest, read_artefact, write_artefact
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.registry.connect import Registry, open_registry
from presage.registry.package import register
from presage.serving_hooks.forecasting.sources import resolve_predictors
from presage.serving_hooks.workflows.live import NO_MODEL

CHAMPION = "models:/next-agent@champion"


def no_registry() -> Registry:
    raise AssertionError("a folder needs no registry")


@pytest.fixture(scope="module")
def lengths_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths") / "model"
    lengths_of(tiny.store).save(folder)
    return folder


def test_folders_need_no_registry_and_both_predictors_answer(tiny: Tiny, lengths_folder: Path) -> None:
    found = resolve_predictors(no_registry, {"next-agent": str(tiny.folder), "remaining-length": str(lengths_folder)})
    agents, lengths = found["next-agent"], found["remaining-length"]
    assert (agents.reason, agents.version, agents.digest) == (None, None, artefact_digest(tiny.folder))
    assert (lengths.reference, lengths.digest) == (str(lengths_folder), artefact_digest(lengths_folder))
    live = Forecaster(agents.predictor, lengths=lengths.predictor).on_prefill("retry", "w", "planner")
    assert (live.source, live.remaining.source) == ("champion", "champion")


def test_nothing_asked_for_is_nothing_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = resolve_predictors(no_registry, {"next-agent": None})
    assert (found["next-agent"].predictor, found["next-agent"].reason) == (None, NO_MODEL)
    assert not caplog.records


@pytest.mark.slow
def test_an_alias_of_the_registry_becomes_a_version(tiny: Tiny, tmp_path: Path) -> None:
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    register(
        registry,
        tiny.folder,
        name="next-agent",
        metrics=json.loads((tiny.folder / "metrics.json").read_text()),
        params={},
        tags={},
        input_example=pd.DataFrame([{"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}]),
        report=[],
    )
    missing = resolve_predictors(lambda: registry, {"next-agent": CHAMPION})["next-agent"]
    assert missing.predictor is None
    assert "no alias 'champion'" in str(missing.reason)
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    found = resolve_predictors(lambda: registry, {"next-agent": CHAMPION})["next-agent"]
    assert (found.version, found.reason, found.digest) == (1, None, artefact_digest(tiny.folder))
    assert found.predictor is not None


def test_a_registry_that_is_down_is_waited_for_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def down() -> Registry:
        asked.append(1)
        raise RegistryError("the MLflow server does not answer")

    found = resolve_predictors(down, {"next-agent": CHAMPION, "remaining-length": "models:/remaining-length@champion"})
    for part in (found["next-agent"], found["remaining-length"]):
        assert (part.predictor, part.reason) == (None, "the MLflow server does not answer")
    assert len(asked) == 1
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2


def test_a_registry_that_breaks_unforeseen_is_a_reason_too() -> None:
    def broken() -> Registry:
        raise ZeroDivisionError("inside a client")

    found = resolve_predictors(broken, {"next-agent": CHAMPION})["next-agent"]
    assert found.reason == "ZeroDivisionError: inside a client"


def cut(folder: Path) -> None:
    tensors = folder / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])


def of_another_version(folder: Path) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"format_version": 99}))


def with_a_pickle(folder: Path) -> None:
    (folder / "more.pkl").write_bytes(b"\x80\x04.")


def nowhere(folder: Path) -> None:
    shutil.rmtree(folder)


def of_other_shapes(folder: Path) -> None:
    artefact = read_artefact(folder)
    tensors = artefact.tensors | {"mixture/shares": np.zeros((2, 3, 1), np.float32)}
    write_artefact(folder, kind="next-agent", config=artefact.config, tensors=tensors, training_data={})


@pytest.mark.parametrize("harm", [cut, of_another_version, with_a_pickle, nowhere, of_other_shapes])
def test_a_broken_artefact_costs_its_own_part_alone(
    tiny: Tiny, lengths_folder: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    harm(folder)
    found = resolve_predictors(no_registry, {"next-agent": str(folder), "remaining-length": str(lengths_folder)})
    assert found["next-agent"].predictor is None
    assert str(folder) in str(found["next-agent"].reason)
    assert found["remaining-length"].predictor is not None


def test_an_artefact_of_the_other_kind_or_target_is_not_used(tiny: Tiny, lengths_folder: Path, tmp_path: Path) -> None:
    found = resolve_predictors(no_registry, {"next-agent": str(lengths_folder), "remaining-length": str(tiny.folder)})
    assert "kind 'remaining-length'" in str(found["next-agent"].reason)
    assert "kind 'next-agent'" in str(found["remaining-length"].reason)
    of_steps = RemainingLengthPredictor.load(lengths_folder)
    of_steps.target = "step"
    of_steps.save(tmp_path / "step")
    found = resolve_predictors(no_registry, {"next-agent": None, "remaining-length": str(tmp_path / "step")})
    assert found["remaining-length"].predictor is None
    assert "the target step" in str(found["remaining-length"].reason)


def test_a_predictor_that_fails_its_trial_is_not_used(tiny: Tiny, tmp_path: Path) -> None:
    """Every file of it is sound; the text encoder that it was trained with is gone."""
    artefact, tensors = read_artefact(tiny.folder), read_artefact(tiny.folder).tensors
    states = {"kind": "encoder", "sizes": {"prefill": STATE_SIZE, "completion": STATE_SIZE}}
    states |= {"encoder": str(tmp_path / "gone"), "encoder_digest": "sha256:0"}
    folder = tmp_path / "model"
    write_artefact(
        folder, kind="next-agent", config=artefact.config | {"states": states}, tensors=tensors, training_data={}
    )
    found = resolve_predictors(no_registry, {"next-agent": str(folder)})["next-agent"]
    assert found.predictor is None
    assert str(tmp_path / "gone") in str(found.reason)
