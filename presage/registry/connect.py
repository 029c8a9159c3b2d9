"""Where the registry is, and how MLflow is spoken to.

A `Registry` is opened once, at the edge, from one URI, and handed to everything that needs it; no tracking URI is set
globally. What MLflow offers only as environment variables (retries, progress bars) is set where the user has not set
it, because its own default of seven growing retries lets a command hang for minutes on a server that is down.

`attach` and `attached` put files beside a registered version, into its run, where MLflow's UI shows them, and read
them again.

MLflow's client is loaded when a registry is opened (about two seconds), never when this module is imported.
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from presage.errors import OutputError, PresageError, RegistryError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

DATABASE_FILE: Final = "mlflow.db"
ARTIFACTS_FOLDER: Final = "mlartifacts"

_SQLITE_MAGIC: Final = b"SQLite format 3\x00"
_DEFAULTS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a server's run links would end up in --json output
}
_PROBE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "4"}


@dataclass(frozen=True)
class Registry:
    """A registry that answered when it was opened.

    Attributes:
        client: speaks to the tracking store and to the model registry at `uri`.
        uri: tracking and registry URI.
        artifacts: where runs of a new experiment keep their files; None leaves it to the server.
    """

    client: "MlflowClient"
    uri: str
    artifacts: str | None

    def version(self, name: str, version: int) -> "ModelVersion":
        """One registered version.

        Raises:
            RegistryError: there is none of that number; says which there are.
        """
        versions = self.versions(name)
        for found in versions:
            if int(found.version) == version:
                return found
        there = ", ".join(str(found.version) for found in versions) or "none"
        raise RegistryError(
            f"{name!r} has no version {version} in {self.uri}; there are: {there}. See `presage models`."
        )

    def versions(self, name: str) -> list["ModelVersion"]:
        """All versions of a model, oldest first.

        Raises:
            RegistryError: there is no model of that name; says which there are.
        """
        with speaking(self.uri, f"listing the versions of {name!r}"):
            escaped = name.replace("'", "''")
            found = pages(self.client.search_model_versions, filter_string=f"name = '{escaped}'")
            if not found and name not in (
                names := [model.name for model in pages(self.client.search_registered_models)]
            ):
                raise RegistryError(
                    f"no model {name!r} in {self.uri}; there are: {', '.join(names) or 'none'}. "
                    "Check the name and MLFLOW_TRACKING_URI, or register one with `train-predictor`."
                )
        return sorted(found, key=lambda version: int(version.version))

    def aliases(self, name: str) -> dict[str, int]:
        """Version by alias.

        Raises:
            RegistryError: there is no such model.
        """
        self.versions(name)
        with speaking(self.uri, f"reading the aliases of {name!r}"):
            return {alias: int(held) for alias, held in self.client.get_registered_model(name).aliases.items()}


def open_registry(uri: str | None) -> Registry:
    """Open the registry at an MLflow tracking URI and make sure that it answers.

    Args:
        uri: what MLFLOW_TRACKING_URI says; None or empty means the embedded one, `sqlite:///mlflow.db` with its
            files in `./mlartifacts`, both in the working directory.

    Raises:
        RegistryError: it does not answer within a few seconds, or is no registry.
    """
    uri = uri or f"sqlite:///{Path.cwd() / DATABASE_FILE}"
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    artifacts = None
    if (database := _sqlite_file(uri)) is not None:
        _check_sqlite(database, uri)
        artifacts = str(database.parent / ARTIFACTS_FOLDER)
    with speaking(uri, "opening the registry"), _environment(_PROBE), _alone(database):
        from mlflow import MlflowClient

        quieten()
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_registered_models(max_results=1)
    return Registry(client, uri, artifacts)


@contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """Keeps other processes from opening a SQLite database of this folder meanwhile.

    MLflow makes the tables of a new database when it opens one; of two processes that do so at once, both fail. Where
    the file system knows no locks nothing is kept.
    """
    if database is None or not database.parent.is_dir():
        yield
        return
    folder = os.open(database.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)  # which unlocks it


def quieten() -> None:
    """Keep MLflow's and Alembic's progress lines off the terminal; their warnings and errors too, as ours say more."""
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def pages(search: Any, **arguments: Any) -> list[Any]:
    """Everything an MLflow search finds, over all its pages."""
    found = list(page := search(**arguments))
    while page.token:
        found += (page := search(**arguments, page_token=page.token))
    return found


@contextmanager
def speaking(uri: str, doing: str) -> Iterator[None]:
    """Turn whatever MLflow, its database or the network raise into one `RegistryError` of one line.

    Raises:
        RegistryError: the registry did not do it.
        OutputError: a file could not be written here.
    """
    try:
        yield
    except PresageError:
        raise
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(error, MlflowException | RequestException | SQLAlchemyError):
            raise RegistryError(_one_line(uri, doing, error)) from error
        if isinstance(error, OSError):
            raise OutputError(
                f"{doing} in {uri}: {error.strerror or error}; free the disk or check permissions."
            ) from error
        raise


def _one_line(uri: str, doing: str, error: Exception) -> str:
    text = str(error)
    if "Max retries exceeded" in text or "Connection refused" in text or "timed out" in text:
        return f"{doing}: the MLflow server at {uri} does not answer. Start it, or correct MLFLOW_TRACKING_URI."
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{doing} in {uri}: {first[:300]}"


def _sqlite_file(uri: str) -> Path | None:
    """The file behind `sqlite:///relative` or `sqlite:////absolute`; None for every other URI."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix).split("?")[0]).absolute() if uri.startswith(prefix) else None


def _check_sqlite(database: Path, uri: str) -> None:
    """Say at once what SQLAlchemy would find out by retrying for minutes."""
    if not database.parent.is_dir():
        raise RegistryError(f"{uri}: no folder {database.parent} for the database. Make it, or correct the URI.")
    if not database.exists():
        if not os.access(database.parent, os.W_OK):
            raise RegistryError(f"{uri}: may not write in {database.parent}. Give MLFLOW_TRACKING_URI another place.")
        return
    try:
        with database.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise RegistryError(f"{uri}: {database} cannot be read ({error.strerror}).") from error
    if head and head != _SQLITE_MAGIC:
        raise RegistryError(f"{uri}: {database} is no SQLite database. Move it away, or correct the URI.")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def attach(registry: Registry, name: str, version: int, files: Sequence[Path], folder: str) -> None:
    """Copy files into a folder of the run of a version; what was there under the same names is replaced.

    Args:
        registry: where.
        name: registered model.
        version: whose run.
        files: to be copied.
        folder: among the artifacts of the run.

    Raises:
        RegistryError: no such version, or the registry does not take the files.
    """
    run_id = registry.version(name, version).run_id
    with speaking(registry.uri, f"keeping {folder} of {name!r} version {version}"):
        for file in files:
            registry.client.log_artifact(run_id, str(file), folder)


def attached(registry: Registry, name: str, version: int, folder: str, file: str) -> bytes | None:
    """The content of a file that was attached; None where there is none.

    Args:
        registry: where.
        name: registered model.
        version: whose run.
        folder: among the artifacts of the run.
        file: its name in there.

    Raises:
        RegistryError: no such version, or the registry does not hand the file out.
    """
    run_id = registry.version(name, version).run_id
    path = f"{folder}/{file}"
    with speaking(registry.uri, f"reading {path} of {name!r} version {version}"):
        if not run_id or path not in {found.path for found in registry.client.list_artifacts(run_id, folder)}:
            return None
        with tempfile.TemporaryDirectory() as scratch:
            return Path(registry.client.download_artifacts(run_id, path, scratch)).read_bytes()
