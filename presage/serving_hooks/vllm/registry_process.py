"""The process beside an engine that asks the registry, fetches versions and tries them; `ask_registry.py` starts it.

MLflow, compiling, and whatever a version does when it is tried would hold the lock of the engine's interpreter. Here
they hold another. What was compiled here lies in numba's cache, from which the engine reads it.

Asked on standard input, a line of JSON each, one after the other:

    {"versions": {KIND: REFERENCE, …}, "registry": URI, "most_s": S}
    {"trial": KIND, "reference": "models:/NAME/VERSION", "registry": URI, "most_s": S}

Answered on standard output, after what was logged meanwhile, `{"level": 30, "said": "…"}`:

    {"versions": {KIND: VERSION or null, …}}
    {"folder": …, "version": …, "digest": "sha256:…", "promoted": "…", "profile": "…"}      it has passed; what it was
                                           promoted with, and under which inputs
    {"error": "…", "registry": true}       of the registry, and worth asking again; false: of the version

The process ends with its standard input, and so with the engine, however that ends. An answer that takes longer than
`most_s` ends it too, by an alarm of the kernel's that code which keeps the interpreter cannot put off.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO, Any, Final

from presage.errors import RegistryError, why
from presage.registry.connect import Registry
from presage.registry.resolve import current_aliases, parse
from presage.serving_hooks.vllm.ask_registry import open_existing

_NICE: Final = 5
"""The engine goes first, but a machine that is always busy must not keep versions from being tried."""


class RegistryAnswers:
    """Answers for one registry after the other; opened at the first question, and again after it failed."""

    def __init__(self) -> None:
        self._registry: Registry | None = None

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line; raises nothing."""
        versions = "versions" in asked
        try:
            registry = self._opened(asked["registry"])
            if versions:
                return {"versions": {kind: version_of(name, registry) for kind, name in asked["versions"].items()}}
            return _trial(asked["trial"], asked["reference"], registry)
        except Exception as error:
            if versions:
                self._registry = None
            return {"error": why(error), "registry": versions or isinstance(error, RegistryError)}

    def _opened(self, uri: str) -> Registry:
        if self._registry is None or self._registry.uri != uri:
            self._registry = open_existing(uri)
        return self._registry


def version_of(reference: str, registry: Registry) -> int | None:
    """The version that `models:/NAME@ALIAS` or `models:/NAME/VERSION` means now; None where there is none.

    Asks for aliases alone: a version that is named by its number is not looked for.

    Raises:
        RegistryError: the registry does not answer, or it is no such reference.
    """
    name, alias, version = parse(reference)
    return version if alias is None else current_aliases(registry, name).get(alias)


def _trial(kind: str, reference: str, registry: Registry) -> dict[str, Any]:
    # A hundred megabytes, which a process that only asks does without.
    from presage.serving_hooks.forecasting.sources import Held, load_length, load_next_agent
    from presage.serving_hooks.monitoring.promoted import promoted_json

    loads: Mapping[str, Callable[..., Held[Any]]] = {"next-agent": load_next_agent, "remaining-length": load_length}
    held = loads[kind](reference, lambda: registry)
    promoted = promoted_json(held.promoted) if held.promoted else None
    folder = str(held.folder.absolute()) if held.folder is not None else None
    return {
        "folder": folder,
        "version": held.version,
        "digest": held.digest,
        "promoted": promoted,
        "profile": held.profile,
    }


class _Relayed(logging.Handler):
    """What is logged here is the engine's to say."""

    def __init__(self, answers: IO[str]) -> None:
        super().__init__(logging.INFO)
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        _write(self._answers, {"level": record.levelno, "said": record.getMessage()})


def _write(answers: IO[str], line: Mapping[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def _read(lines: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # nobody is there any more, whatever is under way


def main() -> None:
    """Answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the engine's to answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    logger = logging.getLogger("presage")
    logger.addHandler(_Relayed(answers))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    asked = RegistryAnswers()
    while True:
        line = json.loads(lines.get())
        signal.setitimer(signal.ITIMER_REAL, line["most_s"])
        answer = asked.answer(line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)


if __name__ == "__main__":
    main()
