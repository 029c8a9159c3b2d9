"""The report of `presage study learning-curve`, from its `metrics.json`."""

from __future__ import annotations

import dataclasses
from typing import Final

from presage.report import curves, next_agent
from presage.report.blocks import Document, Metrics, judged_on, signed_interval
from presage.report.traces import call_graphs

_NEGLIGIBLE: Final = 0.01
"""A rise of the accuracy by less is not worth collecting twice the traces."""


def document(metrics: Metrics) -> Document:
    """The report of a learning curve."""
    answer = dataclasses.replace(curves.learning_curve(metrics), in_terminal=True)
    lead = f"{_last_doubling(metrics['learning_curve'])} Every model was judged on the same {judged_on(metrics)}."
    sections = [answer, next_agent.data(metrics), call_graphs(metrics["traces"])]
    return Document("Study: Would more traces help?", lead, sections)


def _last_doubling(curve: Metrics) -> str:
    """Whether more traces would help: the gain one step ahead at the right end of the curve."""
    last = curve["last_doubling"]
    if last is None:
        return "Not known: there is one training set only, and a curve needs two sizes."
    found = {moment: (of["difference"][0], of["ci95"][0]) for moment, of in last["moments"].items()}
    known = [ends for difference, ends in found.values() if difference is not None]
    if any(low > 0 for low, _ in known):
        answer = "Yes, more traces would help: the accuracy still rises"
    elif all(high < _NEGLIGIBLE for _, high in known):
        answer = "No, more traces would hardly help: the accuracy no longer rises"
    else:
        answer = "Not clear: a rise of the accuracy is within the 95 % interval"
    gains = "; ".join(f"{signed_interval(*of)} at {moment}" for moment, of in found.items())
    return f"{answer}. From {last['from']:g} to {last['to']:g} training workflows, one step ahead: {gains}."
