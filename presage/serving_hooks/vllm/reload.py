"""Reloads an engine's models when their registry references resolve to newer versions.

A separate process (ask_registry.py) resolves the engine's references periodically, and fetches, loads and tries new
versions. New versions go live only after every changed model passes: a thread here loads them from local files, which
takes milliseconds, and the engine's thread takes the set between two iterations. A version that fails its trial is
refused once, together with its set; the current versions stay until an alias moves. A model that the engine does not
have yet does not hold up others by failing.

A registry that is down and a process that has ended are tried again; a removed alias changes nothing. Each problem is
logged once, and once when it is over. Folders and version numbers do not change: only what could not be loaded is tried
again. A version whose trial ends the process, which may have been killed, is tried once more and then refused.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from presage.errors import RegistryError, why
from presage.registry.resolve import parse
from presage.serving_hooks.forecasting.sources import Held, Predictors, load_validated
from presage.serving_hooks.monitoring.promoted import read_promoted
from presage.serving_hooks.vllm.ask_registry import ProcessEnded, TrialFailed, TriedVersion

_SWITCH_S: Final = 0.0002
"""Thread switch interval while versions are loaded here. Each forecast goes to the circuit breaker's thread and back;
with Python's default it would wait 5 ms twice."""

_MOST_ENDS: Final = 2
"""A version whose trial ends the process so often is refused."""

Load = Callable[[str, Path, str], Any]
"""Loads a predictor of a kind from the folder and digest of its artefact."""

_log = logging.getLogger(__name__)


class Registered(Protocol):
    """A registry; see `AskRegistry`."""

    def versions(self, references: Mapping[str, str]) -> Mapping[str, int | None] | None: ...  # noqa: D102

    def trial(self, kind: str, reference: str) -> TriedVersion: ...  # noqa: D102

    def rest(self) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Reload:
    """Keeps the versions of an engine's models up to date.

    Args:
        held: the models the engine started with.
        registry: resolves references and tries versions.
        every_s: seconds between two checks.
        load: loads a tried version from its folder.

    Attributes:
        refused: reasons by version.
        troubles: current problems by subject.
    """

    def __init__(self, held: Predictors, registry: Registered, every_s: float, load: Load = load_validated) -> None:
        self.refused: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        self._held: dict[str, Held[Any]] = by_kind(held)
        self._watched = {
            kind: of.reference
            for kind, of in self._held.items()
            if of.reference is not None and of.reference.startswith("models:")
        }
        self._registry, self._every_s, self._load_folder = registry, every_s, load
        self._ends: Counter[str] = Counter()
        self._ready: deque[Predictors] = deque(maxlen=1)
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread that checks the registry."""
        if self._watched:
            threading.Thread(target=self._run, name="presage-reload", daemon=True).start()

    def close(self) -> None:
        """Stops the thread; a check in progress is aborted."""
        self._stop.set()
        self._registry.close()

    def take(self) -> Predictors | None:
        """The latest loaded set, returned once; None if there is none. Called by the engine's thread."""
        try:
            return self._ready.pop()
        except IndexError:
            return None

    def look(self) -> None:
        """Checks the registry once; tries and loads new versions. Does not raise."""
        try:
            versions = self._registry.versions(self._watched)
        except Exception as error:
            reason = str(error) if isinstance(error, ProcessEnded) else why(error)
            if not self._stop.is_set():
                self._trouble("registry", f"{reason.rstrip('.')}; keeping the current versions and retrying")
            return
        if versions is None:
            return
        self._trouble("registry", None)
        try:
            new = self._new(versions)
            if new:
                self._follow(new)
                self._registry.rest()
        except Exception as error:
            self._trouble("reload", f"a check of the registry failed: {why(error)}")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.look()

    def _new(self, versions: Mapping[str, int | None]) -> dict[str, int]:
        """Versions to try; none if one of the set was refused."""
        new: dict[str, int] = {}
        for kind, version in versions.items():
            held = self._held[kind]
            if version is None:
                if held.predictor is not None:
                    gone = f"{held.reference} no longer resolves to a version; version {held.version} stays"
                    self._trouble(kind, gone)
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
        loaded = self._each(tried, self._load) if tried else None
        if loaded:
            self._held = {**self._held, **loaded}
            self._ready.append(Predictors(self._held["next-agent"], self._held["remaining-length"]))

    def _each(self, of: Mapping[str, Any], does: Callable[[str, Any], Any]) -> dict[str, Any] | None:
        """Applies a step to each kind; None if one of the set fails or must be tried again."""
        done: dict[str, Any] = {}
        for kind, what in of.items():
            version = what.version if isinstance(what, TriedVersion) else what
            try:
                done[kind] = does(kind, what)
            except Exception as error:
                if self._stop.is_set():
                    return None
                if self._again(kind, version, error):
                    self._trouble(kind, f"{_called(kind, version)} is not available: {error}")
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
            self._ends[_called(kind, version)] += error.asked
            return not error.late and self._ends[_called(kind, version)] < _MOST_ENDS
        return isinstance(error, RegistryError)

    def _try(self, kind: str, version: int) -> TriedVersion:
        """Tries a version by its number, since an alias may move meanwhile."""
        name, _, _ = parse(self._watched[kind])
        return self._registry.trial(kind, f"models:/{name}/{version}")

    def _load(self, kind: str, tried: TriedVersion) -> Held[Any]:
        promoted = read_promoted(tried.promoted.encode()) if tried.promoted is not None else {}
        with _in_short_turns():
            predictor = self._load_folder(kind, tried.folder, tried.digest)
        return Held(
            predictor,
            self._watched[kind],
            tried.version,
            tried.digest,
            promoted=promoted,
            folder=tried.folder,
            profile=tried.profile,
        )

    def _refuse(self, kind: str, version: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, ProcessEnded | TrialFailed) else why(error)
        self.refused[_called(kind, version)] = reason
        held = self._held[kind]
        stays = f"version {held.version} stays" if held.predictor is not None else "no model is loaded"
        _log.error("%s is refused, %s: %s", _called(kind, version), stays, reason)

    def _trouble(self, about: str, what: str | None) -> None:
        """Records a problem, or with None its end; logs only changes."""
        before = self.troubles.pop(about, None)
        if what is not None:
            self.troubles[about] = what
            if what != before:
                _log.warning("%s: %s", about, what)
        elif before is not None:
            _log.warning("%s: resolved", about)


@contextmanager
def _in_short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def by_kind(found: Predictors) -> dict[str, Held[Any]]:
    """The models of a set by kind."""
    return {"next-agent": found.next_agent, "remaining-length": found.remaining_length}


def _called(kind: str, version: int) -> str:
    return f"{kind} version {version}"
