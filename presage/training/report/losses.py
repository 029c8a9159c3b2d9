"""What every report opens with: where a baseline beats the predictor, and what it is worth under each input profile."""

from __future__ import annotations

import dataclasses

from presage.training.report.blocks import Document, Row, Section, Table, Text
from presage.training.report.numbers import Metrics, interval, number

_UNITS = {"remaining-length": " (pinball in tokens)"}


def opened(made: Document, metrics: Metrics) -> Document:
    """A report that opens with the comparisons lost, if there are any.

    Args:
        made: the report.
        metrics: it was made from.
    """
    lost = metrics.get("behind")
    if not lost:
        return made
    rows = [
        Row([one["baseline"], one["at"], f"{one['by']:.4g}", f"{one['ci95'][0]:.4g} to {one['ci95'][1]:.4g}"])
        for one in lost
    ]
    said = (
        "Each row is a baseline that beats this predictor: the paired 95 % interval of the difference, by bootstrap, "
        f"lies above 0{_UNITS.get(metrics['kind'], '')}. Use the baseline there, or mend the predictor first."
    )
    table = Table(["baseline", "where", "better by", "95 %"], rows, frozenset({0, 1}))
    names = ", ".join(dict.fromkeys(one["baseline"] for one in lost))
    lead = f"LOST: in {len(lost)} comparisons a baseline ({names}) is better beyond the 95 % interval. {made.lead}"
    section = Section("Where a baseline is better", [Text(said), table])
    return dataclasses.replace(made, lead=lead, sections=[section, *made.sections])


def profiles(metrics: Metrics) -> Section | None:
    """Accuracy and calibration of a next-agent predictor under each input profile; nothing for older metrics."""
    if not metrics.get("profiles"):
        return None
    rows = []
    for name, of in metrics["profiles"].items():
        for moment, figures in of["moments"].items():
            cells = [interval(a, ends) for a, ends in zip(figures["accuracy"], figures["ci95"], strict=True)]
            lost = str(len(of["behind"])) if of["behind"] is not None else "–"
            rows.append(Row([name, moment, *cells, " / ".join(map(number, figures["ece"])), lost], name == "engine"))
    steps = [f"{k + 1} ahead" for k in range(len(rows[0].cells) - 4)]
    said = (
        "The same artefact asked with less. ids: workflow type, agents and order; ids+tokens: and token counts; +text: "
        "and texts, as a gateway supplies them; +states: and hidden states, everything; engine: token counts and "
        "hidden states, what vLLM's scheduler supplies. LOST counts the comparisons with baselines, asked under the "
        "same profile, that a baseline won."
    )
    head = ["inputs", "moment", *steps, "ECE", "LOST"]
    return Section("What serving can see", [Text(said), Table(head, rows, frozenset({0, 1}))])
