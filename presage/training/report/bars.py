"""Bars from 0, one below the other, as SVG: as the lines of `plot.py`, in classes and without colours of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from presage.training.report.plot import clean

_WIDTH: Final = 480
_LABEL: Final = 190
_VALUE: Final = 70
_ROW: Final = 30


def bar_plot(values: Mapping[str, float]) -> Element:
    """A bar a value, 0 or more, with its name before it and the number after it."""
    height = _ROW * len(values) + 10
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {height}", "class": "plot", "role": "img"})
    most = max(values.values(), default=0.0) or 1.0
    for row, (name, value) in enumerate(values.items()):
        middle = 5 + _ROW * row + _ROW / 2
        end = _LABEL + (_WIDTH - _LABEL - _VALUE) * value / most
        label = SubElement(svg, "text", {"x": str(_LABEL - 8), "y": f"{middle + 4:.1f}", "class": "tick end"})
        label.text = clean(name)
        ends = {"x1": str(_LABEL), "x2": f"{end:.1f}", "y1": f"{middle:.1f}", "y2": f"{middle:.1f}"}
        SubElement(svg, "line", {**ends, "class": f"bar s{row % 6}"})
        number = SubElement(svg, "text", {"x": f"{end + 6:.1f}", "y": f"{middle + 4:.1f}", "class": "tick"})
        number.text = f"{value:,.0f}"
    return svg
