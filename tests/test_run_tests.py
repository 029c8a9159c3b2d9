"""The script that runs the tests: a made-up folder of tests, its exit code and its last lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "run_tests.py"
PASSES = "def test_passes(): pass\n"
FLAKY = """
from pathlib import Path
def test_second_time_lucky():
    first = not Path("tried").exists()
    Path("tried").touch()
    assert not first
"""
BROKEN = "def test_broken(): assert False\n"
CRASHES = FLAKY.replace("assert not first", "first and __import__('os')._exit(1)")
ENGINE = """
import os, pytest
@pytest.mark.engine
def test_nothing_beside(): assert "PYTEST_XDIST_WORKER" not in os.environ
"""


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, list[str]]:
    """The exit code of a run with --once-more, and the lines of its summary."""
    (folder / "summary").unlink(missing_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist\nmarkers =\n    engine\n", encoding="utf-8")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--jobs", "2", "--once-more", "--summary", "summary", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing those of other libraries takes seconds a process
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    summary = (folder / "summary").read_text(encoding="utf-8").splitlines()
    assert done.stdout.splitlines()[-len(summary) :] == summary
    return done.returncode, summary


def test_what_passes_alone_is_named_flaky_and_is_no_failure(tmp_path: Path) -> None:
    code, summary = run(tmp_path, good=PASSES, bad=FLAKY, engine=ENGINE)
    assert code == 0
    assert summary[0] == "FLAKY test_bad.py::test_second_time_lucky"
    assert [line.split(" in ")[0] for line in summary[1:]] == [
        "1 failed, 1 passed",
        "1 passed, 2 deselected",
        "1 passed",
    ]


def test_what_fails_twice_is_a_failure_beside_a_flaky_one(tmp_path: Path) -> None:
    code, summary = run(tmp_path, good=PASSES, bad=FLAKY, worse=BROKEN)
    assert code == 1
    assert [line for line in summary if line.startswith("FLAKY")] == ["FLAKY test_bad.py::test_second_time_lucky"]
    assert summary[-1].startswith("1 failed, 1 passed in ")


@pytest.mark.parametrize("text", [CRASHES, "import nothing_of_this_name\n", "def test_x(: pass\n"])
def test_a_crash_and_an_error_of_collection_get_no_second_attempt(tmp_path: Path, text: str) -> None:
    code, summary = run(tmp_path, good=PASSES, bad=text)
    assert code == 1
    assert not any(line.startswith("FLAKY") for line in summary)
    assert len(summary) == 2  # a line a group


def test_files_that_take_long_are_named_with_their_seconds(tmp_path: Path) -> None:
    _, summary = run(tmp_path, good=PASSES, slow="import time\ndef test_sleeps(): time.sleep(1.2)\n")
    assert [line.split() for line in summary if "test_" in line] == [["1", "s", "test_slow.py"]]


def test_a_group_without_tests_is_no_failure_and_no_test_at_all_is(tmp_path: Path) -> None:
    assert run(tmp_path, good=PASSES)[0] == 0
    assert run(tmp_path, "-k", "nothing")[0] == 1


@pytest.mark.parametrize(
    ("asked", "left_out"),
    [
        ("vllm and not slow", True),
        ("(vllm) and engine", True),
        ("not vllm and not sdk", False),
        ("vllm or engine", False),
        ("hypothesis and not vllm", False),  # a mark of hypothesis, which no file bears
        ("", False),
    ],
)
def test_files_without_a_mark_that_is_asked_for_are_not_imported(
    request: pytest.FixtureRequest, tmp_path: Path, asked: str, left_out: bool
) -> None:
    conftest = str(Path(__file__).resolve().parents[1] / "conftest.py")
    (ours,) = (one for one in request.config.pluginmanager.get_plugins() if getattr(one, "__file__", "") == conftest)
    config = SimpleNamespace(option=SimpleNamespace(markexpr=asked), getini=request.config.getini)
    for text, ignored in (("pytest.mark.slow", left_out), ("pytest.mark.vllm and pytest.mark.engine", False)):
        (tmp_path / "test_one.py").write_text(text)
        assert bool(ours.pytest_ignore_collect(tmp_path / "test_one.py", config)) is ignored
