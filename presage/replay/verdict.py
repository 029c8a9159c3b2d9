"""What a replay supports in a few words: which policy completes workflows soonest, or why none can, and the regime.

A policy is compared with vLLM alone, seed by seed, by the ratio of their mean completion times. The interval is
Student's t over the logarithms of the ratios, so the time saved stays below 100 % and is the same whichever of the two
divides. A policy is better, or worse, if its interval excludes 0.

The regime follows from the share of its time in which vLLM alone computes again what it had computed before: from
`THRASHING` on it thrashes, and holding workflows back gains most; up to `NO_HEADROOM` little can be gained by any
policy (`benchmarks/regimes.py`); between them eviction gains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from presage.replay.metrics import Figures, interval
from presage.replay.policies import FIRST_COME, STOCK

_LEAST: Final = 0.0005
"""Smallest share of time that is called a difference: below it, it would be printed as 0.0 %."""

NO_HEADROOM: Final = 0.1
THRASHING: Final = 0.4

Runs = Mapping[int, Figures]
"""Figures of a policy by seed."""


def verdict(
    runs: Mapping[str, Runs], bounds: Collection[str], block_tokens: int, longest_prompt_tokens: int
) -> dict[str, Any]:
    """The comparison of all policies with vLLM alone, or with the first one if vLLM alone was not replayed.

    Args:
        runs: figures by policy and seed; at least one.
        bounds: policies that no engine can run, which are never called the best.

    Returns:
        text: the sentence.
        against: the policy that the others are compared with.
        best: the policies that complete soonest: one, and those that do not differ from it; empty if none is better.
        sooner: by policy, the share of the mean completion time that it saves, mean and 95 % interval.
        nothing_to_gain: why the cache cannot serve more under any policy; None if it can, or might.
        regime: name ("thrashing", "eviction gains" or "no headroom"), recomputing_share of the policy that the others
            are compared with, mean over seeds, and a sentence, text.
    """
    against = next((name for name in (STOCK, f"{STOCK}+{FIRST_COME}") if name in runs), next(iter(runs)))
    compared = {name: saved(by_seed, runs[against]) for name, by_seed in runs.items() if name != against}
    sooner = {name: saving for name, saving in compared.items() if saving is not None}
    better = sorted((name for name in sooner if _above(sooner[name])), key=lambda name: -sooner[name]["mean"])
    own, clairvoyant = ([name for name in better if (name in bounds) is bound] for bound in (False, True))
    best = own[:1] + [name for name in own[1:] if not _above(saved(runs[own[0]], runs[name]))]
    clairvoyant = [name for name in clairvoyant if not best or _above(saved(runs[name], runs[best[0]]))]
    reason = _reason(runs, block_tokens, longest_prompt_tokens)
    return {
        "text": _sentence(against, sooner, best, clairvoyant, bounds, reason),
        "against": against,
        "best": best,
        "sooner": sooner,
        "nothing_to_gain": reason,
        "regime": _regime(against, fmean(figures["recomputing_share"] for figures in runs[against].values())),
    }


def _regime(against: str, recomputing_share: float) -> dict[str, Any]:
    if recomputing_share >= THRASHING:
        name, said = "thrashing", "it thrashes, and holding workflows back gains most"
    elif recomputing_share > NO_HEADROOM:
        name, said = "eviction gains", "a better order of free blocks gains"
    else:
        name, said = "no headroom", "no policy can gain much"
    text = f"{against} spends {recomputing_share:.0%} of its time on lost contexts: {said}."
    return {"name": name, "recomputing_share": recomputing_share, "text": f"{text[0].upper()}{text[1:]}"}


def saved(policy: Runs, against: Runs) -> dict[str, Any] | None:
    """The share of mean completion time that a policy saves, over the seeds of both; None if they have none."""
    seeds = sorted(policy.keys() & against.keys())
    if not seeds:
        return None
    times = [[max(by_seed[seed]["completion_mean_s"], 1e-9) for by_seed in (policy, against)] for seed in seeds]
    log_ratio = interval([math.log(mine / other) for mine, other in times])
    ends = log_ratio["ci95"]
    return {  # 0.0 - x, since -x of an equal time would be a negative zero
        "mean": 0.0 - math.expm1(log_ratio["mean"]),
        "ci95": None if ends is None else [0.0 - math.expm1(ends[1]), 0.0 - math.expm1(ends[0])],
    }


def _above(saving: Mapping[str, Any] | None) -> bool:
    """Whether the interval is above 0."""
    return saving is not None and saving["ci95"] is not None and saving["ci95"][0] > 0 and saving["mean"] >= _LEAST


def _below(saving: Mapping[str, Any]) -> bool:
    return saving["ci95"] is not None and bool(saving["ci95"][1] < 0) and saving["mean"] <= -_LEAST


def _reason(runs: Mapping[str, Runs], block_tokens: int, longest_prompt_tokens: int) -> str | None:
    every = [figures for by_seed in runs.values() for figures in by_seed.values()]
    if all(figures["reusable_share"] == 0 for figures in every):
        if longest_prompt_tokens < block_tokens:
            return f"every prompt is shorter than a block of {block_tokens} tokens, and vLLM caches whole blocks"
        return f"no prompt repeats a whole block of {block_tokens} earlier tokens"
    if all(figures.get("evicted_retired", 1) + figures.get("evicted_active", 1) == 0 for figures in every):
        return "the cache holds everything"
    if all(figures["hit_rate"] == figures["reusable_share"] for figures in every):
        return "all that prompts repeat is found in the cache already"
    if len(runs) > 1 and _alike(runs):
        if all(figures["hit_rate"] == 0 for figures in every):
            return "under every policy replayed, what prompts repeat has been evicted before they come"
        if all(figures.get("evicted_active") == 0 for figures in every):
            return "every policy replayed has the same hit rate, and evicts blocks of ended workflows only"
        return "every policy replayed has the same hit rate"
    return None


def _alike(runs: Mapping[str, Runs]) -> bool:
    """Whether all policies have the same hit rate, seed by seed."""
    rates: dict[int, set[float]] = {}
    for by_seed in runs.values():
        for seed, figures in by_seed.items():
            rates.setdefault(seed, set()).add(figures["hit_rate"])
    return all(len(hit_rates) == 1 for hit_rates in rates.values())


def _sentence(
    against: str,
    sooner: Mapping[str, Mapping[str, Any]],
    best: Sequence[str],
    clairvoyant: Sequence[str],
    bounds: Collection[str],
    reason: str | None,
) -> str:
    own = {name: saving for name, saving in sooner.items() if name not in bounds}
    soonest = max(own, key=lambda name: own[name]["mean"], default=None)
    later = [name for name, saving in sooner.items() if _below(saving)]
    equal = all(max(map(abs, saving["ci95"] or [saving["mean"]])) < _LEAST for saving in sooner.values())
    parts = []
    if reason is not None and equal:
        parts.append(f"nothing to gain here: {reason}")
    elif not sooner:
        parts.append(f"only {against} was replayed: name more with --policy to compare them")
    elif soonest is None:
        parts.append(f"only bounds were compared with {against}: add a policy that an engine can run")
    elif best:
        also = f", not distinguishable from {_listed(best[1:])}" if best[1:] else ""
        parts.append(f"best: {best[0]}, {_by(own[best[0]], f'sooner than {against}')}{also}")
    elif own[soonest]["ci95"] is None:
        share = own[soonest]["mean"]
        by = f"{soonest} {_percent(abs(share))} % {'sooner' if share > 0 else 'later'}" if abs(share) >= _LEAST else ""
        parts.append(
            f"no policy is called better than {against} on one run of each{f' ({by})' if by else ''}: several seeds "
            "with --concurrency or --rate give an interval"
        )
    elif equal:
        parts.append(f"no policy completes sooner than {against}: all times are equal")
    else:
        parts.append(f"no policy is better than {against}: no 95 % interval of the time saved lies above 0")
    if clairvoyant:
        parts.append(f"with the future known, {clairvoyant[0]} is {_by(sooner[clairvoyant[0]], 'sooner')}")
    if later:
        parts.append(f"later than {against}: {_listed(later)}")
    if reason is not None and not equal:
        parts.append(f"nothing to gain from the cache: {reason}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _by(saving: Mapping[str, Any], sooner: str) -> str:
    low, high = saving["ci95"]
    return f"{_percent(saving['mean'])} % {sooner} (95 % interval {_percent(low)} to {_percent(high)} %)"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(share) >= 0.1 else 1}f}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
