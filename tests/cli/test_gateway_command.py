"""`presage gateway`, `presage traces agents` and `presage agents name`, as a user types them."""

from __future__ import annotations

import json
import socket
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from presage.cli.presage import app

UPSTREAM = "http://127.0.0.1:8000"


def presage(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_check_prints_the_settings_that_would_serve(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[[upstreams]]\nurl = "http://a:8000/v1"\ndialect = "presage"\n[forecasts]\nnext_agent = "model"\n')
    found = presage(
        "gateway", "--config", str(file), "--mode", "shadow", "--record", str(tmp_path / "served"), "--check",
        "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    settings = json.loads(found.stdout)
    assert settings["upstreams"][0]["url"] == "http://a:8000"
    assert settings["modes"]["default"] == "shadow"
    assert settings["forecasts"]["next_agent"] == "model"
    assert settings["forecasts"]["recorder"]["folder"] == str(tmp_path / "served")
    options = ("--dialect", "vllm-router", "--workflow-type", "support")
    short = presage("gateway", "--upstream", UPSTREAM, *options, "--check")
    assert "cannot be reached" in short.stderr.replace("\n", " ")
    settings = tomllib.loads(short.stdout)
    assert settings["upstreams"][0]["dialect"] == "vllm-router"
    assert settings["workflow_type"]["default"] == "support"
    copy = tmp_path / "copy.toml"
    copy.write_text(short.stdout)
    again = presage("gateway", "--config", str(copy), "--check")
    assert again.stdout == short.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --config FILE, --upstream URL"),
        (("--upstream", UPSTREAM, "--simulate"), "give one of"),
        (("--config", "missing.toml"), "cannot be read"),
        (("--upstream", "nowhere"), "give an address"),
        (("--upstream", UPSTREAM, "--dialect", "vlm"), "dialect: did you mean vllm? give one of"),
        (("--upstream", UPSTREAM, "--dialect", "qwertz"), "dialect: give one of"),
        (("--upstream", UPSTREAM, "--mode", "loud"), "modes.default"),
        (("--upstream", UPSTREAM, "--forecaster", "router=x"), "KIND=MODEL"),
        (("--upstream", UPSTREAM, "--time-to-live", "-1"), "time_to_live_s"),
        (("--upstream", UPSTREAM, "--listen", "8100"), "listen"),
        (("--upstream", UPSTREAM, "--ext-proc", "9002"), "--ext-proc is '9002'; give HOST:PORT"),
        (("--upstream", UPSTREAM, "--ext-proc", "127.0.0.1:70000"), "--ext-proc is '127.0.0.1:70000'; give HOST:PORT"),
        (("--upstream", UPSTREAM, "--listen", "127.0.0.1:70000"), "give HOST:PORT"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], message: str) -> None:
    found = presage("gateway", *arguments, "--check")
    assert found.exit_code == 2
    assert message in found.stderr.replace("\n", " ")
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("time_to_live_s = 5.0", "time_to_live_s: belongs in [forecasts]"),
        ("body_mb = 5", "body_mb: belongs in [limits]"),
        ("[limits]\nlisten = 'a:1'", "limits.listen: belongs at the top of the file"),
        ("[forecasts]\nremainin_length = 'a'", "did you mean remaining_length?"),
        ("[limits]\nbodymb = 3", "did you mean body_mb?"),
        ("keysvariable = 'A'", "did you mean keys_variable?"),
        ("retry = 1.0", "did you mean retry_s in [forecasts]?"),
        ("dialect = 'vllm'", "dialect: belongs in [[upstreams]]"),
        ("qwertz = 1", "there is no such setting"),
        ("[[upstreams]", "not valid TOML"),
        ("workflow_type = ''", "workflow_type.default: give a name of 1 to 256 printable characters"),
        ("workflow_type = 3", "workflow_type: give a name, or default, tenants, header, routes"),
        ("workflow_types = 'a'", "did you mean workflow_type?"),
        ("[workflow_type]\nroute = {}", "workflow_type.route: there is no such setting; did you mean routes?"),
        ("[workflow_type.routes]\ndesk = 'a'", "give a path such as /research"),
        ("[workflow_type.routes]\n'/v1' = 'a'", "which does not begin with v1 or v2"),
        ("[workflow_type.tenants]\nkey-0 = 'a'", "workflow_type.tenants names key-0, which no API key is"),
    ],
)
def test_a_setting_in_the_wrong_place_or_spelling_is_told_where_it_belongs(
    tmp_path: Path, lines: str, message: str
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f"{lines}\n[[upstreams]]\nurl = '{UPSTREAM}'\n")
    found = presage("gateway", "--config", str(file), "--check")
    assert found.exit_code == 2
    assert message in found.stderr.replace("\n", " ")


def test_check_looks_at_all_that_a_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY_KEYS", "ENGINE_KEY", "PRESAGE_WEBHOOK_SECRET", "NAMES_SECRET"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "gateway.toml"
    file.write_text(
        f"""keys_variable = "GATEWAY_KEYS"
names_secret_variable = "NAMES_SECRET"
agent_names = "{tmp_path}/names.json"
[[upstreams]]
url = "{UPSTREAM}"
engine = "{tmp_path}/engine.toml"
api_key_variable = "ENGINE_KEY"
[webhook]
url = "https://tools.example/events"
file = "events.sqlite"
"""
    )
    found = presage("gateway", "--config", str(file), "--check")
    assert found.exit_code == 2
    told = found.stderr.replace("\n", " ")
    for what in ("GATEWAY_KEYS", "ENGINE_KEY", "PRESAGE_WEBHOOK_SECRET", "NAMES_SECRET", "names.json", "engine.toml"):
        assert what in told


def test_an_address_that_is_taken_is_one_clear_error_and_nothing_listens_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for options in (("--listen", address), ("--listen", "127.0.0.1:0", "--ext-proc", address)):
            found = presage("gateway", "--upstream", UPSTREAM, *options)
            assert found.exit_code == 2
            assert f"{address} cannot be listened on: another program listens there" in found.stderr.replace("\n", " ")
            assert "the gateway listens" not in found.output
            assert "Traceback" not in found.output


def test_names_of_agents_are_learnt_from_traces(tmp_path: Path) -> None:
    rows = [
        {"workflow_type": "t", "workflow_id": f"w{number}", "step": step, "agent": agent, "system_prompt": prompt}
        for number in range(2)
        for step, (agent, prompt) in enumerate([("planner", "You plan trips to the sea."), ("writer", "You write.")])
    ]
    traces = tmp_path / "steps.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    to = tmp_path / "agents.json"
    found = presage("traces", "agents", str(traces), "--to", str(to), "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["system_prompts"] == 2
    assert "sea" not in to.read_text()
    for row in rows:
        row["system_prompt"] = ""
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = presage("traces", "agents", str(traces), "--to", str(tmp_path / "none.json"))
    assert refused.exit_code == 2
    assert not (tmp_path / "none.json").exists()


def test_agents_that_were_seen_get_names_in_a_new_file_and_other_ones_in_it(tmp_path: Path) -> None:
    file = tmp_path / "agents.json"
    for arguments, ids in (
        (("agent-9c9f8a62=planner", "--workflow-type", "travel"), {"agent-9c9f8a62": ["travel", "planner"]}),
        (("planner=guide",), {"agent-9c9f8a62": ["travel", "guide"]}),
    ):
        found = presage("agents", "name", *arguments, "--in", str(file), "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout) == {"named": 1, "file": str(file)}
        assert json.loads(file.read_text())["ids"] == ids


@pytest.mark.parametrize(
    ("given", "message"),
    [("planner", "give AGENT=NAME"), ("planner=", "give AGENT=NAME"), ("planner=x", "neither an id")],
)
def test_an_agent_that_cannot_be_named_is_one_clear_error(tmp_path: Path, given: str, message: str) -> None:
    found = presage("agents", "name", given, "--in", str(tmp_path / "agents.json"))
    assert found.exit_code == 2
    assert message in found.stderr.replace("\n", " ")
    assert not (tmp_path / "agents.json").exists()
