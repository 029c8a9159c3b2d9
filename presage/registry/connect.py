"""Connections to an MLflow registry.

A `Registry` is opened once from a URI and passed to all functions; no global tracking URI is set. Settings that MLflow
takes only from environment variables get defaults unless the user set them: with MLflow's own seven growing retries a
command hangs for minutes on a server that is down. Opening a registry imports MLflow (about two seconds); importing
this module does not.
"""

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from presage.errors import OutputError, PresageError, RegistryError
from presage.wording import nearest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

DATABASE_FILE: Final = "mlflow.db"
ARTIFACTS_FOLDER: Final = "mlartifacts"

_MOST_ATTACHED_BYTES: Final = 64 << 20

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
    """An open registry.

    Attributes:
        uri: tracking and registry URI.
        artifacts: artifact location of a new experiment; None: the server decides.
    """

    client: "MlflowClient"
    uri: str
    artifacts: str | None

    def version(self, name: str, version: int) -> "ModelVersion":
        """One registered version; raises RegistryError if there is none."""
        versions = self.versions(name)
        for candidate in versions:
            if int(candidate.version) == version:
                return candidate
        there = ", ".join(str(candidate.version) for candidate in versions) or "none"
        raise RegistryError(
            f"{name!r} has no version {version} in {self.uri}; there are: {there}. See `presage models`."
        )

    def names(self) -> list[str]:
        """The names of all registered models; raises RegistryError if the registry does not answer."""
        with registry_errors(self.uri, "listing models"):
            return [str(model.name) for model in pages(self.client.search_registered_models)]

    def versions(self, name: str) -> list["ModelVersion"]:
        """All versions of a model, oldest first; raises RegistryError if there is no such model."""
        with registry_errors(self.uri, f"listing the versions of {name!r}"):
            escaped = name.replace("'", "''")
            versions = pages(self.client.search_model_versions, filter_string=f"name = '{escaped}'")
            if not versions and name not in (names := self.names()):
                meant = f"Did you mean {near!r}? " if (near := nearest(name, names)) else ""
                raise RegistryError(
                    f"no model {name!r} in {self.uri}; there are: {', '.join(names) or 'none'}. {meant}"
                    "Check the name and MLFLOW_TRACKING_URI, or register one with `train-predictor`."
                )
        return sorted(versions, key=lambda version: int(version.version))

    def aliases(self, name: str) -> dict[str, int]:
        """Version by alias, without aliases of deleted versions; raises RegistryError if there is no such model."""
        existing = {int(version.version) for version in self.versions(name)}
        with registry_errors(self.uri, f"reading the aliases of {name!r}"):
            written = self.client.get_registered_model(name).aliases
        return {alias: int(held) for alias, held in written.items() if int(held) in existing}


class NoRegistryError(RegistryError):
    """There is no database or folder at the URI."""


def open_registry(uri: str | None) -> Registry:
    """Open the registry at an MLflow tracking URI; raises RegistryError unless it answers within a few seconds.

    Without a URI: `MLFLOW_TRACKING_URI`, else `sqlite:///mlflow.db` in the working directory, with artifacts in
    `./mlartifacts`.
    """
    uri = uri or default_uri()
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    artifacts = None
    if (database := sqlite_file(uri)) is not None:
        _check_sqlite(database, uri)
        artifacts = str(database.parent / ARTIFACTS_FOLDER)
    with registry_errors(uri, "opening the registry"), _environment(_PROBE), _alone(database):
        from mlflow import MlflowClient

        quieten()
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_registered_models(max_results=1)
    return Registry(client, uri, artifacts)


def registry_exists(uri: str | None) -> bool:
    """Whether opening the registry creates nothing: it is a server, or its database or folder is there."""
    place = _on_this_machine(uri or default_uri())
    return place is None or place.exists()


def open_existing(uri: str | None) -> Registry:
    """`open_registry` for readers: creates nothing, and raises NoRegistryError if there is nothing to read."""
    uri = uri or default_uri()
    place = _on_this_machine(uri)
    if place is not None and not place.exists():
        raise NoRegistryError(
            f"{uri}: there is no {place}. Correct the URI, or register a model with `train-predictor`."
        )
    if place is not None and place.is_file() and not place.stat().st_size:
        raise RegistryError(f"{uri}: {place} is empty. Register a model with `train-predictor`, or correct the URI.")
    return open_registry(uri)


def is_named(uri: str | None) -> bool:
    """Whether the user has chosen the registry, by its URI or by `MLFLOW_TRACKING_URI`."""
    return bool(uri or os.environ.get("MLFLOW_TRACKING_URI"))


def default_uri() -> str:
    """The registry if none is named: `MLFLOW_TRACKING_URI`, else a database in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / DATABASE_FILE}"


def _on_this_machine(uri: str) -> Path | None:
    """The file or folder of a URI; None for a server."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return Path(unquote(parts.path.removeprefix("/"))).absolute()
    return Path(unquote(parts.path)).absolute() if parts.scheme in ("", "file") else None


@contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """Lock the folder of a SQLite database while it is opened, if the file system supports locks.

    MLflow creates the tables of a new database on opening it; two processes that do so at once both fail.
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
    """Silence the logs of MLflow and Alembic; our errors are more precise."""
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def pages(search: Any, **arguments: Any) -> list[Any]:
    """The results of an MLflow search, over all pages."""
    results = list(page := search(**arguments))
    while page.token:
        results += (page := search(**arguments, page_token=page.token))
    return results


@contextmanager
def registry_errors(uri: str, doing: str) -> Iterator[None]:
    """Turn errors of MLflow and the network into RegistryError, of one line, and those of files into OutputError."""
    try:
        yield
    except PresageError:
        raise
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(error, MemoryError) or isinstance(error.__context__, MemoryError):  # MLflow wraps it
            raise RegistryError(f"{doing} in {uri}: the answer is larger than the memory for it.") from error
        if isinstance(error, MlflowException | RequestException | SQLAlchemyError):
            raise RegistryError(_one_line(uri, doing, error)) from error
        if isinstance(error, OSError):
            raise OutputError(
                f"{doing} in {uri}: {error.strerror or error}; free the disk or check permissions."
            ) from error
        raise


def _one_line(uri: str, doing: str, error: Exception) -> str:
    text = str(error)
    if failed := re.search(r"too many (\d+) error responses", text):
        return (
            f"{doing}: the MLflow server at {uri} runs, and answers with HTTP status {failed[1]}. Read its log, or try "
            "again later."
        )
    if "Max retries exceeded" in text or "Connection refused" in text or "timed out" in text:
        return f"{doing}: the MLflow server at {uri} does not answer. Start it, or correct MLFLOW_TRACKING_URI."
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{doing} in {uri}: {first[:300]}"


def sqlite_file(uri: str) -> Path | None:
    """The file behind `sqlite:///relative` or `sqlite:////absolute`; None for every other URI."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix).split("?")[0]).absolute() if uri.startswith(prefix) else None


def _check_sqlite(database: Path, uri: str) -> None:
    """Fail at once where SQLAlchemy would retry for minutes."""
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
    """Copy files into an artifact folder of the run of a version; files of the same names are replaced.

    Raises RegistryError for no such version, or if the registry refuses the files.
    """
    run_id = registry.version(name, version).run_id
    with registry_errors(registry.uri, f"keeping {folder} of {name!r} version {version}"):
        for file in files:
            registry.client.log_artifact(run_id, str(file), folder)


def attached(registry: Registry, name: str, version: int, folder: str, file: str) -> bytes | None:
    """The content of an attached file; None if there is none. The folder "" is the run's own.

    Raises RegistryError for no such version, or if the registry fails to return the file.
    """
    run_id = registry.version(name, version).run_id
    path = f"{folder}/{file}".lstrip("/")
    with registry_errors(registry.uri, f"reading {path} of {name!r} version {version}"):
        if not run_id:
            return None
        listed = registry.client.list_artifacts(run_id, folder or None)
        size_bytes = {entry.path: entry.file_size or 0 for entry in listed}
        if path not in size_bytes:
            return None
        if size_bytes[path] > _MOST_ATTACHED_BYTES:
            raise RegistryError(
                f"{path} of {name!r} version {version}: found {size_bytes[path]:,} bytes; expected at most "
                f"{_MOST_ATTACHED_BYTES:,}. Presage attaches no such file: remove it."
            )
        with tempfile.TemporaryDirectory() as scratch:
            return Path(registry.client.download_artifacts(run_id, path, scratch)).read_bytes()
