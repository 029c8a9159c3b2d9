"""Gates of routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from presage.datasets.outcomes import Outcomes
from presage.kinds.loaded import Loaded
from presage.predictors.common.artefact import FORMAT_VERSION
from presage.registry.evidence import RouterBudget, RouterComparison, RouterEvidence, judge_router
from presage.registry.gates import Compared, Gate, Interface
from presage.report.data_warnings import figure_warnings
from presage.training.metrics import Estimate
from presage.training.router.baselines import BaseRate
from presage.training.router.evaluate import RouterFigures, compare_routers
from presage.training.router.train import evaluate_router

_TRANSFORMER_MS: Final = 2_000.0
_TRANSFORMER_BYTES: Final = 2_000_000_000


def gates(candidate: Loaded, champion: Loaded | None, data: Outcomes, seed: int, _: str) -> list[Gate]:
    """Gates of order, picks and Brier score (against champion and base rates), calibration, latency and size.

    The input profile has no effect: a router reads prompts only.
    """
    judged = evaluate_router(candidate.predictor, data, seed)
    evaluation, floor = judged.evaluation, BaseRate.name
    against = None
    if champion is not None:
        both = compare_routers(candidate.predictor, champion.predictor, data, seed)
        against = (_interface(champion), _compared("the champion", *both))
    return judge_router(
        RouterEvidence(
            candidate.artefact_evidence(judged.latency_us / 1000, _interface(candidate)),
            labels=evaluation.figures.ranking.labels,
            prompts=evaluation.figures.ranking.prompts,
            ece=evaluation.figures.ranking.ece,
            floor=_compared(
                "the base rates", evaluation.figures, evaluation.baselines[floor], evaluation.differences[floor]
            ),
            warnings=figure_warnings(evaluation.to_dict()),
        ),
        against,
        _budget(candidate.predictor.config.head),
    )


def _interface(loaded: Loaded) -> Interface:
    return Interface({"format version": FORMAT_VERSION}, frozenset(loaded.predictor.models), "models")


def _budget(head: str) -> RouterBudget:
    """The default budget is for a linear router; a transformer gets more time and bytes."""
    if head == "transformer":
        return RouterBudget(latency=_TRANSFORMER_MS, size_bytes=_TRANSFORMER_BYTES)
    return RouterBudget()


def _compared(
    rival: str, mine: RouterFigures, its: RouterFigures, differences: Mapping[str, Estimate]
) -> RouterComparison:
    def of(figure: str, one: float, other: float) -> Compared:
        return Compared(one, other, differences[figure].ci95)

    return RouterComparison(
        rival,
        macro_map=of("macro_map", mine.ranking.macro_map, its.ranking.macro_map),
        picked_accuracy=of("picked_accuracy", mine.picking.picked_accuracy, its.picking.picked_accuracy),
        brier=of("brier", mine.ranking.brier, its.ranking.brier),
    )
