"""Newer versions of an engine's models: looked for and tried beside the engine, and handed over as a set.

A process of its own (ask_registry.py) is asked every so often which versions the engine's references mean now. Where
they mean others, the new ones are fetched, loaded and tried there, and only when all of them have passed are they
loaded here, from files on this machine: some milliseconds of a thread, which lets go of the interpreter for whoever
wants it. Then the set is laid out for the engine's thread to take between two iterations. A version that fails its
trial is refused, once, and its set with it: what is there stays until an alias moves on. A model of which the engine
has none yet holds nothing up by failing.

A registry that is down is asked again, and so is a process that has ended; an alias that is gone takes nothing away.
Each is said once, and once when it is over. Folders, and versions named by their number, are what they are: only what
could not be loaded is tried again. A version whose trial ends the process is tried once more, for somebody may have
ended it, and then refused.
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
from presage.serving_hooks.forecasting.sources import Held, Predictors, take_length, take_next_agent
from presage.serving_hooks.monitoring.promoted import read_promoted
from presage.serving_hooks.vllm.ask_registry import Ended, NotPassed, Tried

_SWITCH_S: Final = 0.0002
"""How long a thread keeps the interpreter while versions are loaded here. Each forecast goes to the guard's thread and
back, and would wait 5 ms twice, Python's own interval, for a thread that loads."""

_MOST_ENDS: Final = 2
"""Trials of one version that end the process: then it is refused."""

Load = Callable[[Path, str], Any]
"""A predictor from the folder and the digest of its artefact."""

_LOADS: Final[Mapping[str, Load]] = {"next-agent": take_next_agent, "remaining-length": take_length}

_log = logging.getLogger(__name__)


class Registered(Protocol):
    """What there is in the registry; see `AskRegistry`."""

    def versions(self, references: Mapping[str, str]) -> Mapping[str, int | None] | None: ...  # noqa: D102

    def trial(self, kind: str, reference: str) -> Tried: ...  # noqa: D102

    def rest(self) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Reload:
    """Looks after the versions of an engine's models.

    Args:
        held: what the engine started with.
        registry: asked which versions there are, and to try them.
        every_s: seconds between two looks.
        loads: how each kind is loaded from its folder once it has passed.

    Attributes:
        refused: why, by what the version is called; each was tried once.
        troubles: what stands in the way now, by what it is about.
    """

    def __init__(
        self, held: Predictors, registry: Registered, every_s: float, loads: Mapping[str, Load] | None = None
    ) -> None:
        self.refused: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        self._held: dict[str, Held[Any]] = by_kind(held)
        self._watched = {
            kind: of.reference
            for kind, of in self._held.items()
            if of.reference is not None and of.reference.startswith("models:")
        }
        self._registry, self._every_s, self._loads = registry, every_s, loads or _LOADS
        self._ends: Counter[str] = Counter()
        self._ready: deque[Predictors] = deque(maxlen=1)
        self._stop = threading.Event()

    def start(self) -> None:
        """Looks from now on, in a thread of its own."""
        if self._watched:
            threading.Thread(target=self._run, name="presage-reload", daemon=True).start()

    def close(self) -> None:
        """Looks no more. A look that is under way is broken off."""
        self._stop.set()
        self._registry.close()

    def take(self) -> Predictors | None:
        """The latest set that is loaded and tried, once; for the engine's thread."""
        try:
            return self._ready.pop()
        except IndexError:
            return None

    def look(self) -> None:
        """Asks the registry once, and has tried and loads what is new there. Raises nothing."""
        try:
            versions = self._registry.versions(self._watched)
        except Exception as error:
            said = str(error) if isinstance(error, Ended) else why(error)
            if not self._stop.is_set():
                self._trouble("registry", f"{said.rstrip('.')}; what is loaded stays, and it is asked again")
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
            self._trouble("reload", f"a look at the registry failed: {why(error)}")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.look()

    def _new(self, versions: Mapping[str, int | None]) -> dict[str, int]:
        """Those to be tried; none where one of the set has failed."""
        new: dict[str, int] = {}
        for kind, version in versions.items():
            held = self._held[kind]
            if version is None:
                if held.predictor is not None:
                    gone = f"{held.reference} means nothing any more; version {held.version} stays"
                    self._trouble(kind, gone)
            elif held.predictor is not None and version == held.version:
                self._trouble(kind, None)
            elif _called(kind, version) not in self.refused:
                new[kind] = version
            elif held.predictor is not None:
                return {}
        return new

    def _follow(self, new: Mapping[str, int]) -> None:
        """All are tried before any is loaded, and all are loaded before any is handed over."""
        tried = self._each(new, self._try)
        loaded = self._each(tried, self._load) if tried else None
        if loaded:
            self._held = {**self._held, **loaded}
            self._ready.append(Predictors(self._held["next-agent"], self._held["remaining-length"]))

    def _each(self, of: Mapping[str, Any], does: Callable[[str, Any], Any]) -> dict[str, Any] | None:
        """What comes of each kind; None where one of the set fails, or has to be asked for again."""
        done: dict[str, Any] = {}
        for kind, what in of.items():
            version = what.version if isinstance(what, Tried) else what
            try:
                done[kind] = does(kind, what)
            except Exception as error:
                if self._stop.is_set():
                    return None
                if self._again(kind, version, error):
                    self._trouble(kind, f"{_called(kind, version)} cannot be had: {error}")
                    return None
                self._refuse(kind, version, error)
                if self._held[kind].predictor is not None:
                    return None
            else:
                self._trouble(kind, None)
        return done

    def _again(self, kind: str, version: int, error: Exception) -> bool:
        """Whether the error is not of the version, as far as is known."""
        if isinstance(error, Ended):
            self._ends[_called(kind, version)] += error.asked
            return not error.late and self._ends[_called(kind, version)] < _MOST_ENDS
        return isinstance(error, RegistryError)

    def _try(self, kind: str, version: int) -> Tried:
        """By its number: an alias may move on meanwhile."""
        name, _, _ = parse(self._watched[kind])
        return self._registry.trial(kind, f"models:/{name}/{version}")

    def _load(self, kind: str, tried: Tried) -> Held[Any]:
        promoted = read_promoted(tried.promoted.encode()) if tried.promoted is not None else {}
        with _in_short_turns():
            predictor = self._loads[kind](tried.folder, tried.digest)
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
        reason = str(error) if isinstance(error, Ended | NotPassed) else why(error)
        self.refused[_called(kind, version)] = reason
        held = self._held[kind]
        stays = f"version {held.version} stays" if held.predictor is not None else "there is none"
        _log.error("%s is refused, %s: %s", _called(kind, version), stays, reason)

    def _trouble(self, about: str, what: str | None) -> None:
        """Said when it comes and when it is over, not every time."""
        before = self.troubles.pop(about, None)
        if what is not None:
            self.troubles[about] = what
            if what != before:
                _log.warning("%s: %s", about, what)
        elif before is not None:
            _log.warning("%s: all is well again", about)


@contextmanager
def _in_short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def by_kind(found: Predictors) -> dict[str, Held[Any]]:
    """The two of a set by their names."""
    return {"next-agent": found.next_agent, "remaining-length": found.remaining_length}


def _called(kind: str, version: int) -> str:
    return f"{kind} version {version}"
