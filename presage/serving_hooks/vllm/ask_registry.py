"""How an engine finds and asks its registry: which one is meant, and the process that asks it.

The registry is named by the settings, by the environment, or lies in the working directory. An engine only reads:
opening an MLflow database that is not there would make one, and an engine that is started in the wrong folder would
then serve from an empty registry without a word. So a missing registry is an error here.

The process (`registry_process.py`) is started when something is asked, by a new interpreter: a process that has a
device open is never forked. One that ends by itself is started again, each time after twice as long a wait, until one
answers. Without a registry there is no process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from presage.errors import RegistryError
from presage.registry.connect import DATABASE_FILE, Registry, open_registry


def resolve_registry_uri(
    said: str | None, environment: Mapping[str, str] = os.environ, folder: Path | None = None
) -> str | None:
    """The MLflow tracking URI of the registry; None if there is none.

    Args:
        said: by the settings; goes first.
        environment: MLFLOW_TRACKING_URI of it goes next.
        folder: where a database may lie; by default the working directory.
    """
    if named := said or environment.get("MLFLOW_TRACKING_URI"):
        return named
    database = (folder or Path.cwd()) / DATABASE_FILE
    return f"sqlite:///{database}" if database.is_file() else None


def open_existing(uri: str) -> Registry:
    """Opens a registry that is there already.

    Raises:
        RegistryError: it is not there, or does not answer.
    """
    place = _on_this_machine(uri)
    if place is not None and not place.exists():
        raise RegistryError(f"{uri}: there is no {place}. Correct the URI, or register a model with `train-predictor`.")
    if place is not None and place.is_file() and not place.stat().st_size:
        raise RegistryError(f"{uri}: {place} is empty. Register a model with `train-predictor`, or correct the URI.")
    return open_registry(uri)


def _on_this_machine(uri: str) -> Path | None:
    """The file or folder behind a URI; None for what a server answers."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return Path(unquote(parts.path.removeprefix("/"))).absolute()
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)).absolute()
    return None


MOST_S: Final = 600.0
"""Seconds that one answer may take: the versions there are, or one of them fetched, loaded and tried, compiling
included. A process that hangs stands in nobody's way, and one that goes without processor time may need long."""

_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 600.0
_LAST_S: Final = 5.0
"""Between the last that is heard of a process and its end."""

_COMMAND: Final = (sys.executable, "-P", "-m", "presage.serving_hooks.vllm.registry_process")
_NO_DEVICE: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

_log = logging.getLogger(__name__)


class Ended(Exception):  # noqa: N818  how it ended is the caller's to judge
    """The process has ended without an answer, or is not started again yet.

    Attributes:
        late: whether it took too long.
        asked: whether it was there to be asked.
    """

    def __init__(self, said: str, *, late: bool = False, asked: bool = True) -> None:
        super().__init__(said)
        self.late, self.asked = late, asked


class NotPassed(Exception):  # noqa: N818  nothing is wrong here
    """A version has failed its trial; the message says how."""


@dataclass(frozen=True)
class Tried:
    """A version that has been fetched, and has passed.

    Attributes:
        folder: its artefact, on this machine.
        version: in the registry.
        digest: of the artefact that has passed.
        promoted: the file of what it was promoted with; None where it keeps none.
        profile: the inputs it was judged with when it was promoted; None where nobody has judged it.
    """

    folder: Path
    version: int
    digest: str
    promoted: str | None
    profile: str | None = None


class AskRegistry:
    """Asks by a process of its own. One thread asks; any may close.

    Args:
        uri: of the registry, asked each time; None where there is none.
        most_s: seconds that one answer may take.
        clock: seconds, rising.
        command: what is started.
    """

    def __init__(
        self,
        uri: Callable[[], str | None],
        most_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        self._uri, self._most_s, self._clock, self._command = uri, most_s, clock, command
        self._process: subprocess.Popen[bytes] | None = None
        self._finalize: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._ended = 0
        self._not_before = -float("inf")

    @property
    def process_id(self) -> int | None:
        """Of the process, where there is one."""
        return self._process.pid if self._process is not None else None

    def versions(self, references: Mapping[str, str]) -> dict[str, int | None] | None:
        """The version that each kind's reference means now; None where no registry is named.

        Raises:
            RegistryError: it does not answer.
            Ended: the process does not.
        """
        uri = self._uri()
        if uri is None:
            return None
        found: dict[str, int | None] = self._ask({"versions": dict(references), "registry": uri})["versions"]
        return found

    def trial(self, kind: str, reference: str) -> Tried:
        """Has one version fetched, loaded and tried.

        Raises:
            RegistryError: it cannot be had now.
            NotPassed: it is broken, or another kind, or has failed.
            Ended: the process has, or it took too long.
        """
        answer = self._ask({"trial": kind, "reference": reference, "registry": self._uri() or ""})
        return Tried(Path(answer["folder"]), answer["version"], answer["digest"], answer["promoted"], answer["profile"])

    def rest(self) -> None:
        """Ends the process until something is asked again: what a trial has loaded takes memory."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Ends the process, whatever it is doing, and starts none any more."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({**what, "most_s": self._most_s}).encode() + b"\n")
            process.stdin.flush()
            while line := process.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                if "said" not in answer:
                    break
                _log.log(answer["level"], "%s", answer["said"])
            else:
                raise self._gone(process)
        except (OSError, ValueError) as error:  # it, or `close`, has closed the pipe
            raise self._gone(process) from error
        self._ended = 0
        if "error" in answer:
            raise RegistryError(answer["error"]) if answer["registry"] else NotPassed(answer["error"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise Ended("the engine shuts down", asked=False)
            if self._process is None:
                wait_s = self._not_before - self._clock()
                if wait_s > 0:
                    raise Ended(f"the process that asks is started again in {wait_s:.0f} s", asked=False)
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **_NO_DEVICE},
                )
                self._finalize = weakref.finalize(self, _end, self._process)
            return self._process

    def _gone(self, process: subprocess.Popen[bytes]) -> Ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_S)  # its pipes close before it has an exit status
        with self._lock:
            self._end()
            self._ended += 1
            self._not_before = self._clock() + min(_FIRST_WAIT_S * 2 ** (self._ended - 1), _LONGEST_WAIT_S)
        code = process.returncode
        if code == -signal.SIGALRM:
            return Ended(f"no answer within {self._most_s:g} s", late=True)
        return Ended(f"the process that asks has ended ({_in_words(code)}); it is started again")

    def _end(self) -> None:
        if self._finalize is not None:
            self._finalize()
        self._process = self._finalize = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """One that has ended already keeps its exit status."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what could not be written to it any more
                pipe.close()


def _in_words(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
