"""The scheduler that a policy is: vLLM's own, or the hooks before it, with a source of forecasts and a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.stretches import StretchScheduler
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import Policies


class HookedScheduler(Policies, StretchScheduler):
    """The hooks before the quick scheduler."""


def scheduler_class(policy: Policy, foretells: Any, clock: Callable[[], float], quick: bool = True) -> type[Any]:
    """A class to be made a scheduler of.

    Args:
        policy: that it is.
        foretells: source of forecasts; None for none.
        clock: seconds of the virtual time.
        quick: whether stretches that only decode are done in short.
    """
    if policy.settings is None:
        return type("StockScheduler", (StretchScheduler,), {"quick": quick})

    def forecasts(self: Any, config: PresageConfig) -> Forecasts:
        return Forecasts() if foretells is None else Forecasts(foretells, foretells)

    return type("Replayed", (HookedScheduler,), {"quick": quick, "clock": staticmethod(clock), "forecasts": forecasts})
