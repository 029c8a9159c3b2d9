"""The report of a next-agent predictor, from its `metrics.json`.

Keys that a cheaper run leaves out ("traces", "learning_curve", "ablation", "data") leave out their section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.training.report import accuracy, curves, errors, losses
from presage.training.report.blocks import Block, Document, Facts, Folded, Section
from presage.training.report.numbers import Metrics
from presage.training.report.traces import call_graphs, types_table


def document(metrics: Metrics) -> Document:
    """What the report tells, most important first."""
    version = f", version {metrics['version']}" if metrics["version"] is not None else ""
    sections = [
        data(metrics),
        accuracy.accuracies(metrics),
        losses.profiles(metrics),
        accuracy.ablation(metrics),
        accuracy.by_type(metrics),
        curves.learning_curve(metrics),
        curves.reliability(metrics),
        call_graphs(metrics["traces"]) if "traces" in metrics else None,
        errors.errors(metrics),
        made(metrics),
    ]
    return Document(
        f"Next agent: {metrics['model'] or 'next-agent predictor'}{version}",
        accuracy.lead(metrics),
        [section for section in sections if section is not None],
        accuracy.cards(metrics),
    )


def data(metrics: Metrics) -> Section | None:
    """Which traces, which split."""
    blocks: list[Block] = []
    if "data" in metrics:
        blocks.append(Facts({label: str(value) for label, value in metrics["data"].items() if "digest" not in label}))
    if "traces" in metrics:
        blocks.append(types_table(metrics["traces"]))
    return Section("What it learnt from", blocks) if blocks else None


def made(metrics: Metrics) -> Section | None:
    """How, for who wants to do it again."""
    if "config" not in metrics:
        return None
    facts = {
        "fitted in, s": f"{metrics['fit_seconds']:.2f}",
        "one forecast, µs": f"{metrics['latency_us']:.1f}",
        "size, bytes": f"{metrics['size_bytes']:,}" if metrics["size_bytes"] is not None else "not kept",
        **{label: str(value) for label, value in metrics["data"].items() if "digest" in label},
        **{f"version of {library}": version for library, version in metrics["versions"].items()},
        **dict(_flat(metrics["config"])),
    }
    return Section("How it was made", [Folded("Time, size, digests, versions and settings", [Facts(facts)])])


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    flat = []
    for key, value in config.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return flat
