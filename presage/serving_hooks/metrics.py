"""The hooks' Prometheus metrics: names, labels, help texts, and how each is read from an engine's status.

Counters end in `_total`. Label values are closed sets, names of models and exceptions, and workflow types. Clients
choose workflow types freely, so at most `MOST_TYPES` of them keep their names; the others are exported as `other`.
Reasons that may contain a path or an address are not exported: vLLM's metrics page needs no key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from presage.serving_hooks.counts import (
    ADMISSION_CHANGES,
    ADMISSION_DECISIONS,
    DEADLINES,
    ERRORS,
    EVENTS,
    FORECASTS,
    HIDDEN_STATES,
    METADATA_LEFT_OUT,
    MOST_TYPES,
    OTHER,
    RECORDER,
    CounterMetric,
)
from presage.serving_hooks.monitoring.promoted import ACCURACY
from presage.serving_hooks.status import EngineStatus, LiveFigures, ModelStatus, ReturnFigures, SecondsStatus

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and a number."""


@dataclass(frozen=True)
class Metric:
    """One counter or gauge.

    Attributes:
        name: in Prometheus; counters end in `_total`.
        labels: names of the labels, after `engine`, which all metrics have.
        read: its samples, from the status of an engine.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    read: Callable[[EngineStatus], Iterable[Sample]]

    @property
    def type(self) -> Literal["counter", "gauge"]:
        """Prometheus' type."""
        return "counter" if self.name.endswith("_total") else "gauge"


@dataclass(frozen=True)
class Histogram:
    """One histogram, exported as `_bucket` (with the label `le`), `_sum` and `_count`."""

    name: str
    help: str
    read: Callable[[EngineStatus], SecondsStatus | None]


def counted(metric: CounterMetric[*tuple[Any, ...]], status: EngineStatus) -> Iterator[Sample]:
    """The counts of one metric, with zeros for its `from_zero` values; nothing where the engine does not count it."""
    if metric.name in status.counted:
        for labels, times in {**dict.fromkeys(metric.from_zero, 0), **status.by_labels(metric)}.items():
            yield labels, float(times)


def counter(metric: CounterMetric[*tuple[Any, ...]]) -> Metric:
    """The metric of a counter."""
    return Metric(metric.name, metric.labels, metric.help, partial(counted, metric))


def _read(status: EngineStatus, path: str) -> float | None:
    """An attribute of a status, or of one of its sections; None where the engine does not report it."""
    value: Any = status
    for name in path.split("."):
        if value is not None:
            value = getattr(value, name)
    return None if value is None else float(value)


def _number(name: str, text: str, path: str) -> Metric:
    """A metric without labels."""
    return Metric(name, (), text, lambda status: [] if (value := _read(status, path)) is None else [((), value)])


def _numbers(name: str, label: str, text: str, paths: Mapping[str, str]) -> Metric:
    """A metric with one label; a path for each of its values."""

    def read(status: EngineStatus) -> dict[str, float]:
        return {value: number for value, path in paths.items() if (number := _read(status, path)) is not None}

    return _table(name, label, text, read)


def _table(name: str, label: str, text: str, read: Callable[[EngineStatus], Mapping[str, float] | None]) -> Metric:
    """A metric with one label; no samples where `read` gives None."""

    def samples(status: EngineStatus) -> Iterator[Sample]:
        for value, number in (read(status) or {}).items():
            yield (value,), float(number)

    return Metric(name, (label,), text, samples)


def _models(status: EngineStatus) -> Iterator[Sample]:
    for kind, model in status.model_versions.items():
        version = "" if model.version is None else str(model.version)
        yield (kind, _reference(model), version), 1.0


def _reference(model: ModelStatus) -> str:
    """The registry reference, which is public; folders and reasons describe this machine."""
    if model.reason is not None:
        return "none"
    reference = str(model.reference)
    return reference if reference.startswith("models:/") else "folder"


def _step_inputs(status: EngineStatus) -> dict[str, float] | None:
    if status.inputs is None:
        return None
    return {name: status.inputs.counts.get(name, 0) for name in ("steps", "tokens", "text", "states")}


def missing_inputs(status: EngineStatus) -> Iterator[Sample]:
    """1 for each kind of model and input that the model was promoted with and this engine does not supply."""
    for kind, inputs in status.inputs.missing.items() if status.inputs is not None else ():
        for name in inputs:
            yield (kind, name), 1.0


def _figures(status: EngineStatus) -> Iterator[tuple[str, str, LiveFigures]]:
    for name, models in status.monitor.workflow_types.items() if status.monitor is not None else ():
        for model, figures in models.items():
            yield name, model, figures


def accuracies(status: EngineStatus) -> Iterator[Sample]:
    """Accuracy by workflow type, model, moment and steps ahead."""
    return _bounded(
        [
            ((name, model, moment, str(k)), accuracy, positions)
            for name, model, figures in _figures(status)
            for moment, judged in figures.moments.items()
            for k, (accuracy, positions) in enumerate(zip(judged.accuracy, judged.positions, strict=True), 1)
            if accuracy is not None
        ]
    )


def _promised(status: EngineStatus) -> Iterator[Sample]:
    """Promised and live accuracy by workflow type, moment and bound of their intervals."""
    promises = status.monitor.promised if status.monitor is not None else {}
    for name in sorted(promises)[:MOST_TYPES]:
        for figure, comparison in promises[name].figures.items():
            if figure.startswith(ACCURACY):
                for kind, values in (("promised", comparison.promised), ("live", comparison.live)):
                    for bound, value in zip(("mean", "low", "high"), values, strict=True):
                        yield (name, figure.removeprefix(ACCURACY), kind, bound), value


def _stands_back(status: EngineStatus) -> Iterator[Sample]:
    """1 by kind of model and workflow type."""
    monitor = status.monitor
    if monitor is not None:
        for kind, compared in (("next-agent", monitor.against_counts), ("profile", monitor.profile_against_counts)):
            standing = [name for name, comparison in sorted(compared.items()) if comparison.stands_back]
            yield from (((kind, name), 1.0) for name in standing[:MOST_TYPES])


def _coverages(status: EngineStatus) -> Iterator[Sample]:
    return _bounded(
        [
            ((name, model, quantile), share, figures.steps)
            for name, model, figures in _figures(status)
            for quantile, share in figures.coverage.items()
        ]
    )


def _bounded(judged: list[tuple[tuple[str, ...], float, int]]) -> Iterator[Sample]:
    """The types with most judged forecasts under their names; the means of all others as one.

    Args:
        judged: label values, the workflow type first; a share; and of how many.
    """
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


def _returns(read: Callable[[ReturnFigures], Mapping[str, int]]) -> Callable[[EngineStatus], Iterator[Sample]]:
    """Figures of return times by workflow type, source and quantile; the status names MOST_TYPES types at most."""
    return lambda status: (
        ((name, source, quantile), float(number))
        for name, source, figures in return_figures(status)
        for quantile, number in read(figures).items()
    )


def return_figures(status: EngineStatus) -> Iterator[tuple[str, str, ReturnFigures]]:
    """Figures of return times by workflow type and source."""
    for name, sources in status.returns.workflow_types.items() if status.returns is not None else ():
        for source, figures in sources.items():
            yield name, source, figures


def _alarms(status: EngineStatus) -> dict[str, float]:
    standing = sorted(status.monitor.alarms) if status.monitor is not None else []
    return dict.fromkeys([*standing[:MOST_TYPES], *([OTHER] if len(standing) > MOST_TYPES else [])], 1.0)


def _outlooks(status: EngineStatus) -> dict[str, float]:
    outlook = None if status.admission is None else status.admission.outlook
    return {choice: expected.steps_per_s for choice, expected in (outlook or {}).items()}


def _policies(status: EngineStatus) -> dict[str, float] | None:
    if status.on is None:
        return None
    return {**status.on, "prefetch": status.prefetch is not None and status.prefetch.on}


_RETURN_LABELS: Final = ("workflow_type", "source", "quantile")

METRICS: Final = (
    counter(FORECASTS),
    Metric(
        "presage_model_info",
        ("kind", "reference", "version"),
        "1 for the model that forecasts; reference is none where there is none.",
        _models,
    ),
    _table(
        "presage_step_inputs_total",
        "input",
        "Steps that began, and of these the ones whose token counts, texts or hidden states reached the predictors.",
        _step_inputs,
    ),
    Metric(
        "presage_promoted_input_missing",
        ("kind", "input"),
        "1 for an input that the model was promoted with and this engine does not supply.",
        missing_inputs,
    ),
    _number("presage_reloads_total", "Times that newer models took over while the engine ran.", "reload.renewed"),
    Metric(
        "presage_forecast_accuracy",
        ("workflow_type", "model", "moment", "ahead"),
        "Share of the latest forecasts whose likeliest agent came true, by steps ahead.",
        accuracies,
    ),
    Metric(
        "presage_forecast_coverage",
        ("workflow_type", "model", "quantile"),
        "Share of the latest steps whose tokens left kept within the quantile.",
        _coverages,
    ),
    Metric(
        "presage_returns_judged_total",
        _RETURN_LABELS,
        "Workflows that came back after a forecast of their return time with this quantile.",
        _returns(lambda figures: figures.judged),
    ),
    Metric(
        "presage_returns_within_total",
        _RETURN_LABELS,
        "Of presage_returns_judged_total, those that came back within the quantile.",
        _returns(lambda figures: figures.within),
    ),
    Metric(
        "presage_return_log_error_total",
        ("workflow_type", "source"),
        "Absolute logarithms of the actual time by the median of its forecast, summed over "
        "presage_returns_judged_total.",
        lambda status: (((name, source), returns.log_error) for name, source, returns in return_figures(status)),
    ),
    _table(
        "presage_drift_alarm",
        "workflow_type",
        "1 for a workflow type that is no longer as it was promoted; its forecasts come from counts.",
        _alarms,
    ),
    _number("presage_drift_alarms_total", "Drift alarms raised.", "monitor.raised"),
    Metric(
        "presage_promised_accuracy",
        ("workflow_type", "moment", "figure", "bound"),
        "Accuracy one step ahead, a mean over workflows with its 95 % interval: promised at the promotion, and live.",
        _promised,
    ),
    Metric(
        "presage_stands_back",
        ("kind", "workflow_type"),
        "1 for a workflow type that online counts forecast better than the model, or the profile, which then stands "
        "back.",
        _stands_back,
    ),
    counter(HIDDEN_STATES),
    _number("presage_prompt_tokens_total", "Tokens of the prompts of workflows' steps.", "prompts.tokens"),
    _numbers(
        "presage_hit_tokens_total",
        "tier",
        "Of presage_prompt_tokens_total, those found in the engine's cache (local) or loaded by a connector "
        "(external).",
        {"local": "prompts.local_tokens", "external": "prompts.external_tokens"},
    ),
    _table(
        "presage_evicted_blocks_total",
        "class",
        "Evicted KV-cache blocks, by what they were: blank (held nothing), retired (of ended workflows), "
        "unowned (of requests without a workflow), unknown (of active workflows without a forecast), forecast (of "
        "active workflows with one).",
        lambda status: status.evicted,
    ),
    _number("presage_held_workflows", "Workflows held back whose request waits for it.", "admission.held"),
    _number("presage_paused_workflows", "Workflows held back while their tool runs.", "admission.paused"),
    _number(
        "presage_held_requests", "Requests that wait since their workflow is held back.", "admission.held_requests"
    ),
    _number(
        "presage_held_seconds_total",
        "Seconds that workflows with a waiting request were held back, all together.",
        "admission.held_s",
    ),
    _number(
        "presage_longest_held_seconds",
        "Seconds one workflow was held back at most, over its life.",
        "admission.longest_held_s",
    ),
    counter(ADMISSION_DECISIONS),
    counter(ADMISSION_CHANGES),
    _table(
        "presage_expected_steps_per_second",
        "choice",
        "Steps a second that admission expects: of the number of workflows it has chosen, and of letting all run.",
        _outlooks,
    ),
    _number(
        "presage_recomputing_share",
        "Share of the engine's time spent on tokens of lost contexts lately. Only where it is high can much be gained.",
        "admission.recomputing_share",
    ),
    _number(
        "presage_overdue_workflows",
        "Workflows held back for longer than they may be, since letting all in would lose more contexts.",
        "admission.overdue",
    ),
    _number(
        "presage_pressed_workflows",
        "Workflows held back that would miss their deadline if they waited on; they go first.",
        "admission.pressed",
    ),
    counter(DEADLINES),
    _numbers(
        "presage_prefetch_requests_total",
        "outcome",
        "Prefetches started, and of these aborted for a client's request or refused by vLLM.",
        {"started": "prefetch.started", "aborted": "prefetch.aborted", "refused": "prefetch.refused"},
    ),
    _numbers(
        "presage_prefetch_tokens_total",
        "outcome",
        "Tokens of whole blocks: fetched, and of these used by a step, or wasted (evicted unused).",
        {"fetched": "prefetch.tokens", "used": "prefetch.used_tokens", "wasted": "prefetch.wasted_tokens"},
    ),
    _number("presage_prefetch_memory_bytes", "Memory of earlier prompts of agents.", "prefetch.memory_bytes"),
    _numbers(
        "presage_ageing_total",
        "change",
        "Requests that ageing promoted by a level after waiting, or demoted after their quantum.",
        {"promoted": "ageing.promoted", "demoted": "ageing.demoted"},
    ),
    _number("presage_workflows", "Workflows alive.", "workflows"),
    _number("presage_inferred_workflows", "Of these, those whose clients name none.", "identity.inferred"),
    _table(
        "presage_inferred_requests_total",
        "source",
        "Requests whose clients name no workflow, by what identified it; new if nothing did.",
        lambda status: None if status.identity is None else status.identity.sources,
    ),
    _table(
        "presage_inference_checked_total",
        "outcome",
        "Requests of named workflows that were looked up too: inferred right or wrong, or missed.",
        lambda status: None if status.identity is None else status.identity.checked,
    ),
    _table(
        "presage_workflows_ended_total",
        "how",
        "Workflows that ended: finished (by their client), expired (no request for their time to live), or aborted.",
        lambda status: status.ended,
    ),
    _table(
        "presage_policy_on",
        "policy",
        "1 for a policy that is on; 0 where settings or the engine leave it out, or it has failed.",
        _policies,
    ),
    _table(
        "presage_switched_off",
        "part",
        "1 for a part that settings have on and that is off: it has failed, or this vLLM cannot be changed for it.",
        lambda status: dict.fromkeys(status.off, 1.0),
    ),
    counter(ERRORS),
    counter(METADATA_LEFT_OUT),
    counter(EVENTS),
    counter(RECORDER),
    _number("presage_recorder_losing", "1 while the recorder loses most steps.", "recorder.losing"),
    _numbers(
        "presage_webhook_events_total",
        "outcome",
        "Lifecycle events that the receiver took (sent), whose delivery failed and is tried again (failed, at each "
        "try), or that found no room (dropped).",
        {"sent": "webhook.sent", "failed": "webhook.failed", "dropped": "webhook.dropped"},
    ),
    _number("presage_webhook_waiting", "Lifecycle events that wait for their delivery.", "webhook.waiting"),
)

HISTOGRAMS: Final = (
    Histogram(
        "presage_request_held_seconds",
        "Seconds that requests were held back until they began or were aborted; those never held are not counted.",
        lambda status: None if status.admission is None else status.admission.held_times,
    ),
    Histogram(
        "presage_start_delay_seconds",
        "Seconds from the arrival of a workflow to the selection of its first step.",
        lambda status: status.tails.get("start_delay"),
    ),
    Histogram(
        "presage_later_first_token_seconds",
        "Seconds from the arrival of a step, other than the first of its workflow, to its first token.",
        lambda status: status.tails.get("later_first_token"),
    ),
    Histogram(
        "presage_workflow_seconds",
        "Seconds from the arrival of a workflow to its last answer, its own pauses included.",
        lambda status: status.tails.get("completion"),
    ),
)
