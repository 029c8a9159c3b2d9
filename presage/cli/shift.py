"""`presage study shift` for people."""

from __future__ import annotations

from typing import Any

from presage.cli.tables import number, table


def tables(found: dict[str, Any]) -> list[Any]:
    """Each family left out, and all together beside families that training knew."""
    routers = list(found["pooled"]["left_out"]["routers"])
    baselines = routers[1:]
    head = ["family left out", "prompts", "macro mAP", "ECE", "picked accuracy", "flagged"]
    rows = [[name, *_row(of["left_out"], routers)] for name, of in found["families"].items()]
    pooled = found["pooled"]
    rows.append(["all of them", *_row(pooled["left_out"], routers)])
    rows.append(["with all families known", *_row(pooled["known"], routers)])
    told: list[Any] = [
        table(f"\nThe router on families that training never saw: ours / {' / '.join(baselines)}", head, rows),
        "\nflagged: share of prompts for which ours says that there is not enough evidence",
    ]
    intervals = []
    for called, key in (("left out", "left_out"), ("known", "known")):
        for name, of in pooled[key]["differences"].items():
            intervals.append([f"{called}, ours less {name}", *map(_difference, of.values())])
    first = pooled["left_out"]["differences"][baselines[0]]
    told.append(table("\nDifferences over all families, with paired 95 % intervals", ["", *first], intervals))
    behind = pooled["left_out"]["behind"]
    told += [f"\nLOST: {one['baseline']} is better {one['at']} by {one['by']:.4f} on new families" for one in behind]
    return told


def _row(of: dict[str, Any] | None, routers: list[str]) -> list[str]:
    if of is None:
        return ["0", "–", "–", "–", "–"]
    figures = [
        " / ".join(number(of["routers"][name][key]) for name in routers)
        for key in ("macro_map", "ece", "picked_accuracy")
    ]
    return [str(of["prompts"]), *figures, number(of["flagged"], 2)]


def _difference(of: dict[str, Any]) -> str:
    low, high = of["ci95"]
    return f"{number(of['difference'])} [{number(low)}, {number(high)}]"
