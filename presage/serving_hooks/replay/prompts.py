"""Token ids of prompts and outputs: two share a prefix exactly where the convention says that they do.

Ids mean nothing, so each part of a prompt is one id repeated: an opening's is that of all who open alike, a closing's
the agent's, what a step adds or is answered with has one of its own. A block's hash covers all before it, so blocks of
one repeated id are told apart by where they stand. No chance is in it, and so no accident.
"""

from __future__ import annotations

from collections.abc import Sequence

from presage.serving_hooks.replay.workload import Convention, Job

Hashes = list[bytes]


class Prompts:
    """Ids for all jobs of a workload.

    Args:
        jobs: of the workload.
        convention: they were assembled by.
    """

    def __init__(self, jobs: Sequence[Job], convention: Convention) -> None:
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

    def conversation(self, number: int) -> Conversation:
        """Of the job with that number."""
        job = self._jobs[number]
        openings = [self._ids[self._opening(job, step.agent)] for step in job.steps]
        closings = [self._ids["closing", job.workflow_type, step.agent] for step in job.steps]
        return Conversation(job, self._first[number], openings, closings, self._first[-1])

    def _opening(self, job: Job, agent: str) -> tuple[str, ...]:
        own = self._convention.prompts == "own-conversation"
        return ("opening", job.workflow_type, agent) if own else ("opening", job.workflow_type)


class Conversation:
    """The sequences of one job as they grow, and the hashes of their blocks, which are computed once.

    Args:
        job: whose.
        first: id of the first of its own tokens.
        openings, closings: ids, one a step.
        hashed: id of what has hash 0; those of other hashes come after it.
    """

    def __init__(self, job: Job, first: int, openings: Sequence[int], closings: Sequence[int], hashed: int) -> None:
        self._job, self._first, self._openings, self._closings = job, first, openings, closings
        self._hashed = hashed
        self._sequences: dict[int, tuple[list[int], Hashes]] = {}

    def prompt(self, number: int) -> tuple[list[int], Hashes]:
        """Token ids of a step's prompt, and hashes of as many of its first blocks as an earlier step has computed."""
        step = self._job.steps[number]
        trunk, hashes = self._trunk(number)
        return trunk + [self._closings[number]] * step.closing_tokens, hashes

    def says(self, number: int) -> int:
        """The id a step is answered with, again and again."""
        return self._first + 2 * number + 1

    def answered(self, number: int, hashes: Hashes, block_tokens: int) -> None:
        """A step has all its output; `hashes` of its blocks, of `block_tokens` tokens each."""
        step = self._job.steps[number]
        trunk, _ = self._trunk(number)
        sequence = trunk + [self.says(number)] * step.output_tokens
        same = len(trunk) if step.closing_tokens else len(sequence)
        self._sequences[number] = sequence, hashes[: same // block_tokens]

    def _trunk(self, number: int) -> tuple[list[int], Hashes]:
        step = self._job.steps[number]
        if step.continues is not None:
            before, hashes = self._sequences[step.continues]
        else:
            before, hashes = self._opened(number), []
        new_tokens = step.prompt_tokens - step.closing_tokens - len(before)
        return before + [self._first + 2 * number] * new_tokens, hashes

    def _opened(self, number: int) -> list[int]:
        step = self._job.steps[number]
        if not step.hashed:
            return [self._openings[number]] * step.opening_tokens
        ids = [self._hashed + one for one in step.hashed for _ in range(step.hash_tokens)]
        return ids[: step.prompt_tokens]
