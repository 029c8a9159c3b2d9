"""Runs the tests in two groups, and with --once-more tells a flaky test from a broken one.

    python tools/run_tests.py --jobs 2 -m "not slow and not vllm" [FILE ...]
    python tools/run_tests.py --once-more --summary FILE -m vllm

The tests marked `engine`, which start or wait for other processes, run one at a time, after all others, which share
`--jobs` processes. With --once-more the failed tests run again, one at a time with nothing beside them: a test counts
as failed if it fails again, and as flaky if it passes. `--summary` appends the closing line of each run of pytest and
`FLAKY NAME` lines to a file, for the end of a log.

A crash of a process of tests, an error of collection and an internal error are failures without a second attempt, and
so are more than MOST failed tests. The closing lines name the files that took longest, for each run. Other arguments
are those of pytest. This file is also the plugin (`-p run_tests`) that writes the names of the failed tests and the
seconds of each file of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

MOST: Final = 20
SLOWEST: Final = 12
"""Files that the closing lines name, if they took a second."""
_OK, _FAILED, _NONE = 0, 1, 5  # exit codes of pytest
_RESULTS: Final = "PRESAGE_TEST_RESULTS"
_failed: dict[str, bool] = {}
"""Failed tests, and whether the test itself failed; else its process has crashed."""
_seconds: Counter[str] = Counter()
"""Seconds by file, of fixtures and tests."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the seconds, and a failed test; pytest-xdist reports a crash as a failure of no phase of it."""
    _seconds[report.nodeid.split("::")[0]] += report.duration
    if report.failed:
        _failed[report.nodeid] = _failed.get(report.nodeid, True) and report.when in ("setup", "call", "teardown")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what failed and how long files took; processes of pytest-xdist leave it to the one that they report to."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[_RESULTS]).write_text(json.dumps([_failed, _seconds]), encoding="utf-8")


class Run:
    """One run of pytest: exit code, closing line, failed tests, whether running these again makes sense, seconds."""

    def __init__(self, *arguments: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            results = Path(scratch) / "failed.json"
            path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
            environment = os.environ | {_RESULTS: str(results), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "run_tests", *arguments]
            self.last = ""
            start = time.monotonic()
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", flush=True)
                    self.last = line.strip() or self.last
            ended = results.exists()  # else the process of pytest itself has crashed
            self.code = process.returncode if ended else process.returncode or _FAILED
            failed, seconds = json.loads(results.read_text(encoding="utf-8")) if ended else ({}, {})
        self.wall = time.monotonic() - start
        self.failed = list(failed)
        self.seconds: Counter[str] = Counter(seconds)
        self.repeatable = self.code == _FAILED and all(failed.values()) and 0 < len(failed) <= MOST


def main() -> int:
    """The command; 0 if every test has passed, at the second attempt at the latest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="2", help="processes for the tests that are not marked engine")
    parser.add_argument("--once-more", action="store_true", help="run failed tests again, alone")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append closing lines and flaky tests")
    parser.add_argument("-m", dest="marks", default="", help="as of pytest")
    ours, others = parser.parse_known_args()
    only = f"({ours.marks}) and " if ours.marks else ""
    shared = ["-n", "0" if ours.jobs == "1" else ours.jobs, "--dist", "loadfile"]
    shared.append("--no-loadscope-reorder")  # else files with few tests, which are the longest, come last
    runs = [
        # A crash of its only process would leave pytest-xdist waiting.
        Run(*shared, "-m", f"{only}not engine", *others),
        Run("-n", "0", "-m", f"{only}engine", *others),
    ]
    broken = [run for run in runs if run.code not in (_OK, _NONE)]
    none_ran = all(run.code == _NONE for run in runs)
    flaky: list[str] = []
    if ours.once_more and broken and all(run.repeatable for run in broken):
        first = [name for run in broken for name in run.failed]
        print(f"once more, alone: {len(first)} failed", flush=True)
        again = Run("-n", "0", *first)
        runs.append(again)
        if again.code in (_OK, _FAILED):
            flaky = [name for name in first if name not in again.failed]
        broken = [again] if again.code != _OK else []
    lines = [f"FLAKY {name}" for name in flaky]
    for run in runs:
        lines.append(f"{run.last} ({run.wall:.0f} s with start and collection)")
        lines += [f"    {seconds:6.0f} s  {file}" for file, seconds in run.seconds.most_common(SLOWEST) if seconds >= 1]
    if ours.summary is not None:
        with ours.summary.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    print("\n".join(lines), flush=True)
    return int(bool(broken) or none_ran)


if __name__ == "__main__":
    sys.exit(main())
