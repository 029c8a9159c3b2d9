"""The status of an engine's hooks: the engine builds it, `GET /v1/workflows/status` answers with it as JSON.

`/metrics` and `presage status` read this and nothing else. A section that an engine does not have is None, and keys
that are not declared here are ignored, so the two sides of a connection may run different versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from presage.serving_hooks.counts import CounterMetric, LabelledCount
from presage.serving_hooks.workflows.identity import tenant_of, unscoped


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
class ModeRule:
    """A mode that was set for a policy, a workflow type, or both; None is all of them."""

    policy: str | None
    workflow_type: str | None
    mode: str


@dataclass(frozen=True)
class ModesStatus:
    """The modes in force.

    Attributes:
        rules: exceptions from `default`.
        policies: the highest mode of each policy.
        would: what policies in shadow would have done, by policy.
    """

    default: str
    rules: Sequence[ModeRule] = ()
    policies: Mapping[str, str] = field(default_factory=dict)
    would: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def model_versions(models: Mapping[str, ModelStatus | str]) -> dict[str, ModelStatus]:
    """The model of each kind; of one that is told as a text, that is its reference."""
    return {kind: ModelStatus(model) if isinstance(model, str) else model for kind, model in models.items()}


@dataclass(frozen=True)
class PrefetchStatus:
    """Prefetches and tokens of whole blocks by outcome; memory of earlier prompts (None without prefetch)."""

    on: bool = False
    started: int = 0
    would_start: Annotated[int, Field(alias="would start")] = 0
    aborted: int = 0
    refused: int = 0
    tokens: int = 0
    used_tokens: int = 0
    wasted_tokens: int = 0
    memory_bytes: int | None = None
    forgotten: int = 0


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
    """Where admission expects so many open workflows to settle; see `policies.admission.Outlook`."""

    workflows: int
    steps_per_s: float
    miss_share: float = 0.0
    load: float = 0.0
    stays_s: float = 0.0
    keeps_s: float = 0.0


@dataclass(frozen=True)
class SecondsStatus:
    """Histogram of seconds: cumulative counts by upper bound (the last is `+Inf`)."""

    up_to_s: Mapping[str, int]
    sum_s: float


@dataclass(frozen=True)
class AdmissionStatus:
    """Workflows that are held with a waiting request and during a tool call, for how long, and why.

    Attributes:
        would_hold: what admission in shadow would hold.
        bound_s: the default of how long a request may be held; None while there is none.
        decisions: counts of `AdmissionController.counts` by name.
        reasons: held workflows by reason, of the latest decision.
        rates: what was measured; see `policies.steady_state.Rates`.
        contexts_longer: how many times as long as expected contexts are.
        growth_over_forecast: how many times as much as forecast contexts grow, by workflow type.
        overdue: workflows that have waited for as long as they may.
        pressed: held workflows that would miss their deadline if they waited on.
    """

    held: int = 0
    would_hold: int = 0
    held_requests: int = 0
    paused: int = 0
    held_s: float = 0.0
    longest_held_s: float = 0.0
    held_times: SecondsStatus | None = None
    bound_s: float | None = None
    decisions: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    outlook: Mapping[str, OutlookStatus] | None = None
    rates: Mapping[str, float] | None = None
    shared_tokens: int = 0
    contexts_longer: float = 1.0
    growth_over_forecast: Mapping[str, float] = field(default_factory=dict)
    recomputing_share: float = 0.0
    overdue: int = 0
    pressed: int = 0


@dataclass(frozen=True)
class RecorderStatus:
    """Whether the recorder works.

    Attributes:
        instance: name of its folder.
        waiting: events and rows that are not written yet.
        recording: what its writer does.
        losing: whether it loses most steps.
        states: whether it gets hidden states, or why not.
    """

    on: bool = False
    instance: str | None = None
    waiting: int = 0
    recording: str | None = None
    losing: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    states: str | None = None


@dataclass(frozen=True)
class WebhookStatus:
    """Lifecycle events that the receiver took, whose delivery failed (at each try), that were dropped, and that wait.

    Attributes:
        problem: why the latest delivery failed, an HTTP status or the kind of exception; None if it did not.
    """

    sent: int = 0
    failed: int = 0
    dropped: int = 0
    waiting: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class IdentityStatus:
    """How requests were identified whose clients name no workflow; see `identity/inference.py`.

    Attributes:
        inferred: workflows that run now without a name from their clients.
        sources: requests by what identified them; "new" continued nothing.
        checked: requests of named workflows that the inference found to continue them (`right`), found to continue
            others (`wrong`), or did not find (`missed`).
    """

    on: bool = False
    inferred: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    checked: Mapping[str, int] = field(default_factory=dict)

    @property
    def precision(self) -> float | None:
        """Of the requests of named workflows that were found to continue any, the share of right ones."""
        right, wrong = self.checked.get("right", 0), self.checked.get("wrong", 0)
        return right / (right + wrong) if right + wrong else None


@dataclass(frozen=True)
class InputStatus:
    """Steps and the inputs that came with them; by kind of model, the inputs of its promotion that never came."""

    counts: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReloadStatus:
    """Newer models that go live while the engine runs.

    Attributes:
        renewed: how often they did.
        refused: reasons by version.
        troubles: current problems by subject.
        loading: by kind the version on its way.
        workflows_under_older: running workflows that keep the earlier models.
    """

    on: bool = False
    renewed: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    troubles: Mapping[str, str] = field(default_factory=dict)
    loading: Mapping[str, str] = field(default_factory=dict)
    workflows_under_older: int = 0


Interval = tuple[float | None, float | None]
"""Ends of an interval of 95 %; null where it was not computed."""


@dataclass(frozen=True)
class AgentAccuracy:
    """Figures by steps ahead: share of forecasts whose likeliest agent was right, and how many were judged.

    See `LiveAccuracy.agents`; an engine computes no intervals.
    """

    accuracy: tuple[float | None, ...]
    positions: tuple[int, ...]
    ci95: tuple[Interval, ...] = ()
    ece: tuple[float | None, ...] = ()
    nll: tuple[float | None, ...] = ()
    unseen: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class LiveFigures:
    """Live figures of one workflow type and model: accuracy by moment, coverage by quantile."""

    moments: Mapping[str, AgentAccuracy] = field(default_factory=dict)
    coverage: Mapping[str, float] = field(default_factory=dict)
    coverage_ci95: Mapping[str, Interval] = field(default_factory=dict)
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
    """Accuracy of the predictor, or the profile, and of online counts at the same latest steps; see `StandBack`."""

    steps: int
    model: float
    counts: float
    stands_back: bool


@dataclass(frozen=True)
class ReasonStatus:
    """A figure that left its promoted interval, and on which side; see `monitoring.drift.Reason`."""

    figure: str
    side: str
    live: float
    promoted: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class AlarmStatus:
    """A standing drift alarm: workflows until it was raised, and the reasons, the strongest first."""

    workflows: int = 0
    reasons: tuple[ReasonStatus, ...] = ()


@dataclass(frozen=True)
class MonitorStatus:
    """Forecasts against outcomes, by workflow type: standing drift alarms, promises, and live figures by model.

    Attributes:
        raised: alarms ever raised.
        following: workflows that are followed now.
        errors: failures of the monitor by kind of exception.
    """

    alarms: Mapping[str, AlarmStatus] = field(default_factory=dict)
    raised: int = 0
    following: int = 0
    promised: Mapping[str, PromiseStatus] = field(default_factory=dict)
    against_counts: Mapping[str, AgainstCountsStatus] = field(default_factory=dict)
    profile_against_counts: Mapping[str, AgainstCountsStatus] = field(default_factory=dict)
    workflow_types: Mapping[str, Mapping[str, LiveFigures]] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ReturnFigures:
    """Judged returns and those within, by quantile; the sum of |ln(time / median)|; see `LiveReturns`."""

    judged: Mapping[str, int] = field(default_factory=dict)
    within: Mapping[str, int] = field(default_factory=dict)
    log_error: float = 0.0


@dataclass(frozen=True)
class ReturnStatus:
    """Forecasts of return times against returns, by workflow type and source, and faults by kind of exception."""

    workflow_types: Mapping[str, Mapping[str, ReturnFigures]] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTimesStatus:
    """The file to which the durations of iterations go, and how many it has."""

    on: bool = False
    file: str | None = None
    iterations: int = 0


@dataclass(frozen=True)
class EngineStatus:
    """Status of one engine. Attributes are the keys of its JSON form, which also tells `models` as texts.

    Attributes:
        name: of a gateway.
        off: why policies and other parts are off that settings have on: they have failed, or vLLM cannot be changed.
        ended: ended workflows by reason, see `EndReason`.
        counts: by name, for people; see `EventCounts.by_key`.
        counted: counts by metric; see `EventCounts.by_metric`.
        examples: keys that clients sent, by the field and reason for which they were left out.
        data_parallel: engines that share the requests; each knows only the workflows whose requests reach it.
        states: whether a predictor reads hidden states, or why not.
        state_layer: the layer that is captured; None for the states after the final norm.
        evicted: evicted blocks by class.
        monitor: forecasts against outcomes.
        identity: of requests whose clients name no workflow; None where it is not inferred.
        one_step: share of inferred workflows of one step, of the types that mostly have no more.
    """

    name: str | None = None
    on: Mapping[str, bool] | None = None
    off: Mapping[str, str] = field(default_factory=dict)
    modes: ModesStatus | None = None
    workflows: int | None = None
    ended: Mapping[str, int] | None = None
    data_parallel: int = 1
    model_versions: Mapping[str, ModelStatus] = field(default_factory=dict)
    states: str | None = None
    state_layer: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    counted: Mapping[str, Sequence[LabelledCount]] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    prompts: PromptStatus | None = None
    evicted: Mapping[str, int] | None = None
    prefetch: PrefetchStatus | None = None
    ageing: AgeingStatus | None = None
    admission: AdmissionStatus | None = None
    tails: Mapping[str, SecondsStatus] = field(default_factory=dict)
    identity: IdentityStatus | None = None
    one_step: Mapping[str, float] = field(default_factory=dict)
    inputs: InputStatus | None = None
    reload: ReloadStatus | None = None
    monitor: MonitorStatus | None = None
    recorder: RecorderStatus | None = None
    webhook: WebhookStatus | None = None
    returns: ReturnStatus | None = None
    step_times: StepTimesStatus | None = None

    @property
    def models(self) -> dict[str, str]:
        """The model of each kind, for people."""
        return {kind: str(model) for kind, model in self.model_versions.items()}

    def by_labels(self, metric: CounterMetric[*tuple[Any, ...]]) -> dict[tuple[str, ...], int]:
        """The counts of one metric by its label values."""
        return {of.labels: of.count for of in self.counted.get(metric.name, ())}


@cache
def _adapter() -> TypeAdapter[EngineStatus]:
    return TypeAdapter(EngineStatus)


def as_json(status: EngineStatus) -> dict[str, Any]:
    """A status as JSON values."""
    return {**_adapter().dump_python(status, mode="json", by_alias=True), "models": status.models}


_BY_TYPE: Final = (
    ("monitor", "alarms"),
    ("monitor", "promised"),
    ("monitor", "against_counts"),
    ("monitor", "profile_against_counts"),
    ("monitor", "workflow_types"),
    ("returns", "workflow_types"),
    ("admission", "growth_over_forecast"),
)
"""Sections and tables in them by workflow type, some with its tenant (`Step.stats_key`)."""


def of_tenant(status: Mapping[str, Any], tenant: str, types: Collection[str]) -> dict[str, Any]:
    """A status as JSON without the names that other tenants have given; all of it for the tenant "".

    Args:
        types: the workflow types of this tenant.
    """
    shown = dict(status)
    if not tenant:
        return {**shown, "examples": {of: unscoped(key) for of, key in (shown.get("examples") or {}).items()}}

    def own(table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            unscoped(name): figures
            for name, figures in table.items()
            if (tenant_of(name) or tenant) == tenant and unscoped(name) in types
        }

    for section, table in _BY_TYPE:
        if shown.get(section) and shown[section].get(table):
            shown[section] = {**shown[section], table: own(shown[section][table])}
    shown["one_step"] = own(shown.get("one_step") or {})
    if shown.get("modes"):
        rules = [rule for rule in shown["modes"]["rules"] if rule["workflow_type"] in (None, *types)]
        shown["modes"] = {**shown["modes"], "rules": rules}
    examples = shown.get("examples") or {}
    shown["examples"] = {
        left_out: unscoped(key) for left_out, key in examples.items() if (tenant_of(key) or tenant) == tenant
    }
    return shown


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
