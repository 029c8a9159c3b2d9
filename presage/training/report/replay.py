"""The report of a replay, from its `metrics.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from presage.training.report.blocks import Document, Facts, Metrics, Section, Table, Text

_FIGURES: Final = {
    "hit rate": ("hit_rate", 3),
    "completion, s": ("completion_mean_s", 1),
    "completion p95, s": ("completion_p95_s", 1),
    "first token, s": ("ttft_mean_s", 2),
    "queueing, s": ("queueing_mean_s", 2),
    "longest wait, s": ("longest_wait_s", 1),
    "makespan, s": ("makespan_s", 0),
    "output tokens a second": ("throughput_tokens_per_s", 0),
    "preemptions": ("preemptions", 0),
    "recomputed tokens": ("recomputed_tokens", 0),
}

_TIERS: Final = {
    "gpu": ("hit_tokens_gpu", 0),
    "host": ("hit_tokens_host", 0),
    "loaded, prefetched or again included": ("loaded_tokens", 0),
}


def document(metrics: Metrics) -> Document:
    """The report of one replay."""
    policies = metrics["policies"]
    sections = [Section("Policies side by side", [Table(["", *policies], _rows(policies, _FIGURES))])]
    shares = [(name, of["share_of_oracle"]) for name, of in policies.items() if of.get("share_of_oracle")]
    if shares:
        rows = [
            [head, *("–" if of[figure] is None else f"{of[figure]:.0%}" for _, of in shares)]
            for head, (figure, _) in _FIGURES.items()
        ]
        text = Text("A dash: what the oracle gains is within the noise of the seeds, so no share of it means anything.")
        table = Table(["", *(name for name, _ in shares)], rows)
        sections.append(Section("Share of what the oracle gains over stock", [text, table]))
    if policies and all("loaded_tokens" in of for of in policies.values()):
        sections.append(Section("Hit tokens by tier", [Table(["", *policies], _rows(policies, _TIERS))]))
    sections.append(Section("First token by agent, s", [Table(["", *policies], _by_agent(policies))]))
    sections.append(Section("What was replayed", [Facts(_facts(metrics))]))
    lead = (
        f"{metrics['workload']['workflows']} workflows through vLLM's own scheduler in virtual time. Decisions are "
        f"real, seconds come from a cost model ({metrics['engine']['cost']['source']}). Mean over {metrics['seeds']} "
        "seeds, with 95 % intervals."
    )
    if metrics["interrupted"]:
        lead += " Interrupted: only the runs that were done are counted."
    return Document("What would the policies have done?", lead, sections)


def _rows(policies: Mapping[str, Any], figures: Mapping[str, tuple[str, int]]) -> list[list[str]]:
    return [
        [head, *(_figure(of[name], digits) for of in policies.values())] for head, (name, digits) in figures.items()
    ]


def _by_agent(policies: Mapping[str, Any]) -> list[list[str]]:
    prefix = "ttft_mean_s of "
    names = sorted({name for of in policies.values() for name in of if name.startswith(prefix)})
    return [
        [name.removeprefix(prefix), *(_figure(of[name], 2) if name in of else "–" for of in policies.values())]
        for name in names
    ]


def _figure(of: Mapping[str, Any], digits: int) -> str:
    mean, limits = f"{of['mean']:.{digits}f}", of["ci95"]
    return mean if limits is None else f"{mean} [{limits[0]:.{digits}f}, {limits[1]:.{digits}f}]"


def _facts(metrics: Metrics) -> dict[str, str]:
    held = {name: str(value) for name, value in metrics["workload"].items() if value not in (None, False)}
    engine = {name: str(value) for name, value in metrics["engine"].items() if name != "cost"}
    cost = {name: str(value) for name, value in metrics["engine"]["cost"].items() if value is not None}
    everything = held | engine | cost | {"forecasts": metrics["forecasts"] or "none"}
    if metrics.get("replayed"):
        everything["learnt from"] = metrics["replayed"]
    for name, of in metrics["policies"].items():
        if "at_once" in of:
            everything[f"{name}: workflows at once"] = str(of["at_once"])
    return {name.replace("_", " "): value for name, value in everything.items()}
