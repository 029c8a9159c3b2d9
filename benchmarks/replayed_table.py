"""What policies_replayed.py says of its runs: against stock, against the oracle, and which goals hold.

Intervals are Student's over seeds, 95 %. Everything against stock is a ratio of the same seed, so what a seed does to
all policies alike is not in its interval; "worse" is a ratio above 1 by more than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from replayed_cells import REAL, Cell, policy_of
from replayed_runs import Kept

from presage.serving_hooks.replay.metrics import Figures, interval, over_seeds, shares
from presage.serving_hooks.replay.policies import ends

SHOWN: Final = ("hit_rate", "completion_mean_s", "makespan_s", "ttft_p50_s", "ttft_p99_s", "longest_wait_s")
RATIOS: Final = ("completion_mean_s", "makespan_s", "ttft_p50_s", "ttft_p99_s")
GAINS: Final = ("hit_rate", "completion_mean_s", "queueing_mean_s")
CLAIRVOYANT: Final = "belady"
_BOUNDS: Final = {"stock", "best-fixed", CLAIRVOYANT, "thunderagent", "static-graph", "oracle", "shortest-job"}
"""What is compared with, and has no goal of its own."""

BySeed = Mapping[int, Figures]


def compare(one: Cell, kept: Kept, seeds: Sequence[int]) -> dict[str, Any]:
    """Of each policy of a cell: means, intervals, and how it stands to stock and to the oracle."""
    runs = {name: kept.figures(one, name, seeds) for name in one.policies}
    found: dict[str, Any] = {}
    for name, of in runs.items():
        nothing, everything = ends(name)
        means = over_seeds(list(of.values()))
        found[name] = {figure: means[figure] for figure in (*SHOWN, "recomputed_tokens", "preemptions")}
        found[name]["at_once"] = kept.best_of(one, name) if policy_of(name).swept else None
        if name == "next-use" and "lifecycle" in runs:
            other = runs["lifecycle"]
            above = [of[seed]["hit_rate"] - other[seed]["hit_rate"] for seed in sorted(of.keys() & other.keys())]
            found[name]["hit rate above lifecycle"] = interval(above)
        if name != nothing and nothing in runs:
            found[name]["to_stock"] = {figure: ratio(of, runs[nothing], figure) for figure in RATIOS}
            for bound in {everything, CLAIRVOYANT} & runs.keys():
                gained = {figure: share(of, runs[nothing], runs[bound], figure) for figure in GAINS}
                found[name]["share" if bound == everything else "share_of_belady"] = gained
    return found


def ratio(policy: BySeed, stock: BySeed, figure: str) -> dict[str, Any]:
    """Of a figure to stock's, seed by seed; lower is better."""
    of = interval([policy[seed][figure] / stock[seed][figure] for seed in sorted(policy.keys() & stock.keys())])
    return of | {"worse": bool((of["ci95"][0] if of["ci95"] else of["mean"]) > 1 + 1e-6)}


def share(policy: BySeed, stock: BySeed, oracle: BySeed, figure: str) -> dict[str, Any] | None:
    """Of the oracle's gain over stock; None where that gain is not established."""
    mean = shares(policy, stock, oracle)[figure]
    if mean is None:
        return None
    by_seed = interval(
        [
            (policy[seed][figure] - stock[seed][figure]) / (oracle[seed][figure] - stock[seed][figure])
            for seed in sorted(policy.keys() & stock.keys() & oracle.keys())
        ]
    )
    return {"mean": mean, "ci95": by_seed["ci95"]}


def goals(one: Cell, of: Mapping[str, Any]) -> dict[str, bool]:
    """The goals that a cell says something about."""
    if one.group == "queueing":
        return _of_the_queue(of)
    found = {
        f"{name} is never worse than stock": not any(of[name]["to_stock"][figure]["worse"] for figure in RATIOS[:2])
        for name in of.keys() - _BOUNDS
    }
    for name in {"admission", "full"} & of.keys():
        tail = of[name]["to_stock"]["ttft_p99_s"]["mean"]
        found[f"{name}: p99 of the time to first token at most 1.5 times stock's"] = tail <= 1.5
        found[f"{name}: p50 of it not above stock's"] = of[name]["to_stock"]["ttft_p50_s"]["mean"] <= 1.0
    if one.group == "noise":
        return found | _under_noise(one, of)
    if {"full", "best-fixed"} <= of.keys():
        for figure, said in (("completion_mean_s", "mean completion"), ("makespan_s", "throughput")):
            reached = _mean(of, "best-fixed", figure) / _mean(of, "full", figure) >= 0.9
            found[f"full reaches 90 % of the {said} of best-fixed"] = reached
    stock = _mean(of, "stock", "hit_rate")
    if one.name == "history-first/72/4000" and "full" in of:
        found["overloaded: full has 3 times the hit rate"] = _mean(of, "full", "hit_rate") >= 3 * stock
        found["overloaded: full has a makespan 1.4 times shorter"] = (
            of["full"]["to_stock"]["makespan_s"]["mean"] <= 1 / 1.4
        )
    return found | _of_eviction(one, of)


def _of_eviction(one: Cell, of: Mapping[str, Any]) -> dict[str, bool]:
    """Shares of what the oracle gains over stock; where its gain is not established, of what Belady's rule gains."""
    found: dict[str, bool] = {}
    wanted = 0.7 if one.workload == REAL else 0.8
    if not (one.near_the_knee or one.workload != "history-first"):
        return found
    for name in sorted({"next-use", "full"} & of.keys()):
        for figure, said in (("hit_rate", "hit rate"), ("completion_mean_s", "completion")):
            for key, bound in (("share", "the oracle"), ("share_of_belady", CLAIRVOYANT)):
                gained = of[name].get(key, {}).get(figure)
                if gained is not None:
                    goal = f"{_kind(one)}: {name} has {wanted:.0%} of the gain of {bound} in {said}"
                    found[goal] = gained["mean"] >= wanted
                    break
    return found


def _kind(one: Cell) -> str:
    return REAL if one.workload == REAL else "near the knee" if one.near_the_knee else "own conversations"


def _under_noise(one: Cell, of: Mapping[str, Any]) -> dict[str, bool]:
    """Eviction by noisy forecasts against blocks of ended workflows first, by hit rate of the same seed."""
    above = of["next-use"]["hit rate above lifecycle"]
    if one.forecasts == "noise:0.2":
        return {"20 % noise: next-use is above lifecycle in hit rate": above["mean"] > 0}
    most = above["ci95"][1] if above["ci95"] else above["mean"]
    return {"100 % noise: next-use is not below lifecycle beyond the interval": most >= 0}


def _of_the_queue(of: Mapping[str, Any]) -> dict[str, bool]:
    found = {}
    gained = of["stock+stjf"]["share"]
    for figure, said in (("queueing_mean_s", "queueing"), ("completion_mean_s", "completion")):
        if gained[figure] is not None:
            found[f"stjf saves 70 % of what the truth saves in {said}"] = gained[figure]["mean"] >= 0.7
    return found


def _mean(of: Mapping[str, Any], policy: str, figure: str) -> float:
    return float(of[policy][figure]["mean"])


def show(one: Cell, of: Mapping[str, Any]) -> None:
    """A cell, as a Markdown table."""
    head = ["policy", *SHOWN, *(f"{figure} / stock's" for figure in RATIOS), *(f"oracle's {gain}" for gain in GAINS)]
    print(f"\n### {one.name}, forecasts {one.forecasts}\n\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, figures in of.items():
        cells = [_shown(figures[figure], 3 if figure == "hit_rate" else 1) for figure in SHOWN]
        to_stock, gained = figures.get("to_stock", {}), figures.get("share", {})
        cells += [_ratio(to_stock.get(figure)) for figure in RATIOS]
        cells += [_percent(gained.get(figure)) for figure in GAINS]
        number = f" ({figures['at_once']} at once)" if figures["at_once"] else ""
        print(f"| {name}{number} | " + " | ".join(cells) + " |", flush=True)


def summary(found: Sequence[tuple[Cell, Mapping[str, Any]]], policies: Sequence[str]) -> None:
    """A line a cell: hit rate, and completion as a ratio to stock's."""
    print("\nHit rate, and mean completion divided by stock's (± half of the interval)\n")
    print("| cell | " + " | ".join(policies) + " |\n|" + "---|" * (len(policies) + 1))
    for one, of in found:
        cells = []
        for name in policies:
            if name not in of:
                cells.append("")
                continue
            cells.append(f"{_mean(of, name, 'hit_rate'):.3f}".lstrip("0"))
            if "to_stock" in of[name]:
                cells[-1] += f"; {_ratio(of[name]['to_stock']['completion_mean_s'])}"
        asked = "" if one.forecasts == "trained" else f", {one.forecasts}"
        print(f"| {one.name}{asked} | " + " | ".join(cells) + " |")


def _shown(of: Mapping[str, Any], digits: int) -> str:
    half = f" ± {(of['ci95'][1] - of['ci95'][0]) / 2:.{digits}f}" if of["ci95"] else ""
    return f"{of['mean']:.{digits}f}{half}"


def _ratio(of: Mapping[str, Any] | None) -> str:
    return "–" if of is None else _shown(of, 2) + (" worse" if of["worse"] else "")


def _percent(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return "–"
    return f"{of['mean']:.0%}" + (f" ({of['ci95'][0]:.0%} to {of['ci95'][1]:.0%})" if of["ci95"] else "")
