"""The reports of the studies, from their `metrics.json`."""

from __future__ import annotations

import dataclasses
from typing import Final

from presage.report import curves, next_agent
from presage.report.blocks import (
    Block,
    Document,
    Metrics,
    Section,
    Table,
    Text,
    accuracy_cells,
    ahead,
    count,
    gain,
    judged_on,
    number,
    signed_interval,
)
from presage.report.traces import call_graphs

TITLES: Final = {
    "learning-curve": "Would more traces help?",
    "states": "What are states worth?",
    "horizon": "How far ahead is a forecast worth acting on?",
}

_NEGLIGIBLE: Final = 0.01
"""A rise of the accuracy by less is not worth collecting twice the traces."""

_SOURCES: Final = {"captured": "hidden states", "text": "texts", "none": "neither"}


def document(metrics: Metrics) -> Document:
    """The report of one study."""
    study = metrics["study"]
    makers = {"learning-curve": curves.learning_curve, "states": _states, "horizon": _horizon}
    answer = dataclasses.replace(makers[study](metrics), in_terminal=True)
    lead = f"Every model was judged on the same {judged_on(metrics)}."
    if study == "learning-curve":
        lead = f"{_last_doubling(metrics['learning_curve'])} {lead}"
    sections = [answer, next_agent.data(metrics), call_graphs(metrics["traces"])]
    return Document(f"Study: {TITLES[study]}", lead, sections)


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


def _states(metrics: Metrics) -> Section:
    sources = metrics["sources"]
    judged = {_SOURCES[name]: of["moments"] for name, of in sources.items()}
    blocks: list[Block] = [
        Text(
            "The same predictor trained with hidden states, with a sketch of the texts instead, and with neither; at "
            "prefill it knows a step's input, at completion its output as well."
        ),
        curves.by_steps_ahead(judged, "states"),
    ]
    if metrics["absent"]:
        blocks.append(Text(f"The traces have no {' and no '.join(_SOURCES[name] for name in metrics['absent'])}."))
    rows = []
    for name, of in sources.items():
        for moment, figures in of["moments"].items():
            against_none = of.get("against_none", {}).get(moment)
            against_prefill = of["completion_against_prefill"] if moment == "completion" else None
            for k, accuracy in enumerate(accuracy_cells(figures)):
                gains = [gain(by, k) if by else "–" for by in (against_none, against_prefill)]
                rows.append([_SOURCES[name], f"{moment}, {ahead(k + 1)[-1]}", accuracy, *gains])
    head = ["states", "moment, ahead", "accuracy [95 %]", "more than neither [paired]", "more than at prefill [paired]"]
    blocks.append(Table(head, rows, frozenset({0, 1})))
    return Section("Accuracy by source of states", blocks)


def _horizon(metrics: Metrics) -> Section:
    judged = {next_agent.ours(metrics): metrics["moments"], **metrics["baselines"]}
    blocks: list[Block] = [
        Text(
            "One predictor, trained for all the steps at once. A cache that looks further ahead acts on the right end "
            "of the curve: where it comes down to the baselines, looking further adds nothing to counting."
        ),
        curves.by_steps_ahead(judged, "horizon"),
    ]
    for moment, figures in metrics["moments"].items():
        table = next_agent.moment_table(judged, moment)
        further = [["positions", *map(count, figures["positions"])], ["NLL of ours", *map(number, figures["nll"])]]
        blocks.append(dataclasses.replace(table, rows=[*table.rows, *further]))
    cells = next_agent.against_best(metrics)
    if cells:
        blocks.append(next_agent.against_table(cells))
    return Section("Accuracy at each step ahead", blocks)
