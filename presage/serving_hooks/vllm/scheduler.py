"""vLLM's schedulers with the policies in them: `--scheduler-cls presage.serving_hooks.vllm.WorkflowScheduler`.

The policies choose among what vLLM would do anyway: which waiting request first, which free block to give up. They
change no token, start and stop no request of a client; admission lets some wait longer. Each can be switched off by
configuration, and switches itself off when it fails.

What can wait is done while the model runs. vLLM asks for the grammar of an iteration as soon as the model has been
started on it: then is the time to note what the iteration has begun, to ask for forecasts, to rank blocks by them, and
to decide who is admitted and who has aged before the next. What comes later is thus told one iteration later. Where
vLLM does not ask, or nothing runs, all of this is done before the next iteration is scheduled.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

from presage.serving_hooks.counts import ERRORS, FORECASTS, EventCounts
from presage.serving_hooks.status import ModelStatus
from presage.serving_hooks.vllm import engine, engine_check
from presage.serving_hooks.vllm.admission import AdmissionController
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.config import PresageConfig, counted_from_1, read_config
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.explain import LastForecasts, plain, reasons
from presage.serving_hooks.vllm.forecasts import Forecasts
from presage.serving_hooks.vllm.hidden_states.steps import StatesOfSteps
from presage.serving_hooks.vllm.metadata import read
from presage.serving_hooks.vllm.modes import POLICIES, Evidence, Mode, Modes, Switch
from presage.serving_hooks.vllm.observing import Observing
from presage.serving_hooks.vllm.prefetch import Prefetcher
from presage.serving_hooks.vllm.priorities import Priorities
from presage.serving_hooks.vllm.step_forecasts import StepForecasts
from presage.serving_hooks.vllm.step_times_file import TimedSteps
from presage.serving_hooks.vllm.waiting import ShadowOrder, WaitingQueue, holds_none
from presage.serving_hooks.workflows.identity import Step, scoped, tenant_of, workflow_key
from presage.serving_hooks.workflows.table import EndReason, WorkflowTable

engine_check.check()

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402 -- once we know that it is there
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

logger = logging.getLogger(__name__)


class Policies(engine.SchedulerSeam):
    """The policies, as a mixin that stands before a vLLM scheduler class.

    Raises:
        ConfigurationError: when the engine starts, if `additional_config["presage"]` is no good.
        EngineError: when the engine starts, if this scheduler is not the one the hooks know.
    """

    clock: ClassVar[Callable[[], float]] = time.monotonic
    schedules_ahead: ClassVar[bool] = False
    """Whether the model runs already when the output of the iteration before is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        port = self._port = EnginePort(self)
        engine.log_as_vllm_does()
        caches = port.caches_prefixes
        config = read_config(port.config.additional)
        self._state_layer = counted_from_1(config.state_layer, port.config.layers)
        forecasts = self.forecasts(config)
        self._config, self._medians = config, forecasts.medians
        self._models, self._upkeep = forecasts.models, forecasts.upkeep
        self._iteration = 0
        self._unnoted: tuple[Any, float] | None = None
        self._prepared = False
        self._counts = EventCounts(FORECASTS)
        # Of steps that have begun: all tokens of their prompts, and those that need not be computed by where they were.
        self._prompt_tokens = {"tokens": 0, "local_tokens": 0, "external_tokens": 0}
        self._workflows = WorkflowTable(config.time_to_live_s, type(self).clock, self._counts)
        self._observing = Observing(port, config.recorder, self._workflows, self._counts, self._state_layer)
        self._evidence = Evidence(config.evidence, lambda: self._modes.changed()) if config.evidence else None
        self._last_forecasts = LastForecasts(config.explain, type(self).clock) if config.explain else None
        said, suffices = config.modes(), self._evidence.suffices if self._evidence is not None else None
        policies = {str(policy): mode for policy, mode in said.policies.items()}
        self._modes = Modes(said.default, policies, said.workflow_types, suffices)
        self._step_forecasts = StepForecasts(
            self._workflows,
            forecasts,
            config.score_settings(),
            self._counts,
            forecast_enabled=self._forecast_enabled,
            eviction_enabled=self._eviction_enabled,
            record=self._observing.forecast,
            evidence=self._evidence,
            last=self._last_forecasts,
        )
        self._prefetch: Prefetcher | None = None
        fetching = Switch("prefetch", self._counts)
        self._eviction = Switch("eviction", self._counts, takes=(fetching,))
        self._ranking = Switch("priority", self._counts) if config.priority else None
        self._admission = Switch("admission", self._counts) if config.admission and caches else None
        takes = (self._eviction,) if self._admission is None else (self._eviction, self._admission)
        self._bookkeeping = Switch("bookkeeping of workflows", self._counts, takes=takes)
        self._priorities: Priorities | None = None
        self._shadow: ShadowOrder | None = None
        self._admission_controller: AdmissionController | None = None
        self._scored = self._hook_blocks(config) if config.eviction and caches else None
        if config.prefetch and self._scored is not None:
            self._prefetch = self._hook_prefetch(config, self._scored, fetching)
        for owner in (self._prefetch, self._scored):  # prefetch first: it gives its blocks back
            if owner is not None:
                self._workflows.subscribe(owner.ended)
        self._apply_modes()
        recorded = config.recorder.states if config.recorder is not None else "off"
        self._states = StatesOfSteps(port, forecasts, self._step_forecasts, self._workflows, self._observing, recorded)
        self._renewal = Switch("reload of models", self._counts)
        if self._upkeep is not None:
            self._renewal.attempt(self._upkeep.start)

    def forecasts(self, config: PresageConfig) -> Forecasts:
        """The sources of forecasts; called once."""
        from presage.serving_hooks.vllm.registered import load_forecasts  # the registry's side, where it is wanted

        return load_forecasts(config, self._port.config.served_model, self._state_layer)

    # What vLLM calls.

    def add_request(self, request: EngineRequest) -> None:
        """A request, or the next part of one that streams its input."""
        self._follow_modes()
        comes = self._acts and request.request_id not in self._port.requests
        if comes:
            self._bookkeeping.attempt(self._arrives, request)
            step = self._workflows.step(request.request_id)
            stats_key, left = step.stats_key if step else "", None
            if self._modes.of("priority", stats_key) or self._modes.of("admission", stats_key):
                left = self._step_forecasts.remaining_tokens(request.request_id, request.num_prompt_tokens)
            if self._priorities is not None:
                ranked = self._modes.of("priority", stats_key) is Mode.ON
                self._priorities.add(request, self._iteration, step.workflow_type if step else "", left, ranked)
            if self._admission_controller is not None and step is not None:
                asked = request.num_prompt_tokens, self._port.prompt_hashes(request)
                self._admission_controller.switch.attempt(
                    self._admission_controller.arrives, request.request_id, step, *asked, left
                )
        super().add_request(request)  # type: ignore[misc]
        if comes and self._holds(request):
            self._port.defer(request, True)
        if comes and self._shadow is not None:
            self._shadow.arrives(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One iteration."""
        self._follow_modes()
        self._note()
        if not self._prepared or not self._port.running:  # an engine with nothing to do has time now
            self._prepare()
        self._prepared = False
        if not self._acts:
            return super().schedule(throttle_prefills)  # type: ignore[misc]
        self._iteration += 1
        began_at = type(self).clock()
        if self._admission_controller is not None and self._port.stalled():
            self._refile(self._admission_controller.decide(idle=True))
            if self._port.stalled():
                self._refile(self._admission_controller.let_one_in())
        if self._prefetch is not None:
            self._prefetch.before()
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        self._unnoted = output, began_at
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """vLLM's own. The model runs by now, or is about to: time for what can wait."""
        grammar = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        self._note()
        self._prepare()
        self._prepared = True
        return grammar

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """What an iteration has computed, hidden states first, and without what nobody asked for."""
        self._note()
        if self._admission_controller is not None:
            self._admission_controller.switch.attempt(
                self._admission_controller.times.updated, scheduler_output, type(self).clock()
            )
        self._bookkeeping.attempt(self._states.read, model_runner_output)
        answers = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.schedules_ahead:
            self._bookkeeping.attempt(self._step_forecasts.flush)
        if self._prefetch is not None:
            self._prefetch.done(scheduler_output, answers)
        return answers

    def has_requests(self) -> bool:
        """Whether the engine has anything to do."""
        if super().has_requests():  # type: ignore[misc]
            return True
        if self._prefetch is None:
            return False
        self._bookkeeping.attempt(self._step_forecasts.flush)  # an idle engine has no iterations
        return self._prefetch.wants()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's own; no block is held for nobody's sake."""
        if self._prefetch is not None:
            self._prefetch.drop()
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, of the requests of clients."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if self._prefetch is not None:
            self._prefetch.hide_from_stats(stats)
        return stats

    def request_left(self, request: EngineRequest) -> None:
        """A request has finished or was aborted."""
        super().request_left(request)
        self._note()
        if self._prefetch is not None:
            self._prefetch.left(request, self._workflows.step(request.request_id))
        completed = engine.completed(request)
        if completed:
            self._bookkeeping.attempt(self._states.completed, request.request_id)
        self._observing.left(request)
        self._bookkeeping.attempt(
            self._step_forecasts.finished, request.request_id, completed, request.num_output_tokens
        )
        if self._admission_controller is not None:
            self._admission_controller.switch.attempt(
                self._admission_controller.leaves,
                request.request_id,
                self._port.computed_hashes(request),
                completed,
                request.num_output_tokens,
            )
        if self._priorities is not None:
            self._priorities.left(request.request_id)
        if self._shadow is not None:
            self._shadow.left(request.request_id)

    def shutdown(self) -> None:
        """vLLM's own, once what waits to be recorded is written."""
        self._observing.close()
        if self._upkeep is not None:
            self._renewal.attempt(self._upkeep.close)
        super().shutdown()  # type: ignore[misc]

    # What operators and the routes call.

    def workflow_ended(self, workflow_type: str, workflow_id: str) -> bool:
        """A workflow will send no more requests; whether it was known."""
        if not self._bookkeeping.on:
            return False
        try:
            return self._workflows.end(workflow_key(workflow_type, workflow_id), EndReason.FINISHED)
        except Exception as error:
            self._bookkeeping.off(error)
            return False

    def presage_status(self) -> dict[str, Any]:
        """Which policies are on, who forecasts, what was counted, and how many workflows are alive."""
        self._note()
        self._bookkeeping.attempt(self._step_forecasts.flush)
        self._renewal.attempt(self._renew)  # an idle engine has no iterations
        eviction = self._eviction if self._scored is not None else None
        switches = {"priority": self._ranking, "eviction": eviction, "admission": self._admission}
        whole = self._modes.whole
        models = {kind: ModelStatus(model) if isinstance(model, str) else model for kind, model in self._models.items()}
        return {
            "on": {name: of is not None and of.on and whole[name] is Mode.ON for name, of in switches.items()},
            "modes": self.modes(),
            "workflows": len(self._workflows),
            "expired": self._workflows.ends[EndReason.EXPIRED],
            "models": {kind: str(model) for kind, model in models.items()},
            "model_versions": {kind: asdict(model) for kind, model in models.items()},
            "states": self._states.told,
            "state_layer": self._state_layer,
            "prefetch": {"on": False} if self._prefetch is None else self._prefetch.status(),
            "counts": self._counts.by_key(),
            "counted": self._counts.by_metric()
            | (self._admission_controller.counts.by_metric() if self._admission_controller is not None else {}),
            "ended": sum(n for reason, n in self._workflows.ends.items() if reason is not EndReason.EXPIRED),
            "prompts": dict(self._prompt_tokens),
            "given_up": self._scored.given_up if self._scored is not None else None,
            "ageing": self._priorities.aged() if self._priorities is not None else None,
            "admission": self._admission_controller.status() if self._admission_controller is not None else None,
            "recorder": {**self._observing.status(), "states": self._states.kept},
            **self._upkept(),
        }

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
        workflow = workflow_key(workflow_type, workflow_id)
        running = self._workflows.get(workflow)
        stats_key = scoped(tenant_of(workflow_id), workflow_type)
        told = {
            **plain(workflow_type, workflow_id),
            "alive": running is not None,
            "modes": {policy: self._modes.of(policy, stats_key).word for policy in POLICIES},
            "forecasts": self._last_forecasts.of(workflow) if self._last_forecasts is not None else [],
            "requests": [self._explain(name, step) for name, step in running.requests.items()] if running else [],
            "admission": self._admission_controller.explain(workflow)
            if self._admission_controller is not None
            else None,
            "blocks": self._scored.explain(workflow) if self._scored is not None else None,
        }
        return {**told, "reasons": reasons(told)}

    def debug_state(self) -> dict[str, int]:
        """Entries of each table that grows with requests and workflows, to find leaks."""
        found = {
            "vLLM requests": len(self._port.requests),
            "waiting": len(self._port.waiting_queues[0]),
            "recent forecasts": len(self._last_forecasts) if self._last_forecasts is not None else 0,
            **self._workflows.debug_state(),
            **self._step_forecasts.debug_state(),
            **self._observing.debug_state(),
        }
        for part in (self._priorities, self._scored, self._admission_controller, self._prefetch):
            if part is not None:
                found |= part.debug_state()
        return found

    # Between two iterations.

    @property
    def _acts(self) -> bool:
        off = self._priorities is None and self._step_forecasts.retention is None and self._admission_controller is None
        return not off or self._observing.on

    def _note(self) -> None:
        """What the last iteration has begun, if that is not known yet."""
        if self._unnoted is None:
            return
        output, began_at = self._unnoted
        self._unnoted = None
        if self._scored is not None:
            self._scored.settle()
        self._observing.scheduled(self._port, output)
        self._bookkeeping.attempt(self._begun, output)
        if self._admission_controller is not None:
            self._admission_controller.switch.attempt(self._computes, self._admission_controller, output, began_at)
        if self._prefetch is not None:
            self._prefetch.after(output)
        if self._shadow is not None:
            self._bookkeeping.attempt(self._shadow.begun, [new.req_id for new in output.scheduled_new_reqs])
        if self._priorities is not None:
            for request_id in self._priorities.selected(output.num_scheduled_tokens, self._iteration):
                self._priorities.switch.attempt(self._moved, request_id)

    def _begun(self, output: Iteration) -> None:
        for request_id in output.preempted_req_ids or ():
            self._step_forecasts.preempted(request_id)
        for request_id in self._port.resumed(output):
            self._step_forecasts.resumed(request_id)
        for request, found in self._port.found_blocks(output):
            if self._prefetch is not None and self._prefetch.begins(request.request_id, found):
                continue
            if self._scored is not None and self._step_forecasts.retention is not None:
                self._scored.begins(request.request_id, found)
            if self._workflows.step(request.request_id) is not None:
                for found_in, tokens in zip(self._prompt_tokens, engine.prompt_by_tier(request), strict=True):
                    self._prompt_tokens[found_in] += tokens
            self._step_forecasts.started(request.request_id, request.num_prompt_tokens)

    def _computes(self, gate: AdmissionController, output: Iteration, began_at: float) -> None:
        gate.times.scheduled(output, *self._port.iteration_tokens(output), began_at)
        for request, found in self._port.found_tokens(output):
            gate.begins(request.request_id, found, self._port.prompt_hashes(request))

    def _moved(self, request_id: str) -> None:
        if self._priorities is not None:
            self._priorities.fold(self._port.requests[request_id])
            if self._shadow is not None:
                self._shadow.moved(request_id)
            if not self._priorities.acts:
                return
        for queue in self._port.waiting_queues:
            queue.moved(request_id)

    def _prepare(self) -> None:
        """For the next iteration."""
        self._bookkeeping.attempt(self._workflows.expire)
        if not self._acts:
            return
        self._bookkeeping.attempt(self._step_forecasts.flush)
        self._renewal.attempt(self._renew)
        self._age()
        if self._admission_controller is not None:
            self._refile(self._admission_controller.decide(idle=False))

    def _renew(self) -> None:
        if self._upkeep is not None and self._upkeep.renew():
            self._states.renew()

    def _age(self) -> None:
        priorities = self._priorities
        if priorities is None:
            return
        for request_id in priorities.age(self._iteration + 1):
            priorities.switch.attempt(self._moved, request_id)
        if not priorities.switch.on:
            for request in self._port.requests.values():
                priorities.give_back(request)
            self._port.restore_waiting()
            self._priorities = self._shadow = None
            if self._admission_controller is not None:
                self._port.hook_waiting(self._queue)

    def _refile(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._port.requests.get(request_id)
            if request is not None:
                self._port.waiting.refile(request_id)
                if self._shadow is not None:
                    self._shadow.refile(request_id)
                self._port.defer(request, self._holds(request) and request in self._port.waiting)

    # Of one request.

    def _arrives(self, request: EngineRequest) -> None:
        sent = request.sampling_params.extra_args if request.sampling_params is not None else None
        step: Step | None = read(sent, request.session_id, self._counts)
        if step is not None:
            self._step_forecasts.arrived(request.request_id, step)
            if self._prefetch is not None:
                self._prefetch.arrives(step, request)

    def _step_of(self, request_id: str) -> Step | None:
        step = self._workflows.step(request_id)
        return self._prefetch.step(request_id) if step is None and self._prefetch is not None else step

    def _holds(self, request: EngineRequest) -> bool:
        return (
            self._admission_controller is not None
            and self._admission_controller.holds(request.request_id)
            and engine.untouched(request)
        )

    def _add_internal(self, request: EngineRequest) -> None:
        if self._priorities is not None:
            self._priorities.add(request, self._iteration, "", math.inf)
        super().add_request(request)  # type: ignore[misc]

    def _explain(self, request_id: str, step: Step) -> dict[str, Any]:
        request, waiting = self._port.requests[request_id], self._port.waiting
        line = [one.request_id for one in waiting]
        told: dict[str, Any] = {
            "agent": step.agent,
            "step": step.number,
            "state": engine.state(request),
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

    # How far policies go. Off, a policy's own tables are dropped and vLLM's queues stand where ours stood; it begins
    # anew from what it finds when it is on again. Between shadow and on nothing is lost. What concerns only some
    # workflow types holds for a workflow from its next event on.

    def _follow_modes(self) -> None:
        """Policies go as far as is said now. Between two iterations only."""
        if self._modes.changes != self._modes_applied:
            self._bookkeeping.attempt(self._apply_modes)

    def _apply_modes(self) -> None:
        self._modes_applied, whole = self._modes.changes, self._modes.whole
        self._apply_to_blocks(whole["eviction"])
        self._apply_to_admission(whole["admission"])
        self._apply_to_priority(whole["priority"])
        self._queue_again()

    def _apply_to_blocks(self, mode: Mode) -> None:
        scored = self._scored
        if scored is None:
            return
        attends = self._port.free_queue is scored
        if mode is Mode.OFF and attends:
            if self._prefetch is not None:
                self._prefetch.drop()
                self._prefetch.begin()
            self._port.swap_blocks(scored.vllms, engine.NoBlockEvents())
        elif mode is not Mode.OFF and not attends:
            scored.switch.attempt(scored.begin)
            self._port.swap_blocks(scored, scored)
        scored.acts = mode is Mode.ON
        self._step_forecasts.retention = None if mode is Mode.OFF else self._prefetch or scored

    def _apply_to_admission(self, mode: Mode) -> None:
        if self._admission_controller is not None and mode is Mode.OFF:
            self._workflows.unsubscribe(self._admission_controller.ended)
            self._refile(self._admission_controller.close())
            self._admission_controller = None
        elif self._admission_controller is not None:
            self._admission_controller.reconsider()
        elif self._admission is not None and self._admission.on and mode is not Mode.OFF:
            self._admission_controller = self._make_admission_controller(self._admission)
            self._workflows.subscribe(self._admission_controller.ended)

    def _apply_to_priority(self, mode: Mode) -> None:
        if self._ranking is None or not self._ranking.on:
            return
        steps = {name: self._workflows.step(name) for name in self._port.requests}
        if self._priorities is None and mode is not Mode.OFF:
            self._priorities = self._make_priorities(self._ranking)
            self._priorities.acts = mode is Mode.ON
            for name, request in self._port.requests.items():
                step = steps[name]
                self._priorities.add(request, self._iteration, step.workflow_type if step else "", None)
        priorities = self._priorities
        if priorities is None:
            return
        priorities.acts = mode is Mode.ON
        for name, request in self._port.requests.items():
            step = steps[name]
            priorities.rank(name, self._modes.of("priority", step.stats_key if step else "") is Mode.ON)
            (priorities.fold if priorities.acts else priorities.give_back)(request)
        if mode is Mode.OFF:
            self._priorities = None

    def _queue_again(self) -> None:
        """The queues of waiting requests are those of the policies that act; who waits comes along."""
        self._port.restore_waiting()
        if self._admission_controller is not None or (self._priorities is not None and self._priorities.acts):
            self._port.hook_waiting(self._queue)
        self._shadow, shadow = None, self._shadow
        if self._priorities is not None and self._modes.shadows("priority"):
            self._shadow = ShadowOrder(self._priorities.wanted, self._holds, self._priorities.unranked)
            self._shadow.counts = shadow.counts if shadow is not None else self._shadow.counts
            for request in self._port.requests.values():
                if not request.num_computed_tokens:
                    self._shadow.arrives(request)

    def _forecast_enabled(self, stats_key: str) -> bool:
        """Eviction uses forecasts of next agents; a source of remaining tokens has to hear of every step, too."""
        of = self._modes.of
        return bool(of("eviction", stats_key) or of("priority", stats_key) or of("admission", stats_key))

    def _eviction_enabled(self, stats_key: str) -> bool:
        """In shadow the block order receives all forecasts; when it acts, only those of types for which it is on."""
        whole = self._modes.whole["eviction"]
        return whole is not Mode.ON or self._modes.of("eviction", stats_key) is Mode.ON

    # The parts.

    def _hook_blocks(self, config: PresageConfig) -> ScoredBlocks:
        scored = ScoredBlocks(
            self._port.free_queue,
            self._port.blocks,
            config.eviction_settings(),
            self._step_of,
            self._eviction,
        )
        self._port.hook_blocks(scored, scored)
        return scored

    def _hook_prefetch(self, config: PresageConfig, scored: ScoredBlocks, switch: Switch) -> Prefetcher | None:
        reason = self._port.why_no_prefetch()
        if reason is not None:
            logger.warning("prefetch is off on this engine: %s", reason)
            return None
        most_bytes, clock = config.prefetch_memory_mb * 2**20, type(self).clock
        mode = partial(self._modes.of, "prefetch")
        return Prefetcher(
            self._port, self._add_internal, scored, config.prefetch_settings(), most_bytes, switch, clock, mode
        )

    def _make_admission_controller(self, switch: Switch) -> AdmissionController:
        return AdmissionController(
            self._config.admission_settings(),
            self._config.held_at_most_s,
            self._port.cache_tokens(),
            self._port.hash_tokens,
            self._port.most_running,
            type(self).clock,
            switch,
            partial(self._modes.of, "admission"),
        )

    def _make_priorities(self, switch: Switch) -> Priorities:
        return Priorities(self._config.priority_settings(), self._medians, self._port.by_priority, switch)

    def _queue(self) -> WaitingQueue:
        held = self._holds if self._admission_controller is not None else holds_none
        priorities = self._priorities
        if priorities is None or not priorities.acts:
            return self._port.vllm_order(held)
        return WaitingQueue(priorities.key, held)

    def _upkept(self) -> Mapping[str, Any]:
        try:
            return self._upkeep.status() if self._upkeep is not None else {}
        except Exception as error:
            self._counts.add(ERRORS, "status of models", type(error).__name__)
            return {}


class SyncWorkflowScheduler(TimedSteps, Policies, Scheduler):  # type: ignore[misc]
    """On an engine without asynchronous scheduling; `WorkflowScheduler` becomes it by itself there."""


class WorkflowScheduler(TimedSteps, Policies, AsyncScheduler):  # type: ignore[misc]
    """The one for `--scheduler-cls`.

    vLLM schedules ahead only with a scheduler derived from its asynchronous one, and decides only after it has seen the
    class whether the engine can: so this is that class, and gives its sibling where the engine cannot.
    """

    schedules_ahead = True

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The sibling, where the engine does not schedule ahead."""
        if cls is WorkflowScheduler and not vllm_config.scheduler_config.async_scheduling:
            return SyncWorkflowScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)
