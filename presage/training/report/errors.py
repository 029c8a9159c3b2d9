"""Where the forecast errs most, by the names of agents alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.training.report.blocks import Block, Folded, Row, Section, Table, Text
from presage.training.report.numbers import Metrics, count, number

NEVER_SEEN = "(an agent training never saw)"


def errors(metrics: Metrics) -> Section:
    """Confusions one step ahead at each moment, and the agents after which they happen."""
    blocks: list[Block] = [
        Text(
            "One step ahead: what was forecast, what came instead, how often, how sure the forecast was on the mean, "
            "and after which agents it happened most. A step at which a trace was cut is no error."
        )
    ]
    for moment, found in metrics["confusions"].items():
        blocks.append(Text(f"At {moment}: {count(found['errors'])} errors in {count(found['positions'])} positions."))
        if not found["pairs"]:
            continue
        rows = [
            Row(
                [
                    _name(pair["forecast"]),
                    _name(pair["came"]),
                    count(pair["positions"]),
                    number(pair["confidence"]),
                    "; ".join(map(_example, pair["examples"])),
                ]
            )
            for pair in found["pairs"]
        ]
        head = ["forecast", "came", "how often", "how sure", f"at {moment}, most often after"]
        blocks.append(Table(head, rows, frozenset({0, 1, 4})))
        rows = [Row([_name(of["agent"]), count(of["errors"]), count(of["positions"])]) for of in found["by_agent"]]
        by_agent = Table(["after", "errors", "of positions"], rows)
        blocks.append(Folded(f"After which agents it errs most, at {moment}", [by_agent]))
    return Section("Where it errs most", blocks)


def _example(example: Mapping[str, Any]) -> str:
    prefix = " → ".join(map(_name, example["prefix"]))
    return f"{'… → ' if example['earlier'] else ''}{prefix} ({count(example['positions'])}×)"


def _name(name: str | None) -> str:
    return NEVER_SEEN if name is None else name
