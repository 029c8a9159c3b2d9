"""Traces of plain requests for `presage replay`: read for what they hold, and what they do not hold is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.cli.output import Output, Report

if TYPE_CHECKING:
    from presage.serving_hooks.replay.policies import Policy
    from presage.serving_hooks.replay.workload import Convention, Workload


def are_requests(paths: Sequence[Path]) -> bool:
    """Whether the traces are plain requests and not steps of workflows.

    Raises:
        TraceError: some are and some are not.
    """
    from presage.datasets.requests import holds_requests
    from presage.errors import TraceError

    plain = [path for path in paths if path.exists() and holds_requests(path)]
    if plain and len(plain) < len(paths):
        raise TraceError(
            f"{plain[0]} holds plain requests and others of these traces steps of workflows: replay them one after the "
            "other"
        )
    return bool(plain)


def read(
    paths: Sequence[Path],
    convention: Convention,
    pause_s: float | None,
    forecasts: str,
    policies: Sequence[Policy],
    given: Mapping[str, object],
    out: Output,
    report: Report,
) -> Workload:
    """The requests as jobs; says what cannot be answered with them.

    Args:
        paths: of the traces.
        convention: prompts of workflows would be assembled by.
        pause_s: mean pause between steps; None where nothing was said.
        forecasts: reference as the user gave it.
        policies: that are compared.
        given: further options of workflows by name; None where nothing was said.
        out: told what cannot be answered.
        report: told what is being done.

    Raises:
        TraceError: a file is not as wanted.
        ConfigurationError: an option asks for what they do not have.
    """
    from presage.datasets.requests import HASH_TOKENS, read_requests
    from presage.errors import ConfigurationError
    from presage.serving_hooks.replay.forecasts import MARKOV, known
    from presage.serving_hooks.replay.requests import requests_workload

    for option, value in (
        ("--opening-tokens", convention.opening_tokens),
        ("--closing-tokens", convention.closing_tokens),
        ("--pause-s", pause_s),
        *given.items(),
    ):
        if value:
            raise ConfigurationError(f"{option} is of workflows, and these traces hold plain requests: leave it out")
    for policy in policies:
        if "transitions" in policy.foretellers:
            raise ConfigurationError(
                f"--policy {policy.name} learns from workflows, and these traces hold plain requests: leave it out"
            )
    if forecasts == MARKOV or not known(forecasts):
        raise ConfigurationError(
            f"--forecasts {forecasts}: it foretells workflows, and these traces hold plain requests: leave it out"
        )
    report("reading requests", None)
    found = requests_workload(read_requests(paths), HASH_TOKENS)
    shared = "" if hashed(found) else ", nor what prompts share, so nothing can be found again"
    out.note(
        "these traces hold plain requests: no workflows, so whatever a policy does for workflows is idle, and nothing "
        f"is foretold{shared}"
    )
    return found


def hashed(of: Workload) -> bool:
    """Whether it is known what prompts share."""
    return any(job.steps[0].hashed for job in of.jobs)


def told(of: Workload) -> dict[str, Any]:
    """What of the object of a replay is otherwise for plain requests."""
    return {"workflows": 0, "prompts": "hash-ids" if hashed(of) else "nothing-shared"}
