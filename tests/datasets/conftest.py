"""Where the shared public traces stand, and a writer of small JSONL files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def workflows_folder() -> Path:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "workflows"
    if not folder.is_dir():
        pytest.skip(f"no public traces at {folder}")
    return folder


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str, name: str = "traces.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write
