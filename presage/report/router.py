"""The report of a router, from its `metrics.json`.

Keys that an evaluation leaves out ("data", "config") leave out their section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.report.blocks import (
    Block,
    Card,
    Document,
    Folded,
    Metrics,
    Panel,
    Picture,
    Section,
    Table,
    Text,
    count,
    gain,
    interval,
    number,
    signed_interval,
    version_of,
)
from presage.report.curves import bin_plot
from presage.report.next_agent import data, made
from presage.report.plot import COLOURS, Axis, PlotPoint, line_plot, share_axis
from presage.wording import counted

_DRAWN_FROM = 10
"""Fewest labels of a drawn bin."""


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    sections = [
        data(metrics),
        _order(metrics),
        _picks(metrics),
        _costs(metrics),
        _reliability(metrics),
        _by_model(metrics),
        _by_task(metrics),
        made(metrics),
    ]
    title = f"Router: {metrics['model'] or 'which model solves it'}{version_of(metrics)}"
    return Document(title, _lead(metrics), sections, _cards(metrics))


def _judged(metrics: Metrics) -> dict[str, Any]:
    return {_ours(metrics): metrics, **metrics["baselines"]}


def _ours(metrics: Metrics) -> str:
    return f"{metrics['model'] or 'router'} (ours)"


def _best(metrics: Metrics) -> str | None:
    """The baseline that orders best; None where there is none."""
    ordered = {
        name: figures["macro_map"] for name, figures in metrics["baselines"].items() if figures["macro_map"] is not None
    }
    return max(ordered, key=lambda name: ordered[name]) if ordered else None


def _lead(metrics: Metrics) -> str:
    text = f"Judged on {counted(metrics['prompts'], 'prompt')}, {counted(metrics['labels'], 'label')}, all held out."
    if (best := _best(metrics)) is not None:
        text += (
            f" Against {best}, the baseline that orders best, macro mAP differs by "
            f"{gain(metrics['differences'][best]['macro_map'])}; above 0, ours is better."
        )
    return text


def _cards(metrics: Metrics) -> list[Card]:
    best = _best(metrics)
    beside = "1 is perfect"
    if best is not None:
        beside += f"; best baseline {best} {number(metrics['baselines'][best]['macro_map'])}"
    cards = [Card(number(metrics["macro_map"]), "macro mean average precision", beside)]
    if metrics["best_single_model"] is not None:
        best_single = f"best single model {number(metrics['best_single'])}, oracle {number(metrics['oracle'])}"
        cards.append(Card(number(metrics["picked_accuracy"]), "of the picked models solve it", best_single))
    cards.append(Card(number(metrics["ece"]), "expected calibration error", "0 is perfect"))
    return cards


def _order(metrics: Metrics) -> Section:
    rows = [
        [
            name,
            interval(figures["macro_map"], figures["macro_map_ci95"]),
            number(figures["macro_auroc"]),
            interval(figures["brier"], figures["brier_ci95"]),
            number(figures["ece"]),
        ]
        for name, figures in _judged(metrics).items()
    ]
    head = ["", "macro mAP [95 %]", "AUROC", "Brier [95 %]", "ECE"]
    blocks: list[Block] = [
        Text(
            "Macro mAP: how well each model's probability ranks the prompts it solves above those it does not, mean "
            "over models. Brier: mean squared error of the probabilities; lower is better."
        ),
        Table(head, rows, marked=frozenset({_ours(metrics)})),
    ]
    if metrics["differences"]:
        rivals = [
            [name, gain(gains["macro_map"]), gain(gains["brier"])] for name, gains in metrics["differences"].items()
        ]
        blocks.append(Table(["ours minus ...", "macro mAP [paired 95 %]", "Brier"], rivals))
    return Section("Which model solves it", blocks, in_terminal=True)


def _picks(metrics: Metrics) -> Section | None:
    if metrics["best_single_model"] is None:
        return None
    rows = [
        [name, interval(figures["picked_accuracy"], figures["picked_accuracy_ci95"])]
        for name, figures in _judged(metrics).items()
    ]
    rows += [
        [f"always {metrics['best_single_model']}, the best on these very prompts", number(metrics["best_single"])],
        ["a model at random", number(metrics["random"])],
        ["oracle: a model that solves it, wherever there is one", number(metrics["oracle"])],
    ]
    picked, best = metrics["picked_accuracy"], metrics["best_single"]
    more = None if picked is None or best is None else picked - best
    text = (
        f"On {counted(metrics['prompts_with_every_label'], 'prompt')} with a label of every model. Ours minus the best "
        f"single model: {signed_interval(more, metrics['gain_over_best_single_ci95'])}. With many models the oracle is "
        "inflated by chance."
    )
    table = Table(["", "solved [95 %]"], rows, marked=frozenset({_ours(metrics)}))
    return Section("What picking is worth", [Text(text), table], in_terminal=True)


def _costs(metrics: Metrics) -> Section | None:
    curve = metrics["cost_quality"]
    if curve is None:
        return None
    singles = curve["singles"]
    solved = [point["accuracy"] for point in curve["points"]] + [single["accuracy"] for single in singles.values()]
    costs = [point["cost"] for point in curve["points"]] + [single["cost"] for single in singles.values()]
    most = max(costs) * 1.05 or 1.0
    unit = f"{curve['unit']} a request"
    x = Axis(unit, 0.0, most, [float(f"{most * part:.2g}") for part in (0.0, 0.25, 0.5, 0.75)])
    ours = [
        PlotPoint(point["cost"], point["accuracy"], tooltip=f"{point['cost']:.4g}: {number(point['accuracy'])}")
        for point in sorted(curve["points"], key=lambda point: point["cost"])
    ]
    # Only as many as there are colours for; the table has all.
    shown = sorted(singles, key=lambda name: -singles[name]["accuracy"])[: COLOURS - 1]
    others = [
        [
            PlotPoint(
                single["cost"],
                single["accuracy"],
                tooltip=f"always {name}: {single['cost']:.4g}, {number(single['accuracy'])}",
            )
        ]
        for name, single in ((name, singles[name]) for name in shown)
    ]
    panel = Panel("Cost and quality", line_plot([ours, *others], x, share_axis("solved", solved)))
    text = (
        f"Area under mean cost and share solved {number(curve['area'])}; of single models mixed at random "
        f"{number(curve['area_of_singles'])}."
    )
    caption = "Mean cost against the share solved as cost is given more weight; the dots are single models."
    rows = [
        [
            f"at most {float(slack):.0%} below the best single model",
            f"{point['cost']:.4g}" if point is not None else "–",
            number(point["accuracy"] if point is not None else None),
        ]
        for slack, point in curve["at_slack"].items()
    ]
    rows += [
        [f"always {name}", f"{single['cost']:.4g}", number(single["accuracy"])] for name, single in singles.items()
    ]
    picture = Picture("cost", caption, [panel], [_ours(metrics), *shown])
    return Section("What quality costs", [Text(text), picture, Table(["", unit, "solved"], rows)], in_terminal=True)


def _reliability(metrics: Metrics) -> Section | None:
    bins = metrics["reliability"]
    if not bins:
        return None
    caption = (
        "Share solved against predicted probability, all models together; on the dashed line they agree. Bins with "
        f"fewer than {_DRAWN_FROM} labels are left out."
    )
    rows = [
        [
            f"{row['low']:.2f}–{row['high']:.2f}",
            number(row["confidence"]),
            number(row["accuracy"]),
            count(row["positions"]),
        ]
        for row in bins
    ]
    drawn = bin_plot({"all models": bins}, "predicted", "solved", _DRAWN_FROM)
    return Section(
        "Are the probabilities calibrated?",
        [
            Picture("reliability", caption, [Panel("Reliability", drawn)]),
            Folded("Reliability in numbers", [Table(["between", "predicted", "solved", "labels"], rows)]),
        ],
    )


def _by_model(metrics: Metrics) -> Section:
    figures = ("base_rate", "average_precision", "auroc", "brier", "ece")
    rows = [
        [
            name,
            count(of_model["labels"]),
            *(number(of_model[f]) for f in figures),
            number(metrics["picked_shares"].get(name)),
        ]
        for name, of_model in sorted(metrics["by_model"].items(), key=lambda item: -(item[1]["base_rate"] or 0.0))
    ]
    head = ["model", "labels", "solves", "average precision", "AUROC", "Brier", "ECE", "picked for"]
    return Section("By model", [Table(head, rows)], in_terminal=True)


def _by_task(metrics: Metrics) -> Section | None:
    tasks: Mapping[str, Any] = metrics["by_task"]
    if not tasks:
        return None
    figures = ("macro_map", "brier", "picked_accuracy", "best_single")
    rows = [
        [
            name,
            count(of_task["prompts"]),
            *(number(of_task[f]) for f in figures),
            str(of_task["best_single_model"] or "–"),
        ]
        for name, of_task in tasks.items()
    ]
    head = ["task", "prompts", "macro mAP", "Brier", "picked", "best single model there", "which"]
    return Section("By task", [Table(head, rows)])
