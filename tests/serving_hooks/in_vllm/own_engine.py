"""The end of an engine that runs in a process of its own: in order, however busy the machine."""

import time
from contextlib import suppress
from typing import Any

ENDS_WITHIN_S = 300.0


def end(client: Any) -> None:
    """Ends the engine behind vLLM's client, and returns once its process is gone.

    vLLM's client sends SIGTERM, waits for some time, kills the engine, and does not wait until it is dead. But CPython
    runs a signal's handler only while the main thread is awake: an idle engine that is about to sleep when the signal
    comes, as on a busy machine, sleeps on. A message wakes it, and this one asks for nothing; it is sent again, since
    an engine may have handled it before the signal reached it.
    """
    processes = list(client.resources.engine_manager.processes)
    for process in processes:
        process.terminate()
    until = time.monotonic() + ENDS_WITHIN_S
    for process in processes:
        while process.exitcode is None:
            assert time.monotonic() < until, f"{process.name} has not ended within {ENDS_WITHIN_S:g} s"
            with suppress(Exception):  # it may have ended
                client.abort_requests(["nobody's"])
            process.join(1.0)
    client.shutdown()
