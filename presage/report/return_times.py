"""The report of a return-time predictor, from its `metrics.json`.

Keys that a cheaper run leaves out ("data", "traces", "config", "estimators") leave out their section.
"""

from __future__ import annotations

from presage.features.input_profiles import as_served
from presage.report.blocks import (
    Card,
    Document,
    Metrics,
    Section,
    Table,
    Text,
    count,
    gain,
    number,
    version_of,
)
from presage.report.lengths import bounds, by_type, estimators, order, profiles
from presage.report.next_agent import data, made


def document(metrics: Metrics) -> Document:
    """The report, most important sections first."""
    sections = [
        data(metrics),
        order(metrics),
        bounds(metrics),
        _end(metrics),
        profiles(metrics),
        by_type(metrics),
        estimators(metrics),
        made(metrics),
    ]
    title = f"Return times: {metrics['model'] or 'predictor of return times'}{version_of(metrics)}"
    return Document(title, _lead(metrics), sections, _cards(metrics))


def _best(metrics: Metrics) -> str | None:
    """The baseline with the smallest loss of the median; None where there is none."""
    losses = {
        name: figures["pinball"]["0.5"] for name, figures in metrics["baselines"].items() if "0.5" in figures["pinball"]
    }
    return min(losses, key=lambda name: losses[name]) if losses else None


def _lead(metrics: Metrics) -> str:
    text = (
        "The time from the end of a step to the next request of its workflow. Judged on "
        f"{count(metrics['workflows'])} workflows, {count(metrics['steps'])} steps, all held out."
    )
    for why, steps in metrics["left_out_steps"].items():
        if steps:
            text += f" {count(steps)} steps have no return time ({why})."
    best = _best(metrics)
    if best is not None:
        text += (
            f" Against {best}, the best baseline, the pinball loss of the median differs by "
            f"{gain(metrics['differences'][best]['pinball']['0.5'])} log seconds; below 0, ours is better."
        )
    return text


def _cards(metrics: Metrics) -> list[Card]:
    cards, best, metrics = [], _best(metrics), as_served(metrics)
    if best is not None:
        beside = f"log seconds; best baseline {best} {number(metrics['baselines'][best]['pinball']['0.5'])}"
        cards.append(Card(number(metrics["pinball"]["0.5"]), "pinball loss of the median, in an engine", beside))
    for q, share in metrics["coverage"].items():
        if float(q) in (0.1, 0.5, 0.9, 0.99):
            low, high = metrics["coverage_ci95"][q]
            cards.append(Card(number(share), f"within the {q} quantile", f"95 % {number(low)} to {number(high)}"))
    return cards


def _end(metrics: Metrics) -> Section | None:
    """Whether a workflow ended; nothing if none did."""
    end = metrics["end"]
    if end is None:
        return None
    text = (
        f"{count(end['ended'])} of {count(end['steps'])} steps ended their workflow. Brier score and log loss of the "
        "probability of END, beside the share of steps that ended a workflow as a constant forecast; lower is better."
    )
    rows = [
        ["ours", number(end["brier"], 4), number(end["nll"], 4)],
        ["base rate", number(end["brier_base_rate"], 4), number(end["nll_base_rate"], 4)],
    ]
    table = Table(["", "Brier score", "log loss"], rows, marked=frozenset({"ours"}))
    return Section("Does it come back at all?", [Text(text), table], in_terminal=True)
