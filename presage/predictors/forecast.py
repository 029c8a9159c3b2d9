"""What a request for a forecast brings, the steps of one workflow so far, and what the predictors say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Final, Literal

import numpy as np

from presage.errors import InputError
from presage.features.lengths import count_of
from presage.features.moment import Moment

Source = Literal["champion", "back-off", "none"]


@dataclass(frozen=True)
class Forecast:
    """The next K steps of a workflow.

    Attributes:
        source: `champion` when the whole model answered; `back-off` when it had seen too little of this agent in this
            workflow type: then the network is left out, and of a type hardly seen the n-gram answers alone; `none`
            when there is nothing to say.
        evidence: training steps of this agent in this workflow type.
        moment: of the last step.
        agents: for each horizon, every known agent's probability of being the one called, given that the workflow
            has not finished before.
        end: for each horizon, the probability that the workflow finishes there, likewise.
    """

    source: Source
    evidence: int
    moment: Moment
    agents: Sequence[dict[str, float]]
    end: Sequence[float]

    def to_dict(self) -> dict[str, Any]:
        """As `presage forecast --json` prints it."""
        return {
            "source": self.source,
            "evidence": self.evidence,
            "moment": self.moment,
            "horizons": [{"agents": a, "end": e} for a, e in zip(self.agents, self.end, strict=True)],
        }


_SIGNS_OF_OUTPUT: Final = ("output_tokens", "output_text", "completion_state", "ended_at")


def check_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError unless there are steps, each names its agent, and all belong to one workflow."""
    if not steps:
        raise InputError("no steps came; a forecast needs at least the step that is running now")
    for index, step in enumerate(steps):
        for name in ("workflow_type", "agent"):
            if not isinstance(step.get(name), str) or not step[name]:
                raise InputError(f'step {index}: "{name}" is {step.get(name)!r}; wanted a name')
        if step["workflow_type"] != steps[0]["workflow_type"] or step.get("workflow_id") != steps[0].get("workflow_id"):
            raise InputError(f"step {index} belongs to another workflow; a forecast takes the steps of one")


def has_output(step: Mapping[str, Any]) -> bool:
    """Whether anything shows that the step has produced its output."""
    return any(step.get(name) is not None for name in _SIGNS_OF_OUTPUT)


def log_tokens(step: Mapping[str, Any], side: Literal["input", "output"]) -> float:
    """log(1 + x) of a side's token count, 0 where unknown: as `Prefixes.sizes`.

    Raises:
        InputError: a negative or no number of tokens, whose logarithm would spoil every number after it.
    """
    tokens = count_of(step, f"{side}_tokens")
    return 0.0 if isnan(tokens) else float(np.log1p(np.float32(tokens)))
