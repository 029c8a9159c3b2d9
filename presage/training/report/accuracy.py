"""The heart of the report: how often the forecast is right, beside every baseline, and where it does not lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from presage.training.report.blocks import Block, Card, Folded, Row, Section, Table, Text
from presage.training.report.numbers import Metrics, ahead, count, interval, number, signed, signed_interval


@dataclass(frozen=True)
class Against:
    """Ours beside the best baseline at one moment, one number of steps ahead."""

    moment: str
    k: int
    best: str
    ours: float
    theirs: float
    difference: float
    ci95: Sequence[float]

    @property
    def leads(self) -> bool:
        """Ahead, whether or not the interval shows it."""
        return self.difference > 0

    @property
    def verdict(self) -> str:
        """In words; shown is what the interval leaves no doubt of."""
        low, high = self.ci95
        if self.difference == 0:
            return "level"
        if self.difference > 0:
            return "leads" if low > 0 else "ahead, not shown: the interval holds 0"
        return "BEHIND" if high < 0 else "BEHIND, not shown: the interval holds 0"


def ours(metrics: Metrics) -> str:
    """What the report calls the predictor it judges."""
    return f"{metrics['model'] or 'next-agent predictor'} (ours)"


def against_best(
    moments: Mapping[str, Any], baselines: Mapping[str, Any], differences: Mapping[str, Any]
) -> list[Against]:
    """At each moment and horizon the baseline that is most often right; none where there are no baselines.

    Args:
        moments: {moment: figures} of ours.
        baselines: {name: {moment: figures}}.
        differences: {name: {moment: {"difference", "ci95"}}}.
    """
    found = []
    for moment, figures in moments.items():
        for k, accuracy in enumerate(figures["accuracy"]):
            rivals = {name: of[moment]["accuracy"][k] for name, of in baselines.items()}
            if accuracy is None or not rivals:
                continue
            best = max(rivals, key=lambda name: rivals[name])
            gain = differences[best][moment]
            found.append(Against(moment, k, best, accuracy, rivals[best], gain["difference"][k], gain["ci95"][k]))
    return found


def lead(metrics: Metrics) -> str:
    """The report in two sentences."""
    cells = against_best(metrics["moments"], metrics["baselines"], metrics["differences"])
    judged = f"Judged on {count(metrics['workflows'])} workflows, {count(metrics['steps'])} steps, kept apart for that."
    bare = [moment for moment, figures in metrics["moments"].items() if not figures["states"]]
    if bare:
        judged += f" Without states at {' and '.join(bare)}: ids and sizes alone."
    if not cells:
        return f"{judged} It was compared with no baseline."
    not_ahead = [cell for cell in cells if not cell.leads]
    shown = sum(cell.verdict == "leads" for cell in cells)
    said = f"{judged} Of {len(cells)} comparisons with the best baseline it is ahead in {len(cells) - len(not_ahead)}"
    said += f"; in {shown} the 95 % interval of the paired difference lies above 0."
    if not_ahead:
        said += " It does not lead " + "; ".join(
            f"at {cell.moment}, {ahead(cell.k + 1)[-1]} ahead: {signed_interval(cell.difference, cell.ci95)} "
            f"to {cell.best}"
            for cell in not_ahead
        )
        said += "."
    return said


def cards(metrics: Metrics) -> list[Card]:
    """Accuracy of the next step at each moment, beside the best baseline."""
    best = {
        cell.moment: cell
        for cell in against_best(metrics["moments"], metrics["baselines"], metrics["differences"])
        if cell.k == 0
    }
    found = []
    for moment, figures in metrics["moments"].items():
        low, high = figures["ci95"][0]
        beside = f"95 % interval {number(low)} to {number(high)}"
        if moment in best:
            cell = best[moment]
            beside += f"; best baseline {cell.best} {number(cell.theirs)}, difference {signed(cell.difference)}"
        label = f"of next steps named right at {moment}"
        found.append(Card(number(figures["accuracy"][0]), label, beside))
    return found


def accuracies(metrics: Metrics) -> Section:
    """Every model at every horizon and moment, with intervals."""
    judged = {ours(metrics): metrics["moments"], **metrics["baselines"]}
    blocks: list[Block] = [
        Text(
            "Share of positions whose likeliest outcome came true, with its 95 % interval (bootstrap over workflows). "
            "A position is a step with something to know so far ahead; END, the end of the workflow, is an outcome."
        )
    ]
    blocks += [_table(judged, ours(metrics), moment) for moment in metrics["moments"]]
    cells = against_best(metrics["moments"], metrics["baselines"], metrics["differences"])
    if cells:
        blocks.append(against_table(cells))
    blocks.append(_further(metrics, judged))
    if unseen := _unseen(metrics):
        blocks.append(Text(unseen))
    return Section("Accuracy by steps ahead", blocks)


def against_table(cells: Sequence[Against]) -> Table:
    """Ours beside the best baseline, a row a moment and number of steps ahead."""
    rows = [
        Row(
            [
                f"{cell.moment}, {ahead(cell.k + 1)[-1]}",
                cell.best,
                number(cell.ours),
                number(cell.theirs),
                signed_interval(cell.difference, cell.ci95),
                cell.verdict,
            ]
        )
        for cell in cells
    ]
    head = ["against the best baseline", "which", "ours", "its", "difference [95 %, paired]", ""]
    return Table(head, rows, frozenset({0, 1, 5}))


def by_type(metrics: Metrics) -> Section:
    """The same within each workflow type."""
    types = metrics["by_workflow_type"]
    title = "By workflow type"
    if len(types) == 1:
        return Section(
            title, [Text(f"There is one workflow type, {next(iter(types))}: the figures above are its own.")]
        )
    blocks: list[Block] = []
    for moment in metrics["moments"]:
        rows = []
        for name, of in sorted(types.items()):
            rivals = metrics["rivals"].get(name, {})
            figures, best = of[moment], _best(rivals, moment)
            rows.append(
                Row(
                    [
                        name,
                        count(figures["workflows"]),
                        *_cells(figures),
                        number(figures["ece"][0]),
                        best,
                        _gain(rivals, best, moment),
                    ]
                )
            )
        steps = ahead(len(next(iter(types.values()))[moment]["accuracy"]))
        head = [f"at {moment}", "workflows", *steps, "ECE, 1 step", "best, 1 step", "difference"]
        blocks.append(Table(head, rows, frozenset({0, len(head) - 2})))
    behind = []
    for name, rivals in sorted(metrics["rivals"].items()):
        cells = _within(types[name], rivals)
        behind += [f"{name} at {moment} ({', '.join(steps)})" for moment, steps in _not_ahead(cells).items()]
        judged = {ours(metrics): types[name], **rivals}
        tables = [_table(judged, ours(metrics), moment) for moment in metrics["moments"]]
        if cells:
            tables.append(against_table(cells))
        blocks.append(Folded(f"Every baseline on {name}", tables))
    if behind:
        blocks.insert(
            0, Text(f"Within a workflow type it does not lead the best baseline of that type: {'; '.join(behind)}.")
        )
    return Section(title, blocks)


def ablation(metrics: Metrics) -> Section | None:
    """What each part of the predictor adds; nothing where that was not asked."""
    if "ablation" not in metrics:
        return None
    tables = []
    for moment, figures in metrics["moments"].items():
        rows = [Row(["everything", *_cells(figures)], marked=True)]
        for part, of in metrics["ablation"].items():
            gain = of["differences"][moment]
            cells = zip(gain["difference"], gain["ci95"], strict=True)
            rows.append(Row([f"what {part} adds", *(signed_interval(value, ends) for value, ends in cells)]))
        tables.append(Table([f"at {moment}", *ahead(len(figures["accuracy"]))], rows))
    said = (
        "The same predictor, trained and judged once more without one part: accuracy with it minus accuracy without, "
        f"paired, with the 95 % interval. Its states: {metrics['data']['states']}. Where what they add lies above 0 "
        "throughout, recording them is worth it."
    )
    return Section("What each part adds", [Text(said), *tables])


def _table(judged: Mapping[str, Any], mine: str, moment: str) -> Table:
    rows = [Row([name, *_cells(of[moment])], name == mine) for name, of in judged.items()]
    return Table([f"at {moment}", *ahead(max(len(row.cells) for row in rows) - 1)], rows)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    return [interval(a, ends) for a, ends in zip(figures["accuracy"], figures["ci95"], strict=True)]


def _within(moments: Mapping[str, Any], rivals: Mapping[str, Any]) -> list[Against]:
    """Ours beside the best baseline within one workflow type."""
    gains = {
        name: {m: {"difference": of["difference"], "ci95": of["difference_ci95"]} for m, of in by_moment.items()}
        for name, by_moment in rivals.items()
    }
    return against_best(moments, rivals, gains)


def _not_ahead(cells: Sequence[Against]) -> dict[str, list[str]]:
    """At each moment the numbers of steps ahead at which ours does not lead."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.leads:
            found.setdefault(cell.moment, []).append(str(cell.k + 1))
    return found


def _best(rivals: Mapping[str, Any], moment: str) -> str:
    return max(rivals, key=lambda name: rivals[name][moment]["accuracy"][0] or 0.0) if rivals else "–"


def _gain(rivals: Mapping[str, Any], best: str, moment: str) -> str:
    if not rivals:
        return "–"
    of = rivals[best][moment]
    return signed_interval(of["difference"][0], of["difference_ci95"][0])


def _further(metrics: Metrics, judged: Mapping[str, Any]) -> Folded:
    keys = {"mean over workflows": "accuracy_by_workflow", "top 2": "top2", "NLL": "nll", "ECE": "ece"}
    tables = []
    for moment in metrics["moments"]:
        rows = [
            Row([name, *(" / ".join(map(number, of[moment][key])) for key in keys.values())], name == ours(metrics))
            for name, of in judged.items()
        ]
        tables.append(Table([f"at {moment}, 1 / 2 / … steps ahead", *keys], rows))
    said = (
        "Accuracy as a mean over workflows; an outcome among the two likeliest (top 2); negative log-likelihood (NLL), "
        "nats a position; expected calibration error (ECE)."
    )
    return Folded("Further figures", [Text(said), *tables])


def _unseen(metrics: Metrics) -> str:
    shares = metrics["moments"]["prefill"]["unseen"]
    if not any(shares):
        return ""
    return (
        f"Outcomes that are agents training never saw: {' / '.join(map(number, shares))} of the positions. They are "
        "wrong in every accuracy above and left out of the NLL."
    )
