"""The command `train-predictor`: one subcommand a kind of predictor."""

from __future__ import annotations

import typer

from presage.cli.boundary import Boundary
from presage.cli.train_lengths import remaining_length
from presage.cli.train_next_agent import next_agent
from presage.cli.train_router import router

app = typer.Typer(
    cls=Boundary,
    name="train-predictor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def group() -> None:
    """Train a predictor on traces, or a router on outcomes, compare with baselines on what is held out, register."""


app.command(
    "next-agent",
    epilog="Examples:\n\n"
    "train-predictor next-agent traces/\n\n"
    "train-predictor next-agent traces/ --test later/ --out runs/a --no-register\n\n"
    "train-predictor next-agent traces/ --report evidence/        # a page to read in two minutes\n\n"
    "train-predictor next-agent traces/ --set network.epochs=10 --set boosting.rounds=0\n\n"
    "A wrong --set names every key there is.",
)(next_agent)
app.command(
    "remaining-length",
    epilog="Examples:\n\n"
    "train-predictor remaining-length traces/\n\n"
    "train-predictor remaining-length traces/ --target step --quantiles 0.5,0.99 --name step-length",
)(remaining_length)
app.command(
    "router",
    epilog="Examples:\n\n"
    "train-predictor router outcomes.jsonl.gz\n\n"
    "train-predictor router outcomes/ --encoder answerdotai/ModernBERT-large --checkpoints run-1\n\n"
    "train-predictor router outcomes/ --encoder ./ModernBERT-base --checkpoints run-1 --resume\n\n"
    "train-predictor router newer/ --start-from models:/router@champion      # new models beside the old ones",
)(router)


def main() -> None:
    """Entry point."""
    app()
