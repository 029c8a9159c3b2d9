"""`presage retrain-check`: have workflows drifted from what the models were promoted on?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.kinds import unseen
from presage.cli.output import REFUSED, Output, table
from presage.errors import ConfigurationError
from presage.predictor_kinds import KINDS
from presage.registry.connect import open_existing

if TYPE_CHECKING:
    from presage.kinds.loaded import Loaded


def retrain_check(
    traces: options.Traces,
    model: Annotated[
        list[str],
        typer.Option(
            help="models:/NAME@ALIAS, models:/NAME/VERSION, or a folder: a next-agent model, a length model, or both."
        ),
    ],
    promoted_on: Annotated[
        list[Path] | None,
        typer.Option(
            help="Held-out traces of the promotion; repeat for more. Default: the oldest workflows of TRACES."
        ),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Check by workflow type whether agents, call graph, accuracy or coverage have drifted since the promotion.

    Exit code 3 if retraining is due for any workflow type, else 0.
    """
    from presage.kinds.loaded import load
    from presage.kinds.reference_figures import forecasts_of
    from presage.serving_hooks.monitoring.promoted import promoted_by_type
    from presage.serving_hooks.monitoring.retrain_check import followed_of
    from presage.serving_hooks.monitoring.retrain_check import retrain_check as check

    out = Output(as_json)
    with out.working() as report:
        report("loading models", None)
        loaded = _by_kind([load(reference, lambda: open_existing(tracking_uri)) for reference in model])
        predictors = [trained.predictor for trained in loaded.values()]
        of_steps = KINDS["next-agent"]  # both kinds read traces
        promoted = {}
        if promoted_on:
            table, _ = unseen(of_steps, promoted_on, predictors, skip_bad, out, report)
            promoted = promoted_by_type(followed_of(table, forecasts_of(loaded, table)))
        table, _ = unseen(of_steps, traces, predictors, skip_bad, out, report)
        report("forecasting", None)
        forecasts = forecasts_of(loaded, table)
        report("comparing forecasts with outcomes", None)
        checked = check(followed_of(table, forecasts), promoted, _known_types(loaded))
        data = {"models": {kind: trained.called for kind, trained in loaded.items()}, **checked}
    out.result(data, *(_render(data) if not as_json else ()))
    if checked["due"]:
        raise typer.Exit(REFUSED)


def _by_kind(loaded: list[Loaded]) -> dict[str, Loaded]:
    by_kind: dict[str, Loaded] = {}
    for trained in loaded:
        kind = trained.kind.name
        if kind not in ("next-agent", "remaining-length") or kind in by_kind:
            raise ConfigurationError(
                f"--model {trained.source}: a {kind} predictor; give one of kind next-agent, one of kind "
                "remaining-length, or one of each"
            )
        if kind == "remaining-length" and trained.predictor.target != "remaining":
            raise ConfigurationError(
                f"--model {trained.source}: its target is {trained.predictor.target!r}; wanted the target 'remaining'"
            )
        by_kind[kind] = trained
    return by_kind


def _known_types(loaded: dict[str, Loaded]) -> set[str]:
    """Workflow types that every model was trained on."""
    predictors = [(kind, trained.predictor) for kind, trained in loaded.items()]
    vocabularies = [p.vocabulary if kind == "next-agent" else p.encoder.vocabulary for kind, p in predictors]
    return set.intersection(*(set(vocabulary.workflow_types) for vocabulary in vocabularies))


def _render(data: dict[str, Any]) -> list[Any]:
    rows = [
        [
            name,
            "DUE" if checked["due"] else "not due",
            str(checked["workflows"]),
            str(checked["watched"]),
            _why(checked),
        ]
        for name, checked in data["workflow_types"].items()
    ]
    head = ["workflow type", "retraining", "workflows", "compared", "why"]
    return [table(f"Retraining check of {', '.join(data['models'].values())}", head, rows, left=(0, 4))]


def _why(checked: dict[str, Any]) -> str:
    if checked["alarm"] is not None:
        return "; ".join(
            f"{reason['figure']} {reason['live']:.3f}, was {reason['promoted']:.3f} "
            f"[{reason['ci95'][0]:.3f}, {reason['ci95'][1]:.3f}]"
            for reason in checked["alarm"]["reasons"]
        )
    if checked["never_seen"]:
        return "no model was trained on this workflow type"
    return "too few workflows" if not checked["watched"] else ""
