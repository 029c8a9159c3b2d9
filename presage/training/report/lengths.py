"""The report of a predictor of remaining output tokens, from its `metrics.json`.

Keys that a cheaper run leaves out ("data", "traces", "config", "estimators") leave out their section.
"""

from __future__ import annotations

from typing import Any

from presage.training.report.blocks import (
    Block,
    Card,
    Document,
    Metrics,
    Panel,
    Picture,
    Row,
    Section,
    Table,
    Text,
    count,
    interval,
    number,
    signed_interval,
)
from presage.training.report.next_agent import data, made
from presage.training.report.plot import Axis, PlotPoint, bar_plot, line_plot, share_axis


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    version = f", version {metrics['version']}" if metrics["version"] is not None else ""
    what = "Remaining output tokens" if metrics["target"] == "remaining" else "Output tokens of a step"
    sections = [
        data(metrics),
        _order(metrics),
        _queue(metrics),
        _bounds(metrics),
        _by_type(metrics),
        _estimators(metrics),
        made(metrics),
    ]
    return Document(
        f"{what}: {metrics['model'] or 'predictor of lengths'}{version}",
        _lead(metrics),
        [section for section in sections if section is not None],
        _cards(metrics),
    )


def _ours(metrics: Metrics) -> str:
    return f"{metrics['model'] or 'predictor of lengths'} (ours)"


def _best(metrics: Metrics) -> str | None:
    """The baseline that orders best; None where there is none."""
    ordered = {name: of["tau_distance"]["all"] for name, of in metrics["baselines"].items()}
    known = {name: distance for name, distance in ordered.items() if distance is not None}
    return min(known, key=lambda name: known[name]) if known else None


def _lead(metrics: Metrics) -> str:
    text = f"Judged on {count(metrics['workflows'])} workflows, {count(metrics['steps'])} steps, kept apart for that."
    for why, steps in metrics["left_out_steps"].items():
        if steps:
            text += f" {count(steps)} steps were not judged ({why})."
    best = _best(metrics)
    if best is not None:
        gain = metrics["differences"][best]["tau_distance"]["all"]
        text += (
            f" Against {best}, the baseline that orders best, the tau distance differs by "
            f"{signed_interval(gain['difference'], gain['ci95'])}; below 0, ours is better."
        )
    return text


def _cards(metrics: Metrics) -> list[Card]:
    best = _best(metrics)
    beside = "0 is the true order, .5 none"
    if best is not None:
        beside += f"; best baseline {best} {number(metrics['baselines'][best]['tau_distance']['all'])}"
    cards = [Card(number(metrics["tau_distance"]["all"]), "tau distance over all steps", beside)]
    for q, share in metrics["coverage"].items():
        if float(q) > 0.5:
            low, high = metrics["coverage_ci95"][q]
            cards.append(
                Card(number(share), f"of the steps within the {q} quantile", f"95 % {number(low)} to {number(high)}")
            )
    return cards


def _order(metrics: Metrics) -> Section:
    mine = _ours(metrics)
    judged = {mine: metrics, **metrics["baselines"]}
    quantiles = list(metrics["pinball"])
    rows = [
        Row(
            [
                name,
                *(interval(of["tau_distance"][s], of["tau_distance_ci95"][s]) for s in ("all", "arrival")),
                *(number(of["pinball"][q], 1) for q in quantiles),
            ],
            name == mine,
        )
        for name, of in judged.items()
    ]
    rivals = [
        Row(
            [
                name,
                *(
                    signed_interval(of["tau_distance"][s]["difference"], of["tau_distance"][s]["ci95"])
                    for s in ("all", "arrival")
                ),
            ]
        )
        for name, of in metrics["differences"].items()
    ]
    blocks: list[Block] = [
        Text(
            "Tau distance: the share of pairs of steps that the median puts the wrong way round; pinball: what a "
            "quantile costs in tokens, a step too low by one costing q and one too high 1 − q. Lower is better."
        ),
        Table(["", "tau distance, all steps [95 %]", "at arrival", *(f"pinball {q}" for q in quantiles)], rows),
    ]
    if rivals:
        blocks.append(Table(["ours minus ...", "tau distance, all steps [paired 95 %]", "at arrival"], rivals))
    if drawn := _against_truth(metrics):
        blocks.append(drawn)
    return Section("Order and numbers", blocks)


def _against_truth(metrics: Metrics) -> Picture | None:
    bins = [row for row in metrics["bins"] if row["forecast"] >= 1 and row["truth_p10"] >= 1]
    if len(bins) < 2:
        return None
    values = [row[key] for row in bins for key in ("forecast", "truth_p10", "truth_p90")]
    low, high = min(values), max(values)
    ticks = [10.0**power for power in range(9) if low <= 10**power <= high]
    x, y = (Axis(label, low, high * 1.001, ticks, logarithmic=True) for label in ("forecast, tokens", "came, tokens"))
    points = [
        PlotPoint(
            row["forecast"],
            row["truth_p50"],
            row["truth_p10"],
            row["truth_p90"],
            f"forecast {count(row['forecast'])}, came {count(row['truth_p50'])} ({count(row['steps'])} steps)",
        )
        for row in bins
    ]
    caption = (
        "Steps in groups of equal size by the forecast median: the median of what came, and where 80 % of it lies. On "
        "the dashed line they agree."
    )
    return Picture("predicted", caption, [Panel("Forecast and truth", line_plot([points], x, y, diagonal=True))])


def _queue(metrics: Metrics) -> Section | None:
    queue = metrics["queue"]
    if queue is None:
        return None
    rows = [
        Row([name, count(tokens), f"{queue['saved'][name]:.1%}"], "predicted" in name)
        for name, tokens in queue["completion_tokens"].items()
    ]
    caption = (
        f"Mean completion of {count(queue['workflows'])} workflows that come at random and keep one server busy "
        f"{queue['load']:.0%} of the time, in tokens of service. A toy: it compares orders, it promises no seconds."
    )
    bars = Picture("queue", caption, [Panel("Mean completion", bar_plot(queue["completion_tokens"]))], wide=True)
    return Section("What the order is worth", [bars, Table(["policy", "completion, tokens", "saved"], rows)])


def _bounds(metrics: Metrics) -> Section:
    mine = _ours(metrics)
    quantiles = list(metrics["coverage"])
    rows = [
        Row(
            [name, *(interval(of["coverage"][q], of["coverage_ci95"][q]) for q in quantiles)],
            name == mine,
        )
        for name, of in {mine: metrics, **metrics["baselines"]}.items()
    ]
    widths = Row(["ours, tokens above the median", *(number(metrics["width"][q], 1) for q in quantiles)])
    points = []
    for q in quantiles:
        low, high = metrics["coverage_ci95"][q]
        share = metrics["coverage"][q]
        points.append(PlotPoint(float(q), share, low, high, f"{q}: {number(share)}"))
    levels = [float(q) for q in quantiles]
    axis = share_axis("promised", [*levels, *(point.y for point in points), 1.0])
    drawn = line_plot([points], axis, share_axis("came true", [axis.low, axis.high]), diagonal=True)
    return Section(
        "Do the bounds hold?",
        [
            Text("The share of steps whose length was within each quantile. On the line they hold as promised."),
            Picture("coverage", "What each quantile promises, and how often it held.", [Panel("Coverage", drawn)]),
            Table(["", *(f"within {q} [95 %]" for q in quantiles)], [*rows, widths]),
        ],
    )


def _by_type(metrics: Metrics) -> Section:
    quantiles = list(metrics["coverage"])
    rows = [Row(_type_cells(name, of, quantiles)) for name, of in metrics["by_workflow_type"].items()]
    head = ["workflow type", "workflows", "steps", "tau distance", "pinball 0.5", *(f"within {q}" for q in quantiles)]
    return Section("By workflow type", [Table(head, rows)])


def _type_cells(name: str, of: Any, quantiles: list[str]) -> list[str]:
    return [
        name,
        count(of["workflows"]),
        count(of["steps"]),
        number(of["tau_distance"]["all"]),
        number(of["pinball"].get("0.5"), 1),
        *(number(of["coverage"][q]) for q in quantiles),
    ]


def _estimators(metrics: Metrics) -> Section | None:
    """What each estimator lost on the calibration part, where there was a choice."""
    losses = metrics.get("estimators", {})
    if len(losses) < 2:
        return None
    quantiles = list(metrics["pinball"])
    rows = [
        Row([name, *(number(of[q], 1) for q in quantiles)], name == metrics["config"]["chosen"])
        for name, of in losses.items()
    ]
    text = "Pinball loss on the calibration part, in tokens; of these the one was kept whose median loses less."
    return Section("Which estimator", [Text(text), Table(["", *(f"pinball {q}" for q in quantiles)], rows)])
