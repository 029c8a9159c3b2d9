"""The command `train-predictor`: one subcommand a kind of predictor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.boundary import Boundary
from presage.cli.output import Output, Report
from presage.cli.training import Job, Trained, carry_out

if TYPE_CHECKING:
    import pyarrow as pa

Test = Annotated[
    list[Path] | None,
    typer.Option(help="Traces to judge on; repeat for more. Without: a fifth of the tasks, later if times permit."),
]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; goes before the file.")
]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder for artefact, metrics.json and report.", show_default=False)
]
Register = Annotated[bool, typer.Option("--register/--no-register", help="Register the version with MLflow.")]

app = typer.Typer(
    cls=Boundary,
    name="train-predictor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def group() -> None:
    """Train a predictor on traces, compare it with baselines on held-out workflows, and register it."""


@app.command(
    "next-agent",
    epilog="Examples:\n\n"
    "train-predictor next-agent traces/\n\n"
    "train-predictor next-agent traces/ --test later/ --out runs/a --no-register\n\n"
    "train-predictor next-agent traces/ --report evidence/        # a page to read in two minutes\n\n"
    "train-predictor next-agent traces/ --set network.epochs=10 --set boosting.rounds=0\n\n"
    "A wrong --set names every key there is.",
)
def next_agent(
    traces: options.Traces,
    test: Test = None,
    config: ConfigFile = None,
    settings: Settings = None,
    horizon: Annotated[int, typer.Option(help="How many steps ahead.", min=1)] = 3,
    seed: options.Seed = 0,
    states: Annotated[
        str,
        typer.Option(help="Semantic states: captured (hidden states), text, none, or auto: the first there is."),
    ] = "auto",
    text_encoder: Annotated[
        str, typer.Option(help="For --states text: sketch (seconds), or a folder or hub name of a transformer.")
    ] = "sketch",
    baselines: Annotated[
        str,
        typer.Option(
            help="What to compare with, separated by commas: default (counting, trees, the published predictor), all "
            "(every family of the paper as well, minutes), none, or names; a wrong name lists them.",
            metavar="NAMES",
        ),
    ] = "default",
    out_folder: OutFolder = None,
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for the full report: adds the learning curve and the figures without states, which take "
            "further trainings.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "next-agent",
    register: Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the next-agent predictor, judge it beside every baseline, and register it."""
    from presage.cli.tables import accuracies
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
            from presage.training.evidence import further_evidence
            from presage.training.recipe import Recipe

            recipe = Recipe(configuration, horizon, seed, source, text_encoder)
            training.metrics.update(further_evidence(training, table, test_table, recipe, report))
        return training

    carry_out(
        Job(traces, test or [], skip_bad, out_folder, report_folder, name, register, tracking_uri),
        fit,
        Output(as_json),
        params={"seed": seed, "horizon": horizon},
        tags=lambda metrics: {"presage.states": str(metrics["data"]["states"])},
        tables=lambda metrics: list(accuracies(metrics, metrics["model"])),
    )


@app.command(
    "remaining-length",
    epilog="Examples:\n\n"
    "train-predictor remaining-length traces/\n\n"
    "train-predictor remaining-length traces/ --next-agent models:/next-agent@champion\n\n"
    "train-predictor remaining-length traces/ --target step --quantiles 0.5,0.99 --name step-length",
)
def remaining_length(
    traces: options.Traces,
    target: Annotated[
        str, typer.Option(help="remaining: output tokens of this and all later steps; step: of this step alone.")
    ] = "remaining",
    estimator: Annotated[
        str | None,
        typer.Option(
            help="forest, boosted, or auto: the one that loses less on the calibration part.", show_default=False
        ),
    ] = None,
    quantiles: Annotated[
        str | None,
        typer.Option(help="Which quantiles to predict, rising; 0.5,0.9,0.99 unless set.", show_default=False),
    ] = None,
    next_agent: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A next-agent model that says what it expects to follow each step: an artefact folder, "
            "models:/NAME@ALIAS or models:/NAME/VERSION. It becomes part of the predictor.",
            show_default=False,
        ),
    ] = None,
    test: Test = None,
    config: ConfigFile = None,
    settings: Settings = None,
    seed: options.Seed = 0,
    baselines: Annotated[
        str,
        typer.Option(
            help="What to compare with, separated by commas: default (all), none, or names; a wrong name lists them.",
            metavar="NAMES",
        ),
    ] = "default",
    out_folder: OutFolder = None,
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for the full report: with --next-agent adds the figures without it, which take a further "
            "training.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Model to register a version of.")] = "remaining-length",
    register: Register = True,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train the predictor of remaining output tokens, judge it beside every baseline, and register it."""
    from dataclasses import replace

    from presage.cli.remaining_length import RemainingLength, given_model, quantiles_of, target_of
    from presage.predictors.remaining_length import RemainingLengthConfig
    from presage.training.configuration import read_configuration
    from presage.training.lengths.train import LIMITS, choose_baselines, train_lengths

    own: dict[str, Any] = {"estimator": estimator} if estimator is not None else {}
    own |= {"quantiles": quantiles_of(quantiles)} if quantiles is not None else {}
    configuration = replace(read_configuration(RemainingLengthConfig, config, settings or (), LIMITS), **own)
    configuration.check()
    wanted, what = choose_baselines(baselines), target_of(target)
    given = given_model(next_agent, tracking_uri) if next_agent is not None else None

    def fit(table: pa.Table, test_table: pa.Table | None, report: Report) -> Trained:
        training = train_lengths(
            table,
            test_table,
            configuration,
            target=what,
            seed=seed,
            next_agent=given,
            baselines=wanted,
            name=name,
            progress=report,
        )
        if report_folder is not None:
            from presage.training.lengths.evidence import further_evidence

            training.metrics.update(further_evidence(training, table, test_table, configuration, seed, report))
        return training

    carry_out(
        Job(traces, test or [], skip_bad, out_folder, report_folder, name, register, tracking_uri),
        fit,
        Output(as_json),
        params={"seed": seed},
        tags=lambda metrics: {"presage.target": str(metrics["target"])},
        tables=lambda metrics: RemainingLength().tables(metrics, metrics["model"]),
    )


def main() -> None:
    """Entry point."""
    app()
