"""`presage tools`, as a user types it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from presage.cli.presage import app
from presage.testing.servers import free_port


def presage(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


SANDBOX = '[tools.sandbox.subprocess]\ncommand = ["sleep", "1"]\n'


def test_check_prints_the_settings_with_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    file.write_text('folder = "x"\n' + SANDBOX)
    found = presage("tools", "serve", str(file), "--check", "--json")
    assert found.exit_code == 0, found.output
    settings = json.loads(found.stdout)
    assert tomllib.loads(presage("tools", "serve", str(file), "--check").stdout)["folder"] == "x"
    assert settings["listen"] == "127.0.0.1:8790"
    assert settings["tools"]["sandbox"]["wait_cost"] == 10.0
    assert not (tmp_path / "x").exists()


def test_check_looks_for_programs_and_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRESAGE_WEBHOOK_SECRET", raising=False)
    file = tmp_path / "tools.toml"
    file.write_text('tenants = { a = "NO_SUCH_TOKEN" }\n' + SANDBOX)
    found = presage("tools", "serve", str(file), "--check")
    assert found.exit_code == 0, found.output
    assert "PRESAGE_WEBHOOK_SECRET is not set: no events are taken" in found.stderr
    assert "NO_SUCH_TOKEN is not set: no start" in found.stderr
    for tool, of in (
        ('[tools.box.subprocess]\ncommand = ["no-such-program"]', "tools.box.subprocess.command"),
        ('[tools.box.subprocess]\ncommand = ["true"]\nready = ["no-such-program"]', "tools.box.subprocess.ready"),
        ('[tools.box.docker]\nimage = "i"\nprogram = "no-such-program"', "tools.box.docker.program"),
    ):
        file.write_text(tool)
        refused = presage("tools", "serve", str(file), "--check")
        assert refused.exit_code == 2
        assert f"{of}: there is no program 'no-such-program'" in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("tools = [", "is no TOML"),
        ("", "tools: Field required"),
        ("[tools]", "tools: "),
        ("[tools.sandbox]", "give one of the tables subprocess, docker and custom"),
        (SANDBOX + '[tools.sandbox.docker]\nimage = "x"', "give one of the tables"),
        ("[tools.sandbox.subprocess]\ncommand = []", "tools.sandbox.subprocess.command"),
        ('[tools.sandbox.docker]\nimage = "--privileged"', "tools.sandbox.docker.image"),
        ('[tools."a b".docker]\nimage = "x"', "tools.a b"),
        ("[tools.sandbox]\nmost = 0\n" + SANDBOX, "tools.sandbox.most"),
        ("[tools.sandbox]\nwait_cost = -1.0\n" + SANDBOX, "tools.sandbox.wait_cost"),
        ('listen = "8790"\n' + SANDBOX, "listen: "),
        ("colour = 1\n" + SANDBOX, "colour: "),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "tools.toml"
    if text is not None:
        file.write_text(text)
    found = presage("tools", "serve", str(file))
    assert found.exit_code == 2
    assert message in found.stderr.replace("\n", " ")
    assert "Traceback" not in found.output


def test_a_service_that_others_could_reach_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRESAGE_TOOLS_TOKEN", raising=False)
    file = tmp_path / "tools.toml"
    file.write_text(f'listen = "0.0.0.0:{free_port()}"\nfolder = "{tmp_path}/x"\n' + SANDBOX)
    found = presage("tools", "serve", str(file))
    assert found.exit_code == 2
    assert "PRESAGE_TOOLS_TOKEN" in found.stderr


def test_the_status_of_a_service_that_is_not_there_says_so() -> None:
    found = presage("tools", "status", "--url", f"http://127.0.0.1:{free_port()}")
    assert found.exit_code == 2
    assert "no tool service answers" in found.stderr.replace("\n", " ")
