"""Verdicts on routers: figures by hand, one thing wrong at a time."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from presage.registry.evidence import (
    RouterBudget,
    RouterComparison,
    RouterEvidence,
    judge_router,
)
from presage.registry.gates import ArtefactEvidence, Compared, Interface, Verdict

NAN = (math.nan, math.nan)


def beside(rival: str = "the base rates", **changes: Any) -> RouterComparison:
    usual = RouterComparison(
        rival,
        macro_map=Compared(0.8, 0.6, (0.15, 0.25)),
        picked_accuracy=Compared(0.75, 0.5, (0.1, 0.4)),
        brier=Compared(0.15, 0.2, (-0.07, -0.03)),
    )
    return dataclasses.replace(usual, **changes)


def evidence(**changes: Any) -> RouterEvidence:
    return dataclasses.replace(RouterEvidence(artefact(), 600, 200, 0.02, beside()), **changes)


def artefact(latency: float = 1.5, **changes: Any) -> ArtefactEvidence:
    return dataclasses.replace(ArtefactEvidence(latency, 2_000_000, interface("abc")), **changes)


def interface(models: str) -> Interface:
    return Interface({"format version": 2}, frozenset(models), "models")


def verdict(
    candidate: RouterEvidence, champion: RouterComparison | None = None, models: str = "abc", **budget: Any
) -> Verdict:
    its = None if champion is None else (interface(models), champion)
    return Verdict("m", 2, tuple(judge_router(candidate, its, RouterBudget(**budget))))


def refused_by(*args: Any, **kwargs: Any) -> set[str]:
    return {gate.name for gate in verdict(*args, **kwargs).refusals}


EQUAL: dict[str, Any] = {
    "macro_map": Compared(0.8, 0.8, (-0.01, 0.01)),
    "picked_accuracy": Compared(0.75, 0.75, (0.0, 0.0)),
    "brier": Compared(0.15, 0.15, (0.0, 0.0)),
}


def test_one_that_equals_the_champion_and_beats_the_base_rates_passes() -> None:
    found = verdict(evidence(), beside("the champion", **EQUAL))
    assert found.promoted
    assert {"macro-map", "picked-accuracy", "brier", "floor-macro-map", "calibration"} <= {g.name for g in found.gates}
    json.dumps(found.to_dict(), allow_nan=False)
    assert any("0.7500 against 0.5000 of the base rates" in gate.reason for gate in found.gates)


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"macro_map": Compared(0.8, 0.83, (-0.05, -0.01))}, "macro-map"),
        ({"picked_accuracy": Compared(0.75, 0.8, (-0.08, -0.02))}, "picked-accuracy"),
        ({"brier": Compared(0.15, 0.12, (0.01, 0.05))}, "brier"),
    ],
)
def test_worse_than_the_champion_is_refused_by_what_is_worse(changes: dict[str, Any], gate: str) -> None:
    assert refused_by(evidence(), beside("the champion", **{**EQUAL, **changes})) == {gate}
    assert refused_by(evidence(floor=beside(**changes))) == {f"floor-{gate}"}


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"ece": 0.2}, "calibration"),
        ({"artefact": artefact(30.0)}, "latency"),
        ({"artefact": artefact(size_bytes=200_000_000)}, "size"),
        ({"prompts": 99}, "evidence"),
        ({"artefact": artefact(pickles=("model.pt",))}, "pickle"),
    ],
)
def test_each_plain_gate_refuses_alone(changes: dict[str, Any], gate: str) -> None:
    assert refused_by(evidence(**changes)) == {gate}


def test_a_model_the_champion_knows_must_stay_and_a_new_one_may_come() -> None:
    assert refused_by(evidence(), beside("the champion", **EQUAL), models="abcd") == {"schema"}
    assert verdict(evidence(), beside("the champion", **EQUAL), models="ab").promoted


def test_where_no_pick_can_be_judged_that_is_said() -> None:
    found = verdict(evidence(floor=beside(picked_accuracy=Compared(math.nan, math.nan, NAN))))
    assert found.promoted
    assert [g.reason for g in found.gates if g.name == "floor-picked-accuracy"] == [
        "no prompt has the labels to judge this by"
    ]
