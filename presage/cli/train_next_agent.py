"""`train-predictor next-agent`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli import options
from presage.cli.output import Output, Report
from presage.cli.training import Job, Trained, carry_out

if TYPE_CHECKING:
    import pyarrow as pa


def next_agent(
    traces: options.Traces,
    test: options.Test = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    horizon: Annotated[int, typer.Option(help="How many steps ahead.", min=1)] = 3,
    seed: options.Seed = 0,
    states: Annotated[
        str,
        typer.Option(
            help="Semantic states: captured (hidden states), text, none, or auto: the one that forecasts best on "
            "validation tasks, the simplest where they are level."
        ),
    ] = "auto",
    text_encoder: Annotated[
        str, typer.Option(help="For --states text: sketch (seconds), or a folder or hub name of a transformer.")
    ] = "sketch",
    baselines: Annotated[
        str,
        typer.Option(
            help="What to compare with, separated by commas: default (counting, trees, the published predictor), "
            "none, names (a wrong one lists them), or module:name for a baseline of your own.",
            metavar="NAMES",
        ),
    ] = "default",
    out_folder: options.OutFolder = None,
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for the full report: adds the learning curve and an ablation of the parts, which take "
            "further trainings.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "next-agent",
    register: options.Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the next-agent predictor, judge it beside every baseline, and register it."""
    from presage.cli.next_agent import NextAgent
    from presage.predictors.parts import NextAgentConfig
    from presage.training.baselines import choose
    from presage.training.configuration import read_configuration
    from presage.training.next_agent import LIMITS, train

    configuration = read_configuration(NextAgentConfig, config, settings or (), LIMITS)
    wanted, source = choose(baselines), options.states(states)

    def fit(table: pa.Table, test_table: pa.Table | None, report: Report) -> Trained:
        training = train(
            table,
            test_table,
            configuration,
            horizon=horizon,
            seed=seed,
            states=source,
            text_encoder=text_encoder,
            baselines=wanted,
            name=name,
            progress=report,
        )
        if report_folder is not None:
            from presage.training.learning_curve import Recipe
            from presage.training.study import further_evidence

            recipe = Recipe(configuration, horizon, seed, source, text_encoder)
            training.metrics.update(further_evidence(training, table, test_table, recipe, report))
        return training

    carry_out(
        Job(NextAgent(), traces, test or [], skip_bad, out_folder, report_folder, name, register, tracking_uri),
        fit,
        Output(as_json),
        params={"seed": seed, "horizon": horizon},
        tags=lambda metrics: {"presage.states": str(metrics["data"]["states"])},
    )
