"""The end of an engine that runs in a process of its own: in order, however busy the machine."""

from typing import Any

ENDS_WITHIN_S = 600.0


def end(client: Any) -> None:
    """Ends the engine behind vLLM's client, and returns once its process is gone.

    vLLM's client sends SIGTERM, waits for some time, kills the engine, and does not wait until it is dead. But CPython
    runs a signal's handler only while the main thread is awake: an idle engine that is about to sleep when the signal
    comes, as on a busy machine, sleeps on. A message wakes it; this one asks for nothing.
    """
    processes = list(client.resources.engine_manager.processes)
    for process in processes:
        process.terminate()
    client.abort_requests(["nobody's"])
    for process in processes:
        process.join(ENDS_WITHIN_S)
        assert process.exitcode is not None, f"{process.name} has not ended within {ENDS_WITHIN_S:g} s"
    client.shutdown()
