"""The reports of `presage study`, from their `metrics.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from presage.report import curves, next_agent
from presage.report.blocks import (
    Block,
    Document,
    Metrics,
    Section,
    Table,
    Text,
    ahead,
    judged_on,
    number,
    signed_interval,
)
from presage.report.traces import call_graphs

_MEDIAN: Final = 0.5
_NEGLIGIBLE: Final = 0.01
"""A rise of the accuracy by less is not worth collecting twice the traces."""


def document(metrics: Metrics) -> Document:
    """The report of a study."""
    return _of_change(metrics) if metrics["study"] == "change" else _of_learning_curve(metrics)


def _of_change(metrics: Metrics) -> Document:
    changes, added = metrics["changes"], metrics["never_seen"]
    sections: list[Section | None] = [
        Section(
            "After a change",
            [
                Text(
                    "One model, judged on the test workflows as they are and after each change. A forecast is right by "
                    "role: of an agent with another name it is its old name that counts. In brackets the difference "
                    "to the unchanged workflows, paired, with its 95 % interval. Known: steps whose agent is known "
                    "by name."
                ),
                *(Text(f"{name}: {change['what']}.") for name, change in changes.items() if change["what"]),
                *_tables(changes),
            ],
            in_terminal=True,
        )
    ]
    if added is not None:
        agent = next(iter(added.values()))["what"]
        sections.append(
            Section(
                f"An agent that no training workflow has: {agent}",
                [
                    Text(
                        f"Trained without the workflows that have it, and with them; judged on the test workflows with "
                        f"{agent}. The model that never saw it cannot forecast it, so these steps count as wrong."
                    ),
                    *_tables(added),
                ],
                in_terminal=True,
            )
        )
    judged = {kind: by_change for kind, by_change in metrics["quantiles"].items() if by_change is not None}
    if judged:
        sections.append(
            Section(
                "Remaining lengths and return times after a change",
                [
                    Text(
                        "Pinball: the mean loss of a quantile, the smaller the better; change: its difference to the "
                        "unchanged workflows, paired, with its 95 % interval. Within: share of the steps that the "
                        "quantile covers, which should be the quantile. constant: one quantile for all steps."
                    ),
                    *(_quantile_table(kind, by_change) for kind, by_change in judged.items()),
                ],
                in_terminal=True,
            )
        )
    name, change = min(list(changes.items())[1:], key=lambda named_change: _first(named_change[1])[0])
    difference, ends = _first(change)
    lead = (
        f"The worst change is '{name}': one step ahead, after the output, the accuracy changes by "
        f"{signed_interval(difference, ends)}. All were judged on the same {judged_on(metrics)}."
    )
    sections += [next_agent.data(metrics), call_graphs(metrics["traces"])]
    return Document("Study: What is left after a change?", lead, sections)


def _quantile_table(kind: str, changes: Mapping[str, Any]) -> Table:
    """Loss and coverage of the median and the next quantile."""
    levels = [level for level in next(iter(changes.values()))["difference"]["pinball"] if float(level) >= _MEDIAN][:2]
    heads = [
        kind,
        "model",
        *(f"pinball {level}" for level in levels),
        "change",
        *(f"within {level}" for level in levels),
    ]
    rows = []
    for name, change in changes.items():
        gained = change["difference"]["pinball"][levels[0]]
        lost = signed_interval(gained["difference"], gained["ci95"]) if gained["difference"] else ""
        for model, figures in change["models"].items():
            losses, shares = ([number(figures[key][level]) for level in levels] for key in ("pinball", "coverage"))
            rows.append([name, model, *losses, lost, *shares])
            lost = ""  # of the other model nothing changes
    return Table(heads, rows, frozenset({0, 1}))


def _first(change: Mapping[str, Any]) -> tuple[float, Sequence[float]]:
    """The difference of ours one step ahead after the output, and its interval."""
    last_gain = next(iter(change["differences"].values()))["completion"]
    return last_gain["difference"][0], last_gain["ci95"][0]


def _tables(changes: Mapping[str, Any]) -> list[Block]:
    """Accuracy and calibration at each moment."""
    blocks: list[Block] = []
    models = next(iter(changes.values()))["models"]
    for moment, figures in next(iter(models.values())).items():
        steps = ahead(len(figures["accuracy"]))
        rows = []
        for name, change in changes.items():
            for model, by_moment in change["models"].items():
                gained, now = change["differences"][model][moment], by_moment[moment]
                lost = signed_interval(gained["difference"][0], gained["ci95"][0]) if any(gained["difference"]) else ""
                rows.append([name, model, *map(number, now["accuracy"]), lost, number(now["ece"][0])])
        blocks.append(Text(f"Accuracy at {moment}, and ECE of the next step:"))
        blocks.append(Table(["change", "model", *steps, f"change, {steps[0]}", "ECE"], rows, frozenset({0, 1})))
    return blocks


def _of_learning_curve(metrics: Metrics) -> Document:
    answer = dataclasses.replace(curves.learning_curve(metrics), in_terminal=True)
    lead = f"{_last_doubling(metrics['learning_curve'])} Every model was judged on the same {judged_on(metrics)}."
    sections = [answer, next_agent.data(metrics), call_graphs(metrics["traces"])]
    return Document("Study: Would more traces help?", lead, sections)


def _last_doubling(curve: Metrics) -> str:
    """Whether more traces would help: the gain one step ahead at the right end of the curve."""
    last = curve["last_doubling"]
    if last is None:
        return "Not known: there is one training set only, and a curve needs two sizes."
    gains_at = {moment: (gain["difference"][0], gain["ci95"][0]) for moment, gain in last["moments"].items()}
    known_ends = [ends for difference, ends in gains_at.values() if difference is not None]
    if any(low > 0 for low, _ in known_ends):
        answer = "Yes, more traces would help: the accuracy still rises"
    elif all(high < _NEGLIGIBLE for _, high in known_ends):
        answer = "No, more traces would hardly help: the accuracy no longer rises"
    else:
        answer = "Not clear: a rise of the accuracy is within the 95 % interval"
    gains = "; ".join(f"{signed_interval(*gain)} at {moment}" for moment, gain in gains_at.items())
    return f"{answer}. From {last['from']:g} to {last['to']:g} training workflows, one step ahead: {gains}."
