"""Token ids of prompts and outputs: two share a prefix exactly where the convention says that they do.

Ids mean nothing, so each part of a prompt is one id repeated: an opening's is that of all who open alike, a closing's
the agent's, what a step adds or is answered with has one of its own. A block's hash covers all before it, so blocks of
one repeated id are told apart by where they stand. No chance is in it, and so no accident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from presage.serving_hooks.replay.workload import PromptConvention, ReplayJob

Hashes = list[bytes]

_NONE: Final[Hashes] = []


class PromptIds:
    """Ids for all jobs of a workload.

    Args:
        jobs: of the workload.
        convention: they were assembled by.

    Attributes:
        hashes: of each job, of each step: those of the blocks of its prompt and output, once `hash_all` has made them.
        owner: of each of these, the first job whose it is.
        sharers: of those that are of several jobs, all of them.
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
        """Computes the hashes of all blocks, each once: they are the same under every policy and seed.

        Args:
            block_tokens: of a block.
            hashed: hash of a block, from that of the block before it and its own token ids.
        """
        if self.hashes:
            return
        for number, job in enumerate(self._jobs):
            conversation, of = self.conversation(number), list[Hashes]()
            for index, step in enumerate(job.steps):
                tokens = conversation.prompt(index) + [conversation.says(index)] * step.output_tokens
                same = conversation.repeated_tokens(index) // block_tokens
                blocks = [] if step.continues is None else of[step.continues][:same]
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
        """Those of the prompt and output of a step of a job; none, where they were not computed."""
        return self.hashes[number][index] if self.hashes else _NONE

    def conversation(self, number: int) -> JobConversation:
        """Of the job with that number."""
        job = self._jobs[number]
        openings = [self._ids[self._opening(job, step.agent)] for step in job.steps]
        closings = [self._ids["closing", job.workflow_type, step.agent] for step in job.steps]
        return JobConversation(job, self._first[number], openings, closings, self._first[-1])

    def _opening(self, job: ReplayJob, agent: str) -> tuple[str, ...]:
        own = self._convention.prompts == "own-conversation"
        return ("opening", job.workflow_type, agent) if own else ("opening", job.workflow_type)


class JobConversation:
    """The sequences of one job as they grow.

    Args:
        job: whose.
        first: id of the first of its own tokens.
        openings, closings: ids, one a step.
        hashed: id of what has hash 0; those of other hashes come after it.
    """

    def __init__(
        self, job: ReplayJob, first: int, openings: Sequence[int], closings: Sequence[int], hashed: int
    ) -> None:
        self._job, self._first, self._openings, self._closings = job, first, openings, closings
        self._hashed = hashed
        self._sequences: dict[int, list[int]] = {}

    def prompt(self, number: int) -> list[int]:
        """Token ids of a step's prompt; what it continues has been answered."""
        return self._trunk(number) + [self._closings[number]] * self._job.steps[number].closing_tokens

    def says(self, number: int) -> int:
        """The id a step is answered with, again and again."""
        return self._first + 2 * number + 1

    def answered(self, number: int) -> None:
        """A step has all its output."""
        self._sequences[number] = self._trunk(number) + [self.says(number)] * self._job.steps[number].output_tokens

    def repeated_tokens(self, number: int) -> int:
        """Tokens a step's prompt begins with that stand alike in the prompt, or the output, of the step it continues.

        Behind a closing nothing does: what was said there stands elsewhere now.
        """
        continues = self._job.steps[number].continues
        if continues is None:
            return 0
        before = self._job.steps[continues]
        return before.prompt_tokens - before.closing_tokens if before.closing_tokens else before.sequence_tokens

    def _trunk(self, number: int) -> list[int]:
        step = self._job.steps[number]
        before = self._opened(number) if step.continues is None else self._sequences[step.continues]
        new_tokens = step.prompt_tokens - step.closing_tokens - len(before)
        return before + [self._first + 2 * number] * new_tokens

    def _opened(self, number: int) -> list[int]:
        step = self._job.steps[number]
        if not step.hashed:
            return [self._openings[number]] * step.opening_tokens
        ids = [self._hashed + one for one in step.hashed for _ in range(step.hash_tokens)]
        return ids[: step.prompt_tokens]
