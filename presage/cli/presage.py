"""The command `presage`: the parser of all subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from presage.cli import (
    agents,
    batch,
    calibrate_cost,
    compare,
    demo,
    explain,
    export,
    forecast,
    gateway,
    mode,
    models,
    outcomes,
    profile,
    replay,
    report,
    retrain_check,
    serve,
    status,
    study,
    tools,
    traces,
)
from presage.cli.output import HELP, Boundary
from presage.version import __version__

app = typer.Typer(
    cls=Boundary,
    name="presage",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    epilog="First steps:\n\n"
    "presage demo\n\n"
    "presage traces ingest runs/*.jsonl --to traces/\n\n"
    "train-predictor next-agent traces/\n\n"
    "presage forecast models:/next-agent/1 steps.jsonl",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"presage {__version__}")
        raise typer.Exit


@app.callback()
def presage(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Forecast what a running agent workflow will do next, and which model solves a prompt."""


app.add_typer(traces.app, name="traces")
app.add_typer(agents.app, name="agents")
app.add_typer(outcomes.app, name="outcomes")
app.add_typer(profile.app, name="profile")
app.add_typer(study.app, name="study")
app.add_typer(tools.app, name="tools")
app.add_typer(batch.app, name="batch")
app.add_typer(report.app, name="report")
app.add_typer(export.app, name="export")
app.command(
    epilog="Example:  presage evaluate models:/next-agent@champion held-out/ --json",
)(forecast.evaluate)
app.command(
    epilog="Example:  cat steps.jsonl | presage forecast models:/next-agent@champion -\n\n"
    "The forecast is made after the last step's output if the step has one, else before it.",
)(forecast.forecast)
app.command(
    epilog='Example:  presage route models:/router@champion "Prove that ..." --costs costs.toml --min-quality 0.8',
)(forecast.route)
app.command(epilog="Example:  presage replay traces/ --policy stock,oracle --concurrency 32 --cache-tokens 64000")(
    replay.replay
)
app.command(epilog="Example:  presage calibrate-cost steps.jsonl --to engine.toml")(calibrate_cost.calibrate_cost)
app.command(
    epilog="Needs the extra train. The last stage needs vLLM:\n\n"
    "presage demo --replay-with /path/to/environment/bin/presage",
)(demo.demo)
app.command(epilog="Example:  presage models --json")(models.models)
app.command(
    epilog="Examples:\n\npresage compare 1 2\n\npresage compare models:/next-agent@champion model/ --json",
)(compare.compare)
app.command(epilog="Example:  presage register model/ --name next-agent")(models.register)
app.command(epilog="Example:  presage promote next-agent --version 3 --traces held-out/ --dry-run")(models.promote)
app.command(epilog="Example:  presage rollback next-agent")(models.rollback)
app.command(
    epilog="Example:  presage retrain-check traces/ --model models:/next-agent@champion --promoted-on held-out/"
)(retrain_check.retrain_check)
app.command(
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True},
    epilog="Example:  presage serve Qwen/Qwen3-8B --max-model-len 8192 --additional-config.presage.mode shadow\n\n"
    "docs/serving.md describes what clients send and how to check the result.",
)(serve.serve)
app.command(
    epilog="Examples:\n\npresage gateway --upstream http://127.0.0.1:8000\n\n"
    "presage gateway --config gateway.toml\n\n"
    "Clients then use http://127.0.0.1:8100/v1 as their base URL.",
)(gateway.gateway)
app.command(epilog="Example:  presage status http://localhost:8000 --watch 2")(status.status)
app.command(epilog="Example:  presage mode http://localhost:8000 shadow --policy eviction")(mode.mode)
app.command(epilog="Example:  presage explain http://localhost:8000 r1 --picture r1.svg")(explain.explain)
app.command(epilog="Example:  presage vllm-check --registry sqlite:///mlflow.db --json")(serve.vllm_check)


def main() -> None:
    """Entry point."""
    app()
