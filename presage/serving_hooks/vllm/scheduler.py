"""vLLM's schedulers with Presage's policies: `--scheduler-cls presage.serving_hooks.vllm.WorkflowScheduler`.

The policies choose among what vLLM would do anyway: which waiting request runs first, which free block is evicted. They
change no token and start or stop no client's request; admission lets some wait longer. When they do their work says
`hooks.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice
from typing import Any

from presage.serving_hooks.counts import EVENTS
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.engine import EngineRequest, Iteration
from presage.serving_hooks.vllm.guests import with_guests
from presage.serving_hooks.vllm.operator_calls import OperatorCalls
from presage.serving_hooks.vllm.start import engine_check
from presage.serving_hooks.vllm.step_times_file import StepTimesFile
from presage.serving_hooks.workflows import EndReason, RunningStep
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step, unscoped
from presage.serving_hooks.workflows.metadata import check, read, warning
from presage.serving_hooks.workflows.observed import known_as

engine_check.check()

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402 -- once we know that it is there
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

logger = logging.getLogger(__name__)


class Policies(OperatorCalls):
    """The policies, as a mixin before a vLLM scheduler class, with the guests that its settings ask for.

    Raises as `Hooks`.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Constructs a class with the guests."""
        return super().__new__(with_guests(cls, vllm_config))

    # What vLLM calls. An exception of ours never reaches it: whatever no switch of a policy has caught switches all of
    # Presage off, and vLLM gets its own queues and free blocks back before it schedules again. Each passes on whatever
    # vLLM passes: a patch release may pass more.

    def add_request(self, request: EngineRequest, *args: Any, **kwargs: Any) -> None:
        """Adds a request, or the next part of a streamed input."""
        comes = self._presage.attempt(self._comes, request)
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if comes:
            self._presage.attempt(self.queue_policies.queued, request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules one iteration."""
        if self._parts.off:
            self._retry()
        if not self._presage.on:
            self._withdraw()
        called_at = type(self).clock()
        began_at = self._presage.attempt(self._before_iteration)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if began_at is not None:
            self._unnoted = output, began_at
        if self._step_times is not None:
            self._timing.attempt(self._scheduled, self._step_times, output, called_at)
        return output

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; does the deferred work first, as the model is running or about to run."""
        grammar = super().get_grammar_bitmask(*args, **kwargs)  # type: ignore[misc]
        self._presage.attempt(self._beside_model)
        return grammar

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Processes the output of an iteration: reads hidden states."""
        now = type(self).clock()
        self._presage.attempt(self._before_update, scheduler_output, model_runner_output, now)
        answers = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        if self.schedules_ahead and self._presage.on:
            self._bookkeeping.attempt(self.step_forecasts.flush)
        if self._step_times is not None:
            self._timing.attempt(self._step_times.updated, scheduler_output, now, self.engine_port.busy)
        return answers

    def request_leaves(self, request: EngineRequest) -> None:
        """A request has finished or was aborted; vLLM still knows it.

        Its iteration may not be noted yet: vLLM aborts between two calls of ours, also right after `schedule`.
        """
        self._presage.attempt(self._note)

    def request_left(self, request: EngineRequest) -> None:
        """A request has finished or was aborted, and vLLM has freed it."""
        super().request_left(request)
        self._presage.attempt(self._leaves, request)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Writes what recorder and webhook have buffered, closes the file of step times, then calls vLLM's own."""
        self._recording.close()
        if self._webhook is not None:
            self._webhook.close()
        if self._step_times is not None:
            self._timing.attempt(self._step_times.close)
        if self.upkeep is not None:
            self._renewal.attempt(self.upkeep.close)
        super().shutdown(*args, **kwargs)  # type: ignore[misc]

    # Guarded parts of them.

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
        return began_at

    def _beside_model(self) -> None:
        self._note()
        self._prepare()
        self._prepared = True

    def _before_update(self, output: Iteration, computed: Any, now: float) -> None:
        self._note()
        self.queue_policies.updated(output, now)
        self._bookkeeping.attempt(self._states.read, output, computed)

    def _scheduled(self, file: StepTimesFile, output: Iteration, began_at: float) -> None:
        port = self.engine_port
        decoded, prefilled = port.iteration_tokens(output)
        pairs = port.attention_pairs(output) if prefilled else 0
        file.scheduled(output, (prefilled, decoded, port.context_tokens(output), pairs), began_at)

    def _comes(self, request: EngineRequest) -> bool:
        """A request is about to be added; returns whether it is a new one and any policy acts."""
        self._follow_modes()
        if not self._acts or request.request_id in self.engine_port.requests:
            return False
        step = self._bookkeeping.attempt(self._as_step, request)
        self._listeners.request_arrived(request, step)
        return True

    def _as_step(self, request: EngineRequest) -> RunningStep | None:
        """The request as a step of its workflow, if its metadata name one or its prompt continues one."""
        sent = request.sampling_params.extra_args if request.sampling_params is not None else None
        names = self.step_forecasts.sources.names
        step: Step | None = read(sent, request.session_id, self._counts, names)
        if self.identity is not None and not engine.hands_over(request):
            step = self.identity.step(request, step, names)
        if step is not None:
            step = self.step_forecasts.sources.recognised(step, known_as(sent, self._counts), self._counts)
        running = self.workflow_table.get(step.workflow) if step is not None else None
        if step is not None and running is not None and running.step.workflow_type != step.workflow_type:
            step = replace(step, workflow_type=running.step.workflow_type)  # newer models fold otherwise
        check(sent, request.session_id, self._counts)
        for (field, reason), key in islice(self._counts.examples.items(), self._warned, None):
            self._warned += 1
            logger.warning("%s", warning(field, reason, unscoped(key)))
        if step is None:
            return None
        if engine.hands_over(request):  # its one token would be learnt as its whole output
            self._counts.add(EVENTS, "steps that another engine answers")
            return None
        return self.workflow_table.arrived(request.request_id, step)

    def _leaves(self, request: EngineRequest) -> None:
        step, left = self._bookkeeping.attempt(self._as_left, request) or (None, None)
        self._listeners.request_finished(request, step, left)
        if step is not None and left is not None and (step.step.last or _given_up(step, left)):
            reason = EndReason.FINISHED if left.completed else EndReason.ABORTED
            self._bookkeeping.attempt(self.workflow_table.end, step.step.workflow, reason)

    def _as_left(self, request: EngineRequest) -> tuple[RunningStep | None, LeftStep | None]:
        request_id, completed, reason = request.request_id, engine.completed(request), self.finish_reason(request)
        left = self.workflow_table.choices.leaves(request_id, completed, request.num_output_tokens, reason)
        return self.workflow_table.finished(request_id), left


def _given_up(step: RunningStep, left: LeftStep) -> bool:
    """Whether a client has aborted the first request of a workflow that it did not name: it may send it again."""
    return step.step.source == "new" and not left.completed and step.workflow.steps == 1


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
        return super().__new__(cls, vllm_config)
