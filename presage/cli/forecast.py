"""`presage evaluate` and `presage forecast`: ask a model, registered or in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.next_agent import NextAgentPredictor
    from presage.registry.resolve import ResolvedModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="models:/NAME@ALIAS, models:/NAME/VERSION, or an artefact folder.", show_default=False
    ),
]

_LIKELIEST = 3


def evaluate(
    model: Model,
    traces: options.Traces,
    seed: options.Seed = 0,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Judge a model on traces that it was not trained on, beside the n-gram it carries."""
    from presage.training.next_agent import evaluate_model, held_out

    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        predictor, resolved = _load(model, tracking_uri)
        table, left_out = held_out(options.read(traces, skip_bad, out, report), predictor)
        if left_out:
            out.note(f"{left_out} workflows left out: the model was trained on their tasks")
        report("forecasting every step", None)
        judged = evaluate_model(predictor, table, seed, model=resolved.name or model, version=resolved.version)
        metrics = judged.evaluation.to_dict()
    data = {**metrics, "latency_us": judged.latency_us, "left_out": left_out}
    if as_json:
        out.result(data)
        return
    from presage.cli.tables import accuracies

    out.result(data, *accuracies(metrics, _called(resolved, model)), f"\none forecast takes {judged.latency_us:.1f} µs")


def forecast(
    model: Model,
    steps: Annotated[
        Path,
        typer.Argument(
            metavar="STEPS.jsonl|-",
            help="The steps of one workflow so far, one JSON object a line; - reads standard input.",
            allow_dash=True,
            show_default=False,
        ),
    ],
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Say what comes after the steps of one running workflow: agents and END, with probabilities."""
    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        predictor, resolved = _load(model, tracking_uri)
        rows = _one_workflow(steps, out)
        found = predictor.forecast(rows).to_dict()
    data = {"model": resolved.name or model, "version": resolved.version, **found}
    out.result(data, *(_forecast(data, _called(resolved, model), rows) if not as_json else ()))


def _load(model: str, tracking_uri: str | None) -> tuple[NextAgentPredictor, ResolvedModel]:
    from presage.predictors.next_agent import NextAgentPredictor
    from presage.registry.resolve import resolve

    resolved = resolve(model, lambda: options.open_registry(tracking_uri))
    return NextAgentPredictor.load(resolved.folder), resolved


def _one_workflow(steps: Path, out: Output) -> list[dict[str, Any]]:
    """The steps of one workflow, checked as a trace is; columns without a value are left out."""
    from presage.errors import InputError

    # The operating system's name for standard input: errors name it as they name files.
    path = Path("/dev/stdin") if str(steps) == "-" else steps
    table: pa.Table = options.read([path], False, out, lambda _, __: None, "jsonl")
    rows = table.to_pylist()
    workflows = {(row["workflow_type"], row["workflow_id"]) for row in rows}
    if len(workflows) > 1:
        raise InputError(
            f"{path}: steps of {len(workflows)} workflows; a forecast is of one: keep the lines of one workflow_id"
        )
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _called(resolved: ResolvedModel, model: str) -> str:
    return f"{resolved.name} version {resolved.version}" if resolved.name else model


def _forecast(data: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> list[Any]:
    from presage.cli.tables import table

    lines = []
    for k, horizon in enumerate(data["horizons"], start=1):
        likeliest = sorted(horizon["agents"].items(), key=lambda item: -item[1])[:_LIKELIEST]
        lines.append([str(k), *(f"{agent} {p:.3f}" for agent, p in likeliest), f"{horizon['end']:.3f}"])
    shown = min(_LIKELIEST, len(data["horizons"][0]["agents"]))
    head = ["steps ahead", *(f"likeliest {n + 1}" for n in range(shown)), "END"]
    last = rows[-1]
    return [
        table(f"After step {len(rows) - 1} ({last['agent']}, {data['moment']}) of {last['workflow_id']}", head, lines),
        f"\n{name}; source {data['source']}, {data['evidence']} training steps of this agent in this workflow type",
    ]
