"""The container files have the right form: what they copy and install exists, and what they run is a valid command.

Nothing here builds an image or starts a container.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from presage.cli.presage import app

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _checked(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ran = CliRunner().invoke(app, [*arguments, "--check"])
    assert ran.exit_code == 0, ran.output


def test_the_image_installs_what_there_is() -> None:
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert [name for name in line.split() if not (ROOT / name).exists()] == []
    (extra,) = re.findall(r"pip install \S+ '\.\[(\w+)\]'", DOCKERFILE)
    assert extra in PROJECT["optional-dependencies"]
    (minor,) = re.findall(r"^FROM python:3\.(\d+)-slim$", DOCKERFILE, re.MULTILINE)
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]


def test_the_image_runs_a_valid_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    _checked(json.loads(command), tmp_path, monkeypatch)


def test_compose_runs_a_valid_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = COMPOSE["services"]["gateway"]
    _checked(gateway["command"], tmp_path, monkeypatch)
    assert set(gateway["depends_on"]) <= set(COMPOSE["services"])
    for service in COMPOSE["services"].values():
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])


def test_the_engine_is_a_version_that_the_hooks_know() -> None:
    version = COMPOSE["services"]["engine"]["image"].partition(":v")[2]
    low, high = re.findall(r"0\.(\d+)", PROJECT["optional-dependencies"]["serve"][0])
    assert int(low) <= int(version.split(".")[1]) < int(high)


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_the_forms_of_reports_are_complete(form: Path) -> None:
    read = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.name == "config.yml":
        assert read == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(read)
    asked = [field for field in read["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked) > 0
    assert all(field["attributes"]["label"] for field in asked)
