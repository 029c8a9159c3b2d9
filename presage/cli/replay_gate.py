"""The options of `presage promote --replay`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from presage.errors import ConfigurationError
from presage.replay.promotion_gate import CONCURRENCY, SEEDS, ReplayGate

_option = partial(typer.Option, rich_help_panel="The replay")

Asked = Annotated[
    bool, typer.Option("--replay", help="Replay the traces and gate on hit rate and completion time; needs vLLM.")
]
Engine = Annotated[str | None, _option(help="TOML file of an engine, or a built-in name.")]
Fleet = Annotated[
    Path | None,
    _option(help="TOML file of several engines: gates a remaining-length version by what routing gains."),
]
CacheTokens = Annotated[int | None, _option(help="Cache size in tokens; overrides the file.")]
Concurrency = Annotated[int | None, _option(help=f"Number of concurrent workflows. Default: {CONCURRENCY}.")]
Rate = Annotated[float | None, _option(help="Mean arrivals of workflows per second.")]
Prompts = Annotated[str | None, _option(help="As of `presage replay`.")]
OpeningTokens = Annotated[int | None, _option(help="As of `presage replay`.")]
ClosingTokens = Annotated[int | None, _option(help="As of `presage replay`.")]
PauseS = Annotated[float | None, _option(help="Mean of random pauses between steps, instead of recorded pauses.")]
Seeds = Annotated[
    int | None,
    _option(min=3, help=f"Runs of each version, each on a random half of the workflows. Default: {SEEDS}."),
]
Processes = Annotated[int | None, _option(min=1, help="Parallel runs. Default: one per core.")]


def asked_for(replay: bool, options: Mapping[str, Any]) -> ReplayGate | None:
    """The gate, if --replay is given; `options` are all of the command by name, None if not given.

    Raises ConfigurationError for a bad option or one without --replay, and EngineError if vLLM is not installed.
    """
    own = inspect.signature(ReplayGate).parameters
    given = {name: value for name, value in options.items() if name in own and value is not None}
    if replay:
        return ReplayGate(**given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise ConfigurationError(f"--{option} configures the replay: add --replay")
    return None
