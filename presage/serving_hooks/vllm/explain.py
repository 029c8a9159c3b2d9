"""What is known of one workflow, what was decided about it, and why: numbers and names, nothing of a prompt.

Nothing is kept for it but a ring of the last forecasts, one for all workflows: a workflow that nobody asks about costs
nothing, and one that has ended can be explained until the ring has gone round. All else is read from the policies when
somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from presage.serving_hooks.forecasting.live import LiveForecast, LiveLengths
from presage.serving_hooks.workflows.identity import Step, unscoped

MOST_SHOWN: Final = 50
"""Forecasts of one workflow, the last ones."""
AGENTS_SHOWN: Final = 8
"""Of one forecast at each horizon, the likeliest."""


class Made(NamedTuple):
    """A forecast of a step, and when it was made, seconds."""

    at: float
    step: Step
    forecast: LiveForecast


class LastForecasts:
    """The last forecasts of all workflows.

    Args:
        most: how many.
        clock: seconds, rising.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._ring: deque[Made] = deque(maxlen=most)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, step: Step, forecast: LiveForecast) -> None:
        """A forecast was made."""
        self._ring.append(Made(self._clock(), step, forecast))

    def of(self, workflow: str) -> list[dict[str, Any]]:
        """Those of one workflow, the oldest first. Costs O(all)."""
        now = self._clock()
        return [_told(made, now) for made in self._ring if made.step.workflow == workflow][-MOST_SHOWN:]


def _told(made: Made, now: float) -> dict[str, Any]:
    forecast = made.forecast
    return {
        "ago_s": round(now - made.at, 3),
        "agent": made.step.agent,
        "step": made.step.number,
        "moment": forecast.moment,
        "source": forecast.source,
        "version": forecast.version,
        "evidence": forecast.evidence,
        "reason": forecast.reason,
        "horizons": [_row(row.tolist(), forecast.agents) for row in forecast.probabilities],
        "remaining": _lengths(forecast.remaining),
    }


def _row(row: list[float], agents: tuple[str, ...]) -> dict[str, Any]:
    likeliest = sorted(zip(row, agents, strict=False), reverse=True)[:AGENTS_SHOWN]
    return {"agents": {name: round(share, 4) for share, name in likeliest}, "end": round(row[-1], 4)}


def _lengths(of: LiveLengths) -> dict[str, Any]:
    return {
        "source": of.source,
        "version": of.version,
        "evidence": of.evidence,
        "reason": of.reason,
        "quantiles": {f"{q:g}": round(tokens, 1) for q, tokens in zip(of.quantiles, of.tokens, strict=True)},
    }


def reasons(told: dict[str, Any]) -> list[str]:
    """What is told, in sentences; the most telling first."""
    said = [f"{policy} is {mode} for this workflow type" for policy, mode in told["modes"].items() if mode != "on"]
    if not told["alive"]:
        return [*said, "it is not alive: it has ended, was silent for too long, or never came"]
    admission, blocks = told["admission"], told["blocks"]
    if admission is not None and admission["held"]:
        said.append(f"it is held: {admission['reason']}; for {admission['held_s']:.1f} s so far")
    elif admission is not None and admission["reason"]:
        said.append(f"it would be held ({admission['reason']}), and is not")
    for request in told["requests"]:
        if request["place"] is not None:
            said.append(f"a request of agent {request['agent']!r} waits, {request['place']} of {request['waiting']}")
    if not told["forecasts"]:
        said.append("nothing was forecast of it lately")
    elif told["forecasts"][-1]["source"] == "none":
        said.append(f"nobody could say what comes next: {told['forecasts'][-1]['reason']}")
    if blocks is not None and blocks["free"]:
        before = min(group["before"] for group in blocks["groups"] if group["before"] is not None)
        said.append(
            f"{blocks['free']} of its {blocks['blocks']} blocks are free; {before} others are given up before the first"
        )
    return said


def plain(workflow_type: str, workflow_id: str) -> dict[str, str]:
    """How its client calls a workflow."""
    return {"workflow_type": workflow_type, "workflow_id": unscoped(workflow_id)}
