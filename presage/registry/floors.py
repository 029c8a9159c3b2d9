"""Every baseline of a training is a floor: a version that lost to one beyond the interval is not promoted.

Baselines are not part of an artefact, so they are compared once, by the training, on its held-out tasks. What came of
it travels with the version as a tag for each place it may be promoted to, and is a gate there.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from presage.features.input_profiles import TARGETS
from presage.registry.verdict import Gate

AT_LEAST: Final = 30
"""Test workflows (or prompts) below which a lost comparison refuses nothing: intervals of fewer are too narrow, and of
dozens of comparisons one is lost by chance."""

TAG: Final = "presage.baselines."
"""Followed by a target: the tag with the trained baselines and the comparisons lost under the target's profile."""

NEGLIGIBLE: Final = 0.01
"""A baseline that is better by at most this share of its own figure is no reason to refuse, however sure it is."""


def floor_tags(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a version, from the metrics of its training: of each baseline the comparison it won most clearly."""
    found = {}
    judged = metrics["workflows"] if "workflows" in metrics else metrics["prompts"]
    for target, profile in TARGETS.items():
        lost = metrics["profiles"][profile]["behind"] if "profiles" in metrics else metrics["behind"]
        worst = {one["baseline"]: one for one in sorted(lost, key=_share)}
        kept = {name: worst.get(name) for name in sorted(metrics["baselines"])}
        found[TAG + target] = json.dumps({"baselines": kept, "lost": len(lost), "judged": judged})
    return found


def lost_by_target(tags: Mapping[str, str]) -> dict[str, int]:
    """How many comparisons with baselines a version lost in training, by what it may be promoted to."""
    return {target: int(json.loads(tags[TAG + target])["lost"]) for target in TARGETS if TAG + target in tags}


def _share(one: Mapping[str, Any]) -> float:
    """How much better the baseline is, as a share of its own figure."""
    return float(one["by"]) / max(float(one["of"]), 1e-9)


def floor_gates(tags: Mapping[str, str], target: str) -> list[Gate]:
    """One gate for each baseline of the version's training, under the profile of the target."""
    if TAG + target not in tags:
        reason = "no baseline was kept with this version: it was trained by an earlier version of Presage"
        return [Gate("baselines", passed=True, value=None, limit=None, reason=reason)]
    kept = json.loads(tags[TAG + target])
    return [_gate(name, lost, kept["judged"]) for name, lost in kept["baselines"].items()]


def _gate(name: str, lost: Mapping[str, Any] | None, judged: int) -> Gate:
    gate = f"floor-{name}"
    if lost is None:
        return Gate(gate, passed=True, value=None, limit=None, reason="not better beyond the interval in training")
    share, (low, high) = _share(lost), lost["ci95"]
    reason = (
        f"on the tasks held out in training it is better {lost['at']} by {lost['by']:.4g}, 95 % interval "
        f"[{low:.4g}, {high:.4g}], {share:.1%} of its own figure; at most {NEGLIGIBLE:.0%} is let pass"
    )
    if judged < AT_LEAST:
        reason += f"; it was judged on {judged}, and fewer than {AT_LEAST} are too few to refuse by"
        return Gate(gate, passed=True, value=share, limit=None, reason=reason)
    return Gate(gate, share <= NEGLIGIBLE, share, NEGLIGIBLE, reason)
