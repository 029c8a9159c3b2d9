"""Arguments and options that several commands share, and the functions that use them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from presage.cli.output import Output
from presage.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.datasets import read as reading

Traces = Annotated[
    list[Path],
    typer.Argument(metavar="TRACES", help="Trace stores; .jsonl, .csv and .parquet files; spans."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip and count workflows with a bad row instead of stopping.")
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        envvar="MLFLOW_TRACKING_URI",
        help="The registry: an MLflow server or database. Default: sqlite:///mlflow.db in the working directory.",
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.", min=0)]
Test = Annotated[
    list[Path] | None,
    typer.Option(help="Test traces; repeat for more. Default: a fifth of the tasks, the latest if times are recorded."),
]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; overrides the file.")
]
OutFolder = Annotated[Path | None, typer.Option("--out", help="Folder for artefact, metrics.json and report.")]
ReportFolder = Annotated[
    Path | None,
    typer.Option("--report", help="Folder for metrics.json, report.html and report.md."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the results of an earlier run in the output folders.")]
Horizon = Annotated[int, typer.Option(help="Number of steps to forecast.", min=1)]
States = Literal["auto", "captured", "text", "none"]
Baselines = Annotated[
    str,
    typer.Option(
        help="Baselines, separated by commas: default (all), none, or names; an unknown name lists them.",
        metavar="NAMES",
    ),
]
Register = Annotated[bool, typer.Option("--register/--no-register", help="Register the version with MLflow.")]


def read(paths: list[Path], skip_bad: bool, out: Output, report: Progress, source_format: str = "auto") -> pa.Table:
    """Read traces into one validated table; report skipped workflows, and what of spans was not read."""
    return read_traces(paths, skip_bad, out, report, source_format).table


def read_traces(
    paths: list[Path], skip_bad: bool, out: Output, report: Progress, source_format: str = "auto"
) -> reading.Traces:
    """As `read`, with what was skipped and not read."""
    from presage.datasets.read import read_traces

    traces = read_traces(
        paths,
        skip_bad=skip_bad,
        source_format=source_format,
        progress=lambda _: report("reading traces", None),
    )
    for reason, count in traces.skipped.items():
        out.note(f"skipped {count} × {reason}")
    for what, count in traces.notices.items():
        out.note(f"read with {count} × {what}")
    return traces
