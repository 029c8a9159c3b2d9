"""Files put beside a registered version after it was made, and read again: in its run, where MLflow's UI shows them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from presage.registry.connect import Registry, speaking


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
