"""What a report consists of, before it is a page or Markdown: text, tables, pictures, sections.

Texts and cells are plain text. Agents and workflow types are named by whoever wrote the traces, so whoever writes a
document down escapes every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from xml.etree.ElementTree import Element


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Row:
    """Cells of a table; ours is marked."""

    cells: Sequence[str]
    marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table; the first column names, the others tell, unless there are words in them (`words`, counted from 0)."""

    head: Sequence[str]
    rows: Sequence[Row]
    words: frozenset[int] = frozenset({0})
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Facts:
    """Labels and what is true of them."""

    facts: Mapping[str, str]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Panel:
    """One drawing of a picture; an `svg` element whose colours are classes of `picture.css`."""

    title: str
    svg: Element


@dataclass(frozen=True)
class Picture:
    """Drawings side by side, or one above the other where there is no room.

    Attributes:
        name: of its file, without the ending.
        caption: what it shows, in words.
        panels: the drawings.
        legend: the name of each line, in the order of their colours.
        wide: panels keep their size, and scroll where there is no room.
    """

    name: str
    caption: str
    panels: Sequence[Panel]
    legend: Sequence[str] = ()
    wide: bool = False
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class Folded:
    """More of something, for who asks for it."""

    title: str
    blocks: Sequence[Text | Table | Facts]
    kind: ClassVar[str] = "folded"


Block = Text | Table | Facts | Picture | Folded


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Card:
    """A number to see first, what it is, and what it has to be seen beside."""

    value: str
    label: str
    beside: str


@dataclass(frozen=True)
class Document:
    """A report: what to see first, then the sections."""

    title: str
    lead: str
    sections: Sequence[Section]
    cards: Sequence[Card] = field(default=())

    def pictures(self) -> list[Picture]:
        """All of them, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
