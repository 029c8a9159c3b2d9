"""Calls `--help` of the named benchmarks in one process, which imports what they share only once.

Prints one JSON object: the exit status of each, or the error it ended with.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]


def status(name: str) -> int | str:
    """The exit status of `python benchmarks/NAME.py --help`."""
    path = str(BENCHMARKS / f"{name}.py")
    sys.argv = [path, "--help"]
    try:
        with redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it went on after --help"


def main() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    names = sys.argv[1:]
    print(json.dumps({name: status(name) for name in names}))


if __name__ == "__main__":
    main()
