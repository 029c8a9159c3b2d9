"""The registry behind a real MLflow server, and a version behind MLflow's own command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from registry_samples import METRICS, STEPS
from tiny_model import WORKFLOWS, Tiny

import presage
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
        promote(registry, Verdict("far", version, ()), against=version - 1 or None, data_digest="x")
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


WITHOUT_PRESAGE = """
import sys
from importlib.util import find_spec
from pathlib import Path
sys.path[:] = [place for place in sys.path if not (Path(place or ".") / "presage").is_dir()]
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
assert find_spec("presage") is None
import json, mlflow.pyfunc, pandas
steps = pandas.DataFrame(json.loads(Path("in.json").read_text()))
answers = mlflow.pyfunc.load_model("models:/brought/1").predict(steps)
import presage
print(json.dumps({"from": presage.__file__, "forecasts": answers["forecast"].tolist()}))
"""


def test_a_version_forecasts_where_presage_is_not_installed(registry: Registry, tiny: Tiny, tmp_path: Path) -> None:
    steps = [
        {key: step[key] for key in ("workflow_type", "workflow_id", "step", "agent")} for step in WORKFLOWS["loop"]
    ]
    register(registry, tiny.folder, name="brought", metrics=METRICS, params={}, tags={}, input_example=steps)
    (tmp_path / "in.json").write_text(json.dumps(steps))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    environment |= {"MLFLOW_TRACKING_URI": registry.uri, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", WITHOUT_PRESAGE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "package.zip" in found["from"]
    (forecast,) = found["forecasts"]
    expected = tiny.training.predictor.forecast(steps).to_dict()
    assert forecast["evidence"] == expected["evidence"]
    for horizon, wanted in zip(forecast["horizons"], expected["horizons"], strict=True):
        assert horizon["agents"] == pytest.approx(wanted["agents"], abs=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pandas, of how MLflow calls it
@pytest.mark.filterwarnings("ignore:Hint. Inferred schema contains integer:UserWarning")  # MLflow
@pytest.mark.filterwarnings("ignore:Precision is ill-defined:UserWarning")  # scikit-learn, of what the model never says
def test_the_documented_evaluation_by_mlflow_gives_the_accuracy_of_the_training(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held-out").symlink_to(tiny.held_out)
    here = open_registry(None)
    made = register(
        here, tiny.folder, name="next-agent", metrics=METRICS, params={}, tags={}, input_example=WORKFLOWS["one step"]
    )
    promote(here, Verdict("next-agent", made.version, ()), against=None, data_digest="x")
    text = (Path(__file__).parents[2] / "docs" / "registry.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "models.evaluate" in block]
    try:
        exec(compile(code, "docs/registry.md", "exec"), {})
    finally:
        mlflow.set_tracking_uri(None)
    table = presage.read_traces(tiny.held_out).to_pandas()
    columns = ["workflow_type", "workflow_id", "step", "agent", "input_tokens", "output_tokens"]
    right = total = 0
    for _, rows in table.groupby(["workflow_type", "workflow_id"]):
        steps = rows.sort_values("step")[columns].to_dict("records")
        after = [*(step["agent"] for step in steps[1:]), "END"]
        for count, agent in enumerate(after, start=1):
            right += tiny.training.predictor.forecast(steps[:count]).prediction == agent
            total += 1
    assert float(capsys.readouterr().out.splitlines()[-1]) == pytest.approx(right / total)
