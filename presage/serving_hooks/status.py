"""The status that an engine reports about the hooks, parsed from the JSON of `GET /v1/workflows/status`.

`/metrics` and `presage status` read this and nothing else. A section that an engine does not report is None; keys that
are not declared here are ignored, so the two sides of a connection may run different versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from presage.serving_hooks.counts import CounterMetric


@dataclass(frozen=True)
class LabelledCount:
    """A count of one metric; the values of `labels` are in the order of the metric's label names."""

    labels: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class ModelStatus:
    """The model of one kind: a registry URI with its version or a folder, and the reason if it is not loaded."""

    reference: str | None = None
    version: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"none: {self.reason}"
        return str(self.reference) if self.version is None else f"{self.reference}, version {self.version}"


@dataclass(frozen=True)
class PrefetchStatus:
    """Prefetches and tokens of whole blocks by outcome; memory of earlier prompts (None without prefetch)."""

    on: bool = False
    started: int = 0
    aborted: int = 0
    refused: int = 0
    tokens: int = 0
    used_tokens: int = 0
    wasted_tokens: int = 0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class PromptStatus:
    """Prompt tokens of steps that have begun, and of these the ones found in the cache or loaded by a connector."""

    tokens: int = 0
    local_tokens: int = 0
    external_tokens: int = 0


@dataclass(frozen=True)
class AgeingStatus:
    """Requests moved up a level after waiting, and down a level after their quantum."""

    promoted: int = 0
    demoted: int = 0


@dataclass(frozen=True)
class OutlookStatus:
    """Where admission expects so many open workflows to settle: steps a second, and share of their contexts lost."""

    workflows: int
    steps_per_s: float
    miss_share: float = 0.0


@dataclass(frozen=True)
class SecondsStatus:
    """Histogram of seconds: cumulative counts by upper bound (the last is `+Inf`)."""

    up_to_s: Mapping[str, int]
    sum_s: float


@dataclass(frozen=True)
class AdmissionStatus:
    """Workflows and requests held back now, and for how long so far; see `AdmissionController.status`."""

    held: int = 0
    held_requests: int = 0
    paused: int = 0
    held_s: float = 0.0
    longest_held_s: float = 0.0
    held_times: SecondsStatus | None = None
    outlook: Mapping[str, OutlookStatus] | None = None
    recomputing_share: float = 0.0
    overdue: int = 0


@dataclass(frozen=True)
class RecorderStatus:
    """Whether the recorder works, and whether it loses most steps."""

    on: bool = False
    losing: bool = False


@dataclass(frozen=True)
class InputStatus:
    """Steps and the inputs that came with them; by kind of model, the inputs of its promotion that never came."""

    counts: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReloadStatus:
    """Number of times that newer models went live while the engine ran, and by kind the version on its way."""

    renewed: int = 0
    loading: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentAccuracy:
    """Share of forecasts whose likeliest agent was right, and how many were judged, by steps ahead."""

    accuracy: tuple[float | None, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class LiveFigures:
    """Live figures of one workflow type and model: accuracy by moment, coverage by quantile."""

    moments: Mapping[str, AgentAccuracy] = field(default_factory=dict)
    coverage: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class PromisedFigure:
    """A promised figure beside the live one, each mean, low, high of 95 %, and the workflows behind the live one."""

    promised: tuple[float, float, float]
    live: tuple[float, float, float]
    workflows: int


@dataclass(frozen=True)
class CauseStatus:
    """A likely cause of figures that are not as promised, and what mends it."""

    text: str
    mend: str


@dataclass(frozen=True)
class PromiseStatus:
    """Whether the promised figures of a workflow type hold; see `Drift.promised`."""

    figures: Mapping[str, PromisedFigure] = field(default_factory=dict)
    kept: bool | None = None
    causes: tuple[CauseStatus, ...] = ()


@dataclass(frozen=True)
class AgainstCountsStatus:
    """Accuracy of the predictor and of online counts at the same latest steps; see `StandBack`."""

    steps: int
    model: float
    counts: float
    stands_back: bool


@dataclass(frozen=True)
class MonitorStatus:
    """Forecasts against outcomes, by workflow type: standing drift alarms, promises, and live figures by model."""

    alarms: Mapping[str, Any] = field(default_factory=dict)
    raised: int = 0
    promised: Mapping[str, PromiseStatus] = field(default_factory=dict)
    against_counts: Mapping[str, AgainstCountsStatus] = field(default_factory=dict)
    workflow_types: Mapping[str, Mapping[str, LiveFigures]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReturnFigures:
    """Judged returns and those within, by quantile; the sum of |ln(time / median)|; see `LiveReturns`."""

    judged: Mapping[str, int] = field(default_factory=dict)
    within: Mapping[str, int] = field(default_factory=dict)
    log_error: float = 0.0


@dataclass(frozen=True)
class ReturnStatus:
    """Forecasts of return times against returns, by workflow type and source."""

    workflow_types: Mapping[str, Mapping[str, ReturnFigures]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStatus:
    """Status of one engine. Attributes are the keys of its JSON form.

    Attributes:
        ended: ended workflows by reason, see `EndReason`.
        counted: counts by metric; see `EventCounts.by_metric`.
        models: the model of each kind as a text; `model_versions` as data.
        examples: keys that clients sent, by the field and reason for which they were left out.
        data_parallel: engines that share the requests; each knows only the workflows whose requests reach it.
        evicted: evicted blocks by class.
        monitor: forecasts against outcomes.
    """

    on: Mapping[str, bool] | None = None
    workflows: int | None = None
    ended: Mapping[str, int] | None = None
    data_parallel: int = 1
    models: Mapping[str, str] = field(default_factory=dict)
    model_versions: Mapping[str, ModelStatus] = field(default_factory=dict)
    states: str | None = None
    counted: Mapping[str, tuple[LabelledCount, ...]] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    prompts: PromptStatus | None = None
    evicted: Mapping[str, int] | None = None
    prefetch: PrefetchStatus | None = None
    ageing: AgeingStatus | None = None
    admission: AdmissionStatus | None = None
    tails: Mapping[str, SecondsStatus] = field(default_factory=dict)
    inputs: InputStatus | None = None
    reload: ReloadStatus | None = None
    monitor: MonitorStatus | None = None
    recorder: RecorderStatus | None = None
    returns: ReturnStatus | None = None

    def counts(self, metric: CounterMetric[*tuple[Any, ...]]) -> dict[tuple[str, ...], int]:
        """The counts of one metric by its label values."""
        return {of.labels: of.count for of in self.counted.get(metric.name, ())}


@cache
def _adapter() -> TypeAdapter[EngineStatus]:
    return TypeAdapter(EngineStatus)


def read_status(reported: Mapping[str, Any]) -> EngineStatus | None:
    """The status that an engine reported; None if it runs another scheduler.

    Raises:
        pydantic.ValidationError: a declared key holds another type.
    """
    return _adapter().validate_python(_renamed(reported)) if reported else None


def _renamed(reported: Mapping[str, Any]) -> dict[str, Any]:
    """The status with the keys of this version; an engine of the previous one may have reported it."""
    status = {{"truth": "monitor", "given_up": "evicted"}.get(key, key): value for key, value in reported.items()}
    if isinstance(status.get("ended"), int):
        status["ended"] = {"finished": status["ended"], "expired": status.get("expired", 0)}
    return status
