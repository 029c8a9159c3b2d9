"""How accurate is the router on benchmark families that its training never saw?

A split by prompt has every family on both sides and cannot measure this. Here each family is left out in turn: router
and baselines train on the others, and are judged on it. For comparison, one training has part of every family. Each
family left out costs a training; families of fewer than 50 prompts are never left out. Intervals are 95 %,
bootstrapped over prompts; differences are paired.

    python benchmarks/router_shift.py OUTCOMES [--family '^[^_]+'] [--most 12] [--seed 0]

Prints tables and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.datasets.outcomes import Outcomes, outcomes_digest
from presage.datasets.outcomes.files import read_outcomes
from presage.datasets.outcomes.split import choose_models, families, split_outcomes
from presage.errors import InputError, TraceError
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.report.blocks import interval, number
from presage.training.metrics import json_values
from presage.training.router.baselines import BASELINES, BaseRate, Routes, TfidfLogistic
from presage.training.router.evaluate import differences, judge, lost
from presage.training.router.train import CALIBRATION_FRACTION
from presage.training.sets import TEST_FRACTION

LEAST_PROMPTS: Final = 50

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


def study(outcomes: Outcomes, *, pattern: str | None, most: int, seed: int) -> dict[str, Any]:
    """Figures of each family, and of all together under "pooled": {"prompts", "left_out", "known"}.

    "left_out" and "known" are as `_judged` says; "known" is from one training on four fifths of the prompts of every
    family, evaluated on the others. `pattern` is as in `presage.datasets.outcomes.split.families`.

    Raises:
        ConfigurationError: an invalid regular expression.
        TraceError: fewer than two families with 50 prompts, too few labels, or a single class.
    """
    chosen = choose_models(outcomes).outcomes
    names = np.array([name or "" for name in families(chosen.task, pattern)])
    left = _largest(names, most)
    rows = names[:, None] == np.array(left)
    print("all families known", file=sys.stderr)
    known = _answers(*split_outcomes(chosen, TEST_FRACTION, seed), seed)
    known_names = np.array([name or "" for name in families(known.outcomes.task, pattern)])
    parts = []
    for index, name in enumerate(left):
        print(f"without {name}", file=sys.stderr)
        parts.append(_answers(chosen.take(~rows[:, index]), chosen.take(rows[:, index]), seed))
    unknown = _joined(chosen.take(np.concatenate([np.flatnonzero(of) for of in rows.T])), parts)
    unknown_names = np.repeat(left, rows.sum(axis=0))
    return {
        "benchmark": "router_shift",
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


def _answers(train: Outcomes, test: Outcomes, seed: int) -> _Answers:
    inner, calibration = split_outcomes(train, CALIBRATION_FRACTION, seed + 1)
    groups = families(inner.task)
    ours = RouterPredictor(RouterConfig(), seed).fit(
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
    """Figures of all prompts; None without a label.

    {"routers": {name: figures}, "flagged": share of prompts without enough evidence, "differences": router minus each
    baseline, "behind": comparisons lost}.
    """
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


def _show(found: dict[str, Any]) -> None:
    pooled = found["pooled"]
    routers = list(pooled["left_out"]["routers"])
    print(f"{' / '.join(routers)}; flagged: share of prompts that the router marks as having too little evidence\n")
    print("| family left out | prompts | macro mAP | ECE | picked accuracy | flagged |")
    print("|---|---|---|---|---|---|")
    rows = {name: of["left_out"] for name, of in found["families"].items()}
    rows |= {"all of them": pooled["left_out"], "with all families known": pooled["known"]}
    for name, of in rows.items():
        print(f"| {name} | {' | '.join(_cells(of, routers))} |")
    first = next(iter(pooled["left_out"]["differences"].values()))
    print(f"\n| all families, paired 95 % intervals | {' | '.join(first)} |\n|---|{'---|' * len(first)}")
    for called, key in (("left out", "left_out"), ("known", "known")):
        for name, of in pooled[key]["differences"].items():
            cells = [interval(by["difference"], by["ci95"]) for by in of.values()]
            print(f"| {called}, router minus {name} | {' | '.join(cells)} |")
    for one in pooled["left_out"]["behind"]:
        print(f"\nLOST: {one['baseline']} is better {one['at']} by {one['by']:.4f} on new families")


def _cells(of: dict[str, Any] | None, routers: list[str]) -> list[str]:
    if of is None:
        return ["0", "–", "–", "–", "–"]
    figures = [
        " / ".join(number(of["routers"][name][key]) for name in routers)
        for key in ("macro_map", "ece", "picked_accuracy")
    ]
    return [str(of["prompts"]), *figures, number(of["flagged"], 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcomes", type=Path, nargs="+", help="files or folders, as for train-predictor router")
    parser.add_argument("--family", metavar="REGEX", help="of the family in a task: its first group, or the match")
    parser.add_argument("--most", type=int, default=12, help="families to leave out, the largest first")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    try:
        outcomes = read_outcomes(chosen.outcomes).outcomes
        found = study(outcomes, pattern=chosen.family, most=chosen.most, seed=chosen.seed)
    except InputError as error:
        sys.exit(f"router_shift: {error}")
    _show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
