"""Servers of one's own: a free port, an end that leaves no process behind, and a Prometheus."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

STARTS_WITHIN_S = 300.0


def free_port() -> int:
    """A port that nobody listens on. vLLM takes `--port 0` and then tells nobody which port it has got."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """The process and those it has started; it leads a session of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def prometheus(binary: str, folder: Path, target: str, every_s: int, rules: str = "") -> Iterator[str]:
    """A Prometheus that asks one server for its page of metrics until the end of a block; its address.

    What it collects stays in `folder`, where it can be started again.

    Args:
        binary: the program.
        folder: made if it is not there.
        target: host and port of the server.
        every_s: seconds between two scrapes.
        rules: groups of alerts, as YAML.

    Raises:
        RuntimeError: it does not start, or does not take the rules; the message says where it says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yml").write_text(rules or "groups: []\n", encoding="utf-8")
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {every_s}s, evaluation_interval: {every_s}s}}\n"
        "rule_files: [rules.yml]\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}]\n",
        encoding="utf-8",
    )
    port, log = free_port(), folder / "prometheus.log"
    line = [binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    line += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y"]
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(line, cwd=folder, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        begun = time.monotonic()
        while not _ready(url):
            if process.poll() is not None or time.monotonic() - begun > STARTS_WITHIN_S:
                raise RuntimeError(f"Prometheus does not start; see {log}")
            time.sleep(0.1)
        yield url
    finally:
        stop(process)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
