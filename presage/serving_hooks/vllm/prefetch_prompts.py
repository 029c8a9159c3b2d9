"""Which prompts are likely to come next, are known for certain, and are not in the cache.

A workflow is due from a new forecast on, until everything worth fetching for it is cached, or cannot be. So the work of
one iteration is bounded, and so is the number of iterations between two forecasts that find something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from presage.serving_hooks.policies.prefetch import Candidate
from presage.serving_hooks.policies.score import UNIT, Lookahead
from presage.serving_hooks.vllm import compat
from presage.serving_hooks.vllm.metadata import Step
from presage.serving_hooks.vllm.prefetch_habits import Beginning, Habits
from presage.serving_hooks.vllm.prefetch_memory import Conversation, Conversations

_MOST_VALUED: Final = 16
"""Workflows whose next prompts are valued in one iteration."""

_MOST_LOOKED_UP: Final = 8
"""Prompts of those, the likeliest, that are looked up in the cache."""

_LEAST_CHANCE: Final = 0.01
"""An agent less likely than this is not thought of, though the values of several that share a prompt add up."""


class Prompt(NamedTuple):
    """What agents of a workflow will ask next, and which of its blocks are cached.

    Attributes:
        step: of one of the agents, for whom its blocks are written.
    """

    step: Step
    agents: frozenset[str]
    beginning: Beginning
    found: list[int]

    def candidate(self, name: str) -> Candidate:
        """Its blocks that are not cached."""
        return Candidate(name, {self.step.workflow: self.agents}, self.beginning[1] - len(self.found))


class _Due(NamedTuple):
    """A workflow with a new forecast.

    Attributes:
        reached: of prompts that were fetched, the blocks that were cached before.
        settled: prompts that are cached, or cannot be.
        absent: prompts that a tier has nothing more of: for an idle engine only.
    """

    step: Step
    lookahead: Lookahead
    reached: dict[Beginning, int]
    settled: set[Beginning]
    absent: set[Beginning]


class Prompts:
    """What was asked in each workflow, and what is due.

    Args:
        limits: of the engine.
        least_value: of a prompt that is worth anything.
        most_bytes: of the memory.
        cached: blocks of the longest cached beginning of a prompt with these hashes.
    """

    def __init__(
        self, limits: compat.Limits, least_value: float, most_bytes: int, cached: Callable[[list[bytes]], list[int]]
    ) -> None:
        self.memory = Conversations(most_bytes)
        self._habits = Habits(self.memory)
        self._limits, self._least_value, self._cached = limits, least_value, cached
        self._due: dict[str, _Due] = {}

    def __bool__(self) -> bool:
        """Whether any workflow is due."""
        return bool(self._due)

    def arrives(self, step: Step, request: Any) -> None:
        """A step has come."""
        self._habits.arrives(step.learnt_as, step.workflow, step.agent, request.block_hashes)

    def completed(self, step: Step, request: Any) -> None:
        """A step has had its last token."""
        if compat.can_be_asked_again(request):
            tokens, hashes, prompt = request.all_token_ids, request.block_hashes, request.num_prompt_tokens
            conversation = Conversation(tokens, hashes, prompt, self._limits.block, request.cache_salt)
            self.memory.keep(step.workflow, step.agent, conversation)

    def forecast(self, step: Step, lookahead: Lookahead) -> None:
        """A new forecast of the workflow that `step` belongs to."""
        self._due.pop(step.workflow, None)
        if step.workflow in self.memory:
            self._due[step.workflow] = _Due(step, lookahead, {}, set(), set())

    def end(self, workflow: str) -> None:
        """The workflow has ended."""
        self._due.pop(workflow, None)
        self.memory.end(workflow)

    def fetched(self, prompt: Prompt) -> None:
        """More of it is on its way: if no more of it is found later, it cannot be cached."""
        self._due[prompt.step.workflow].reached[prompt.beginning] = len(prompt.found)

    def absent(self, prompt: Prompt) -> None:
        """A tier has no more of it."""
        self._due[prompt.step.workflow].absent.add(prompt.beginning)

    def refused(self, prompt: Prompt) -> None:
        """vLLM had no room for it."""
        self._due.pop(prompt.step.workflow, None)

    def lookahead(self, prompt: Prompt) -> Lookahead:
        """The forecast of its workflow."""
        return self._due[prompt.step.workflow].lookahead

    def missing(self, from_tier: bool) -> list[Prompt]:
        """The likeliest with blocks that are not cached; with `from_tier` only those that a tier may have.

        Costs O(agents) for each of `_MOST_VALUED` workflows and O(blocks) for each of `_MOST_LOOKED_UP` prompts.
        """
        valued: list[tuple[float, str, Beginning, set[str]]] = []
        for workflow, due in list(islice(self._due.items(), _MOST_VALUED)):
            likely = self._likely(due)
            if not likely:
                del self._due[workflow]
            valued += (
                (value, workflow, beginning, agents)
                for value, beginning, agents in likely
                if not (from_tier and beginning in due.absent)
            )
        prompts = []
        for _, workflow, beginning, agents in sorted(valued, key=lambda one: -one[0])[:_MOST_LOOKED_UP]:
            due, (conversation, blocks) = self._due[workflow], beginning
            found = self._cached(conversation.hashes(blocks))
            if due.reached.get(beginning, -1) < len(found) < blocks:
                prompts.append(Prompt(replace(due.step, agent=min(agents)), frozenset(agents), beginning, found))
            else:
                due.settled.add(beginning)
        return prompts

    def _likely(self, due: _Due) -> list[tuple[float, Beginning, set[str]]]:
        """(value, prompt, agents) of what the agents of a workflow will ask next."""
        step, most = due.step, (self._limits.length - 1) // self._limits.block
        prompts: dict[Beginning, set[str]] = {}
        for agent in due.lookahead.next_agents(_LEAST_CHANCE):
            known = self._habits.next_prompt(step.learnt_as, step.workflow, agent)
            if known is not None:
                prompts.setdefault((known[0], min(known[1], most)), set()).add(agent)
        return [
            (value, prompt, agents)
            for prompt, agents in prompts.items()
            if (value := due.lookahead.one_step(agents) / UNIT) >= self._least_value and prompt not in due.settled
        ]
