"""The registry behind a real MLflow server, and a version behind MLflow's own command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from registry_samples import METRICS, STEPS
from tiny_model import WORKFLOWS, Tiny

from presage.errors import RegistryError
from presage.predictors.common.artefact import artefact_digest
from presage.registry.connect import Registry, open_registry
from presage.registry.gates import Verdict
from presage.registry.package import register
from presage.registry.promote import list_models, promote, rollback
from presage.registry.resolve import resolve

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", "sqlite:///server.db"]
    command += ["--artifacts-destination", "./store", "--port", str(port), "--workers", "1"]
    log = (tmp_path / "server.log").open("wb")
    # A session of its own, because the server has workers that must go with it.
    process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)

    def stop() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", stop
    finally:
        stop()
        log.close()


def test_a_server_holds_versions_verdicts_and_artefacts(
    server: tuple[str, Callable[[], None]],
    artefact_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    uri, stop = server
    registry = open_registry(uri)
    for version in (1, 2):
        made = register(registry, artefact_folder, name="far", metrics=METRICS, params={}, tags={}, input_example=STEPS)
        assert made.version == version
        promote(registry, Verdict("far", version, ()), data_digest="x")
    found = resolve("models:/far@champion", lambda: registry, cache=tmp_path / "cache")
    assert found.version == 2
    assert artefact_digest(found.folder) == artefact_digest(artefact_folder)
    assert rollback(registry, "far") == (2, 1)
    assert [entry["aliases"] for entry in list_models(registry)] == [[], ["champion"]]
    assert capfd.readouterr().out == ""

    stop()
    with pytest.raises(RegistryError, match="does not answer"):
        list_models(registry)


def test_mlflow_models_predict_gives_the_numbers_of_the_training_process(
    registry: Registry, tiny: Tiny, tmp_path: Path
) -> None:
    asked = [WORKFLOWS["loop"], WORKFLOWS["an unknown agent"], WORKFLOWS["one step"]]
    register(registry, tiny.folder, name="commanded", metrics=METRICS, params={}, tags={}, input_example=asked[0])
    no_state = {"prefill_state": [], "completion_state": []}  # MLflow takes no null in a column of arrays
    records = [{**no_state, **step} for steps in asked for step in steps]
    (tmp_path / "in.json").write_text(json.dumps({"dataframe_records": records}))
    command = [sys.executable, "-m", "mlflow", "models", "predict", "-m", "models:/commanded/1"]
    command += ["-i", "in.json", "-t", "json", "--env-manager", "local"]
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": registry.uri,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["predictions"]
    expected = [tiny.training.predictor.forecast(steps).to_dict() for steps in asked]
    assert [answer["workflow_id"] for answer in answers] == [steps[0]["workflow_id"] for steps in asked]
    assert [answer["evidence"] for answer in answers] == [forecast["evidence"] for forecast in expected]
    assert [answer["forecast"] for answer in answers] == expected
