"""Where every command ends: results on standard output, all else on standard error, one line and one code an error.

0  done
1  our failure
2  bad input or usage, or a result that could not be written
3  refused by a gate
130  interrupted; typer's own usage errors are 2 as well
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Final

import typer
from typer.core import TyperGroup

from presage.errors import PresageError

FAILED: Final = 1
BAD_INPUT: Final = 2
REFUSED: Final = 3
INTERRUPTED: Final = 130

TRACEBACK: Final = "PRESAGE_TRACEBACK"


class Boundary(TyperGroup):
    """A group of commands whose errors become one line and an exit code; usage errors are left to typer."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command that was asked for, and exits."""
        try:
            return super().main(*args, **kwargs)
        except PresageError as error:
            _explain(error, str(error))
            sys.exit(BAD_INPUT)
        except Exception as error:
            # Only the kind of error: what a library says of it may repeat the private text of a trace.
            _explain(error, f"failed unexpectedly: {type(error).__name__} (set {TRACEBACK}=1 to see all of it)")
            sys.exit(FAILED)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Inside `main`, which would make 1 of an interrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _explain(error: Exception, line: str) -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    _say(" ".join(line.split()))


def _say(line: str) -> None:
    print(f"presage: {line}", file=sys.stderr)
