"""An engine in a process of its own ends in order, and with it its recording, even if it sleeps when it is told to."""

import multiprocessing
import queue
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_engine import end

from presage.datasets.read import read_traces
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import start
from presage.serving_hooks.workflows import RunningStep, Workflow
from presage.serving_hooks.workflows.identity import Step

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]


def engine(folder: Path, messages: Connection, sleeps: bool) -> None:
    """Records a workflow and waits as vLLM's engine does: for messages that a thread receives, until SIGTERM.

    Told so, it sleeps through the signal: another thread takes it, as if it came just before this one fell asleep.
    """
    told, received = threading.Event(), queue.Queue[object]()
    signal.signal(signal.SIGTERM, lambda *_: told.set())

    def receive() -> None:
        while True:
            received.put(messages.recv())

    threading.Thread(target=receive, daemon=True).start()
    recorder = start(RecorderConfig(folder=str(folder)))
    if sleeps:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    workflow = Workflow(Step("t", "w", "a"))
    for number in range(3):
        step = Step("t", "w", "a", number)
        recorder.begun(RunningStep(f"r{number}", step, workflow))
        recorder.completed(f"r{number}", output_tokens=number, finish_reason="stop")
    messages.send("serves")
    while not told.is_set():
        received.get()
    recorder.close()


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_an_engine_that_sleeps_when_it_is_told_to_end_ends_and_closes_its_recording(
    tmp_path: Path, sleeps: bool
) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine, args=(tmp_path, there, sleeps), name="engine", daemon=True
    )
    process.start()
    assert here.recv() == "serves"
    client = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process])),
        abort_requests=here.send,
        shutdown=process.close,
    )
    end(client)
    table = read_traces([tmp_path]).table
    assert table["output_tokens"].to_pylist() == [0, 1, 2]
    assert not list(tmp_path.glob("*/*.open.*")), "every file is closed"
