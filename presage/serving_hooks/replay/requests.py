"""From plain requests to jobs: each is one of its own, of no workflow.

What its prompt shares with others is what `hash_ids` say, each for so many tokens and for all before them; without them
nothing is shared. Nobody can foretell what comes after a request of no workflow, and the hooks are told of none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from presage.serving_hooks.replay.workload import Job, Step, Workload

AGENT: Final = "request"
"""Goes by in the figures where an agent would."""


class Sized(Protocol):
    """A request as a trace has it."""

    @property
    def arrives_s(self) -> float: ...  # noqa: D102
    @property
    def input_tokens(self) -> int: ...  # noqa: D102
    @property
    def output_tokens(self) -> int: ...  # noqa: D102
    @property
    def hash_ids(self) -> Sequence[int]: ...  # noqa: D102


class _Known:
    """Sequences of ids that have been seen, as a tree: an id counts with all before it."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def add(self, ids: Iterable[int]) -> int:
        """How many of them, from the first, stood so in an earlier sequence."""
        node, known, new = 0, 0, False
        for one in ids:
            child = self._children.get((node, one))
            if child is None:
                new = True
                child = self._children[node, one] = len(self._children) + 1
            known += not new
            node = child
        return known


def requests_workload(requests: Sequence[Sized], hash_tokens: int) -> Workload:
    """The jobs of some requests.

    Args:
        requests: in order of arrival.
        hash_tokens: tokens that an id of `hash_ids` stands for.
    """
    known, jobs = _Known(), []
    for number, one in enumerate(requests):
        prompt_tokens = max(1, one.input_tokens)
        again = min(known.add(one.hash_ids) * hash_tokens, prompt_tokens)
        step = Step(
            agent=AGENT,
            continues=None,
            opening_tokens=again,
            new_tokens=prompt_tokens - again,
            closing_tokens=0,
            output_tokens=max(1, one.output_tokens),
            parents=(),
            pause_s=0.0,
            prompt_tokens=prompt_tokens,
            hashed=tuple(one.hash_ids),
            hash_tokens=hash_tokens,
        )
        jobs.append(Job("", f"request {number}", (step,), one.arrives_s))
    return Workload(tuple(jobs), 0, True)
