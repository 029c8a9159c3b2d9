"""Finds an engine's registry and queries it through a process of its own.

The registry is named by a setting or the environment, or is the database in the working directory. An engine only
reads it: opening a missing MLflow database would create one, and an engine started in the wrong folder would silently
serve from an empty registry. So a missing registry is an error.

The process (`registry_process.py`) is started on the first query, with a new interpreter, since a process that uses a
device must not be forked. If it ends by itself it is started again, after waits that double until one answers.
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
    setting: str | None, environment: Mapping[str, str] = os.environ, folder: Path | None = None
) -> str | None:
    """The MLflow tracking URI of the registry; None if there is none.

    Args:
        setting: takes precedence.
        environment: its MLFLOW_TRACKING_URI comes next.
        folder: of a database; by default the working directory.
    """
    if named := setting or environment.get("MLFLOW_TRACKING_URI"):
        return named
    database = (folder or Path.cwd()) / DATABASE_FILE
    return f"sqlite:///{database}" if database.is_file() else None


def open_existing(uri: str) -> Registry:
    """Opens an existing registry.

    Raises:
        RegistryError: it does not exist, or does not answer.
    """
    place = _on_this_machine(uri)
    if place is not None and not place.exists():
        raise RegistryError(f"{uri}: there is no {place}. Correct the URI, or register a model with `train-predictor`.")
    if place is not None and place.is_file() and not place.stat().st_size:
        raise RegistryError(f"{uri}: {place} is empty. Register a model with `train-predictor`, or correct the URI.")
    return open_registry(uri)


def _on_this_machine(uri: str) -> Path | None:
    """The file or folder of a URI; None for a server."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return Path(unquote(parts.path.removeprefix("/"))).absolute()
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)).absolute()
    return None


MOST_S: Final = 600.0
"""Time limit of one answer: a list of versions, or the trial of one, compilation included. It is long: a hanging
process delays no request, and a process starved of CPU may need it."""

_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 600.0
_LAST_S: Final = 5.0
"""Seconds between a process's last output and its end."""

_COMMAND: Final = (sys.executable, "-P", "-m", "presage.serving_hooks.vllm.registry_process")
_NO_DEVICE: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

_log = logging.getLogger(__name__)


class ProcessEnded(Exception):  # noqa: N818  not always an error
    """The process has ended without an answer, or has not been started again yet.

    Attributes:
        late: whether it exceeded the time limit.
        asked: whether it was running when it was queried.
    """

    def __init__(self, message: str, *, late: bool = False, asked: bool = True) -> None:
        super().__init__(message)
        self.late, self.asked = late, asked


class TrialFailed(Exception):  # noqa: N818  an error of the version, not of ours
    """A version has failed its trial; the message gives the reason."""


@dataclass(frozen=True)
class TriedVersion:
    """A version that was fetched and has passed its trial.

    Attributes:
        folder: its artefact, on this machine.
        version: in the registry.
        digest: of the artefact.
        promoted: the file of its figures at promotion; None if there is none.
        profile: the input profile it was judged with at promotion; None if it was not.
    """

    folder: Path
    version: int
    digest: str
    promoted: str | None
    profile: str | None = None


class AskRegistry:
    """Queries the registry through a process. One thread queries; any may close.

    Args:
        uri: of the registry, called for each query; returns None if there is none.
        most_s: time limit of one answer.
        clock: monotonic seconds.
        command: of the process.
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
        """The process id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    def versions(self, references: Mapping[str, str]) -> dict[str, int | None] | None:
        """The version that each kind's reference resolves to; None if there is no registry.

        Raises:
            RegistryError: the registry does not answer.
            ProcessEnded: the process does not.
        """
        uri = self._uri()
        if uri is None:
            return None
        found: dict[str, int | None] = self._ask({"versions": dict(references), "registry": uri})["versions"]
        return found

    def trial(self, kind: str, reference: str) -> TriedVersion:
        """Fetches, loads and tries one version in the process.

        Raises:
            RegistryError: the version is not available now.
            TrialFailed: it is broken, of another kind, or failed its trial.
            ProcessEnded: the process ended, or took too long.
        """
        answer = self._ask({"trial": kind, "reference": reference, "registry": self._uri() or ""})
        return TriedVersion(
            Path(answer["folder"]), answer["version"], answer["digest"], answer["promoted"], answer["profile"]
        )

    def rest(self) -> None:
        """Ends the process until the next query, to free the memory of a trial."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Ends the process for good."""
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
        except (OSError, ValueError) as error:  # the process or `close` has closed the pipe
            raise self._gone(process) from error
        self._ended = 0
        if "error" in answer:
            raise RegistryError(answer["error"]) if answer["registry"] else TrialFailed(answer["error"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise ProcessEnded("the engine shuts down", asked=False)
            if self._process is None:
                wait_s = self._not_before - self._clock()
                if wait_s > 0:
                    raise ProcessEnded(f"the registry process is started again in {wait_s:.0f} s", asked=False)
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **_NO_DEVICE},
                )
                self._finalize = weakref.finalize(self, _end, self._process)
            return self._process

    def _gone(self, process: subprocess.Popen[bytes]) -> ProcessEnded:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_S)  # its pipes close before it has an exit status
        with self._lock:
            self._end()
            self._ended += 1
            self._not_before = self._clock() + min(_FIRST_WAIT_S * 2 ** (self._ended - 1), _LONGEST_WAIT_S)
        code = process.returncode
        if code == -signal.SIGALRM:
            return ProcessEnded(f"no answer within {self._most_s:g} s", late=True)
        return ProcessEnded(f"the registry process has ended ({_in_words(code)}); it is started again")

    def _end(self) -> None:
        if self._finalize is not None:
            self._finalize()
        self._process = self._finalize = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process; one that has ended already keeps its exit status."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unwritten output
                pipe.close()


def _in_words(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
