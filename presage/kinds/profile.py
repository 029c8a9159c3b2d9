"""Gates of profiles."""

from __future__ import annotations

import pyarrow as pa

from presage.kinds.loaded import Loaded
from presage.predictors.common.artefact import FORMAT_VERSION
from presage.registry.evidence import ProfileBudget, ProfileEvidence, judge_profile
from presage.registry.gates import Gate, Interface
from presage.training.profile.train import evaluate_profiles


def gates(candidate: Loaded, champion: Loaded | None, data: pa.Table, seed: int, profile: str) -> list[Gate]:
    """Gates of coverage and accuracy. The input profile has no effect: a profile reads agents and their order."""
    mine = _evidence(candidate, data, seed)
    its = None if champion is None else _evidence(champion, data, seed)
    return judge_profile(mine, its, ProfileBudget(), seed=seed)


def _evidence(loaded: Loaded, data: pa.Table, seed: int) -> ProfileEvidence:
    judged = evaluate_profiles(loaded.predictor, data, seed)
    counts, profiles = judged.evaluation.counts, loaded.predictor.profiles
    return ProfileEvidence(
        loaded.artefact_evidence(judged.latency_us, Interface({"format version": FORMAT_VERSION})),
        judged.workflows,
        counts.covered,
        counts.whole,
        counts.correct,
        counts.positions,
        {name: profile.doubts for name, profile in profiles.items()},
    )
