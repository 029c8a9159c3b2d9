"""The report of a predictor of output tokens or of context growth, from its `metrics.json`.

That of return times shares parts of it.

Keys that a cheaper run leaves out ("data", "traces", "config", "estimators") leave out their section.
"""

from __future__ import annotations

from typing import Any, Final

from presage.datasets.describe import missing_counts_warning
from presage.features.input_profiles import ENGINE, TARGETS, as_served
from presage.features.rows import CONTEXT_TARGETS
from presage.report.blocks import (
    Block,
    Card,
    Document,
    Metrics,
    Panel,
    Picture,
    Section,
    Table,
    Text,
    count,
    gain,
    interval,
    judged_on,
    number,
    version_of,
)
from presage.report.next_agent import SERVING, data, made
from presage.report.plot import Axis, PlotPoint, bar_plot, line_plot, share_axis
from presage.wording import counted

_WHAT: Final = {
    "remaining": "Remaining output tokens",
    "step": "Output tokens of a step",
    "final-context": "Growth of the context to its largest",
    "next-context": "Growth of the context to the next step",
}
"""What is forecast, by target."""


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    sections = [
        data(metrics),
        order(metrics),
        _queue(metrics),
        bounds(metrics),
        _recorded(metrics),
        profiles(metrics),
        by_type(metrics),
        estimators(metrics),
        made(metrics),
    ]
    return Document(
        f"{_WHAT[metrics['target']]}: {_name(metrics)}{version_of(metrics)}", _lead(metrics), sections, _cards(metrics)
    )


def _unit(metrics: Metrics) -> tuple[str, int]:
    """The unit of the pinball loss, and the digits to print."""
    return ("tokens", 1) if "target" in metrics else ("log seconds", 3)  # return times have none


_MOST_SHOWN: Final = 4
_SHOWN: Final = ("0.1", "0.5", "0.9", "0.99")


def _shown(metrics: Metrics) -> list[str]:
    """The quantiles of the tables: all, or where these are too many for a page, _SHOWN."""
    quantiles = list(metrics["pinball"])
    return quantiles if len(quantiles) <= _MOST_SHOWN else [q for q in quantiles if q in _SHOWN] or quantiles


def _losses(metrics: Metrics, pinball: Metrics) -> list[str]:
    """The cells of a table with a column for each quantile."""
    return [number(pinball[q], _unit(metrics)[1]) for q in _shown(metrics)]


def _name(metrics: Metrics) -> str:
    return metrics["model"] or (
        "predictor of contexts" if metrics.get("target") in CONTEXT_TARGETS else "predictor of lengths"
    )


def _judged(metrics: Metrics) -> dict[str, Any]:
    return {f"{_name(metrics)} (ours)": metrics, **metrics["baselines"]}


def _marked(metrics: Metrics) -> frozenset[str]:
    return frozenset({f"{_name(metrics)} (ours)"})


def _best(metrics: Metrics) -> str | None:
    """The baseline that orders best; None where there is none."""
    ordered = {name: figures["tau_distance"]["all"] for name, figures in metrics["baselines"].items()}
    comparable = {name: distance for name, distance in ordered.items() if distance is not None}
    return min(comparable, key=lambda name: comparable[name]) if comparable else None


def _lead(metrics: Metrics) -> str:
    served, gateway = (as_served(metrics, profile)["tau_distance"]["all"] for profile in (ENGINE, TARGETS["gateway"]))
    text = f"In an engine the tau distance over all steps is {number(served)}"
    text += f"; with texts, in a gateway, {number(gateway)}." if gateway != served else "."
    text += f" Judged on {judged_on(metrics)}, all held out."
    for why, steps in metrics["left_out_steps"].items():
        if steps:
            text += f" Not judged: {counted(steps, 'step')} ({why})."
    if steps := metrics.get("estimated_steps"):
        text += f" The length of {counted(steps, 'judged step')} contains an estimated token count."
    if warning := missing_counts_warning(metrics.get("traces", {})):
        text += f" {warning}"
    best = _best(metrics)
    if best is not None:
        text += (
            f" Against {best}, the baseline that orders best, the tau distance differs by "
            f"{gain(metrics['differences'][best]['tau_distance']['all'])}; below 0, ours is better."
        )
    return text


def _cards(metrics: Metrics) -> list[Card]:
    best, metrics = _best(metrics), as_served(metrics)
    beside = "0 is the true order, .5 none"
    if best is not None:
        beside += f"; best baseline {best} {number(metrics['baselines'][best]['tau_distance']['all'])}"
    cards = [Card(number(metrics["tau_distance"]["all"]), "tau distance over all steps, in an engine", beside)]
    for q, share in metrics["coverage"].items():
        if float(q) > 0.5:
            low, high = metrics["coverage_ci95"][q]
            cards.append(
                Card(number(share), f"of the steps within the {q} quantile", f"95 % {number(low)} to {number(high)}")
            )
    return cards


def order(metrics: Metrics) -> Section:
    """Order and loss, beside the baselines."""
    quantiles = _shown(metrics)
    rows = [
        [
            name,
            *_intervals(figures, "tau_distance", ("all", "arrival")),
            *_losses(metrics, figures["pinball"]),
        ]
        for name, figures in _judged(metrics).items()
    ]
    rivals = [
        [name, *(gain(gains["tau_distance"][scope]) for scope in ("all", "arrival"))]
        for name, gains in metrics["differences"].items()
    ]
    head = ["", "tau distance, all steps [95 %]", "at arrival", *(f"pinball {q}" for q in quantiles)]
    blocks: list[Block] = [
        Text(
            "Tau distance: the share of pairs of steps that the median puts in the wrong order; pinball: the loss of a "
            f"quantile in {_unit(metrics)[0]}, a step too low by one costing q and one too high 1 − q. Lower is better."
        ),
        Table(head, rows, marked=_marked(metrics)),
    ]
    if rivals:
        blocks.append(Table(["ours minus ...", "tau distance, all steps [paired 95 %]", "at arrival"], rivals))
    if drawn := _against_outcomes(metrics):
        blocks.append(drawn)
    return Section("Order and loss", blocks, in_terminal=True)


def _intervals(figures: Any, figure: str, keys: Any) -> list[str]:
    return [interval(figures[figure][key], figures[f"{figure}_ci95"][key]) for key in keys]


def _against_outcomes(metrics: Metrics) -> Picture | None:
    label, least = ("tokens", 1.0) if "target" in metrics else ("seconds", 0.01)
    bins = [row for row in metrics["bins"] if row["forecast"] >= least and row["truth_p10"] >= least]
    if len(bins) < 2:
        return None
    values = [row[key] for row in bins for key in ("forecast", "truth_p10", "truth_p90")]
    low, high = min(values), max(values)
    ticks = [10.0**power for power in range(-2, 9) if low <= 10**power <= high]
    x, y = (Axis(f"{axis}, {label}", low, high * 1.001, ticks, logarithmic=True) for axis in ("forecast", "outcome"))
    points = [
        PlotPoint(
            row["forecast"],
            row["truth_p50"],
            row["truth_p10"],
            row["truth_p90"],
            f"forecast {row['forecast']:,.3g}, outcome {row['truth_p50']:,.3g} ({counted(row['steps'], 'step')})",
        )
        for row in bins
    ]
    caption = (
        "Steps in groups of equal size by the forecast median: the median outcome, and where 80 % of the outcomes lie. "
        "On the dashed line they agree."
    )
    drawn = line_plot([points], x, y, diagonal=True)
    return Picture("predicted", caption, [Panel("Forecasts and outcomes", drawn)])


def _queue(metrics: Metrics) -> Section | None:
    queue = metrics["queue"]
    if queue is None:
        return None
    tokens = queue["completion_tokens"]
    rows = [[name, count(mean), f"{queue['saved'][name]:.1%}"] for name, mean in tokens.items()]
    text = (
        f"Mean completion of {counted(queue['workflows'], 'workflow')}, arriving at random, that keep one server busy "
        f"{queue['load']:.0%} of the time, in tokens of service. It compares orders; it does not predict seconds."
    )
    bars = Picture("queue", "Mean completion by policy.", [Panel("Mean completion", bar_plot(tokens))], wide=True)
    ours = frozenset(name for name in tokens if "predicted" in name)
    table = Table(["policy", "completion, tokens", "saved"], rows, marked=ours)
    return Section("What the order is worth", [Text(text), bars, table], in_terminal=True)


def bounds(metrics: Metrics) -> Section:
    """Coverage of the quantiles."""
    quantiles = _shown(metrics)
    rows = [[name, *_intervals(figures, "coverage", quantiles)] for name, figures in _judged(metrics).items()]
    rows.append([f"ours, {_unit(metrics)[0]} above the median", *_losses(metrics, metrics["width"])])
    points = []
    for q in metrics["coverage"]:
        low, high = metrics["coverage_ci95"][q]
        share = metrics["coverage"][q]
        points.append(PlotPoint(float(q), share, low, high, f"{q}: {number(share)}"))
    axis = share_axis("quantile", [*map(float, metrics["coverage"]), *(point.y for point in points), 1.0])
    drawn = line_plot([points], axis, share_axis("coverage", [axis.low, axis.high]), diagonal=True)
    return Section(
        "Do the bounds hold?",
        [
            Text("The share of steps whose outcome was within each quantile. On the dashed line they hold exactly."),
            Picture("coverage", "Each quantile, and how often it held.", [Panel("Coverage", drawn)]),
            Table(["", *(f"within {q} [95 %]" for q in quantiles)], rows, marked=_marked(metrics)),
        ],
        in_terminal=True,
    )


def _recorded(metrics: Metrics) -> Section | None:
    """The figures beside those of the workflows whose counts were all recorded; nothing without an estimate."""
    recorded = metrics.get("recorded")
    if recorded is None:
        return None
    quantiles = _shown(metrics)
    rows = [
        [
            name,
            count(figures["workflows"]),
            count(figures["steps"]),
            *_intervals(figures, "tau_distance", ("all",)),
            *_losses(metrics, figures["pinball"]),
            *_intervals(figures, "coverage", quantiles),
        ]
        for name, figures in {"all": metrics, "all counts recorded": recorded}.items()
    ]
    head = ["workflows", "number", "steps", "tau distance, all steps"]
    head += [*(f"pinball {q}" for q in quantiles), *(f"within {q}" for q in quantiles)]
    text = (
        "Where the traces lack token counts, lengths contain estimates. Long workflows seldom have all counts "
        "recorded: the second line is of short ones."
    )
    return Section("Recorded and estimated lengths", [Text(text), Table(head, rows)], in_terminal=True)


def profiles(metrics: Metrics) -> Section | None:
    """Order, loss and coverage under each input profile; nothing for older metrics."""
    if not metrics.get("profiles"):
        return None
    quantiles = _shown(metrics)
    rows = [
        [
            name,
            *_intervals(figures, "tau_distance", ("all",)),
            *_losses(metrics, figures["pinball"]),
            *_intervals(figures, "coverage", quantiles),
        ]
        for name, figures in metrics["profiles"].items()
    ]
    head = ["inputs", "tau distance, all", *(f"pinball {q}" for q in quantiles), *(f"within {q}" for q in quantiles)]
    table = Table(head, rows, marked=frozenset({"engine"}))
    return Section("What serving can see", [Text(SERVING), table], in_terminal=True)


def by_type(metrics: Metrics) -> Section:
    """Loss and coverage of each workflow type."""
    quantiles = _shown(metrics)
    rows = [
        [
            name,
            count(figures["workflows"]),
            count(figures["steps"]),
            number(figures["tau_distance"]["all"]),
            *_losses(metrics, figures["pinball"]),
            *(number(figures["coverage"][q]) for q in quantiles),
        ]
        for name, figures in metrics["by_workflow_type"].items()
    ]
    head = ["workflow type", "workflows", "steps", "tau distance"]
    head += [*(f"pinball {q}" for q in quantiles), *(f"within {q}" for q in quantiles)]
    return Section("By workflow type", [Table(head, rows)], in_terminal=True)


def estimators(metrics: Metrics) -> Section | None:
    """What each estimator lost on the selection part, where there was a choice."""
    losses = metrics.get("estimators", {})
    if len(losses) < 2:
        return None
    quantiles = _shown(metrics)
    rows = [[name, *_losses(metrics, pinball)] for name, pinball in losses.items()]
    text = f"Pinball loss on the selection part, in {_unit(metrics)[0]}; the one with the smallest sum was kept."
    table = Table(["", *(f"pinball {q}" for q in quantiles)], rows, marked=frozenset({metrics["config"]["chosen"]}))
    return Section("Which estimator", [Text(text), table])
