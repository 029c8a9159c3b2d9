"""What the gateway does for a request: whose it is, what is forecast, and what the server behind is told.

One object holds all state, on one thread: the front calls it when a request arrives, is answered or fails. It knows
neither HTTP nor a router, so other hosts (Ray Serve, Envoy) call the same methods. No call raises: a part that fails is
switched off, and requests are then forwarded without it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import Any, Final

import numpy as np

from presage.datasets.recording import RECORDED_EXPIRED, RECORDED_FINISHED
from presage.datasets.schema.names import MAX_NAME
from presage.gateway.agent_quantiles import RecentQuantiles
from presage.gateway.annotation import Annotation
from presage.gateway.dialects.names import SafeNames
from presage.gateway.outcomes import ReportableOutcomes
from presage.gateway.ranks import KnownRanks, shrunk
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.counts import DEADLINES, FORECASTS, EventCounts
from presage.serving_hooks.explain import MOST_SHOWN, LastForecasts, reasons, return_as_plain
from presage.serving_hooks.forecasting.forecasts import Forecasts, NextAgents, Upkeep, position
from presage.serving_hooks.identity.identifier import Identifier, Identity
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.lifecycle.emitter import LifecycleEvents
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.serving_hooks.modes import Mode, Modes, Parts, Retry, Switch, nothing_to_renew
from presage.serving_hooks.policies.wait_bounds import Objectives
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder
from presage.serving_hooks.recorder.rows import LateColumns, RecordedStep
from presage.serving_hooks.status import EngineStatus, model_versions, read_status
from presage.serving_hooks.workflows import EndReason, Workflow, WorkflowTable
from presage.serving_hooks.workflows.identity import Step, tenant_of, unscoped
from presage.serving_hooks.workflows.live import LiveForecast

_FIRST_RATIO: Final = 4.0
"""Characters of a token, before any answer told."""
_MOST_CLEARED: Final = 500
"""Workflows that are ended in a second, after a failure."""
_NEW: Final = 0.05
"""Weight of a new answer in a model's characters of a token."""


@dataclass(slots=True)
class GatewayDecision:
    """One request on its way.

    Attributes:
        id: unique in this process.
        annotation: None without a workflow (the table is full), or with all policies off.
        acts: whether the request is annotated; otherwise the annotation is only shown.
        prompt_tokens: estimated from the characters of the prompt.
        forecast, completed: made when the request arrived, and when it was answered.
        recorded: where its step is recorded; None if it is not.
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
    completed: LiveForecast | None = None
    recorded: RecordedStep | None = None
    model: str = ""
    model_reason: str = ""
    upstream: str = ""
    placement_reason: str = ""
    prefilled_ahead: str = ""
    neutral_rank: float | None = None
    deadline_at: float = math.inf

    def facts(self) -> dict[str, str | float]:
        """What was decided and why."""
        found = {
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
        return {name: value for name, value in found.items() if value not in (None, "")}

    def explained(self) -> str:
        """The facts as JSON."""
        return json.dumps(self.facts())


@dataclass(slots=True)
class _Course:
    """What is known of a running workflow beside the predictors' states."""

    began_s: float
    steps: int = 0
    last: tuple[tuple[str, str], float] | None = None  # the agent that answered last, and when
    decisions: set[str] = field(default_factory=set)
    deadline_at: float = math.inf


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

    Attributes:
        reportable: answers and workflows whose outcomes applications may report.
        lifecycle: events of workflows, for whoever subscribes.
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
    ) -> None:
        self.names = names or SafeNames(token_bytes(32))
        self.table = WorkflowTable(time_to_live_s, clock, counts, most_workflows)
        self.identifier, self.modes, self.recorder = identifier, modes, recorder or NoRecorder()
        self._records = not isinstance(self.recorder, NoRecorder)  # what is recorded takes time to put together
        self.counts = counts
        self._forecasts, self._clock, self._target = forecasts, clock, retention_target
        self._next: Any = forecasts.next_agents  # takes texts, if it is the registry's
        self._returns, self._objectives = forecasts.returns, objectives
        self._ids = itertools.count(1)
        self._shown = LastForecasts(shown, clock)
        self._decided: deque[tuple[float, str, dict[str, str | float]]] = deque(maxlen=shown)
        self._courses: dict[str, _Course] = {}
        self._ratio: dict[str, float] = {}
        self.outputs, self.returns, self.ranks = RecentQuantiles(), RecentQuantiles(), KnownRanks()
        self.reportable = ReportableOutcomes(self.recorder, most_workflows, clock)
        self.lifecycle, self._webhook = LifecycleEvents("gateway", forecasts.returns, counts), webhook
        if webhook is not None:
            self.lifecycle.subscribe(webhook)
        retry = Retry(clock)
        self._workflows = Switch("bookkeeping of workflows", counts, retry=retry)
        self._agents_switch = Switch("forecasts of next agents", counts, retry=retry)
        self._returns_switch = Switch("forecasts of return times", counts, retry=retry)
        self._models_switch = Switch("reload of models", counts, retry=retry)
        self._status_switch = Switch("status of models", counts, retry=retry)
        self._recorder_switch = Switch("recorder", counts)  # its files would have a gap
        forecasting = (self._agents_switch, self._returns_switch, self._models_switch, self._status_switch)
        self._parts = Parts({self._workflows: self._begin_anew, **dict.fromkeys(forecasting, nothing_to_renew)})
        self.table.subscribe(self._ended)
        self.table.subscribe(identifier.ended)
        identifier.agents.take_names(forecasts.agent_names)

    def arrived(self, request: ApiRequest) -> GatewayDecision:
        """A request has arrived."""
        identity = self.identifier.identify(request)
        decision = GatewayDecision(f"gw-{next(self._ids)}", request, identity, model=request.model)
        decision.prompt_tokens = self._prompt_tokens(request)
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

    @property
    def next_agents(self) -> NextAgents | None:
        """The source of forecasts of next agents."""
        return self._forecasts.next_agents

    def tokens(self, characters: int, model: str) -> int:
        """The tokens of so many characters of a prompt, estimated from what the model's answers told."""
        return round(characters / self._ratio.get(model, _FIRST_RATIO))

    def forecast_return(self, workflow: str) -> tuple[float, float]:
        """Of a workflow that is away: median seconds to its next request (NaN if unknown), and probability of none."""
        away: Any = self._returns.away(workflow) if self._returns is not None else None
        if away is None or not away[0].quantiles:
            return math.nan, 0.0
        return float(np.interp(0.5, away[0].quantiles, away[0].seconds)), away[0].end

    def explain(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        """What was forecast and decided for a workflow, named with its tenant; as the engines' explanations.

        Beside theirs it has `decisions`: where each latest request went and why.
        """
        step = Step(workflow_type, workflow_id, "")
        running, now = self.table.get(step.workflow), self._clock()
        away: Any = self._returns.away(step.workflow) if self._returns is not None else None
        found = [{"ago_s": round(now - at, 3), **facts} for at, name, facts in self._decided if name == step.workflow]
        explanation: dict[str, Any] = {
            "workflow_type": workflow_type,
            "workflow_id": unscoped(workflow_id),
            "alive": running is not None,
            "modes": {policy: self.modes.of(policy, step.stats_key).word for policy in self.modes.whole},
            "forecasts": self._shown.of(step.workflow),
            "position": position(self._forecasts.next_agents, workflow_type, workflow_id),
            "returns": None if away is None else return_as_plain(away[0], now - away[1], self._target),
            "growth": None,
            "requests": [],
            "in_engine": 0,
            "admission": None,
            "blocks": None,
            "decisions": found[-MOST_SHOWN:],
        }
        explanation["reasons"] = reasons(explanation) + [
            f"its last request went to {last['upstream']}, model {last.get('model', 'unknown')}: {_why(last)}"
            for last in found[-1:]
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
        self._recorder_switch.attempt(self.recorder.close)
        if self._webhook is not None:
            self._webhook.close()

    def _begin_anew(self) -> bool:
        """Ends workflows in whatever state a failure has left them; whether all are."""
        cleared = self.table.clear_some(_MOST_CLEARED)
        if cleared:
            self._courses.clear()
        return cleared

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
                switch.name: switch.why_off() for switch in (*self._parts.off, self._recorder_switch) if not switch.on
            },
            modes=self.modes.status(),
            workflows=len(self.table),
            ended={reason.value: ends[reason] for reason in EndReason},
            model_versions=model_versions(self._forecasts.models),
            counts=self.counts.by_key(),
            counted=self.counts.by_metric(),
            recorder=self.recorder.status(),
            webhook=self._webhook.status() if self._webhook is not None else None,
        )

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            **self.table.debug_state(),
            **self.identifier.debug_state(),
            "courses": len(self._courses),
            "agents": len(self.outputs) + len(self.returns) + len(self.ranks),
            "models": len(self._ratio),
            "reportable outcomes": len(self.reportable),
            **getattr(self._next, "debug_state", dict)(),
        }

    def _arrived(self, decision: GatewayDecision) -> None:
        of = decision.identity
        step = self._forecasts.recognised(of.step, of.known_as, self.counts)
        decision.identity = replace(of, step=step)
        mode = self.modes.of("annotations", step.stats_key)
        if self.modes.whole["annotations"] is Mode.ON:
            decision.neutral_rank = self.ranks.median
        running = self.table.arrived(decision.id, step)
        if running is None:
            return
        self.lifecycle.attempt(self.lifecycle.arrived, running)
        now = self._clock()
        course = self._courses.setdefault(step.workflow, _Course(now))
        wanted_s = self._objectives.of(step).deadline_s
        if wanted_s is not None:
            decision.deadline_at = course.deadline_at = course.began_s + wanted_s
        number = course.steps if step.number is None else step.number
        course.steps = number + 1
        if course.last is not None and not course.decisions:
            self.returns.add(course.last[0], now - course.last[1])
        course.decisions.add(decision.id)
        if mode is not Mode.OFF:
            decision.forecast = self._agents_switch.attempt(self._on_prefill, decision)
            if self._returns is not None:
                self._returns_switch.attempt(self._returns.arrived, step, decision.prompt_tokens, now)
            decision.annotation = self._annotation(decision, number)
            decision.acts = mode is Mode.ON
        if self._records:
            self._recorder_switch.attempt(self._record, decision)

    def _on_prefill(self, decision: GatewayDecision) -> LiveForecast | None:
        if self._next is None:
            return None
        step, request = decision.identity.step, decision.request
        system_prompt, input_text = request.texts
        live: LiveForecast = self._next.on_prefill(
            step.workflow_type,
            step.workflow_id,
            step.agent,
            step=step.number,
            input_tokens=decision.prompt_tokens or None,
            input_text=input_text,
            system_prompt=system_prompt,
            model=request.model or None,
        )
        self.counts.add(FORECASTS, "next-agent", live.source)
        self.counts.add(FORECASTS, "remaining-length", live.remaining.source)
        self._shown.add(step, live)
        return live

    def _annotation(self, decision: GatewayDecision, number: int) -> Annotation:
        step, live = decision.identity.step, decision.forecast
        key, tenant = (step.stats_key, step.agent), tenant_of(step.workflow_id)
        left = live.remaining if live is not None and live.remaining.tokens else None
        keep_s = self.returns.at(key, self._target)
        rank, rank_from = self.ranks.rank(key, left)
        end = live.end if live is not None else None
        if live is not None and end is not None and live.source == "back-off":
            end = shrunk(end, live.evidence)
        return Annotation(
            replace(step, agent=step.sent[1]),
            number,
            sent_id=self.names.of(tenant, unscoped(step.workflow_id)) if tenant else "",
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

    def _left(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        left = self.table.finished(decision.id)
        if left is None:
            return
        step = left.step
        now, course = self._clock(), self._courses[step.workflow]
        course.decisions.discard(decision.id)
        reason = "abort" if answer is None else answer.finish_reason
        output = None if answer is None else answer.output_tokens
        key = step.stats_key, step.agent
        course.last = key, now
        if self._returns is not None:
            self._returns_switch.attempt(self._returns.completed, step, output or 0, reason, now)
        if answer is not None:
            self._learn(decision, answer)
            self.ranks.answered(key)
            if output is not None:
                self.outputs.add(key, float(output))
            self._agents_switch.attempt(self._on_completion, decision, answer)
            if self._returns is not None:
                self._returns_switch.attempt(self._returns.answered, step, reason, answer.tools)
        self.lifecycle.attempt(self.lifecycle.finished, left, reason, output)
        if not step.last:
            self.lifecycle.attempt(self.lifecycle.expected, left.workflow, decision.completed)
        self._decided.append((now, step.workflow, decision.facts()))
        if self._records:
            self._recorder_switch.attempt(self._record_left, decision, answer)
        if step.last:
            self.table.end(step.workflow, EndReason.FINISHED if answer is not None else EndReason.ABORTED)

    def _on_completion(self, decision: GatewayDecision, answer: AnswerReader) -> None:
        if self._next is None or decision.forecast is None:
            return
        step = decision.identity.step
        live = self._next.on_completion(
            step.workflow_type, step.workflow_id, output_tokens=answer.output_tokens, output_text=answer.text
        )
        decision.completed = live
        self.counts.add(FORECASTS, "next-agent", live.source)
        self._shown.add(step, live)
        self.recorder.forecast(decision.id, live)

    def _record(self, decision: GatewayDecision) -> None:
        system_prompt, input_text = decision.request.texts
        step = decision.identity.step
        recorded = self.recorder.begun(decision.id, step, input_text=input_text, system_prompt=system_prompt)
        if recorded is not None:
            decision.recorded = recorded
            self.reportable.began(step, recorded)
        if decision.forecast is not None:
            self.recorder.forecast(decision.id, decision.forecast)

    def _record_left(self, decision: GatewayDecision, answer: AnswerReader | None) -> None:
        self.recorder.completed(
            decision.id,
            output_tokens=None if answer is None else answer.output_tokens,
            finish_reason="abort" if answer is None else answer.finish_reason,
            output_text=None if answer is None else answer.text,
            found=LateColumns(
                None if answer is None else answer.input_tokens,
                None if answer is None else answer.cached_tokens,
                decision.model if answer is None else answer.model or decision.model,
                decision.explained(),
            ),
        )
        if answer is not None and decision.recorded is not None:
            self.reportable.answered(decision.identity.step, answer.response_id, decision.recorded)

    def _prompt_tokens(self, request: ApiRequest) -> int:
        return self.tokens(sum(len(text) for text in request.texts if text), request.model)

    def _learn(self, decision: GatewayDecision, answer: AnswerReader) -> None:
        """The characters of a token of a model."""
        tokens = answer.input_tokens
        characters = sum(len(text) for text in decision.request.texts if text)
        if not tokens or not characters:
            return
        model, ratio = decision.request.model, min(64.0, characters / tokens)
        known = self._ratio.get(model)
        if known is None and len(self._ratio) >= 1000:
            return
        self._ratio[model] = ratio if known is None else known + _NEW * (ratio - known)

    def _ended(self, workflow: Workflow, reason: EndReason) -> None:
        step = workflow.step
        course = self._courses.pop(step.workflow, None)
        if course is not None and course.last is not None:
            agent, answered_at = course.last
            if reason is EndReason.FINISHED:
                self.returns.add(agent, math.inf)
            if course.deadline_at < math.inf and reason is not EndReason.ABORTED:
                self.counts.add(DEADLINES, "met" if answered_at <= course.deadline_at else "missed")
        if self._next is not None:
            self._agents_switch.attempt(self._next.close, step.workflow_type, step.workflow_id, reason)
        if self._returns is not None:
            self._returns_switch.attempt(self._returns.ended, step.workflow, reason)
        how = RECORDED_EXPIRED if reason is EndReason.EXPIRED else RECORDED_FINISHED
        self._recorder_switch.attempt(self.recorder.ended, step.workflow_type, step.workflow_id, how)
        self.lifecycle.attempt(self.lifecycle.ended, workflow, reason)


def _why(facts: Mapping[str, str | float]) -> str:
    """Why a request went where it went, in words."""
    known = [facts.get(name) for name in ("model_reason", "placement_reason")]
    rank, rank_from = facts.get("rank"), facts.get("rank_from")
    by = "" if rank_from == "forecast" else f" ({rank_from})"
    known.append("no priority" if rank is None else f"priority by {rank:.0f} remaining tokens{by}")
    recognised = f"workflow by {facts['workflow_from']}, agent by {facts['agent_from']}"
    return "; ".join(str(one) for one in [*known, recognised] if one)


def _p50_p99(quantiles: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, float]:
    return float(np.interp(0.5, quantiles, values)), float(np.interp(0.99, quantiles, values))
