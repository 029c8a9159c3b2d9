"""Small predictors that read texts, fitted once in a process, and workflows with texts."""

from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import pyarrow as pa

from presage.datasets.synthetic.workflows import generate
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.predictors.quantiles.choice import QuantileConfig

Steps = list[dict[str, Any]]
OUTPUTS = ("output_tokens", "output_text", "finish_reason", "ended_at")


@cache
def text_predictor() -> NextAgentPredictor:
    """Fitted on texts alone; their source is a sketch."""
    from presage.training.next_agent.train import fit_predictor

    config = NextAgentConfig(network=NetworkConfig(epochs=2), boosting=BoostingConfig(rounds=2))
    return fit_predictor(generate("retry", 60, 0, state_size=16).table, config, states="text").predictor


@cache
def text_lengths() -> RemainingLengthPredictor:
    """Predictor of remaining lengths that reads user prompts, answers, and the sizes of system prompts."""
    from presage.training.length.train import fit_lengths

    return fit_lengths(prompted_table(60, 0), QuantileConfig(estimator="ridge", refit=False), texts="text").predictor


def prompted_table(number: int, seed: int, prompt: Callable[[str], str] = "You are {}.".format) -> pa.Table:
    """Workflows of law "retry" in which each agent has a system prompt."""
    table = generate("retry", number, seed, state_size=16).table
    system = pa.array([prompt(agent) for agent in table["agent"].to_pylist()], table["system_prompt"].type)
    return table.set_column(table.column_names.index("system_prompt"), "system_prompt", system)


def text_workflows(number: int = 4) -> list[Steps]:
    """Held-out workflows of the same process, in order of their steps."""
    table = prompted_table(number, 1)
    rows = table.drop_columns(["prefill_state", "completion_state"]).to_pylist()
    return [list(steps) for _, steps in groupby(rows, lambda row: row["workflow_id"])]


def so_far(steps: Steps, index: int, output: bool) -> Steps:
    """The steps up to one that has its output, or has not yet."""
    latest = steps[index]
    if not output:
        latest = {name: value for name, value in latest.items() if name not in OUTPUTS}
    return [*steps[:index], latest]
