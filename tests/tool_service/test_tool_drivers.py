"""Containers are started, used, found again and removed by the commands of docker; other drivers plug in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tool_services import SECRET, event, tools_service, until

from presage.errors import ConfigurationError
from presage.tool_service.config import DockerSettings, SubprocessSettings, ToolSettings
from presage.tool_service.drivers import DockerDriver, SubprocessDriver, ToolError, driver_of

DOCKER = '''
import json, os, sys
from pathlib import Path
folder, (command, *rest) = Path(os.environ["FAKE_DOCKER"]), sys.argv[1:]
with (folder / "calls").open("a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
if (folder / "down").exists():
    sys.exit("Cannot connect to the Docker daemon")
if command == "run":
    options = dict(one.lstrip("-").split("=", 1) for one in rest if one.startswith("--") and "=" in one)
    labels = [one.removeprefix("--label=") for one in rest if one.startswith("--label=")]
    arguments = [one for one in rest if not one.startswith("--")]
    if arguments[0] == "missing":
        sys.exit("Unable to find image 'missing:latest'")
    made = {"labels": labels, "running": arguments[1:] != ["exits"], "ready": 0, "arguments": arguments}
    (folder / (options["name"] + ".container")).write_text(json.dumps(made))
    print("0" * 64)
elif command == "exec":
    file = folder / (rest[0] + ".container")
    made = json.loads(file.read_text())
    made["ready"] += 1
    file.write_text(json.dumps(made))
    sys.exit(0 if made["running"] and made["ready"] > 2 else 1)
elif command == "ps":
    wanted = [one.removeprefix("--filter=") for one in rest if one.startswith("--filter=")]
    for file in folder.glob("*.container"):
        made = json.loads(file.read_text())
        has = [f"label={label}" for label in made["labels"]] + ["status=running"] * made["running"]
        if all(one in has for one in wanted):
            print(next(one for one in made["labels"] if one.startswith("presage.tool=")).split("=")[1])
elif command == "rm":
    (folder / (rest[-1] + ".container")).unlink()
else:
    sys.exit("unknown command " + command)
'''  # fmt: skip


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The containers of a program `docker` on the path, as files."""
    folder = tmp_path / "containers"
    folder.mkdir()
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{DOCKER}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    return folder


def names(containers: Path) -> list[str]:
    return sorted(path.stem for path in containers.glob("*.container"))


def test_a_container_is_started_handed_out_and_removed(containers: Path, tmp_path: Path) -> None:
    settings = {"docker": {"image": "box", "command": ["serve"], "options": ["--memory=2g"], "ready": ["healthy"]}}
    with tools_service(tmp_path, {"sandbox": settings}) as tools:
        found = tools.acquire("w")
        assert names(containers) == [found["container"]]
        calls = (containers / "calls").read_text()
        assert f"--volume={found['folder']}:/tool" in calls
        assert '"--memory=2g", "box", "serve"]' in calls
        tools.hear(event("ended", "w"))
        until(lambda: names(containers) == [])
        until(tools.nothing_left)


def test_a_daemon_that_is_away_costs_no_tool_in_use_and_what_is_to_be_removed_is_removed_later(
    containers: Path, tmp_path: Path
) -> None:
    settings = {"sandbox": {"docker": {"image": "box"}}}
    with tools_service(tmp_path, settings) as tools:
        first = tools.acquire("w")
        (containers / "down").touch()
        assert tools.acquire("w")["id"] == first["id"]
        assert "Cannot connect" in tools.ask("v").json()["error"]
    with tools_service(tmp_path, settings) as tools:
        assert [state for _, state, workflow in tools.rows() if workflow == "w"] == ["used"]
        tools.hear(event("ended", "w"))
        (containers / "down").unlink()
        until(lambda: names(containers) == [])
        until(tools.nothing_left)


def test_a_daemon_that_is_away_uses_up_no_room(containers: Path, tmp_path: Path) -> None:
    """Nor is whoever finds it away told to raise the most."""
    with tools_service(tmp_path, {"sandbox": {"docker": {"image": "box"}, "most": 2}}) as tools:
        used = tools.acquire("w")
        (containers / "down").touch()
        for number in range(4):
            answer = tools.ask(f"v{number}", timeout_s=20)
            assert (answer.status_code, "Cannot connect" in answer.json()["error"]) == (502, True)
            until(lambda: tools.states() == ["used"])
        tools.acquire("w")
        tools.release(used["id"])  # it may be there still, so it counts until it is gone
        until(lambda: tools.states() == ["removing"])
        (containers / "down").unlink()
        until(lambda: tools.states() == [])
        assert tools.acquire("x")


def test_containers_that_no_row_knows_are_removed_at_the_start_and_those_of_others_are_not(
    containers: Path, tmp_path: Path
) -> None:
    settings = {"sandbox": {"docker": {"image": "box"}}}
    with tools_service(tmp_path, settings) as tools:
        used = tools.acquire("w")
        (known,) = containers.glob("*.container")
        (containers / "presage-tool-stray.container").write_text(known.read_text().replace(used["id"], "stray"))
        other = known.read_text().replace(used["id"], "other").replace("presage.owner=", "presage.owner=x")
        (containers / "presage-tool-other.container").write_text(other)
    with tools_service(tmp_path, settings):
        until(lambda: names(containers) == sorted([used["container"], "presage-tool-other"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": "missing"}, "Unable to find image"),
        ({"image": "box", "command": ["exits"], "ready": ["healthy"]}, "ended before it could be used"),
        ({"image": "box", "program": "no-such-program"}, "cannot be run"),
    ],
)
def test_a_container_that_cannot_be_used_is_reported(
    containers: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    driver = DockerDriver(DockerSettings.model_validate(settings))
    with pytest.raises(ToolError, match=message):
        driver.start("0", "owner", tmp_path, 20.0)


def test_a_process_is_found_by_its_id_and_owner_by_a_driver_made_anew(tmp_path: Path) -> None:
    settings = SubprocessSettings(command=["sleep", "1000"])
    handle = SubprocessDriver(settings).start("anew", "owner-of-test", tmp_path, 5.0)
    anew = SubprocessDriver(settings)
    assert anew.alive("anew", handle)
    assert not anew.alive("other", handle)
    assert anew.owned("owner-of-test") == {"anew"}
    anew.remove("anew")
    assert not anew.alive("anew", handle)
    assert anew.owned("owner-of-test") == set()
    anew.remove("anew")


def test_a_server_is_ready_once_it_listens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    driver = SubprocessDriver(SubprocessSettings(command=command))
    handle = driver.start("server", "owner-of-test", tmp_path, 60.0)
    assert httpx.get(f"http://127.0.0.1:{handle['port']}").status_code == 200
    driver.remove("server")


class Misbehaves:
    """A driver of another package that fails as no driver should."""

    def __init__(self, fails: str) -> None:
        self._fails, self._removals = fails, 0

    def start(self, tool_id: str, owner: str, folder: Path, within_s: float) -> dict[str, Any]:
        if self._fails == "start":
            raise KeyError("start")
        return {"place": "somewhere"}

    def alive(self, tool_id: str, handle: dict[str, Any]) -> bool:
        if self._fails == "alive":
            raise KeyError("alive")
        return True

    def remove(self, tool_id: str) -> None:
        self._removals += 1
        if self._fails == "remove" and self._removals == 1:
            raise KeyError("remove")

    def owned(self, owner: str) -> set[str]:
        raise KeyError("owned")


@pytest.mark.parametrize(("fails", "status"), [("start", 502), ("alive", 502), ("remove", 200), ("nothing", 200)])
def test_a_driver_of_another_package_that_raises_anything_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, status: int
) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    custom = {"driver": f"{__name__}:Misbehaves", "options": {"fails": fails}}
    with tools_service(tmp_path, {"sandbox": {"custom": custom}}) as tools:
        answer = tools.ask("w")
        assert answer.status_code == status
        assert status != 200 or answer.json()["place"] == "somewhere"
        tools.hear(event("ended", "w"))
        until(tools.nothing_left)


def test_a_driver_that_cannot_be_loaded_is_named() -> None:
    for driver in ("no_such_module:Driver", f"{__name__}:Missing", f"{__name__}:Misbehaves"):
        with pytest.raises(ConfigurationError, match="cannot be loaded"):
            driver_of(ToolSettings.model_validate({"custom": {"driver": driver}}))
