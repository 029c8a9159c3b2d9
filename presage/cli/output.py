"""Output and exit codes of all commands: the result goes to standard output, everything else to standard error.

Output of libraries is redirected to standard error, so `--json` prints exactly one object. Progress is a bar on a
terminal, else one line for each stage and every half a minute. An error is one line and one exit code:

0  done
1  our failure
2  bad input or usage, or a result that could not be written
3  refused by a gate
130  interrupted; typer's own usage errors are 2 as well
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperGroup

from presage.errors import AliasMovedError, ConfigurationError, OutputError, PresageError
from presage.progress import Progress, note, progress_lines
from presage.wording import install

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from presage.report.blocks import Document

FAILED: Final = 1
BAD_INPUT: Final = 2
REFUSED: Final = 3
INTERRUPTED: Final = 130

TRACEBACK: Final = "PRESAGE_TRACEBACK"

HELP: Final = {"help_option_names": ["--help", "-h"]}
"""Settings of a program, which its commands take over."""

_WIDE = 160


class Output:
    """The output of one command: one JSON object (`as_json`), or tables."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @contextmanager
    def working(self) -> Iterator[Progress]:
        """Redirect standard output of libraries; yields the progress callback."""
        with contextlib.redirect_stdout(sys.stderr), _bar() if sys.stderr.isatty() else progress_lines() as report:
            yield report

    def result(self, data: Mapping[str, Any], *renderables: RenderableType) -> None:
        """Print `data` with --json, else the renderables; raises OutputError if that cannot be written."""
        if self.as_json:
            text = json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
        else:
            from rich.console import Console

            rendered = io.StringIO()
            terminal = sys.stdout.isatty()
            # A file or a pipe has no width to wrap at, unless COLUMNS gives one.
            own_width = terminal or os.environ.get("COLUMNS", "").isdigit()
            console = Console(file=rendered, force_terminal=terminal, width=None if own_width else _WIDE)
            for renderable in renderables:
                console.print(renderable, highlight=False, markup=False, soft_wrap=isinstance(renderable, str))
            text = rendered.getvalue()
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # Python flushes once more at exit, and would fail there with a traceback.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OutputError(
                f"standard output: {error.strerror or error}; the result was not printed: free space or write elsewhere"
            ) from error

    note = staticmethod(note)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    doing = TextColumn("{task.description}", markup=False)
    columns = (
        SpinnerColumn(),
        doing,
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # The time left is estimated from all of a stage, as a step of it may take minutes.
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=math.inf,
    ) as progress:
        task = progress.add_task("", total=None)

        def report(doing: str, share: float | None) -> None:
            if (share or 0.0) < progress.tasks[0].completed:
                progress.reset(task)  # else the time left would be that of another stage
            progress.update(task, description=doing, total=None if share is None else 1.0, completed=share or 0.0)

        yield report


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Context of imports that `what` needs: a library that is not there raises ConfigurationError, naming the extra."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "presage":
            raise
        raise ConfigurationError(
            f"{what} needs the extra {extra}: {install(extra)} ({error.name} is missing)"
        ) from None


class Boundary(TyperGroup):
    """A command group that turns errors into one line and an exit code; typer handles usage errors."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit."""
        try:
            return super().main(*args, **kwargs)
        except PresageError as error:
            _explain(error, str(error))
            sys.exit(REFUSED if isinstance(error, AliasMovedError) else BAD_INPUT)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and (error.name or "presage").partition(".")[0] != "presage":
                _explain(error, f"{error.name} is not installed; this command needs it: {install('train')}")
                sys.exit(BAD_INPUT)
            # Only the type of the error: a library's message may contain private text of a trace.
            _explain(error, f"failed unexpectedly: {type(error).__name__} (set {TRACEBACK}=1 to see all of it)")
            sys.exit(FAILED)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Exit with 130 on an interrupt; `main` alone would exit with 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _explain(error: Exception, line: str) -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    _print_error(" ".join(line.split()))


def _print_error(line: str) -> None:
    print(f"presage: {line}", file=sys.stderr)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> Table:
    """A table whose columns are right-aligned, but for those in `left`. Names are never read as markup."""
    from rich.table import Table
    from rich.text import Text

    wide = Text(title, no_wrap=True, overflow="ignore")  # else it wraps at the width of the table
    made = Table(title=wide, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        made.add_column(Text(name), justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


_TABLE_WIDTH: Final = 100


def _fitting(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[int]]:
    """Column numbers of the tables that a wide table is shown as: as few as fit, of similar widths, each with the first
    column, which names the rows."""
    widths = [2 + max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def split(most: int) -> list[list[int]]:
        tables = [[0]]
        for column in range(1, len(head)):
            if len(tables[-1]) > 1 and sum(widths[shown] for shown in tables[-1]) + widths[column] > most:
                tables.append([0])
            tables[-1].append(column)
        return tables

    fewest = len(split(_TABLE_WIDTH))
    return next(tables for most in range(_TABLE_WIDTH + 1) if len(tables := split(most)) == fewest)


def report_lines(document: Document) -> Iterator[Any]:
    """What a terminal shows of a report: its lead, and the texts and tables of the sections marked for it; its verdict
    last. A table wider than 100 characters is shown as several."""
    from presage.report.blocks import Folded
    from presage.report.blocks import Table as ReportTable
    from presage.report.blocks import Text as ReportText

    yield document.title
    yield document.lead
    for section in document.sections:
        if section.in_terminal:
            yield f"\n{section.title}"
            for block in section.blocks:
                for part in block.blocks if isinstance(block, Folded) else (block,):
                    if isinstance(part, ReportTable):
                        for columns in _fitting(part.head, part.rows):
                            rows = [[row[column] for column in columns] for row in part.rows]
                            left = [place for place, column in enumerate(columns) if column in part.words]
                            yield ""
                            yield table("", [part.head[column] for column in columns], rows, left=left)
                    elif isinstance(part, ReportText):
                        yield part.text
    if document.verdict:
        yield f"\n{document.verdict}"
