"""What the prompts of a program share within a row. Its calls are found as they come, so its first rows show it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from presage.batch.prefix_tree import Piece, prefix_tree, tokens_of


class FoundPrompts:
    """The prompts of the first rows of a run.

    Args:
        most_rows: whose prompts are kept.

    Attributes:
        complete: whether so many rows have ended.
    """

    def __init__(self, most_rows: int) -> None:
        self.complete = False
        self._most = most_rows
        self._of: dict[str, list[str]] = {}
        self._ended: set[str] = set()

    def add(self, row: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Note a prompt of a row; those of rows after the first ones are not kept."""
        if row in self._of or len(self._of) < self._most:
            prompt = "".join(f"<{message.get('role')}>{_text(message)}" for message in messages)
            self._of.setdefault(row, []).append(prompt)

    def end(self, row: str) -> bool:
        """Note a row's end; whether the first rows are complete with it."""
        if row in self._of:
            self._ended.add(row)
        before, self.complete = self.complete, len(self._ended) == self._most
        return self.complete and not before

    def kept_tokens(self) -> float:
        """Tokens that two or more prompts of a row begin with, and no other row's: in the mean of the rows."""
        of: dict[str, str] = {}
        pieces: dict[str, list[Piece]] = {}
        for row, prompts in self._of.items():
            for number, text in enumerate(prompts):
                key = f"{row}/{number}"
                of[key], pieces[key] = row, [Piece(text, "", tokens_of(text), False)]
        tree = prefix_tree(pieces)
        nodes = list(tree.walk())
        below: dict[int, set[str]] = {}
        for node in reversed(nodes):
            children = (below[id(child)] for child in node.children.values())
            below[id(node)] = {of[key] for key in node.calls}.union(*children)
        kept = sum(
            node.tokens for node in nodes if len(below[id(node)]) == 1 and len(node.calls) + len(node.children) > 1
        )
        return kept / max(len(self._of), 1)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) and "tool_calls" not in message:
        return content
    return json.dumps([content, message.get("tool_calls")], ensure_ascii=False)
