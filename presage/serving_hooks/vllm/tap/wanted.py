"""Which rows of a step are worth something: those that end a prompt, and those that may be a request's last.

A row is the model's output at the last position a request computes in a step, after the last norm: what the next
token is sampled from. The row that ends the prompt is the prefill state. The row that the last token was sampled from
is the completion state: no engine computes a row after the last token, since nothing is sampled from it. Where the
last token ends the answer (EOS) that row stands at the last token of the text. It is not known beforehand which token
is the last, so the row of every token is wanted, and dropped unless its token was the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.vllm import compat


class WantedRows:
    """Follows the prompts of requests through chunks, prefix hits and preemptions.

    Args:
        is_step: whether a request is a step of a workflow; others are left alone.
    """

    def __init__(self, is_step: Callable[[str], bool]) -> None:
        self._is_step = is_step
        self._prompts: dict[str, int] = {}
        self._writing: set[str] = set()

    def of(self, output: Any, moments: Collection[Moment]) -> dict[Moment, tuple[str, ...]]:
        """Request ids by moment of one scheduled step; empty where none is wanted. Only of these moments."""
        for name in output.finished_req_ids:
            self._writing.discard(name)
            self._prompts.pop(name, None)
        self._prompts.update(
            (name, tokens)
            for name, tokens in compat.prompts(output)
            if name not in self._writing and self._is_step(name)  # one that resumes may look like a new one
        )
        ended = self._ended(output) if self._prompts else ()
        self._writing.update(ended)
        wanted: dict[Moment, tuple[str, ...]] = {}
        if ended and PREFILL in moments:
            wanted[PREFILL] = ended
        writing = filter(self._writing.__contains__, output.num_scheduled_tokens) if COMPLETION in moments else ()
        if last := tuple(writing):
            wanted[COMPLETION] = last
        return wanted

    def _ended(self, output: Any) -> tuple[str, ...]:
        """The prompts that this step reads to their end; those that write on come behind them and are not looked at."""
        ended, left = [], len(self._prompts)
        for name, reached in compat.reached(output):
            tokens = self._prompts.get(name)
            if tokens is None:
                continue
            if reached >= tokens:
                del self._prompts[name]
                ended.append(name)
            left -= 1
            if not left:
                break
        return tuple(ended)
