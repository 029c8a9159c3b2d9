"""`train-predictor next-agent --start-from`: a new version from an old one, and what is refused in one sentence."""

from pathlib import Path

import numpy as np
import pytest
from cli_samples import FAST, run, train
from registry_database import new_database
from tiny_model import Tiny

from presage.datasets.ingest import append
from presage.datasets.synthetic.workflows import generate
from presage.predictors.common.artefact import write_artefact
from presage.registry.connect import open_registry


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(tmp_path_factory.mktemp("registry") / "mlflow.db")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newer") / "store"
    append(generate("retry", 40, 11, state_size=16).table, folder)
    return folder


@pytest.mark.slow
def test_a_version_says_which_one_it_started_from_and_what_it_forgot(
    tiny: Tiny, newer: Path, database: str, tmp_path: Path
) -> None:
    uri = ("--tracking-uri", database, "--name", "week")
    first = train(tiny.store, *FAST, *uri, "--json")
    assert first.code == 0, first.err
    options = ("--start-from", "models:/week/1", "--old-test", tiny.held_out, "--baselines", "markov-1")
    ran = train(newer, *options, *uri, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "Accuracy on the old traces" in ran.out
    assert "forgotten: old model minus ours" in ran.out
    assert "started from: models:/week/1, sha256:" in ran.out
    registry = open_registry(database)
    params = registry.client.get_run(registry.version("week", 2).run_id).data.params
    assert params["data.started_from"] == "models:/week/1"
    assert params["data.started_from_digest"] == registry.version("week", 1).tags["presage.digest"]
    assert params["network.epochs"] == "2", "settings are those of the old model"
    judged = run("evaluate", "models:/week/2", tiny.store, "--tracking-uri", database)
    assert "64 workflows left out: a model was trained on them" in judged.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--horizon", 4), "forecasts 3 steps; omit --horizon"),
        (("--set", "network.epochs=2"), "--start-from keeps the settings and states of the model"),
        (("--states", "none"), "omit --config, --set, --states"),
        (("--report", "evidence"), "--out has a report too"),
    ],
)
def test_what_the_old_model_decides_is_refused(
    options: tuple[object, ...], said: str, tiny: Tiny, newer: Path, tmp_path: Path
) -> None:
    ran = train(newer, "--start-from", tiny.folder, "--no-register", "--out", tmp_path / "out", *options)
    assert said in ran.complaint
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_to_start_from_is_refused(tiny: Tiny, newer: Path, database: str, tmp_path: Path) -> None:
    def start_from(reference: object, *options: object) -> str:
        return train(newer, "--start-from", reference, "--no-register", "--tracking-uri", database, *options).complaint

    assert "found nothing; expected an artefact folder" in start_from(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "config.json" in start_from(tmp_path / "empty")
    lengths = tmp_path / "lengths"
    write_artefact(lengths, kind="remaining-length", config={}, tensors={"x": np.zeros(1)}, training_data={})
    assert "found kind 'remaining-length'; expected kind 'next-agent'" in start_from(lengths)
    assert "models:/NAME@ALIAS" in start_from("models:/week")
    alone = train(newer, "--old-test", tiny.held_out, "--no-register")
    assert "--old-test judges what a model of --start-from keeps" in alone.complaint
