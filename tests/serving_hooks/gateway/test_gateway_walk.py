"""The gateway's ten minutes run as the page shows them, in an empty folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"


def section() -> str:
    found = re.search(r"^## Ten minutes.*?(?=^## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_ten_minutes_run_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="the extra `clients` is not installed")
    pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    (application,) = blocks("python")
    (tmp_path / "desk.py").write_text(application, encoding="utf-8")
    with socket.socket() as free:  # the page's port may be taken
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    typed = "\n".join(blocks("sh")).replace("8100", port)
    typed = typed.replace("presage gateway", f"presage gateway --listen 127.0.0.1:{port}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    script = tmp_path / "typed.sh"
    script.write_text(f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{typed}", encoding="utf-8")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    print(done.stdout)  # with `pytest -s`: what the page shows, shortened
    assert done.returncode == 0, done.stderr
    shown = re.sub(r"\s+", " ", done.stdout)
    assert "traces: 600 workflows" in shown
    assert "later: 240 workflows" in shown
    assert "remaining-length version 1 is champion now" in shown
    assert shown.count("60 customers at once") == 10 + 4 + 2
    assert '"predicted_remaining_len":[' in shown
