"""vLLM's scheduler with a fast path for iterations in which every running request decodes one token.

Most iterations do only that, and vLLM's general code takes most of the time of a replay. The fast path allocates blocks
by vLLM's own manager in vLLM's order and gives every request a token; a request with its last token leaves by vLLM's
code. Policies that observe every iteration still see each of them. Otherwise `fast_forward` runs many iterations at
once, and touches only the requests that need or fill a block.

vLLM's general code takes over before an iteration in which a block cannot be allocated, or the waiting queue has a head
other than the one that could not start (a request came, aged or was admitted), or after a request left without its last
token. A head that could not start cannot start later on the fast path: nothing frees a block, and no more of its prompt
gets cached. The host may keep less of it, which makes it no easier: vLLM admits a request only if all of it fits. After
a request has left, the fast path continues only if no request waits. Tests compare all decisions with the general code.

Supports synchronous scheduling with full attention; no speculation, and no connector but `host_tier`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from presage.replay.block_fast_path import take_fast_path
from presage.replay.metrics import VirtualClock
from presage.serving_hooks.engine_file import Cost
from presage.serving_hooks.vllm.engine import EngineRequest, SchedulerSeam, token_lists


def model_output(scheduler: Any, output: Any, says: Mapping[str, int]) -> ModelRunnerOutput:
    """The model output of an iteration: one token for every request whose prompt is complete."""
    names = list(output.num_scheduled_tokens)
    requests = scheduler.requests
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[] if requests[name].is_prefill_chunk else [says.get(name, 0)] for name in names],
    )


class _Decoding:
    """A request on the fast path, whose whole output consists of `token`; `done` counts the fast-forwarded iterations
    whose tokens were added."""

    __slots__ = ("_all_tokens", "_output_tokens", "_token", "done", "request")

    def __init__(self, request: Any, token: int) -> None:
        self.request, self.done, self._token = request, 0, token
        self._output_tokens, self._all_tokens = token_lists(request)

    def add_token(self) -> None:
        """Adds one token."""
        self._output_tokens.append(self._token)
        self._all_tokens.append(self._token)

    def catch_up(self, done: int) -> None:
        """Adds the tokens of `done` fast-forwarded iterations, less those already added."""
        behind = done - self.done
        if behind:
            tokens = [self._token] * behind
            self._output_tokens += tokens
            self._all_tokens += tokens
            self.request.num_computed_tokens += behind
            self.done = done


class FastPathScheduler(SchedulerSeam, Scheduler):  # type: ignore[misc]
    """Replaces vLLM's `Scheduler`.

    Attributes:
        fast_path: False always runs vLLM's general code.
        says: the output token of each request, by its id.
        context_tokens: attended to in the last fast iteration.
    """

    fast_path = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.fast_path:
            take_fast_path(self.kv_cache_manager)
        self.says: dict[str, int] = {}
        self.fast_iterations = 0
        self.context_tokens = 0
        self._left = 0
        self._head: Any = None
        self._full = False  # the limit of running requests is reached
        self._output: Any = None
        self._decoding: list[_Decoding] = []
        self._by_phase: list[list[tuple[_Decoding, bool]]] = []
        self._phase = 0

    def was_fast(self, output: Any) -> bool:
        """Whether this iteration took the fast path."""
        return output is self._output

    @property
    def sure_iterations(self) -> int:
        """Iterations of the fast path up to the next answer; 0 off it."""
        return self._left

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One iteration."""
        if self._left > 0 and self._same_queue() and self._allocate():
            self._left -= 1
            self.current_step += 1
            self.fast_iterations += 1
            self.context_tokens += len(self.running)
            for request in self.running:
                request.num_computed_tokens += 1
            return self._output
        self._left, self._output = 0, None
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The engine has computed an iteration; `model_runner_output` is ignored after the fast path."""
        if scheduler_output is self._output and scheduler_output is not None:
            if not self._left:
                return self._last()
            for decoding in self._decoding:
                decoding.add_token()
            self._phase = (self._phase + 1) % self.block_size
            self._hash_blocks()
            return {}
        before = len(self.running)
        answers = super().update_from_output(scheduler_output, model_runner_output)
        if self.fast_path and (len(self.running) == before or not self.waiting):
            self._begin(scheduler_output)
        return answers

    def fast_forward(self, clock: VirtualClock, cost: Cost, until_s: float) -> int:
        """Runs iterations that begin before `until_s`, as long as no policy observes them; returns how many."""
        if self._left < 2 or not self.may_fast_forward() or not self._same_queue():
            return 0
        many, context, done = len(self._decoding), self.context_tokens, 0
        while self._left > 1 and clock.now < until_s:  # in the last iteration a request completes
            if not done or self._by_phase[self._phase]:
                self.on_fast_forward()
                for decoding, _ in self._by_phase[self._phase]:
                    decoding.catch_up(done)
                if not self._allocate():
                    break
            self._left -= 1
            done += 1
            context += many
            clock.now += cost.seconds(0, many, context)
            self._phase = (self._phase + 1) % self.block_size
            if self._by_phase[self._phase]:
                self._hash_blocks(done)
        for decoding in self._decoding:
            decoding.catch_up(done)
            decoding.done = 0
        self.context_tokens = context
        self.current_step += done
        self.fast_iterations += done
        return done

    def may_fast_forward(self) -> bool:
        """Whether no policy observes every iteration."""
        return True

    def on_fast_forward(self) -> None:
        """Called at the start of the first fast-forwarded iteration, and of those in which a request needs or fills a
        block."""

    def request_left(self, request: EngineRequest) -> None:
        """A request has left: the fast path ends."""
        self._left = 0

    def _begin(self, output: Any) -> None:
        """Enters the fast path, if after this iteration every running request waits for its next token."""
        running, size = self.running, self.block_size
        decoded = output.total_num_scheduled_tokens == len(running) == len(output.num_scheduled_tokens)
        self._full = len(running) >= self.max_num_active_reqs
        self._head = self.waiting.peek_request() if self.waiting else None
        if not running or output.preempted_req_ids or not (decoded or self._full or self._head is None):
            return
        # A request without output still has to compute the last token of its prompt, which yields its first token.
        if any(r.num_computed_tokens != r.num_tokens - 1 or not r.num_output_tokens for r in running):
            return
        self._left = min(request.max_tokens - request.num_output_tokens for request in running)
        self.context_tokens = sum(request.num_computed_tokens for request in running)
        self._decoding = [_Decoding(request, self.says[request.request_id]) for request in running]
        # A request needs a block when its computed tokens fill the last one, and the iteration that fills a block
        # caches it: two of `size` iterations, and the list has each request at both.
        self._by_phase, self._phase = [[] for _ in range(size)], 0
        for decoding in self._decoding:
            over = decoding.request.num_computed_tokens % size
            for phase in {(-over) % size, (-over - 1) % size}:
                self._by_phase[phase].append((decoding, phase == (-over - 1) % size))
        self._output = _decode_output(running)

    def _same_queue(self) -> bool:
        if self.kv_holding_waiting:
            return False
        return self._full or (self.waiting.peek_request() if self.waiting else None) is self._head

    def _allocate(self) -> bool:
        """Allocates the blocks of this iteration; False if one is missing, and then vLLM's code tries again."""
        manager, size = self.kv_cache_manager, self.block_size
        for decoding, fills in self._by_phase[self._phase]:
            request = decoding.request
            if fills and size > 1:  # it already has the block, and allocate_slots would only cache it
                manager.coordinator.cache_blocks(request, request.num_computed_tokens + 1)
            elif manager.allocate_slots(request, 1) is None:
                return False
        return True

    def _hash_blocks(self, done: int = 0) -> None:
        """All requests have a token more: hashes the blocks that the next token fills, as vLLM does.

        Args:
            done: fast-forwarded iterations; 0 if all requests show their tokens.
        """
        for decoding, fills in self._by_phase[self._phase]:
            if fills:
                if done:
                    decoding.catch_up(done)
                decoding.request.update_block_hashes()

    def _last(self) -> Any:
        """Ends the fast path: requests with their last token leave by vLLM's own code."""
        ends = [d.request for d in self._decoding if d.request.num_output_tokens + 1 >= d.request.max_tokens]
        gone = set(map(id, ends))
        self._decoding = [decoding for decoding in self._decoding if id(decoding.request) not in gone]
        for decoding in self._decoding:
            decoding.add_token()
        self._by_phase = [[pair for pair in phase if id(pair[0].request) not in gone] for phase in self._by_phase]
        self._phase = (self._phase + 1) % self.block_size
        self._hash_blocks()
        for request in ends:
            request.num_in_flight_tokens += 1
        output = _decode_output(ends)
        self._output = None
        answers = super().update_from_output(output, model_output(self, output, self.says))
        if not self.waiting:
            self._begin(output)
        return answers


def _decode_output(running: list[Any]) -> Any:
    """The scheduler output of a decode-only iteration, with the fields that policies read."""
    names = [request.request_id for request in running]
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(names),
            num_computed_tokens=[request.num_computed_tokens for request in running],
            num_output_tokens=[request.num_output_tokens for request in running],
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
