"""The forecasts of requests that pass the gateway: made as they arrive and are answered, and what servers are told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from presage.datasets.schema.names import MAX_NAME
from presage.gateway.agent_quantiles import RecentQuantiles
from presage.gateway.annotation import Annotation
from presage.gateway.ranks import KnownRanks, shrunk
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.counts import DEADLINES, FORECASTS, EventCounts
from presage.serving_hooks.explain import LastForecasts
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.identity.identifier import Identity
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Mode, Modes, Retry, Switch
from presage.serving_hooks.policies.wait_bounds import Objectives
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import tenant_of, unscoped
from presage.serving_hooks.workflows.live import LiveForecast

_FIRST_RATIO: Final = 4.0
"""Characters of a token, before any answer told."""
_NEW: Final = 0.05
"""Weight of a new answer in a model's characters of a token."""
_MOST_MODELS: Final = 1000


@dataclass(slots=True)
class GatewayDecision:
    """One request on its way.

    Attributes:
        id: unique in this process.
        annotation: None without a workflow (the table is full), or with all policies off.
        acts: whether the request is annotated; otherwise the annotation is only shown.
        prompt_tokens: estimated from the characters of the prompt.
        forecast: made when the request arrived.
        answer: complete; None until then, and if it failed.
        model, model_reason, upstream, placement_reason: chosen by the front, for explanations and headers.
        prefilled_ahead: what became of the prefill ahead of this request; "" without one.
        neutral_rank: for servers that would serve a request without a rank first, if it has no annotation that acts.
        deadline_at: when its workflow has to have ended, on the gateway's clock; infinity without a deadline.
    """

    id: str
    request: ApiRequest
    identity: Identity
    annotation: Annotation | None = None
    acts: bool = False
    prompt_tokens: int = 0
    forecast: LiveForecast | None = None
    answer: AnswerReader | None = None
    model: str = ""
    model_reason: str = ""
    upstream: str = ""
    placement_reason: str = ""
    prefilled_ahead: str = ""
    neutral_rank: float | None = None
    deadline_at: float = math.inf

    def facts(self) -> dict[str, str | float]:
        """What was decided and why."""
        facts = {
            "model": self.model[:MAX_NAME],
            "model_reason": self.model_reason,
            "upstream": self.upstream,
            "placement_reason": self.placement_reason,
            "workflow_from": self.identity.workflow_source,
            "agent_from": self.identity.agent_source,
            "prefilled_ahead": self.prefilled_ahead,
            "rank": None if self.annotation is None or not self.acts else self.annotation.rank,
            "rank_from": None if self.annotation is None or not self.acts else self.annotation.rank_from,
        }
        return {name: value for name, value in facts.items() if value not in (None, "")}

    def explained(self) -> str:
        """The facts as JSON."""
        return json.dumps(self.facts())


class GatewayForecasts(Listener[GatewayDecision]):
    """Forecasts of next agents and return times, and the ranks, lengths and times of agents as they were served lately.

    Args:
        switch: of the bookkeeping of workflows.
        in_doubt: whether runs of a workflow type, with its tenant, are not recognised; those that nobody named are then
            ranked as if nothing were forecast of them.
        record: records each forecast, by the id of its request.
        sent_id: (tenant, id of a workflow) -> its name as servers get it.
        shown: keeps recent forecasts for explanations.
        target: probability of the times to live.
        objectives: by tenant and workflow type, of which deadlines are read.

    Attributes:
        outputs, returns, ranks: of each agent: output tokens, seconds to the next request, forecast tokens left.
        switches: of the sources of forecasts.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        modes: Modes,
        counts: EventCounts,
        switch: Switch,
        retry: Retry,
        *,
        in_doubt: Callable[[str], bool],
        record: Callable[[str, LiveForecast], object],
        sent_id: Callable[[str, str], str],
        shown: LastForecasts,
        target: float,
        objectives: Objectives,
        clock: Callable[[], float],
    ) -> None:
        self.switch = switch
        self.outputs, self.returns, self.ranks = RecentQuantiles(), RecentQuantiles(), KnownRanks()
        self._next: Any = forecasts.next_agents  # takes texts, if it is the registry's
        self._return_times = forecasts.returns
        self._modes, self._counts, self._clock = modes, counts, clock
        self._in_doubt, self._record, self._sent_id, self._shown = in_doubt, record, sent_id, shown
        self._target, self._objectives = target, objectives
        self._characters: dict[str, float] = {}
        self._agents_switch = Switch("forecasts of next agents", counts, retry=retry)
        self._returns_switch = Switch("forecasts of return times", counts, retry=retry)
        self.switches = self._agents_switch, self._returns_switch

    def tokens(self, characters: int, model: str) -> int:
        """The tokens of so many characters of a prompt, estimated from what the model's answers told."""
        return round(characters / self._characters.get(model, _FIRST_RATIO))

    def request_arrived(self, request: GatewayDecision, step: RunningStep | None) -> None:
        """Forecasts for the step, and annotates its request."""
        if self._modes.whole["annotations"] is Mode.ON:
            request.neutral_rank = self.ranks.median
        if step is None:
            return
        named, workflow, now = step.step, step.workflow, self._clock()
        wanted_s = self._objectives.of(named).deadline_s
        if wanted_s is not None:
            request.deadline_at = workflow.deadline_at = workflow.arrived_at + wanted_s
        if workflow.left_by is not None and len(workflow.requests) == 1:
            self.returns.add(workflow.left_by, now - workflow.left_at)
        mode = self._modes.of("annotations", named.stats_key)
        if mode is Mode.OFF:
            return
        request.forecast = self._agents_switch.attempt(self._on_prefill, request, workflow)
        if self._return_times is not None:
            self._returns_switch.attempt(self._return_times.arrived, workflow, named, request.prompt_tokens, now)
        request.annotation = self._annotation(request, step.number)
        request.acts = mode is Mode.ON

    def request_scheduled(self, request: GatewayDecision, step: RunningStep | None, found: Found) -> None:
        """Records what was forecast, now that the step is."""
        if request.forecast is not None:
            self._record(request.id, request.forecast)

    def request_finished(self, request: GatewayDecision, step: RunningStep | None, left: LeftStep | None) -> None:
        """Forecasts after the answer, and learns from it."""
        if step is None or left is None:
            return
        named, workflow, now = step.step, step.workflow, self._clock()
        key, answer = (named.stats_key, named.agent), request.answer
        workflow.left_by, workflow.left_at = key, now
        workflow.forecasts.next_agents = None
        if self._return_times is not None:
            tokens = left.output_tokens or 0
            completed = partial(self._return_times.completed, workflow, named, tokens, left.finish_reason, now)
            self._returns_switch.attempt(completed)
        if answer is None:
            return
        self._learn(request, answer)
        self.ranks.answered(key)
        if left.output_tokens is not None:
            self.outputs.add(key, float(left.output_tokens))
        workflow.forecasts.next_agents = self._agents_switch.attempt(self._on_completion, request, workflow, answer)
        if self._return_times is not None:
            answered = partial(self._return_times.answered, workflow, named, left.finish_reason, answer.tools)
            self._returns_switch.attempt(answered)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """Learns from how it ended, and forgets it."""
        if workflow.left_by is not None:
            if reason is EndReason.FINISHED:
                self.returns.add(workflow.left_by, math.inf)
            if workflow.deadline_at < math.inf and reason is not EndReason.ABORTED:
                self._counts.add(DEADLINES, "met" if workflow.left_at <= workflow.deadline_at else "missed")
        if self._next is not None:
            self._agents_switch.attempt(self._next.close, workflow, reason)
        if self._return_times is not None:
            self._returns_switch.attempt(self._return_times.ended, workflow, reason)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "agents": len(self.outputs) + len(self.returns) + len(self.ranks),
            "models": len(self._characters),
            **getattr(self._next, "debug_state", dict)(),
        }

    def _on_prefill(self, request: GatewayDecision, workflow: Workflow) -> LiveForecast | None:
        if self._next is None:
            return None
        step = request.identity.step
        system_prompt, input_text = request.request.texts
        live: LiveForecast = self._next.on_prefill(
            workflow,
            step.agent,
            step=step.number,
            input_tokens=request.prompt_tokens or None,
            input_text=input_text,
            system_prompt=system_prompt,
            model=request.request.model or None,
        )
        self._counts.add(FORECASTS, "next-agent", live.source)
        self._counts.add(FORECASTS, "remaining-length", live.remaining.source)
        self._shown.add(step, live)
        return live

    def _annotation(self, request: GatewayDecision, number: int) -> Annotation:
        step, live = request.identity.step, request.forecast
        key, tenant = (step.stats_key, step.agent), tenant_of(step.workflow_id)
        left = live.remaining if live is not None and live.remaining.tokens else None
        keep_s = self.returns.at(key, self._target)
        named = request.identity.workflow_source not in ("new", "continuation")
        rank, rank_from = self.ranks.rank(key, left if named or not self._in_doubt(step.stats_key) else None)
        end = live.end if live is not None else None
        if live is not None and end is not None and live.source == "back-off":
            end = shrunk(end, live.evidence)
        return Annotation(
            replace(step, agent=step.sent[1]),
            number,
            sent_id=self._sent_id(tenant, unscoped(step.workflow_id)) if tenant else "",
            rank=rank,
            rank_from=rank_from,
            remaining_tokens=None if left is None else _p50_p99(left.quantiles, left.tokens),
            output_tokens=self.outputs.finite(key),
            next_agents=live.next_agents() if live is not None else (),
            end=end,
            return_s=self.returns.finite(key),
            time_to_live_s=None if keep_s is None or math.isinf(keep_s) else keep_s,
            deadline_s=self._objectives.of(step).first_token_s,
            capacity_group=f"{step.workflow_type}/{step.sent[1]}",
            source="none" if live is None else live.source,
            evidence=0 if live is None else live.evidence,
        )

    def _on_completion(self, request: GatewayDecision, workflow: Workflow, answer: AnswerReader) -> LiveForecast | None:
        if self._next is None or request.forecast is None:
            return None
        step = request.identity.step
        live: LiveForecast = self._next.on_completion(
            workflow, output_tokens=answer.output_tokens, output_text=answer.text
        )
        self._counts.add(FORECASTS, "next-agent", live.source)
        self._shown.add(step, live)
        self._record(request.id, live)
        return live

    def _learn(self, request: GatewayDecision, answer: AnswerReader) -> None:
        """The characters of a token of a model."""
        tokens = answer.input_tokens
        characters = sum(len(text) for text in request.request.texts if text)
        if not tokens or not characters:
            return
        model, ratio = request.request.model, min(64.0, characters / tokens)
        before = self._characters.get(model)
        if before is None and len(self._characters) >= _MOST_MODELS:
            return
        self._characters[model] = ratio if before is None else before + _NEW * (ratio - before)


def _p50_p99(quantiles: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, float]:
    return float(np.interp(0.5, quantiles, values)), float(np.interp(0.99, quantiles, values))
