"""Brings into idle blocks what the next agent will ask for: PBKV §4.3 inside vLLM's scheduler.

A prefetch is a request of nobody's for one token, over as much of a known prompt (prefetch_habits.py) as one iteration
may fetch (policies/prefetch.py). vLLM finds the part that is cached, loads or prefills the rest, and keeps the blocks
when the request ends. Clients never see it. It is there for one iteration, longer only while an offload tier loads:

- it starts only where no request of a client waits or prefills, and at most one iteration of it is under way;
- beside requests that decode it only loads, from a KV connector that says it has the blocks: a prefill would lengthen
  their step. Without a tier it prefills on an engine that is idle, which is when a tool runs;
- S = min(blank and retired blocks, rate × step time), so a request that comes meanwhile waits no longer than it would
  for a decode step. The rate is that of prefill; a tier that is slower than that would not be one;
- the moment a client's request waits, all of it is aborted before vLLM schedules. Blocks that a tier is still writing
  to follow when they are written; two for each running request stay free for that time.

We cut the prompt to the chunk and leave `long_prefill_token_threshold` alone, since vLLM ignores it where there is only
one request.

An idle engine is kept awake (`wants`) only while there is something that may be fetched: each iteration either fetches
a block more, of finitely many, or strikes out a workflow, or gives up until a forecast, an end or a request comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from presage.serving_hooks.policies.prefetch import Candidate, Engine, Prefetch, PrefetchConfig
from presage.serving_hooks.policies.score import UNIT, Lookahead
from presage.serving_hooks.vllm import compat
from presage.serving_hooks.vllm.blocks import ScoredBlocks
from presage.serving_hooks.vllm.metadata import Step
from presage.serving_hooks.vllm.prefetch_habits import Beginning, Habits
from presage.serving_hooks.vllm.prefetch_memory import Conversation, Conversations
from presage.serving_hooks.vllm.prefetch_pace import Pace
from presage.serving_hooks.vllm.prefetch_yield import Yield
from presage.serving_hooks.vllm.switch import Switch

_MOST_VALUED: Final = 64
"""Workflows whose next prompts are valued in one iteration."""

_MOST_LOOKED_UP: Final = 8
"""Prompts of those, the likeliest, that are looked up in the cache."""


class _Due(NamedTuple):
    """A workflow with a new forecast.

    Attributes:
        reached: of prompts that were fetched, the blocks that were cached before.
        settled: prompts that are cached, or cannot be.
    """

    step: Step
    lookahead: Lookahead
    reached: dict[Beginning, int]
    settled: set[Beginning]


class _Prompt(NamedTuple):
    """What agents of a workflow will ask next, and which of its blocks are cached."""

    step: Step
    agents: frozenset[str]
    beginning: Beginning
    found: list[int]


class _Internal(NamedTuple):
    """A request of ours."""

    request: Any
    prompt: _Prompt


class Prefetcher:
    """Starts and ends internal requests of a scheduler; a `Retention` that hands on what it is told.

    Args:
        scheduler: vLLM's, with our queue of free blocks.
        add: gives a request to vLLM, at the end of all queues.
        blocks: that queue.
        config: what is worth fetching.
        most_bytes: of the memory of prompts.
        switch: off once anything has failed.
        clock: seconds, rising.

    Attributes:
        counts: internal requests started, aborted, refused.
    """

    def __init__(
        self,
        scheduler: Any,
        add: Callable[[Any], None],
        blocks: ScoredBlocks,
        config: PrefetchConfig,
        most_bytes: int,
        switch: Switch,
        clock: Callable[[], float],
    ) -> None:
        self.switch = switch
        self.counts: Counter[str] = Counter()
        self._scheduler, self._add, self._blocks = scheduler, add, blocks
        self._policy = Prefetch(config)
        self._conversations = Conversations(most_bytes)
        self._habits = Habits(self._conversations)
        self._pace = Pace(clock)
        held = compat.block_pool(scheduler).blocks
        self._yield = Yield(lambda block: held[block].block_hash)
        self._block: int = scheduler.block_size
        self._due: dict[str, _Due] = {}
        self._stuck = False
        self._alive: dict[str, _Internal] = {}
        self._unreported: set[str] = set()
        self._lookups: list[tuple[int, int]] = []
        self._number = 0

    # What is known of workflows.

    def arrives(self, step: Step, request: Any) -> None:
        """A step of a workflow has come."""
        self.switch.attempt(self._habits.arrives, step.workflow_type, step.workflow, step.agent, request.block_hashes)

    def left(self, request: Any, step: Step | None) -> None:
        """A request has left the engine, and what it was; before anything is forecast from that."""
        self._stuck = False
        if self._alive.pop(request.request_id, None) is None and step is not None and compat.completed(request):
            self.switch.attempt(self._remember, step, request)

    def forecast(self, step: Step, lookahead: Lookahead) -> None:
        """A new forecast of the workflow that `step` belongs to."""
        self._blocks.forecast(step, lookahead)
        self.switch.attempt(self._forecast, step, lookahead)

    def end(self, workflow: str) -> None:
        """A workflow has ended: nothing of it may be touched after that."""
        self.switch.attempt(self._end, workflow)
        self._blocks.end(workflow)

    # What happens in the engine.

    def wants(self) -> bool:
        """Whether an idle engine has something to fetch."""
        return bool(self._due) and self.switch.on and not self._stuck and compat.is_unpaused(self._scheduler)

    def before(self) -> None:
        """An iteration is about to be scheduled."""
        self.switch.attempt(self._before)
        if not self.switch.on:
            self.drop()

    def begins(self, request_id: str, found: list[int]) -> bool:
        """A request is selected for the first time and these blocks of its prompt were found; whether it is ours."""
        if request_id in self._alive:
            return True
        self._yield.found(found)
        return False

    def after(self, output: Any) -> None:
        """An iteration has been scheduled."""
        self.switch.attempt(self._after, output)

    def done(self, output: Any, answers: dict[int, Any]) -> None:
        """The output of an iteration is there; takes what is ours out of what clients are told."""
        self.switch.attempt(self._pace.done, id(output))
        if self._unreported:
            compat.hide_answers(answers, self._unreported)
            self._unreported &= self._alive.keys()

    def drop(self) -> None:
        """All internal requests end now."""
        try:
            self._abort(self._alive)
        except Exception as error:
            self.switch.off(error)

    def step(self, request_id: str) -> Step | None:
        """For whom an internal request fetches; None for any other."""
        internal = self._alive.get(request_id)
        return None if internal is None else internal.prompt.step

    # What is told.

    def hide_from_stats(self, stats: Any) -> None:
        """Takes internal requests out of what is published."""
        states = [compat.state(internal.request) for internal in self._alive.values()]
        self.switch.attempt(compat.hide_from_stats, stats, states, self._lookups)
        self._lookups.clear()

    def status(self) -> dict[str, Any]:
        """What was started and what came of it; blocks given up before anybody asked for them are wasted."""
        done = self._yield
        return {
            "on": self.switch.on,
            **{name: self.counts[name] for name in ("started", "aborted", "refused")},
            "tokens": done.fetched * self._block,
            "used_tokens": done.used * self._block,
            "wasted_tokens": done.wasted() * self._block,
            "memory_bytes": self._conversations.bytes,
            "forgotten": self._conversations.dropped,
        }

    # What the switch guards.

    def _remember(self, step: Step, request: Any) -> None:
        if compat.can_be_asked_again(request):
            conversation = Conversation(
                request.all_token_ids, request.block_hashes, request.num_prompt_tokens, self._block, request.cache_salt
            )
            self._conversations.keep(step.workflow, step.agent, conversation)

    def _forecast(self, step: Step, lookahead: Lookahead) -> None:
        self._stuck = False
        self._due.pop(step.workflow, None)
        if step.workflow in self._conversations:
            self._due[step.workflow] = _Due(step, lookahead, {}, set())

    def _end(self, workflow: str) -> None:
        self._stuck = False
        self._due.pop(workflow, None)
        self._conversations.end(workflow)
        self._abort([name for name, one in self._alive.items() if one.prompt.step.workflow == workflow])

    def _before(self) -> None:
        if not self._may_run():
            self._abort(self._alive)
        elif self._alive:
            self._abort(self._not_under_way())
        elif self._due and not self._stuck:
            self._start()

    def _after(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            internal = self._alive.get(new.req_id)
            if internal is not None:
                self._begun(internal, new.block_ids[0], new.num_computed_tokens)
        ours = not self._alive.keys().isdisjoint(output.num_scheduled_tokens)
        counts = bool(output.num_scheduled_tokens) and not ours
        self._pace.scheduled(id(output), compat.prefilled(self._scheduler, output), counts)
        refused = self._not_under_way()
        for name in refused:
            self.counts["refused"] += 1
            self._due.pop(self._alive[name].prompt.step.workflow, None)
        self._abort(refused)

    def _may_run(self) -> bool:
        """Whether no request of a client waits or prefills."""
        scheduler = self._scheduler
        waiting = sum(map(len, compat.waiting_queues(scheduler))) - scheduler.num_waiting_for_streaming_input
        ours = sum(compat.state(internal.request) != "RUNNING" for internal in self._alive.values())
        return (
            waiting == ours
            and compat.is_unpaused(scheduler)
            and not any(r.is_prefill_chunk and r.request_id not in self._alive for r in scheduler.running)
        )

    def _not_under_way(self) -> list[str]:
        """Internal requests that vLLM has not started, or has preempted."""
        under_way = ("RUNNING", "WAITING_FOR_REMOTE_KVS")
        return [name for name, one in self._alive.items() if compat.state(one.request) not in under_way]

    def _start(self) -> None:
        decoding = len(self._scheduler.running)
        room = self._scheduler.max_num_running_reqs - decoding
        if decoding and (self._scheduler.connector is None or room <= 0):
            return
        prompts = self._prompts()
        candidates = [
            Candidate(str(number), {prompt.step.workflow: prompt.agents}, prompt.beginning[1] - len(prompt.found))
            for number, prompt in enumerate(prompts)
        ]
        forecasts = {prompt.step.workflow: self._due[prompt.step.workflow].lookahead for prompt in prompts}
        plan = self._policy.plan(self._engine(prompts, decoding), candidates, forecasts)
        self._stuck = bool(prompts) and not plan.fetches
        for fetch in plan.fetches[:room]:
            self._fetch(prompts[int(fetch.name)], fetch.blocks, bool(decoding))

    def _engine(self, prompts: list[_Prompt], decoding: int) -> Engine:
        found = {block for prompt in prompts for block in prompt.found}
        # Blocks of a load come back only when it is done; those that decode go on needing some.
        spare = min(self._blocks.spare(found), self._blocks.num_free_blocks - len(found) - 2 * decoding)
        pace = self._pace
        blocks_per_s = pace.prefilled_per_s / self._block
        most = self._scheduler.max_num_scheduled_tokens // self._block  # so that one iteration is enough
        if pace.step_s * blocks_per_s > most:
            blocks_per_s = most / pace.step_s
        return Engine(True, spare, blocks_per_s, pace.step_s)

    def _prompts(self) -> list[_Prompt]:
        """The likeliest prompts with blocks that are not cached; workflows without any are not due any more."""
        valued: list[tuple[float, str, Beginning, set[str]]] = []
        for workflow, due in list(islice(self._due.items(), _MOST_VALUED)):
            likely = self._likely(due)
            if not likely:
                del self._due[workflow]
            valued += ((value, workflow, beginning, agents) for value, beginning, agents in likely)
        prompts = []
        for _, workflow, beginning, agents in sorted(valued, key=lambda one: -one[0])[:_MOST_LOOKED_UP]:
            due, (conversation, blocks) = self._due[workflow], beginning
            found = compat.cached(self._scheduler, conversation.hashes(blocks))
            if due.reached.get(beginning, -1) < len(found) < blocks:
                prompts.append(_Prompt(replace(due.step, agent=min(agents)), frozenset(agents), beginning, found))
            else:
                due.settled.add(beginning)
        return prompts

    def _likely(self, due: _Due) -> list[tuple[float, Beginning, set[str]]]:
        """(value, prompt, agents) of what the agents of a workflow will ask next."""
        step, most = due.step, (self._scheduler.max_model_len - 1) // self._block
        prompts: dict[Beginning, set[str]] = {}
        for agent in due.lookahead.agents():
            if due.lookahead.one_step((agent,)):
                known = self._habits.next_prompt(step.workflow_type, step.workflow, agent)
                if known is not None:
                    prompts.setdefault((known[0], min(known[1], most)), set()).add(agent)
        return [
            (value, prompt, agents)
            for prompt, agents in prompts.items()
            if (value := due.lookahead.one_step(agents) / UNIT) >= self._policy.config.least_value
            and prompt not in due.settled
        ]

    def _fetch(self, prompt: _Prompt, blocks: int, only_load: bool) -> None:
        self._due[prompt.step.workflow].reached[prompt.beginning] = found = len(prompt.found)
        if only_load:
            blocks = min(blocks, self._loadable(prompt, found + blocks))
        if blocks:
            self._begin(prompt, found + blocks)

    def _loadable(self, prompt: _Prompt, blocks: int) -> int:
        """How many of the first blocks, after those that were found, a tier has. It answers for requests it knows."""
        name = self._begin(prompt, blocks)
        loads = compat.loads(self._scheduler, self._alive[name].request, len(prompt.found) * self._block)
        self._abort([name])
        for count in ("started", "aborted"):
            self.counts[count] -= 1
        return loads // self._block

    def _begin(self, prompt: _Prompt, blocks: int) -> str:
        self._number += 1
        name, conversation = f"presage-prefetch-{self._number}", prompt.beginning[0]
        tokens = conversation.tokens[: blocks * self._block].tolist()
        request = compat.internal_request(name, tokens, conversation.hashes(blocks), conversation.salt)
        self._alive[name] = _Internal(request, prompt)
        self._unreported.add(name)
        self._add(request)
        self.counts["started"] += 1
        return name

    def _begun(self, internal: _Internal, blocks: list[int], found_tokens: int) -> None:
        prompt, whole = internal.prompt, internal.request.num_prompt_tokens // self._block
        self._blocks.fetched(prompt.step.workflow, prompt.agents, blocks[:whole])
        self._yield.add(blocks[len(prompt.found) : whole])
        self._lookups.append((internal.request.num_prompt_tokens, found_tokens))

    def _abort(self, names: Iterable[str]) -> None:
        names = list(names)
        if names:
            self.counts["aborted"] += len(names)
            compat.abort(self._scheduler, names)
