"""The scheduler that a policy is: vLLM's own, or the hooks before it, with a source of forecasts and a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from presage.serving_hooks.replay.forecasts import Unread
from presage.serving_hooks.replay.foresight import ForeseenBlocks, Foresight
from presage.serving_hooks.replay.policies import Policy
from presage.serving_hooks.replay.stretches import StretchScheduler
from presage.serving_hooks.vllm.config import PresageConfig
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.scheduler import Policies


class HookedScheduler(Policies, StretchScheduler):
    """The hooks before the quick scheduler."""

    def may_leap(self) -> bool:
        """Only an order of free blocks has nothing to do in an iteration in which requests only decode."""
        return self._priorities is None and self._admission_controller is None and self._prefetch is None

    def leaps(self) -> None:
        """What is left of an iteration then: workflows may have fallen silent, and forecasts that the one before has
        brought are told to whoever keeps blocks."""
        self._bookkeeping.attempt(self._workflows.expire)
        self._bookkeeping.attempt(self._step_forecasts.flush)


class ForeseeingScheduler(HookedScheduler):
    """Belady's rule in the place of the scored order."""

    foresight: ClassVar[Foresight]

    def _hook_blocks(self, config: PresageConfig) -> Any:
        foreseen = ForeseenBlocks(self._port.free_queue, self._port.blocks, type(self).foresight)
        self._port.hook_blocks(foreseen, foreseen)
        return foreseen


def scheduler_class(
    policy: Policy,
    foretells: Any,
    clock: Callable[[], float],
    quick: bool = True,
    *,
    ranks: Any = None,
    foresight: Foresight | None = None,
) -> type[Any]:
    """A class to be made a scheduler of.

    Args:
        policy: that it is.
        foretells: source of forecasts; None for none.
        clock: seconds of the virtual time.
        quick: whether stretches that only decode are done in short.
        ranks: who says how much work is left; None for whoever `foretells`.
        foresight: for Belady's rule.
    """
    if policy.settings is None:
        return type("StockScheduler", (StretchScheduler,), {"quick": quick})

    def forecasts(self: Any, config: PresageConfig) -> Forecasts:
        if ranks is None:
            return Forecasts(foretells, foretells)
        return Forecasts(Unread(ranks) if foretells is None and hasattr(ranks, "close") else foretells, ranks)

    base: type[Any] = ForeseeingScheduler if policy.foresight else HookedScheduler
    if policy.scheduler is not None:
        base = policy.scheduler(base)
    own = {"quick": quick, "clock": staticmethod(clock), "forecasts": forecasts, "foresight": foresight}
    return type("Replayed", (base,), own)
