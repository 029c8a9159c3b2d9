"""The figures of the notebooks, drawn with matplotlib so that a reader can go on with them; reports use `plot.py`.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; marks and dashes differ too, for print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from presage.features.moment import MOMENTS, moment_name
from presage.predictor_kinds import KINDS
from presage.predictors.common.bootstrap import share_ci
from presage.predictors.common.probabilities import ReliabilityBin, bin_of, reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Ends = Sequence[float | None]

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of lines, ours first; Okabe and Ito, "Color Universal Design" (2008)."""

_MARKS: Final = "os^Dv<P"
_DASHES: Final = ("-", "--", "-.", ":", "--", "-.", ":")
_LEAST: Final = 20
"""Fewest forecasts of a drawn bin."""


def house_style() -> None:
    """Set matplotlib's defaults for figures in a notebook."""
    import matplotlib as mpl

    mpl.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.titlesize": "medium",
            "grid.color": "#d9dee6",
            "grid.linewidth": 0.6,
            "font.size": 9,
            "legend.frameon": False,
            "legend.fontsize": "small",
        }
    )


def rows_with_intervals(
    ax: Axes, values: Mapping[str, tuple[float, Ends]], *, place: int = 0, shift: float = 0.0, name: str | None = None
) -> None:
    """A row per name, the first at the top: a dot for the figure, a bar for its interval.

    A second call with the same names draws beside the first: `place` is the index of colour and mark, `shift` moves
    rows downwards, `name` is that of the series in the legend.
    """
    colour, mark = COLOURS[place % len(COLOURS)], _MARKS[place % len(_MARKS)]
    for row, (value, (low, high)) in enumerate(values.values()):
        if low is not None and high is not None:
            ax.plot([low, high], [row + shift] * 2, color=colour, linewidth=1.4)
        label = name if row == 0 else None
        ax.plot([value], [row + shift], marker=mark, color=colour, markersize=5, label=label, linestyle="none")
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.5)


def line_with_intervals(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    ends: Sequence[Ends],
    name: str,
    *,
    place: int = 0,
    band: bool = False,
) -> None:
    """A line through points, each with its interval if it has one.

    `place` is the index of colour, mark and dash; `name` is for the legend; a `band` instead of bars and marks suits a
    line of many points.
    """
    colour, mark = COLOURS[place % len(COLOURS)], _MARKS[place % len(_MARKS)]
    points = [
        (position, low, high)
        for position, (low, high) in zip(x, ends, strict=False)
        if low is not None and high is not None
    ]
    if band and points:
        ax.fill_between(
            [k[0] for k in points], [k[1] for k in points], [k[2] for k in points], color=colour, alpha=0.12, lw=0
        )
    elif points:
        ax.vlines([k[0] for k in points], [k[1] for k in points], [k[2] for k in points], color=colour, linewidth=1.2)
    dash = _DASHES[place % len(_DASHES)]
    mark = "" if band else mark
    ax.plot(x, y, marker=mark, color=colour, linestyle=dash, linewidth=1.6, markersize=5, label=name)


@dataclass(frozen=True)
class Claims:
    """Probabilities and what came: n claims of a forecast.

    Claims about the same workflow or prompt are correlated, so intervals are by bootstrap over those groups.

    Attributes:
        predicted: [n], probabilities.
        truth: [n], outcomes: 0, 1, or the share of successful attempts.
        group: int64 [n], 0..G-1, the workflow or the prompt of each.
    """

    predicted: NDArray[np.floating]
    truth: NDArray[Any]
    group: NDArray[np.int64]

    def bins(self) -> tuple[ReliabilityBin, ...]:
        """Predicted probability and observed share by bin, without empty bins."""
        return reliability(self.predicted, self.truth)

    def ci95(self, rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
        """The interval of each bin's `accuracy`, in the order of `bins()`."""
        place, groups = bin_of(self.predicted), int(self.group.max(initial=-1)) + 1
        intervals = []
        for b in np.unique(place):
            inside = place == b
            hits = np.bincount(self.group[inside], weights=self.truth[inside], minlength=groups)
            intervals.append(share_ci(hits, np.bincount(self.group[inside], minlength=groups), rng))
        return tuple(intervals)


def reliability_line(ax: Axes, claims: Claims, rng: np.random.Generator, name: str, *, place: int = 0) -> None:
    """Observed share against predicted probability, in bins of 20 claims or more; the diagonal is perfect."""
    drawn = [(row, ends) for row, ends in zip(claims.bins(), claims.ci95(rng), strict=True) if row.positions >= _LEAST]
    predicted, came = [row.confidence for row, _ in drawn], [row.accuracy for row, _ in drawn]
    line_with_intervals(ax, predicted, came, [ends for _, ends in drawn], name, place=place)


def side_by_side(metrics: Mapping[str, Any]) -> Figure:
    """The headline figures of Presage and each baseline from a `metrics.json`, with 95 % intervals."""
    import matplotlib.pyplot as plt

    judged = {"presage": metrics, **metrics["baselines"]}
    panels: dict[str, dict[str, tuple[float, Ends]]] = {}
    if metrics["kind"] == "next-agent":
        for moment in MOMENTS:
            at_moment = {name: figures.get("moments", figures)[moment] for name, figures in judged.items()}
            panels[f"accuracy {moment_name(moment)}, 1 step ahead"] = {
                name: (figures["accuracy"][0], figures["ci95"][0]) for name, figures in at_moment.items()
            }
    for label, (named, key) in KINDS[metrics["kind"]].panels.items():
        shown = {
            name: (figures[named], figures[f"{named}_ci95"])
            for name, figures in judged.items()
            if figures.get(named) is not None
        }
        panels[label] = {
            name: (value, ends) if key is None else (value[key], ends[key]) for name, (value, ends) in shown.items()
        }
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.8 * len(panels), 0.36 * len(judged) + 1.2),
        sharey=metrics["kind"] != "profile",
        squeeze=False,
        layout="constrained",
    )
    for ax, (label, values) in zip(axes[0], panels.items(), strict=True):
        rows_with_intervals(ax, values)
        ax.set_xlabel(label)
    return figure


def legend_above(figure: Figure, ax: Axes) -> None:
    """The legend of one panel above all panels."""
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), 4))


def diagonal(ax: Axes) -> None:
    """The line y = x across the unit square."""
    ax.plot([0, 1], [0, 1], color="#5c6675", linewidth=1, linestyle=(0, (4, 4)))


def counted(figure: Figure, text: str) -> None:
    """A note below a figure, such as the number of workflows and the meaning of the bars."""
    figure.supxlabel(text, fontsize="small", color="#5c6675", x=0.01, ha="left")
