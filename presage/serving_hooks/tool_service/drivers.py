"""Drivers start and remove tools. A tool outlives the service: it is found again by its id, or removed by it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped]

from presage.errors import ConfigurationError
from presage.serving_hooks.tool_service.config import DockerSettings, SubprocessSettings, ToolSettings

Handle = dict[str, Any]
"""What a client needs to use a tool, as JSON values: `folder`, `port` or `container`, and what else a driver gives."""

_POLL_S: Final = 0.02
_OWNER: Final = "PRESAGE_TOOL_OWNER"
_ID: Final = "PRESAGE_TOOL_ID"


class ToolError(Exception):
    """A tool could not be started or removed; the message names no text of a request."""


class Driver(Protocol):
    """Starts tools of one kind. Called from several threads, for different tools at once."""

    def start(self, tool_id: str, owner: str, folder: Path, within_s: float) -> Handle:
        """Starts a tool and waits until it can be used.

        Args:
            tool_id: unique; whatever belongs to the tool is found by it.
            owner: the service that starts it, the same after a restart.
            folder: an empty folder of its own.

        Raises:
            ToolError: it cannot be started, or not within so many seconds.
        """

    def alive(self, tool_id: str, handle: Handle) -> bool:
        """Whether it can still be used."""

    def remove(self, tool_id: str) -> None:
        """Removes whatever there is of a tool, except its folder; raises ToolError if something stays."""

    def owned(self, owner: str) -> set[str]:
        """The ids of all tools that this service has started and that are still there."""


def driver_of(settings: ToolSettings) -> Driver:
    """The driver of a tool.

    Raises:
        ConfigurationError: a driver of another package cannot be loaded.
    """
    if settings.subprocess is not None:
        return SubprocessDriver(settings.subprocess)
    if settings.docker is not None:
        return DockerDriver(settings.docker)
    assert settings.custom is not None
    module, _, name = settings.custom.driver.partition(":")
    try:
        made: Driver = getattr(import_module(module), name)(**settings.custom.options)
    except Exception as error:
        raise ConfigurationError(
            f"the driver {settings.custom.driver} cannot be loaded ({type(error).__name__}: {error}); give module:class"
        ) from error
    return made


class SubprocessDriver:
    """A process and its descendants. They are recognised by a variable of their environment, which they inherit, so
    that those that have left the session are found as well."""

    def __init__(self, settings: SubprocessSettings) -> None:
        self._settings = settings
        self._port = any("{port}" in argument for argument in settings.command)

    def start(self, tool_id: str, owner: str, folder: Path, within_s: float) -> Handle:
        """As `Driver.start`."""
        known: dict[str, Any] = {"id": tool_id, "folder": str(folder), "port": _free_port()}
        until = time.monotonic() + within_s
        variables = {f"PRESAGE_TOOL_{name.upper()}": str(value) for name, value in known.items()}
        environment = {**os.environ, **variables, _OWNER: owner}
        try:
            process = subprocess.Popen(
                _filled(self._settings.command, known),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"its program cannot be started ({error.strerror})") from error
        ready = _filled(self._settings.ready, known) if self._settings.ready is not None else None
        while not self._is_ready(ready, known["port"], environment, folder):
            if process.poll() is not None:
                raise ToolError(f"its program ended with {process.returncode} before it could be used")
            if time.monotonic() > until:
                raise ToolError(f"it could not be used within {within_s:g} s")
            time.sleep(_POLL_S)
        return {"folder": str(folder), "port": known["port"], "pid": process.pid}

    def _is_ready(self, ready: Sequence[str] | None, port: int, environment: Mapping[str, str], folder: Path) -> bool:
        if ready is not None:
            done = subprocess.run(
                ready, cwd=folder, env=environment, check=False, stdin=subprocess.DEVNULL, capture_output=True
            )
            return done.returncode == 0
        if not self._port:
            return True
        with socket.socket() as trying:
            trying.settimeout(1.0)
            return trying.connect_ex(("127.0.0.1", port)) == 0

    def alive(self, tool_id: str, handle: Handle) -> bool:
        """As `Driver.alive`."""
        return any(process.pid == handle["pid"] for process in _processes(_ID, tool_id))

    def remove(self, tool_id: str) -> None:
        """As `Driver.remove`."""
        for _ in range(10):  # a process may fork while the others are killed
            found = _processes(_ID, tool_id)
            if not found:
                return
            for process in found:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(found, timeout=5.0)
        raise ToolError("its processes cannot be killed")

    def owned(self, owner: str) -> set[str]:
        """As `Driver.owned`."""
        return {process.environ()[_ID] for process in _processes(_OWNER, owner)}


def _free_port() -> int:
    with socket.socket() as trying:
        trying.bind(("127.0.0.1", 0))
        port: int = trying.getsockname()[1]
        return port


def _filled(command: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    for name, value in known.items():
        command = [argument.replace(f"{{{name}}}", str(value)) for argument in command]
    return list(command)


def _processes(variable: str, value: str) -> list[psutil.Process]:
    """Those with this variable, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


class DockerDriver:
    """A container, named and labelled by its id."""

    def __init__(self, settings: DockerSettings) -> None:
        self._settings = settings

    def start(self, tool_id: str, owner: str, folder: Path, within_s: float) -> Handle:
        """As `Driver.start`; the folder is /tool in the container."""
        until, name = time.monotonic() + within_s, _container(tool_id)
        labels = [f"--label=presage.tool={tool_id}", f"--label=presage.owner={owner}"]
        options = [*labels, f"--name={name}", f"--volume={folder}:/tool", *self._settings.options]
        self._run(within_s, "run", "--detach", *options, self._settings.image, *self._settings.command)
        while self._settings.ready is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise ToolError(f"it could not be used within {within_s:g} s")
            try:
                self._run(left, "exec", name, *self._settings.ready)
                break
            except ToolError:
                if not self.alive(tool_id, {}):
                    raise ToolError("its container ended before it could be used") from None
                time.sleep(_POLL_S)
        return {"container": name, "folder": str(folder)}

    def alive(self, tool_id: str, handle: Handle) -> bool:
        """As `Driver.alive`."""
        try:
            return self._run(30.0, "inspect", "--format={{.State.Running}}", _container(tool_id)) == "true"
        except ToolError:
            return False

    def remove(self, tool_id: str) -> None:
        """As `Driver.remove`."""
        if tool_id in self._listed(f"presage.tool={tool_id}"):
            self._run(60.0, "rm", "--force", "--volumes", _container(tool_id))

    def owned(self, owner: str) -> set[str]:
        """As `Driver.owned`."""
        return self._listed(f"presage.owner={owner}")

    def _listed(self, label: str) -> set[str]:
        form = '--format={{.Label "presage.tool"}}'
        return set(self._run(30.0, "ps", "--all", f"--filter=label={label}", form).split())

    def _run(self, timeout_s: float, *arguments: str) -> str:
        program = self._settings.program
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ToolError(f"{program} cannot be run ({error.strerror})") from error
        except subprocess.TimeoutExpired:
            raise ToolError(f"{program} {arguments[0]} took more than {timeout_s:g} s") from None
        if done.returncode:
            raise ToolError(f"{program} {arguments[0]} failed: {done.stderr.strip()[-200:]}")
        return done.stdout.strip()


def _container(tool_id: str) -> str:
    return f"presage-tool-{tool_id}"


def remove_folder(folder: Path) -> None:
    """Removes a folder and whatever is in it, files that cannot be written to included; one that is gone is ignored."""

    def writable(function: Any, path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            for of in (Path(path).parent, Path(path)):
                of.chmod(0o700)
            function(path)

    # The third argument of `onerror` is a triple in Python 3.11, and `onexc` came with 3.12.
    shutil.rmtree(folder, onerror=lambda function, path, error: writable(function, path, error[1]))
