"""Where an engine's registry is: said by the settings, by the environment, or lying in the working directory.

An engine only reads. Opening an MLflow database that is not there would make one, and an engine that is started in the
wrong folder would then serve from an empty registry without a word: so what is not there is an error here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from presage.errors import RegistryError
from presage.registry.connect import DATABASE_FILE, Registry, open_registry


def where(said: str | None, environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str | None:
    """The MLflow tracking URI of the registry; None if there is none.

    Args:
        said: by the settings; goes first.
        environment: MLFLOW_TRACKING_URI of it goes next.
        folder: where a database may lie; by default the working directory.
    """
    if named := said or environment.get("MLFLOW_TRACKING_URI"):
        return named
    database = (folder or Path.cwd()) / DATABASE_FILE
    return f"sqlite:///{database}" if database.is_file() else None


def open_existing(uri: str) -> Registry:
    """Opens a registry that is there already.

    Raises:
        RegistryError: it is not there, or does not answer.
    """
    place = _on_this_machine(uri)
    if place is not None and not place.exists():
        raise RegistryError(f"{uri}: there is no {place}. Correct the URI, or register a model with `train-predictor`.")
    if place is not None and place.is_file() and not place.stat().st_size:
        raise RegistryError(f"{uri}: {place} is empty. Register a model with `train-predictor`, or correct the URI.")
    return open_registry(uri)


def _on_this_machine(uri: str) -> Path | None:
    """The file or folder behind a URI; None for what a server answers."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return Path(unquote(parts.path.removeprefix("/"))).absolute()
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)).absolute()
    return None
