"""The command `train-predictor`: one subcommand for each kind of predictor."""

from __future__ import annotations

import typer

from presage.cli.kinds import command_of
from presage.cli.output import HELP, Boundary
from presage.predictor_kinds import KINDS

app = typer.Typer(
    cls=Boundary,
    name="train-predictor",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
)


@app.callback()
def group() -> None:
    """Train a predictor on traces or a router on outcomes, compare it with baselines on held-out data, register it."""


for kind in KINDS.values():
    command = command_of(kind)
    app.command(kind.name, epilog=f"Examples:\n\n{command.examples}")(command.train)


def main() -> None:
    """Entry point."""
    app()
