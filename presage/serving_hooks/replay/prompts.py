"""Token ids of prompts and outputs, which share prefixes exactly as the convention defines.

Each part of a prompt is one id repeated: prompts with the same opening share its id, an agent's closings share an id,
and each step's new tokens and output have their own. The hash of a block covers all before it, so blocks of one
repeated id differ by position. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from presage.serving_hooks.replay.workload import PromptConvention, ReplayJob

Hashes = list[bytes]

_NONE: Final[Hashes] = []


class PromptIds:
    """Ids for all jobs of a workload.

    Attributes:
        hashes: of the blocks of each prompt and output, by job and step, once `hash_all` has made them.
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
        self.hashes: list[list[Hashes]] = []
        self.owner: dict[bytes, int] = {}
        self.sharers: dict[bytes, set[int]] = {}

    def hash_all(self, block_tokens: int, hashed: Callable[[bytes | None, list[int]], bytes]) -> None:
        """Computes the hashes of all blocks once; they are the same under every policy and seed.

        `hashed` gives the hash of a block, from that of the block before it and its own token ids.
        """
        if self.hashes:
            return
        for number, job in enumerate(self._jobs):
            conversation, of = self.conversation(number), list[Hashes]()
            for index, step in enumerate(job.steps):
                tokens = conversation.prompt(index) + [conversation.says(index)] * step.output_tokens
                blocks: Hashes = []
                if step.continues is not None:
                    fixed = min(step.repeated_tokens, job.steps[step.continues].fixed_tokens)
                    blocks = of[step.continues][: fixed // block_tokens]
                last = blocks[-1] if blocks else None
                for start in range(len(blocks) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
                    last = hashed(last, tokens[start : start + block_tokens])
                    blocks.append(last)
                    first = self.owner.setdefault(last, number)
                    if first != number:
                        self.sharers.setdefault(last, {first}).add(number)
                of.append(blocks)
                conversation.answered(index)
            self.hashes.append(of)

    def known(self, number: int, index: int) -> Hashes:
        """Hashes of the prompt and output of a step; empty if they were not computed."""
        return self.hashes[number][index] if self.hashes else _NONE

    def conversation(self, number: int) -> JobConversation:
        """The token sequences of a job."""
        job = self._jobs[number]
        openings = [self._ids[self._opening(job, step.agent)] for step in job.steps]
        closings = [self._ids["closing", job.workflow_type, step.agent] for step in job.steps]
        return JobConversation(job, self._first[number], openings, closings, self._first[-1])

    def _opening(self, job: ReplayJob, agent: str) -> tuple[str, ...]:
        own = self._convention.prompts == "own-conversation"
        return ("opening", job.workflow_type, agent) if own else ("opening", job.workflow_type)


class JobConversation:
    """The growing token sequences of one job. Its own ids begin at `first`, those of hash ids (plain requests) at
    `hashed`."""

    def __init__(
        self, job: ReplayJob, first: int, openings: Sequence[int], closings: Sequence[int], hashed: int
    ) -> None:
        self._job, self._first, self._openings, self._closings = job, first, openings, closings
        self._hashed = hashed
        self._sequences: dict[int, list[int]] = {}

    def prompt(self, number: int) -> list[int]:
        """Token ids of a step's prompt; the step it continues has been answered."""
        return self._trunk(number) + [self._closings[number]] * self._job.steps[number].closing_tokens

    def says(self, number: int) -> int:
        """The id of which a step's output consists."""
        return self._first + 2 * number + 1

    def answered(self, number: int) -> None:
        """Appends the output of a step."""
        self._sequences[number] = self._trunk(number) + [self.says(number)] * self._job.steps[number].output_tokens

    def _trunk(self, number: int) -> list[int]:
        step = self._job.steps[number]
        if step.continues is None:
            before = self._opened(number)
        else:
            before = self._sequences[step.continues][: step.repeated_tokens]
        new_tokens = step.prompt_tokens - step.closing_tokens - len(before)
        return before + [self._first + 2 * number] * new_tokens

    def _opened(self, number: int) -> list[int]:
        step = self._job.steps[number]
        if not step.hashed:
            return [self._openings[number]] * step.opening_tokens
        ids = [self._hashed + one for one in step.hashed for _ in range(step.hash_tokens)]
        return ids[: step.prompt_tokens]
