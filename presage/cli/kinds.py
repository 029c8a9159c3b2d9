"""What only terminals need of a kind of predictor: its training command, and how data, forecasts and figures look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from presage.cli import options, outcomes
from presage.cli.output import Output, report_lines
from presage.predictor_kinds import Kind
from presage.progress import Progress
from presage.wording import counted


def _ask(predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    forecast: dict[str, Any] = predictor.forecast(rows).to_dict()
    return forecast


@dataclass(frozen=True)
class KindCommand:
    """The commands' side of a kind.

    Attributes:
        train: the subcommand of `train-predictor`.
        examples: for the help of the subcommand.
        advice: what to try when a baseline wins.
        forecast: (JSON of a forecast, name of the predictor, steps) -> what people read.
        ask: (predictor, steps of one workflow) -> JSON of the forecast.
    """

    train: Callable[..., None]
    examples: str
    advice: str
    forecast: Callable[[dict[str, Any], str, list[dict[str, Any]]], list[Any]]
    ask: Callable[[Any, list[dict[str, Any]]], dict[str, Any]] = _ask


def command_of(kind: Kind) -> KindCommand:
    """The commands' side of a kind."""
    command: KindCommand = resolve_name(kind.command)
    return command


def tables(kind: Kind, metrics: dict[str, Any]) -> list[Any]:
    """The report of these metrics, as a terminal shows it."""
    return [*report_lines(kind.report(metrics)), f"\none forecast takes {metrics['latency_us']:,.1f} µs"]


def read(kind: Kind, paths: list[Path], skip_bad: bool, out: Output, report: Progress) -> Any:
    """Read and validate the data of a kind; optionally skip bad rows and report them."""
    if kind.reads_prompts:
        return outcomes.read(paths, skip_bad, out, report).outcomes
    return options.read(paths, skip_bad, out, report)


def unseen(
    kind: Kind, paths: list[Path], predictors: list[Any], skip_bad: bool, out: Output, report: Progress
) -> tuple[Any, int]:
    """Read the files and leave out what a predictor was trained on; also returns the number of units left out."""
    data, left_out = kind.held_out(read(kind, paths, skip_bad, out, report), *predictors)
    if left_out:
        out.note(f"{counted(left_out, kind.unit)} left out: a model was trained on them")
    return data, left_out
