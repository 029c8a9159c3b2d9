"""Calls benchmarks one after the other in one process, which imports what they share only once.

    python call_benchmarks.py '{"NAME": "ARGUMENTS", ...}'

Prints one JSON object: of each the exit status, "an object" where its last line is a JSON object, or the error.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]


def end(name: str, arguments: str) -> int | str:
    """How `python benchmarks/NAME.py ARGUMENTS` ends."""
    path = str(BENCHMARKS / f"{name}.py")
    sys.argv = [path, *arguments.split()]
    stdout = io.StringIO()
    try:
        with redirect_stdout(stdout):
            runpy.run_path(path, run_name="__main__")
        return "an object" if isinstance(json.loads(stdout.getvalue().splitlines()[-1]), dict) else "something else"
    except SystemExit as ended:
        return ended.code or 0
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    lines = json.loads(sys.argv[1])
    print(json.dumps({name: end(name, arguments) for name, arguments in lines.items()}))


if __name__ == "__main__":
    main()
