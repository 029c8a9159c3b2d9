"""A scheduler's policies go as far as the modes say: what that means for each, when it changes while requests wait.

Off, a policy's own tables are dropped and vLLM's queues stand where ours stood; it begins anew from what it finds when
it is on again. Between shadow and on nothing is lost. What concerns only some workflow types holds for a workflow from
its next event on.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from presage.serving_hooks.forecasting.names import scoped, tenant_of
from presage.serving_hooks.vllm import compat
from presage.serving_hooks.vllm.admission import Gate
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.evidence import Evidence
from presage.serving_hooks.vllm.explain import plain, reasons
from presage.serving_hooks.vllm.metadata import Step, workflow_key
from presage.serving_hooks.vllm.modes import POLICIES, Mode, Modes
from presage.serving_hooks.vllm.prefetch import Prefetcher
from presage.serving_hooks.vllm.priorities import Priorities
from presage.serving_hooks.vllm.shadow_order import ShadowOrder
from presage.serving_hooks.vllm.switch import Switch
from presage.serving_hooks.vllm.workflows import Workflows

logger = logging.getLogger(__name__)


class GoesAsFar:
    """Of `Policies`, which has the rest."""

    _modes: Modes
    _modes_applied: int
    _evidence: Evidence | None
    _workflows: Workflows
    _bookkeeping: Switch
    _iteration: int
    _ranking: Switch | None
    _admission: Switch | None
    _priorities: Priorities | None
    _shadow: ShadowOrder | None
    _gate: Gate | None
    _scored: ScoredBlocks | None
    _prefetch: Prefetcher | None

    def set_mode(self, mode: str, policy: str | None, workflow_type: str | None) -> dict[str, Any]:
        """How far policies go from the next iteration on; what holds then.

        Raises:
            ConfigurationError: there is no such mode or policy.
        """
        self._modes.say(mode, policy, workflow_type)
        types = "all workflow types" if workflow_type is None else "one workflow type"
        logger.warning("mode %s of %s, %s", mode, policy or "all policies", types)
        return self.modes()

    def modes(self) -> dict[str, Any]:
        """How far policies go, what those in shadow would have done, and what forecasts have shown."""
        would = {
            "priority": self._shadow.counts if self._shadow is not None else {},
            "eviction": self._scored.watched if self._scored is not None else {},
        }
        return {
            **self._modes.status(),
            "would": {policy: dict(counts) for policy, counts in would.items()},
            "evidence": self._evidence.status() if self._evidence is not None else None,
        }

    def explain(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        """What is known of a workflow, what was decided about it, and why; see explain.py."""
        workflow, last = workflow_key(workflow_type, workflow_id), self._workflows.last
        learnt_as = scoped(tenant_of(workflow_id), workflow_type)
        told = {
            **plain(workflow_type, workflow_id),
            "alive": workflow in self._workflows,
            "modes": {policy: self._modes.of(policy, learnt_as).word for policy in POLICIES},
            "forecasts": last.of(workflow) if last is not None else [],
            "requests": [self._explain(name, step) for name, step in self._workflows.requests_of(workflow).items()],
            "admission": self._gate.explain(workflow) if self._gate is not None else None,
            "blocks": self._scored.explain(workflow) if self._scored is not None else None,
        }
        return {**told, "reasons": reasons(told)}

    def _explain(self, request_id: str, step: Step) -> dict[str, Any]:
        request, waiting = compat.requests(self)[request_id], compat.waiting_queues(self)[0]
        line = [one.request_id for one in waiting]
        told = {
            "agent": step.agent,
            "step": step.number,
            "state": compat.state(request),
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "held": self._holds(request),
            "place": line.index(request_id) + 1 if request_id in line else None,
            "waiting": len(line),
            "key": None,
        }
        if self._priorities is not None:
            given, level, remaining, _ = self._priorities.wanted(request)
            tokens = remaining if math.isfinite(remaining) else None
            told["key"] = {"class": given, "level": level, "remaining_tokens": tokens}
        return told

    def _suffices(self) -> None:
        self._modes.changed()

    def _foretells(self, learnt_as: str) -> bool:
        """Eviction goes by forecasts of next agents; who ranks by tokens left has to hear of every step, too."""
        of = self._modes.of
        return bool(of("eviction", learnt_as) or of("priority", learnt_as) or of("admission", learnt_as))

    def _tells(self, learnt_as: str) -> bool:
        """An order that nobody goes by may know all; where it acts, it goes by the types that are on."""
        whole = self._modes.whole["eviction"]
        return whole is not Mode.ON or self._modes.of("eviction", learnt_as) is Mode.ON

    def _follow_modes(self) -> None:
        """Policies go as far as is said now. Between two iterations only."""
        if self._modes.changes != self._modes_applied:
            self._bookkeeping.attempt(self._apply_modes)

    def _apply_modes(self) -> None:
        self._modes_applied, whole = self._modes.changes, self._modes.whole
        self._apply_to_blocks(whole["eviction"])
        self._apply_to_gate(whole["admission"])
        self._apply_to_priority(whole["priority"])
        self._queue_again()

    def _apply_to_blocks(self, mode: Mode) -> None:
        scored = self._scored
        if scored is None:
            return
        attends = compat.free_queue(self) is scored
        if mode is Mode.OFF and attends:
            if self._prefetch is not None:
                self._prefetch.drop()
                self._prefetch.begin()
            compat.swap_blocks(self, scored.vllms, compat.Deaf())
        elif mode is not Mode.OFF and not attends:
            scored.switch.attempt(scored.begin)
            compat.swap_blocks(self, scored, scored)
        scored.acts = mode is Mode.ON
        self._workflows.retention = None if mode is Mode.OFF else self._prefetch or scored

    def _apply_to_gate(self, mode: Mode) -> None:
        if self._gate is not None and mode is Mode.OFF:
            self._refile(self._gate.close())
            self._gate = None
        elif self._gate is not None:
            self._gate.reconsider()
        elif self._admission is not None and self._admission.on and mode is not Mode.OFF:
            self._gate = self._make_gate(self._admission)

    def _apply_to_priority(self, mode: Mode) -> None:
        if self._ranking is None or not self._ranking.on:
            return
        steps = {name: self._workflows.step(name) for name in compat.requests(self)}
        if self._priorities is None and mode is not Mode.OFF:
            self._priorities = self._make_priorities(self._ranking)
            self._priorities.acts = mode is Mode.ON
            for name, request in compat.requests(self).items():
                step = steps[name]
                self._priorities.add(request, self._iteration, step.workflow_type if step else "", None)
        priorities = self._priorities
        if priorities is None:
            return
        priorities.acts = mode is Mode.ON
        for name, request in compat.requests(self).items():
            step = steps[name]
            priorities.rank(name, self._modes.of("priority", step.learnt_as if step else "") is Mode.ON)
            (priorities.fold if priorities.acts else priorities.give_back)(request)
        if mode is Mode.OFF:
            self._priorities = None

    def _queue_again(self) -> None:
        """The queues of waiting requests are those of the policies that act; who waits comes along."""
        compat.own_waiting(self)
        if self._gate is not None or (self._priorities is not None and self._priorities.acts):
            compat.hook_waiting(self, self._queue)
        self._shadow, shadow = None, self._shadow
        if self._priorities is not None and self._modes.shadows("priority"):
            self._shadow = ShadowOrder(self._priorities.wanted, self._holds, self._priorities.unranked)
            self._shadow.counts = shadow.counts if shadow is not None else self._shadow.counts
            for request in compat.requests(self).values():
                if not request.num_computed_tokens:
                    self._shadow.arrives(request)

    if TYPE_CHECKING:  # `Policies` has these

        def _make_priorities(self, switch: Switch) -> Priorities: ...
        def _make_gate(self, switch: Switch) -> Gate: ...
        def _queue(self) -> Any: ...
        def _holds(self, request: Any) -> bool: ...
        def _refile(self, request_ids: Any) -> None: ...
