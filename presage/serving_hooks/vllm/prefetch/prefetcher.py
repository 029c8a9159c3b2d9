"""Prefetches the prompt of the next agent into idle blocks: PBKV §4.3 inside vLLM's scheduler.

A prefetch is an internal one-token request over as much of a known prompt (prompts.py) as one iteration may
fetch (policies/prefetch.py). vLLM finds the cached part, loads or prefills the rest, and keeps the blocks when the
request ends. It lasts one iteration, longer only while a connector loads:

- It starts only while no client's request waits or prefills, and is aborted before vLLM schedules when one waits.
- Beside decoding requests it only loads, from a KV connector that has the blocks: a prefill would lengthen their step.
  Without a connector it prefills on an idle engine, which is when a tool runs.
- S = min(blank and retired blocks, rate × step time), so a request that arrives meanwhile waits for at most one decode
  step. The rate is that of prefill; connectors are assumed to be faster.
- Beside decoding requests it waits until the workflow may return soon, by the forecast of its return time.
- Blocks that a connector still writes to are freed when it is done; for that time two blocks per running request stay
  free.

The prompt is cut to the chunk; `long_prefill_token_threshold` stays, since vLLM ignores it for a single request.

An idle engine stays awake (`wants`) only while something may be fetched: each iteration fetches one more block of
finitely many, drops a workflow, or stops until a forecast, an end or a request comes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from presage.serving_hooks.listeners import Found, Listener
from presage.serving_hooks.modes import Mode, Modes, Switch
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.prefetch import PrefetchConfig, plan
from presage.serving_hooks.policies.score import Lookahead
from presage.serving_hooks.policies.workload import RunningMean
from presage.serving_hooks.status import PrefetchStatus
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.engine import EnginePort, EngineRequest, Iteration
from presage.serving_hooks.vllm.iteration_times import IterationTimer
from presage.serving_hooks.vllm.prefetch.prompts import ExpectedPrompts, Prompt
from presage.serving_hooks.workflows import EndReason, RunningStep, Workflow
from presage.serving_hooks.workflows.choices import LeftStep
from presage.serving_hooks.workflows.identity import Step

Returning = Callable[[str], "tuple[ReturnCurve, float] | None"]
"""The forecast of the return time of a workflow that is away, and since when it is; None without one."""

_WINDOW: Final = 64
"""Steps that a running mean covers."""


class Yield:
    """Counts whether prefetched blocks were used by a client's step or evicted before.

    Blocks are compared by contents, so one that was evicted and filled again does not count as used.

    Args:
        held: the hash of a block's contents, by its id; None if the prefix cache does not have it.
    """

    def __init__(self, held: Callable[[int], object]) -> None:
        self.fetched = self.used = 0
        self._held = held
        self._open: dict[int, object] = {}
        self._wasted = 0

    def add(self, blocks: Iterable[int]) -> None:
        """These blocks were fetched now."""
        for block in blocks:
            self._wasted += block in self._open
            self._open[block] = self._held(block)
            self.fetched += 1

    def found(self, blocks: Iterable[int]) -> None:
        """A client's step found these blocks."""
        for block in blocks:
            if block in self._open:
                as_fetched = self._open.pop(block) == self._held(block)
                self.used += as_fetched
                self._wasted += not as_fetched

    def wasted(self) -> int:
        """Blocks evicted before they were used. Costs O(blocks not yet used)."""
        gone = [block for block, held in self._open.items() if held != self._held(block)]
        for block in gone:
            del self._open[block]
        self._wasted += len(gone)
        return self._wasted


class Pace:
    """Running means of the seconds of a decode step and of prompt tokens prefilled per second.

    Steps that prefetch are excluded, so the means cover the engine's work for clients only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timer = IterationTimer[tuple[int, bool]]()
        self._decode, self._tokens, self._seconds = (RunningMean(_WINDOW) for _ in range(3))

    def scheduled(self, output: object, prefilled: int, counts: bool) -> None:
        """A step is scheduled with so many prompt tokens; it `counts` if it works for clients and nothing else."""
        self._timer.scheduled(output, (prefilled, counts), self._clock())

    def done(self, output: object) -> None:
        """The output of a step has arrived. Unknown steps are ignored."""
        timed = self._timer.updated(output, self._clock())
        (prefilled, counts), seconds = timed if timed is not None else ((0, False), 0.0)
        if counts and prefilled:
            self._tokens.observe(prefilled)
            self._seconds.observe(seconds)
        elif counts:
            self._decode.observe(seconds)

    @property
    def step_s(self) -> float:
        """Seconds of a decode step; 0 while unknown, so that nothing fits into it."""
        return self._decode.mean

    @property
    def prefilled_per_s(self) -> float:
        """Prompt tokens per second of steps that prefill; 0 while unknown."""
        return self._tokens.mean / self._seconds.mean if self._seconds.mean else 0.0


class Prefetcher(Listener[EngineRequest]):
    """Starts and ends internal requests of a scheduler; forwards forecasts and ends to the block order.

    Args:
        add: gives a request to vLLM, at the end of all queues.
        most_bytes: limit of the memory of prompts.
        returning: forecasts of return times; None to fetch prompts as soon as they are forecast, as PBKV does.
    """

    def __init__(
        self,
        port: EnginePort,
        add: Callable[[EngineRequest], None],
        blocks: ScoredBlocks,
        config: PrefetchConfig,
        most_bytes: int,
        switch: Switch,
        clock: Callable[[], float],
        modes: Modes,
        returning: Returning | None,
    ) -> None:
        self.switch, self._modes, self._clock, self._returning = switch, modes, clock, returning
        self._port, self._add, self._blocks, self._block = port, add, blocks, port.block_tokens
        self._config, self._most_bytes = config, most_bytes
        self._counts: Counter[str] = Counter()
        self.begin()
        self._pace = Pace(clock)
        self._yield = Yield(lambda block: port.blocks[block].block_hash)
        self._stuck = False
        self._alive: dict[str, Prompt] = {}  # internal requests
        self._unreported: set[str] = set()
        self._fresh: set[str] = set()  # not yet in an iteration
        self._lookups: list[tuple[int, int]] = []
        self._number = 0

    def begin(self) -> None:
        """Forgets all prompts."""
        self._prompts = ExpectedPrompts(self._port, self._config.least_value, self._most_bytes)

    # Workflow events.

    def request_arrived(self, request: EngineRequest, step: RunningStep | None) -> None:
        """A step of a workflow has arrived."""
        if step is not None and self._modes.of("prefetch", step.step.stats_key):
            self._prompts.arrives(step.step, request)

    def request_scheduled(self, request: EngineRequest, step: RunningStep | None, found: Found) -> None:
        """A client's request is selected for the first time."""
        self._yield.found(found.blocks)

    def request_finished(self, request: EngineRequest, step: RunningStep | None, left: LeftStep | None) -> None:
        """A request has left the engine; called before its completion forecast is made."""
        if step is not None and engine.completed(request):
            self._prompts.completed(step.step, request)

    def left(self, request_id: str) -> None:
        """A request has left the engine, perhaps an internal one; also called when prefetch has failed."""
        self._stuck = False
        self._alive.pop(request_id, None)

    @property
    def pressed(self) -> bool:
        """Whether forecasts matter now: prompts are fetched by them, or the blocks are pressed."""
        return self.switch.on or self._blocks.pressed

    def forecast(
        self, step: Step, lookahead: Lookahead, curve: ReturnCurve | None, since: float, step_s: float
    ) -> None:
        """New forecasts of the workflow that `step` belongs to."""
        self._blocks.forecast(step, lookahead, curve, since, step_s)
        self._stuck = False
        if self._modes.of("prefetch", step.stats_key):
            returning = self._returning(step.workflow) if self._returning is not None else None
            self.switch.attempt(self._prompts.forecast, step, lookahead, returning, self._pace.prefilled_per_s)

    def workflow_ended(self, workflow: Workflow, reason: EndReason) -> None:
        """A workflow has ended; its prompts are forgotten."""
        self._stuck = False
        self._prompts.end(workflow.key)

    # Engine events.

    def wants(self) -> bool:
        """Whether an idle engine has something to fetch."""
        return bool(self._prompts) and self.switch.on and not self._stuck and self._port.unpaused

    def before(self) -> None:
        """An iteration is about to be scheduled."""
        self.switch.attempt(self._before)
        if not self.switch.on:
            self.drop()

    def fetches(self, request_id: str) -> bool:
        """Whether a request is an internal one."""
        return request_id in self._alive

    def done(self, output: Iteration, answers: dict[int, Any]) -> None:
        """The output of an iteration has arrived; removes internal requests from the answers."""
        self.switch.attempt(self._pace.done, output)
        try:  # also after a failure: a prefetch started before it may still answer
            if self._unreported:
                engine.hide_answers(answers, self._unreported)
                self._unreported &= self._alive.keys()
        except Exception as error:
            self.switch.off(error)

    def drop(self) -> None:
        """Aborts all internal requests."""
        try:
            self._abort(self._alive)
        except Exception as error:
            self.switch.off(error)

    def step(self, request_id: str) -> Step | None:
        """The step for which an internal request fetches; None for other requests."""
        prompt = self._alive.get(request_id)
        return None if prompt is None else prompt.step

    # Status.

    def hide_from_stats(self, stats: Any) -> None:
        """Removes internal requests from vLLM's statistics."""
        requests = self._port.requests
        states = [engine.state(requests[name]) for name in self._alive if name in requests]
        self.switch.attempt(engine.hide_from_stats, stats, states, self._lookups)
        self._lookups.clear()

    def status(self) -> PrefetchStatus:
        """Requests started, and blocks fetched, used and wasted (evicted unused)."""
        done, counts = self._yield, self._counts
        return PrefetchStatus(
            on=self.switch.on,
            started=counts["started"],
            would_start=counts["would start"],
            aborted=counts["aborted"],
            refused=counts["refused"],
            tokens=done.fetched * self._block,
            used_tokens=done.used * self._block,
            wasted_tokens=done.wasted() * self._block,
            memory_bytes=self._prompts.memory.bytes,
            forgotten=self._prompts.memory.dropped,
        )

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "prefetch conversations": len(self._prompts.memory),
            "prefetch due": len(self._prompts),
            "prefetch requests": len(self._alive),
        }

    # Guarded by the switch.

    def _before(self) -> None:
        if self._stuck and self._prompts.next_s < math.inf:
            self._stuck = self._clock() < self._prompts.next_s
        if not self._alive and (not self._prompts or self._stuck or self._busy()):
            return
        if not self._may_run():
            self._abort(self._alive)
        elif self._alive:
            self._abort(self._to_abort())
        else:
            self._start()

    def _busy(self) -> bool:
        """Whether requests run and leave no room for a load beside them."""
        running = len(self._port.running)
        return bool(running) and (running >= self._port.most_running or not self._port.has_connector)

    def _may_run(self) -> bool:
        """Whether the engine is not paused, and no client's request waits or prefills."""
        port = self._port
        ours = sum(engine.state(port.requests[name]) != "RUNNING" for name in self._alive)
        return (
            port.num_waiting() == ours
            and port.unpaused
            and not any(r.is_prefill_chunk and r.request_id not in self._alive for r in port.running)
        )

    def _to_abort(self) -> list[str]:
        """Internal requests that vLLM has not started or has preempted, and those whose workflow has ended.

        The latter are not aborted at that end, which may come while an iteration computes them.
        """
        under_way = ("RUNNING", "WAITING_FOR_REMOTE_KVS")
        return [
            name
            for name, prompt in self._alive.items()
            if prompt.step.workflow not in self._prompts.memory
            or engine.state(self._port.requests[name]) not in under_way
        ]

    def iteration(self, output: Iteration, began_at: float) -> None:
        """An iteration has been scheduled."""
        requests = self._port.requests
        for new in output.scheduled_new_reqs:
            prompt = self._alive.get(new.req_id)
            if prompt is not None:
                blocks = new.block_ids[0][: requests[new.req_id].num_prompt_tokens // self._block]
                self._blocks.filled_for(prompt.step.workflow, prompt.agents, blocks)
                self._yield.add(blocks[len(prompt.found) :])
        ours = any(name in output.num_scheduled_tokens for name in self._alive)
        counts = bool(output.num_scheduled_tokens) and not ours
        self._pace.scheduled(output, self._port.prefill_tokens(output), counts)
        refused = self._to_abort()
        for name in refused:
            self._counts["refused"] += 1
            self._prompts.refused(self._alive[name])
        self._abort(refused)
        for name in self._fresh & self._alive.keys():
            self._lookups.append((requests[name].num_prompt_tokens, len(self._alive[name].found) * self._block))
        self._fresh.clear()

    def _start(self) -> None:
        decoding = len(self._port.running)
        prompts = self._prompts.missing(bool(decoding), self._clock())
        missing = [(prompt.value, prompt.beginning[1] - len(prompt.found)) for prompt in prompts]
        moved = self._pace.prefilled_per_s / self._block * self._pace.step_s
        planned = plan(self._config, self._spare(prompts, decoding), moved, missing)
        fetches = [(prompts[place], blocks) for place, blocks in planned[: self._port.most_running - decoding]]
        acted_on = [fetch for fetch in fetches if self._modes.of("prefetch", fetch[0].step.stats_key) is Mode.ON]
        self._counts["would start"] += len(fetches) - len(acted_on)
        # An idle engine without prompts to fetch has settled some workflows and tries the next ones.
        self._stuck = not acted_on and bool(prompts or decoding)
        for prompt, blocks in acted_on:
            self._fetch(prompt, blocks, bool(decoding))

    def _spare(self, prompts: Iterable[Prompt], decoding: int) -> int:
        cached = {block for prompt in prompts for block in prompt.found}
        # A load frees its blocks only when it is done; decoding requests need some meanwhile.
        free = int(self._blocks.num_free_blocks) - len(cached) - 2 * decoding
        one_iteration = self._port.most_tokens // self._block
        return min(self._blocks.spare(cached), free, one_iteration)

    def _fetch(self, prompt: Prompt, blocks: int, only_load: bool) -> None:
        if only_load:
            blocks = min(blocks, self._loadable(prompt, len(prompt.found) + blocks))
        if not blocks:
            self._prompts.absent(prompt)
            return
        self._prompts.fetched(prompt)
        self._fresh.add(self._begin(prompt, len(prompt.found) + blocks))
        self._counts["started"] += 1

    def _loadable(self, prompt: Prompt, blocks: int) -> int:
        """How many blocks after the found ones the connector has; it answers only for requests in the engine."""
        name = self._begin(prompt, blocks)
        loads = self._port.loadable_tokens(self._port.requests[name], len(prompt.found) * self._block)
        self._port.abort([name])
        return loads // self._block

    def _begin(self, prompt: Prompt, blocks: int) -> str:
        self._number += 1
        name, conversation = f"presage-prefetch-{self._number}", prompt.beginning[0]
        tokens = conversation.tokens[: blocks * self._block + self._port.hash_lookahead].tolist()
        request = engine.internal_request(name, tokens, conversation.hashes(blocks), conversation.salt)
        self._alive[name] = prompt
        self._unreported.add(name)
        self._add(request)
        return name

    def _abort(self, names: Iterable[str]) -> None:
        names = list(names)
        if names:
            self._counts["aborted"] += len(names)
            self._port.abort(names)
