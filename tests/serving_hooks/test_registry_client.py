"""The process that asks the registry beside an engine: it answers, it ends, and it is started again."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from registry_database import new_database
from serving_samples import Clock
from tiny_model import STATE_SIZE, Tiny

from presage.errors import ArtefactError, PresageError, RegistryError
from presage.predictors.common.artefact import artefact_digest, read_artefact, write_artefact
from presage.registry.connect import open_registry
from presage.registry.package import register
from presage.serving_hooks.forecasting.champions import predictors
from presage.serving_hooks.forecasting.reload import ProcessEnded, RegistryClient
from presage.serving_hooks.forecasting.sources import load_validated
from presage.serving_hooks.vllm.config import PresageConfig

AGENTS = {"next-agent": "models:/next-agent@champion"}
ROW = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}


@pytest.fixture
def silent() -> Iterator[str]:
    """A registry that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def endless() -> Iterator[str]:
    """A registry whose every answer has three gigabytes."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(3 << 30))
            self.end_headers()
            with suppress(OSError):
                for _ in range(3 << 10):
                    self.wfile.write(bytes(1 << 20))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def process_id(client: RegistryClient) -> int | None:
    return client.process.pid if client.process is not None else None


def alive(process_id: int) -> bool:
    """Whether it is there, and not only to be reaped."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends(process_id: int) -> bool:
    until = time.monotonic() + 30
    while alive(process_id) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(process_id)


def test_where_no_registry_is_named_there_is_no_process() -> None:
    asked = RegistryClient(lambda: None)
    assert asked.versions(AGENTS) is None
    assert process_id(asked) is None


@pytest.mark.slow
def test_it_says_which_versions_there_are_tries_them_and_takes_no_memory_at_rest(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artefact = read_artefact(tiny.folder)
    states = {"kind": "encoder", "sizes": {"prefill": STATE_SIZE, "completion": STATE_SIZE}}
    states |= {"encoder": str(tmp_path / "gone"), "encoder_digest": "sha256:0"}
    config = artefact.config | {"states": states}
    write_artefact(tmp_path / "broken", kind="next-agent", config=config, tensors=artefact.tensors, training_data={})
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    for folder in (tiny.folder, tmp_path / "broken"):
        register(registry, folder, name="next-agent", metrics={}, params={}, tags={}, input_example=[ROW])
    asked = RegistryClient(lambda: registry.uri)
    both = {**AGENTS, "remaining-length": "models:/remaining-length/7"}
    assert asked.versions(both) == {"next-agent": None, "remaining-length": 7}
    registry.client.set_registered_model_alias("next-agent", "champion", "1")
    assert asked.versions(AGENTS) == {"next-agent": 1}
    with caplog.at_level(logging.INFO, "presage"):
        tried = asked.trial("next-agent", "models:/next-agent/1")
    assert (tried.version, tried.digest, tried.promoted) == (1, artefact_digest(tiny.folder), {})
    assert "it was promoted without figures" in caplog.text, "the log is the engine's"
    assert load_validated("next-agent", tried.folder, tried.digest).vocabulary == tiny.training.predictor.vocabulary
    with pytest.raises(ArtefactError, match="gone"):
        asked.trial("next-agent", "models:/next-agent/2")
    with pytest.raises(RegistryError, match="no version 3"):
        asked.trial("next-agent", "models:/next-agent/3")
    first = process_id(asked)
    asked.rest()
    assert first is not None
    assert not alive(first)
    assert asked.versions(AGENTS) == {"next-agent": 1}, "it is started again when it is asked"
    asked.close()
    assert process_id(asked) is None


@pytest.mark.slow
def test_another_artefact_than_was_tried_is_not_taken(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="was validated: put it back"):
        load_validated("next-agent", tiny.folder, "sha256:0123")


def test_a_registry_that_is_not_there_is_an_answer_and_the_process_stays(tmp_path: Path) -> None:
    asked = RegistryClient(lambda: f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(RegistryError, match=r"there is no .*none\.db"):
        asked.versions(AGENTS)
    first = process_id(asked)
    with pytest.raises(RegistryError, match=r"there is no .*none\.db"):
        asked.versions(AGENTS)
    assert process_id(asked) == first is not None
    del asked
    assert ends(first), "nobody holds it any more"


@pytest.mark.slow
def test_an_answer_that_takes_too_long_ends_the_process(silent: str) -> None:
    asked = RegistryClient(lambda: silent, most_s=1.0)
    with pytest.raises(ProcessEnded, match="no answer within 1 s") as raised:
        asked.versions(AGENTS)
    assert raised.value.late
    assert process_id(asked) is None


@pytest.mark.slow
def test_an_answer_without_end_costs_neither_the_engine_nor_the_process(endless: str) -> None:
    asked = RegistryClient(lambda: endless, most_mb=512)
    for _ in range(2):
        with pytest.raises(RegistryError, match="larger than the memory for it"):
            asked.versions(AGENTS)
    of = Path(f"/proc/{process_id(asked)}")
    peak = next(line for line in (of / "status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 1024 * 1024, "kB"
    assert (of / "oom_score_adj").read_text() == "1000\n", "the kernel ends it before the engine"


@pytest.mark.slow
def test_a_version_that_needs_more_memory_is_refused_and_that_is_said(tmp_path: Path) -> None:
    """Depending on where it ends, Python raises or a library gives up and ends the process."""
    registry = open_registry(new_database(tmp_path / "mlflow.db"))
    tensors = {"bias": np.zeros(25 << 20, np.float32)}
    write_artefact(tmp_path / "large", kind="next-agent", config={}, tensors=tensors, training_data={})
    register(registry, tmp_path / "large", name="next-agent", metrics={}, params={}, tags={}, input_example=[ROW])
    asked = RegistryClient(lambda: registry.uri, most_mb=400)
    with pytest.raises(PresageError, match=r"(?i)memory"):
        asked.trial("next-agent", "models:/next-agent/1")


@pytest.mark.slow
def test_an_engine_starts_without_a_registry_that_does_not_answer_in_time(
    silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = predictors(PresageConfig(registry=silent), most_s=1.0)
    assert {held.reason for held in found.values()} == {"no answer within 1 s"}
    assert len(caplog.records) == 1


def test_one_that_ends_is_started_again_after_a_while_and_each_time_after_a_longer_one(tmp_path: Path) -> None:
    clock = Clock()
    dies = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    asked = RegistryClient(lambda: "sqlite:///x.db", clock=clock, command=dies)
    for wait_s in (10, 20, 40, 80, 160, 320, 600, 600):
        with pytest.raises(ProcessEnded, match=r"has ended \(SIGSEGV\)") as raised:
            asked.versions(AGENTS)
        assert (raised.value.queried, raised.value.late) == (True, False)
        clock.now += wait_s - 1
        with pytest.raises(ProcessEnded, match="started again in 1 s") as raised:
            asked.versions(AGENTS)
        assert not raised.value.queried
        clock.now += 1


@pytest.mark.slow
def test_closing_breaks_off_what_is_asked(silent: str) -> None:
    asked = RegistryClient(lambda: silent)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            asked.versions(AGENTS)
        except ProcessEnded as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until = time.monotonic() + 60.0
    while process_id(asked) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    asked.close()
    thread.join(30)
    assert len(raised) == 1
    with pytest.raises(ProcessEnded, match="shuts down"):
        asked.versions(AGENTS)


ENGINE = """
import sys, threading, time
from presage.serving_hooks.forecasting.reload import RegistryClient
asked = RegistryClient(lambda: sys.argv[1])
threading.Thread(target=asked.versions, args=({"next-agent": "models:/next-agent@champion"},), daemon=True).start()
while asked.process is None:
    time.sleep(0.01)
print(asked.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_it_ends_with_an_engine_that_is_killed_even_while_it_works(silent: str) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, silent], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    process_id = int(engine.stdout.readline())
    assert alive(process_id)
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    assert ends(process_id)
