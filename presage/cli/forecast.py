"""`presage evaluate` and `presage forecast`: ask a model, registered or in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="models:/NAME@ALIAS, models:/NAME/VERSION, or an artefact folder.", show_default=False
    ),
]


def evaluate(
    model: Model,
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACES", help="Traces to judge on; outcomes for a router.", show_default=False),
    ],
    seed: options.Seed = 0,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of a router's transformer: fp32, bf16 or int8; what it costs and gains.", show_default=False
        ),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Judge a model on traces, a router on outcomes, that it was not trained on, beside a baseline."""
    from presage.cli.kinds import load

    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        loaded = load(model, lambda: options.open_registry(tracking_uri))
        kind = loaded.kind
        if precision is not None:
            loaded = kind.at_precision(loaded, precision)
        judged_on, left_out = kind.held_out(kind.read(traces, skip_bad, out, report), [loaded.predictor])
        if left_out:
            out.note(f"{left_out} {kind.unit} left out: the model was trained on them")
        report("forecasting", None)
        metrics = kind.metrics(loaded, judged_on, seed)
    data = {**metrics, "left_out": left_out}
    out.result(data, *(kind.tables(metrics, loaded.called) if not as_json else ()))


def forecast(
    model: Model,
    steps: Annotated[
        Path,
        typer.Argument(
            metavar="STEPS|-",
            help="The steps of one workflow so far: JSONL, .csv or .parquet; - reads JSONL of standard input.",
            allow_dash=True,
            show_default=False,
        ),
    ],
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Say what comes after the steps of one running workflow: agents and END, tokens left, or which model solves it."""
    from presage.cli.kinds import load

    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        loaded = load(model, lambda: options.open_registry(tracking_uri))
        rows = _one_workflow(steps, out)
        found = loaded.kind.ask(loaded.predictor, rows)
    data = {"model": loaded.name or model, "version": loaded.version, **found}
    out.result(data, *(loaded.kind.forecast(data, loaded.called, rows) if not as_json else ()))


def _one_workflow(steps: Path, out: Output) -> list[dict[str, Any]]:
    """The steps of one workflow, checked as a trace is; columns without a value are left out."""
    from presage.datasets.adapters import SUFFIXES
    from presage.errors import InputError

    # The operating system's name for standard input: errors name it as they name files.
    path = Path("/dev/stdin") if str(steps) == "-" else steps
    source_format = "auto" if path.name.endswith(tuple(SUFFIXES)) else "jsonl"
    table: pa.Table = options.read([path], False, out, lambda _, __: None, source_format)
    rows = table.to_pylist()
    workflows = {(row["workflow_type"], row["workflow_id"]) for row in rows}
    if len(workflows) > 1:
        raise InputError(
            f"{path}: steps of {len(workflows)} workflows; a forecast is of one: keep the rows of one workflow_id"
        )
    return [{name: value for name, value in row.items() if value is not None} for row in rows]
