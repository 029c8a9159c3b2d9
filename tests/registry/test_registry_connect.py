"""Opening a registry: embedded, at a URI, or one clear error within seconds."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from registry_database import new_database

from presage.errors import OutputError, RegistryError
from presage.registry.connect import Registry, open_registry, registry_errors
from presage.registry.package import EXPERIMENT, check_artifact_store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_down_is_said_in_one_line() -> None:
    uri = f"127.0.0.1:{free_port()}"
    with pytest.raises(RegistryError, match=f"the MLflow server at http://{uri} does not answer") as raised:
        open_registry(f"http://anna:geheim@{uri}")
    assert "\n" not in str(raised.value)


def test_a_store_whose_library_is_missing_is_said_before_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    check_artifact_store(registry)
    registry.client.create_experiment(EXPERIMENT, artifact_location="s3://bucket/x")
    monkeypatch.setattr("presage.registry.package.find_spec", lambda _: None)
    with pytest.raises(RegistryError, match=r"s3://, and boto3 is not installed.*pip install boto3.*presage register"):
        check_artifact_store(registry)


def test_a_server_that_never_answers_is_given_up_on() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RegistryError, match="does not answer"):
            open_registry(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_server_that_fails_is_not_to_be_started() -> None:
    class Fails(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Fails) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RegistryError, match="runs, and answers with HTTP status 500") as raised:
            open_registry(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert "Start it" not in str(raised.value)


def test_probing_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    with pytest.raises(RegistryError):
        open_registry(f"http://127.0.0.1:{free_port()}")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "30"


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("my diary, which is longer than sixteen bytes")
    with pytest.raises(RegistryError, match="is no SQLite database"):
        open_registry(f"sqlite:///{path}")
    assert path.read_text().startswith("my diary")
    with pytest.raises(RegistryError, match="no folder"):
        open_registry(f"sqlite:///{tmp_path / 'absent' / 'mlflow.db'}")


@pytest.mark.parametrize("uri", ["gopher://registry", "not a uri"])
def test_an_unknown_kind_of_uri_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegistryError, match=uri):
        open_registry(uri)
    assert not list(tmp_path.iterdir())


def test_missing_models_and_versions_are_answered_with_those_there_are(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="no model 'nobody' in sqlite:"):
        registry.versions("nobody")


def test_a_full_disk_is_an_output_error() -> None:
    with pytest.raises(OutputError, match="No space left"), registry_errors("sqlite:///x", "registering 'm'"):
        raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_the_embedded_registry_lies_in_the_working_directory_and_says_nothing(tmp_path: Path) -> None:
    code = (
        "from presage.registry.connect import open_registry; registry = open_registry(None);"
        "registry.client.create_experiment('e', registry.artifacts)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_importing_the_rooms_of_the_registry_loads_no_mlflow() -> None:
    code = (
        "import sys, presage.registry.connect, presage.registry.gates, presage.registry.package, "
        "presage.registry.promote, presage.registry.resolve, presage.registry.promote;"
        "sys.exit(', '.join({'mlflow', 'torch', 'pandas'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_processes_that_open_a_new_database_at_once_all_can(tmp_path: Path) -> None:
    code = "import sys; from presage.registry.connect import open_registry; open_registry(sys.argv[1])"
    line = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'mlflow.db'}"]
    opening = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[1] for process in opening if process.wait()] == []


def test_without_a_uri_the_environment_names_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", named := f"sqlite:///{tmp_path / 'named.db'}")
    assert open_registry(None).uri == named
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert open_registry(None).uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
