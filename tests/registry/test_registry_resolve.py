"""From a reference to a checked folder, or an error that says what there is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from presage.errors import ArtefactError, RegistryError
from presage.predictors.common.artefact import artefact_digest
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
    assert [path.name for path in tmp_path.iterdir()] == [found.folder.name]
