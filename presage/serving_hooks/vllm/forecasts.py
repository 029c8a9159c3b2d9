"""What the hooks want to be told of the future, and by whom: two protocols and where they come from.

`Forecaster` is a `NextAgents`. Any object with these methods is good, so a test can hand in an oracle, or noise.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from presage.errors import ConfigurationError
from presage.serving_hooks.forecaster import LiveForecast
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.metadata import Step


class NextAgents(Protocol):
    """Which agents come next in a workflow; see `Forecaster`."""

    def on_prefill(  # noqa: D102
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast: ...

    def on_completion(  # noqa: D102
        self, workflow_type: str, workflow_id: str, *, output_tokens: int | None = None
    ) -> LiveForecast: ...

    def close(self, workflow_type: str, workflow_id: str) -> None: ...  # noqa: D102


class RemainingTokens(Protocol):
    """How much work a workflow has left."""

    def remaining_tokens(self, step: Step, input_tokens: int) -> float | None:
        """Output tokens of this step and all later ones, when it arrives; None if nobody knows."""


@dataclass(frozen=True)
class Forecasts:
    """All that foretells.

    Attributes:
        next_agents: for eviction. remaining: for priority. medians: remaining output tokens at the start, the median
        of each workflow type; for requests without a forecast. models: what an operator is told of each source.
    """

    next_agents: NextAgents | None = None
    remaining: RemainingTokens | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


def load_forecasts(config: PresageConfig) -> Forecasts:
    """Who foretells: the function an operator has named, else the registry's models.

    Raises:
        ConfigurationError: there is no such function, or it returns something else.
    """
    name = config.forecasts
    if name is None:
        from presage.serving_hooks.vllm.registered import champions

        return champions(config)
    module, function = name.split(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"presage.forecasts is {name}, which cannot be loaded: {error}") from error
    if not isinstance(made, Forecasts):
        raise ConfigurationError(
            f"presage.forecasts is {name}, which returns a {type(made).__name__}; return Forecasts"
        )
    return made
