"""vLLM's scheduler, quick where an iteration can only decode one more token of each running request.

Most iterations do that and nothing else, and vLLM's code for the general case takes most of the time of a replay. From
the end of such an iteration until something else can happen every further one is done here in short: a block is
allocated where a request needs one, by vLLM's own manager and in vLLM's order, and every request gets a token. Policies
that stand before the scheduler see each iteration as ever, with an output that says so.

A stretch ends, and the general code runs, before an iteration in which

- a request would produce its last token, or a block cannot be allocated;
- the line of waiting requests has another head than the one that could not start before (somebody came, aged, or is let
  in), or a request left without its last token.

A head that could not start cannot start later in the stretch either: nothing frees a block, and what it would find in
the cache does not grow, since its prompt was known before. Tests compare every decision with step by step.

Knows vLLM's private names, like `vllm/compat.py`: requests' token lists, `running`, `allocate_slots`. It is for a
scheduler in synchronous order, without speculation, connectors or anything but full attention.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class StretchScheduler(Scheduler):  # type: ignore[misc]
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
        self._tokens: list[tuple[list[int], list[int], int]] = []
        self._by_phase: list[list[Any]] = []
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
            for own, everything, token in self._tokens:
                own.append(token)
                everything.append(token)
            size = self.block_size
            self._at = (self._at + 1) % size
            for request in self._by_phase[self._at]:
                if not request.num_tokens % size:
                    request.update_block_hashes()
            return {}
        before = len(self.running)
        answers = super().update_from_output(output, computed)
        if self.quick and len(self.running) == before:
            self._begin(output)
        return answers

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._left = 0
        return super()._free_request(request, *args, **kwargs)

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
        self._left = min(request.max_tokens - request.num_output_tokens for request in running) - 1
        if self._left <= 0:
            return
        self.context_tokens = sum(request.num_computed_tokens for request in running)
        self._tokens = [(r._output_token_ids, r._all_token_ids, self.says[r.request_id]) for r in running]
        # A request needs a block when what it has computed fills its last one, and a block is handed to the cache in
        # the iteration that fills it: two of `size` iterations, at which each request stands in the list.
        self._by_phase, self._at = [[] for _ in range(size)], 0
        for request in running:
            over = request.num_computed_tokens % size
            for phase in {(-over) % size, (-over - 1) % size}:
                self._by_phase[phase].append(request)
        self._output = _decodes(running)

    def _same_line(self) -> bool:
        if self.kv_holding_waiting:
            return False
        return self._full or (self.waiting.peek_request() if self.waiting else None) is self._head

    def _allocate(self) -> bool:
        """The blocks this iteration needs; False if one cannot be had, and then vLLM's code tries again."""
        manager = self.kv_cache_manager
        return all(manager.allocate_slots(request, 1) is not None for request in self._by_phase[self._at])


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
