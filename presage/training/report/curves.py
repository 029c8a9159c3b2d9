"""The pictures of lines: the learning curve, the reliability of the probabilities, accuracy by steps ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from presage.training.report.blocks import (
    Block,
    Folded,
    Metrics,
    Panel,
    Picture,
    Row,
    Section,
    Table,
    Text,
    ahead,
    count,
    interval,
    number,
)
from presage.training.report.plot import COLOURS, Axis, PlotPoint, line_plot, share_axis

DRAWN_FROM: Final = 20
"""Forecasts behind a point of the reliability plot, at least."""

_QUARTERS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


def learning_curve(metrics: Metrics) -> Section | None:
    """Accuracy against training workflows; nothing where it was not measured."""
    curve = metrics.get("learning_curve")
    if curve is None:
        return None
    points, models = curve["points"], curve["models"]
    sizes = [point["workflows"] for point in points]
    title = "Learning curve"
    first = next(iter(models.values()))
    blocks: list[Block] = [
        Text(
            "Accuracy on the same test workflows after training on ever more workflows, whole tasks, each set within "
            "the next. Bars are 95 % intervals over the test workflows. If ours still climbs at the right, more traces "
            "will help; where it is flat, they will not."
        )
    ]
    if len(points) > 1:
        x = Axis("training workflows", sizes[0], sizes[-1], _ticks(sizes), logarithmic=True)
        panels = []
        for moment, of_ours in first.items():
            for k, label in enumerate(ahead(len(of_ours["accuracy"][0]))):
                lines = [_line(of[moment], sizes, k, name) for name, of in models.items()]
                values = [v for line in lines for p in line for v in (p.y, p.low, p.high) if v is not None]
                if values:
                    y = share_axis("accuracy", values)
                    panels.append(Panel(f"{moment}, {label} ahead", line_plot(lines, x, y)))
        caption = "Accuracy against training workflows (logarithmic)"
        blocks.append(Picture("learning-curve", caption, panels, _legend(models)))
    for of in curve["left_out"]:
        blocks.append(Text(f"Left out, too little to learn from: {of['workflows']} workflows ({of['reason']})."))
    blocks.append(Folded("The learning curve in numbers", [_spread_text(), *_curve_tables(points, models)]))
    return Section(title, blocks)


def reliability(metrics: Metrics) -> Section:
    """Of forecasts about equally sure, how many came true."""
    moments = metrics["moments"]
    axes = (Axis("confidence", 0, 1, _QUARTERS), Axis("accuracy", 0, 1, _QUARTERS))
    panels, tables = [], []
    horizon = max(len(figures["reliability"]) for figures in moments.values())
    for moment, figures in moments.items():
        lines = []
        for bins, label in zip(figures["reliability"][:COLOURS], ahead(horizon), strict=False):
            lines.append(
                [
                    PlotPoint(
                        row["confidence"],
                        row["accuracy"],
                        says=f"{label} ahead: as sure as {number(row['confidence'])}, right at "
                        f"{number(row['accuracy'])}, {count(row['positions'])} forecasts",
                    )
                    for row in bins
                    if row["positions"] >= DRAWN_FROM
                ]
            )
        panels.append(Panel(moment, line_plot(lines, *axes, diagonal=True)))
        tables.append(_reliability_table(figures["reliability"], moment))
    caption = (
        "Accuracy against confidence, by steps ahead; on the dashed line a probability means what it says. Left out is "
        f"what fewer than {DRAWN_FROM} forecasts stand behind."
    )
    eces = "; ".join(f"{moment} {' / '.join(map(number, of['ece']))}" for moment, of in moments.items())
    legend = [f"{label} ahead" for label in ahead(min(horizon, COLOURS))]
    return Section(
        "Reliability",
        [
            Text(f"Expected calibration error 1 / 2 / … steps ahead: {eces}. 0 is perfect."),
            Picture("reliability", caption, panels, legend),
            Folded("Reliability in numbers: how many came true (of how many)", tables),
        ],
    )


def by_steps_ahead(judged: Mapping[str, Mapping[str, Any]], name: str) -> Picture:
    """Accuracy at 1..K steps ahead, a panel a moment, a line a model; the first six models.

    Args:
        judged: {model: {moment: figures}}.
        name: of the picture's file.
    """
    drawn = dict(list(judged.items())[:COLOURS])
    moments = list(next(iter(drawn.values())))
    panels = []
    for moment in moments:
        lines = []
        for model, of in drawn.items():
            line = []
            for k, (accuracy, ends) in enumerate(zip(of[moment]["accuracy"], of[moment]["ci95"], strict=True)):
                if accuracy is not None:
                    says = f"{model}, {ahead(k + 1)[-1]} ahead: {interval(accuracy, ends)}"
                    line.append(PlotPoint(k + 1, accuracy, ends[0], ends[1], says))
            lines.append(line)
        values = [v for line in lines for p in line for v in (p.y, p.low, p.high) if v is not None]
        if not values:
            continue
        most = max(len(of[moment]["accuracy"]) for of in drawn.values())
        x = Axis("steps ahead", 0.7, most + 0.3, range(1, most + 1))
        panels.append(Panel(f"at {moment}", line_plot(lines, x, share_axis("accuracy", values))))
    left_out = len(judged) - len(drawn)
    caption = "Accuracy by steps ahead" + (f"; {left_out} models are in the table alone" if left_out else "")
    return Picture(name, caption, panels, list(drawn))


def _line(of: Mapping[str, Any], sizes: Sequence[float], k: int, name: str) -> list[PlotPoint]:
    return [
        PlotPoint(
            size,
            accuracy[k],
            ends[k][0],
            ends[k][1],
            f"{name}, {size:g} workflows: {interval(accuracy[k], ends[k])}",
        )
        for size, accuracy, ends in zip(sizes, of["accuracy"], of["ci95"], strict=True)
        if accuracy[k] is not None
    ]


def _legend(models: Mapping[str, Any]) -> list[str]:
    return [f"{name} (ours)" if index == 0 else name for index, name in enumerate(models)]


def _ticks(sizes: Sequence[float]) -> list[float]:
    """Sizes far enough apart to be read beside one another."""
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if kept[-1] / size >= (sizes[-1] / sizes[0]) ** 0.13:
            kept.append(size)
    return kept


def _spread_text() -> Text:
    return Text(
        "Training sets drawn several times show what the choice of workflows does: least to greatest accuracy of the "
        "draws, in round brackets."
    )


def _curve_tables(points: Sequence[Mapping[str, Any]], models: Mapping[str, Any]) -> list[Table]:
    tables = []
    for moment, of_ours in next(iter(models.values())).items():
        steps = ahead(len(of_ours["accuracy"][0]))
        rows = []
        for index, point in enumerate(points):
            for number_, (name, of) in enumerate(models.items()):
                cells = [
                    interval(a, ends) + (f" ({number(spread[0])} to {number(spread[1])})" if point["draws"] > 1 else "")
                    for a, ends, spread in zip(
                        of[moment]["accuracy"][index],
                        of[moment]["ci95"][index],
                        of[moment]["spread"][index],
                        strict=True,
                    )
                ]
                facts = [f"{point['workflows']:g}", count(point["tasks"]), count(point["draws"])]
                rows.append(Row([name, *facts, *cells], number_ == 0))
        tables.append(Table([f"at {moment}", "workflows", "tasks", "draws", *steps], rows))
    return tables


def _reliability_table(horizons: Sequence[Sequence[Mapping[str, Any]]], moment: str) -> Table:
    found: dict[tuple[float, float], dict[int, str]] = {
        (row["low"], row["high"]): {} for horizon in horizons for row in horizon
    }
    for k, horizon in enumerate(horizons):
        for row in horizon:
            found[row["low"], row["high"]][k] = f"{number(row['accuracy'])} ({count(row['positions'])})"
    rows = [
        Row([f"{number(low)} to {number(high)}", *(cells.get(k, "") for k in range(len(horizons)))])
        for (low, high), cells in sorted(found.items())
    ]
    return Table([f"confidence at {moment}", *ahead(len(horizons))], rows)
