"""An engine in virtual time: requests arrive, vLLM's scheduler decides, the cost model gives its duration.

A step arrives once its last parent has ended and its pause is over. An iteration begins with all requests that have
arrived by then and answers them at its end. Nothing here is random or reads real time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from presage.errors import EngineError
from presage.serving_hooks.replay.decode_fast_path import model_output
from presage.serving_hooks.replay.engine_file import Cost
from presage.serving_hooks.replay.metrics import PolicyRun, RequestOutcome, VirtualClock
from presage.serving_hooks.replay.prompts import HASH_BYTES, LazyTokens, PromptIds
from presage.serving_hooks.replay.vllm_scheduler import make_request
from presage.serving_hooks.replay.workload import ReplayJob, Schedule, again_tokens
from presage.serving_hooks.workflows.identity import workflow_key

_LOOK_AGAIN_S: Final = 0.01
"""Seconds until an engine calls its scheduler again when requests wait and none is admitted."""

_MOST_IDLE: Final = 1_000_000

_JOB: Final = -1
"""Replaces a step number when the whole job arrives."""


class Watcher(Protocol):
    """Observes jobs and their steps; times in seconds of the virtual clock."""

    def began(self, number: int, at_s: float) -> None: ...  # noqa: D102
    def asked(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102
    def selected(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102
    def finished(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102


@dataclass
class _UnderWay:
    """A running job."""

    began_s: float
    waits_for: list[int]
    left: int


class ReplayEngine:
    """Runs jobs through a scheduler.

    Args:
        scheduler: a `FastPathScheduler`, with or without hooks.
        at_once: limit on running jobs; more wait in the order of arrival. None for no limit.
    """

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        prompts: PromptIds,
        schedule: Schedule,
        scheduler: Any,
        cost: Cost,
        block_tokens: int,
        clock: VirtualClock,
        at_once: int | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._jobs, self._prompts, self._schedule = jobs, prompts, schedule
        self._scheduler, self._cost = scheduler, cost
        self._block_tokens, self._clock = block_tokens, clock
        self._hooked = hasattr(scheduler, "workflow_ended")
        self._coming: list[tuple[float, int, int, int]] = []
        self._order = 0
        self._then = list(reversed(schedule.then))
        self._at_once, self._watchers = at_once, watchers
        self._under_way: dict[int, _UnderWay] = {}
        self._held: deque[tuple[float, int]] = deque()  # jobs waiting to begin
        self._asked: dict[str, RequestOutcome] = {}
        self.run = PolicyRun()

    def play(self) -> PolicyRun:
        """Runs all jobs to their ends.

        Raises:
            EngineError: requests wait and none is ever admitted.
        """
        for at_s, number in self._schedule.first:
            self._come(at_s, number, _JOB)
        idle = 0
        while self._coming or self._scheduler.has_unfinished_requests():
            if not self._scheduler.has_unfinished_requests():
                self._clock.now = max(self._clock.now, self._coming[0][0])
            self._arrivals()
            output = self._scheduler.schedule()
            if output.total_num_scheduled_tokens:
                idle = 0
                self._iterate(output)
                continue
            idle += 1
            if idle > _MOST_IDLE:
                raise EngineError(f"{len(self._asked)} requests wait and none is admitted: a policy holds them forever")
            self._scheduler.update_from_output(output, model_output(self._scheduler, output, {}))
            self._clock.now += _LOOK_AGAIN_S
        self.run.end_s = self._clock.now
        self.run.fast_iterations = self._scheduler.fast_iterations
        return self.run

    def _begin(self, number: int, at_s: float) -> None:
        """Starts a job that arrived at `at_s`, or lets it wait for another to end."""
        if self._at_once is not None and len(self._under_way) >= self._at_once:
            self._held.append((at_s, number))
            return
        job = self._jobs[number]
        waits_for = [len(step.parents) for step in job.steps]
        self._under_way[number] = _UnderWay(at_s, waits_for, len(job.steps))
        for watcher in self._watchers:
            watcher.began(number, self._clock.now)
        for index, step in enumerate(job.steps):
            if not step.parents:
                self._ask(at_s, number, index)

    def _come(self, at_s: float, number: int, index: int) -> None:
        self._order += 1
        heapq.heappush(self._coming, (at_s, self._order, number, index))

    def _arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self._clock.now:
            at_s, _, number, index = heapq.heappop(self._coming)
            if index == _JOB:
                self._begin(number, at_s)
            else:
                self._ask(at_s, number, index)

    def _ask(self, at_s: float, number: int, index: int) -> None:
        job, name = self._jobs[number], f"{number}.{index}"
        step, prompts = job.steps[index], self._prompts
        prompt, known = partial(prompts.prompt, number, index), prompts.known(number, index)
        sent = (
            {}
            if not job.workflow_type
            else {
                "workflow_type": job.workflow_type,
                "workflow_id": job.workflow_id,
                "agent": step.agent,
                "step": index,
            }
        )
        request = make_request(
            name, LazyTokens(prompt, step.prompt_tokens), step.output_tokens, at_s, sent, known, self._block_tokens
        )
        again = again_tokens(job, index) // self._block_tokens * self._block_tokens
        came_s = at_s if step.parents else self._under_way[number].began_s  # also if the job waited to begin
        self._asked[name] = RequestOutcome(number, index, step.agent, came_s, step.prompt_tokens, again)
        if self._hooked:
            self._scheduler.reasons[name] = step.finish_reason
        self._scheduler.says[name] = prompts.says(number, index)
        for watcher in self._watchers:
            watcher.asked(number, index, self._clock.now)
        self._scheduler.add_request(request)

    def _iterate(self, output: Any) -> None:
        scheduler, run = self._scheduler, self.run
        run.iterations += 1
        if scheduler.was_fast(output):
            computed = None
            took_s = self._cost.seconds(0, output.total_num_scheduled_tokens, scheduler.context_tokens)
        else:
            computed, took_s = model_output(scheduler, output, scheduler.says), self._in_full(output)
        self._clock.now += took_s
        for answers in scheduler.update_from_output(output, computed).values():
            for answer in answers.outputs:
                asked = self._asked.get(answer.request_id)
                if asked is None:
                    continue  # a prefetch
                if answer.new_token_ids and asked.first_token_s is None:
                    asked.first_token_s = self._clock.now
                if answer.finish_reason is not None:
                    self._finished(answer.request_id, asked)
        comes_s = self._coming[0][0] if self._coming else math.inf
        run.iterations += scheduler.fast_forward(self._clock, self._cost, comes_s)

    def _in_full(self, output: Any) -> float:
        """Seconds of an iteration of vLLM's general code; notes new and preempted requests."""
        run = self.run
        prefilled = decoded = context = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            context += request.num_computed_tokens
            if tokens == 1 and request.num_output_tokens:
                decoded += 1
            else:
                prefilled += tokens
        run.prefilled_tokens += prefilled
        loads: Mapping[str, int] = {}
        if output.kv_connector_metadata is not None:  # a host tier
            loads = output.kv_connector_metadata.tokens
            run.loaded_tokens = (run.loaded_tokens or 0) + sum(loads.values())
        for new in output.scheduled_new_reqs:
            asked = self._asked.get(new.req_id)  # None for a prefetch
            if asked is not None and asked.began_s is None:
                asked.began_s, asked.hit_tokens = self._clock.now, new.num_computed_tokens
                asked.host_tokens = loads.get(new.req_id, 0)
                for watcher in self._watchers:
                    watcher.selected(asked.job, asked.step, self._clock.now)
        run.preemptions += len(output.preempted_req_ids or ())
        return self._cost.seconds(prefilled, decoded, context, sum(loads.values()))

    def _finished(self, name: str, asked: RequestOutcome) -> None:
        now = self._clock.now
        asked.ended_s = now
        del self._asked[name], self._scheduler.says[name]
        self.run.asked.append(asked)
        job, under_way = self._jobs[asked.job], self._under_way[asked.job]
        self.run.output_tokens += job.steps[asked.step].output_tokens
        for watcher in self._watchers:
            watcher.finished(asked.job, asked.step, now)
        step = job.steps[asked.step]
        if self._hooked and job.workflow_type and (step.finish_reason is not None or step.tools is not None):
            workflow = workflow_key(job.workflow_type, job.workflow_id)
            self._scheduler.step_forecasts.answered(workflow, step.finish_reason, step.tools)
        under_way.left -= 1
        for index, one in enumerate(job.steps):
            if asked.step in one.parents:
                under_way.waits_for[index] -= 1
                if not under_way.waits_for[index]:
                    self._come(now + one.pause_s, asked.job, index)
        if under_way.left:
            return
        self.run.completions_s.append(now - under_way.began_s)
        del self._under_way[asked.job]
        if self._hooked and job.workflow_type:
            self._scheduler.workflow_ended(job.workflow_type, job.workflow_id)
        if self._then:
            self._come(self._clock.now, self._then.pop(), _JOB)
        if self._held:
            self._come(*self._held.popleft(), _JOB)


class Evictions:
    """Counts evicted blocks: blank, of ended workflows (retired), or of running ones (active).

    As the metric `presage_evicted_blocks_total` does: a workflow uses a block once a step of it that has begun reads or
    writes it, and a block is retired when all workflows that used it have ended. Serving divides active blocks by their
    forecasts. A plain request belongs to no workflow that could end, so its blocks stay active.
    """

    def __init__(self, jobs: Sequence[ReplayJob], prompts: PromptIds) -> None:
        self.counts = dict.fromkeys(("blank", "retired", "active"), 0)
        self._jobs, self._owner, self._sharers = jobs, prompts.owner, prompts.sharers
        self._left = [len(job.steps) for job in jobs]
        self._using: set[int | None] = set()  # jobs with a step that has begun, which have not ended

    def gives_up(self, blocks: Iterable[Any]) -> None:
        """Free blocks are about to be reused; they still have their hashes."""
        owner, sharers, using = self._owner, self._sharers, self._using
        blank = retired = active = 0
        for block in blocks:
            if block.block_hash is None:
                blank += 1
                continue
            content = block.block_hash[:HASH_BYTES]
            of = sharers.get(content)
            if owner.get(content) in using if of is None else not of.isdisjoint(using):
                active += 1
            else:
                retired += 1
        self.counts["blank"] += blank
        self.counts["retired"] += retired
        self.counts["active"] += active

    def began(self, number: int, at_s: float) -> None:
        """Nothing to count."""

    def asked(self, number: int, index: int, at_s: float) -> None:
        """Nothing to count."""

    def selected(self, number: int, index: int, at_s: float) -> None:
        """A step begins: its job uses blocks."""
        self._using.add(number)

    def finished(self, number: int, index: int, at_s: float) -> None:
        """A step ends; the last one retires the blocks of its job."""
        self._left[number] -= 1
        if not self._left[number] and self._jobs[number].workflow_type:
            self._using.discard(number)
