"""Draws the dashboard without Grafana: sends its queries to Prometheus and plots the answers in its layout.

    python docs/dashboard/draw.py http://localhost:9090                           # the last hour, to dashboard.png
    python docs/dashboard/draw.py URL --since 1790000000 --until 1790000300 --scraped-every 2 --annotations notes.json

Prints how many series each query returned. Exits with code 1 if Prometheus rejected a query or none returned a number.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from ask import NoAnswerError, Panel, Prometheus, Series, Span, read
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

WIDTH, CELL, GAP, MARGIN = 1300, 27, 8, 12
"""Pixels: width of the picture, height of one row of Grafana's grid, gap between panels, margin."""

POINTS = 240
"""Most points of a line."""

COLUMNS = 24
COLOURS = ("#3f9c35", "#d9a400", "#3274d9", "#e8590c", "#c4162a", "#8f3bb8", "#0a9c9c", "#7a5230", "#6e7681", "#e36ab0")
WORDS = {"green": "#3f9c35", "red": "#c4162a", "orange": "#e8850c", "gray": "#6e7681"}
INK, FAINT, PAPER = "#22252b", "#7b808a", "#f4f5f5"
Notes = Sequence[dict[str, Any]]


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Draws the dashboard from the answers of a Prometheus server.")
    parser.add_argument("url", help="of the Prometheus server, without a path")
    parser.add_argument("--dashboard", type=Path, default=Path(__file__).parent / "presage.json")
    parser.add_argument("--since", type=float, help="seconds since 1970; default: an hour before the end")
    parser.add_argument("--until", type=float, default=time.time(), help="seconds since 1970; default: now")
    parser.add_argument("--scraped-every", type=float, default=15.0, help="seconds between two scrapes")
    parser.add_argument("--annotations", type=Path, help='JSON: [{"time": ms since 1970, "text": "event"}, ...]')
    parser.add_argument("--to", type=Path, default=Path("dashboard.png"))
    args = parser.parse_args()
    since = args.until - 3600 if args.since is None else args.since
    step_s = max(args.scraped_every, (args.until - since) / POINTS)
    span = Span(since, args.until, step_s, args.scraped_every)
    notes: Notes = json.loads(args.annotations.read_text(encoding="utf-8")) if args.annotations else []
    title, panels = read(args.dashboard)
    answers: list[list[Series]] = []
    refused, known = 0, 0
    for panel in panels:
        answers.append([])
        for query in panel.queries:
            try:
                ask = Prometheus(args.url).over if panel.kind == "timeseries" else Prometheus(args.url).at_end
                found = ask(query, span)
            except NoAnswerError as error:
                refused += 1
                print(f"{panel.title}: {error}")
                continue
            answers[-1] += found
            known += any(one.known for one in found)
            print(f"{panel.title}: {len(found)} series, {sum(one.known for one in found)} with numbers")
    Picture(title, panels, span, notes).draw(answers).save(args.to, optimize=True)
    print(f"{known} queries returned numbers, {refused} were rejected: {args.to}")
    return int(refused > 0 or known == 0)


class Picture:
    """A picture of a dashboard.

    Args:
        title: of the dashboard.
        panels: with their places.
        span: the time range shown.
        notes: annotated events.
    """

    def __init__(self, title: str, panels: Sequence[Panel], span: Span, notes: Notes) -> None:
        self._title, self._panels, self._span, self._notes = title, panels, span, notes
        self._head = 46 + 24 * ((len(notes) + 3) // 4)
        rows = max(panel.place[1] + panel.place[3] for panel in panels)
        self._height = self._head + rows * CELL + MARGIN
        self._figure = Figure(figsize=(WIDTH / 100, self._height / 100), dpi=100, facecolor=PAPER)
        self._canvas = FigureCanvasAgg(self._figure)

    def draw(self, answers: Sequence[Sequence[Series]]) -> Image.Image:
        """Draws the panels with the series of each."""
        with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 8.5, "axes.unicode_minus": False}):
            self._draw_head()
            for panel, series in zip(self._panels, answers, strict=True):
                self._draw_panel(panel, [one for one in series if one.known])
            kept = io.BytesIO()
            self._canvas.print_png(kept)
        return Image.open(kept).convert("RGB").quantize(96, dither=Image.Dither.NONE)

    def _draw_head(self) -> None:
        minutes = (self._span.until - self._span.since) / 60
        self._text(MARGIN, 12, f"{self._title}: {minutes:.1f} minutes", size=14, weight="bold")
        width = (WIDTH - 2 * MARGIN) / 4
        rows = (len(self._notes) + 3) // 4
        for number, note in enumerate(self._notes):
            column, row = divmod(number, rows)
            x, y = MARGIN + column * width, 46 + 24 * row
            self._text(x, y, f"{number + 1}", size=9, color="white", weight="bold", back=FAINT)
            at = note["time"] / 1000 - self._span.since
            self._text(x + 24, y, f"{_clock(at)}  {note['text']}", size=10)

    def _draw_panel(self, panel: Panel, series: Sequence[Series]) -> None:
        x, y, width, height = self._box(panel)
        if panel.kind == "row":
            self._text(x, y + 5, panel.title, size=12, weight="bold")
            return
        self._fill(x, y, width, height, "white", edge="#dcdde0")
        self._text(x + 10, y + 8, panel.title, size=10, weight="bold")
        inside = (x + 10, y + 34, width - 20, height - 44)
        if not series:
            self._text(x + width / 2, y + height / 2, "No data", size=11, color=FAINT, ha="center", va="center")
        elif panel.kind == "stat":
            self._draw_words(panel, series, inside)
        elif panel.kind == "table":
            self._draw_table(series, inside)
        else:
            self._draw_lines(panel, series, inside)

    def _draw_words(self, panel: Panel, series: Sequence[Series], inside: tuple[float, float, float, float]) -> None:
        x, y, width, height = inside
        each = width / len(series)
        for number, one in enumerate(series):
            value = one.values[-1]
            word, colour = (panel.words or {}).get(value, (f"{value:g}", "gray"))
            left, middle = x + number * each, x + (number + 0.5) * each - 2
            self._fill(left, y, each - 4, height, WORDS[colour])
            self._text(middle, y + 0.3 * height, one.name, size=10, color="white", ha="center", va="center")
            self._text(middle, y + 0.6 * height, word, size=17, color="white", ha="center", va="center", weight="bold")

    def _draw_table(self, series: Sequence[Series], inside: tuple[float, float, float, float]) -> None:
        x, y, width, _ = inside
        columns = sorted({label for one in series for label in one.labels})
        for number, column in enumerate(columns):
            at = x + number * width / len(columns)
            self._text(at, y, column, size=9, color="#3274d9", weight="bold")
            for row, one in enumerate(series):
                self._text(at, y + 26 + 24 * row, one.labels.get(column, ""), size=9)

    def _draw_lines(self, panel: Panel, series: Sequence[Series], inside: tuple[float, float, float, float]) -> None:
        x, y, width, height = inside
        legend = self._draw_legend(series, x, y + height, width)
        axes = self._axes(x + 52, y, width - 56, height - legend - 26)
        since = self._span.since
        times = [at - since for at in self._span.times]
        for number, one in enumerate(series):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(times, one.values, color=colour, linewidth=1.3)
            axes.fill_between(times, one.values, color=colour, alpha=0.07, linewidth=0)
        low, high = axes.get_ylim()
        if not any(value for one in series for value in one.values if math.isfinite(value)):
            high = 1.0
        axes.set_ylim(panel.low if panel.low is not None else low, panel.high if panel.high is not None else high)
        axes.set_xlim(0, self._span.until - since)
        self._draw_notes(axes)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value, panel.unit)))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.2, 3, 6, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))

    def _draw_notes(self, axes: Axes) -> None:
        for number, note in enumerate(self._notes):
            at = note["time"] / 1000 - self._span.since
            axes.axvline(at, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)))
            place = {"xycoords": ("data", "axes fraction"), "xytext": (1.5, -7), "textcoords": "offset points"}
            axes.annotate(str(number + 1), (at, 1), fontsize=6.5, color=FAINT, **place)

    def _draw_legend(self, series: Sequence[Series], x: float, bottom: float, width: float) -> float:
        """Draws the names of the series above `bottom`, in as many lines as needed; returns their height."""
        lines: list[list[tuple[float, int]]] = [[]]
        at = 0.0
        for number, one in enumerate(series):
            takes = 20 + self._width(one.name) + 12
            if lines[-1] and at + takes > width:
                lines.append([])
                at = 0.0
            lines[-1].append((at, number))
            at += takes
        for row, line in enumerate(lines):
            y = bottom - 16 * (len(lines) - row) + 2
            for left, number in line:
                colour = COLOURS[number % len(COLOURS)]
                self._fill(x + left, y + 5, 14, 4, colour)
                self._text(x + left + 18, y, series[number].name, size=8.5)
        return 16.0 * len(lines)

    def _box(self, panel: Panel) -> tuple[float, float, float, float]:
        """Left, top, width and height in pixels from the left and the top."""
        x, y, w, h = panel.place
        cell = (WIDTH - 2 * MARGIN + GAP) / COLUMNS
        return MARGIN + x * cell, self._head + y * CELL, w * cell - GAP, h * CELL - GAP

    def _axes(self, x: float, y: float, width: float, height: float) -> Axes:
        place = (x / WIDTH, 1 - (y + height) / self._height, width / WIDTH, height / self._height)
        axes = self._figure.add_axes(place, facecolor="white")
        axes.grid(color="#e6e7ea", linewidth=0.6)
        axes.tick_params(length=0, labelsize=8, colors=INK, pad=5)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_axisbelow(True)
        return axes

    def _fill(self, x: float, y: float, width: float, height: float, colour: str, edge: str | None = None) -> None:
        place = (x / WIDTH, 1 - (y + height) / self._height)
        line = {"edgecolor": edge, "linewidth": 0.8 if edge else 0, "zorder": -1}  # axes stand before it
        self._figure.add_artist(Rectangle(place, width / WIDTH, height / self._height, facecolor=colour, **line))

    def _text(self, x: float, y: float, said: str, *, size: float, back: str | None = None, **how: Any) -> None:
        box = {"boxstyle": "round,pad=0.25", "facecolor": back, "linewidth": 0} if back else None
        how = {"color": INK, "va": "top", **how}
        self._figure.text(x / WIDTH, 1 - y / self._height, said, fontsize=size, bbox=box, **how)

    def _width(self, said: str) -> float:
        """Width of a name in a legend, pixels."""
        text = self._figure.text(0, 0, said, fontsize=8.5)
        found = text.get_window_extent(self._canvas.get_renderer()).width
        text.remove()
        return float(found)


def _clock(seconds: float) -> str:
    """Minutes and seconds since the start of the span."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{_UNITS.get(unit, '')}"
    return f"{value:.3g} {_UNITS.get(unit, '')}".rstrip()


_UNITS = {"ops": "/s", "s": "s", "bytes": "B"}


if __name__ == "__main__":
    sys.exit(main())
