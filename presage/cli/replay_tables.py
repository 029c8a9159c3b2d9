"""The tables of `presage replay`: figures, shares of the oracle's gain, queueing, tiers, and evicted blocks.

Each function but the first returns the arguments of `output.table`, or None if there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from presage.cli.output import table

Table = tuple[str, Sequence[str], list[list[str]]]

_CLASSES = ("blank", "retired", "active")

_SHOWN: Final = {
    "hit rate": ("hit_rate", 3),
    "completion s": ("completion_mean_s", 1),
    "its p95": ("completion_p95_s", 1),
    "first token s": ("ttft_mean_s", 2),
    "queueing s": ("queueing_mean_s", 2),
    "worst": ("longest_wait_s", 1),
    "makespan s": ("makespan_s", 0),
    "output tokens/s": ("throughput_tokens_per_s", 0),
    "preempted": ("preemptions", 0),
    "recomputed tokens": ("recomputed_tokens", 0),
}


def replay_tables(found: Mapping[str, Any]) -> list[Any]:
    """The result of a replay as lines and tables."""
    held, engine = found["workload"], found["engine"]
    host = f" and {engine['host_cache_tokens']} in the host" if engine["host_cache_tokens"] else ""
    lines: list[Any] = [
        f"{held['workflows']} workflows, {held['requests']} requests, {_came(held)}; {held['prompts']} prompts; "
        f"a cache of {engine['cache_tokens']} tokens{host}; costs: {engine['cost']['source']}"
    ]
    if held["left_out"]:
        lines.append(f"{held['left_out']} workflows left out: sizes of their requests were not recorded")
    rows = [
        [name, *(_figure(of[shown], digits) for shown, digits in _SHOWN.values())]
        for name, of in found["policies"].items()
    ]
    title = f"\nMean over {found['seeds']} seeds, ± half of its 95 % interval"
    lines.append(table(title, ["policy", *_SHOWN], rows))
    policies = found["policies"]
    for more in (_shares(policies), _queueing(policies), _tiers(policies), _evictions(policies)):
        if more is not None:
            lines.append(table(*more))
    for name, of in found["policies"].items():
        if "at_once" in of:
            lines.append(f"{name}: {of['at_once']} workflows at once")
        if "switched_off" in of:
            lines.append(f"{name}: {', '.join(of['switched_off'])} failed and switched itself off")
    return lines


def _came(held: Mapping[str, Any]) -> str:
    if held["as_recorded"]:
        return "as recorded"
    if held["concurrency"] is not None:
        return f"{held['concurrency']} at once"
    return f"{held['rate']:g} a second with cv {held['cv']:g}"


def _figure(of: Mapping[str, Any], digits: int) -> str:
    """A mean, and half of its interval where there is one."""
    mean = f"{of['mean']:.{digits}f}"
    if of["ci95"] is None:
        return mean
    return f"{mean} ± {(of['ci95'][1] - of['ci95'][0]) / 2:.{digits}f}"


def _shares(policies: Mapping[str, Any]) -> Table | None:
    """Each policy's share of the oracle's gain over stock."""
    from presage.serving_hooks.replay.policies import ends

    rows = [
        [name, *(_share(of, named) for named, _ in _SHOWN.values())]
        for name, of in policies.items()
        if "share_of_oracle" in of and name != ends(name)[1]
    ]
    crossed = any("+" in name for name in policies)
    over = "stjf-oracle gains over fcfs, with the same policy" if crossed else "the oracle gains over stock"
    return (f"\nShare of what {over}", ["policy", *_SHOWN], rows) if rows else None


def _share(of: Mapping[str, Any], named: str) -> str:
    """The share for one figure; a dash if the oracle's own gain is not significant."""
    found = of["share_of_oracle"][named]
    return "–" if found is None else f"{found:.0%}"


def _queueing(policies: Mapping[str, Any]) -> Table | None:
    """Queueing time of each scheduler: mean, share of the oracle's saving, and the longest wait relative to FCFS."""
    from presage.serving_hooks.replay.policies import FIRST_COME, ends

    rows = []
    for name, of in policies.items():
        first, best = ends(name)
        if not first.endswith(f"+{FIRST_COME}") or first not in policies:
            continue
        worst = of["longest_wait_s"]["mean"] / max(policies[first]["longest_wait_s"]["mean"], 1e-9)
        rows.append(
            [
                name,
                _figure(of["queueing_mean_s"], 2),
                "100%" if name == best else _share(of, "queueing_mean_s") if "share_of_oracle" in of else "–",
                _figure(of["longest_wait_s"], 1),
                f"{worst:.2f}",
                _figure(of["promotions"], 0) if "promotions" in of else "–",
            ]
        )
    heads = ["policy", "queueing s", "of the oracle's saving", "worst s", "of the worst of fcfs", "promoted by ageing"]
    return ("\nQueueing, from arrival to the first selection", heads, rows) if rows else None


def _tiers(policies: Mapping[str, Any]) -> Table | None:
    """Prompt tokens found in each cache tier; None without a host cache."""
    rows = [
        [name, *(_figure(of[of_tier], 0) for of_tier in ("hit_tokens_gpu", "hit_tokens_host", "loaded_tokens"))]
        for name, of in policies.items()
        if "loaded_tokens" in of
    ]
    heads = ["policy", "gpu", "host", "loaded, prefetched or again included"]
    return ("\nHit tokens by tier", heads, rows) if rows else None


def _evictions(policies: Mapping[str, Any]) -> Table | None:
    """Evicted blocks by state of their workflow."""
    rows = []
    for name, of in policies.items():
        counts = [of[f"evicted_{kind}"] for kind in _CLASSES]
        held = counts[1]["mean"] + counts[2]["mean"]
        rows.append([name, *(_figure(one, 0) for one in counts), f"{counts[2]['mean'] / held:.1%}" if held else "–"])
    heads = ["policy", "blank", "retired", "active", "active, of those that held something"]
    return ("\nBlocks given up, by what they were", heads, rows) if rows else None
