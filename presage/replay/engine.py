"""Engines in virtual time: requests arrive, vLLM's schedulers decide, the cost model gives each iteration its duration.

A step arrives once its last parent has ended and its pause is over. With several engines, a router places it. An
iteration begins with all requests that have been placed on the engine by then, and answers them at its end. Nothing
here is random or reads real time.

Every engine has its own clock, the end of its last iteration. Events (arrivals, answers, ticks of the router) and
iterations run in the order of time, so a router never sees what has not happened yet. Between events, an engine runs
many iterations at once up to the earliest moment at which another engine could answer a request.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from presage.errors import EngineError
from presage.replay.decode_fast_path import model_output
from presage.replay.metrics import PolicyRun, RequestOutcome, VirtualClock
from presage.replay.prompts import HASH_BYTES, LazyTokens, PromptIds
from presage.replay.vllm_scheduler import make_request
from presage.replay.workload import ReplayJob, Schedule, again_tokens
from presage.serving_hooks.engine_file import Cost
from presage.serving_hooks.policies.workload import attention_pairs
from presage.serving_hooks.workflows.identity import tenant_of, unscoped
from presage.serving_hooks.workflows.tenants import ARGUMENT

_LOOK_AGAIN_S: Final = 0.01
"""Seconds until an engine calls its scheduler again when requests wait and none is admitted."""

_MOST_IDLE: Final = 1_000_000

_JOB: Final = -1
"""Replaces a step number when the whole job arrives."""

_ANSWER: Final = -2
"""Likewise when a router learns of an answer."""

_TICK: Final = -3
"""Likewise when a router acts by itself."""


class Watcher(Protocol):
    """Observes jobs and their steps; times in seconds of the virtual clock."""

    def began(self, number: int, at_s: float) -> None: ...  # noqa: D102
    def asked(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102
    def selected(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102
    def finished(self, number: int, index: int, at_s: float) -> None: ...  # noqa: D102


class Arrival(NamedTuple):
    """A step that arrives: seconds of the virtual clock, numbers of the job and of the step in it."""

    at_s: float
    job: int
    step: int


class ReplayRouter(Protocol):
    """Places the requests of several engines; times in seconds of the virtual clock.

    Each call returns the requests to place now, with their engines. A request that is not returned is held.
    """

    @property
    def tick_s(self) -> float | None:
        """Seconds between two ticks; None for none."""

    def arrived(self, arrival: Arrival) -> Iterable[tuple[Arrival, EngineLoop]]: ...  # noqa: D102
    def answered(self, outcome: RequestOutcome, ended: bool) -> Iterable[tuple[Arrival, EngineLoop]]:
        """A request has its last token; whether its workflow has ended."""

    def tick(self, now: float) -> Iterable[tuple[Arrival, EngineLoop]]: ...  # noqa: D102
    def job(self, number: int) -> tuple[ReplayJob, PromptIds]:
        """A job as it is now: the model that serves it decides on its output tokens."""


@dataclass
class _UnderWay:
    """A running job."""

    began_s: float
    waits_for: list[int]
    left: int
    began: bool = False  # its first request is on an engine
    placed_s: dict[int, float] = field(default_factory=dict)
    engines: list[EngineLoop] = field(default_factory=list)


@dataclass(eq=False)
class EngineLoop:
    """One engine.

    Attributes:
        scheduler: a `FastPathScheduler`, with or without hooks.
        clock: its own; the end of its last iteration.
        number: of the engine in its fleet.
        named: whether clients name their workflows.
        run: its counters.
        idle_s: seconds without an iteration.
        used_s, used: shares of its cache's blocks in use by requests, and since when; with a router only.
    """

    scheduler: Any
    cost: Cost
    block_tokens: int
    clock: VirtualClock
    number: int = 0
    named: bool = True
    run: PolicyRun = field(default_factory=PolicyRun)
    inbox: deque[Arrival] = field(default_factory=deque)
    asked: dict[str, RequestOutcome] = field(default_factory=dict)
    used_s: array[float] = field(default_factory=lambda: array("d"))
    used: array[float] = field(default_factory=lambda: array("d"))
    busy: bool = False
    idle: int = 0
    idle_s: float = 0.0

    @property
    def hooked(self) -> bool:
        """Whether its scheduler has the hooks."""
        return hasattr(self.scheduler, "workflow_ended")

    def answers_s(self) -> float:
        """No request of this engine is answered sooner. A preemption followed by an answer of one token may be."""
        return self.clock.now + self.cost.iteration_s * (1 if self.inbox else max(1, self.scheduler.sure_iterations))


class ReplayEngine:
    """Runs jobs through the schedulers of one engine, or of several behind a router.

    Args:
        engines: at least one; a router may add more.
        at_once: limit on running jobs; more wait in the order of arrival. None for no limit.
        router: None for a single engine.
    """

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        prompts: PromptIds,
        schedule: Schedule,
        engines: Sequence[EngineLoop],
        at_once: int | None = None,
        watchers: Sequence[Watcher] = (),
        router: ReplayRouter | None = None,
    ) -> None:
        self._jobs, self._prompts, self._schedule = jobs, prompts, schedule
        self._engines, self._router = engines, router
        self._busy: list[tuple[float, int, EngineLoop]] = []
        self._coming: list[tuple[float, int, int, int]] = []
        self._order = 0
        self._then = list(reversed(schedule.then))
        self._at_once, self._watchers = at_once, watchers
        self._under_way: dict[int, _UnderWay] = {}
        self._held: deque[tuple[float, int]] = deque()  # jobs waiting to begin
        self._answers: dict[int, tuple[RequestOutcome, bool]] = {}  # on their way to the router
        self.run = PolicyRun()

    def play(self) -> PolicyRun:
        """Runs all jobs to their ends.

        Raises:
            EngineError: requests wait and none is ever admitted.
        """
        for at_s, number in self._schedule.first:
            self._come(at_s, number, _JOB)
        if self._router is not None and self._router.tick_s is not None:
            self._come(self._router.tick_s, 0, _TICK)
        while self._coming or self._busy:
            if self._busy and not (self._coming and self._coming[0][0] <= self._busy[0][0]):
                _, _, engine = heapq.heappop(self._busy)
                self._turn(engine)
            else:
                self._event(*heapq.heappop(self._coming))
        run, engines = self.run, self._engines
        if self._under_way:
            raise EngineError(
                f"{len(self._under_way)} workflows wait and none is placed: the router holds them forever"
            )
        run.end_s = max(engine.clock.now for engine in engines)
        for engine in engines:
            engine.run.fast_iterations = engine.scheduler.fast_iterations
            engine.run.busy_s = engine.clock.now - engine.idle_s
            run.add_counters(engine.run)
        return run

    def _event(self, at_s: float, _: int, number: int, index: int) -> None:
        if index == _JOB:
            self._begin(number, at_s)
        elif index == _ANSWER:
            assert self._router is not None
            self._place(self._router.answered(*self._answers.pop(number)), at_s)
        elif index == _TICK:
            assert self._router is not None
            self._place(self._router.tick(at_s), at_s)
            if self._router.tick_s is not None and (self._under_way or self._coming):
                self._come(at_s + self._router.tick_s, 0, _TICK)
        else:
            self._arrive(Arrival(at_s, number, index))

    def _turn(self, engine: EngineLoop) -> None:
        """An iteration, and those of the fast path after it."""
        while engine.inbox:
            self._ask(engine, engine.inbox.popleft())
        output = engine.scheduler.schedule()
        self._note_used(engine)
        if output.total_num_scheduled_tokens:
            engine.idle = 0
            self._iterate(engine, output)
        else:
            engine.idle += 1
            if engine.idle > _MOST_IDLE:
                raise EngineError(
                    f"{len(engine.asked)} requests wait and none is admitted: a policy holds them forever"
                )
            engine.scheduler.update_from_output(output, model_output(engine.scheduler, output, {}))
            engine.clock.now += _LOOK_AGAIN_S
            engine.idle_s += _LOOK_AGAIN_S
        engine.busy = bool(engine.inbox) or engine.scheduler.has_unfinished_requests()
        if engine.busy:
            self._wake(engine)
        else:
            self._note_used(engine)

    def _note_used(self, engine: EngineLoop) -> None:
        if self._router is not None:
            engine.used_s.append(engine.clock.now)
            engine.used.append(engine.scheduler.kv_cache_manager.usage)

    def _wake(self, engine: EngineLoop) -> None:
        self._order += 1
        heapq.heappush(self._busy, (engine.clock.now, self._order, engine))

    def _begin(self, number: int, at_s: float) -> None:
        """Starts a job that arrived at `at_s`, or lets it wait for another to end."""
        if self._at_once is not None and len(self._under_way) >= self._at_once:
            self._held.append((at_s, number))
            return
        job = self._jobs[number]
        waits_for = [len(step.parents) for step in job.steps]
        self._under_way[number] = _UnderWay(at_s, waits_for, len(job.steps))
        for index, step in enumerate(job.steps):
            if not step.parents:
                self._arrive(Arrival(at_s, number, index))

    def _come(self, at_s: float, number: int, index: int) -> None:
        self._order += 1
        heapq.heappush(self._coming, (at_s, self._order, number, index))

    def _arrive(self, arrival: Arrival) -> None:
        if self._router is None:
            self._place([(arrival, self._engines[0])], arrival.at_s)
        else:
            self._place(self._router.arrived(arrival), arrival.at_s)

    def _place(self, placed: Iterable[tuple[Arrival, EngineLoop]], now: float) -> None:
        for arrival, engine in placed:
            under_way = self._under_way[arrival.job]
            if engine not in under_way.engines:
                under_way.engines.append(engine)
            under_way.placed_s[arrival.step] = now
            engine.inbox.append(arrival)
            if not engine.busy:
                engine.busy = True
                engine.idle_s += max(0.0, now - engine.clock.now)
                engine.clock.now = max(engine.clock.now, now)
                self._wake(engine)

    def _job(self, number: int) -> tuple[ReplayJob, PromptIds]:
        if self._router is None:
            return self._jobs[number], self._prompts
        return self._router.job(number)

    def _ask(self, engine: EngineLoop, arrival: Arrival) -> None:
        at_s, number, index = arrival
        (job, prompts), name = self._job(number), f"{number}.{index}"
        step, scheduler, under_way = job.steps[index], engine.scheduler, self._under_way[number]
        prompt, hashes = partial(prompts.prompt, number, index), prompts.known(number, index)
        sent = (
            {}
            if not job.workflow_type or not engine.named
            else {
                "workflow_type": job.workflow_type,
                "workflow_id": unscoped(job.workflow_id),
                "agent": step.agent,
                "step": index,
                ARGUMENT: tenant_of(job.workflow_id),
            }
        )
        request = make_request(
            name, LazyTokens(prompt, step.prompt_tokens), step.output_tokens, at_s, sent, hashes, engine.block_tokens
        )
        again = again_tokens(job, index) // engine.block_tokens * engine.block_tokens
        came_s = at_s if step.parents else under_way.began_s  # also if the job waited to begin
        outcome = RequestOutcome(number, index, step.agent, came_s, step.prompt_tokens, again, engine=engine.number)
        outcome.placed_s, outcome.starts = under_way.placed_s.pop(index), not step.parents
        engine.asked[name] = outcome
        if engine.hooked:
            scheduler.reasons[name] = step.finish_reason
        scheduler.says[name] = prompts.says(number, index)
        for watcher in self._watchers:
            if not under_way.began:
                watcher.began(number, engine.clock.now)
            watcher.asked(number, index, engine.clock.now)
        under_way.began = True
        scheduler.add_request(request)

    def _iterate(self, engine: EngineLoop, output: Any) -> None:
        scheduler, run, clock = engine.scheduler, engine.run, engine.clock
        run.iterations += 1
        if scheduler.was_fast(output):
            computed = None
            took_s = engine.cost.seconds(0, output.total_num_scheduled_tokens, scheduler.context_tokens)
        else:
            computed, took_s = model_output(scheduler, output, scheduler.says), self._in_full(engine, output)
        clock.now += took_s
        for answers in scheduler.update_from_output(output, computed).values():
            for answer in answers.outputs:
                asked = engine.asked.get(answer.request_id)
                if asked is None:
                    continue  # a prefetch
                if answer.new_token_ids and asked.first_token_s is None:
                    asked.first_token_s = clock.now
                if answer.finish_reason is not None:
                    self._finished(engine, answer.request_id, asked)
        until_s = self._coming[0][0] if self._coming else math.inf
        if not engine.inbox and until_s > clock.now:
            for _, _, other in self._busy:
                until_s = min(until_s, other.answers_s())
            run.iterations += scheduler.fast_forward(clock, engine.cost, until_s)

    def _in_full(self, engine: EngineLoop, output: Any) -> float:
        """Seconds of an iteration of vLLM's general code; notes new and preempted requests."""
        run, scheduler, now = engine.run, engine.scheduler, engine.clock.now
        prefilled = decoded = context = pairs = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            context += request.num_computed_tokens
            if tokens == 1 and request.num_output_tokens:
                decoded += 1
            else:
                prefilled += tokens
                pairs += attention_pairs(tokens, request.num_computed_tokens)
        run.prefilled_tokens += prefilled
        loads: Mapping[str, int] = {}
        if output.kv_connector_metadata is not None:  # a host tier
            loads = output.kv_connector_metadata.tokens
            run.loaded_tokens = (run.loaded_tokens or 0) + sum(loads.values())
        for new in output.scheduled_new_reqs:
            asked = engine.asked.get(new.req_id)  # None for a prefetch
            if asked is not None and asked.began_s is None:
                asked.began_s, asked.hit_tokens = now, new.num_computed_tokens
                asked.host_tokens = loads.get(new.req_id, 0)
                run.recomputing_s += engine.cost.prefill_s(
                    max(0, asked.again_tokens - asked.hit_tokens), asked.hit_tokens
                )
                for watcher in self._watchers:
                    watcher.selected(asked.job, asked.step, now)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            request = scheduler.requests[name]
            cached = request.num_computed_tokens - output.num_scheduled_tokens[name]
            run.recomputing_s += engine.cost.prefill_s(request.num_tokens - 1 - cached, cached)
        run.preemptions += len(output.preempted_req_ids or ())
        return engine.cost.seconds(prefilled, decoded, context, sum(loads.values()), pairs)

    def _finished(self, engine: EngineLoop, name: str, asked: RequestOutcome) -> None:
        now, scheduler = engine.clock.now, engine.scheduler
        asked.ended_s = now
        del engine.asked[name], scheduler.says[name]
        self.run.asked.append(asked)
        (job, _), under_way = self._job(asked.job), self._under_way[asked.job]
        step = job.steps[asked.step]
        self.run.output_tokens += step.output_tokens
        for watcher in self._watchers:
            watcher.finished(asked.job, asked.step, now)
        if engine.hooked and job.workflow_type and (step.finish_reason is not None or step.tools is not None):
            if engine.named:
                scheduler.latest_answered(job.workflow_type, job.workflow_id, step.finish_reason, step.tools)
            else:
                scheduler.request_answered(name, step.finish_reason, step.tools)
        under_way.left -= 1
        if self._router is not None:
            self._answers[self._order + 1] = asked, not under_way.left
            self._come(now, self._order + 1, _ANSWER)
        for index, later_step in enumerate(job.steps):
            if asked.step in later_step.parents:
                under_way.waits_for[index] -= 1
                if not under_way.waits_for[index]:
                    self._come(now + later_step.pause_s, asked.job, index)
        if under_way.left:
            return
        self.run.completions_s.append(now - under_way.began_s)
        del self._under_way[asked.job]
        if job.workflow_type:
            for served in under_way.engines:
                if served.hooked and served.named:
                    served.scheduler.workflow_ended(job.workflow_type, job.workflow_id)
        if self._then:
            self._come(now, self._then.pop(), _JOB)
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
            sharing = sharers.get(content)
            if owner.get(content) in using if sharing is None else not sharing.isdisjoint(using):
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
