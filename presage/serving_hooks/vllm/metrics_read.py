"""The samples of each metric, out of what an engine says of itself. No figure is made here; keys are looked up.

Workflow types come with requests, so anybody may send a new one with each. In samples of live accuracy, coverage and
drift alarms, the types with most judged forecasts keep their names, at most `MOST_TYPES`; the others are one, "other",
whose figures are the means over what was judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Status = Mapping[str, Any]
"""What one engine says; {} where its scheduler is another."""

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and a number."""

Spread = tuple[tuple[str, ...], Mapping[str, int], float]
"""Values of the labels, how many were up to each bound, the last of which is +Inf, and their sum."""

FIELDS: Final = frozenset(
    {
        "workflow_type",
        "workflow_id",
        "agent",
        "session_id",
        "step",
        "workflow_end",
        "extra_args",
        "app_metadata",
        "workflows",
    }
)
"""Of metadata that may be left out; `workflows` are those beyond the most that are kept."""

_STATES: Final = {"prefill states": "prefill", "completion states": "completion"}
_FORECASTS: Final = {"forecast": "next-agent", "forecast of lengths": "remaining-length"}
MOST_TYPES: Final = 50
OTHER: Final = "other"
_SOURCES: Final = ("champion", "back-off", "none")

_Judged = tuple[tuple[str, ...], float, int]
"""Values of the labels, the workflow type first; a share; and of how many."""


def _value(status: Status, path: tuple[str, ...]) -> Any:
    found: Any = status
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def one(*path: str) -> Callable[[Status], Iterator[Sample]]:
    """The number at a place of the status, where there is one."""

    def read(status: Status) -> Iterator[Sample]:
        found = _value(status, path)
        if isinstance(found, int | float):
            yield (), float(found)

    return read


def missing_inputs(status: Status) -> Iterator[Sample]:
    """1 for each kind of model and input that it was promoted with and does not get."""
    for kind, sources in (_value(status, ("inputs", "missing")) or {}).items():
        for source in sources:
            yield (kind, source), 1.0


def each(*path: str, names: Mapping[str, str] | None = None) -> Callable[[Status], Iterator[Sample]]:
    """The numbers of a table of the status, by key; with `names` those keys alone, by these names, 0 if missing."""

    def read(status: Status) -> Iterator[Sample]:
        found = _value(status, path)
        if isinstance(found, Mapping):
            for key in names or found:
                yield (key if names is None else names[key],), float(found.get(key, 0))

    return read


def spread(*path: str) -> Callable[[Status], Iterator[Spread]]:
    """The histogram at a place of the status, where there is one."""

    def read(status: Status) -> Iterator[Spread]:
        found = _value(status, path)
        if isinstance(found, Mapping):
            yield (), found["up_to_s"], found["sum_s"]

    return read


def _counted(status: Status) -> Iterator[tuple[str, str, int]]:
    """What is counted by "of: what"."""
    for name, times in (_value(status, ("counts",)) or {}).items():
        of, _, what = name.partition(": ")
        yield of, what, times


def _is_error(what: str) -> bool:
    """Failures are counted by the name of an exception."""
    return what[:1].isupper() and what.isidentifier()


def forecasts(status: Status) -> Iterator[Sample]:
    """Forecasts by kind of model and who made them."""
    if "counts" in status:
        for counted, kind in _FORECASTS.items():
            for source in _SOURCES:
                yield (kind, source), float(status["counts"].get(f"{counted}: {source}", 0))


def states(status: Status) -> Iterator[Sample]:
    """Hidden states by moment and what became of them."""
    for of, what, times in _counted(status):
        if of in _STATES:
            yield (_STATES[of], what), float(times)


def errors(status: Status) -> Iterator[Sample]:
    """Failures by what has failed and the kind of exception."""
    for of, what, times in _counted(status):
        if _is_error(what):
            yield (of, what), float(times)


def left_out(status: Status) -> Iterator[Sample]:
    """Metadata by field and reason."""
    for of, what, times in _counted(status):
        if of in FIELDS:
            yield (of, what), float(times)


def others(status: Status) -> Iterator[Sample]:
    """Counts that no other metric has."""
    for of, what, times in _counted(status):
        if not (of in FIELDS or of in _STATES or of in _FORECASTS or _is_error(what)):
            yield (f"{of}: {what}" if what else of,), float(times)


def models(status: Status) -> Iterator[Sample]:
    """The model of each kind."""
    for kind, told in (_value(status, ("models",)) or {}).items():
        # A reason why there is none, or an artefact folder, tells of this machine: not for a page without a key.
        reference, _, version = ("none", "", "") if told.startswith("none") else told.partition(", version ")
        if reference != "none" and not reference.startswith("models:/"):
            reference = "folder"
        yield (kind, reference, version), 1.0


def ended(status: Status) -> Iterator[Sample]:
    """Workflows that ended, by how."""
    if "ended" in status:
        yield ("said",), float(status["ended"])
        yield ("silent",), float(status["expired"])


def expected(status: Status) -> Iterator[Sample]:
    """Steps a second that admission expects."""
    for choice, outlook in (_value(status, ("admission", "outlook")) or {}).items():
        yield (choice,), float(outlook["steps_per_s"])


def policies(status: Status) -> Iterator[Sample]:
    """Whether each policy is on."""
    on = _value(status, ("on",))
    if on is not None:
        for policy, is_on in {**on, "prefetch": _value(status, ("prefetch", "on"))}.items():
            yield (policy,), float(is_on is True)


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
