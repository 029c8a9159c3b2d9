"""The templated radix tree of a plan's prompts, and what calls of one prefix share.

Source: Helium (Wadlom et al., 2026), section 5 and appendix A, algorithm 2. A prompt is a sequence of pieces: static
text, and placeholders for what rows and other calls fill in. Prompts that begin alike share a path from the root.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from presage.batch.operators import Call, Constant, Given, Join, Template
from presage.batch.plan import Node, Plan, as_text

_CHARACTERS_A_TOKEN: Final = 4.0
"""Of English text with the usual tokenizers; orders and estimates only."""
_UNKNOWN_TOKENS: Final = 100.0
_SAMPLED_ROWS: Final = 1000
"""Whose fields are measured."""


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt.

    Attributes:
        text: static text; None for a placeholder.
        filled_by: structural hash of what fills a placeholder; "" for static text.
        tokens: expected number.
        of_row: whether it differs between rows.
    """

    text: str | None
    filled_by: str
    tokens: float = field(compare=False)
    of_row: bool


@dataclass(eq=False)
class PromptNode:
    """A node of the tree.

    Attributes:
        pieces: from its parent to it.
        children: by the first word, or the placeholder, of their pieces, in the order in which they came.
        calls: structural hashes of the calls whose prompts end here.
    """

    pieces: tuple[Piece, ...] = ()
    children: dict[str, PromptNode] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """Expected tokens of its pieces."""
        return sum(piece.tokens for piece in self.pieces)

    def walk(self) -> Iterator[PromptNode]:
        """This node and all below it, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))


def tokens_of(text: str) -> float:
    """About how many tokens a text has, without a tokenizer."""
    return len(text) / _CHARACTERS_A_TOKEN


def guessed_text(value: object) -> str:
    """A field as prompts will have it, for orders and estimates; whether it can be one is seen when its row runs."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def pieces_of(node: Node, expected: Mapping[str, float], count: Callable[[str], float] = tokens_of) -> list[Piece]:
    """The pieces of a call's prompt, roles included.

    Args:
        node: a call.
        expected: tokens that a row's field, or a call's answer, has on average, by structural hash.
        count: tokens of a text.
    """
    assert isinstance(node.operator, Call)
    pieces: list[Piece] = []
    static = f"<{node.operator.model}>"
    for (role, _), part in zip(node.operator.messages, node.parts, strict=True):
        static += f"<{role}>"
        for piece in _flat(part):
            if isinstance(piece, str):
                static += piece
                continue
            pieces += [Piece(static, "", count(static), False)] if static else []
            pieces.append(Piece(None, piece.key, expected.get(piece.key, _UNKNOWN_TOKENS), True))
            static = ""
    return [*pieces, Piece(static, "", count(static), False)] if static else pieces


def _flat(node: Node) -> Iterator[str | Node]:
    """Static texts and placeholders of a text, in order."""
    match node.operator:
        case Constant(value):
            yield as_text(value)
        case Template(texts, _):
            for text, value in zip(texts, (*node.parts, None), strict=True):
                yield text
                if value is not None:
                    yield from _flat(value)
        case Join(_, separator):
            for number, value in enumerate(node.parts):
                yield separator if number else ""
                yield from _flat(value)
        case _:
            yield node


def prefix_tree(prompts: Mapping[str, Sequence[Piece]]) -> PromptNode:
    """The tree of some prompts, by the call's structural hash."""
    root = PromptNode()
    for key, prompt in prompts.items():
        node, rest = root, tuple(prompt)
        while rest:
            child = node.children.get(_head(rest[0]))
            if child is None:
                child = node.children[_head(rest[0])] = PromptNode(rest)
                rest = ()
            else:
                common, rest, theirs = _common(rest, child.pieces)
                if theirs:  # the child's pieces go on differently: it is split
                    tail = PromptNode(theirs, child.children, child.calls)
                    child.pieces, child.children, child.calls = common, {_head(theirs[0]): tail}, []
            node = child
        node.calls.append(key)
    return root


_Pieces = tuple[Piece, ...]
_WORD: Final = re.compile(r"[^ \n>]*[ \n>]?")


def _head(piece: Piece) -> str:
    """What no two children of a node begin with."""
    return f"\0{piece.filled_by}" if piece.text is None else _WORD.match(piece.text)[0]  # type: ignore[index]


def _common(one: _Pieces, other: _Pieces) -> tuple[_Pieces, _Pieces, _Pieces]:
    """What two sequences begin with, and the rest of each. Static text is cut between words."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    common, mine, theirs = one[:same], one[same:], other[same:]
    if mine and theirs and mine[0].text is not None and theirs[0].text is not None:
        text = os.path.commonprefix([mine[0].text, theirs[0].text])  # noqa: RUF071
        cut = max(text.rfind(" "), text.rfind("\n"), text.rfind(">")) + 1
        if cut:
            begins = _part(mine[0], 0, cut)
            common += (begins,)
            mine = tuple(piece for piece in (_part(mine[0], cut), *mine[1:]) if piece.text != "")
            theirs = tuple(piece for piece in (_part(theirs[0], cut), *theirs[1:]) if piece.text != "")
    return common, mine, theirs


def _part(piece: Piece, begin: int, end: int | None = None) -> Piece:
    assert piece.text is not None
    text = piece.text[begin:end]
    return Piece(text, "", piece.tokens * len(text) / max(len(piece.text), 1), False)


def tree_of(plan: Plan, expected: Mapping[str, float], count: Callable[[str], float] = tokens_of) -> PromptNode:
    """The tree of a plan's calls. Expected tokens of answers come from the calls where `expected` has none."""
    said = {node.key: node.operator.output_tokens for node in plan.calls if isinstance(node.operator, Call)}
    expected_tokens = {**said, **expected}
    return prefix_tree({node.key: pieces_of(node, expected_tokens, count) for node in plan.calls})


def field_tokens(plan: Plan, rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Mean tokens of the first rows' fields, by structural hash."""
    fields = {node.key: node.operator.field for node in plan.nodes if isinstance(node.operator, Given)}
    first = rows[:_SAMPLED_ROWS]
    return {
        key: sum(tokens_of(guessed_text(row.get(name))) for row in first) / max(len(first), 1)
        for key, name in fields.items()
    }
