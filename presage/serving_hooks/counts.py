"""Counters of an engine with labels: each is declared here once, counted by values, and exported by its name.

`EventCounts.add` is type-checked: where the values are a closed set, it takes only a value of that set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Generic, Literal, TypeVarTuple, get_args

from presage.features.moment import Moment
from presage.predictor_kinds import KINDS, ServedKind
from presage.predictors.common.forecast import Source

Labels = TypeVarTuple("Labels")

ModelKind = ServedKind

MOST_TYPES: Final = 50
"""Workflow types that have figures of their own on the `/metrics` page, since clients choose their names freely."""
OTHER: Final = "other"
"""All further ones together."""

MetadataField = Literal[
    "workflow_type", "workflow_id", "agent", "session_id", "step", "workflow_end", "extra_args", "app_metadata",
    "agentic_context", "metadata", "extra_body", "workflows",
]  # fmt: skip
"""`workflows`: the table of running workflows is full, so the request is served as one without a workflow."""

Part = Literal[
    "priority", "eviction", "admission", "prefetch", "bookkeeping of workflows", "forecasts of next agents",
    "forecasts of remaining tokens", "forecasts of contexts", "forecasts of return times",
    "reload of models", "status of models", "recorder", "step times", "identity", "demand of models",
    "prefill ahead", "lifecycle events", "overview", "presage",
]  # fmt: skip
"""Parts that fail independently; `presage_errors_total` counts failures by part."""

AdmissionChange = Literal["held", "paused", "restored", "let in"]
Reason = Literal[
    "missing", "misspelt", "misplaced", "wrong type", "too long", "not printable", "no number from 0",
    "neither true nor false", "too many", "too many of one tenant", "without a key",
]  # fmt: skip
"""`misspelt`, `misplaced`: the request has no such name where names are read, but a key elsewhere that resembles it."""
RecorderEvent = Literal[
    "written", "dropped", "lost", "lost with its file", "failed", "not recorded", "row not written",
    "not written at once", "clock", "state", "state never came", "state not finite", "state of another width",
    "text not kept", "text failed", "text of another type",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class CounterMetric(Generic[*Labels]):
    """One counter of the `/metrics` page, counted by `EventCounts`.

    Attributes:
        name: in Prometheus, ending in `_total`.
        labels: names of the labels, after `engine`, which all metrics have: one for each value that it is counted by,
            or a single one whose value is the `key`.
        key: key of a count in the JSON status, made of the values it is counted by; for display, never parsed.
        from_zero: label values exported as 0 before anything is counted, so that a rate is defined from the start.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    key: Callable[[*Labels], str] = "{}: {}".format
    from_zero: tuple[tuple[*Labels], ...] = ()


@dataclass(frozen=True)
class LabelledCount:
    """A count of one metric; the values of `labels` are in the order of the metric's label names."""

    labels: tuple[str, ...]
    count: int


class EventCounts:
    """Counts by metric and values; `metrics` are exported before the first event. One thread counts; any may read.

    Attributes:
        examples: by values, of the first of those that were counted with one.
    """

    def __init__(self, *metrics: CounterMetric[*tuple[Any, ...]]) -> None:
        self._counts: Counter[tuple[CounterMetric[*tuple[Any, ...]], tuple[Any, ...]]] = Counter()
        self._metrics = metrics
        self.examples: dict[tuple[Any, ...], str] = {}

    def add(self, metric: CounterMetric[*Labels], *values: *Labels, times: int = 1, example: str | None = None) -> int:
        """Counts an event; returns how often it has been counted."""
        self._counts[metric, values] = total = self._counts[metric, values] + times
        if example is not None:
            self.examples.setdefault(values, example)
        return total

    def __add__(self, other: EventCounts) -> EventCounts:
        """Both counts together, as a copy."""
        both = EventCounts(*self._metrics)
        both._counts.update(dict(self._counts))
        both._counts.update(dict(other._counts))
        return both

    def by_key(self) -> dict[str, int]:
        """All counts by their keys in the JSON status."""
        return {metric.key(*values): times for (metric, values), times in dict(self._counts).items()}

    def samples(self) -> list[tuple[CounterMetric[*tuple[Any, ...]], list[str], int]]:
        """(metric, values of its labels, count) of each count."""
        return [
            (
                metric,
                [str(one) for one in values] if len(values) == len(metric.labels) else [metric.key(*values)],
                times,
            )
            for (metric, values), times in dict(self._counts).items()
        ]

    def by_metric(self) -> dict[str, list[LabelledCount]]:
        """All counts by the names of their metrics."""
        found: dict[str, list[LabelledCount]] = {metric.name: [] for metric in self._metrics}
        for metric, labels, times in self.samples():
            found.setdefault(metric.name, []).append(LabelledCount(tuple(labels), times))
        return found


FORECASTS: Final = CounterMetric[ModelKind, Source](
    "presage_forecasts_total",
    ("kind", "source"),
    "Forecasts, by kind of model and by source: champion, workflow profile, back-off counts, or none.",
    lambda kind, source: str(KINDS[kind].counted).format(source),
    tuple(
        (kind, source)
        for kind, source in product(get_args(ModelKind), get_args(Source))
        if source != "profile" or kind == "next-agent"
    ),
)
HIDDEN_STATES: Final = CounterMetric[Moment, Literal["used", "late", "missing"]](
    "presage_hidden_states_total",
    ("moment", "outcome"),
    "Hidden states of steps: used, late or missing.",
    "{} states: {}".format,
)
ADMISSION_DECISIONS: Final = CounterMetric[Literal["all", "held"]](
    "presage_admission_decisions_total",
    ("decision",),
    "Decisions of admission: all of them, and those that held a workflow back.",
    lambda decision: {"all": "decisions", "held": "decisions that held somebody"}[decision],
    (("all",), ("held",)),
)
ADMISSION_CHANGES: Final = CounterMetric[AdmissionChange](
    "presage_admission_changes_total",
    ("change",),
    "Workflows that admission held, paused while their tool ran, restored, or let in since nothing ran.",
    lambda change: "let in, since nothing ran" if change == "let in" else change,
    (("held",), ("paused",), ("restored",), ("let in",)),
)
DEADLINES: Final = CounterMetric[Literal["met", "missed"]](
    "presage_workflow_deadlines_total",
    ("outcome",),
    "Workflows with a deadline that have ended, but were not aborted, by whether they met it.",
    lambda outcome: f"deadline {outcome}",
    (("met",), ("missed",)),
)
ERRORS: Final = CounterMetric[Part, str](
    "presage_errors_total",
    ("what", "reason"),
    "Failures in our code, by what has failed and the kind of exception; all but the first follow from the first.",
)
IDENTITIES: Final = CounterMetric[str, str](
    "presage_gateway_identities_total",
    ("workflow", "agent"),
    "Requests of the gateway, by what identified their workflow and by what identified their agent.",
    "identity: workflow by {}, agent by {}".format,
)
METADATA_LEFT_OUT: Final = CounterMetric[MetadataField, Reason](
    "presage_metadata_left_out_total",
    ("field", "reason"),
    "Metadata of requests that was left out, by field and reason.",
)
EVENTS: Final = CounterMetric[str](
    "presage_events_total",
    ("event",),
    "What else an engine counts, by its name in the status.",
    str,
)
_RECORDER_KEYS: Final[dict[RecorderEvent, str]] = {
    "lost with its file": "lost: {} in a file that was removed",
    "state never came": "{} that never came",
    "state not finite": "{} not kept: NaN, infinity or past ±65504",
    "state of another width": "{} not kept: of another width",
    "text failed": "text not kept: decoding or redaction failed with {}",
    "text of another type": "text not kept: redaction gave {}, no str",
}
RECORDER: Final = CounterMetric[RecorderEvent, str](
    "presage_recorder_total",
    ("event",),
    "What the recorder wrote, and what it did not, by reason.",
    lambda event, what: _RECORDER_KEYS.get(event, event + ": {}").format(what),
)
"""The second value is the table, column, kind of exception or reason."""
