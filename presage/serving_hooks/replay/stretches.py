"""vLLM's scheduler, quick where an iteration can only decode one more token of each running request.

Most iterations do that and nothing else, and vLLM's code for the general case takes most of the time of a replay. From
the end of such an iteration until something else can happen every further one is done here in short: a block is
allocated where a request needs one, by vLLM's own manager and in vLLM's order, and every request gets a token. Who has
its last token then leaves by vLLM's own code.

Policies that look at every iteration see each of them, with an output that says so. Where none does, `leap` runs on by
itself: only requests that need a block, or fill one, are touched, and the others follow when somebody looks again.

A stretch ends, and the general code runs, before an iteration in which

- a block cannot be allocated;
- the line of waiting requests has another head than the one that could not start before (somebody came, aged, or is let
  in), or a request left without its last token.

A head that could not start cannot start later in the stretch either: nothing frees a block, and what it would find in
the cache does not grow, since its prompt was known before. What it would find in the host may shrink, which makes it no
easier: vLLM lets a request in where all of it fits, loaded or not. Where a request has left, a stretch begins only if
nobody waits. Tests compare every decision with step by step.

Knows vLLM's private names, like `vllm/engine.py`: requests' token lists, `running`, `allocate_slots`. It is for a
scheduler in synchronous order, without speculation, connectors other than `host_tier` or anything but full attention.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from presage.serving_hooks.replay.engine import VirtualClock
from presage.serving_hooks.replay.engine_file import Cost
from presage.serving_hooks.replay.vllm_scheduler import computed as answered
from presage.serving_hooks.vllm.engine import EngineRequest, SchedulerSeam, token_lists


class _Line:
    """A request of a stretch.

    Args:
        request: that decodes.
        token: it is answered with.

    Attributes:
        done: iterations of a leap that its tokens show.
    """

    __slots__ = ("_everything", "_own", "_token", "done", "request")

    def __init__(self, request: Any, token: int) -> None:
        self.request, self.done, self._token = request, 0, token
        self._own, self._everything = token_lists(request)

    def say(self) -> None:
        """One more token."""
        self._own.append(self._token)
        self._everything.append(self._token)

    def follow(self, done: int) -> None:
        """As many iterations have been computed, and answered."""
        behind = done - self.done
        if behind:
            said = [self._token] * behind
            self._own += said
            self._everything += said
            self.request.num_computed_tokens += behind
            self.done = done


class StretchScheduler(SchedulerSeam, Scheduler):  # type: ignore[misc]
    """Goes in the place of vLLM's `Scheduler`.

    Attributes:
        quick: False runs vLLM's general code always.
        says: the token each request is answered with, by its id.
        short: iterations done in short.
        context_tokens: attended to in the last iteration done in short.
    """

    quick = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.says: dict[str, int] = {}
        self.short = 0
        self.context_tokens = 0
        self._left = 0
        self._head: Any = None
        self._full = False  # as many requests run as may
        self._output: Any = None
        self._lines: list[_Line] = []
        self._by_phase: list[list[tuple[_Line, bool]]] = []
        self._at = 0

    def in_short(self, output: Any) -> bool:
        """Whether this iteration was done in short."""
        return output is self._output

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One iteration."""
        if self._left > 0 and self._same_line() and self._allocate():
            self._left -= 1
            self.current_step += 1
            self.short += 1
            self.context_tokens += len(self.running)
            for request in self.running:
                request.num_computed_tokens += 1
            return self._output
        self._left, self._output = 0, None
        return super().schedule(throttle_prefills)

    def update_from_output(self, output: Any, computed: Any) -> Any:
        """The engine has computed an iteration; `computed` is not looked at where it was done in short."""
        if output is self._output and output is not None:
            if not self._left:
                return self._last()
            for line in self._lines:
                line.say()
            self._fill()
            return {}
        before = len(self.running)
        answers = super().update_from_output(output, computed)
        if self.quick and (len(self.running) == before or not self.waiting):
            self._begin(output)
        return answers

    def leap(self, clock: VirtualClock, cost: Cost, until_s: float) -> int:
        """Iterations in short, one after the other, while nobody has to be told of one; how many.

        Args:
            clock: virtual; moved on.
            cost: of an iteration.
            until_s: no iteration begins from then on.
        """
        if self._left < 2 or not self.may_leap() or not self._same_line():
            return 0
        many, context, done = len(self._lines), self.context_tokens, 0
        while self._left > 1 and clock.now < until_s:  # the last has answers
            self.leaps()
            for line, _ in self._by_phase[self._at]:
                line.follow(done)
            if not self._allocate():
                break
            self._left -= 1
            done += 1
            context += many
            clock.now += cost.seconds(0, many, context)
            self._fill(done)
        for line in self._lines:
            line.follow(done)
            line.done = 0
        self.context_tokens = context
        self.current_step += done
        self.short += done
        return done

    def may_leap(self) -> bool:
        """Whether nobody looks at every iteration."""
        return True

    def leaps(self) -> None:
        """An iteration of a leap begins."""

    def request_left(self, request: EngineRequest) -> None:
        """A request has left: the stretch is over."""
        self._left = 0

    def _begin(self, output: Any) -> None:
        """A stretch begins, if after this iteration every running request waits for its next token."""
        running, size = self.running, self.block_size
        decoded = output.total_num_scheduled_tokens == len(running) == len(output.num_scheduled_tokens)
        self._full = len(running) >= self.max_num_active_reqs
        self._head = self.waiting.peek_request() if self.waiting else None
        if not running or output.preempted_req_ids or not (decoded or self._full or self._head is None):
            return
        # Without a token yet the last of a prompt is still to be read: the answer to that is a first token, and told.
        if any(r.num_computed_tokens != r.num_tokens - 1 or not r.num_output_tokens for r in running):
            return
        self._left = min(request.max_tokens - request.num_output_tokens for request in running)
        self.context_tokens = sum(request.num_computed_tokens for request in running)
        self._lines = [_Line(request, self.says[request.request_id]) for request in running]
        # A request needs a block when what it has computed fills its last one, and a block is handed to the cache in
        # the iteration that fills it: two of `size` iterations, at which each request stands in the list.
        self._by_phase, self._at = [[] for _ in range(size)], 0
        for line in self._lines:
            over = line.request.num_computed_tokens % size
            for phase in {(-over) % size, (-over - 1) % size}:
                self._by_phase[phase].append((line, phase == (-over - 1) % size))
        self._output = _decodes(running)

    def _same_line(self) -> bool:
        if self.kv_holding_waiting:
            return False
        return self._full or (self.waiting.peek_request() if self.waiting else None) is self._head

    def _allocate(self) -> bool:
        """The blocks this iteration needs; False if one cannot be had, and then vLLM's code tries again."""
        manager, size = self.kv_cache_manager, self.block_size
        for line, fills in self._by_phase[self._at]:
            request = line.request
            if fills and size > 1:  # it has the block, so all that allocate_slots does is to hand it to the cache
                manager.coordinator.cache_blocks(request, request.num_computed_tokens + 1)
            elif manager.allocate_slots(request, 1) is None:
                return False
        return True

    def _fill(self, done: int = 0) -> None:
        """All have a token more; the block that the next one fills has its hash then, as vLLM has it.

        Args:
            done: iterations of a leap; 0 where all lines show what was done.
        """
        self._at = (self._at + 1) % self.block_size
        for line, fills in self._by_phase[self._at]:
            if fills:
                if done:
                    line.follow(done)
                line.request.update_block_hashes()

    def _last(self) -> Any:
        """The end of a stretch: some have their last token, and leave by vLLM's own code."""
        ends = [line.request for line in self._lines if line.request.num_output_tokens + 1 >= line.request.max_tokens]
        gone = set(map(id, ends))
        for line in self._lines:
            if id(line.request) not in gone:
                line.say()
        self._lines = [line for line in self._lines if id(line.request) not in gone]
        self._by_phase = [[one for one in phase if id(one[0].request) not in gone] for phase in self._by_phase]
        self._fill()
        for request in ends:
            request.num_in_flight_tokens += 1
        output = _decodes(ends)
        self._output = None
        answers = super().update_from_output(output, answered(self, output, self.says))
        if not self.waiting:
            self._begin(output)
        return answers


def _decodes(running: list[Any]) -> Any:
    """The output of an iteration in which each running request decodes a token, as far as policies look at it."""
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
