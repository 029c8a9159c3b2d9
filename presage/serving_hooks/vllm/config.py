"""What an operator says: `--additional-config '{"presage": {…}}'`, checked before the engine serves anything."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from presage.errors import ConfigurationError
from presage.serving_hooks.policies.eviction import EvictionConfig
from presage.serving_hooks.policies.lifecycle import TIME_TO_LIVE_S
from presage.serving_hooks.policies.prefetch import PrefetchConfig
from presage.serving_hooks.policies.priority import PriorityConfig
from presage.serving_hooks.policies.score import ScoreConfig


class PresageConfig(BaseModel):
    """Settings of the hooks; each has a default, so an empty object is a configuration.

    Numbers with a counterpart in the papers name it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    forecasts: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="package.module:function, called without arguments when the engine starts; returns Forecasts. "
        "Without it no workflow has a forecast",
    )
    priority: bool = Field(True, description="shortest total job first with ageing, in place of vLLM's waiting queues")
    eviction: bool = Field(
        True, description="the scored order of free blocks, in place of vLLM's; idle without prefix caching"
    )
    starved_after: int = Field(
        PriorityConfig.starved_after,
        ge=1,
        description="S, iterations without selection until a request goes up a level",
    )
    quantum: int = Field(
        PriorityConfig.quantum, ge=1, description="Q, iterations selected until a promoted request comes down a level"
    )
    horizon: int = Field(ScoreConfig.horizon, ge=1, le=64, description="K, steps a block's score looks ahead")
    gamma: float = Field(ScoreConfig.decay, gt=0, le=1, description="γ, what a touch one step later counts")
    tie: float = Field(
        EvictionConfig.tie, ge=0, le=1, description="scores closer than this are ordered by time to next use"
    )
    learn_sharing: bool = Field(
        EvictionConfig.learn_sharing, description="count which agents read what others wrote, and score by it"
    )
    time_to_live_s: float = Field(
        TIME_TO_LIVE_S,
        gt=0,
        allow_inf_nan=False,
        description="seconds without a request after which a workflow counts as ended",
    )

    prefetch: bool = Field(
        False, description="what is forecast is brought into idle blocks before it is asked for; needs eviction"
    )
    prefetch_least_value: float = Field(
        PrefetchConfig.least_value,
        gt=0,
        allow_inf_nan=False,
        description="a prompt less likely than this to come next is not fetched",
    )
    prefetch_most_blocks: int = Field(PrefetchConfig.most_blocks, ge=1, description="fetched in one iteration at most")
    prefetch_memory_mb: int = Field(64, ge=1, description="MiB of token ids and hashes kept of what agents were asked")

    def priority_settings(self) -> PriorityConfig:
        """S and Q."""
        return PriorityConfig(self.starved_after, self.quantum)

    def score_settings(self) -> ScoreConfig:
        """K and γ."""
        return ScoreConfig(self.horizon, self.gamma)

    def eviction_settings(self) -> EvictionConfig:
        """How scores become an order."""
        return EvictionConfig(self.tie, self.learn_sharing)

    def prefetch_settings(self) -> PrefetchConfig:
        """What is worth fetching."""
        return PrefetchConfig(self.prefetch_least_value, self.prefetch_most_blocks)


def read_config(additional: object) -> PresageConfig:
    """The settings of the hooks out of vLLM's `additional_config`.

    Args:
        additional: `vllm_config.additional_config`; what is not ours in it is left alone.

    Raises:
        ConfigurationError: a key nobody knows, or a value that is no good; names all of them at once.
    """
    given: Any = additional.get("presage", {}) if isinstance(additional, dict) else {}
    try:
        return PresageConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigurationError(f"additional_config: {'; '.join(map(_said, error.errors()))}") from None


def _said(problem: Any) -> str:
    where = ".".join(["presage", *map(str, problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return f"{where} is unknown; there are {', '.join(sorted(PresageConfig.model_fields))}"
    return f"{where} is {problem['input']!r:.60}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
