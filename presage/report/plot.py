"""Line plots, bar plots and rows with intervals as SVG: accuracy by workflows, steps or confidence; queues; policies.

Not matplotlib: colours are classes, so one drawing serves light and dark pages, texts stay texts with tooltips, and
equal figures give equal bytes. A drawing has no colour and no id of its own, so many fit on one page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final
from xml.etree.ElementTree import Element, SubElement, tostring

from presage.report.blocks import Picture

COLOURS: Final = 6
"""Lines in one plot at most: more cannot be distinguished. Ours is the first."""

_WIDTH, _HEIGHT = 320, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 40
_GAP, _TITLE, _LEGEND = 16, 22, 20
_ASIDE = 5
"""Pixels between the intervals of neighbouring lines."""


@dataclass(frozen=True)
class PlotPoint:
    """A point, and the ends of its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    tooltip: str = ""


@dataclass(frozen=True)
class Axis:
    """The label, ends and written ticks of an axis."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the beginning, 1 at the end."""
        low, high, position = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return (position - low) / (high - low)


def share_axis(label: str, values: Sequence[float]) -> Axis:
    """An axis around shares, from a round number below the least to one above the greatest."""
    low, high = min(values), max(values)
    step = next((s for s in (0.02, 0.05, 0.1, 0.2) if (high - low) / s <= 5), 0.25)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Axis(label, first * step, last * step, [n * step for n in range(first, last + 1)])


def line_plot(
    lines: Sequence[Sequence[PlotPoint]],
    x: Axis,
    y: Axis,
    *,
    diagonal: bool = False,
    side_by_side: bool = False,
    dots: bool = True,
) -> Element:
    """One panel; line i has colour i. With a diagonal where y equals x; `dots` marks each point.

    With `side_by_side` each line is moved a little to the side, so that intervals at the same x do not overlap.
    """
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "class": "plot", "role": "img"})
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(px: float, py: float) -> tuple[float, float]:
        return _LEFT + wide * x.place(px), _TOP + high * (1 - y.place(py))

    for value in y.ticks:
        _, row = at(x.low, value)
        _line(svg, (_LEFT, row), (_WIDTH - _RIGHT, row), "grid")
        text_at(svg, (_LEFT - 6, row + 4), f"{value:.2f}".rstrip("0").rstrip(".") or "0", "tick end")
    for value in x.ticks:
        column, _ = at(value, y.low)
        _line(svg, (column, _HEIGHT - _BOTTOM), (column, _HEIGHT - _BOTTOM + 4), "axis")
        text_at(svg, (column, _HEIGHT - _BOTTOM + 17), f"{value:g}", "tick middle")
    _line(svg, (_LEFT, _HEIGHT - _BOTTOM), (_WIDTH - _RIGHT, _HEIGHT - _BOTTOM), "axis")
    text_at(svg, (_LEFT + wide / 2, _HEIGHT - 6), x.label, "label middle")
    up = text_at(svg, (12, _TOP + high / 2), y.label, "label middle")
    up.set("transform", f"rotate(-90 12 {_number(_TOP + high / 2)})")
    if diagonal:
        _line(svg, at(x.low, y.low), at(x.high, y.high), "diagonal")
    for index in reversed(range(len(lines))):  # ours is drawn last, on top
        aside = _ASIDE * (index - (len(lines) - 1) / 2) if side_by_side else 0.0
        _draw(svg, lines[index], at, f"s{index % COLOURS}", aside, dots)
    return svg


def _draw(
    svg: Element,
    points: Sequence[PlotPoint],
    to_page: Callable[[float, float], tuple[float, float]],
    colour: str,
    aside: float,
    dots: bool,
) -> None:
    def at(x: float, y: float) -> tuple[float, float]:
        column, row = to_page(x, y)
        return column + aside, row

    for point in points:
        if point.low is not None and point.high is not None:
            _line(svg, at(point.x, point.low), at(point.x, point.high), f"whisker {colour}")
    path = " ".join(f"{_number(a)},{_number(b)}" for a, b in (at(point.x, point.y) for point in points))
    if len(points) > 1:
        SubElement(svg, "polyline", {"points": path, "class": f"line {colour}"})
    for point in points if dots else ():
        column, row = at(point.x, point.y)
        dot = SubElement(svg, "circle", {"cx": _number(column), "cy": _number(row), "r": "3", "class": f"dot {colour}"})
        if point.tooltip:
            SubElement(dot, "title").text = clean(point.tooltip)


def standalone(picture: Picture) -> str:
    """A picture as a file of its own: its panels in rows of three with their titles, the legend on top."""
    sizes = [_size(panel.svg) for panel in picture.panels]
    columns = min(3, len(sizes))
    wide, high = max(w for w, _ in sizes), max(h for _, h in sizes)
    rows = -(-len(sizes) // columns)
    top = _LEGEND * len(picture.legend) + _GAP
    width, height = columns * (wide + _GAP) + _GAP, top + rows * (high + _TITLE + _GAP)
    box = f"0 0 {_number(width)} {_number(height)}"
    svg = Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "width": _number(width), "height": _number(height)},
    )
    SubElement(svg, "style").text = stylesheet()
    SubElement(svg, "rect", {"width": "100%", "height": "100%", "class": "paper"})
    for index, name in enumerate(picture.legend):
        row = _GAP + _LEGEND * index
        _line(svg, (_GAP, row), (_GAP + 22, row), f"line s{index % COLOURS}")
        text_at(svg, (_GAP + 30, row + 4), name, "label")
    for index, panel in enumerate(picture.panels):
        x, y = _GAP + (index % columns) * (wide + _GAP), top + (index // columns) * (high + _TITLE + _GAP)
        text_at(svg, (x, y + 12), panel.title, "title")
        inner = SubElement(svg, "svg", {**panel.svg.attrib, "x": _number(x), "y": _number(y + _TITLE)})
        inner.set("width", _number(sizes[index][0]))
        inner.set("height", _number(sizes[index][1]))
        inner.extend(list(panel.svg))
    return tostring(svg, encoding="unicode") + "\n"


def stylesheet() -> str:
    """The colours of drawings, in light and dark."""
    return resources.files("presage.report").joinpath("picture.css").read_text(encoding="utf-8")


def clean(text: str) -> str:
    """A name as XML can hold it: no control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def _size(svg: Element) -> tuple[float, float]:
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    return width, height


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _line(svg: Element, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    ends = dict(zip(("x1", "y1", "x2", "y2"), map(_number, (*start, *end)), strict=True))
    SubElement(svg, "line", {**ends, "class": kind})


def text_at(svg: Element, place: tuple[float, float], text: str, kind: str) -> Element:
    """Add a text; control characters are replaced."""
    made = SubElement(svg, "text", {"x": _number(place[0]), "y": _number(place[1]), "class": kind})
    made.text = clean(text)
    return made


_BARS: Final = 480
_LABEL: Final = 190
_VALUE: Final = 70
_ROW: Final = 30
_NAMED_ROW: Final = 38
"""Height of a row whose name stands above it."""


def bar_plot(values: Mapping[str, float]) -> Element:
    """A bar a value, 0 or more, with its name before it and the number after it."""
    height = _ROW * len(values) + 10
    svg = Element("svg", {"viewBox": f"0 0 {_BARS} {height}", "class": "plot", "role": "img"})
    most = max(values.values(), default=0.0) or 1.0
    for row, (name, value) in enumerate(values.items()):
        middle = 5 + _ROW * row + _ROW / 2
        end = _LABEL + (_BARS - _LABEL - _VALUE) * value / most
        text_at(svg, (_LABEL - 8, middle + 4), name, "tick end")
        _line(svg, (_LABEL, middle), (end, middle), f"bar s{row % COLOURS}")
        text_at(svg, (end + 6, middle + 4), f"{value:,.0f}", "tick")
    return svg


def interval_plot(rows: Mapping[str, PlotPoint], shown: Callable[[float], str], mark: float | None = None) -> Element:
    """A row a value: its name and the number above a dot at `y` and the bar of its interval; the first row is on top.

    Args:
        shown: formats a value.
        mark: a value at which a dashed line stands.
    """
    values = [v for point in rows.values() for v in (point.y, point.low, point.high) if v is not None]
    axis = round_axis(values if mark is None else [*values, mark])
    bottom = _TOP + _NAMED_ROW * len(rows)
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {bottom + 24}", "class": "plot", "role": "img"})

    def across(value: float) -> float:
        return _RIGHT + (_WIDTH - 2 * _RIGHT) * axis.place(value)

    for value in axis.ticks:
        _line(svg, (across(value), _TOP), (across(value), bottom), "grid")
        text_at(svg, (across(value), bottom + 17), f"{value:g}", "tick middle")
    if mark is not None:
        _line(svg, (across(mark), _TOP), (across(mark), bottom), "diagonal")
    for place, (name, point) in enumerate(rows.items()):
        row = _TOP + _NAMED_ROW * place
        text_at(svg, (_RIGHT, row + 13), name, "name")
        text_at(svg, (_WIDTH - _RIGHT, row + 13), shown(point.y), "name end")
        if point.low is not None and point.high is not None:
            _line(svg, (across(point.low), row + 25), (across(point.high), row + 25), "interval s0")
        centre = {"cx": _number(across(point.y)), "cy": _number(row + 25)}
        SubElement(svg, "circle", {**centre, "r": "4", "class": "dot s0"})
    return svg


def round_axis(values: Sequence[float], label: str = "") -> Axis:
    """An axis around values, with at most six ticks at round numbers."""
    low, high = min(values), max(values)
    about = max((high - low) / 5, abs(high) * 1e-3, 1e-9)
    power = 10.0 ** math.floor(math.log10(about))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Axis(label, first * step, last * step, [n * step for n in range(first, last + 1)])
