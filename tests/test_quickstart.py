"""The quick start's shell blocks and the Python API's examples run as they stand, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_shell_blocks_run_in_order(tmp_path: Path) -> None:
    typed = blocks("quickstart.md", "sh")
    assert len(typed) == 4
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for block in typed:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert "END" in done.stdout
    assert (tmp_path / "traces.html").is_file()
    assert (tmp_path / "model" / "report.html").is_file()


@pytest.mark.slow
def test_the_examples_of_the_python_api_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    names: dict[str, Any] = {}
    for block in blocks("python_api.md", "python"):
        exec(compile(block, "python_api.md", "exec"), names)
    assert names["champion"].classes_ == names["model"].classes_
