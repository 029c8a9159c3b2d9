"""vLLM's own `EngineCore` around a scheduler, without a model: the calls, and their order, are vLLM's.

The executor's futures complete when the engine waits for them, and clients may leave while it waits: so an abort lands
between `schedule` and `update_from_output`, as it does in a server.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; these tests run its engine core")

import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm_samples import Request


def token_at(name: str, position: int) -> int:
    """What the model says to a request at this position of its answer: a function of nothing else."""
    return (sum(name.encode()) * 31 + position * 7) % 500


class Late(Future[Any]):
    """A future that completes once somebody waits for it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._make())
        return super().result(timeout)


class AnyWord:
    """A grammar that accepts all."""

    num_processed_tokens = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: Any, index: int) -> None: ...

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None: ...


class StubExecutor:
    """Computes what an iteration is asked for, later.

    Of the tokens that were drafted, it accepts a number that depends on the request and the position alone.

    Attributes:
        aborts: ids of requests whose clients leave while the next iteration is computed.
    """

    is_sleeping = False

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.aborts: list[str] = []
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self._under_way: deque[ModelRunnerOutput] = deque()
        self._drafting: list[str] = []

    def execute_model(self, output: Any, non_block: bool = False) -> Future[Any]:
        computed = self._computed(output)
        if not output.total_num_scheduled_tokens:
            return Late(lambda: computed)
        self._under_way.append(computed)
        return Late(lambda: None)  # `sample_tokens` has it

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        computed = self._under_way.popleft()
        late = Late(lambda: self._wait(computed))
        return late if non_block else late.result()

    def take_draft_token_ids(self) -> DraftTokenIds:
        return DraftTokenIds(self._drafting, [[1, 2] for _ in self._drafting])

    def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def reset_encoder_cache(self) -> None: ...

    def reset_mm_cache(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: Any) -> None: ...

    def _wait(self, computed: ModelRunnerOutput) -> ModelRunnerOutput:
        """Says the tokens only now: what an iteration under way says depends on what the one before it has accepted."""
        for name, tokens in zip(computed.req_ids, computed.sampled_token_ids, strict=True):
            request = self.scheduler.requests.get(name)
            if request is not None and tokens:
                at = request.num_output_tokens
                accepted = token_at(name, at) % len(tokens)
                tokens[:] = [token_at(name, at + place) for place in range(1 + accepted)]
        if self.aborts:
            self.aborts_queue.put(self.aborts)
            self.aborts = []
        return computed

    def _computed(self, output: Any) -> ModelRunnerOutput:
        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        drafted = output.scheduled_spec_decode_tokens
        self._drafting = [name for name in names if not requests[name].is_prefill_chunk]
        room = {name: [0] * (1 + len(drafted.get(name, ()))) for name in self._drafting}
        loaded = getattr(self.scheduler.connector, "done", None)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[room.get(name, []) for name in names],
            kv_connector_output=None if loaded is None else KVConnectorOutput(finished_recving=loaded()),
        )


class Core:
    """An engine core and its clients.

    Attributes:
        said, reasons: the output tokens and finish reasons of each request; a streamed one has a reason for each part.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.executor = StubExecutor(scheduler)
        ahead = isinstance(scheduler, AsyncScheduler)
        core = self.core = EngineCore.__new__(EngineCore)
        core.vllm_config, core.scheduler, core.model_executor = scheduler.vllm_config, scheduler, self.executor
        core.log_stats = False
        core.use_spec_decode = core.check_for_draft_tokens = scheduler.num_spec_tokens > 0
        core.is_mm_encoder_only = core.is_pooling_model = False
        core.mm_receiver_cache, core._weight_version = None, "default"
        core.structured_output_manager = scheduler.structured_output_manager
        core.batch_queue_size = 2 if ahead else 1
        core.batch_queue = deque(maxlen=2) if ahead else None
        core.async_scheduling, core.aborts_queue = ahead, self.executor.aborts_queue
        core._idle_state_callbacks = []
        most = scheduler.vllm_config.scheduler_config.max_num_seqs * (1 + scheduler.num_spec_tokens)
        scheduler.structured_output_manager._grammar_bitmask = torch.zeros((most, 16), dtype=torch.int32)
        self.said: dict[str, list[int]] = {}
        self.reasons: dict[str, list[str]] = {}

    def step(self) -> None:
        """One call of the loop, as `EngineCoreProc._process_engine_step` makes it."""
        core = self.core
        outputs, executed = (core.step if core.batch_queue is None else core.step_with_batch_queue)()
        for answers in (outputs or {}).values():
            for answer in answers.outputs:
                self.said.setdefault(answer.request_id, []).extend(answer.new_token_ids)
                if answer.finish_reason is not None:
                    self.reasons.setdefault(answer.request_id, []).append(str(answer.finish_reason))
        core.post_step(executed)

    @property
    def works(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def run(self, most: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.works:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {list(self.scheduler.requests)}")


def structured(request: Request, ready: Future[Any] | None = None) -> Request:
    """The request with a structured answer, whose grammar is compiled once `ready` is done."""
    made = StructuredOutputRequest(StructuredOutputsParams(regex=".*"))
    made.grammar = AnyWord() if ready is None else ready
    request.structured_output_request = made
    if ready is not None:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return request


__all__ = ["AnyWord", "Core", "StubExecutor", "structured", "token_at"]
