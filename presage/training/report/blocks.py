"""What a report consists of, before it is a page or Markdown: text, tables, pictures, sections, and figures in words.

Texts and cells are plain text. Agents and workflow types are named by whoever wrote the traces, so whoever writes a
document down escapes every one of them. A figure has three digits; where there is none, a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
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
    """A section that is folded until the reader opens it."""

    title: str
    blocks: Sequence[Text | Table | Facts]
    kind: ClassVar[str] = "folded"


Block = Text | Table | Facts | Picture | Folded


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

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


Metrics = Mapping[str, Any]
"""What is in `metrics.json`."""

DIGITS = 3


def number(value: float | None, digits: int = DIGITS) -> str:
    """A figure."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = DIGITS) -> str:
    """A difference, always with its sign; a true minus."""
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def interval(value: float | None, ends: Sequence[float | None]) -> str:
    """A figure with its interval."""
    return number(value) if value is None else f"{number(value)} [{number(ends[0])}, {number(ends[1])}]"


def signed_interval(value: float | None, ends: Sequence[float | None], digits: int = DIGITS) -> str:
    """A difference with its interval."""
    of = signed(value, digits)
    return of if value is None else f"{of} [{signed(ends[0], digits)}, {signed(ends[1], digits)}]"


def count(value: float) -> str:
    """How many, the thousands apart."""
    return f"{value:,.0f}"


def ahead(horizon: int) -> list[str]:
    """1 step, 2 steps, … of K."""
    return ["1 step", *(f"{k} steps" for k in range(2, horizon + 1))]
