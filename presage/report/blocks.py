"""What a report consists of before it becomes a page or Markdown: text, tables, pictures, sections, formatted figures.

Texts and cells are plain text. Names of agents and workflow types come from the traces, so the writers of page and
Markdown escape all of them. A figure has three digits; a missing one is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from presage.wording import counted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Table:
    """A table: columns `words` hold words, the others figures; rows that begin with a name in `marked` stand out."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset({0})
    marked: frozenset[str] = frozenset()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Facts:
    """Values by label."""

    facts: Mapping[str, str]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Panel:
    """One drawing of a picture; an `svg` element whose colours are classes of `picture.css`."""

    title: str
    svg: Element


@dataclass(frozen=True)
class Picture:
    """Drawings side by side, or one above the other on a narrow page.

    Attributes:
        name: of its file, without the ending.
        legend: the name of each line, in the order of their colours.
        wide: panels keep their size, and scroll on a narrow page.
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
    """A heading and its blocks; with `in_terminal` the commands print its texts and tables too."""

    title: str
    blocks: Sequence[Block]
    in_terminal: bool = False


@dataclass(frozen=True)
class Card:
    """A number at the top of the page, what it is, and what to compare it with."""

    value: str
    label: str
    beside: str


@dataclass(frozen=True)
class Document:
    """A report: what to see first, then the sections; None is a section that the metrics lack.

    Attributes:
        verdict: the answer in a sentence, which a page shows first and a terminal last.
    """

    title: str
    lead: str
    parts: Sequence[Section | None]
    cards: Sequence[Card] = ()
    verdict: str = ""

    @property
    def sections(self) -> list[Section]:
        """The sections there are."""
        return [section for section in self.parts if section is not None]

    def pictures(self) -> list[Picture]:
        """All pictures, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]


Metrics = Mapping[str, Any]
"""The content of `metrics.json`."""


def number(value: float | None, digits: int = 3) -> str:
    """A figure."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference, always with its sign; a true minus."""
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def interval(value: float | None, ends: Sequence[float | None]) -> str:
    """A figure with its interval."""
    return number(value) if value is None else f"{number(value)} [{number(ends[0])}, {number(ends[1])}]"


def signed_interval(value: float | None, ends: Sequence[float | None], digits: int = 3) -> str:
    """A difference with its interval."""
    shown = signed(value, digits)
    return shown if value is None else f"{shown} [{signed(ends[0], digits)}, {signed(ends[1], digits)}]"


def count(value: float) -> str:
    """A number of things, with separators of thousands."""
    return f"{value:,.0f}"


def judged_on(metrics: Metrics) -> str:
    """The workflows and steps behind the figures, in words."""
    return f"{counted(metrics['workflows'], 'workflow')}, {counted(metrics['steps'], 'step')}"


def ahead(horizon: int) -> list[str]:
    """1 step, 2 steps, … of K."""
    return ["1 step", *(f"{k} steps" for k in range(2, horizon + 1))]


def accuracy_cells(figures: Mapping[str, Any]) -> list[str]:
    """Accuracy 1 to K steps ahead at one moment, each with its interval."""
    return [interval(value, ends) for value, ends in zip(figures["accuracy"], figures["ci95"], strict=True)]


def gain(of: Mapping[str, Any], k: int | None = None) -> str:
    """A difference `{"difference", "ci95"}` with its interval; of lists, the one k + 1 steps ahead."""
    difference, ends = of["difference"], of["ci95"]
    return signed_interval(difference, ends) if k is None else signed_interval(difference[k], ends[k])


def version_of(metrics: Metrics) -> str:
    """The end of a title: the registered version, if there is one."""
    return f", version {metrics['version']}" if metrics["version"] is not None else ""
