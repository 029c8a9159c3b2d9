"""The parts of the hooks in one engine, made from its settings, and what they do between two iterations.

Deferrable work is done while the model runs: vLLM calls `get_grammar_bitmask` right after it has started the model.
The hooks then record which requests the iteration has started, request forecasts, rank blocks, and decide about
admission and ageing for the next iteration; later events count one iteration later. If vLLM does not make that call, or
nothing runs, this work is done before the next iteration is scheduled.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from presage.serving_hooks.counts import ERRORS, FORECASTS, EventCounts
from presage.serving_hooks.explain import LastForecasts, RecentAnswers
from presage.serving_hooks.forecasting.forecasts import Forecasts
from presage.serving_hooks.lifecycle.emitter import LifecycleEvents
from presage.serving_hooks.lifecycle.webhook import Webhook
from presage.serving_hooks.listeners import Found, Listeners
from presage.serving_hooks.listeners.lifecycle import LifecycleListener
from presage.serving_hooks.listeners.overview import Overview
from presage.serving_hooks.listeners.recording import Recording
from presage.serving_hooks.modes import Mode, Modes, Parts, Retry, Switch, nothing_to_renew
from presage.serving_hooks.policies.priority import ShortestTotalJobFirst
from presage.serving_hooks.policies.wait_bounds import WaitBounds
from presage.serving_hooks.recorder.config import RecorderConfig
from presage.serving_hooks.recorder.recorder import NoRecorder, StepRecorder, start
from presage.serving_hooks.status import EngineStatus, as_json
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.config import PresageConfig, counted_from_1, read_config
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.hidden_states.steps import RequestStates
from presage.serving_hooks.vllm.inferred import InferredIdentity
from presage.serving_hooks.vllm.queues import Priorities, QueuePolicies
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.vllm.step_texts import RequestTexts
from presage.serving_hooks.vllm.step_times_file import StepTimesFile
from presage.serving_hooks.workflows import Workflow, WorkflowTable
from presage.serving_hooks.workflows.identity import Step

logger = logging.getLogger(__name__)

_MOST_CLEARED: Final = 500
"""Workflows that are ended before one iteration, after a failure."""


class Hooks(engine.SchedulerSeam):
    """The parts of the hooks, as a mixin before a vLLM scheduler class.

    Attributes:
        lifecycle: events of workflows, for whoever subscribes.
        block_order: eviction; None if it is not configured.
        left_out: policies for which vLLM could not be changed, and why.

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
        self.identity = self._make_identity(config.retry_s) if config.infer_workflows and port.caches_prefixes else None
        self._recording = self._make_recording(config.recorder)
        self._last_forecasts = LastForecasts(config.explain, type(self).clock) if config.explain else None
        self._answers = RecentAnswers(type(self).clock)
        given = config.modes()
        self._modes = Modes(given.default, given.policies, given.workflow_types)
        self.left_out = port.cannot_lay()
        for policies, reason in self.left_out.items():
            logger.warning("this engine starts without the policies of %s: %s", policies, reason)
        retry = Retry(type(self).clock, config.retry_s)
        switch = partial(Switch, counts=self._counts, retry=retry)
        caches, orders = port.caches_prefixes, "queues" not in self.left_out
        eviction = switch("eviction")
        admission = switch("admission") if config.admission and caches and orders else None
        takes = (eviction,) if admission is None else (eviction, admission)
        self._bookkeeping = switch("bookkeeping of workflows", takes=takes)
        priority = switch("priority") if config.priority and orders else None
        self._presage = switch("presage", takes=tuple(filter(None, (self._bookkeeping, priority))))
        self._withdrawn = False
        self.step_forecasts = StepForecasts(
            self.workflow_table,
            forecasts,
            config.score_settings(),
            self._counts,
            self._modes,
            type(self).clock,
            switch=self._bookkeeping,
            texts=RequestTexts(forecasts, self._counts, config.texts),
            record=self._recording.forecast if config.recorder is not None else None,
            last=self._last_forecasts,
        )
        self.lifecycle = LifecycleEvents("engine", self._returns, self._counts)
        self._lifecycle_listener = LifecycleListener(self.lifecycle)
        self._overview = Overview(
            self.workflow_table, self._counts, lambda _: port.config.served_model, lambda: type(self).clock()
        )
        self._webhook = Webhook(config.webhook) if config.webhook is not None else None
        self._wait_bounds = WaitBounds(config.objectives_settings())
        self._listeners: Listeners[EngineRequest] = Listeners()
        self.queue_policies = QueuePolicies(
            port,
            self._presage,
            self._modes,
            self.workflow_table,
            self._listeners,
            priority,
            admission,
            self._wait_bounds,
            type(self).clock,
            partial(self.make_priorities, config, forecasts.medians),
            partial(self.make_admission, config),
        )
        evicts = config.eviction and caches and "eviction" not in self.left_out
        self.block_order = self.make_block_order(config, eviction) if evicts else None
        if self.block_order is not None:
            self.block_order.rank = partial(self._bookkeeping.attempt, self.step_forecasts.pass_on)
        self._apply_to_blocks(self._modes.whole["eviction"])  # whether states are read depends on it
        recorded = config.recorder.states if config.recorder is not None else "off"
        self._states = RequestStates(
            port, forecasts, self.step_forecasts, self.workflow_table, self._recording, recorded
        )
        # In this order: a request is known before anything is done for it, a step is recorded before its forecast, the
        # queues rank by what was forecast, and lifecycle events tell of it. Admission follows while it is on.
        for listener in (
            self.identity,
            self._states,
            self._recording if self._recording.on else None,
            self.block_order,
            self.step_forecasts,
            self.queue_policies,
            self._lifecycle_listener,
            self._overview,
        ):
            if listener is not None:
                self._listeners.add(listener)
        self.workflow_table.subscribe(lambda workflow, reason: self._listeners.workflow_ended(workflow, reason))
        self._apply_modes()
        self._timing, file = Switch("step times", self._counts), config.step_times_file
        self._step_times = StepTimesFile(Path(file), port.described()) if file is not None else None
        self._renewal = switch("reload of models")
        renewals: dict[Switch, Callable[[], bool]] = {
            self._presage: self._return,
            self._bookkeeping: partial(self.workflow_table.clear_some, _MOST_CLEARED),
            eviction: partial(self._begin_anew, self.block_order),
            self._renewal: nothing_to_renew,
            **dict.fromkeys(self.step_forecasts.sources_switches, nothing_to_renew),
        }
        if priority is not None:
            renewals[priority] = self.queue_policies.drop_priorities
        if admission is not None:
            renewals[admission] = self.queue_policies.drop_admission
        if self.identity is not None:
            renewals[self.identity.switch] = partial(self._begin_anew, self.identity)
        self._parts = Parts(renewals)
        as_json(EngineStatus())  # builds the schema now, and not between two iterations
        if self.upkeep is not None:
            self._renewal.attempt(self.upkeep.start)
        if self._webhook is not None:
            self.lifecycle.subscribe(self._webhook.start())

    def forecasts(self, config: PresageConfig) -> Forecasts:
        """The sources of forecasts; called once."""
        from presage.serving_hooks.forecasting.champions import load_forecasts  # only if used

        texts = ("next-agent", "remaining-length") if config.texts else ()
        return load_forecasts(config, self.engine_port.config.served_model, self._state_layer, texts)

    # Between two iterations.

    @property
    def _acts(self) -> bool:
        policies = self.queue_policies.active or self.step_forecasts.retention is not None
        return policies or self._recording.on or self.lifecycle.on

    def _withdraw(self) -> None:
        """Gives vLLM its own queues and free blocks back, once Presage is off. Between two iterations only."""
        if self._withdrawn:
            return
        self._withdrawn, self._unnoted, self._step_times = True, None, None
        for restore in (self.queue_policies.withdraw, partial(self._apply_to_blocks, Mode.OFF)):
            try:
                restore()
            except Exception as error:
                self._counts.add(ERRORS, "presage", type(error).__name__)

    def _note(self) -> None:
        """Processes the requests that the last iteration has started, if that is not done yet."""
        if self._unnoted is None:
            return
        output, began_at = self._unnoted
        self._unnoted = None
        self._bookkeeping.attempt(self._tell_of_requests, output)
        self._listeners.iteration(output, began_at)

    def _tell_of_requests(self, output: Iteration) -> None:
        table = self.workflow_table
        for request_id in output.preempted_req_ids or ():
            if (step := table.step(request_id)) is not None:
                self._listeners.request_preempted(step)
        for request_id in self.engine_port.resumed(output):
            if (step := table.step(request_id)) is not None:
                self._listeners.request_resumed(step)
        for request, cached in self.engine_port.first_found(output):
            if self._is_own(request.request_id):
                continue
            step = table.step(request.request_id)
            if step is not None:
                for found_in, tokens in zip(self._prompt_tokens, engine.prompt_by_tier(request), strict=True):
                    self._prompt_tokens[found_in] += tokens
            self._listeners.request_scheduled(request, step, cached)

    def catch_up(self) -> None:
        """Expires workflows, reads answers and passes the latest forecasts to the block order.

        Also for iterations that skip `schedule`.
        """
        if self.identity is not None:
            self.identity.catch_up()
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
            self.step_forecasts.texts.renew()

    # Parts that have failed.

    def _retry(self) -> None:
        """Makes parts anew that have failed, once their pause is over. Between two iterations only."""
        if self._parts.retry(type(self).clock()):
            self._modes.changed()  # all are told anew what they are to do

    def _return(self) -> bool:
        self._withdrawn, self._prepared, self._unnoted = False, False, None
        return True

    @staticmethod
    def _begin_anew(part: ScoredBlocks | InferredIdentity | None) -> bool:
        if part is not None:
            part.begin()
        return True

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
            self.engine_port.restore_blocks(scored.vllm_queue)
        elif mode is not Mode.OFF and not attends:
            scored.switch.attempt(scored.begin)
            self.engine_port.order_blocks(scored)
        scored.in_use, scored.acts = mode is not Mode.OFF, mode is Mode.ON
        self.step_forecasts.retention = None if mode is Mode.OFF else scored

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
            self._held,
            self.step_forecasts.earlier,
        )

    def _held(self, workflow: Workflow, most_s: float | None) -> None:
        """Admission holds a workflow for at most so long, or admits it (None)."""
        self.step_forecasts.held(workflow, most_s)
        self._lifecycle_listener.held(workflow, most_s)

    @staticmethod
    def identity_key() -> bytes:
        """The key of the hashes from which identity is inferred; called once if it is."""
        return secrets.token_bytes(32)

    def _make_recording(self, config: RecorderConfig | None) -> Recording[EngineRequest]:
        port, text = self.engine_port, config is not None and config.text == "on"
        recorder: StepRecorder = NoRecorder()
        if config is not None:
            decode = port.config.decoder() if text else None
            recorder = start(config, model=port.config.served_model, state_layer=self._state_layer, decode=decode)

        def begun(request: EngineRequest, found: Found) -> dict[str, Any]:
            prompt = list(request.prompt_token_ids) if text and request.prompt_token_ids else None
            return {
                "input_tokens": request.num_prompt_tokens,
                "cached_input_tokens": found.tokens,
                "input_text": prompt,
                **(self.identity.recorded(request.request_id) if self.identity is not None else {}),
            }

        def completed(request: EngineRequest) -> dict[str, Any]:
            return {"output_text": list(request.output_token_ids) if text else None}

        return Recording(recorder, self.workflow_table.choices, self._counts, begun, completed)

    def _make_identity(self, retry_s: float) -> InferredIdentity:
        kind = type(self)
        return InferredIdentity(
            self.engine_port, self.workflow_table, self._counts, kind.clock, kind.identity_key(), retry_s
        )

    # Requests of Presage's own, which some guest may send.

    def add_behind_all(self, request: EngineRequest) -> None:
        """Queues a request of Presage's own behind all others; no listener hears of its arrival."""
        self.queue_policies.queue_last(request)
        super().add_request(request)  # type: ignore[misc]

    def _is_own(self, request_id: str) -> bool:
        return False

    def _step_of(self, request_id: str) -> Step | None:
        running = self.workflow_table.step(request_id)
        return running.step if running is not None else None
