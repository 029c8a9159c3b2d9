"""Verdicts: hand-computed figures, and laws that hold for any figures."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.registry.evidence import (
    MomentEvidence,
    NextAgentBudget,
    NextAgentEvidence,
    judge_next_agent,
)
from presage.registry.gates import ArtefactEvidence, Interface, Verdict, sampling_ece

W, K, POSITIONS = 40, 3, 10


def moment(correct: int = 8, *, workflows: int = W, nll: float = 0.5, ece: float = 0.03) -> MomentEvidence:
    return MomentEvidence(
        correct=np.full((workflows, K), correct),
        positions=np.full((workflows, K), POSITIONS),
        nll=(nll,) * K,
        ece=(ece,) * K,
    )


def evidence(correct: int = 8, **changes: Any) -> NextAgentEvidence:
    figures = moment(correct)
    usual = NextAgentEvidence(
        artefact(),
        workflows=tuple(f"w-{row}" for row in range(W)),
        moments={"prefill": figures, "completion": figures},
        floor={"prefill": moment(7), "completion": moment(7)},
    )
    return dataclasses.replace(usual, **changes)


def artefact(latency: float = 20.0, size_bytes: int = 900_000, **changes: Any) -> ArtefactEvidence:
    return dataclasses.replace(ArtefactEvidence(latency, size_bytes, interface()), **changes)


def interface(horizon: int = K, version: int = 1, known: str = "ab") -> Interface:
    return Interface({"horizon": horizon, "feature schema": version}, frozenset(known))


def verdict(candidate: NextAgentEvidence, champion: NextAgentEvidence | None, **budget: Any) -> Verdict:
    return Verdict("m", 2, tuple(judge_next_agent(candidate, champion, NextAgentBudget(**budget), seed=0)))


def refused_by(candidate: NextAgentEvidence, champion: NextAgentEvidence | None, **budget: Any) -> set[str]:
    return {gate.name for gate in verdict(candidate, champion, **budget).refusals}


def test_a_candidate_equal_to_the_champion_passes_and_says_why() -> None:
    found = verdict(evidence(), evidence())
    assert found.promoted
    named = {gate.name: gate for gate in found.gates}
    assert [named["accuracy-prefill-1"].value, named["accuracy-prefill-1"].limit] == [0.0, 0.0]
    assert "0.8000 against the champion's 0.8000 on 400 positions" in named["accuracy-prefill-1"].reason
    assert named["floor-completion-3"].value == pytest.approx(0.1)
    assert {"evidence", "schema", "latency", "size", "pickle"} < named.keys()
    assert sum(name.startswith(("accuracy", "floor", "calibration", "nll")) for name in named) == 4 * 2 * K


def test_worse_on_every_workflow_is_refused_at_every_horizon() -> None:
    expected = {f"accuracy-{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)}
    assert refused_by(evidence(7), evidence(8)) == expected


def test_worse_within_the_interval_passes() -> None:
    correct = np.full((W, K), 8)
    correct[:20] += 1
    correct[20:] -= 1
    correct[0] -= 1  # one position worse of 400, while workflows differ by a tenth either way
    noisy = dataclasses.replace(moment(), correct=correct)
    candidate = evidence(moments={"prefill": noisy, "completion": moment()})
    gate = next(gate for gate in verdict(candidate, evidence()).gates if gate.name == "accuracy-prefill-1")
    assert gate.passed
    assert gate.value is not None
    assert 0.02 < gate.value < 0.04  # −1/400 plus two standard errors of 0.1/sqrt(40)


def test_below_the_best_n_gram_is_refused_even_when_better_than_the_champion() -> None:
    candidate = evidence(6)
    assert refused_by(candidate, evidence(5)) == {f"floor-{at}-{k}" for at in candidate.moments for k in (1, 2, 3)}


def test_the_first_champion_must_beat_counting() -> None:
    assert verdict(evidence(), None).promoted
    assert refused_by(evidence(6), None) == {f"floor-{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)}
    assert refused_by(evidence(floor={}), None) == {"floor"}
    assert verdict(evidence(floor={}), evidence()).promoted


@pytest.mark.parametrize(
    ("changes", "gate", "reason"),
    [
        ({"artefact": artefact(201.0)}, "latency", "201 µs for one warm forecast, at most 200 wanted"),
        ({"artefact": artefact(size_bytes=1_500_001)}, "size", "at most 1.5e+06 wanted"),
        ({"artefact": artefact(pickles=("a.pkl",))}, "pickle", "may hide code: a.pkl"),
        ({"artefact": artefact(interface=interface(2))}, "schema", "horizon 2, the champion's is 3"),
        ({"artefact": artefact(interface=interface(K, 2))}, "schema", "feature schema 2, the champion's is 1"),
        (
            {"artefact": artefact(interface=interface(known="a"))},
            "schema",
            "does not know 1 of the champion's workflow types: b",
        ),
        ({"moments": {"prefill": moment()}}, "schema", "not judged at completion"),
        ({"artefact": artefact(math.nan)}, "latency", "nan µs"),
    ],
)
def test_each_plain_gate_refuses_with_its_reason(changes: dict[str, Any], gate: str, reason: str) -> None:
    found = verdict(evidence(**changes), evidence())
    assert [refusal.name for refusal in found.refusals] == [gate]
    assert reason in found.refusals[0].reason


def test_at_the_limit_passes() -> None:
    assert verdict(evidence(artefact=artefact(200.0, 1_500_000)), evidence()).promoted


def test_new_workflow_types_and_a_smaller_artefact_are_no_offence() -> None:
    wider = artefact(size_bytes=1, interface=interface(known="abc"))
    assert verdict(evidence(artefact=wider), evidence()).promoted


@pytest.mark.parametrize(("ece", "champion", "passed"), [(0.17, 0.17, True), (0.19, 0.19, False), (0.13, 0.03, False)])
def test_calibration_is_held_against_a_limit_and_the_champion(ece: float, champion: float, passed: bool) -> None:
    # 400 positions in 15 bins: sampling alone explains 0.0773, so the limits are .1773 and the champion's + .0973.
    assert sampling_ece(400) == pytest.approx(0.0773, abs=1e-4)
    candidate = evidence(moments=dict.fromkeys(("prefill", "completion"), moment(ece=ece)))
    holder = evidence(moments=dict.fromkeys(("prefill", "completion"), moment(ece=champion)))
    assert verdict(candidate, holder).promoted == passed


def test_sampling_explains_the_error_of_a_calibrated_forecaster() -> None:
    rng = np.random.default_rng(0)
    for positions in (100, 1000, 10_000):
        confidence = rng.uniform(0.3, 1.0, positions)
        gap = (rng.uniform(size=positions) < confidence) - confidence
        bins = np.minimum((confidence * 15).astype(int), 14)
        ece = np.abs(np.bincount(bins, gap, minlength=15)).sum() / positions
        assert ece < 1.3 * sampling_ece(positions)


@pytest.mark.parametrize(("nll", "passed"), [(0.549, True), (0.551, False), (math.inf, False), (math.nan, False)])
def test_likelihood_is_held_against_the_champion(nll: float, passed: bool) -> None:
    candidate = evidence(moments=dict.fromkeys(("prefill", "completion"), moment(nll=nll)))
    found = verdict(candidate, evidence())
    assert found.promoted == passed
    json.dumps(found.to_dict(), allow_nan=False)


def test_too_few_workflows_are_no_evidence() -> None:
    few = {
        "workflows": ("w-0",) * 9,
        "moments": {"prefill": moment(workflows=9)},
        "floor": {"prefill": moment(7, workflows=9)},
    }
    assert refused_by(evidence(**few), None) == {"evidence"}
    assert refused_by(evidence(**few), None, evidence=9) == set()


def test_a_horizon_no_workflow_reaches_is_said_and_not_judged() -> None:
    positions = np.full((W, K), POSITIONS)
    positions[:, 2] = 0
    short = MomentEvidence(positions // 2, positions, (0.5, 0.5, math.nan), (0.03, 0.03, math.nan))
    found = verdict(evidence(moments={"prefill": short}, floor={}), evidence(moments={"prefill": short}))
    assert found.promoted
    assert [gate.reason for gate in found.gates if gate.name.endswith("-3")] == ["no position reaches this horizon"] * 3


def test_figures_of_other_traces_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different workflows"):
        verdict(evidence(workflows=tuple("x" * W)), evidence())
    other = dataclasses.replace(moment(), positions=np.full((W, K), 9))
    with pytest.raises(ValueError, match="different positions at prefill, horizon 1"):
        verdict(evidence(), evidence(moments={"prefill": other}))


def test_the_verdict_is_the_contract_of_the_command() -> None:
    found = verdict(evidence(artefact=artefact(500.0)), evidence()).to_dict()
    assert (found["name"], found["version"], found["promoted"]) == ("m", 2, False)
    assert all(gate.keys() == {"name", "passed", "value", "limit", "reason"} for gate in found["gates"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


counts = st.lists(st.tuples(*[st.integers(0, POSITIONS)] * K), min_size=10, max_size=30)


def arbitrary(rows: list[tuple[int, ...]]) -> NextAgentEvidence:
    figures = dataclasses.replace(moment(workflows=len(rows)), correct=np.array(rows))
    return evidence(workflows=tuple(map(str, range(len(rows)))), moments={"prefill": figures}, floor={})


@given(counts)
def test_law_a_candidate_equal_to_the_champion_is_promoted(rows: list[tuple[int, ...]]) -> None:
    assert verdict(arbitrary(rows), arbitrary(rows)).promoted


@given(counts)
def test_law_worse_on_every_workflow_is_refused(rows: list[tuple[int, ...]]) -> None:
    better = [tuple(max(count, 1) for count in row) for row in rows]
    worse = [tuple(count - 1 for count in row) for row in better]
    assert refused_by(arbitrary(worse), arbitrary(better)) == {f"accuracy-prefill-{k}" for k in (1, 2, 3)}
    assert verdict(arbitrary(better), arbitrary(worse)).promoted


@given(counts, counts, st.floats(0, 400), st.integers(0, 3_000_000))
def test_law_promoted_is_all_gates_passed_and_judging_again_says_the_same(
    mine: list[tuple[int, ...]], its: list[tuple[int, ...]], latency_us: float, size_bytes: int
) -> None:
    rows = min(len(mine), len(its))
    candidate = dataclasses.replace(arbitrary(mine[:rows]), artefact=artefact(latency_us, size_bytes))
    found = verdict(candidate, arbitrary(its[:rows]))
    assert found.promoted == all(gate.passed for gate in found.gates) == (not found.refusals)
    assert found == verdict(candidate, arbitrary(its[:rows]))
