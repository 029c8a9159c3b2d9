"""One workflow as a picture: who was expected next at each forecast, how much was left, and its blocks in the queue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.errors import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_END = "end of workflow"
_OTHERS = "others"


def draw(one: Mapping[str, Any], file: Path) -> None:
    """Draws what an engine tells of a workflow.

    Args:
        one: as `/v1/workflows/ID/explain` has it.
        file: .svg or .png.

    Raises:
        OutputError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "presage", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(10, 8), layout="constrained")
        FigureCanvasAgg(figure)
        nearest, left, cache = figure.subplots(3, 1, height_ratios=(3, 2, 2))
        figure.suptitle(f"{one['workflow_id']}  ({one['workflow_type'] or 'no type'})")
        _draw_next(nearest, one["forecasts"])
        _draw_left(left, one["forecasts"])
        _draw_cache(cache, one["blocks"])
        try:
            figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise OutputError(f"{file}: {error.strerror or error}; give another place") from error


def _draw_next(axes: Axes, forecasts: list[Mapping[str, Any]]) -> None:
    rows: list[Mapping[str, Any]] = [
        made["horizons"][0] if made["horizons"] else {"agents": {}, "end": 0.0} for made in forecasts
    ]
    names = sorted({name for row in rows for name in row["agents"]})
    parts = {name: [float(row["agents"].get(name, 0.0)) for row in rows] for name in names}
    parts[_END] = [float(row["end"]) for row in rows]
    parts[_OTHERS] = [
        max(0.0, 1.0 - sum(of[at] for of in parts.values())) if row["agents"] else 0.0 for at, row in enumerate(rows)
    ]
    floor = [0.0] * len(rows)
    for name, shares in parts.items():
        if any(share > 0.005 for share in shares):
            axes.bar(range(len(rows)), shares, bottom=floor, label=name, width=0.9)
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axes.set_xticks(range(len(rows)), [_when(made) for made in forecasts], rotation=45, ha="right", fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_ylabel("who is next")
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    else:
        _nothing(axes, "nothing was forecast lately")


def _draw_left(axes: Axes, forecasts: list[Mapping[str, Any]]) -> None:
    quantiles = sorted({q for made in forecasts for q in made["remaining"]["quantiles"]}, key=float)
    for q in quantiles:
        tokens = [made["remaining"]["quantiles"].get(q, float("nan")) for made in forecasts]
        axes.plot(range(len(forecasts)), tokens, marker="o", markersize=3, label=f"p{100 * float(q):g}")
    axes.set_ylabel("output tokens left")
    if quantiles:
        axes.set_xlim(-0.5, len(forecasts) - 0.5)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    else:
        _nothing(axes, "nobody says how much is left")


def _draw_cache(axes: Axes, blocks: Mapping[str, Any] | None) -> None:
    free = [group for group in blocks["groups"] if group["before"] is not None] if blocks is not None else []
    if blocks is None or not free:
        _nothing(axes, "none of its blocks is free")
        return
    axes.broken_barh([(0, blocks["all_free"])], (0, 1), facecolors="#dddddd")
    for group in free:
        axes.broken_barh([(group["before"], group["free"])], (0, 1), facecolors="#1f77b4")
    axes.set_xlim(0, max(1, blocks["all_free"]))
    axes.set_yticks([])
    axes.set_xlabel("free blocks, the next to be given up on the left; its own are dark")


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _when(made: Mapping[str, Any]) -> str:
    step = "" if made["step"] is None else f" {made['step']}"
    return f"{made['agent']}{step}, {made['moment']}"
