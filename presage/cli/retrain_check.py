"""`presage retrain-check`: are the models still what they were promoted as, on traces recorded since?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.boundary import REFUSED
from presage.cli.output import Output, Report

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.cli.kinds import Loaded

DUE = REFUSED


def retrain_check(
    traces: options.Traces,
    model: Annotated[
        list[str],
        typer.Option(
            help="models:/NAME@ALIAS, models:/NAME/VERSION, or a folder: one of next agents, one of lengths, or both.",
            show_default=False,
        ),
    ],
    promoted_on: Annotated[
        list[Path] | None,
        typer.Option(
            help="Held-out traces of the promotion; repeat for more. Without: the oldest workflows of TRACES.",
            show_default=False,
        ),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Tell by workflow type whether agents, call graph, accuracy or coverage have left what models were promoted with.

    Exit code 3 when retraining is due for any workflow type, 0 when it is not.
    """
    from presage.cli.kinds import load
    from presage.cli.said import said
    from presage.serving_hooks.truth.promoted import promoted_by_type
    from presage.serving_hooks.truth.recorded import followed_of
    from presage.serving_hooks.truth.retrain_check import retrain_check as check

    out = Output(as_json)
    with out.working() as report:
        report("loading models", None)
        loaded = _by_kind([load(reference, lambda: options.open_registry(tracking_uri)) for reference in model])
        promoted = {}
        if promoted_on:
            table = _unseen(promoted_on, loaded, skip_bad, out, report)
            promoted = promoted_by_type(followed_of(table, said(loaded, table)))
        table = _unseen(traces, loaded, skip_bad, out, report)
        report("forecasting", None)
        forecasts = said(loaded, table)
        report("holding forecasts against what came", None)
        found = check(followed_of(table, forecasts), promoted, _known_types(loaded))
        data = {"models": {kind: one.called for kind, one in loaded.items()}, **found.to_dict()}
    out.result(data, *(_told(data) if not as_json else ()))
    if found.due:
        raise typer.Exit(DUE)


def _by_kind(loaded: list[Loaded]) -> dict[str, Loaded]:
    from presage.errors import ConfigurationError

    found: dict[str, Loaded] = {}
    for one in loaded:
        kind = one.kind.name
        if kind not in ("next-agent", "remaining-length") or kind in found:
            raise ConfigurationError(
                f"--model {one.source}: a {kind} predictor; give one of kind next-agent, one of kind "
                "remaining-length, or one of each"
            )
        if kind == "remaining-length" and one.predictor.target != "remaining":
            raise ConfigurationError(
                f"--model {one.source}: says how long a {one.predictor.target} is; one of what remains is wanted"
            )
        found[kind] = one
    return found


def _unseen(paths: list[Path], loaded: dict[str, Loaded], skip_bad: bool, out: Output, report: Report) -> pa.Table:
    """The traces, without the workflows that a model was trained on."""
    from presage.training.sets import held_out

    table = options.read(paths, skip_bad, out, report)
    table, left_out = held_out(table, *(one.predictor for one in loaded.values()))
    if left_out:
        out.note(f"{left_out} workflows left out: a model was trained on them")
    return table


def _known_types(loaded: dict[str, Loaded]) -> set[str]:
    """Workflow types that every model was trained on."""
    predictors = [(kind, one.predictor) for kind, one in loaded.items()]
    known = [p.vocabulary if kind == "next-agent" else p.encoder.vocabulary for kind, p in predictors]
    return set.intersection(*(set(of.workflow_types) for of in known))


def _told(data: dict[str, Any]) -> list[Any]:
    from presage.cli.tables import table

    rows = [
        [name, "DUE" if of["due"] else "not due", str(of["workflows"]), str(of["watched"]), _why(of)]
        for name, of in data["workflow_types"].items()
    ]
    head = ["workflow type", "retraining", "workflows", "held against figures", "why"]
    made = table(f"Retraining of {', '.join(data['models'].values())}", head, rows)
    made.columns[-1].justify = "left"
    return [made]


def _why(of: dict[str, Any]) -> str:
    if of["alarm"] is not None:
        return "; ".join(
            f"{reason['figure']} {reason['live']:.3f}, was {reason['promoted']:.3f} "
            f"[{reason['ci95'][0]:.3f}, {reason['ci95'][1]:.3f}]"
            for reason in of["alarm"]["reasons"]
        )
    if of["never_seen"]:
        return "no model has seen this workflow type"
    return "too few workflows to tell" if not of["watched"] else ""
