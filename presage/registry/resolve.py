"""Resolve a reference such as `models:/next-agent@champion` to a checked artefact folder.

The folder is the data-only artefact inside the registered version; MLflow's loader, which would run the version's code,
is not used. Local files are read in place, remote ones are copied once into a cache, which engines of one host share.
An alias may move at any time: callers that need a stable answer keep the resolved version.

A version never changes: its digest is a tag from its registration on, and an artefact with another one is refused.
"""

import fcntl
import hashlib
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlparse

from presage.errors import ArtefactError, RegistryError, why
from presage.predictors.common.artefact import read_artefact
from presage.registry.connect import Registry, registry_errors
from presage.wording import nearest

DIGEST: Final = "presage.digest"
"""Tag of a version: the digest of its artefact."""

_TRIES: Final = 3
"""Downloads of one version before the error counts."""

_REFERENCE: Final = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


@dataclass(frozen=True)
class ResolvedModel:
    """A checked artefact folder, its registered model and version (None: a plain folder), and the user's reference."""

    folder: Path
    name: str | None
    version: int | None
    source: str


def _pause(tries: int) -> None:
    """Wait about 1, 2, … s after failed downloads, at random, so that engines that failed together do not ask together
    again.
    """
    time.sleep(random.SystemRandom().uniform(0.5, 1.5) * tries)  # not the process's own, which a user may have seeded


def resolve(
    reference: str,
    registry: Callable[[], Registry],
    *,
    cache: Path | None = None,
    pause: Callable[[int], None] = _pause,
) -> ResolvedModel:
    """Find the artefact of a reference.

    Args:
        reference: `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder.
        registry: opens the registry; called for `models:/` only, so a folder needs no MLflow.
        cache: folder for copies of remote versions; by default `presage` in the user's cache folder.
        pause: called with the number of failed downloads before the next one.

    Raises:
        RegistryError: a malformed reference, no such model, version or alias (lists those there are), or the version
            cannot be downloaded now.
        ArtefactError: not a valid artefact, or not the one that was registered.
    """
    if not reference.startswith("models:"):
        if not Path(reference).exists():
            raise ArtefactError(
                f"{reference}: found nothing; expected an artefact folder. {_registered(reference, registry)}"
            )
        read_artefact(Path(reference))
        return ResolvedModel(Path(reference), None, None, reference)
    opened, name, version = registered_version(reference, registry)
    return ResolvedModel(_fetch(opened, name, version, cache, pause), name, version, reference)


def registered_version(reference: str, registry: Callable[[], Registry]) -> tuple[Registry, str, int]:
    """The registry, name and version of `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises RegistryError for a malformed reference and an unknown alias.
    """
    name, alias, version = parse(reference)
    opened = registry()
    return opened, name, _behind_alias(opened, name, alias or "") if version is None else version


def kept_file(reference: str, file: str, registry: Callable[[], Registry]) -> Path:
    """A file that a training wrote, such as `metrics.json`: in its output folder, or among the artifacts of the run.

    The file of a remote registry is copied into a new temporary folder, which stays. Raises RegistryError for no such
    model, version or alias, and ArtefactError if the file was not kept.
    """
    if not reference.startswith("models:"):
        path = Path(reference) / file
        if not path.is_file():
            raise ArtefactError(
                f"{path}: no such file; expected a folder of --out or --report, or models:/NAME/VERSION."
            )
        return path
    opened, name, version = registered_version(reference, registry)
    run_id = opened.version(name, version).run_id
    with registry_errors(opened.uri, f"reading {file} of {name!r} version {version}"):
        if not run_id or file not in {entry.path for entry in opened.client.list_artifacts(run_id)}:
            raise ArtefactError(f"{name!r} version {version}: its run keeps no {file}; train and register it again.")
        local = local_path(opened.client.get_run(run_id).info.artifact_uri)
        if local is not None:
            return local / file
        return Path(opened.client.download_artifacts(run_id, file, tempfile.mkdtemp(prefix="presage-")))


def _registered(reference: str, registry: Callable[[], Registry]) -> str:
    """The registered model that a name without `models:/` may have meant, as the advice of an error message."""
    if "/" in reference:
        return "Check the path."
    try:
        name = nearest(reference, registry().names())
    except RegistryError:
        name = None
    if name is None:
        return f"Check the path; the name of a registered model is models:/{reference}@champion."
    return f"Did you mean models:/{name}@champion?"


def parse(reference: str) -> tuple[str, str | None, int | None]:
    """Name, and alias or version, of a reference `models:/NAME@ALIAS` or `models:/NAME/VERSION`, else RegistryError."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise RegistryError(
            f"{reference!r}: wanted models:/NAME@ALIAS or models:/NAME/VERSION, "
            "for example models:/next-agent@champion, or an artefact folder."
        )
    return match["name"], match["alias"], int(match["version"]) if match["version"] else None


def alias_holder(registry: Registry, name: str, alias: str) -> int | None:
    """The version that has an alias, in one short request; None if no existing version of such a model has it.

    Raises RegistryError if the registry does not answer.
    """
    with registry_errors(registry.uri, f"reading the alias {alias!r} of {name!r}"):
        from mlflow.exceptions import MlflowException

        try:
            return int(registry.client.get_model_version_by_alias(name, alias).version)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None


def _behind_alias(registry: Registry, name: str, alias: str) -> int:
    aliases = registry.aliases(name)
    if alias not in aliases:
        there = ", ".join(f"{other} (version {version})" for other, version in sorted(aliases.items())) or "none"
        raise RegistryError(
            f"{name!r} has no alias {alias!r} in {registry.uri}; there are: {there}. "
            f"Set it with `presage promote {name} --version N --to {alias}`, or name a version: models:/{name}/N."
        )
    return aliases[alias]


def _fetch(registry: Registry, name: str, version: int, cache: Path | None, pause: Callable[[int], None]) -> Path:
    entry = registry.version(name, version)
    wanted = entry.tags.get(DIGEST)
    with registry_errors(registry.uri, f"locating {name!r} version {version}"):
        location = registry.client.get_model_version_download_uri(name, str(version))
    local = local_path(location)
    if local is not None:
        folder = artefact_of(local)
        if not folder.is_dir():
            raise RegistryError(
                f"{name!r} version {version}: {local} holds no Presage artefact; "
                "wanted a version made by `train-predictor`, with its files still in place."
            )
        check_artefact(folder, wanted)
        return folder
    # Version numbers restart in a new database; the source of a version is unique.
    key = hashlib.sha256(f"{registry.uri} {entry.source} {entry.creation_timestamp}".encode()).hexdigest()[:16]
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "presage" / "models"
    folder = cache / f"{name}-{version}-{key}"
    tries = 0
    while True:
        try:
            with _locked(folder):
                _copy_once(registry, name, version, location, folder, wanted)
            return folder
        except Exception as error:
            tries += 1
            if tries < _TRIES:
                pause(tries)
            elif isinstance(error, ArtefactError | RegistryError):
                raise
            else:
                raise RegistryError(f"{name!r} version {version} cannot be downloaded: {why(error)}") from error


def artefact_of(version: Path) -> Path:
    """The artefact folder among the files of a registered version."""
    return version / "artifacts" / "artefact"


def check_artefact(folder: Path, wanted: str | None) -> None:
    """Raise ArtefactError unless this is a valid artefact, with the digest of the registered one if that is known."""
    digest = read_artefact(folder).digest
    if wanted is not None and digest != wanted:
        raise ArtefactError(
            f"{folder}: found the artefact {digest[:19]}…; expected {wanted[:19]}…, which the version was registered "
            "with. Its files were replaced: put them back, or register the new ones as a version of their own."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a version in the cache, if the file system supports locks; the kernel frees that of a process
    that ends.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("wb") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy_once(registry: Registry, name: str, version: int, location: str, folder: Path, wanted: str | None) -> None:
    """Download a version beside its place in the cache, check it, and rename it, unless a valid copy is there."""
    with suppress(ArtefactError):
        check_artefact(folder, wanted)
        return
    with (
        registry_errors(registry.uri, f"downloading {name!r} version {version}"),
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        from mlflow.artifacts import download_artifacts

        fetched = download_artifacts(
            artifact_uri=f"{location.rstrip('/')}/artifacts/artefact",
            dst_path=scratch,
            tracking_uri=registry.uri,
            registry_uri=registry.uri,
        )
        check_artefact(Path(fetched), wanted)
        with suppress(FileNotFoundError):
            folder.rename(Path(scratch) / "damaged")  # nobody reads it: it fails its check
        Path(fetched).rename(folder)


def local_path(location: str) -> Path | None:
    """The path of an MLflow location on this machine; None for a remote one."""
    parsed = urlparse(location)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(location) if not parsed.scheme else None
