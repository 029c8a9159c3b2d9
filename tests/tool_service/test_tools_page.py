"""The agent and the file of docs/programs.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tool_services import SECRET, event, tools_service, until

from presage.tool_service.config import ToolServiceConfig, ToolSettings, read_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "programs.md").read_text("utf-8")


def example(language: str, words: str) -> str:
    (found,) = [one for one in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if words in one]
    return found


def test_the_agent_of_the_page_gets_its_two_tools_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    monkeypatch.delenv("PRESAGE_TOOLS_TOKEN", raising=False)
    file = tmp_path / "tools.toml"
    file.write_text(example("toml", "[tools.sandbox]").replace('["python"', f'["{sys.executable}"'))
    described = read_config(file).tools
    settings = {name: of.model_dump(exclude_none=True) for name, of in described.items()}
    agent = tmp_path / "agent.py"
    agent.write_text(example("python", "import requests"))
    with tools_service(tmp_path, settings) as tools:
        done = subprocess.run(
            [sys.executable, agent, tools.url], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        status, folder, _ = done.stdout.split()
        assert status == "200"
        until(lambda: tools.folders() == [Path(folder).name])
        tools.hear(event("ended", "run-7", workflow_type="coding"))
        until(tools.nothing_left)


def test_the_page_names_every_setting_and_its_default() -> None:
    part = PAGE.partition("### Settings")[2].partition("### What is promised of tools")[0]
    for model in (ToolServiceConfig, ToolSettings):
        for name, field in model.model_fields.items():
            if name == "tools":
                continue
            (line,) = _rows(part, rf"`(tools\.NAME\.)?{name}`")
            if field.default is not None and not field.is_required():
                shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
                assert shown in line, line


def _rows(page: str, name: str) -> list[str]:
    """The rows of tables whose first column has this name."""
    return [line for line in page.splitlines() if line.startswith("|") and re.search(name, line.split("|")[1])]
