"""Evaluate a router on new topics: leave one benchmark family out, train on the rest, evaluate on it.

A split by prompt has every family on both sides and cannot measure this. Here each family is evaluated with a router
and baselines trained on the other families only, and compared with one training on part of every family.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, outcomes_digest
from presage.datasets.outcomes.split import choose_models, families, split_outcomes
from presage.errors import TraceError
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.training.metrics import json_values
from presage.training.router.baselines import BASELINES, BaseRate, Routes, TfidfLogistic
from presage.training.router.evaluate import differences, judge, lost
from presage.training.router.train import CALIBRATION_FRACTION
from presage.training.sets import TEST_FRACTION
from presage.training.training import Progress

LEAST_PROMPTS: Final = 50

MOST_FAMILIES: Final = 12

RIVALS: Final = (TfidfLogistic.name, BaseRate.name)
OURS: Final = "presage"


@dataclass(frozen=True, eq=False)
class _Answers:
    """Probabilities [n, M] and picks [n] for n prompts by router; those with too little evidence are flagged."""

    outcomes: Outcomes
    predicted: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]
    flagged: NDArray[np.bool_]

    def take(self, rows: NDArray[np.bool_]) -> _Answers:
        predicted = {name: (p[rows], picks[rows]) for name, (p, picks) in self.predicted.items()}
        return _Answers(self.outcomes.take(rows), predicted, self.flagged[rows])


def study_shift(
    outcomes: Outcomes,
    config: RouterConfig | None = None,
    *,
    pattern: str | None = None,
    most: int = MOST_FAMILIES,
    seed: int = 0,
    share: Progress,
) -> dict[str, Any]:
    """Evaluate the router on families left out of its training, against baselines and against known families.

    Args:
        outcomes: with tasks of at least two families.
        config: of the router, with a linear head.
        pattern: regular expression of the family, as in `presage.datasets.outcomes.split.families`.
        most: maximum number of families to leave out, largest first.

    Returns:
        JSON values: "families" {name: {"prompts", "left_out", "known"}} and the same over all families together under
        "pooled". "left_out" and "known" are {"routers": {name: figures}, "flagged": share of prompts without enough
        evidence, "differences": router minus each baseline, "behind": comparisons lost}, or null without prompts.
        "known" is from one training on four fifths of the prompts of every family, evaluated on the others.

    Raises:
        ConfigurationError: an invalid regular expression, or a configuration out of range.
        TraceError: fewer than two families with 50 prompts, too few labels, or a single class.
    """
    config = config or RouterConfig()
    config.check()
    chosen = choose_models(outcomes).outcomes
    names = np.array([name or "" for name in families(chosen.task, pattern)])
    left = _largest(names, most)
    rounds = len(left) + 1
    rows = names[:, None] == np.array(left)
    share("all families known", 0.0)
    known = _answers(*split_outcomes(chosen, TEST_FRACTION, seed), config, seed)
    known_names = np.array([name or "" for name in families(known.outcomes.task, pattern)])
    parts = []
    for index, name in enumerate(left):
        share(f"without {name}", (index + 1) / rounds)
        parts.append(_answers(chosen.take(~rows[:, index]), chosen.take(rows[:, index]), config, seed))
    unknown = _joined(chosen.take(np.concatenate([np.flatnonzero(of) for of in rows.T])), parts)
    unknown_names = np.repeat(left, rows.sum(axis=0))
    share("judging", None)
    return {
        "kind": "study",
        "study": "shift",
        "model": OURS,
        "version": None,
        "families": {
            name: {
                "prompts": int(rows[:, index].sum()),
                "left_out": _judged(unknown.take(unknown_names == name), seed),
                "known": _judged(known.take(known_names == name), seed),
            }
            for index, name in enumerate(left)
        },
        "pooled": {
            "prompts": len(unknown.outcomes),
            "left_out": _judged(unknown, seed),
            "known": _judged(known, seed),
        },
        "data": {
            "prompts": len(chosen),
            "models": len(chosen.models),
            "families left out, one at a time": len(left),
            "families always trained on": len(set(names.tolist()) - {"", *left}),
            "prompts without a family": int((names == "").sum()),
            "seed": seed,
            "digest of the outcomes": f"sha256:{outcomes_digest(chosen)}",
        },
        "config": asdict(config),
    }


def _largest(names: NDArray[np.str_], most: int) -> list[str]:
    """The families to leave out, the largest first."""
    found, counts = np.unique(names[names != ""], return_counts=True)
    order = np.lexsort((found, -counts))
    large = [str(found[i]) for i in order if counts[i] >= LEAST_PROMPTS]
    if len(large) < 2:
        listed = ", ".join(f"{found[i]} ({counts[i]})" for i in order[:5]) or "no task is named"
        raise TraceError(
            f"{len(large)} families of {LEAST_PROMPTS} prompts or more ({listed}); at least 2 are wanted, so that one "
            "can be left out: give outcomes a column `task`, or use --family to give the pattern of a family in it"
        )
    return large[:most]


def _answers(train: Outcomes, test: Outcomes, config: RouterConfig, seed: int) -> _Answers:
    inner, calibration = split_outcomes(train, CALIBRATION_FRACTION, seed + 1)
    groups = families(inner.task)
    ours = RouterPredictor(config, seed).fit(
        inner.prompts, inner.correct, calibration.prompts, calibration.correct, models=train.models, groups=groups
    )
    routers: dict[str, Routes] = {OURS: ours}
    routers |= {name: BASELINES[name]().fit(train.prompts, train.correct) for name in RIVALS}
    predicted = {}
    for name, router in routers.items():
        probabilities = router.probabilities(test.prompts)
        predicted[name] = (probabilities, router.picks(probabilities))
    return _Answers(test, predicted, ours.evidence.far(test.prompts))


def _joined(outcomes: Outcomes, parts: list[_Answers]) -> _Answers:
    """The answers of several trainings, whose prompts in this order are those of `outcomes`."""
    predicted = {
        name: (
            np.concatenate([part.predicted[name][0] for part in parts]),
            np.concatenate([part.predicted[name][1] for part in parts]),
        )
        for name in parts[0].predicted
    }
    return _Answers(outcomes, predicted, np.concatenate([part.flagged for part in parts]))


def _judged(answers: _Answers, seed: int) -> dict[str, Any] | None:
    """Figures of all prompts; None without a label."""
    outcomes = answers.outcomes
    if not len(outcomes) or not outcomes.labels.any():
        return None
    figures = {name: judge(*predicted, outcomes, seed) for name, predicted in answers.predicted.items()}
    against = {name: differences(figures[OURS], figures[name], seed) for name in RIVALS}
    listed = ("macro_map", "macro_map_ci95", "ece", "brier", "brier_ci95", "picked_accuracy", "picked_accuracy_ci95")
    whole = {name: of.to_dict() for name, of in figures.items()}
    return json_values(
        {
            "prompts": len(outcomes),
            "routers": {name: {figure: of[figure] for figure in listed} for name, of in whole.items()},
            "best_single": whole[OURS]["best_single"],
            "flagged": float(answers.flagged.mean()),
            "differences": against,
            "behind": lost({name: figures[name] for name in RIVALS}, against),
        }
    )
