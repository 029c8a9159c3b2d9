"""Verdicts: hand-computed figures, and laws that hold for any figures."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.features.moment import MOMENTS, Moment
from presage.predictors.common.bootstrap import MomentCounts
from presage.registry.evidence import (
    NextAgentBudget,
    NextAgentEvidence,
    judge_next_agent,
)
from presage.registry.gates import ArtefactEvidence, Interface, Verdict, sampling_ece, types_gate

W, K, POSITIONS = 40, 3, 10


def moment(correct: int = 8, *, workflows: int = W, nll: float = 0.5, ece: float = 0.03) -> MomentCounts:
    """The same figures in each workflow, so intervals have no width."""
    gaps = np.zeros((workflows, K, 15))
    gaps[:, :, 7] = ece * POSITIONS
    return MomentCounts(
        correct=np.full((workflows, K), correct),
        positions=np.full((workflows, K), POSITIONS),
        nll=(nll,) * K,
        ece=(ece,) * K,
        workflow=np.repeat(np.arange(workflows), POSITIONS),
        surprise=np.full((workflows * POSITIONS, K), nll),
        bin_gaps=gaps,
    )


def nll_by_workflow(nll: np.ndarray) -> MomentCounts:
    """Likelihoods that differ by workflow, `[W]`."""
    surprise = np.repeat(np.repeat(nll, POSITIONS)[:, None], K, axis=1)
    return dataclasses.replace(moment(), nll=(float(nll.mean()),) * K, surprise=surprise)


def both(figures: MomentCounts) -> dict[Moment, MomentCounts]:
    return dict.fromkeys(MOMENTS, figures)


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


def interface(horizon: int = K, version: int = 1) -> Interface:
    return Interface({"horizon": horizon, "feature schema": version})


def verdict(candidate: NextAgentEvidence, champion: NextAgentEvidence | None, **budget: Any) -> Verdict:
    return Verdict("m", 2, tuple(judge_next_agent(candidate, champion, NextAgentBudget(**budget), seed=0)))


def refused_by(candidate: NextAgentEvidence, champion: NextAgentEvidence | None, **budget: Any) -> set[str]:
    return {gate.name for gate in verdict(candidate, champion, **budget).refusals}


def test_a_candidate_equal_to_the_champion_passes_and_says_why() -> None:
    found = verdict(evidence(), evidence())
    assert found.promoted
    named = {gate.name: gate for gate in found.gates}
    assert [named["accuracy-prefill-1"].value, named["accuracy-prefill-1"].limit] == [0.0, pytest.approx(-0.008)]
    assert "0.8000 against the champion's 0.8000 on 400 positions" in named["accuracy-prefill-1"].reason
    assert named["floor-completion-3"].value == pytest.approx(0.1)
    assert {"evidence", "schema", "latency", "size", "pickle"} < named.keys()
    assert sum(name.startswith(("accuracy", "floor", "calibration", "nll")) for name in named) == 5 * 2 * K


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


def test_a_smaller_artefact_is_no_offence() -> None:
    assert verdict(evidence(artefact=artefact(size_bytes=1)), evidence()).promoted


@pytest.mark.parametrize(
    ("ece", "champion", "refusing"),
    [(0.17, 0.17, ""), (0.19, 0.19, "calibration-"), (0.079, 0.03, ""), (0.081, 0.03, "calibration-champion-")],
)
def test_calibration_is_held_against_a_limit_and_the_champion(ece: float, champion: float, refusing: str) -> None:
    # 400 positions in 15 bins: sampling alone explains 0.0773, so the limit is .1773.
    assert sampling_ece(400) == pytest.approx(0.0773, abs=1e-4)
    names = {f"{refusing}{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)} if refusing else set()
    assert refused_by(evidence(moments=both(moment(ece=ece))), evidence(moments=both(moment(ece=champion)))) == names


def test_calibration_is_held_against_the_champion_by_the_interval() -> None:
    """A mean error .06 above the champion's is no reason to refuse if it comes from a few workflows."""
    worse = moment(ece=0.09)
    worse.bin_gaps[:] = 0.0
    worse.bin_gaps[:2, :, 7] = 0.09 * POSITIONS * W / 2
    found = verdict(evidence(moments=both(worse)), evidence(moments=both(moment(ece=0.03))))
    gate = next(gate for gate in found.gates if gate.name == "calibration-champion-prefill-1")
    assert gate.passed
    assert "0.0900 against the champion's 0.0300, lower is better: difference +0.0600" in gate.reason


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
    candidate = evidence(moments=both(moment(nll=nll)))
    found = verdict(candidate, evidence())
    assert found.promoted == passed
    json.dumps(found.to_dict(), allow_nan=False)


def test_likelihood_is_held_against_the_champion_by_the_paired_interval() -> None:
    """The same mean difference of .1 nats refuses if every workflow has it, and passes if two workflows have it all."""
    hard = np.linspace(0.1, 2.0, W)  # how hard workflows are, which both share
    few = hard + np.where(np.arange(W) < 2, 0.1 * W / 2, 0.0)
    names = {f"nll-{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)}
    champion = evidence(moments=both(nll_by_workflow(hard)))
    assert refused_by(evidence(moments=both(nll_by_workflow(hard + 0.1))), champion) == names
    found = verdict(evidence(moments=both(nll_by_workflow(few))), champion)
    assert found.promoted
    reason = next(gate.reason for gate in found.gates if gate.name == "nll-prefill-1")
    assert "1.1500 against the champion's 1.0500 nats a position, lower is better: difference +0.1000, 95 %" in reason


def test_the_first_champion_has_the_likelihood_of_counting_as_rival() -> None:
    worse = evidence(moments=both(moment(nll=0.6)))
    assert refused_by(worse, None) == {f"nll-{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)}
    assert "the best n-gram's 0.5000" in verdict(worse, None).refusals[0].reason


def test_likelihoods_are_compared_over_the_outcomes_that_both_know() -> None:
    """An agent that is new to the champion counts for neither, however sure the candidate is of it."""
    its, mine = moment(nll=0.5), moment(nll=0.5)
    its.surprise[::POSITIONS] = np.nan
    mine.surprise[::POSITIONS] = 5.0
    found = verdict(evidence(moments=both(mine)), evidence(moments=both(its)))
    assert found.promoted
    its.surprise[:] = np.nan
    unknown = verdict(evidence(moments=both(mine)), evidence(moments=both(its)))
    assert "the champion knows none of these outcomes" in next(g.reason for g in unknown.gates if "nll" in g.name)


def test_a_lead_of_the_champion_below_a_hundredth_of_its_figure_is_no_reason_to_refuse() -> None:
    """As between two seeds: each of a thousand workflows has one error more or fewer in a hundred and fifty."""
    positions = np.full((W, K), 150)
    its, mine = (
        dataclasses.replace(moment(), correct=np.full((W, K), right), positions=positions) for right in (120, 119)
    )
    worse = dataclasses.replace(mine, correct=np.full((W, K), 118))
    champion = evidence(moments=both(its), floor={})
    assert verdict(evidence(moments=both(mine), floor={}), champion).promoted  # 119 of 120 is less than a hundredth
    assert refused_by(evidence(moments=both(worse), floor={}), champion) == {
        f"accuracy-{at}-{k}" for at in ("prefill", "completion") for k in (1, 2, 3)
    }


def test_warnings_are_told_and_refuse_nothing() -> None:
    found = verdict(evidence(warnings={"perfect-prefill": "all are right"}), evidence())
    assert found.promoted
    assert [(gate.name, gate.result) for gate in found.warnings] == [("perfect-prefill", "warning")]
    assert [gate["name"] for gate in found.to_dict()["gates"] if gate["warning"]] == ["perfect-prefill"]


def test_a_workflow_type_that_would_be_lost_refuses_and_the_remedy_is_named() -> None:
    gate = types_gate("ac", "abd", "a", None)
    assert not gate.passed
    assert "does not know 2 workflow types (b, d) that the champion knows" in gate.reason
    assert "train it on traces that have them too" in gate.reason
    assert "with --types a it is judged on these alone" in gate.reason


def test_a_workflow_type_is_given_up_on_purpose_with_a_warning() -> None:
    gate = types_gate("a", "ab", "a", ["a"])
    assert (gate.passed, gate.warning) == (True, True)
    assert "gives up 1 workflow type (b) that the champion knows" in gate.reason
    assert not types_gate("a", "ab", "a", ["a", "b"]).passed, "a type that was asked for"
    assert not types_gate("a", "", "ax", ["x"]).passed, "no champion knows it either"


def test_new_workflow_types_are_no_offence_and_those_not_judged_are_named() -> None:
    assert types_gate("abc", "ab", "abc", None).result == "passed"
    gate = types_gate("abc", "ab", "ab", None)
    assert (gate.passed, gate.warning) == (True, True)
    assert "not judged on 1 workflow type (c)" in gate.reason


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
    nll, ece = (0.5, 0.5, math.nan), (0.03, 0.03, math.nan)
    short = dataclasses.replace(moment(), correct=positions // 2, positions=positions, nll=nll, ece=ece)
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
    assert all(gate.keys() == {"name", "passed", "value", "limit", "reason", "warning"} for gate in found["gates"])
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
