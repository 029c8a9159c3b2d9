"""The process beside a gateway that runs the router; `router_client.py` starts it.

A forecast takes 0.2 to 2 ms of CPU with the linear head and far more with a transformer; in the gateway's only thread
all requests would wait for it. Queries come on standard input, one line of JSON each, and are answered on standard
output:

    {"id": N, "load": FOLDER, "digest": "sha256:…"}    -> {"id": N, "models": […], "fallback": false}
    {"id": N, "prompt": "…", "within_s": S}            -> {"id": N, "probabilities": {MODEL: P, …}, "far": false}
    any                                                -> {"id": N, "error": "…"}

Probabilities are those of models with enough labels. Prompts that wait together are one batch; those that have waited
for longer than S get an error, since nobody waits for them any more. A transformer waits until BATCH prompts are there,
but no longer than FILL_S; meanwhile the linear head beside it (`fallback`), if the version has one, answers each prompt
as it comes, with `"early": true`, and the transformer's answer follows. A prompt with `"quick": true` gets the linear
head's answer alone.

The version is tried as it is loaded. The process ends with its standard input. It logs nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from presage.errors import why
from presage.predictors.router.linear import LinearScorer
from presage.predictors.router.predictor import RouterPredictor
from presage.serving_hooks.forecasting.sources import load_validated

BATCH: Final = 16
"""Prompts of a batch, as Chimera trains with."""
FILL_S: Final = 0.005

Query = dict[str, Any]


class RouterAnswers:
    """Answers queries with the version that was loaded last."""

    def __init__(self) -> None:
        self._router: RouterPredictor | None = None

    @property
    def fill_s(self) -> float:
        """How long a batch waits to be full."""
        return 0.0 if self._router is None or isinstance(self._router.scorer, LinearScorer) else FILL_S

    def answer(self, queries: Sequence[Query]) -> Iterator[Query]:
        """Answers in order. Does not raise."""
        prompts: list[Query] = []
        now = time.monotonic()
        for query in queries:
            if "load" not in query:
                if query["until"] > now:
                    prompts.append(query)
                else:
                    yield {"id": query["id"], "error": "late"}
                continue
            yield from _forecasts(self._router, prompts)
            prompts = []
            yield self._load(query)
        yield from _forecasts(self._router, prompts)

    def early(self, query: Query) -> Query | None:
        """The linear head's answer beside a transformer's; None without one. Does not raise."""
        router = self._router
        if router is None or router.fallback is None or "prompt" not in query:
            return None
        return next(iter(_forecasts(router.fallback, [query])))

    def _load(self, query: Query) -> Query:
        try:
            self._router = load_validated("router", Path(query["load"]), query["digest"])
        except Exception as error:
            return {"id": query["id"], "error": why(error)}
        fallback = self._router.fallback is not None
        return {"id": query["id"], "models": list(self._router.models), "fallback": fallback}


def _forecasts(router: RouterPredictor | None, queries: Sequence[Query]) -> Iterator[Query]:
    if not queries:
        return
    try:
        if router is None:
            raise LookupError("no router is loaded")
        least = router.config.min_evidence
        for query, forecast in zip(queries, router.forecasts([asked["prompt"] for asked in queries]), strict=True):
            probabilities = {
                model: share for model, share in forecast.probabilities.items() if forecast.evidence[model] >= least
            }
            yield {"id": query["id"], "probabilities": probabilities, "far": forecast.source == "back-off"}
    except Exception as error:
        for query in queries:
            yield {"id": query["id"], "error": type(error).__name__}  # its text might quote a prompt


def _read(queries: SimpleQueue[Query], answers: RouterAnswers, say: Callable[[Query], None]) -> None:
    for line in sys.stdin.buffer:
        query = json.loads(line)
        query["until"] = time.monotonic() + query.get("within_s", math.inf)
        if not query.get("quick"):
            queries.put(query)  # first, so that the transformer can begin
        early = answers.early(query)
        if query.get("quick"):
            say(early or {"id": query["id"], "error": "no linear head"})
        elif early is not None and "error" not in early:
            say({**early, "early": True})
    os._exit(0)  # the gateway is gone


def _batch(queries: SimpleQueue[Query], fill_s: Callable[[], float]) -> list[Query]:
    """What waits, at most BATCH queries; of fewer, also what comes within `fill_s` of the first one."""
    batch = [queries.get()]
    until = time.monotonic() + fill_s()
    try:
        while len(batch) < BATCH:
            left = until - time.monotonic()
            batch.append(queries.get(timeout=left) if left > 0 else queries.get_nowait())
    except Empty:
        pass
    return batch


def main() -> None:
    """Answers queries until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the gateway handles it
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print
    lock = threading.Lock()

    def say(*messages: Query) -> None:
        with lock:
            answers.write("".join(json.dumps(message) + "\n" for message in messages))
            answers.flush()

    queries: SimpleQueue[Query] = SimpleQueue()
    router = RouterAnswers()
    threading.Thread(target=_read, args=(queries, router, say), daemon=True).start()
    while True:
        say(*router.answer(_batch(queries, lambda: router.fill_s)))


if __name__ == "__main__":
    main()
