"""What the gateway does for a request: whose it is, what is forecast, and what the server behind is told.

One object holds all state, on one thread: the front calls it when a request arrives, is answered or fails. It knows
neither HTTP nor a router, so other hosts (Ray Serve, Envoy) call the same methods. No call raises: a part that fails is
switched off, and requests are then forwarded without it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from secrets import token_bytes
from typing import Any, Final

import numpy as np

from presage.gateway.dialects.names import SafeNames
from presage.gateway.outcomes import ReportableOutcomes
from presage.gateway.request_forecasts import GatewayDecision, GatewayForecasts
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.explain import MOST_SHOWN, LastForecasts, reasons, return_as_plain
from presage.serving_hooks.forecasting.forecasts import Forecasts, NextAgents, Upkeep, position
from presage.serving_hooks.identity.identifier import Identifier
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.lifecycle.emitter import LifecycleEvents
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.serving_hooks.listeners import Found, Listeners
from presage.serving_hooks.listeners.lifecycle import LifecycleListener
from presage.serving_hooks.listeners.overview import Overview
from presage.serving_hooks.listeners.recording import Recording
from presage.serving_hooks.modes import Mode, Modes, Parts, Retry, Switch, nothing_to_renew
from presage.serving_hooks.policies.wait_bounds import Objectives
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder
from presage.serving_hooks.recorder.rows import LateColumns
from presage.serving_hooks.settings import NO_TYPES, WorkflowTypeSettings
from presage.serving_hooks.status import EngineStatus, model_versions, read_status
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step, unscoped

_MOST_CLEARED: Final = 500
"""Workflows that are ended in a second, after a failure."""
_NOTHING: Final = Found((), 0)
"""Nobody knows yet what a server behind has of a prompt."""


class Decisions:
    """Identity, forecasts, annotations and recording of all requests.

    Args:
        forecasts: sources of forecasts, as an engine has them.
        recorder: records steps; off without one.
        webhook: delivers lifecycle events; nobody else closes it.
        time_to_live_s, most_workflows: of the table of workflows.
        retention_target: probability of the times to live.
        objectives: by tenant and workflow type, of which deadlines are read.
        shown: latest forecasts and decisions that are kept for explanations, over all workflows.
        clock: monotonic seconds.
        names: of tenants' workflows, as servers get them; by default no other gateway's.
        workflow_types: of requests whose clients name none.

    Attributes:
        request_forecasts: made for each request, and what was learnt of its agents.
        reportable: answers and workflows whose outcomes applications may report.
        lifecycle: events of workflows, for whoever subscribes.
        overview: of workflows and agents, for whoever looks.
    """

    def __init__(
        self,
        identifier: Identifier,
        forecasts: Forecasts,
        modes: Modes,
        counts: EventCounts,
        *,
        recorder: StepRecorder | None = None,
        webhook: Webhook | None = None,
        time_to_live_s: float,
        most_workflows: int,
        retention_target: float,
        objectives: Objectives,
        shown: int,
        clock: Callable[[], float],
        names: SafeNames | None = None,
        workflow_types: WorkflowTypeSettings = NO_TYPES,
    ) -> None:
        self.names, self._workflow_types = names or SafeNames(token_bytes(32)), workflow_types
        self.table = WorkflowTable(time_to_live_s, clock, counts, most_workflows)
        self.identifier, self.modes, self.recorder = identifier, modes, recorder or NoRecorder()
        self.counts = counts
        self._forecasts, self._clock, self._target = forecasts, clock, retention_target
        self._ids = itertools.count(1)
        self._shown = LastForecasts(shown, clock)
        self._decided: deque[tuple[float, str, dict[str, str | float]]] = deque(maxlen=shown)
        retry = Retry(clock)
        self._workflows = Switch("bookkeeping of workflows", counts, retry=retry)
        self._models_switch = Switch("reload of models", counts, retry=retry)
        self._status_switch = Switch("status of models", counts, retry=retry)
        self._recording = Recording(self.recorder, self.table.choices, counts, _begun, _completed)
        self.reportable = ReportableOutcomes(self.recorder, most_workflows, clock, self._recording.switch)
        self.request_forecasts = GatewayForecasts(
            forecasts,
            modes,
            counts,
            self._workflows,
            retry,
            in_doubt=lambda key: self.overview.in_doubt(key),
            record=self._recording.forecast,
            sent_id=self.names.of,
            shown=self._shown,
            target=retention_target,
            objectives=objectives,
            clock=clock,
        )
        self.lifecycle, self._webhook = LifecycleEvents("gateway", forecasts.returns, counts), webhook
        if webhook is not None:
            self.lifecycle.subscribe(webhook)
        renewed = (*self.request_forecasts.switches, self._models_switch, self._status_switch)
        self._parts = Parts({self._workflows: self._begin_anew, **dict.fromkeys(renewed, nothing_to_renew)})
        self.overview = Overview(self.table, counts, lambda decision: decision.model, clock)
        # As in an engine: a step is recorded before its forecasts, and lifecycle events tell of them.
        self._listeners: Listeners[GatewayDecision] = Listeners()
        recording = (self._recording, self.reportable) if self._recording.on else ()
        for listener in (*recording, self.request_forecasts, LifecycleListener(self.lifecycle), self.overview):
            self._listeners.add(listener)
        self.table.subscribe(lambda workflow, reason: self._listeners.workflow_ended(workflow, reason))
        self.table.subscribe(identifier.ended)
        identifier.agents.take_names(forecasts.agent_names)

    def arrived(self, request: ApiRequest) -> GatewayDecision:
        """A request has arrived."""
        given_type = self._workflow_types.given(request.headers, request.tenant, request.given_type)
        if given_type is not None and given_type != request.given_type:
            request = replace(request, given_type=given_type)
        identity = self.identifier.identify(request)
        decision = GatewayDecision(f"gw-{next(self._ids)}", request, identity, model=request.model)
        characters = sum(len(text) for text in request.texts if text)
        decision.prompt_tokens = self.request_forecasts.tokens(characters, request.model)
        self._workflows.attempt(self._arrived, decision)
        return decision

    def answered(self, decision: GatewayDecision, answer: AnswerReader) -> None:
        """The answer is complete."""
        self._workflows.attempt(self._left, decision, answer)
        self._workflows.attempt(
            self.identifier.answered, decision.identity, decision.request, answer.response_id, answer.messages
        )

    def failed(self, decision: GatewayDecision) -> None:
        """The request was aborted, or the server answered with an error."""
        self._workflows.attempt(self._left, decision, None)

    def held(self, decision: GatewayDecision, is_held: bool) -> None:
        """A request waits for a server by the routing policy, or does so no longer."""
        workflow = self.table.get(decision.identity.step.workflow)
        if workflow is not None and is_held:
            self.lifecycle.attempt(self.lifecycle.held, workflow, None)
        elif workflow is not None:
            self.lifecycle.attempt(self.lifecycle.resumed, workflow)

    def end(self, workflow_id: str, workflow_type: str) -> bool:
        """Its client ends a workflow, named with its tenant; False if it does not run."""
        return self.table.end(Step(workflow_type, workflow_id, "").workflow, EndReason.FINISHED)

    def pause(self, workflow_id: str, workflow_type: str) -> bool:
        """As `end`, of a workflow that goes on later."""
        return self.table.pause(Step(workflow_type, workflow_id, "").workflow)

    @property
    def next_agents(self) -> NextAgents | None:
        """The source of forecasts of next agents."""
        return self._forecasts.next_agents

    def forecast_return(self, workflow: str) -> tuple[float, float]:
        """Of a workflow that is away: median seconds to its next request (NaN if unknown), and probability of none."""
        running, returns = self.table.get(workflow), self._forecasts.returns
        away = returns.away(running) if running is not None and returns is not None else None
        if away is None or not away[0].quantiles:
            return math.nan, 0.0
        return float(np.interp(0.5, away[0].quantiles, away[0].seconds)), away[0].end

    def explain(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        """What was forecast and decided for a workflow, named with its tenant; as the engines' explanations.

        Beside theirs it has `decisions`: where each latest request went and why.
        """
        step = Step(workflow_type, workflow_id, "")
        running, now = self.table.get(step.workflow), self._clock()
        returns = self._forecasts.returns
        away = returns.away(running) if running is not None and returns is not None else None
        latest = [
            {"ago_s": round(now - decided_at, 3), **facts}
            for decided_at, name, facts in self._decided
            if name == step.workflow
        ]
        explanation: dict[str, Any] = {
            "workflow_type": workflow_type,
            "workflow_id": unscoped(workflow_id),
            "alive": running is not None,
            "modes": {policy: self.modes.of(policy, step.stats_key).word for policy in self.modes.whole},
            "forecasts": self._shown.of(step.workflow),
            "position": position(self._forecasts.next_agents, running) if running is not None else None,
            "returns": None if away is None else return_as_plain(away[0], now - away[1], self._target),
            "growth": None,
            "requests": [],
            "in_engine": 0,
            "admission": None,
            "blocks": None,
            "decisions": latest[-MOST_SHOWN:],
        }
        explanation["reasons"] = reasons(explanation) + [
            f"its last request went to {last['upstream']}, model {last.get('model', 'unknown')}: {_why(last)}"
            for last in latest[-1:]
            if "upstream" in last
        ]
        return explanation

    def tick(self) -> None:
        """Once a second: workflows expire, newer models go live, and what has failed is tried again."""
        self._parts.retry(self._clock())
        self._workflows.attempt(self.table.expire)
        self.reportable.expire()
        if self._forecasts.upkeep is not None:
            self._models_switch.attempt(self._renew, self._forecasts.upkeep)

    def set_mode(self, mode: str, policy: str | None, workflow_type: str | None) -> None:
        """Sets a mode; "on" tries again what has failed. Raises ConfigurationError for an unknown mode or policy."""
        self.modes.set(mode, policy, workflow_type)
        if mode == Mode.ON.word:
            self._parts.end_pauses(None)
            self._parts.retry(self._clock())

    def close(self) -> None:
        """Writes what is recorded and which events wait."""
        if self._forecasts.upkeep is not None:
            self._models_switch.attempt(self._forecasts.upkeep.close)
        self._recording.close()
        if self._webhook is not None:
            self._webhook.close()

    def _begin_anew(self) -> bool:
        """Ends workflows in whatever state a failure has left them; whether all are."""
        return self.table.clear_some(_MOST_CLEARED)

    def _renew(self, upkeep: Upkeep) -> None:
        if upkeep.renew():
            self.identifier.agents.take_names(self._forecasts.agent_names)

    def status(self) -> EngineStatus:
        """As an engine's status: modes, models, forecasts against outcomes, drift, counts."""
        upkeep, ends = self._forecasts.upkeep, self.table.ends
        upkept = self._status_switch.attempt(lambda: read_status(upkeep.status())) if upkeep is not None else None
        return replace(
            upkept or EngineStatus(),
            name="Gateway",
            on={policy: mode is Mode.ON for policy, mode in self.modes.whole.items()},
            off={
                switch.name: switch.why_off() for switch in (*self._parts.off, self._recording.switch) if not switch.on
            },
            modes=self.modes.status(),
            workflows=len(self.table),
            ended={reason.value: ends[reason] for reason in EndReason},
            model_versions=model_versions(self._forecasts.models),
            counts=self.counts.by_key(),
            counted=self.counts.by_metric(),
            one_step=self.overview.one_step(),
            recorder=self._recording.status(),
            webhook=self._webhook.status() if self._webhook is not None else None,
        )

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            **self.table.debug_state(),
            **self.identifier.debug_state(),
            "reportable outcomes": len(self.reportable),
            **self.request_forecasts.debug_state(),
        }

    def _arrived(self, decision: GatewayDecision) -> None:
        identity = decision.identity
        step = self._forecasts.recognised(identity.step, identity.known_as, self.counts)
        decision.identity = replace(identity, step=step)
        running = self.table.arrived(decision.id, step)
        self._listeners.request_arrived(decision, running)
        self._listeners.request_scheduled(decision, running, _NOTHING)

    def _left(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        running = self.table.finished(decision.id)
        if running is None:
            return
        decision.answer = answer
        reason = "abort" if answer is None else answer.finish_reason
        left = LeftStep(decision.id, answer is not None, None if answer is None else answer.output_tokens, reason)
        self._listeners.request_finished(decision, running, left)
        self._decided.append((self._clock(), running.workflow.key, decision.facts()))
        if running.step.last:
            self.table.end(running.workflow.key, EndReason.FINISHED if left.completed else EndReason.ABORTED)


def _begun(decision: GatewayDecision, _: Found) -> dict[str, Any]:
    """What is recorded as a step begins."""
    system_prompt, input_text = decision.request.texts
    identity = decision.identity
    told = {"number": identity.number, "goes_on_from": identity.goes_on_from, "quotes": identity.quotes}
    return {"input_text": input_text, "system_prompt": system_prompt, **told}


def _completed(decision: GatewayDecision) -> dict[str, Any]:
    """What is recorded as a step leaves; the server tells the size of the prompt with its answer."""
    answer, model, decided = decision.answer, decision.model, decision.explained()
    if answer is None:
        return {"found": LateColumns(None, None, model, decided)}
    late = LateColumns(answer.input_tokens, answer.cached_tokens, answer.model or model, decided)
    return {"output_text": answer.text, "found": late}


def _why(facts: Mapping[str, str | float]) -> str:
    """Why a request went where it went, in words."""
    parts = [facts.get(name) for name in ("model_reason", "placement_reason")]
    rank, rank_from = facts.get("rank"), facts.get("rank_from")
    by = "" if rank_from == "forecast" else f" ({rank_from})"
    parts.append("no priority" if rank is None else f"priority by {rank:.0f} remaining tokens{by}")
    recognised = f"workflow by {facts['workflow_from']}, agent by {facts['agent_from']}"
    return "; ".join(str(part) for part in [*parts, recognised] if part)
