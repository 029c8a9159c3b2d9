"""Draws what `presage explain` found: next agents, tokens left, blocks. What has nothing to show gets no panel."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from presage.errors import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_END: Final = "end of workflow"
_OTHERS: Final = "others"
_GREYS: Final = {_END: "#555555", _OTHERS: "#dddddd"}
_MOST_AGENTS: Final = 10
"""Agents with a colour of their own, as many as matplotlib's cycle has."""
_MOST_LABELS: Final = 25
_LONGEST: Final = 28
"""Characters of a name."""
_FEWEST_PLACES: Final = 6
"""Forecasts that there is room for, so that a single one is no wall."""

Forecasts = Sequence[Mapping[str, Any]]


def draw(explained: Mapping[str, Any], file: Path) -> None:
    """Draw an engine's view of a workflow into a file; raises OutputError if it cannot be written."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it tells of its caches
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    forecasts, blocks = explained["forecasts"], explained["blocks"]
    panels: list[tuple[float, Callable[[Axes], None]]] = []  # inches, and what draws
    if any(made["horizons"] for made in forecasts):
        panels.append((3.2, lambda axes: _draw_next(axes, forecasts)))
    if any(made["remaining"]["quantiles"] for made in forecasts):
        panels.append((2.4, lambda axes: _draw_left(axes, forecasts)))
    over_time = len(panels)
    if blocks is not None and any(group["before"] is not None for group in blocks["groups"]):
        panels.append((0.8, lambda axes: _draw_cache(axes, blocks)))
    if not panels:
        panels.append((0.8, lambda axes: _draw_nothing(axes, forecasts)))

    heights = [height for height, _ in panels]
    with mpl.rc_context({"svg.hashsalt": "presage", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(
            figsize=(10, sum(heights) + 0.5 * len(heights) + 0.8 * bool(over_time) + 0.4), layout="constrained"
        )
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        names = (explained["workflow_id"], explained["workflow_type"] or "no type")
        figure.suptitle("  ·  ".join(_short(name, 2 * _LONGEST) for name in names), fontsize=11)
        for axes, (_, drawn) in zip(all_axes, panels, strict=True):
            drawn(axes)
        for axes in all_axes[:over_time]:
            axes.set_xlim(-0.6, max(len(forecasts), _FEWEST_PLACES) - 0.4)
            axes.set_xticks([])
        if over_time:
            _label(all_axes[over_time - 1], forecasts)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a name in another script
                figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise OutputError(f"{file}: {error.strerror or error}; give another place") from error


def _draw_next(axes: Axes, forecasts: Forecasts) -> None:
    rows = [made["horizons"][0] if made["horizons"] else None for made in forecasts]
    total = Counter[str]()
    for row in filter(None, rows):
        total.update(row["agents"])
    parts = {name: [row["agents"].get(name, 0.0) if row else 0.0 for row in rows] for name in sorted(total)}
    shown = {name: parts[name] for name, _ in total.most_common(_MOST_AGENTS) if max(parts[name]) > 0.005}
    shown[_END] = [row["end"] if row else 0.0 for row in rows]
    known = [sum(shares) for shares in zip(*shown.values(), strict=True)]
    shown[_OTHERS] = [max(0.0, 1.0 - share) if row else 0.0 for row, share in zip(rows, known, strict=True)]
    floor = [0.0] * len(rows)
    bars = {}
    for name, shares in shown.items():
        if max(shares) > 0.005:
            bars[name] = axes.bar(range(len(rows)), shares, bottom=floor, width=0.9, color=_GREYS.get(name))
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_ylabel("next agent")
    axes.legend(bars.values(), map(_short, bars), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _draw_left(axes: Axes, forecasts: Forecasts) -> None:
    for q in sorted({q for made in forecasts for q in made["remaining"]["quantiles"]}, key=float):
        tokens = [made["remaining"]["quantiles"].get(q, float("nan")) for made in forecasts]
        axes.plot(range(len(forecasts)), tokens, marker="o", markersize=3, label=f"p{100 * float(q):g}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _draw_cache(axes: Axes, blocks: Mapping[str, Any]) -> None:
    axes.broken_barh([(0, blocks["all_free"])], (0, 1), facecolors="#dddddd")
    for group in blocks["groups"]:
        if group["before"] is not None:
            axes.broken_barh([(group["before"], group["free"])], (0, 1), facecolors="#1f77b4")
    axes.set_xlim(0, max(1, blocks["all_free"]))
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel("free blocks in eviction order, next on the left; this workflow's are dark")


def _draw_nothing(axes: Axes, forecasts: Forecasts) -> None:
    why = f"its last forecast is unknown: {forecasts[-1]['reason']}" if forecasts else "no recent forecast"
    axes.text(0.5, 0.5, why, ha="center", va="center", wrap=True)
    axes.set_axis_off()


def _label(axes: Axes, forecasts: Forecasts) -> None:
    """Names the steps, of many every second, third, …"""
    places = range(0, len(forecasts), -(-len(forecasts) // _MOST_LABELS))
    axes.set_xticks(places, [_when(forecasts[place]) for place in places], rotation=45, ha="right", fontsize=7)


def _when(made: Mapping[str, Any]) -> str:
    step = "" if made["step"] is None else f" {made['step']}"
    return f"{_short(made['agent'])}{step}, {made['moment']}"


def _short(name: str, longest: int = _LONGEST) -> str:
    """A name with its middle left out if it is long: ends often differ."""
    half = longest // 2
    shown = name if len(name) <= longest else f"{name[:half]}…{name[1 - half :]}"
    return f" {shown}" if shown.startswith("_") else shown  # matplotlib's legends leave out what begins so
