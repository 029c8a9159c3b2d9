"""The walks through the gateway run as their pages show them, in an empty folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def section(page: str, heading: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^## {heading}.*?(?=^## )", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def blocks(of: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", of, flags=re.MULTILINE | re.DOTALL)


def free_ports(of: str) -> str:
    """A text with free ports in place of the page's, which may be taken."""
    with ExitStack() as taken:
        free = {name: taken.enter_context(socket.socket()) for name in ("8001", "8002", "8100")}
        for one in free.values():
            one.bind(("127.0.0.1", 0))
        ports = {name: str(one.getsockname()[1]) for name, one in free.items()}
    of = re.sub(rf"\b({'|'.join(ports)})\b", lambda found: ports[found[1]], of)
    return of.replace("presage gateway --", f"presage gateway --listen 127.0.0.1:{ports['8100']} --")


def typed(folder: Path, of: str) -> str:
    """What the commands of a section print, its files being saved; white space collapsed."""
    script = folder / "typed.sh"
    script.write_text("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "\n".join(blocks(of, "sh")), "utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", str(script)], cwd=folder, env=environment, capture_output=True, text=True
    )
    print(done.stdout)  # with `pytest -s`: what the page shows, shortened
    assert done.returncode == 0, done.stderr
    return re.sub(r"\s+", " ", done.stdout)


@pytest.mark.slow
def test_the_ten_minutes_run_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="the extra `clients` is not installed")
    pytest.importorskip("langchain_openai", reason="the extra `clients` is not installed")
    of = free_ports(section("gateway.md", "Ten minutes"))
    (application,) = blocks(of, "python")
    (tmp_path / "desk.py").write_text(application, encoding="utf-8")
    loop = "$(seq {} 60 {}); do python desk.py $first $((first + 60))"
    for first, last, together in ((0, 540, 300), (900, 1080, 120)):  # each process imports LangGraph for seconds
        assert loop.format(first, last) in of
        twice = f"{first} {first + together}; do python desk.py $first $((first + {together}))"
        of = of.replace(loop.format(first, last), twice)
    shown = typed(tmp_path, of)
    assert "traces: 600 workflows" in shown
    assert "later: 240 workflows" in shown
    assert "remaining-length version 1 is champion now" in shown
    assert [shown.count(f" {count} customers at once") for count in (120, 60)] == [2, 2]
    assert '"predicted_remaining_len":[' in shown


@pytest.mark.slow
def test_a_router_is_learnt_from_reports_as_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the extra `clients` is not installed")
    of = free_ports(section("gateway_models.md", "Learn which model"))
    files = dict(zip(("engine.py", "app.py", "gateway.toml"), blocks(of, "python") + blocks(of, "toml"), strict=True))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shown = typed(tmp_path, of)
    assert "traces: 600 workflows" in shown
    assert "300 prompts, 600 rows with a label" in shown
    assert "router version 1 is champion now" in shown
    counts = re.findall(r"Counter\(\{(.*?)\}\)", shown)
    assert len(counts) == 5
    served = {what: int(count) for what, count in re.findall(r"'(\w+: \w+ \w+)': (\d+)", counts[-1])}
    proofs = [of for what, of in served.items() if what.startswith("Prove: large")]
    colours = [of for what, of in served.items() if what.startswith("Tell: small")]
    assert sum(proofs) >= 40  # of fifty each; a router that is late leaves the default, which is large
    assert sum(colours) >= 10
    assert "model large: most confident model" in shown
