"""The tables of `presage replay` beside its first: shares of the oracle's gain, queueing, tiers, and what was given up.

Each is a title, heads and rows, as `tables.table` takes them, or None where there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = tuple[str, Sequence[str], list[list[str]]]

_CLASSES = ("blank", "retired", "active")


def figure(of: Mapping[str, Any], digits: int) -> str:
    """A mean, and half of its interval where there is one."""
    mean = f"{of['mean']:.{digits}f}"
    if of["ci95"] is None:
        return mean
    return f"{mean} ± {(of['ci95'][1] - of['ci95'][0]) / 2:.{digits}f}"


def shares(policies: Mapping[str, Any], shown: Mapping[str, tuple[str, int]]) -> Table | None:
    """Of what the oracle gains over stock, what each policy does.

    Args:
        policies: of the result, by name.
        shown: figures and their digits, by head.
    """
    from presage.serving_hooks.replay.policies import ends

    rows = [
        [name, *(share(of, named) for named, _ in shown.values())]
        for name, of in policies.items()
        if "share_of_oracle" in of and name != ends(name)[1]
    ]
    crossed = any("+" in name for name in policies)
    over = "stjf-oracle gains over fcfs, with the same policy" if crossed else "the oracle gains over stock"
    return (f"\nShare of what {over}", ["policy", *shown], rows) if rows else None


def share(of: Mapping[str, Any], named: str) -> str:
    """The share of one figure; a dash where the oracle's gain is not established."""
    found = of["share_of_oracle"][named]
    return "–" if found is None else f"{found:.0%}"


def queueing(policies: Mapping[str, Any]) -> Table | None:
    """What schedulers do to waiting: the mean, the share of the oracle's saving, and the worst beside first come."""
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
                figure(of["queueing_mean_s"], 2),
                "100%" if name == best else share(of, "queueing_mean_s") if "share_of_oracle" in of else "–",
                figure(of["longest_wait_s"], 1),
                f"{worst:.2f}",
                figure(of["promotions"], 0) if "promotions" in of else "–",
            ]
        )
    heads = ["policy", "queueing s", "of the oracle's saving", "worst s", "of the worst of fcfs", "promoted by ageing"]
    return ("\nQueueing, from arrival to the first selection", heads, rows) if rows else None


def tiers(policies: Mapping[str, Any]) -> Table | None:
    """Where prompts were found; nothing without a cache in the host."""
    rows = [
        [name, *(figure(of[of_tier], 0) for of_tier in ("hit_tokens_gpu", "hit_tokens_host", "loaded_tokens"))]
        for name, of in policies.items()
        if "loaded_tokens" in of
    ]
    heads = ["policy", "gpu", "host", "loaded, prefetched or again included"]
    return ("\nHit tokens by tier", heads, rows) if rows else None


def evictions(policies: Mapping[str, Any]) -> Table | None:
    """Blocks given up, by what they were."""
    rows = []
    for name, of in policies.items():
        counts = [of[f"evicted_{kind}"] for kind in _CLASSES]
        held = counts[1]["mean"] + counts[2]["mean"]
        rows.append([name, *(figure(one, 0) for one in counts), f"{counts[2]['mean'] / held:.1%}" if held else "–"])
    heads = ["policy", "blank", "retired", "active", "active, of those that held something"]
    return ("\nBlocks given up, by what they were", heads, rows) if rows else None
