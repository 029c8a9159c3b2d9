"""vLLM's schedulers with Presage's policies: `--scheduler-cls presage.serving_hooks.vllm.WorkflowScheduler`.

The policies choose among what vLLM would do anyway: which waiting request runs first, which free block is evicted. They
change no token and start or stop no client's request; admission lets some wait longer.

Deferrable work is done while the model runs: vLLM calls `get_grammar_bitmask` right after it has started the model.
The hooks then record which requests the iteration has started, request forecasts, rank blocks, and decide about
admission and ageing for the next iteration; later events count one iteration later. If vLLM does not make that call, or
nothing runs, this work is done before the next iteration is scheduled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from presage.serving_hooks.counts import ERRORS, EVENTS, FORECASTS, EventCounts
from presage.serving_hooks.explain import LastForecasts, lengths_as_plain, reasons, return_as_plain
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.modes import POLICIES, Evidence, Mode, Modes, Switch
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst
from presage.serving_hooks.policies.wait_bounds import WaitBounds
from presage.serving_hooks.status import ModelStatus
from presage.serving_hooks.vllm import engine, engine_check
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.config import PresageConfig, counted_from_1, read_config
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.hidden_states.steps import StatesOfSteps
from presage.serving_hooks.vllm.observing import Observing
from presage.serving_hooks.vllm.prefetch import Prefetcher
from presage.serving_hooks.vllm.queues import Priorities, QueuePolicies
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.vllm.step_texts import TextsOfSteps
from presage.serving_hooks.vllm.step_times_file import StepTimesFile
from presage.serving_hooks.workflows import EndReason, WorkflowTable
from presage.serving_hooks.workflows.identity import Step, scoped, tenant_of, unscoped, workflow_key
from presage.serving_hooks.workflows.metadata import check, read, warning

engine_check.check()

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402 -- once we know that it is there
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

logger = logging.getLogger(__name__)


class Policies(engine.SchedulerSeam):
    """The policies, as a mixin before a vLLM scheduler class.

    Attributes:
        block_order: eviction; None if it is not configured.
        prefetcher: None if prefetch is not configured or not possible.

    Raises:
        ConfigurationError: `additional_config["presage"]` is invalid.
        EngineError: the scheduler is not a supported one.
    """

    clock: ClassVar[Callable[[], float]] = time.monotonic
    schedules_ahead: ClassVar[bool] = False
    """Whether the model already runs when the output of the previous iteration is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        port = self.engine_port = EnginePort(self)
        engine.log_as_vllm_does()
        config = read_config(port.config.additional)
        self._retention_target = config.retention_target
        self._state_layer = counted_from_1(config.state_layer, port.config.layers)
        forecasts = self.forecasts(config)
        self._models, self.upkeep, self._returns = forecasts.models, forecasts.upkeep, forecasts.returns
        self._unnoted: tuple[Any, float] | None = None
        self._prepared = False
        self._counts = EventCounts(FORECASTS)
        self._warned = 0
        # Prompt tokens of steps that have started: all, and those found in the cache and by a connector.
        self._prompt_tokens = {"tokens": 0, "local_tokens": 0, "external_tokens": 0}
        self.workflow_table = WorkflowTable(config.time_to_live_s, type(self).clock, self._counts, config.max_workflows)
        self._observing = Observing(port, config.recorder, self.workflow_table, self._counts, self._state_layer)
        self._evidence = Evidence(config.evidence, lambda: self._modes.changed()) if config.evidence else None
        self._last_forecasts = LastForecasts(config.explain, type(self).clock) if config.explain else None
        given, suffices = config.modes(), self._evidence.suffices if self._evidence is not None else None
        self._modes = Modes(given.default, given.policies, given.workflow_types, suffices)
        self.step_forecasts = StepForecasts(
            self.workflow_table,
            forecasts,
            config.score_settings(),
            self._counts,
            self._modes,
            type(self).clock,
            record=self._observing.forecast if config.recorder is not None else None,
            evidence=self._evidence,
            last=self._last_forecasts,
        )
        prefetch, caches = Switch("prefetch", self._counts), port.caches_prefixes
        eviction = Switch("eviction", self._counts, takes=(prefetch,))
        admission = Switch("admission", self._counts) if config.admission and caches else None
        takes = (eviction,) if admission is None else (eviction, admission)
        self._bookkeeping = Switch("bookkeeping of workflows", self._counts, takes=takes)
        priority = Switch("priority", self._counts) if config.priority else None
        self._presage = Switch("presage", self._counts, takes=tuple(filter(None, (self._bookkeeping, priority))))
        self._withdrawn = False
        self._wait_bounds = WaitBounds(config.objectives_settings())
        self.queue_policies = QueuePolicies(
            port,
            self._modes,
            self.workflow_table,
            priority,
            admission,
            self._wait_bounds,
            type(self).clock,
            partial(self.make_priorities, config, forecasts.medians),
            partial(self.make_admission, config),
        )
        self.workflow_table.subscribe(self.queue_policies.ended)
        self.block_order = self.make_block_order(config, eviction) if config.eviction and caches else None
        self.prefetcher = self._make_prefetcher(config, prefetch) if config.prefetch else None
        for owner in (self.prefetcher, self.block_order):  # prefetch first: it gives its blocks back
            if owner is not None:
                self.workflow_table.subscribe(owner.ended)
        self._apply_modes()
        recorded = config.recorder.states if config.recorder is not None else "off"
        self._states = StatesOfSteps(
            port, forecasts, self.step_forecasts, self.workflow_table, self._observing, recorded
        )
        self._texts = TextsOfSteps(forecasts, self.step_forecasts, self._counts, config.texts)
        self._timing, file = Switch("step times", self._counts), config.step_times_file
        self._step_times = StepTimesFile(Path(file), port.described()) if file is not None else None
        self._renewal = Switch("reload of models", self._counts)
        if self.upkeep is not None:
            self._renewal.attempt(self.upkeep.start)

    def forecasts(self, config: PresageConfig) -> Forecasts:
        """The sources of forecasts; called once."""
        from presage.serving_hooks.forecasting.champions import load_forecasts  # only if used

        texts = ("next-agent", "remaining-length") if config.texts else ()
        return load_forecasts(config, self.engine_port.config.served_model, self._state_layer, texts)

    # What vLLM calls. An exception of ours never reaches it: whatever no switch of a policy has caught switches all of
    # Presage off, and vLLM gets its own queues and free blocks back before it schedules again.

    def add_request(self, request: EngineRequest) -> None:
        """Adds a request, or the next part of a streamed input."""
        comes = self._presage.attempt(self._comes, request)
        super().add_request(request)  # type: ignore[misc]
        if comes:
            self._presage.attempt(self.queue_policies.queued, request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedules one iteration."""
        if not self._presage.on:
            self._withdraw()
        called_at = type(self).clock()
        began_at = self._presage.attempt(self._before_iteration)
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if began_at is not None:
            self._unnoted = output, began_at
        if self._step_times is not None:
            self._timing.attempt(self._scheduled, self._step_times, output, called_at)
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """vLLM's own; does the deferred work first, as the model is running or about to run."""
        grammar = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        self._presage.attempt(self._beside_model)
        return grammar

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Processes the output of an iteration: reads hidden states, then removes internal requests."""
        now = type(self).clock()
        self._presage.attempt(self._before_update, scheduler_output, model_runner_output, now)
        answers = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.schedules_ahead and self._presage.on:
            self._bookkeeping.attempt(self.step_forecasts.flush)
        if self.prefetcher is not None:
            self.prefetcher.done(scheduler_output, answers)
        if self._step_times is not None:
            self._timing.attempt(self._step_times.updated, scheduler_output, now, self.engine_port.busy)
        return answers

    def has_requests(self) -> bool:
        """Whether the engine has anything to do."""
        return bool(super().has_requests()) or bool(self._presage.attempt(self._has_internal_work))  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Aborts prefetches, whose blocks would prevent the reset, then calls vLLM's own."""
        if self.prefetcher is not None:
            self.prefetcher.drop()
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, without internal requests."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if self.prefetcher is not None:
            self._presage.attempt(self.prefetcher.hide_from_stats, stats)
        return stats

    def request_leaves(self, request: EngineRequest) -> None:
        """A request has finished or was aborted; vLLM still knows it.

        Its iteration may not be noted yet: vLLM aborts between two calls of ours, also right after `schedule`.
        """
        self._presage.attempt(self._note)

    def request_left(self, request: EngineRequest) -> None:
        """A request has finished or was aborted, and vLLM has freed it."""
        super().request_left(request)
        self._presage.attempt(self._leaves, request)

    def shutdown(self) -> None:
        """Writes what the recorder has buffered and closes the file of step times, then calls vLLM's own."""
        self._observing.close()
        if self._step_times is not None:
            self._timing.attempt(self._step_times.close)
        if self.upkeep is not None:
            self._renewal.attempt(self.upkeep.close)
        super().shutdown()  # type: ignore[misc]

    # What operators and the routes call.

    def workflow_ended(self, workflow_type: str, workflow_id: str) -> bool:
        """Ends a workflow; returns whether it was known."""
        workflow = workflow_key(workflow_type, workflow_id)
        return bool(self._bookkeeping.attempt(self.workflow_table.end, workflow, EndReason.FINISHED))

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
        self._bookkeeping.attempt(self.step_forecasts.answered, running.step.workflow, finish_reason, tools)
        self._observing.answered(running.step.workflow, tools)
        return True

    def text_models(self) -> dict[str, dict[str, str]]:
        """By kind the folder and digest of each predictor that reads texts."""
        return self._texts.models

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
        self._bookkeeping.attempt(self._texts.answered, running.step.workflow if latest else None, features)
        return latest

    def presage_status(self) -> dict[str, Any]:
        """The status of policies, models and counters, and the number of running workflows."""
        self._presage.attempt(self._note)
        self._bookkeeping.attempt(self.step_forecasts.flush)
        self._renewal.attempt(self._renew)  # an idle engine has no iterations
        eviction = self.block_order.switch if self.block_order is not None else None
        switches = {**self.queue_policies.switches, "eviction": eviction}
        priorities, admission = self.queue_policies.priorities, self.queue_policies.admission
        whole = self._modes.whole
        models = {kind: ModelStatus(model) if isinstance(model, str) else model for kind, model in self._models.items()}
        return {
            "on": {
                name: (of := switches[name]) is not None and of.on and whole[name] is Mode.ON
                for name in ("priority", "eviction", "admission")
            },
            "modes": self.modes(),
            "workflows": len(self.workflow_table),
            "data_parallel": self.engine_port.data_parallel,
            "expired": self.workflow_table.ends[EndReason.EXPIRED],
            "models": {kind: str(model) for kind, model in models.items()},
            "model_versions": {kind: asdict(model) for kind, model in models.items()},
            "states": self._states.predictor_states,
            "state_layer": self._state_layer,
            "prefetch": {"on": False} if self.prefetcher is None else self.prefetcher.status(),
            "counts": self._counts.by_key(),
            "examples": {f"{field}: {reason}": key for (field, reason), key in self._counts.examples.items() if key},
            "counted": self._counts.by_metric()
            | (admission.counts.by_metric() if admission is not None else {})
            | self._observing.counts.by_metric(),
            "ended": sum(n for reason, n in self.workflow_table.ends.items() if reason is not EndReason.EXPIRED),
            "prompts": dict(self._prompt_tokens),
            "given_up": self.block_order.given_up if self.block_order is not None else None,
            "ageing": priorities.aged() if priorities is not None else None,
            "admission": admission.status() if admission is not None else None,
            "tails": {name: seconds.status() for name, seconds in self.queue_policies.tails.items()},
            "recorder": {**self._observing.status(), "states": self._states.recorder_states},
            **self._upkept(),
            **({"step_times": {"on": self._timing.on, **file.status()}} if (file := self._step_times) else {}),
        }

    def set_mode(self, mode: str, policy: str | None, workflow_type: str | None) -> dict[str, Any]:
        """Sets a mode from the next iteration on; returns the modes in force.

        Raises:
            ConfigurationError: the mode or policy is unknown.
        """
        self._modes.set(mode, policy, workflow_type)
        types = "all workflow types" if workflow_type is None else "one workflow type"
        logger.warning("mode %s of %s, %s", mode, policy or "all policies", types)
        return self.modes()

    def modes(self) -> dict[str, Any]:
        """The modes in force, what policies in shadow would have done, and the evidence for forecasts."""
        shadow = self.queue_policies.shadow
        would = {
            "priority": shadow.counts if shadow is not None else {},
            "eviction": self.block_order.watched if self.block_order is not None else {},
        }
        return {
            **self._modes.status(),
            "would": {policy: dict(counts) for policy, counts in would.items()},
            "evidence": self._evidence.status() if self._evidence is not None else None,
        }

    def explain(self, workflow_type: str, workflow_id: str) -> dict[str, Any]:
        """The forecasts for a workflow, the decisions about it, and their reasons; see explain.py."""
        workflow = workflow_key(workflow_type, workflow_id)
        running, admission = self.workflow_table.get(workflow), self.queue_policies.admission
        stats_key = scoped(tenant_of(workflow_id), self.step_forecasts.sources.names.workflow_type(workflow_type))
        explanation = {
            "workflow_type": workflow_type,
            "workflow_id": unscoped(workflow_id),
            "alive": running is not None,
            "modes": {policy: self._modes.of(policy, stats_key).word for policy in POLICIES},
            "forecasts": self._last_forecasts.of(workflow) if self._last_forecasts is not None else [],
            "returns": self._explain_return(workflow),
            "growth": lengths_as_plain(growth) if (growth := self.step_forecasts.growth(workflow)) else None,
            "requests": [self._explain(name, step) for name, step in running.requests.items()] if running else [],
            "admission": admission.explain(workflow) if admission is not None else None,
            "blocks": self.block_order.explain(workflow) if self.block_order is not None else None,
        }
        return {**explanation, "reasons": reasons(explanation)}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table that grows with requests and workflows, to find leaks."""
        queues = self.queue_policies
        parts = (queues.priorities, self.block_order, queues.admission, self.prefetcher)
        found = {
            "vLLM requests": len(self.engine_port.requests),
            "waiting": len(self.engine_port.waiting_queues[0]),
            "recent forecasts": len(self._last_forecasts) if self._last_forecasts is not None else 0,
            "evidence": len(self._evidence.tracker) if self._evidence is not None else 0,
        }
        found |= getattr(self._returns, "debug_state", dict)()
        for part in (self.workflow_table, self.step_forecasts, self._observing, *parts):
            found |= part.debug_state() if part is not None else {}
        return found

    # Between two iterations.

    @property
    def _acts(self) -> bool:
        return self.queue_policies.active or self.step_forecasts.retention is not None or self._observing.on

    def _withdraw(self) -> None:
        """Gives vLLM its own queues and free blocks back, once Presage is off. Between two iterations only."""
        if self._withdrawn:
            return
        self._withdrawn, self._unnoted, self._step_times = True, None, None
        if self.prefetcher is not None:
            self.prefetcher.drop()
        for restore in (self.queue_policies.withdraw, partial(self._apply_to_blocks, Mode.OFF)):
            try:
                restore()
            except Exception as error:
                self._counts.add(ERRORS, "presage", type(error).__name__)

    def _before_iteration(self) -> float | None:
        """Does what is left to do before vLLM schedules; returns when that began, None if no policy acts."""
        self._follow_modes()
        self._note()
        if not self._prepared or not self.engine_port.running:  # nothing runs: do the deferred work now
            self._prepare()
        self._prepared = False
        if not self._acts:
            return None
        began_at = type(self).clock()
        self.queue_policies.before()
        if self.prefetcher is not None:
            self.prefetcher.before()
        return began_at

    def _beside_model(self) -> None:
        self._note()
        self._prepare()
        self._prepared = True

    def _before_update(self, output: Iteration, computed: Any, now: float) -> None:
        self._note()
        self.queue_policies.updated(output, now)
        self._bookkeeping.attempt(self._states.read, output, computed)

    def _has_internal_work(self) -> bool:
        if self.prefetcher is None:
            return False
        self._bookkeeping.attempt(self.step_forecasts.flush)  # an idle engine has no iterations
        return self.prefetcher.wants()

    def _note(self) -> None:
        """Processes the requests that the last iteration has started, if that is not done yet."""
        if self._unnoted is None:
            return
        output, began_at = self._unnoted
        self._unnoted = None
        if self.block_order is not None:
            self.block_order.settle()
        self._observing.scheduled(output)
        self._bookkeeping.attempt(self._begun, output)
        self.queue_policies.started(output, began_at)
        if self.prefetcher is not None:
            self.prefetcher.after(output)
        if self.queue_policies.shadow is not None:
            new = [new.req_id for new in output.scheduled_new_reqs]
            self._bookkeeping.attempt(self.queue_policies.shadow.begun, new)
        self.queue_policies.selected(output)

    def _begun(self, output: Iteration) -> None:
        for request_id in output.preempted_req_ids or ():
            self.step_forecasts.preempted(request_id)
        for request_id in self.engine_port.resumed(output):
            self.step_forecasts.resumed(request_id)
        for request, found in self.engine_port.found_blocks(output):
            if self.prefetcher is not None and self.prefetcher.begins(request.request_id, found):
                continue
            if self.block_order is not None and self.step_forecasts.retention is not None:
                self.block_order.begins(request.request_id, found)
            if self.workflow_table.step(request.request_id) is not None:
                for found_in, tokens in zip(self._prompt_tokens, engine.prompt_by_tier(request), strict=True):
                    self._prompt_tokens[found_in] += tokens
            text = self._texts.started(request)
            self.step_forecasts.started(request.request_id, request.num_prompt_tokens, text)

    def catch_up(self) -> None:
        """Expires workflows and passes the latest forecasts to the block order; for iterations that skip `schedule`."""
        self._bookkeeping.attempt(self.workflow_table.expire)
        self._bookkeeping.attempt(self.step_forecasts.flush)

    def _prepare(self) -> None:
        """Does the work for the next iteration."""
        self.catch_up()
        if self._acts:
            self._renewal.attempt(self._renew)
            self.queue_policies.prepare()

    def _renew(self) -> None:
        if self.upkeep is not None and self.upkeep.renew():
            self._states.renew()
            self._texts.renew()

    def _scheduled(self, file: StepTimesFile, output: Iteration, began_at: float) -> None:
        port = self.engine_port
        decoded, prefilled = port.iteration_tokens(output)
        pairs = port.attention_pairs(output) if prefilled else 0
        file.scheduled(output, (prefilled, decoded, port.context_tokens(output), pairs), began_at)

    # Of one request.

    def _comes(self, request: EngineRequest) -> bool:
        """A request is about to be added; returns whether it is a new one and any policy acts."""
        self._follow_modes()
        if not self._acts or request.request_id in self.engine_port.requests:
            return False
        self._bookkeeping.attempt(self._arrives, request)
        step = self.workflow_table.step(request.request_id)
        stats_key, remaining = step.stats_key if step else "", None
        if self._modes.of("priority", stats_key) or self._modes.of("admission", stats_key):
            text = self._bookkeeping.attempt(self._texts.arrived, request) or {}
            remaining = self.step_forecasts.remaining_tokens(request.request_id, request.num_prompt_tokens, text)
        self.queue_policies.arrives(request, step, remaining)
        return True

    def _leaves(self, request: EngineRequest) -> None:
        if self.prefetcher is not None:
            self.prefetcher.left(request, self.workflow_table.step(request.request_id))
        completed, reason = engine.completed(request), self.finish_reason(request)
        state_comes = completed and bool(self._bookkeeping.attempt(self._states.completed, request.request_id))
        step = self.workflow_table.choices.leaves(request.request_id, completed, request.num_output_tokens, reason)
        if step is not None:  # the recorder knows the step by the request that began it
            self._observing.left(request, step, state_comes and step.request_id == request.request_id)
        self._bookkeeping.attempt(self.step_forecasts.finished, request.request_id, step)
        self.queue_policies.left(request, completed)

    def _arrives(self, request: EngineRequest) -> None:
        sent = request.sampling_params.extra_args if request.sampling_params is not None else None
        step: Step | None = read(sent, request.session_id, self._counts, self.step_forecasts.sources.names)
        running = self.workflow_table.get(step.workflow) if step is not None else None
        if step is not None and running is not None and running.step.workflow_type != step.workflow_type:
            step = replace(step, workflow_type=running.step.workflow_type)  # newer models fold otherwise
        check(sent, request.session_id, self._counts)
        for (field, reason), key in islice(self._counts.examples.items(), self._warned, None):
            self._warned += 1
            logger.warning("%s", warning(field, reason, key))
        if step is not None and engine.hands_over(request):  # its one token would be learnt as its whole output
            self._counts.add(EVENTS, "steps that another engine answers")
        elif step is not None:
            self.step_forecasts.arrived(request.request_id, step, request.num_prompt_tokens)
            if self.prefetcher is not None:
                self.prefetcher.arrives(step, request)

    def _step_of(self, request_id: str) -> Step | None:
        step = self.workflow_table.step(request_id)
        return self.prefetcher.step(request_id) if step is None and self.prefetcher is not None else step

    def _add_internal(self, request: EngineRequest) -> None:
        self.queue_policies.arrives_internally(request)
        super().add_request(request)  # type: ignore[misc]

    def _explain(self, request_id: str, step: Step) -> dict[str, Any]:
        request = self.engine_port.requests[request_id]
        return {
            "agent": step.agent,
            "step": step.number,
            "state": engine.state(request),
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            **self.queue_policies.explain(request),
        }

    def _explain_return(self, workflow: str) -> dict[str, Any] | None:
        found = self._returns.away(workflow) if self._returns is not None else None
        if found is None:
            return None
        return return_as_plain(found[0], max(0.0, type(self).clock() - found[1]), self._retention_target)

    # Modes. A setting for a workflow type applies to a running workflow from its next event on.

    def _follow_modes(self) -> None:
        """Applies changed modes. Between two iterations only."""
        if self._modes.changes != self._modes_applied:
            self._bookkeeping.attempt(self._apply_modes)

    def _apply_modes(self) -> None:
        self._modes_applied = self._modes.changes
        self._apply_to_blocks(self._modes.whole["eviction"])
        self.queue_policies.apply_modes()

    def _apply_to_blocks(self, mode: Mode) -> None:
        scored = self.block_order
        if scored is None:
            return
        attends = self.engine_port.free_queue is scored
        if mode is Mode.OFF and attends:
            if self.prefetcher is not None:
                self.prefetcher.drop()
                self.prefetcher.begin()
            self.engine_port.restore_blocks(scored.vllm_queue)
        elif mode is not Mode.OFF and not attends:
            scored.switch.attempt(scored.begin)
            self.engine_port.order_blocks(scored)
        scored.acts = mode is Mode.ON
        self.step_forecasts.retention = None if mode is Mode.OFF else self.prefetcher or scored

    # Parts. Subclasses may replace the public ones.

    def finish_reason(self, request: EngineRequest) -> str | None:
        """Why a request has left, as traces name it."""
        return engine.finish_reason(request)

    def make_block_order(self, config: PresageConfig, switch: Switch) -> ScoredBlocks:
        """The order of free blocks; called once if eviction is configured."""
        port = self.engine_port
        settings, clock = config.eviction_settings(), type(self).clock
        return ScoredBlocks(port.free_queue, port.blocks, settings, self._step_of, switch, clock)

    def make_priorities(self, config: PresageConfig, medians: Mapping[str, float], switch: Switch) -> Priorities:
        """Priority; called whenever it is switched on."""
        policy = ShortestTotalJobFirst(config.priority_settings(), medians)
        return Priorities(policy, medians, self.engine_port.by_priority, switch)

    def make_admission(self, config: PresageConfig, switch: Switch) -> AdmissionController:
        """Admission; called whenever it is switched on."""
        return AdmissionController(
            config.admission_settings(),
            config.held_at_most_s,
            self.engine_port,
            type(self).clock,
            switch,
            self._modes,
            self._wait_bounds,
            self.step_forecasts.held,
            self.step_forecasts.growth,
            self.step_forecasts.earlier,
        )

    def _make_prefetcher(self, config: PresageConfig, switch: Switch) -> Prefetcher | None:
        if self.block_order is None:
            return None
        reason = self.engine_port.why_no_prefetch()
        if reason is not None:
            logger.warning("prefetch is off on this engine: %s", reason)
            return None
        return Prefetcher(
            self.engine_port,
            self._add_internal,
            self.block_order,
            config.prefetch_settings(),
            config.prefetch_memory_mb * 2**20,
            switch,
            type(self).clock,
            self._modes,
            self.step_forecasts.returning if config.eviction_rule == "next-use" else None,
        )

    def _upkept(self) -> Mapping[str, Any]:
        try:
            return self.upkeep.status() if self.upkeep is not None else {}
        except Exception as error:
            self._counts.add(ERRORS, "status of models", type(error).__name__)
            return {}


class SyncWorkflowScheduler(Policies, Scheduler):  # type: ignore[misc]
    """For engines without asynchronous scheduling, where `WorkflowScheduler` constructs it."""


class WorkflowScheduler(Policies, AsyncScheduler):  # type: ignore[misc]
    """The scheduler for `--scheduler-cls`.

    vLLM schedules ahead only with a scheduler derived from its asynchronous one, but decides whether the engine can do
    so only after it has seen the class. So this class is the asynchronous one, and constructs a `SyncWorkflowScheduler`
    where the engine cannot schedule ahead.
    """

    schedules_ahead = True

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Constructs a `SyncWorkflowScheduler` if the engine does not schedule ahead."""
        if cls is WorkflowScheduler and not vllm_config.scheduler_config.async_scheduling:
            return SyncWorkflowScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)
