"""Joins prefetch to a scheduler with Presage's policies: the calls of vLLM that it hears beside a listener's events."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from presage.serving_hooks.modes import Mode, Switch
from presage.serving_hooks.status import EngineStatus
from presage.serving_hooks.vllm.config import PresageConfig, read_config
from presage.serving_hooks.vllm.engine import EngineRequest
from presage.serving_hooks.vllm.prefetch.prefetcher import Prefetcher
from presage.serving_hooks.vllm.scheduler import Policies
from presage.serving_hooks.workflows.identity import Step

logger = logging.getLogger(__name__)


class Prefetching(Policies):
    """Goes before a class with the policies.

    Attributes:
        prefetcher: None where prefetch is not possible.
    """

    prefetcher: Prefetcher | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = read_config(self.engine_port.config.additional)
        self.prefetcher = prefetcher = self._make_prefetcher(config)
        if prefetcher is not None:
            self._listeners.add(prefetcher, first=True)  # a prompt is kept before its completion is forecast
            self._parts.add(prefetcher.switch, self._forget_prompts)
            self._apply_modes()

    def _make_prefetcher(self, config: PresageConfig) -> Prefetcher | None:
        order = self.block_order
        if order is None:
            return None
        reason = self.engine_port.why_no_prefetch()
        if reason is not None:
            logger.warning("prefetch is off on this engine: %s", reason)
            return None
        switch = Switch("prefetch", self._counts, retry=order.switch.retry)
        order.switch.takes = (*order.switch.takes, switch)
        return Prefetcher(
            self.engine_port,
            self.add_behind_all,
            order,
            config.prefetch_settings(),
            config.prefetch_memory_mb * 2**20,
            switch,
            type(self).clock,
            self._modes,
            self.step_forecasts.returning if config.eviction_rule == "next-use" else None,
        )

    def _forget_prompts(self) -> bool:
        if self.prefetcher is not None:
            self.prefetcher.drop()
            self.prefetcher.begin()
        return True

    # What vLLM calls.

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Processes the output of an iteration, then removes prefetches from the answers."""
        answers = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        if self.prefetcher is not None:
            self.prefetcher.done(scheduler_output, answers)
        return answers

    def has_requests(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the engine has anything to do, or to prefetch."""
        return bool(super().has_requests(*args, **kwargs)) or bool(self._presage.attempt(self._wants))  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Aborts prefetches, whose blocks would prevent the reset, then calls vLLM's own."""
        if self.prefetcher is not None:
            self.prefetcher.drop()
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, without prefetches."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if self.prefetcher is not None:
            self._presage.attempt(self.prefetcher.hide_from_stats, stats)
        return stats

    def may_fast_forward(self) -> bool:
        """Whether a replay may skip iterations that only decode: prefetches start in them."""
        return self.prefetcher is None and bool(super().may_fast_forward())  # type: ignore[misc]

    # What the hooks call.

    def _before_iteration(self) -> float | None:
        began_at = super()._before_iteration()
        if began_at is not None and self.prefetcher is not None:
            self.prefetcher.before()
        return began_at

    def _wants(self) -> bool:
        if self.prefetcher is None:
            return False
        self._bookkeeping.attempt(self.step_forecasts.flush)  # an idle engine has no iterations
        return self.prefetcher.wants()

    def _is_own(self, request_id: str) -> bool:
        return self.prefetcher is not None and self.prefetcher.fetches(request_id)

    def _step_of(self, request_id: str) -> Step | None:
        step = super()._step_of(request_id)
        return self.prefetcher.step(request_id) if step is None and self.prefetcher is not None else step

    def _leaves(self, request: EngineRequest) -> None:
        if self.prefetcher is not None:
            self.prefetcher.left(request.request_id)
        super()._leaves(request)

    def _withdraw(self) -> None:
        if self.prefetcher is not None and not self._withdrawn:
            self.prefetcher.drop()
        super()._withdraw()

    def _apply_to_blocks(self, mode: Mode) -> None:
        if mode is Mode.OFF:
            self._forget_prompts()
        super()._apply_to_blocks(mode)
        if self.prefetcher is not None and mode is not Mode.OFF:
            self.step_forecasts.retention = self.prefetcher

    # Status.

    def engine_status(self) -> EngineStatus:
        """As without, with that of prefetch."""
        status = super().engine_status()
        return status if self.prefetcher is None else replace(status, prefetch=self.prefetcher.status())

    def debug_state(self) -> dict[str, int]:
        """As without, with its own tables."""
        return super().debug_state() | (self.prefetcher.debug_state() if self.prefetcher is not None else {})
