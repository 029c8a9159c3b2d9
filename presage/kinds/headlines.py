"""The headline figures of each kind, by title, from the figures of a registered version; light, for listings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

from presage.features.input_profiles import ALL_INPUTS
from presage.report.blocks import number

Figures = Mapping[str, float]


def next_agent(figures: Figures) -> dict[str, str]:
    """Accuracy at each step ahead, by moment."""
    shown = {}
    for moment in ("prefill", "completion"):
        ahead = takewhile(figures.__contains__, (f"{moment}_accuracy_{k}" for k in count(1)))
        shown[moment] = " ".join(number(figures[name]) for name in ahead) or "–"
        every = figures.get(f"{ALL_INPUTS}{moment}_accuracy_1")
        shown[moment] += f" (all inputs: {number(every)})" if every is not None else ""
    return shown


def lengths(figures: Figures) -> dict[str, str]:
    """Order and loss, of remaining lengths and of context growth."""
    losses = sorted((float(name.removeprefix("pinball_")), name) for name in figures if name.startswith("pinball_"))
    return {
        "tau distance": " ".join(number(figures.get(f"tau_distance_{scope}")) for scope in ("all", "arrival"))
        + (f" (all inputs: {number(every)})" if (every := figures.get(f"{ALL_INPUTS}tau_distance_all")) else ""),
        "pinball": ", ".join(f"{q:g}: {number(figures[name], 1)}" for q, name in losses) or "–",
    }


def returns(figures: Figures) -> dict[str, str]:
    """Loss of the median, coverage, and the forecast of END."""
    return _named(figures, {"pinball 0.5": "pinball_0.5", "within 0.9": "coverage_0.9", "END Brier": "end_brier"})


def profile(figures: Figures) -> dict[str, str]:
    """Coverage, accuracy and recall of two."""
    return _named(figures, {name: name for name in ("coverage", "accuracy", "top2")})


def router(figures: Figures) -> dict[str, str]:
    """Average precision, calibration, and what the picks are worth."""
    names = {"macro mAP": "macro_map", "ECE": "ece", "picked": "picked_accuracy", "best single": "best_single"}
    return _named(figures, names)


def _named(figures: Figures, names: Mapping[str, str]) -> dict[str, str]:
    return {called: number(figures.get(name)) for called, name in names.items()}
