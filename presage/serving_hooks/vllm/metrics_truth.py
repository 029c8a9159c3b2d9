"""Live accuracy, coverage and drift alarms as samples, of a bounded number of workflow types.

Workflow types come with requests, so anybody may send a new one with each. The types of which most was judged keep
their names, at most `MOST_TYPES`; the others are one, "other", whose figures are the means over what was judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from presage.serving_hooks.vllm.metrics_read import Sample, Status

MOST_TYPES: Final = 50
OTHER: Final = "other"

_Judged = tuple[tuple[str, ...], float, int]
"""Values of the labels, the workflow type first; a share; and of how many."""


def accuracies(status: Status) -> Iterator[Sample]:
    """By workflow type, model, moment and steps ahead."""
    return _bounded(list(_accuracies(status)))


def coverages(status: Status) -> Iterator[Sample]:
    """By workflow type, model and quantile."""
    return _bounded(list(_coverages(status)))


def alarms(status: Status) -> Iterator[Sample]:
    """1 for each workflow type whose alarm stands."""
    standing = sorted((status.get("truth") or {}).get("alarms", ()))
    for name in standing[:MOST_TYPES]:
        yield (name,), 1.0
    if len(standing) > MOST_TYPES:
        yield (OTHER,), 1.0


def _figures(status: Status) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Workflow type, model, and what is said of them."""
    for name, models in (status.get("truth") or {}).get("workflow_types", {}).items():
        for model, figures in models.items():
            yield name, model, figures


def _accuracies(status: Status) -> Iterator[_Judged]:
    for name, model, figures in _figures(status):
        for moment, of in figures.get("moments", {}).items():
            for k, (accuracy, positions) in enumerate(zip(of["accuracy"], of["positions"], strict=True)):
                if accuracy is not None:
                    yield (name, model, moment, str(k + 1)), accuracy, positions


def _coverages(status: Status) -> Iterator[_Judged]:
    for name, model, figures in _figures(status):
        for quantile, share in figures.get("coverage", {}).items():
            yield (name, model, quantile), share, figures["steps"]


def _bounded(judged: list[_Judged]) -> Iterator[Sample]:
    of_type: dict[str, int] = defaultdict(int)
    for labels, _, times in judged:
        of_type[labels[0]] += times
    kept = set(sorted(of_type, key=lambda name: (-of_type[name], name))[:MOST_TYPES])
    right: dict[tuple[str, ...], float] = defaultdict(float)
    total: dict[tuple[str, ...], int] = defaultdict(int)
    for labels, share, times in judged:
        key = labels if labels[0] in kept else (OTHER, *labels[1:])
        right[key] += share * times
        total[key] += times
    for key, times in total.items():
        if times:
            yield key, right[key] / times
