"""How many rows of a batch may be under way: as many as an engine's cache holds of what their later calls read again.

More rows push each other out of the cache, fewer leave the engine idle. What a row keeps is the pieces of its prompts
that two or more of its calls begin with (the templated radix tree). The tokens of answers are a guess at first, and
those of texts an estimate, so both are corrected by what engines report: a plan that allows answers of 4,096 tokens and
gets 100 would else have a tenth of the rows under way that fit. Of a program, whose calls are found as they come, the
first rows show what they keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from presage.batch.operators import CallingProgram
from presage.batch.plan import Plan
from presage.batch.prefix_tree import Piece, PromptNode, pieces_of, prefix_tree, tokens_of, tree_of

_KEPT: Final = 0.75
"""Share of a cache that rows under way may fill; the rest is for what is read once, for rows that are longer, and for
blocks of rows that have ended, which vLLM evicts no sooner than others."""
_KEPT_WHERE_ENDED_GO_FIRST: Final = 0.85
_MEAN_OF_LIFE: Final = 0.9
"""What a row keeps grows with its answers. With .75 the replayed reflection over 120 rows was 1.4 times as slow."""
_FIRST_ROWS: Final = 8
"""Of a program at each engine, until their prompts have shown what a row keeps."""
_FIRST_LOOK: Final = 16
"""Answers after which the estimates are corrected for the first time, then after twice as many, and so on."""


@dataclass
class _Measured:
    """Sums over the answers of one call."""

    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class RowsUnderWay:
    """What a plan's rows keep in a cache, by what is known so far.

    Args:
        expected: tokens that rows' fields, and answers, have on average, by structural hash.

    Attributes:
        kept_tokens: of one row; 0 if none of its calls begins as another does.
    """

    def __init__(self, plan: Plan, expected: Mapping[str, float]) -> None:
        self._plan, self._expected = plan, expected
        self._measured = {node.key: _Measured() for node in plan.calls}
        self._answers, self._look = 0, _FIRST_LOOK
        programs = any(isinstance(node.operator, CallingProgram) for node in plan.nodes)
        self._found = _FoundPrompts() if programs else None
        self.kept_tokens = kept_tokens(tree_of(plan, expected))

    def asked(self, row: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """A program asks something for a row."""
        if self._found is not None:
            self._found.add(row, messages)

    def ended(self, row: str) -> bool:
        """A row has ended; whether `kept_tokens` was corrected."""
        if self._found is None or not self._found.end(row):
            return False
        self.kept_tokens = self._found.kept_tokens()
        return True

    def answered(self, call: str, prompt_tokens: int, output_tokens: int) -> bool:
        """An engine has answered a call, given by its structural hash; whether `kept_tokens` was corrected."""
        measured = self._measured.get(call)
        if measured is None or not prompt_tokens or self._found is not None:
            return False  # the engine counts no tokens, or a program's rows tell
        measured.answers += 1
        measured.prompt_tokens += prompt_tokens
        measured.output_tokens += output_tokens
        self._answers += 1
        if self._answers < self._look:
            return False
        self._look *= 2
        self._correct()
        return True

    def that_fit(self, cache_tokens: int, rows: int, *, ended_go_first: bool = False) -> int | None:
        """How many of an engine's rows may be under way.

        None: any number, since nothing is read again, or the cache holds what all rows keep in the mean of their lives.

        Args:
            cache_tokens: that the engine's cache holds.
            rows: of this engine.
            ended_go_first: the engine evicts blocks of ended workflows before others, as Presage's hooks do.
        """
        if self._found is not None and not self._found.complete:
            return _FIRST_ROWS
        if rows * self.kept_tokens * _MEAN_OF_LIFE <= cache_tokens:
            return None
        share = _KEPT_WHERE_ENDED_GO_FIRST if ended_go_first else _KEPT
        return max(1, int(share * cache_tokens / self.kept_tokens))

    def _correct(self) -> None:
        outputs = {
            key: measured.output_tokens / measured.answers
            for key, measured in self._measured.items()
            if measured.answers
        }
        expected = {**self._expected, **outputs}
        prompts = {
            node.key: sum(piece.tokens for piece in pieces_of(node, expected))
            for node in self._plan.calls
            if node.key in outputs
        }
        guessed = sum(self._measured[key].answers * tokens for key, tokens in prompts.items())
        counted = sum(measured.prompt_tokens for measured in self._measured.values())
        self.kept_tokens = kept_tokens(tree_of(self._plan, expected)) * counted / max(guessed, 1.0)


def kept_tokens(tree: PromptNode) -> float:
    """Tokens of the pieces, from a row's first placeholder on, that two or more of its calls begin with."""
    kept = 0.0
    waiting = [(tree, False)]
    while waiting:
        node, of_row = waiting.pop()
        of_row = of_row or any(piece.of_row for piece in node.pieces)
        if of_row and len(node.calls) + len(node.children) > 1:
            kept += node.tokens
        waiting.extend((child, of_row) for child in node.children.values())
    return kept


class _FoundPrompts:
    """The prompts of the first rows of a program; `complete` once _FIRST_ROWS have ended."""

    def __init__(self) -> None:
        self.complete = False
        self._of: dict[str, list[str]] = {}
        self._ended: set[str] = set()

    def add(self, row: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Note a prompt of a row; those of rows after the first ones are not kept."""
        if row in self._of or len(self._of) < _FIRST_ROWS:
            prompt = "".join(f"<{message.get('role')}>{_text(message)}" for message in messages)
            self._of.setdefault(row, []).append(prompt)

    def end(self, row: str) -> bool:
        """Note a row's end; whether the first rows are complete with it."""
        if row in self._of:
            self._ended.add(row)
        before, self.complete = self.complete, len(self._ended) == _FIRST_ROWS
        return self.complete and not before

    def kept_tokens(self) -> float:
        """Tokens that two or more prompts of a row begin with, and no other row's: in the mean of the rows."""
        row_of: dict[str, str] = {}
        pieces: dict[str, list[Piece]] = {}
        for row, prompts in self._of.items():
            for number, text in enumerate(prompts):
                key = f"{row}/{number}"
                row_of[key], pieces[key] = row, [Piece(text, "", tokens_of(text), False)]
        tree = prefix_tree(pieces)
        nodes = list(tree.walk())
        below: dict[int, set[str]] = {}
        for node in reversed(nodes):
            children = (below[id(child)] for child in node.children.values())
            below[id(node)] = {row_of[key] for key in node.calls}.union(*children)
        kept = sum(
            node.tokens for node in nodes if len(below[id(node)]) == 1 and len(node.calls) + len(node.children) > 1
        )
        return kept / max(len(self._of), 1)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) and "tool_calls" not in message:
        return content
    return json.dumps([content, message.get("tool_calls")], ensure_ascii=False)
