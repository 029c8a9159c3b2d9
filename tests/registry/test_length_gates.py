"""Verdicts on predictors of lengths: figures by hand, one thing wrong at a time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from presage.predictors.common.bootstrap import QuantileCounts, enough_beyond
from presage.registry.evidence import LengthBudget, LengthEvidence, judge_lengths
from presage.registry.gates import ArtefactEvidence, Interface, Verdict

W, STEPS = 40, 100
QUANTILES = (0.5, 0.9, 0.99)


def counts(
    tau: float = 0.2, loss: float = 100.0, covered: tuple[int, ...] = (52, 92, 100), steps: int = STEPS
) -> QuantileCounts:
    """The same figures in each workflow."""
    pairs = np.full(W, 1000.0)
    return QuantileCounts(
        wrong={"all": tau * pairs, "arrival": tau * pairs},
        pairs={"all": pairs, "arrival": pairs},
        loss=np.full((W, 3), loss * steps),
        covered=np.tile(covered, (W, 1)),
        positions=np.full(W, steps),
    )


def evidence(**changes: Any) -> LengthEvidence:
    usual = LengthEvidence(
        artefact(),
        QUANTILES,
        workflows=tuple(f"w-{row}" for row in range(W)),
        type_of=("a",) * 20 + ("b",) * 20,
        counts=counts(),
        floor=counts(0.5, 200.0),
    )
    return dataclasses.replace(usual, **changes)


def artefact(target: str = "remaining", version: int = 2, known: str = "ab", **changes: Any) -> ArtefactEvidence:
    interface = Interface({"target": target, "format version": version}, frozenset(known))
    return dataclasses.replace(ArtefactEvidence(40.0, 3_000_000, interface), **changes)


def verdict(candidate: LengthEvidence, champion: LengthEvidence | None, **budget: Any) -> Verdict:
    return Verdict("m", 2, tuple(judge_lengths(candidate, champion, LengthBudget(**budget), seed=0)))


def refused_by(candidate: LengthEvidence, champion: LengthEvidence | None, **budget: Any) -> set[str]:
    return {gate.name for gate in verdict(candidate, champion, **budget).refusals}


def test_an_equal_candidate_passes_and_the_verdict_is_json() -> None:
    found = verdict(evidence(), evidence())
    assert found.promoted
    assert {"tau-distance-all", "pinball-0.9", "floor-pinball-0.99", "coverage-0.99-worst-type"} <= {
        gate.name for gate in found.gates
    }
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_worse_order_is_refused_and_a_better_one_is_not() -> None:
    worse = {"tau-distance-all", "tau-distance-arrival"}
    assert refused_by(evidence(counts=counts(0.25)), evidence()) == worse
    assert verdict(evidence(), evidence(counts=counts(0.25))).promoted


def test_greater_loss_is_refused_at_every_quantile() -> None:
    assert refused_by(evidence(counts=counts(loss=102)), evidence()) == {f"pinball-{q:g}" for q in QUANTILES}
    assert refused_by(evidence(counts=counts(loss=101)), evidence()) == set(), "a hundredth is negligible"


def on_steps(steps: int, last: float = 100.0, tau: float = 0.2) -> QuantileCounts:
    """Everything is covered; the loss is 100 a step, at .99 `last`."""
    made = counts(tau, covered=(steps, steps, steps), steps=steps)
    made.loss[:, 2] = last * steps
    return made


@pytest.mark.parametrize("gate", ["pinball-0.99", "floor-pinball-0.99"])
def test_a_far_quantile_is_judged_only_where_ten_steps_are_expected_beyond_it(gate: str) -> None:
    def judged(steps: int) -> Verdict:
        rival = on_steps(steps, last=90.0)
        if gate.startswith("floor"):
            return verdict(evidence(counts=on_steps(steps, last=95.0), floor=rival), None)
        worse, floor = on_steps(steps, last=95.0), on_steps(steps, last=200.0, tau=0.5)
        return verdict(evidence(counts=worse, floor=floor), evidence(counts=rival, floor=floor))

    few = judged(5)  # 200 steps, of which 2 are expected beyond .99
    assert few.promoted
    (found,) = [one for one in few.gates if one.name == gate]
    assert found.reason.endswith("; 2 steps expected beyond the 0.99 quantile, 10 needed to judge it: not judged")
    assert "difference +5.00, 95 % interval [+5.00, +5.00]" in found.reason
    assert found.result == "passed"
    (nearer,) = [one for one in few.gates if one.name == gate.replace("0.99", "0.9")]
    assert "not judged" not in nearer.reason  # 20 are expected beyond .9
    assert judged(24).promoted  # 9.6
    assert {one.name for one in judged(25).refusals} == {gate}  # 10
    assert {one.name for one in judged(STEPS).refusals} == {gate}


def test_ten_steps_are_enough_at_every_quantile() -> None:
    for q, steps in ((0.01, 1000), (0.05, 200), (0.1, 100), (0.5, 20), (0.9, 100), (0.95, 200), (0.99, 1000)):
        assert not enough_beyond(steps - 1, q)
        assert enough_beyond(steps, q)


def test_low_quantiles_need_as_many_steps_below_them() -> None:
    """Return times are judged by the same gates, in log seconds, from .05 to .99."""

    def refused(steps: int) -> set[str]:
        mine, floor = on_steps(steps), on_steps(steps, last=90.0)
        mine.loss[:, 0] *= 1.1
        found = evidence(quantiles=(0.05, 0.9, 0.95), counts=mine, floor=floor)
        return refused_by(found, None, unit="log seconds")

    assert refused(4) == set()  # 8 of 160 steps
    assert refused(5) == {"floor-pinball-0.05", "floor-pinball-0.95"}  # 10 of 200


def test_the_first_champion_must_beat_the_best_constant() -> None:
    assert verdict(evidence(), None).promoted
    assert refused_by(evidence(counts=counts(0.51)), None) == {"floor-tau-distance-all", "floor-tau-distance-arrival"}
    assert refused_by(evidence(counts=counts(loss=203)), None) == {f"floor-pinball-{q:g}" for q in QUANTILES}


def test_bounds_that_do_not_hold_are_refused_and_wide_ones_are_not() -> None:
    # .86 lies below .88; a single type may fall short as far as .84.
    assert refused_by(evidence(counts=counts(covered=(52, 86, 100))), None) == {"coverage-0.9"}
    assert refused_by(evidence(counts=counts(covered=(52, 92, 96))), None) == {
        "coverage-0.99",
        "coverage-0.99-worst-type",
    }
    assert verdict(evidence(counts=counts(covered=(8, 100, 100))), None).promoted, "a low median is no broken bound"


def test_the_worst_type_is_found_behind_a_good_mean() -> None:
    good = counts()
    covered = good.covered.copy()
    covered[:12, 1] = 72
    covered[12:, 1] = 100
    found = evidence(counts=dataclasses.replace(good, covered=covered), type_of=("a",) * 12 + ("b",) * 28)
    assert refused_by(found, None) == {"coverage-0.9-worst-type"}
    few = dataclasses.replace(found, type_of=("a",) * 9 + ("b",) * 31)
    assert verdict(few, None).promoted, "nine workflows are no evidence against a type"


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"latency": 500.1}, "latency"),
        ({"size_bytes": 15_000_001}, "size"),
        ({"pickles": ("a.pkl",)}, "pickle"),
        ({"target": "step"}, "schema"),
        ({"version": 3}, "schema"),
        ({"known": "a"}, "schema"),
    ],
)
def test_each_plain_gate_refuses_alone(changes: dict[str, Any], gate: str) -> None:
    assert refused_by(evidence(artefact=artefact(**changes)), evidence()) == {gate}


def test_a_quantile_the_champion_promised_must_stay() -> None:
    two = dataclasses.replace(counts(), loss=counts().loss[:, :2], covered=counts().covered[:, :2])
    floor = dataclasses.replace(counts(0.5, 200.0), loss=counts(loss=200).loss[:, :2])
    assert refused_by(evidence(counts=two, floor=floor, quantiles=QUANTILES[:2]), evidence()) == {"schema"}
    assert verdict(evidence(), evidence(counts=two, floor=floor, quantiles=QUANTILES[:2])).promoted


def test_too_few_workflows_are_no_evidence() -> None:
    assert refused_by(evidence(), None, evidence=W + 1) == {"evidence"}


def test_figures_of_other_traces_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different workflows"):
        verdict(evidence(), evidence(workflows=tuple("x" * W)))
    with pytest.raises(ValueError, match="different steps"):
        verdict(evidence(), evidence(counts=counts(steps=99)))
