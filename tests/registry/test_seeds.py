"""Another seed on the same data is no reason to refuse; a candidate that is worse is refused all the same."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from presage.datasets.synthetic.workflows import generate
from presage.kinds.loaded import Loaded
from presage.kinds.next_agent import gates as gates_of
from presage.predictor_kinds import KINDS
from presage.training.next_agent.train import fit_predictor

SEEDS = 2
MACHINE = {"latency"}
"""A gate that depends on what else the machine does."""


def trained(table: pa.Table, seed: int, folder: Path) -> Loaded:
    predictor = fit_predictor(table, seed=seed, states="none").predictor
    predictor.save(folder, {"digest": "sha256:none"})
    return Loaded(folder, KINDS["next-agent"], predictor, None, None, str(folder))


def refused_by(candidate: Loaded, champion: Loaded | None, held: pa.Table) -> set[str]:
    gates = gates_of(candidate, champion, held, 0, "engine")
    return {gate.name for gate in gates if not gate.passed} - MACHINE


@pytest.mark.slow
def test_property_candidates_that_differ_by_seed_alone_are_promoted(tmp_path: Path) -> None:
    """With bare comparisons, and intervals without a margin, six of the first twenty were refused."""
    learnt, held = (generate("retry", workflows, seed, state_size=16).table for workflows, seed in ((200, 0), (400, 1)))
    champion = trained(learnt, 0, tmp_path / "champion")
    refused = {}
    for seed in range(1, SEEDS + 1):
        if names := refused_by(trained(learnt, seed, tmp_path / f"seed-{seed}"), champion, held):
            refused[seed] = names
    assert refused == {}

    few = generate("retry", 20, 2, state_size=16).table
    names = refused_by(trained(few, 0, tmp_path / "few"), champion, held)
    assert any(name.startswith("accuracy-") for name in names), "a version that learnt from 20 workflows is worse"
    assert any(name.startswith("nll-") for name in names)
