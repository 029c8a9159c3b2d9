"""The quick start's shell blocks run as they stand, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quickstart.md"


@pytest.mark.slow
def test_the_shell_blocks_run_in_order(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert "END" in done.stdout
    assert (tmp_path / "traces.html").is_file()
    assert (tmp_path / "model" / "report.html").is_file()
