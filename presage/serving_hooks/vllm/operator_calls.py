"""What operators and the HTTP routes ask of an engine: ends of workflows, answers, status, modes, explanations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from presage.serving_hooks.counts import ERRORS, EVENTS
from presage.serving_hooks.explain import MOST_SHOWN, lengths_as_plain, reasons, return_as_plain
from presage.serving_hooks.forecasting.forecasts import position
from presage.serving_hooks.modes import POLICIES, Mode, Switch
from presage.serving_hooks.problems import with_problems
from presage.serving_hooks.status import (
    EngineStatus,
    ModesStatus,
    PrefetchStatus,
    PromptStatus,
    as_json,
    model_versions,
    of_tenant,
    read_status,
)
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.hooks import Hooks
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import scoped, tenant_of, unscoped, workflow_key

logger = logging.getLogger(__name__)


class OperatorCalls(Hooks):
    """The calls of operators and of the HTTP routes, between two iterations."""

    def workflow_ended(self, workflow_type: str, workflow_id: str) -> bool:
        """Ends a workflow; returns whether it was known."""
        workflow = workflow_key(workflow_type, workflow_id)
        return bool(self._bookkeeping.attempt(self.workflow_table.end, workflow, EndReason.FINISHED))

    def workflow_paused(self, workflow_type: str, workflow_id: str) -> bool:
        """Keeps a workflow until its next request; returns whether it was known."""
        return bool(self._bookkeeping.attempt(self.workflow_table.pause, workflow_key(workflow_type, workflow_id)))

    def step_answered(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        number: int | None,
        finish_reason: str,
        tools: list[str],
        lost: int,
    ) -> bool:
        """The answer of a completed step was parsed: the API's finish reason, and the tools that it calls.

        Returns whether the step is the latest of a running workflow. `lost` answers could not be read or reported since
        the last call.
        """
        if lost:
            self._counts.add(EVENTS, "answers that could not be read", times=lost)
        running = self.workflow_table.get(workflow_key(workflow_type, workflow_id))
        if running is None or (running.step.sent[1], running.step.number) != (agent, number):
            return False
        self._listeners.answer_parsed(running, finish_reason, tools)
        return True

    def latest_answered(
        self, workflow_type: str, workflow_id: str, finish_reason: str | None, tools: Sequence[str] | None
    ) -> None:
        """As `step_answered`, of whichever step is the latest: what a replay knows."""
        running = self.workflow_table.get(workflow_key(workflow_type, workflow_id))
        if running is not None:
            self._listeners.answer_parsed(running, finish_reason, tools)

    def request_answered(
        self, name: str, finish_reason: str | None, tools: Sequence[str] | None, lost: int = 0
    ) -> bool:
        """As `step_answered`, of a request whose workflow is inferred, by the HTTP server's name or vLLM's id of it."""
        if lost:
            self._counts.add(EVENTS, "answers that could not be read", times=lost)
        running = self.identity.answered_last(name) if self.identity is not None else None
        if running is not None:
            self._listeners.answer_parsed(running, finish_reason, tools)
        return running is not None

    def request_answer_text(self, name: str, features: dict[str, str]) -> bool:
        """As `answer_text`, of a request whose workflow is inferred."""
        running = self.identity.answered_last(name) if self.identity is not None else None
        if running is not None:
            self._bookkeeping.attempt(self.step_forecasts.answer_text, running, features)
        return running is not None

    def text_models(self) -> dict[str, dict[str, str]]:
        """By kind the folder and digest of each predictor that reads texts."""
        return self.step_forecasts.texts.models

    def agent_names(self, known: str) -> dict[str, str]:
        """The digest of what the models call agents, and unless the server knows that digest, the names as JSON."""
        names = self.step_forecasts.sources.agent_names
        if names is None:
            return {}
        return {"digest": names.digest} | ({} if names.digest == known else {"names": names.as_json.decode()})

    def answer_text(
        self, workflow_type: str, workflow_id: str, agent: str, number: int | None, features: dict[str, str]
    ) -> bool:
        """The features of the answer of a completed step, by kind of predictor; see `step_texts.py`.

        Returns whether the step is the latest of a running workflow.
        """
        running = self.workflow_table.get(workflow_key(workflow_type, workflow_id))
        if running is None:
            return False
        latest = (running.step.sent[1], running.step.number) == (agent, number)
        self._bookkeeping.attempt(self.step_forecasts.answer_text, running if latest else None, features)
        return latest

    def presage_status(self, tenant: str = "") -> dict[str, Any]:
        """The status as JSON values, at most a second old; for a tenant without names of others."""
        whole = self._answers.answer("status", lambda: as_json(self.engine_status()))
        types = self.workflow_table.types_of(tenant)
        return self._answers.answer(("status", tenant), lambda: with_problems(of_tenant(whole, tenant, types)))

    def workflows(self, tenant: str, first: int, most: int) -> dict[str, Any]:
        """A page of a tenant's workflows, at most a second old."""
        return self._answers.answer((tenant, first, most), lambda: self._overview.workflows(tenant, first, most))

    def agents(self, tenant: str) -> dict[str, Any]:
        """The agents of a tenant, at most a second old."""
        return self._answers.answer(("agents", tenant), lambda: self._overview.agents(tenant))

    def engine_status(self) -> EngineStatus:
        """The status of policies, models and counters, and the number of running workflows."""
        self._presage.attempt(self._note)
        self.catch_up()  # an idle engine has no iterations
        self._renewal.attempt(self._renew)
        eviction = self.block_order.switch if self.block_order is not None else None
        switches = {**self.queue_policies.switches, "eviction": eviction}
        priorities, admission = self.queue_policies.priorities, self.queue_policies.admission
        whole = self._modes.whole
        return replace(
            self._upkept(),
            on={
                name: (of := switches[name]) is not None and of.on and whole[name] is Mode.ON
                for name in ("priority", "eviction", "admission")
            },
            off={**self.left_out, **{switch.name: switch.why_off() for switch in self._failed()}},
            modes=self._modes_status(),
            workflows=len(self.workflow_table),
            data_parallel=self.engine_port.data_parallel,
            model_versions=model_versions(self._models),
            states=self._states.predictor_states,
            state_layer=self._state_layer,
            prefetch=PrefetchStatus(),
            counts=self._counts.by_key(),
            examples={f"{field}: {reason}": key for (field, reason), key in self._counts.examples.items() if key},
            counted=self._counts.by_metric()
            | (admission.counts.by_metric() if admission is not None else {})
            | self._recording.counts.by_metric(),
            ended={reason.value: self.workflow_table.ends[reason] for reason in EndReason},
            prompts=PromptStatus(**self._prompt_tokens),
            evicted=self.block_order.evicted if self.block_order is not None else None,
            ageing=priorities.aged() if priorities is not None else None,
            admission=admission.status() if admission is not None else None,
            tails={name: seconds.status() for name, seconds in self.queue_policies.tails.items()},
            identity=self.identity.status() if self.identity is not None else None,
            one_step=self._overview.one_step(),
            recorder=replace(self._recording.status(), states=self._states.recorder_states),
            webhook=self._webhook.status() if self._webhook is not None else None,
            step_times=replace(file.status(), on=self._timing.on) if (file := self._step_times) is not None else None,
        )

    def set_mode(self, mode: str, policy: str | None, workflow_type: str | None) -> dict[str, Any]:
        """Sets a mode from the next iteration on; returns the modes in force. "on" tries again what has failed.

        Raises:
            ConfigurationError: the mode or policy is unknown.
        """
        self._modes.set(mode, policy, workflow_type)
        if mode == Mode.ON.word and self._parts.off:
            self._parts.end_pauses(policy)
            self._retry()
        types = "all workflow types" if workflow_type is None else "one workflow type"
        logger.warning("mode %s of %s, %s", mode, policy or "all policies", types)
        return self.modes()

    def modes(self) -> dict[str, Any]:
        """The modes in force, as in the status."""
        return asdict(self._modes_status())

    def explain(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        """The forecasts for a workflow, the decisions about it, and their reasons, at most a second old."""
        question = workflow_type, workflow_id
        return self._answers.answer(question, lambda: self._explained(workflow_type, workflow_id))

    def _explained(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        workflow = workflow_key(workflow_type, workflow_id)
        running, admission = self.workflow_table.get(workflow), self.queue_policies.admission
        stats_key = scoped(tenant_of(workflow_id), self.step_forecasts.sources.names.workflow_type(workflow_type))
        explanation = {
            "workflow_type": workflow_type,
            "workflow_id": unscoped(workflow_id),
            "alive": running is not None,
            "modes": {policy: self._modes.of(policy, stats_key).word for policy in POLICIES},
            "forecasts": self._last_forecasts.of(workflow) if self._last_forecasts is not None else [],
            "position": position(self.step_forecasts.sources.next_agents, running) if running else None,
            "returns": self._explain_return(running) if running else None,
            "growth": lengths_as_plain(running.forecasts.growth) if running and running.forecasts.growth else None,
            "in_engine": len(running.requests) if running else 0,
            "requests": self._explain_requests(list(islice(running.requests, MOST_SHOWN))) if running else [],
            "admission": admission.explain(running) if running and admission is not None else None,
            "blocks": self.block_order.explain(workflow) if self.block_order is not None else None,
        }
        return {**explanation, "reasons": reasons(explanation)}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table that grows with requests and workflows, to find leaks."""
        queues = self.queue_policies
        parts = (self.identity, queues.priorities, self.block_order, queues.admission)
        entries = {
            "vLLM requests": len(self.engine_port.requests),
            "waiting": len(self.engine_port.waiting_queues[0]),
            "recent forecasts": len(self._last_forecasts) if self._last_forecasts is not None else 0,
        }
        for part in (self.workflow_table, self.step_forecasts, *parts):
            entries |= part.debug_state() if part is not None else {}
        return entries

    def _failed(self) -> list[Switch]:
        """Parts that are off after a failure, of which some stay so until a restart."""
        for_good = (self._recording.switch, self._timing, self.lifecycle.switch)
        return self._parts.off + [switch for switch in for_good if not switch.on]

    def _modes_status(self) -> ModesStatus:
        shadow = self.queue_policies.shadow
        would = {
            "priority": shadow.counts if shadow is not None else {},
            "eviction": self.block_order.watched if self.block_order is not None else {},
        }
        return replace(self._modes.status(), would={policy: dict(counts) for policy, counts in would.items()})

    def _explain_requests(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        places = self.queue_policies.places(request_ids)
        running = [(self.engine_port.requests[of], self.workflow_table.step(of)) for of in request_ids]
        return [
            {
                "agent": of.step.agent,
                "step": of.step.number,
                "state": engine.state(request),
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": request.num_output_tokens,
                "place": places.get(request.request_id),
                **self.queue_policies.explain(request),
            }
            for request, of in running
            if of is not None
        ]

    def _explain_return(self, workflow: Workflow) -> dict[str, Any] | None:
        away = self._returns.away(workflow) if self._returns is not None else None
        if away is None:
            return None
        return return_as_plain(away[0], max(0.0, type(self).clock() - away[1]), self._retention_target)

    def _upkept(self) -> EngineStatus:
        """The sections of the models' upkeep."""
        try:
            return (read_status(self.upkeep.status()) if self.upkeep is not None else None) or EngineStatus()
        except Exception as error:
            self._counts.add(ERRORS, "status of models", type(error).__name__)
            return EngineStatus()
