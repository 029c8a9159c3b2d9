"""Gates of next-agent predictors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from presage.kinds.loaded import Loaded
from presage.predictors.common.artefact import FORMAT_VERSION, read_artefact
from presage.predictors.next_agent.predictor import NextAgentPredictor
from presage.registry.evidence import NextAgentBudget, NextAgentEvidence, judge_next_agent
from presage.registry.gates import Gate, Interface
from presage.registry.resolve import resolve
from presage.report.data_warnings import figure_warnings
from presage.training.next_agent.train import NGRAM, OldModel, evaluate_model

if TYPE_CHECKING:
    from presage.registry.connect import Registry

_AGENTS_OF_BUDGET: Final = 30
_BYTES_AN_AGENT: Final = 25_000


def old_model(reference: str, registry: Callable[[], Registry]) -> OldModel:
    """A predictor to train further, from `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder."""
    resolved = resolve(reference, registry)
    called = reference if resolved.version is None else f"models:/{resolved.name}/{resolved.version}"
    return OldModel(NextAgentPredictor.load(resolved.folder), called, read_artefact(resolved.folder).digest)


def gates(candidate: Loaded, champion: Loaded | None, table: pa.Table, seed: int, profile: str) -> list[Gate]:
    """Gates of accuracy (against champion and n-gram), calibration, likelihood, latency and size."""
    mine = _evidence(candidate, table, seed, profile)
    its = None if champion is None else _evidence(champion, table, seed, profile)
    return judge_next_agent(mine, its, _budget(candidate.predictor), seed=seed)


def _budget(predictor: NextAgentPredictor) -> NextAgentBudget:
    """The default budget, which is for thirty agents, plus bytes for each further agent (a column in every table)."""
    usual = NextAgentBudget()
    more = max(0, len(predictor.vocabulary.agents) - _AGENTS_OF_BUDGET)
    return replace(usual, size_bytes=usual.size_bytes + more * _BYTES_AN_AGENT)


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> NextAgentEvidence:
    predictor: NextAgentPredictor = loaded.predictor
    judged = evaluate_model(predictor, table, seed, profile=profile)
    fixed = {"horizon": predictor.horizon, "feature schema": FORMAT_VERSION}
    return NextAgentEvidence(
        loaded.artefact_evidence(judged.latency_us, Interface(fixed)),
        judged.workflows,
        judged.evaluation.moments,
        floor=judged.evaluation.baselines[NGRAM],
        warnings=figure_warnings(judged.evaluation.to_dict()),
    )
