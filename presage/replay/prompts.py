"""Token ids of prompts and outputs, which share prefixes exactly as recorded or as the convention defines.

Each part of a prompt is one id repeated: prompts with the same opening share its id, an agent's closings share an id,
and each step's new tokens and output have their own. The hash of a block covers all before it, so blocks of one
repeated id differ by position. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from presage.replay.workload import PromptConvention, ReplayJob

Hashes = list[bytes]

HASH_BYTES: Final = 32
"""Length of a hash; vLLM's keys of blocks may have the group of layers behind it."""


class LazyTokens:
    """Token ids of a request, as vLLM uses the list of them, which are made when one is read: most are only counted."""

    __slots__ = ("_count", "_made", "_make", "_more")

    def __init__(self, make: Callable[[], list[int]], count: int) -> None:
        self._make, self._count = make, count
        self._made: list[int] | None = None
        self._more: list[int] = []

    def __len__(self) -> int:
        return self._count + len(self._more)

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __getitem__(self, at: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        if isinstance(at, slice) and at.step is None:
            first, end, _ = at.indices(len(self))
            return self._made[first:end] + self._more[max(0, first - self._count) : max(0, end - self._count)]
        return (self._made + self._more)[at]

    def __iadd__(self, tokens: Sequence[int]) -> LazyTokens:
        self._more += tokens
        return self

    def append(self, token: int) -> None:
        """Appends one."""
        self._more.append(token)

    extend = __iadd__

    def copy(self) -> LazyTokens:
        """Its own copy."""
        copied = LazyTokens(self._make, self._count)
        return copied.__iadd__(self._more)


class PromptIds:
    """Ids for all jobs of a workload.

    Attributes, empty until `hash_all` is called:
        own: hashes of the blocks of a step's prompt and output that are not those of the step it continues, by job and
            step.
        owner: the first job that has a block, by hash.
        sharers: all jobs that have a block, by hash; only blocks of several jobs.
    """

    def __init__(self, jobs: Sequence[ReplayJob], convention: PromptConvention) -> None:
        self._convention = convention
        self._ids: dict[tuple[str, ...], int] = {}
        for job in jobs:
            for step in job.steps:
                self._ids.setdefault(self._opening(job, step.agent), 1 + len(self._ids))
                self._ids.setdefault(("closing", job.workflow_type, step.agent), 1 + len(self._ids))
        self._first = [1 + len(self._ids)]
        for job in jobs:
            self._first.append(self._first[-1] + 2 * len(job.steps))
        self._jobs = jobs
        self._shared: list[list[int]] = []  # by job and step: blocks of the step it continues
        self.own: list[list[Hashes]] = []
        self.owner: dict[bytes, int] = {}
        self.sharers: dict[bytes, set[int]] = {}

    def prompt(self, number: int, index: int) -> list[int]:
        """Token ids of the prompt of a step."""
        return self._tokens(number, index, 0, self._jobs[number].steps[index].prompt_tokens)

    def says(self, number: int, index: int) -> int:
        """The id of which a step's output consists."""
        return self._first[number] + 2 * index + 1

    def hash_all(self, block_tokens: int, hashed: Callable[[bytes | None, list[int]], bytes]) -> None:
        """Computes the hashes of all blocks once; they are the same under every policy and seed.

        `hashed` gives the hash of a block, from that of the block before it and its own token ids.
        """
        if self.own:
            return
        for number, job in enumerate(self._jobs):
            self._shared.append([_shared_tokens(job, index) // block_tokens for index in range(len(job.steps))])
            self.own.append([])
            for index, step in enumerate(job.steps):
                self.own[number].append([])
                hashes = self.known(number, index)
                last, start = hashes[-1] if hashes else None, len(hashes) * block_tokens
                tokens = self._tokens(number, index, start, step.prompt_tokens + step.output_tokens)
                for place in range(0, len(tokens) - block_tokens + 1, block_tokens):
                    last = hashed(last, tokens[place : place + block_tokens])
                    self.own[number][index].append(last)
                    first = self.owner.setdefault(last, number)
                    if first != number:
                        self.sharers.setdefault(last, {first}).add(number)

    def known(self, number: int, index: int) -> Hashes:
        """Hashes of the prompt and output of a step; empty if they were not computed."""
        hashes: Hashes = []
        for step, blocks in self.stretches(number, index):
            hashes += self.own[number][step][:blocks]
        return hashes

    def stretches(self, number: int, index: int) -> list[tuple[int, int]]:
        """Of which steps the blocks of a step's prompt and output are its `own`, and how many, from the front."""
        if not self.own:
            return []
        own, shared, steps = self.own[number], self._shared[number], self._jobs[number].steps
        stretches = []
        step: int | None = index
        end = shared[index] + len(own[index])
        while step is not None and end:
            if end > shared[step]:
                stretches.append((step, end - shared[step]))
                end = shared[step]
            step = steps[step].continues
        return stretches[::-1]

    def _tokens(self, number: int, index: int, start: int, end: int) -> list[int]:
        """Tokens start to end of the prompt and output of a step."""
        job, parts = self._jobs[number], list[tuple[int, int]]()

        def part(token: int, begin: int) -> None:
            """The tokens before `end` are this one, from `begin` on."""
            nonlocal end
            if end > max(begin, start):
                parts.append((token, end - max(begin, start)))
                end = max(begin, start)

        step = job.steps[index]
        part(self.says(number, index), step.prompt_tokens)
        part(self._ids["closing", job.workflow_type, step.agent], step.prompt_tokens - step.closing_tokens)
        while step.continues is not None:
            part(self._first[number] + 2 * index, step.repeated_tokens)
            index = step.continues
            step = job.steps[index]
            part(self.says(number, index), step.prompt_tokens - step.closing_tokens)
        opened = step.hash_tokens * len(step.hashed) if step.hashed else step.opening_tokens
        part(self._first[number] + 2 * index, opened)
        for place, hashed in reversed(list(enumerate(step.hashed))):
            part(self._first[-1] + hashed, place * step.hash_tokens)
        part(self._ids[self._opening(job, step.agent)], 0)
        tokens: list[int] = []
        for token, times in reversed(parts):
            tokens += [token] * times
        return tokens

    def _opening(self, job: ReplayJob, agent: str) -> tuple[str, ...]:
        own = self._convention.prompts == "own-conversation"
        return ("opening", job.workflow_type, agent) if own else ("opening", job.workflow_type)


def _shared_tokens(job: ReplayJob, index: int) -> int:
    """Tokens at the same places as in the sequence of the step that it continues."""
    step = job.steps[index]
    return 0 if step.continues is None else min(step.repeated_tokens, job.steps[step.continues].fixed_tokens)
