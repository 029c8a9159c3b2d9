"""Newer versions of an engine's models: looked for, loaded and tried beside the engine, and handed over as a set.

A thread of its own asks the registry every so often which versions the engine's references mean now. Where they mean
others, the new ones are loaded and tried there, and only when all of them have passed is the set laid out for the
engine's thread to take between two iterations. A version that fails its trial is refused, once, and its set with it:
what is there stays until an alias moves on. A model of which the engine has none yet holds nothing up by failing.

A registry that is down is asked again; an alias that is gone takes nothing away. Either is said once, and once when it
is over. Folders, and versions named by their number, are what they are: only what could not be loaded is tried again.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from presage.errors import RegistryError
from presage.registry.connect import Registry
from presage.registry.resolve import parse
from presage.serving_hooks.own_thread import NotBack, OwnThread
from presage.serving_hooks.sources import Held, Predictors, load_length, load_next_agent, version_of, why

TRIAL_S: Final = 120.0
"""Seconds that loading and trying one version may take: a download, and compiling."""

_SWITCH_S: Final = 0.0002
"""How long a thread keeps the interpreter while a look is under way. Each forecast goes to the guard's thread and back,
and would wait 5 ms twice, Python's own interval, for a thread that loads."""

Load = Callable[[str, Callable[[], Registry]], Held[Any]]

_LOADS: Final[Mapping[str, Load]] = {"next-agent": load_next_agent, "remaining-length": load_length}

_log = logging.getLogger(__name__)


class Reload:
    """Looks after the versions of an engine's models.

    Args:
        held: what the engine started with.
        registry: opens the registry, None where there is none; called again after it was down.
        every_s: seconds between two looks.
        trial_s: seconds that one version may take to load and try.
        loads: how each kind is loaded and tried; raises where it is not to be used.

    Attributes:
        refused: why, by what the version is called; each was loaded once.
        troubles: what stands in the way now, by what it is about.
    """

    def __init__(
        self,
        held: Predictors,
        registry: Callable[[], Registry | None],
        every_s: float,
        trial_s: float = TRIAL_S,
        loads: Mapping[str, Load] | None = None,
    ) -> None:
        self.refused: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        self._held: dict[str, Held[Any]] = by_kind(held)
        self._watched = {
            kind: of.reference
            for kind, of in self._held.items()
            if of.reference is not None and of.reference.startswith("models:")
        }
        self._open = registry
        self._registry: Registry | None = None
        self._every_s, self._trial_s, self._loads = every_s, trial_s, loads or _LOADS
        self._ready: deque[Predictors] = deque(maxlen=1)
        self._stop = threading.Event()

    def start(self) -> None:
        """Looks from now on, in a thread of its own."""
        if self._watched:
            threading.Thread(target=self._run, name="presage-reload", daemon=True).start()

    def close(self) -> None:
        """Looks no more. A look that is under way is not waited for."""
        self._stop.set()

    def take(self) -> Predictors | None:
        """The latest set that is loaded and tried, once; for the engine's thread."""
        try:
            return self._ready.pop()
        except IndexError:
            return None

    def look(self) -> None:
        """Asks the registry once, and loads and tries what is new there. Raises nothing."""
        try:
            self._registry = self._registry or self._open()
            if self._registry is None:
                return
            versions = {kind: version_of(reference, self._registry) for kind, reference in self._watched.items()}
        except Exception as error:
            self._registry = None
            self._trouble("registry", f"{why(error).rstrip('.')}; what is loaded stays, and it is asked again")
            return
        self._trouble("registry", None)
        try:
            self._compare(self._registry, versions)
        except Exception as error:
            self._trouble("reload", f"a look at the registry failed: {why(error)}")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            before = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
            try:
                self.look()
            finally:
                sys.setswitchinterval(before)

    def _compare(self, registry: Registry, versions: Mapping[str, int | None]) -> None:
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
                return  # one of the set has failed
        if not new:
            return
        loaded: dict[str, Held[Any]] = {}
        for kind, version in new.items():
            try:
                loaded[kind] = self._load(kind, version, registry)
            except RegistryError as error:
                self._trouble(kind, f"{_called(kind, version)} cannot be had: {error}")
                return
            except Exception as error:
                self._refuse(kind, version, error)
                if self._held[kind].predictor is not None:
                    return
            else:
                self._trouble(kind, None)
        if loaded:
            self._held = {**self._held, **loaded}
            self._ready.append(Predictors(self._held["next-agent"], self._held["remaining-length"]))

    def _load(self, kind: str, version: int, registry: Registry) -> Held[Any]:
        """By its number: an alias may move on while it is loaded."""
        reference = self._watched[kind]
        name, _, _ = parse(reference)
        load = partial(self._loads[kind], f"models:/{name}/{version}", lambda: registry)
        held: Held[Any] = OwnThread(f"presage-trial-{kind}").call(load, self._trial_s)
        return replace(held, reference=reference)

    def _refuse(self, kind: str, version: int, error: Exception) -> None:
        reason = f"no answer within {self._trial_s:g} s" if isinstance(error, NotBack) else why(error)
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


def by_kind(found: Predictors) -> dict[str, Held[Any]]:
    """The two of a set by their names."""
    return {"next-agent": found.next_agent, "remaining-length": found.remaining_length}


def _called(kind: str, version: int) -> str:
    return f"{kind} version {version}"
