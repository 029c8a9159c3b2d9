"""The process beside an engine that queries the registry, fetches versions and tries them; `reload.py` starts it.

MLflow, compilation and the trial of a version would hold the GIL of the engine, which loads the code compiled here from
numba's cache. Queries come on standard input, one line of JSON each:

    {"versions": {KIND: REFERENCE, …}, "registry": URI, "most_s": S, "most_mb": N}
    {"trial": KIND, "reference": "models:/NAME/VERSION", "registry": URI, "most_s": S, "most_mb": N}
    {"states": REFERENCE, "registry": URI, "most_s": S, "most_mb": N}

Answers go to standard output, after lines for log messages, `{"level": 30, "message": "…"}`:

    {"versions": {KIND: VERSION or null, …}}
    {"folder": …, "version": …, "digest": "sha256:…", "promoted": "…", "profile": "…"}      the trial has passed
    {"states": KIND or null}      the kind of states that the model reads; null: there is no such model
    {"error": "…", "registry": true}       an error of the registry, which may be retried; false: of the version

The process ends with its standard input, and so with the engine. An answer that takes longer than `most_s` ends it too,
by a kernel alarm, which works even while code holds the interpreter. An answer or a version that needs more memory than
`most_mb` fails here, and if the machine runs out of memory, the kernel ends this process before the engine.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Final

from presage.errors import OutputError, RegistryError, why
from presage.predictors.common.artefact import Artefact, read_artefact
from presage.registry.connect import Registry, open_existing
from presage.registry.resolve import alias_holder, parse, resolve

MOST_MB: Final = 3072
"""Memory limit by default. The process takes 300 MB before a trial, 450 with torch, and the tensors of a version a few
times."""

_NICE: Final = 5
"""Low enough to yield to the engine, high enough to try versions on a busy machine."""


_opened = lru_cache(maxsize=1)(open_existing)
"""Keeps a registry open until a query of its versions fails."""


def answer(query: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one query. Does not raise."""
    versions = "versions" in query
    try:
        registry = _opened(query["registry"])
        if versions:
            return {"versions": {kind: version_of(name, registry) for kind, name in query["versions"].items()}}
        if "states" in query:
            return {"states": _states(query["states"], registry)}
        return _trial(query["trial"], query["reference"], registry)
    except Exception as error:
        if versions:
            _opened.cache_clear()
        return {"error": why(error), "registry": versions or isinstance(error, RegistryError | OutputError)}


def version_of(reference: str, registry: Registry) -> int | None:
    """The version of a reference: that of its alias, None if none has it, or its own number, unchecked.

    Raises:
        RegistryError: the registry does not answer, or the reference is malformed.
    """
    name, alias, version = parse(reference)
    return version if alias is None else alias_holder(registry, name, alias)


def _states(reference: str, registry: Registry) -> str | None:
    if version_of(reference, registry) is None:
        return None
    return state_source(read_artefact(resolve(reference, lambda: registry).folder))


def state_source(artefact: Artefact) -> str | None:
    """The kind of states that a next-agent model reads, such as "captured"; None: the artefact is of another kind."""
    states = artefact.config.get("states")
    return str(states["kind"]) if isinstance(states, dict) and "kind" in states else None


def _trial(kind: str, reference: str, registry: Registry) -> dict[str, Any]:
    # Imported here: they take a hundred megabytes, which a process that only lists versions does not need.
    from presage.serving_hooks.forecasting.sources import load
    from presage.serving_hooks.monitoring.promoted import promoted_json

    held = load(kind, reference, lambda: registry)
    return {
        "folder": str(held.folder.absolute()) if held.folder is not None else None,
        "version": held.version,
        "digest": held.digest,
        "promoted": promoted_json(held.promoted) if held.promoted else None,
        "profile": held.profile,
    }


class _Relayed(logging.Handler):
    """Sends log messages to the engine, which logs them."""

    def __init__(self, answers: IO[str]) -> None:
        super().__init__(logging.INFO)
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        _write(self._answers, {"level": record.levelno, "message": record.getMessage()})


def _write(answers: IO[str], line: Mapping[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def _read(lines: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # the engine is gone


def limit_memory(most_mb: int) -> None:
    """Bounds the memory of this process, in MB; files that are mapped, such as libraries for a GPU, do not count.

    So RLIMIT_DATA and not RLIMIT_AS: a build of torch for CUDA maps gigabytes that it never touches here.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answers queries until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the engine handles it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print
    logger = logging.getLogger("presage")
    logger.addHandler(_Relayed(answers))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        query = json.loads(lines.get())
        limit_memory(query["most_mb"])
        signal.setitimer(signal.ITIMER_REAL, query["most_s"])
        try:
            reply = answer(query)
        except BaseException:  # a library in Rust panics, such as for want of memory
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, reply)


if __name__ == "__main__":
    main()
