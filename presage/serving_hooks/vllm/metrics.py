"""The hooks as Prometheus metrics: which there are, what each counts, and where it is read.

What an engine says is `Policies.presage_status`, so a figure that people see in the status and one that Prometheus
collects are the same. metrics_read.py reads the samples out of the status.

Names end as Prometheus wants it: `_total` for what only rises, base units. A metric whose policy was never there has no
samples; what an engine has counted nothing of stands there as 0, so that a rate is defined from the start. Label values
are closed sets, names of models and exceptions, and workflow types, of which there are at most `MOST_TYPES`. Reasons in
words that may hold a path or an address are left out: vLLM's page of metrics asks for no key.

The metrics stand at the end of vLLM's own page, `/metrics`. The figures live in the engine's process, the page is
answered by the API server's. Three ways were weighed:

- sending them with vLLM's statistics, for a stat logger plugin. What vLLM sends is of a fixed shape and drops what it
  does not know, no engine sends any with `--disable-log-stats`, and with several API servers each hears of some steps;
- a collector in Prometheus' registry. With several API servers vLLM's page reads files of all of them, and no registry;
- asking the engines when somebody looks at the page, as `/v1/workflows/status` does, and writing what they say behind
  what vLLM has written. That works with one API server and with several, of which each gives the same figures, costs
  the engine nothing between two looks, and leaves vLLM's page as it is when anything fails. This one is implemented.

An engine answers between two iterations. One that takes longer than `PATIENCE_S` is not waited for: the page then has
`presage_engines_answered 0` and none of our other metrics. Nobody needs a key for this page, so however often it is
requested, the engines are asked once at a time, and not again within `FRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from presage.serving_hooks.vllm.metrics_read import (
    Sample,
    Spread,
    Status,
    accuracies,
    alarms,
    coverages,
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

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
PATIENCE_S: Final = 5.0
"""Half of what Prometheus itself gives a target, if it is told nothing else."""

FRESH_S: Final = 1.0
ANSWERED: Final = "presage_engines_answered"
ANSWERED_HELP: Final = (
    "1 where the engines have said in time what follows; 0, and nothing follows, where they have not."
)

Engines = Sequence[tuple[str, Status]]
"""Name and status of each engine behind a server."""


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


class StatusCache:
    """What the engines say, asked for seldom.

    Args:
        ask: the engines.
        clock: seconds, rising.
    """

    def __init__(self, ask: Callable[[], Awaitable[Engines]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._under_way: asyncio.Future[Engines] | None = None
        self._said: tuple[float, Engines] | None = None

    async def __call__(self) -> Engines | None:
        """What they say, at most `FRESH_S` old; None where they do not answer in time or cannot."""
        if self._said is not None and self._clock() - self._said[0] < FRESH_S:
            return self._said[1]
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._ask())
        # Not cancelled where it takes longer: whoever looks next waits for the same answer.
        done, _ = await asyncio.wait([self._under_way], timeout=PATIENCE_S)
        if not done or self._under_way.cancelled():
            return None
        error = self._under_way.exception()
        if error is not None:
            logger.debug("engines were asked for metrics: %s", type(error).__name__)
            return None
        self._said = self._clock(), self._under_way.result()
        return self._said[1]


def exposition(engines: Engines | None) -> bytes:
    """Our metrics in Prometheus' text format, also those without samples; None where engines have not answered."""
    from prometheus_client import generate_latest  # type: ignore[import-not-found]  # comes with vLLM
    from prometheus_client.core import (  # type: ignore[import-not-found]
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    families = [GaugeMetricFamily(ANSWERED, ANSWERED_HELP, value=float(engines is not None))]
    for metric in METRICS if engines is not None else ():
        kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=["engine", *metric.labels])
        for name, status in engines or ():
            for labels, value in metric.read(status):
                family.add_metric([name, *labels], value)
        families.append(family)
    for histogram in HISTOGRAMS if engines is not None else ():
        family = HistogramMetricFamily(histogram.name, histogram.help, labels=["engine", *histogram.labels])
        for name, status in engines or ():
            for labels, up_to, total in histogram.read(status):
                family.add_metric([name, *labels], list(up_to.items()), total)
        families.append(family)
    text: bytes = generate_latest(_Collected(families))
    return text


class Appended:
    """ASGI middleware: writes our metrics behind vLLM's, and passes everything else on as it is.

    Args:
        app: vLLM's.
        asked: what the engines say; None leaves the page alone.
    """

    def __init__(self, app: Any, asked: Callable[[], Awaitable[Engines | None]]) -> None:
        self.app = app
        self.asked = asked

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "GET" or _path(scope) != PATH:
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = b""

        async def collect(message: dict[str, Any]) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                whole = body + await self._ours() if _is_page(start) else body
                await send({**start, "headers": _with_length(start["headers"], len(whole))})
                await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, collect)

    async def _ours(self) -> bytes:
        try:
            return exposition(await self.asked())
        except Exception as error:
            logger.warning("our metrics are left out of %s: %s", PATH, type(error).__name__)
            return b""


class _Collected:
    """What Prometheus' library asks for families."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _path(scope: Any) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_page(start: dict[str, Any]) -> bool:
    """Whether an answer is text in Prometheus' format, to which lines can be added."""
    headers = {name.lower(): value for name, value in start["headers"]}
    plain = headers.get(b"content-type", b"").startswith(b"text/plain") and b"content-encoding" not in headers
    return bool(start["status"] == 200 and plain)


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
