"""What starting a server of one's own takes: a port, and an end that leaves no process behind."""

import os
import signal
import socket
import subprocess


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
