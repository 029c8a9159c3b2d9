"""The process beside a gateway that runs the router; `router_client.py` starts it.

A forecast takes 0.2 to 2 ms of CPU with the linear head and far more with a transformer; in the gateway's only thread
all requests would wait for it. Queries come on standard input, one line of JSON each, and are answered in order on
standard output, those that wait together as one batch:

    {"id": N, "load": FOLDER, "digest": "sha256:…"}    -> {"id": N, "models": […]}
    {"id": N, "prompt": "…"}                           -> {"id": N, "probabilities": {MODEL: P, …}, "far": false}
    any                                                -> {"id": N, "error": "…"}

Probabilities are those of models with enough labels.
The version is tried as it is loaded. The process ends with its standard input. It
logs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from presage.errors import why
from presage.predictors.router.predictor import RouterPredictor
from presage.serving_hooks.forecasting.sources import load_validated

MOST_BATCH: Final = 32


class RouterAnswers:
    """Answers queries with the version that was loaded last."""

    def __init__(self) -> None:
        self._router: RouterPredictor | None = None

    def answer(self, queries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Answers in order. Does not raise."""
        prompts: list[dict[str, Any]] = []
        for query in queries:
            if "load" not in query:
                prompts.append(query)
                continue
            yield from self._forecasts(prompts)
            prompts = []
            yield self._load(query)
        yield from self._forecasts(prompts)

    def _load(self, query: dict[str, Any]) -> dict[str, Any]:
        try:
            self._router = load_validated("router", Path(query["load"]), query["digest"])
        except Exception as error:
            return {"id": query["id"], "error": why(error)}
        return {"id": query["id"], "models": list(self._router.models)}

    def _forecasts(self, queries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not queries:
            return
        try:
            if self._router is None:
                raise LookupError("no router is loaded")
            least = self._router.config.min_evidence
            for query, of in zip(queries, self._router.forecasts([one["prompt"] for one in queries]), strict=True):
                known = {model: share for model, share in of.probabilities.items() if of.evidence[model] >= least}
                yield {"id": query["id"], "probabilities": known, "far": of.source == "back-off"}
        except Exception as error:
            for query in queries:
                yield {"id": query["id"], "error": type(error).__name__}  # its text might quote a prompt


def _read(lines: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # the gateway is gone


def main() -> None:
    """Answers queries until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the gateway handles it
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    of = RouterAnswers()
    while True:
        waiting = [json.loads(lines.get())]
        try:
            while len(waiting) < MOST_BATCH:
                waiting.append(json.loads(lines.get_nowait()))
        except Empty:
            pass
        for answer in of.answer(waiting):
            answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
