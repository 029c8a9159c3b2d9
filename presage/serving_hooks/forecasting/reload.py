"""Reloads an engine's models when their references resolve to newer versions (docs/serving_operation.md, Reload).

A process beside the engine (`registry_process.py`) resolves the references periodically, at intervals that vary at
random so that a fleet does not ask at once, and fetches, loads and tries new versions. New versions go live only after
every changed model passes: a thread here loads them from local files, which takes milliseconds, and the engine's thread
takes the set between two iterations. A version that fails its trial is refused once, together with its set; a model
that the engine does not have yet does not hold up others by failing.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from presage.errors import ArtefactError, PresageError, RegistryError, why
from presage.registry.resolve import parse
from presage.serving_hooks.forecasting.registry_process import MOST_MB
from presage.serving_hooks.forecasting.sources import Held, load_validated
from presage.serving_hooks.monitoring.promoted import read_promoted

MOST_S: Final = 600.0
"""Time limit of one answer: a list of versions, or the trial of one, compilation included. It is long: a hanging
process delays no request, and a process starved of CPU may need it."""

_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 600.0
_LAST_S: Final = 5.0
"""Seconds between a process's last output and its end."""

_COMMAND: Final = (sys.executable, "-P", "-m", "presage.serving_hooks.forecasting.registry_process")
_ENVIRONMENT: Final = {
    **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
    "RUST_BACKTRACE": "0",  # safetensors would hang: a backtrace takes memory, and there is none left
}

_SWITCH_S: Final = 0.0002
"""Thread switch interval while versions are loaded here. Each forecast goes to the circuit breaker's thread and back;
with Python's default it would wait 5 ms twice."""

_MOST_ENDS: Final = 2
"""A version whose trial ends the process so often is refused."""

Load = Callable[[str, Path, str], Any]
"""Loads a predictor of a kind from the folder and digest of its artefact."""

_log = logging.getLogger(__name__)


class ProcessEnded(PresageError):  # noqa: N818  not always an error
    """The process has ended without an answer, or has not been started again yet.

    Attributes:
        late: whether it exceeded the time limit.
        queried: whether it was running when it was queried.
    """

    def __init__(self, message: str, *, late: bool = False, queried: bool = True) -> None:
        super().__init__(message)
        self.late, self.queried = late, queried


class RegistryClient:
    """Queries the registry through a process. One thread queries; any may close.

    The process is started on the first query, with a new interpreter, since a process that uses a device must not be
    forked. If it ends by itself it is started again, after waits that double until one answers.

    Args:
        uri: of the registry, called for each query; returns None if there is none.
        most_s: time limit of one answer.
        most_mb: memory limit of the process.

    Attributes:
        most_s: as given; may be changed between queries.
        process: None if it is not running.
    """

    def __init__(
        self,
        uri: Callable[[], str | None],
        most_s: float = MOST_S,
        most_mb: int = MOST_MB,
        clock: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        self.most_s = most_s
        self._uri, self._most_mb, self._clock, self._command = uri, most_mb, clock, command
        self.process: subprocess.Popen[bytes] | None = None
        self._finalize: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._ended = 0
        self._not_before = -float("inf")

    def versions(self, references: Mapping[str, str]) -> dict[str, int | None] | None:
        """The version that each kind's reference resolves to; None if there is no registry.

        Raises:
            RegistryError, ProcessEnded: the registry or the process does not answer.
        """
        uri = self._uri()
        return None if uri is None else self._query({"versions": dict(references), "registry": uri})["versions"]

    def states(self, reference: str) -> str | None:
        """The kind of states that the model of a reference reads; None if there is no such model, or no registry.

        Raises:
            RegistryError, ArtefactError, ProcessEnded: it cannot be read.
        """
        uri = self._uri()
        kind: str | None = None if uri is None else self._query({"states": reference, "registry": uri})["states"]
        return kind

    def trial(self, kind: str, reference: str) -> Held:
        """Fetches, loads and tries one version in the process; its predictor is not returned.

        Raises:
            RegistryError: the version is not available now.
            ArtefactError: it is broken, of another kind, or failed its trial.
            ProcessEnded: without an answer, or not started yet.
        """
        answer = self._query({"trial": kind, "reference": reference, "registry": self._uri() or ""})
        return Held(
            None,
            reference,
            answer["version"],
            answer["digest"],
            promoted=read_promoted(answer["promoted"].encode()) if answer["promoted"] is not None else {},
            folder=Path(answer["folder"]),
            profile=answer["profile"],
        )

    def load(self, kind: str, reference: str) -> Held:
        """Fetches and tries one version in the process, then loads it here; raises as `trial`."""
        tried = self.trial(kind, reference)
        assert tried.folder is not None
        assert tried.digest is not None
        return replace(tried, predictor=load_validated(kind, tried.folder, tried.digest))

    def rest(self) -> None:
        """Ends the process until the next query, to free the memory of a trial."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Ends the process for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _query(self, what: Mapping[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({**what, "most_s": self.most_s, "most_mb": self._most_mb}).encode() + b"\n")
            process.stdin.flush()
            while line := process.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                if "message" not in answer:
                    break
                _log.log(answer["level"], "%s", answer["message"])
            else:
                raise self._gone(process)
        except (OSError, ValueError) as error:  # the process or `close` has closed the pipe
            raise self._gone(process) from error
        self._ended = 0
        if "error" in answer:
            raise (RegistryError if answer["registry"] else ArtefactError)(answer["error"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise ProcessEnded("the engine shuts down", queried=False)
            if self.process is None:
                wait_s = self._not_before - self._clock()
                if wait_s > 0:
                    raise ProcessEnded(f"the registry process is started again in {wait_s:.0f} s", queried=False)
                environment = {**os.environ, **_ENVIRONMENT}
                self.process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
                self._finalize = weakref.finalize(self, _end, self.process)
            return self.process

    def _gone(self, process: subprocess.Popen[bytes]) -> ProcessEnded:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_S)  # its pipes close before it has an exit status
        with self._lock:
            self._end()
            self._ended += 1
            self._not_before = self._clock() + min(_FIRST_WAIT_S * 2 ** (self._ended - 1), _LONGEST_WAIT_S)
        code = process.returncode
        if code == -signal.SIGALRM:
            return ProcessEnded(f"no answer within {self.most_s:.0f} s", late=True)
        memory = f"if it needs more memory than {self._most_mb} MB, raise registry_memory_mb"
        return ProcessEnded(f"the registry process has ended ({_in_words(code)}); it is started again; {memory}")

    def _end(self) -> None:
        if self._finalize is not None:
            self._finalize()
        self.process = self._finalize = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and closes its pipes; one that has ended already keeps its exit status."""
    with suppress(OSError), process:  # unwritten output
        if process.poll() is None:
            process.kill()


def _in_words(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit status {code}"


def around(every_s: float, draw: Callable[[], float]) -> float:
    """A wait of about so many seconds, between 3/4 and 5/4 of them; `draw` returns a number from 0 to 1."""
    return every_s * (0.75 + 0.5 * draw())


_OWN: Final = random.SystemRandom()
"""Not the generator of the process, which its user may have seeded."""


class Reload:
    """Keeps the versions of a set of models up to date.

    Args:
        held: the models at the start, by kind.
        every_s: seconds between two checks, on average; None for no checks.
        draw: a random number from 0 to 1.

    Attributes:
        refused: reasons by version.
        troubles: current problems by subject.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
        registry: RegistryClient,
        every_s: float | None,
        load: Load = load_validated,
        draw: Callable[[], float] = _OWN.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        self._held = dict(held)
        self._watched = {
            kind: current.reference
            for kind, current in self._held.items()
            if current.reference is not None and current.reference.startswith("models:")
        }
        self._registry, self._every_s, self._load_folder = registry, every_s, load
        self._draw, self._clock = draw, clock
        self._coming: tuple[Mapping[str, int], float] = {}, 0.0
        self._ends: Counter[str] = Counter()
        self._ready: deque[dict[str, Held]] = deque(maxlen=1)
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread that checks the registry."""
        if self._watched and self._every_s is not None:
            threading.Thread(target=self._run, args=(self._every_s,), name="presage-reload", daemon=True).start()

    def close(self) -> None:
        """Stops the thread; a check in progress is aborted."""
        self._stop.set()
        self._registry.close()

    def take(self) -> dict[str, Held] | None:
        """The latest loaded set, returned once; None if there is none. Called by the engine's thread."""
        try:
            return self._ready.pop()
        except IndexError:
            return None

    def loading(self) -> dict[str, str]:
        """By kind the version that is being fetched, tried and loaded, and since when. Any thread may call it."""
        versions, began = self._coming
        since = f"is being loaded since {max(0.0, self._clock() - began):.0f} s"
        return {kind: f"version {version} {since}" for kind, version in versions.items()}

    def look(self) -> None:
        """Checks the registry once; tries and loads new versions. Does not raise."""
        try:
            versions = self._registry.versions(self._watched)
        except Exception as error:
            if not self._stop.is_set():
                kept = ", ".join(f"{kind}: {self._stays(kind)}" for kind in self._watched)
                self._trouble("registry", f"{why(error).rstrip('.')}; retrying ({kept})")
            return
        if versions is None:
            return
        self._trouble("registry", None)
        try:
            new = self._new(versions)
            if new:
                self._coming = new, self._clock()
                self._follow(new)
                self._registry.rest()
        except Exception as error:
            self._trouble("reload", f"a check of the registry failed: {why(error)}")
        finally:
            self._coming = {}, 0.0

    def _run(self, every_s: float) -> None:
        while not self._stop.wait(around(every_s, self._draw)):
            self.look()

    def _new(self, versions: Mapping[str, int | None]) -> dict[str, int]:
        """Versions to try; none if one of the set was refused."""
        new: dict[str, int] = {}
        for kind, version in versions.items():
            held = self._held[kind]
            if version is None:
                if held.predictor is not None:
                    self._trouble(kind, f"{held.reference} no longer resolves to a version; {self._stays(kind)}")
                else:  # the registry may not have existed at the start
                    self._held[kind] = replace(held, reason=f"{held.reference} resolves to no version")
            elif held.predictor is not None and version == held.version:
                self._trouble(kind, None)
            elif _called(kind, version) not in self.refused:
                new[kind] = version
            elif held.predictor is not None:
                return {}
        return new

    def _follow(self, new: Mapping[str, int]) -> None:
        """Tries all versions, then loads all, then publishes the set."""
        tried = self._each(new, self._try)
        if not tried:
            return
        loaded = self._each({kind: new[kind] for kind in tried}, lambda kind, _: self._load(kind, tried[kind]))
        if loaded:
            self._held = {**self._held, **loaded}
            self._ready.append(dict(self._held))

    def _each(self, new: Mapping[str, int], does: Callable[[str, int], Held]) -> dict[str, Held] | None:
        """Applies a step to each version; None if one of the set fails or must be tried again."""
        done: dict[str, Held] = {}
        for kind, version in new.items():
            try:
                done[kind] = does(kind, version)
            except Exception as error:
                if self._stop.is_set():
                    return None
                if self._again(kind, version, error):
                    self._trouble(kind, f"{_called(kind, version)} is not available: {error}; {self._stays(kind)}")
                    return None
                self._refuse(kind, version, error)
                if self._held[kind].predictor is not None:
                    return None
            else:
                self._trouble(kind, None)
        return done

    def _again(self, kind: str, version: int, error: Exception) -> bool:
        """Whether the version may be tried again."""
        if isinstance(error, ProcessEnded):
            self._ends[_called(kind, version)] += error.queried
            return not error.late and self._ends[_called(kind, version)] < _MOST_ENDS
        return isinstance(error, RegistryError)

    def _try(self, kind: str, version: int) -> Held:
        """Tries a version by its number, since an alias may move meanwhile."""
        name, _, _ = parse(self._watched[kind])
        return self._registry.trial(kind, f"models:/{name}/{version}")

    def _load(self, kind: str, tried: Held) -> Held:
        assert tried.folder is not None
        assert tried.digest is not None
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            predictor = self._load_folder(kind, tried.folder, tried.digest)
        finally:
            sys.setswitchinterval(before)
        return replace(tried, predictor=predictor, reference=self._watched[kind])

    def _refuse(self, kind: str, version: int, error: Exception) -> None:
        reason = self.refused[_called(kind, version)] = why(error)
        _log.error("%s is refused, %s: %s", _called(kind, version), self._stays(kind), reason)

    def _stays(self, kind: str) -> str:
        """Which version serves meanwhile."""
        held = self._held[kind]
        return f"version {held.version} stays" if held.predictor is not None else "no model is loaded"

    def _trouble(self, about: str, what: str | None) -> None:
        """Records a problem, or with None its end; logs only changes."""
        before = self.troubles.pop(about, None)
        if what is not None:
            self.troubles[about] = what
            if what != before:
                _log.warning("%s: %s", about, what)
        elif before is not None:
            _log.warning("%s: resolved", about)


def _called(kind: str, version: int) -> str:
    return f"{kind} version {version}"
