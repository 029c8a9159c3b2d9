"""The pictures of lines: the learning curve, and the reliability of the probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element

from presage.report.blocks import (
    Block,
    Folded,
    Metrics,
    Panel,
    Picture,
    Section,
    Table,
    Text,
    ahead,
    count,
    interval,
    number,
)
from presage.report.plot import COLOURS, Axis, PlotPoint, line_plot, share_axis
from presage.wording import counted

DRAWN_FROM: Final = 20
"""Fewest forecasts behind a point of the reliability plot."""

_QUARTERS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


def learning_curve(metrics: Metrics) -> Section:
    """Accuracy against training workflows."""
    curve = metrics["learning_curve"]
    points, models = curve["points"], curve["models"]
    sizes = [point["workflows"] for point in points]
    first = next(iter(models.values()))
    blocks: list[Block] = [
        Text(
            "Accuracy on the same test workflows after training on more and more workflows, whole tasks, each set "
            "within the next. Bars are 95 % intervals over the test workflows, drawn side by side. If ours "
            "still climbs at the right, more traces will help; where it is flat, they will not."
        )
    ]
    if len(points) > 1:
        x = Axis("training workflows", sizes[0] / 1.15, sizes[-1] * 1.15, _ticks(sizes), logarithmic=True)
        panels = []
        for moment, of_ours in first.items():
            for k, label in enumerate(ahead(len(of_ours["accuracy"][0]))):
                lines = [
                    _line(
                        (size, accuracy[k], ends[k], f"{name}, {size:g} workflows")
                        for size, accuracy, ends in zip(
                            sizes, by_moment[moment]["accuracy"], by_moment[moment]["ci95"], strict=True
                        )
                    )
                    for name, by_moment in models.items()
                ]
                panels += _share_panel(f"{moment}, {label} ahead", lines, x)
        caption = "Accuracy against training workflows (logarithmic)"
        legend = [f"{name} (ours)" if index == 0 else name for index, name in enumerate(models)]
        blocks.append(Picture("learning-curve", caption, panels, legend))
    for small in curve["left_out"]:
        blocks.append(
            Text(f"Left out, too little to learn from: {counted(small['workflows'], 'workflow')} ({small['reason']}).")
        )
    spread = Text(
        "Training sets drawn several times show the effect of the choice of workflows: lowest to highest accuracy of "
        "the draws, in round brackets."
    )
    blocks.append(Folded("The learning curve in numbers", [spread, *_curve_tables(points, models)]))
    return Section("Learning curve", blocks)


def reliability(metrics: Metrics) -> Section:
    """Of forecasts with about the same confidence, the share that was right."""
    moments = metrics["moments"]
    horizon = max(len(figures["reliability"]) for figures in moments.values())
    legend = [f"{label} ahead" for label in ahead(min(horizon, COLOURS))]
    panels, tables = [], []
    for moment, figures in moments.items():
        bins = dict(zip(legend, figures["reliability"], strict=False))
        panels.append(Panel(moment, bin_plot(bins, "confidence", "accuracy", DRAWN_FROM)))
        tables.append(_reliability_table(figures["reliability"], moment))
    caption = (
        "Accuracy against confidence, by steps ahead; on the dashed line they agree. Bins with fewer than "
        f"{DRAWN_FROM} forecasts are left out."
    )
    eces = "; ".join(f"{moment} {' / '.join(map(number, figures['ece']))}" for moment, figures in moments.items())
    return Section(
        "Reliability",
        [
            Text(f"Expected calibration error 1 / 2 / … steps ahead: {eces}. 0 is perfect."),
            Picture("reliability", caption, panels, legend),
            Folded("Reliability in numbers: the share that was right (of how many)", tables),
        ],
    )


def bin_plot(lines: Mapping[str, Sequence[Mapping[str, Any]]], x: str, y: str, least: int) -> Element:
    """A reliability plot of the bins with at least `least` positions, by name of the line."""
    drawn = [
        [
            PlotPoint(
                row["confidence"],
                row["accuracy"],
                tooltip=f"{name}: {x} {number(row['confidence'])}, {y} {number(row['accuracy'])} of "
                f"{count(row['positions'])}",
            )
            for row in bins
            if row["positions"] >= least
        ]
        for name, bins in lines.items()
    ]
    return line_plot(drawn, Axis(x, 0, 1, _QUARTERS), Axis(y, 0, 1, _QUARTERS), diagonal=True)


def _line(points: Iterable[tuple[float, float | None, Sequence[float], str]]) -> list[PlotPoint]:
    """Points of accuracy, from (x, accuracy, interval, name); without those that were not judged."""
    return [
        PlotPoint(x, accuracy, ends[0], ends[1], f"{name}: {interval(accuracy, ends)}")
        for x, accuracy, ends, name in points
        if accuracy is not None
    ]


def _share_panel(title: str, lines: Sequence[Sequence[PlotPoint]], x: Axis) -> list[Panel]:
    """One panel of accuracies, or none if there is no point."""
    values = [v for line in lines for p in line for v in (p.y, p.low, p.high) if v is not None]
    return [Panel(title, line_plot(lines, x, share_axis("accuracy", values), side_by_side=True))] if values else []


def _ticks(sizes: Sequence[float]) -> list[float]:
    """Sizes far enough apart to be read beside one another."""
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if kept[-1] / size >= (sizes[-1] / sizes[0]) ** 0.13:
            kept.append(size)
    return kept


def _curve_tables(points: Sequence[Mapping[str, Any]], models: Mapping[str, Any]) -> list[Table]:
    tables = []
    for moment, of_ours in next(iter(models.values())).items():
        rows = []
        for index, point in enumerate(points):
            for name, by_moment in models.items():
                cells_given = zip(
                    *(by_moment[moment][key][index] for key in ("accuracy", "ci95", "spread")), strict=True
                )
                cells = [
                    interval(a, ends) + (f" ({number(spread[0])} to {number(spread[1])})" if point["draws"] > 1 else "")
                    for a, ends, spread in cells_given
                ]
                rows.append([name, f"{point['workflows']:g}", count(point["tasks"]), count(point["draws"]), *cells])
        head = [f"at {moment}", "workflows", "tasks", "draws", *ahead(len(of_ours["accuracy"][0]))]
        tables.append(Table(head, rows, marked=frozenset({next(iter(models))})))
    return tables


def _reliability_table(horizons: Sequence[Sequence[Mapping[str, Any]]], moment: str) -> Table:
    cells_by_bin: dict[tuple[float, float], dict[int, str]] = {
        (row["low"], row["high"]): {} for horizon in horizons for row in horizon
    }
    for k, horizon in enumerate(horizons):
        for row in horizon:
            cells_by_bin[row["low"], row["high"]][k] = f"{number(row['accuracy'])} ({count(row['positions'])})"
    rows = [
        [f"{number(low)} to {number(high)}", *(cells.get(k, "") for k in range(len(horizons)))]
        for (low, high), cells in sorted(cells_by_bin.items())
    ]
    return Table([f"confidence at {moment}", *ahead(len(horizons))], rows)
