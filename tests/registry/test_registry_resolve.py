"""From a reference to a checked folder, or an error that says what there is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.artifacts import download_artifacts

from presage.errors import ArtefactError, RegistryError
from presage.predictors.common.artefact import artefact_digest, read_artefact, write_artefact
from presage.registry import resolve as resolve_module
from presage.registry.connect import Registry
from presage.registry.package import RegisteredVersion
from presage.registry.resolve import resolve

Register = Callable[[str], RegisteredVersion]


def no_registry() -> Registry:
    raise AssertionError("a folder needs no registry")


def test_a_folder_is_checked_and_needs_no_registry(artefact_folder: Path, tmp_path: Path) -> None:
    found = resolve(str(artefact_folder), no_registry)
    assert (found.folder, found.name, found.version, found.source) == (
        artefact_folder,
        None,
        None,
        str(artefact_folder),
    )
    with pytest.raises(ArtefactError, match="found nothing"):
        resolve(str(tmp_path / "absent"), no_registry)


def test_versions_and_aliases_lead_to_the_artefact(
    registry: Registry, registered: Register, artefact_folder: Path
) -> None:
    registered("found"), registered("found")
    registry.client.set_registered_model_alias("found", "champion", "1")
    by_version = resolve("models:/found/2", lambda: registry)
    by_alias = resolve("models:/found@champion", lambda: registry)
    assert (by_version.name, by_version.version, by_alias.version) == ("found", 2, 1)
    assert artefact_digest(by_version.folder) == artefact_digest(by_alias.folder) == artefact_digest(artefact_folder)


def test_what_is_missing_is_answered_with_what_there_is(registry: Registry, registered: Register) -> None:
    registered("lonely")
    registry.client.set_registered_model_alias("lonely", "shadow", "1")
    with pytest.raises(RegistryError, match=r"'lonely' has no version 7 in .*; there are: 1\."):
        resolve("models:/lonely/7", lambda: registry)
    with pytest.raises(RegistryError, match=r"no alias 'champion' in .*; there are: shadow \(version 1\)"):
        resolve("models:/lonely@champion", lambda: registry)
    with pytest.raises(RegistryError, match=r"no model 'nobody' in .*; there are: .*lonely"):
        resolve("models:/nobody@champion", lambda: registry)
    with pytest.raises(RegistryError, match=r"no model 'lonley' in .*\. Did you mean 'lonely'\?"):
        resolve("models:/lonley/1", lambda: registry)


def test_a_bare_name_is_answered_with_the_reference_of_the_model(registry: Registry, registered: Register) -> None:
    registered("lonely")
    for name in ("lonely", "Lonely", "lonley"):
        with pytest.raises(ArtefactError, match=r"found nothing; .* Did you mean models:/lonely@champion\?"):
            resolve(name, lambda: registry)
    with pytest.raises(ArtefactError, match=r"a registered model is models:/quite-other@champion"):
        resolve("quite-other", lambda: registry)


@pytest.mark.parametrize(
    "reference", ["models:/", "models:/a", "models:/a/b", "models:a@b", "models:/a@b@c", "models:/a/1/2"]
)
def test_half_a_reference_is_refused_with_an_example(reference: str) -> None:
    with pytest.raises(RegistryError, match="for example models:/next-agent@champion"):
        resolve(reference, no_registry)


def test_a_version_whose_files_were_altered_is_refused(registry: Registry, registered: Register) -> None:
    registered("altered")
    folder = resolve("models:/altered/1", lambda: registry).folder
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ArtefactError, match=r"model\.safetensors"):
        resolve("models:/altered/1", lambda: registry)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(RegistryError, match="holds no Presage artefact"):
        resolve("models:/altered/1", lambda: registry)


def test_other_bytes_under_a_registered_version_are_refused(
    registry: Registry, registered: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole artefact, with sound digests of its own, in the place of the one that was registered."""
    registered("swapped")
    folder = resolve("models:/swapped/1", lambda: registry).folder
    config = read_artefact(folder).config
    write_artefact(folder, kind="next-agent", config=config, tensors={"bias": np.array(0.1)}, training_data={})
    with pytest.raises(ArtefactError, match="which the version was registered with"):
        resolve("models:/swapped/1", lambda: registry)
    monkeypatch.setattr(resolve_module, "local_path", lambda _: None)
    with pytest.raises(ArtefactError, match="which the version was registered with"):
        resolve("models:/swapped/1", lambda: registry, cache=tmp_path, pause=lambda _: None)
    assert copies(tmp_path) == []


def copies(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def test_from_elsewhere_it_is_copied_once_and_again_when_the_copy_is_cut(
    registry: Registry, registered: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered("remote")
    monkeypatch.setattr(resolve_module, "local_path", lambda _: None)
    found = resolve("models:/remote/1", lambda: registry, cache=tmp_path)
    assert found.folder.parent == tmp_path
    written = (found.folder / "config.json").stat().st_mtime_ns
    assert resolve("models:/remote/1", lambda: registry, cache=tmp_path) == found
    assert (found.folder / "config.json").stat().st_mtime_ns == written
    (found.folder / "model.safetensors").write_bytes(b"")
    assert resolve("models:/remote/1", lambda: registry, cache=tmp_path) == found
    assert copies(tmp_path) == [found.folder]


def test_a_download_that_fails_half_way_is_tried_again_whatever_the_error(
    registry: Registry, registered: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered("flaky")
    monkeypatch.setattr(resolve_module, "local_path", lambda _: None)
    errors: list[Exception] = [OSError(28, "No space left on device"), ZeroDivisionError("inside a store's client")]
    real = download_artifacts

    def fails_first(**arguments: Any) -> str:
        if errors:
            half = Path(arguments["dst_path"]) / "artefact"
            half.mkdir(parents=True, exist_ok=True)
            (half / "config.json").write_text("{")
            raise errors.pop()
        return real(**arguments)

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", fails_first)
    waits: list[int] = []
    found = resolve("models:/flaky/1", lambda: registry, cache=tmp_path, pause=waits.append)
    assert (waits, copies(tmp_path)) == ([1, 2], [found.folder])
    errors += [OSError(28, "No space left on device")] * 3
    with pytest.raises(RegistryError, match=r"'flaky' version 1 cannot be downloaded: .*No space left on device"):
        resolve("models:/flaky/1", lambda: registry, cache=tmp_path / "full", pause=waits.append)
    assert waits == [1, 2, 1, 2]
    assert copies(tmp_path / "full") == []


FETCH = """
import sys
from pathlib import Path
from presage.predictors.common.artefact import read_artefact
from presage.registry import resolve
from presage.registry.connect import open_existing
resolve.local_path = lambda _: None  # as if it were on a server
registry = open_existing(sys.argv[1])
for turn in range(6):
    sys.stdin.readline()
    read_artefact(resolve.resolve("models:/shared/1", lambda: registry, cache=Path(sys.argv[2]) / str(turn)).folder)
    print("read", flush=True)
"""


@pytest.mark.slow
def test_engines_of_one_host_share_the_copies(registry: Registry, registered: Register, tmp_path: Path) -> None:
    registered("shared")
    command = (sys.executable, "-c", FETCH, registry.uri, str(tmp_path))
    engines = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for turn in range(6):
        for engine in engines:
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "read\n"
        assert len(copies(tmp_path / str(turn))) == 1
    for engine in engines:
        engine.communicate()
