"""Files put beside a registered version after it was made: into its run, where MLflow's UI shows them."""

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
    with speaking(registry.uri, f"keeping the report of {name!r} version {version}"):
        for file in files:
            registry.client.log_artifact(run_id, str(file), folder)
