"""Drivers start and remove tools. A tool outlives the service: it is found again by its id, or removed by it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped]

from presage.errors import ConfigurationError
from presage.tool_service.config import DockerSettings, SubprocessSettings, ToolSettings

Handle = dict[str, Any]
"""What a client needs to use a tool, as JSON values: `folder`, `port` or `container`, and what else a driver gives."""

_POLL_S: Final = 0.02
_OWNER: Final = "PRESAGE_TOOL_OWNER"
_ID: Final = "PRESAGE_TOOL_ID"


class ToolError(Exception):
    """A tool could not be started or removed; the message names no text of a request."""


class Driver(Protocol):
    """Starts tools of one kind. Called from several threads, for different tools at once.

    A driver may be made anew at any time: it finds its tools by their ids."""

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
        """Whether it can still be used; raises ToolError where that cannot be found out."""

    def remove(self, tool_id: str) -> None:
        """Removes whatever there is of a tool, except its folder; raises ToolError if something stays."""

    def owned(self, owner: str) -> set[str]:
        """The ids of all tools that this service has started and that are still there."""


def driver_of(settings: ToolSettings, private: Collection[str] = ()) -> Driver:
    """The driver of a tool.

    Args:
        private: variables of the environment that tools do not get.

    Raises:
        ConfigurationError: a driver of another package cannot be loaded.
    """
    if settings.subprocess is not None:
        return SubprocessDriver(settings.subprocess, private)
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
    that those that have left the session are found as well.

    Args:
        private: variables of the environment that they do not get.
    """

    def __init__(self, settings: SubprocessSettings, private: Collection[str] = ()) -> None:
        self._settings, self._private = settings, frozenset(private)
        self._port = any("{port}" in argument for argument in settings.command)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, tool_id: str, owner: str, folder: Path, within_s: float) -> Handle:
        """As `Driver.start`."""
        placeholders: dict[str, Any] = {"id": tool_id, "folder": str(folder), "port": _ports.take(tool_id)}
        until = time.monotonic() + within_s
        variables = {f"PRESAGE_TOOL_{name.upper()}": str(value) for name, value in placeholders.items()}
        inherited = {name: value for name, value in os.environ.items() if name not in self._private}
        environment = {**inherited, **variables, _OWNER: owner}
        try:
            process = subprocess.Popen(
                _filled(self._settings.command, placeholders),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"its program cannot be started ({error.strerror})") from error
        self._children[tool_id] = process
        ready = _filled(self._settings.ready, placeholders) if self._settings.ready is not None else None
        while not self._is_ready(ready, placeholders["port"], environment, folder, until - time.monotonic()):
            if process.poll() is not None:
                raise ToolError(f"its program ended with {process.returncode} before it could be used")
            if time.monotonic() > until:
                raise ToolError(f"it could not be used within {within_s:g} s")
            time.sleep(_POLL_S)
        return {"folder": str(folder), "port": placeholders["port"], "pid": process.pid}

    def _is_ready(
        self, ready: Sequence[str] | None, port: int, environment: Mapping[str, str], folder: Path, left_s: float
    ) -> bool:
        if ready is not None:
            try:
                done = subprocess.run(
                    ready,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=max(0.0, left_s),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
            except OSError as error:
                raise ToolError(f"the program that tells when it is ready cannot be run ({error.strerror})") from error
            return done.returncode == 0
        if not self._port:
            time.sleep(_POLL_S)  # a program that ends at once is no tool
            return self._children[str(environment[_ID])].poll() is None
        with socket.socket() as trying:
            trying.settimeout(1.0)
            # A socket that gets this very port as its own connects to itself, though nothing listens.
            listens = trying.connect_ex(("127.0.0.1", port)) == 0
            return listens and bool(trying.getsockname() != trying.getpeername())

    def alive(self, tool_id: str, handle: Handle) -> bool:
        """As `Driver.alive`."""
        child = self._children.get(tool_id)
        if child is not None:
            return child.poll() is None
        try:
            return _carries(psutil.Process(handle["pid"]), _ID, tool_id)
        except psutil.NoSuchProcess:
            return False

    def remove(self, tool_id: str) -> None:
        """As `Driver.remove`."""
        child = self._children.get(tool_id)
        for _ in range(10):  # a process may fork while the others are killed
            if child is not None and child.poll() is None:  # it may have overwritten its environment
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(5.0)
            processes = _processes(_ID, tool_id)
            if not processes and (child is None or child.poll() is not None):
                self._children.pop(tool_id, None)
                _ports.free(tool_id)
                return
            for process in processes:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5.0)
        raise ToolError("its processes cannot be killed")

    def owned(self, owner: str) -> set[str]:
        """As `Driver.owned`."""
        tool_ids = set()
        for process in _processes(_OWNER, owner):
            with suppress(psutil.Error, OSError, KeyError):
                tool_ids.add(process.environ()[_ID])
        return tool_ids


class _Ports:
    """Free ports, none of which two tools get that have not listened yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}

    def take(self, tool_id: str) -> int:
        with self._lock:
            while True:
                with socket.socket() as trying:
                    trying.bind(("127.0.0.1", 0))
                    port: int = trying.getsockname()[1]
                if port not in self._taken.values():
                    self._taken[tool_id] = port
                    return port

    def free(self, tool_id: str) -> None:
        with self._lock:
            self._taken.pop(tool_id, None)


_ports = _Ports()


def _filled(command: Sequence[str], placeholders: Mapping[str, Any]) -> list[str]:
    for name, value in placeholders.items():
        command = [argument.replace(f"{{{name}}}", str(value)) for argument in command]
    return list(command)


def _processes(variable: str, value: str) -> list[psutil.Process]:
    """Those with this variable, zombies left out."""
    return [process for process in psutil.process_iter() if _carries(process, variable, value)]


def _carries(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        carries: bool = process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
    return carries


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
        return tool_id in self._listed(f"presage.tool={tool_id}", "--filter=status=running")

    def remove(self, tool_id: str) -> None:
        """As `Driver.remove`."""
        if tool_id in self._listed(f"presage.tool={tool_id}"):
            self._run(60.0, "rm", "--force", "--volumes", _container(tool_id))

    def owned(self, owner: str) -> set[str]:
        """As `Driver.owned`."""
        return self._listed(f"presage.owner={owner}")

    def _listed(self, label: str, *filters: str) -> set[str]:
        form = '--format={{.Label "presage.tool"}}'
        return set(self._run(30.0, "ps", "--all", f"--filter=label={label}", *filters, form).split())

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
    """Removes a folder and whatever is in it, also from folders that cannot be written to; one that is gone is ignored.

    What a link points to is left as it is.

    Raises:
        OSError: something stays.
    """
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        folder.chmod(0o700)
        for path, folders, _ in os.walk(folder):  # which lists each of `folders` only afterwards
            for name in folders:
                subfolder = Path(path, name)
                if not subfolder.is_symlink():
                    subfolder.chmod(0o700)
        shutil.rmtree(folder)
