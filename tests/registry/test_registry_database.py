"""Versions found in a database of this machine without MLflow: the same ones, and MLflow's word where there is none."""

from collections.abc import Callable

import pytest

from presage.errors import ArtefactError, RegistryError
from presage.predictors.common.artefact import write_artefact
from presage.registry import database
from presage.registry.connect import Registry
from presage.registry.database import resolve_at
from presage.registry.package import RegisteredVersion
from presage.registry.resolve import resolve

Register = Callable[[str], RegisteredVersion]


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the database answers")

    monkeypatch.setattr(database, "resolve", never)


@pytest.mark.usefixtures("no_mlflow")
def test_a_version_and_an_alias_are_what_mlflow_finds(registry: Registry, registered: Register) -> None:
    registered("near"), registered("near")
    registry.client.set_registered_model_alias("near", "champion", "1")
    for reference in ("models:/near/2", "models:/near@champion"):
        assert resolve_at(reference, registry.uri) == resolve(reference, lambda: registry)
    registry.client.set_registered_model_alias("near", "champion", "2")
    assert resolve_at("models:/near@champion", registry.uri).version == 2


@pytest.mark.usefixtures("no_mlflow")
def test_replaced_files_are_refused(registry: Registry, registered: Register) -> None:
    registered("replaced")
    folder = resolve("models:/replaced/1", lambda: registry).folder
    write_artefact(folder, kind="next-agent", config={"horizon": 1}, tensors={}, training_data={})
    with pytest.raises(ArtefactError, match="which the version was registered with"):
        resolve_at("models:/replaced/1", registry.uri)


def test_what_is_not_there_is_answered_by_mlflow(registry: Registry, registered: Register) -> None:
    registered("gone"), registered("gone")
    registry.client.set_registered_model_alias("gone", "champion", "1")
    registry.client.delete_model_version("gone", "1")
    for reference, complaint in (
        ("models:/gone/1", r"has no version 1 in .*; there are: 2\."),
        ("models:/gone@champion", "has no alias 'champion'"),
        ("models:/gome/2", "Did you mean 'gone'"),
        ("models:/gone", "for example models:/next-agent@champion"),
    ):
        with pytest.raises(RegistryError, match=complaint):
            resolve_at(reference, registry.uri)
    with pytest.raises(RegistryError, match="there is no"):
        resolve_at("models:/gone/2", "sqlite:////nowhere/mlflow.db")


def test_a_database_of_another_schema_is_left_to_mlflow(
    registry: Registry, registered: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered("elsewhere")
    monkeypatch.setattr(database, "_VERSION", "")
    monkeypatch.setattr(database, "_NUMBERED", "SELECT no_such_column FROM model_versions")
    assert resolve_at("models:/elsewhere/1", registry.uri) == resolve("models:/elsewhere/1", lambda: registry)
