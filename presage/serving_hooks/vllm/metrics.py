"""The hooks as Prometheus metrics: which there are, what each counts, and where it is read.

What an engine says is `Policies.presage_status`, so a figure that people see in the status and one that Prometheus
collects are the same. How it is read stands in metrics_read.py, how it gets onto vLLM's page in metrics_scrape.py.

Names end as Prometheus wants it: `_total` for what only rises, base units. A metric whose policy was never there has no
samples; what an engine has counted nothing of stands there as 0, so that a rate is defined from the start. Label values
are closed sets, names of models and exceptions, and workflow types, of which there are at most `MOST_TYPES`. Reasons in
words that may hold a path or an address are left out: vLLM's page of metrics asks for no key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from presage.serving_hooks.vllm.metrics_read import (
    Sample,
    Spread,
    Status,
    each,
    ended,
    errors,
    expected,
    forecasts,
    left_out,
    missing_inputs,
    models,
    one,
    others,
    policies,
    spread,
    states,
)
from presage.serving_hooks.vllm.metrics_truth import accuracies, alarms, coverages


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: in the exposition.
        type: of Prometheus.
        labels: names, after `engine`, which all have.
        help: what it counts, and in what.
        read: its samples, out of an engine's status.
    """

    name: str
    type: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    read: Callable[[Status], Iterable[Sample]]


@dataclass(frozen=True)
class Histogram:
    """One histogram: what becomes `_bucket` (with the label `le`), `_sum` and `_count` in the exposition.

    Attributes:
        name, labels, help: as of any metric.
        read: its buckets, out of an engine's status.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    read: Callable[[Status], Iterable[Spread]]


METRICS: Final = (
    Metric(
        "presage_forecasts_total",
        "counter",
        ("kind", "source"),
        "Forecasts, by kind of model and by who made them: champion, back-off counts, or none.",
        forecasts,
    ),
    Metric(
        "presage_model_info",
        "gauge",
        ("kind", "reference", "version"),
        "1 for the model that forecasts; reference is none where there is none.",
        models,
    ),
    Metric(
        "presage_step_inputs_total",
        "counter",
        ("input",),
        "Steps that began, and of these the ones whose token counts, texts or hidden states reached the predictors.",
        each("inputs", "counts", names={name: name for name in ("steps", "tokens", "text", "states")}),
    ),
    Metric(
        "presage_promoted_input_missing",
        "gauge",
        ("kind", "input"),
        "1 for an input that the model was promoted with and this engine does not supply.",
        missing_inputs,
    ),
    Metric(
        "presage_reloads_total",
        "counter",
        (),
        "Times that newer models took over while the engine ran.",
        one("reload", "renewed"),
    ),
    Metric(
        "presage_forecast_accuracy",
        "gauge",
        ("workflow_type", "model", "moment", "ahead"),
        "Share of the latest forecasts whose likeliest agent came true, by steps ahead.",
        accuracies,
    ),
    Metric(
        "presage_forecast_coverage",
        "gauge",
        ("workflow_type", "model", "quantile"),
        "Share of the latest steps whose tokens left kept within the quantile.",
        coverages,
    ),
    Metric(
        "presage_drift_alarm",
        "gauge",
        ("workflow_type",),
        "1 for a workflow type that is no longer as it was promoted; its forecasts come from counts.",
        alarms,
    ),
    Metric(
        "presage_drift_alarms_total",
        "counter",
        (),
        "Drift alarms raised.",
        one("truth", "raised"),
    ),
    Metric(
        "presage_hidden_states_total",
        "counter",
        ("moment", "outcome"),
        "Hidden states of steps: used, late or missing.",
        states,
    ),
    Metric(
        "presage_prompt_tokens_total",
        "counter",
        (),
        "Tokens of the prompts of workflows' steps.",
        one("prompts", "tokens"),
    ),
    Metric(
        "presage_hit_tokens_total",
        "counter",
        ("tier",),
        "Of presage_prompt_tokens_total, those found in the engine's cache (local) or loaded by a connector "
        "(external).",
        each("prompts", names={"local_tokens": "local", "external_tokens": "external"}),
    ),
    Metric(
        "presage_evicted_blocks_total",
        "counter",
        ("class",),
        "Free KV-cache blocks given up, by what they were: blank (held nothing), retired (of ended workflows), "
        "worthless (of requests without a workflow), unknown (of active workflows without a forecast), forecast (of "
        "active workflows with one).",
        each("given_up"),
    ),
    Metric(
        "presage_held_workflows",
        "gauge",
        (),
        "Workflows held back whose request waits for it.",
        one("admission", "held"),
    ),
    Metric(
        "presage_paused_workflows",
        "gauge",
        (),
        "Workflows held back while their tool runs.",
        one("admission", "paused"),
    ),
    Metric(
        "presage_held_requests",
        "gauge",
        (),
        "Requests that wait since their workflow is held back.",
        one("admission", "held_requests"),
    ),
    Metric(
        "presage_held_seconds_total",
        "counter",
        (),
        "Seconds that workflows with a waiting request were held back, all together.",
        one("admission", "held_s"),
    ),
    Metric(
        "presage_longest_held_seconds",
        "gauge",
        (),
        "Seconds one workflow was held back at most, over its life.",
        one("admission", "longest_held_s"),
    ),
    Metric(
        "presage_admission_decisions_total",
        "counter",
        ("decision",),
        "Decisions of admission: all of them, and those that held somebody back.",
        each("admission", "decisions", names={"decisions": "all", "decisions that held somebody": "held"}),
    ),
    Metric(
        "presage_admission_changes_total",
        "counter",
        ("change",),
        "Workflows that admission held, paused while their tool ran, restored, let in since nothing ran, or will hold "
        "no more since they were held for as long as is allowed (exempt).",
        each(
            "admission",
            "decisions",
            names={
                "held": "held",
                "paused": "paused",
                "restored": "restored",
                "exempt": "exempt",
                "let in, since nothing ran": "let in",
            },
        ),
    ),
    Metric(
        "presage_expected_steps_per_second",
        "gauge",
        ("choice",),
        "Steps a second that admission expects: of the number of workflows it has chosen, and of letting all run.",
        expected,
    ),
    Metric(
        "presage_prefetch_requests_total",
        "counter",
        ("outcome",),
        "Prefetches started, and of these aborted for a client's request or refused by vLLM.",
        each("prefetch", names={name: name for name in ("started", "aborted", "refused")}),
    ),
    Metric(
        "presage_prefetch_tokens_total",
        "counter",
        ("outcome",),
        "Tokens of whole blocks: fetched, and of these used by a step, or wasted, given up before anybody asked for "
        "them.",
        each("prefetch", names={"tokens": "fetched", "used_tokens": "used", "wasted_tokens": "wasted"}),
    ),
    Metric(
        "presage_prefetch_memory_bytes",
        "gauge",
        (),
        "Memory of what agents were asked.",
        one("prefetch", "memory_bytes"),
    ),
    Metric(
        "presage_ageing_total",
        "counter",
        ("change",),
        "Requests that ageing promoted by a level after waiting, or demoted after their quantum.",
        each("ageing"),
    ),
    Metric(
        "presage_workflows",
        "gauge",
        (),
        "Workflows alive.",
        one("workflows"),
    ),
    Metric(
        "presage_workflows_ended_total",
        "counter",
        ("how",),
        "Workflows that ended: said by their client, or silent for their time to live.",
        ended,
    ),
    Metric(
        "presage_policy_on",
        "gauge",
        ("policy",),
        "1 for a policy that is on; 0 where settings or the engine leave it out, or it has failed.",
        policies,
    ),
    Metric(
        "presage_errors_total",
        "counter",
        ("what", "reason"),
        "Failures in our code, by what has failed and the kind of exception; each but the first came of the first.",
        errors,
    ),
    Metric(
        "presage_metadata_left_out_total",
        "counter",
        ("field", "reason"),
        "What clients said of their requests that was left out.",
        left_out,
    ),
    Metric(
        "presage_events_total",
        "counter",
        ("event",),
        "What else an engine counts, by its name in the status.",
        others,
    ),
    Metric(
        "presage_recorder_total",
        "counter",
        ("event",),
        "What the recorder wrote, and what it did not, by reason.",
        each("recorder", "counts"),
    ),
)

HISTOGRAMS: Final = (
    Histogram(
        "presage_request_held_seconds",
        (),
        "Seconds that requests were held back until they began or were given up; those never held are not counted.",
        spread("admission", "held_times"),
    ),
)
