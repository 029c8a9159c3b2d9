"""Gates of the kinds that forecast quantiles: remaining lengths, context growth and return times."""

from __future__ import annotations

import pyarrow as pa

from presage.kinds.loaded import Loaded
from presage.predictors.common.artefact import FORMAT_VERSION
from presage.registry.evidence import LengthBudget, LengthEvidence, judge_lengths
from presage.registry.gates import Gate, Interface
from presage.training.quantiles import FLOOR


def gates(candidate: Loaded, champion: Loaded | None, table: pa.Table, seed: int, profile: str) -> list[Gate]:
    """Gates of order and loss (against champion and best constant), coverage, latency and size."""
    mine = _evidence(candidate, table, seed, profile)
    its = None if champion is None else _evidence(champion, table, seed, profile)
    return judge_lengths(mine, its, LengthBudget(unit=candidate.predictor.unit), seed=seed)


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> LengthEvidence:
    predictor = loaded.predictor
    judged = loaded.kind.evaluate(predictor, table, seed, profile=profile)
    target = {"target": predictor.target} if hasattr(predictor, "target") else {}
    return LengthEvidence(
        loaded.artefact_evidence(judged.latency_us, Interface({**target, "format version": FORMAT_VERSION})),
        tuple(predictor.quantiles),
        judged.workflows,
        judged.evaluation.type_of,
        judged.evaluation.figures,
        floor=judged.evaluation.baselines[FLOOR],
    )
