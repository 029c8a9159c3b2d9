"""`presage vllm-check` says what an engine would find, and by its exit code whether that is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests look at it")

from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.start import command, engine_check
from presage.serving_hooks.vllm.start.command import Finding, findings

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[3]


def looked(registry: str | None = None) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings(registry, lambda doing: None)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.mark.slow
def test_the_command_tells_all_as_one_object(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from presage.cli.presage import main; main()", "vllm-check", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ready"]
    assert any(finding["found"].startswith(f"{engine_check.installed()}, verified (") for finding in told["findings"])
    assert told["verified_versions"] == ["0.32.0", "0.33.0"]
    states = {finding["what"]: finding["state"] for finding in told["findings"]}
    assert states == {
        "vLLM": "ok",
        "plugin: methods of the engine": "ok",
        "plugin: HTTP routes": "ok",
        "platform": "ok",
        "scheduling": "ok",
        "registry": "less",
        "model: next-agent": "less",
        "model: remaining-length": "less",
        "model: return-time": "less",
        "model: context-growth": "less",
        "model: profile": "less",
    }
    assert not list(tmp_path.iterdir())


def test_a_registry_that_was_asked_for_and_does_not_answer_stands_in_the_way(tmp_path: Path) -> None:
    for uri, said in (("http://localhost:9", "does not answer"), (f"sqlite:///{tmp_path}/no.db", "there is no")):
        found = looked(uri)
        assert found["registry"].state == "no"
        assert said in found["registry"].found
        assert found["model: next-agent"].found == "none, without a registry"
    assert not list(tmp_path.iterdir())


def test_a_vllm_that_differs_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "installed", lambda: "0.99.0")
    assert looked()["vLLM"] == Finding("vLLM", "no", "version 0.99.0 is outside 0.32.* and 0.33.*")


def test_a_patch_release_is_accepted_and_not_called_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "installed", lambda: "0.32.99")
    found = looked()["vLLM"]
    assert found.state == "ok"
    assert found.found.startswith("0.32.99, accepted, not verified (verified: 0.32.0, 0.33.0;")


@pytest.mark.parametrize("entries", [[], [("presage", "no.such:thing")]])
def test_plugins_that_are_not_there_or_do_not_load_stand_in_the_way(
    monkeypatch: pytest.MonkeyPatch, entries: list[Any]
) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.setattr(
        command, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in entries]
    )
    found = looked()
    assert found["plugin: methods of the engine"].state == found["plugin: HTTP routes"].state == "no"


def test_a_front_end_without_our_routes_is_said_to_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    routes = looked()["plugin: HTTP routes"]
    assert routes.state == "less"
    assert "no status, metrics" in routes.found
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert looked()["plugin: HTTP routes"].state == "ok"


def test_a_platform_that_does_not_work_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, str]:
        raise RuntimeError("no driver")

    monkeypatch.setattr(engine, "platform", broken)
    assert looked()["platform"].state == "no"
