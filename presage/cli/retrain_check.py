"""`presage retrain-check`: have workflows drifted from what the models were promoted on?

Also measures the reference figures that an engine compares live forecasts with; promotion keeps them in the run of the
version. They use names and token counts only: the hooks read no texts, and not every engine supplies hidden states.
Better forecasts, with states, raise no alarm. Only workflows that ended count: the figures of an aborted one depend on
where it stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.kinds import TRACES, Loaded, load
from presage.cli.output import REFUSED, Output, table
from presage.errors import ConfigurationError
from presage.registry.connect import open_existing

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.connect import Registry
    from presage.serving_hooks.monitoring.promoted import Promoted
    from presage.serving_hooks.monitoring.retrain_check import TraceForecasts

AT_LEAST: Final = 20
"""Fewest workflows of a type for reference figures."""

_NAMED: Final = 8


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
    from presage.serving_hooks.monitoring.promoted import promoted_by_type
    from presage.serving_hooks.monitoring.retrain_check import followed_of
    from presage.serving_hooks.monitoring.retrain_check import retrain_check as check

    out = Output(as_json)
    with out.working() as report:
        report("loading models", None)
        loaded = _by_kind([load(reference, lambda: open_existing(tracking_uri)) for reference in model])
        predictors = [one.predictor for one in loaded.values()]
        promoted = {}
        if promoted_on:
            table, _ = TRACES.unseen(promoted_on, predictors, skip_bad, out, report)
            promoted = promoted_by_type(followed_of(table, forecasts_of(loaded, table)))
        table, _ = TRACES.unseen(traces, predictors, skip_bad, out, report)
        report("forecasting", None)
        forecasts = forecasts_of(loaded, table)
        report("comparing forecasts with outcomes", None)
        found = check(followed_of(table, forecasts), promoted, _known_types(loaded))
        data = {"models": {kind: one.called for kind, one in loaded.items()}, **found}
    out.result(data, *(_render(data) if not as_json else ()))
    if found["due"]:
        raise typer.Exit(REFUSED)


def _by_kind(loaded: list[Loaded]) -> dict[str, Loaded]:
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
                f"--model {one.source}: its target is {one.predictor.target!r}; wanted the target 'remaining'"
            )
        found[kind] = one
    return found


def _known_types(loaded: dict[str, Loaded]) -> set[str]:
    """Workflow types that every model was trained on."""
    predictors = [(kind, one.predictor) for kind, one in loaded.items()]
    known = [p.vocabulary if kind == "next-agent" else p.encoder.vocabulary for kind, p in predictors]
    return set.intersection(*(set(of.workflow_types) for of in known))


def _render(data: dict[str, Any]) -> list[Any]:
    rows = [
        [name, "DUE" if of["due"] else "not due", str(of["workflows"]), str(of["watched"]), _why(of)]
        for name, of in data["workflow_types"].items()
    ]
    head = ["workflow type", "retraining", "workflows", "compared", "why"]
    return [table(f"Retraining check of {', '.join(data['models'].values())}", head, rows, left=(0, 4))]


def _why(of: dict[str, Any]) -> str:
    if of["alarm"] is not None:
        return "; ".join(
            f"{reason['figure']} {reason['live']:.3f}, was {reason['promoted']:.3f} "
            f"[{reason['ci95'][0]:.3f}, {reason['ci95'][1]:.3f}]"
            for reason in of["alarm"]["reasons"]
        )
    if of["never_seen"]:
        return "no model was trained on this workflow type"
    return "too few workflows" if not of["watched"] else ""


def promotion_figures(candidate: Loaded, table: pa.Table, out: Output, target: str) -> dict[str, Promoted] | None:
    """Reference figures by workflow type, with the inputs of a profile (a key of `TARGETS`): what is promised.

    The table has unseen traces in canonical order. None for a kind that is not monitored.
    """
    import pyarrow.compute as pc

    from presage.features.input_profiles import PROFILES, TARGETS, masked
    from presage.serving_hooks.monitoring.promoted import promoted_by_type
    from presage.serving_hooks.monitoring.retrain_check import followed_of

    kind = candidate.kind.name
    if kind not in ("next-agent", "remaining-length"):
        return None
    if kind == "remaining-length" and candidate.predictor.target != "remaining":
        return None
    supplied = masked(table, PROFILES[TARGETS[target]])
    ended = [of for of in followed_of(supplied, forecasts_of({kind: candidate}, supplied)) if of.ended]
    found = promoted_by_type(ended, AT_LEAST)
    if few := sorted(set(pc.unique(table["workflow_type"]).to_pylist()) - found.keys()):
        more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
        out.note(
            f"fewer than {AT_LEAST} ended workflows of {', '.join(map(repr, few[:_NAMED]))}{more}: an engine will "
            "compare these workflow types with their own first workflows"
        )
    return found


def keep_figures(registry: Registry, name: str, version: int, promoted: dict[str, Promoted]) -> None:
    """Attach the figures to the run of the version, in place of those of an earlier promotion; raises RegistryError."""
    from presage.registry.connect import attach
    from presage.serving_hooks.monitoring.promoted import PROMOTED_FILE, PROMOTED_FOLDER, promoted_json

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / PROMOTED_FILE
        file.write_text(promoted_json(promoted), encoding="utf-8")
        attach(registry, name, version, [file], PROMOTED_FOLDER)


def forecasts_of(loaded: Mapping[str, Loaded], table: pa.Table) -> TraceForecasts:
    """Forecast every row of a table of served steps with the predictors by kind: one or both."""
    from dataclasses import replace

    from presage.features.lengths import length_rows
    from presage.features.prefixes import prefixes_of
    from presage.serving_hooks.monitoring.retrain_check import TraceForecasts

    found = TraceForecasts()
    if "next-agent" in loaded:
        of = loaded["next-agent"]
        predictor = of.predictor
        prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon)
        both = predictor.predict_both(prefixes.with_states(predictor.source.states(table)))
        found = replace(found, agents=predictor.vocabulary.agents, probabilities=both, version=of.version)
    if "remaining-length" in loaded:
        of = loaded["remaining-length"]
        predictor = of.predictor
        tokens = predictor.predict(length_rows(table, predictor.encoder))
        found = replace(found, quantiles=predictor.quantiles, tokens=tokens, lengths_version=of.version)
    return found
