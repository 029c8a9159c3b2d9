"""`train-predictor remaining-length`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.output import Output, Report
from presage.cli.training import Job, Trained, carry_out

if TYPE_CHECKING:
    import pyarrow as pa


def remaining_length(
    traces: options.Traces,
    target: Annotated[
        str, typer.Option(help="remaining: output tokens of this and all later steps; step: of this step alone.")
    ] = "remaining",
    estimator: Annotated[
        str | None,
        typer.Option(
            help="forest, boosted, ridge, or auto: the one that loses least on the calibration part.",
            show_default=False,
        ),
    ] = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Which quantiles to predict, rising; 0.5,0.9,0.99 unless set.", show_default=False),
    ] = None,
    states: Annotated[
        str,
        typer.Option(help="auto: prompts and answers are read where held-out tasks show that it helps; text; or none."),
    ] = "auto",
    test: options.Test = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    baselines: options.Baselines = "default",
    out_folder: options.OutFolder = None,
    report_folder: Annotated[
        Path | None, typer.Option("--report", help="Folder for metrics.json and report.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "remaining-length",
    register: options.Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the predictor of remaining output tokens, judge it beside every baseline, and register it."""
    from dataclasses import replace

    from presage.cli.remaining_length import RemainingLength, quantiles_of, target_of
    from presage.predictors.remaining_length import RemainingLengthConfig
    from presage.training.configuration import read_configuration
    from presage.training.lengths.texts import TEXTS
    from presage.training.lengths.train import LIMITS, choose_baselines, train_lengths

    own: dict[str, Any] = {"estimator": estimator} if estimator is not None else {}
    own |= {"quantiles": quantiles_of(quantiles)} if quantiles is not None else {}
    configuration = replace(read_configuration(RemainingLengthConfig, config, settings or (), LIMITS), **own)
    configuration.check()
    wanted, what, texts = choose_baselines(baselines), target_of(target), options.states(states, TEXTS)

    def fit(table: pa.Table, test_table: pa.Table | None, report: Report) -> Trained:
        return train_lengths(
            table,
            test_table,
            configuration,
            target=what,
            seed=seed,
            texts=texts,
            baselines=wanted,
            name=name,
            progress=report,
        )

    carry_out(
        Job(RemainingLength(), traces, test or [], skip_bad, out_folder, report_folder, name, register, tracking_uri),
        fit,
        Output(as_json),
        params={"seed": seed},
        tags=lambda metrics: {
            "presage.target": str(metrics["target"]),
            "presage.states": str(metrics["data"]["texts"]),
        },
    )
