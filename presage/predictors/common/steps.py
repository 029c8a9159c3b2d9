"""Validation of the steps passed to `forecast`: mappings keyed by column names of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, Final, Literal

import numpy as np

from presage.errors import InputError
from presage.features.lengths import count_of
from presage.features.served_steps import TOOLS_CALLED, running_steps

_SIGNS_OF_OUTPUT: Final = ("output_tokens", "output_text", "completion_state", "ended_at")


def check_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The LLM steps among steps of a running workflow.

    Raises InputError if there are none, a step does not name its agent, or not all belong to one workflow.
    """
    if not steps:
        raise InputError("no steps; a forecast needs at least the current step")
    for index, step in enumerate(steps):
        for name in ("workflow_type", "agent"):
            if not isinstance(step.get(name), str) or not step[name]:
                raise InputError(f'step {index}: "{name}" is {step.get(name)!r}; expected a name')
        if step["workflow_type"] != steps[0]["workflow_type"] or step.get("workflow_id") != steps[0].get("workflow_id"):
            raise InputError(f"step {index} belongs to another workflow; a forecast takes the steps of one workflow")
    return running_steps(steps)


def has_output(step: Mapping[str, Any]) -> bool:
    """Whether the step has any output, or calls a tool."""
    return bool(step.get(TOOLS_CALLED)) or any(step.get(name) is not None for name in _SIGNS_OF_OUTPUT)


def log_tokens(step: Mapping[str, Any], side: Literal["input", "output"]) -> float:
    """log(1 + x) of the input or output tokens, 0 if unknown; raises InputError for an invalid count."""
    tokens = count_of(step, f"{side}_tokens")
    return 0.0 if isnan(tokens) else float(np.log1p(np.float32(tokens)))
