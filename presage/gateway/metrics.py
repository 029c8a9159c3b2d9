"""The gateway's Prometheus page: requests and latencies by upstream, and what decisions counted.

Labels are names of upstreams, status codes, fixed reasons and kinds of exceptions, never anything that clients name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from presage.serving_hooks.counts import IDENTITIES
from presage.serving_hooks.metrics import METRICS, counter
from presage.serving_hooks.status import EngineStatus

_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WHOLE_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DECISION_S: Final = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class GatewayMetrics:
    """Counters, gauges and histograms of one gateway.

    Args:
        status: of identities, forecasts, models, drift and recorded rows; exported as an engine exports its own.
    """

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._registry = registry = CollectorRegistry()
        self._answers = Counter(
            "presage_gateway_answers", "Answers, by upstream and status.", ["upstream", "status"], registry=registry
        )
        self._refusals = Counter(
            "presage_gateway_refusals",
            "Requests that the gateway answered itself, by reason.",
            ["reason"],
            registry=registry,
        )
        self._failures = Counter(
            "presage_gateway_upstream_failures",
            "Requests that an upstream failed, by reason.",
            ["upstream", "reason"],
            registry=registry,
        )
        self._errors = Counter(
            "presage_gateway_errors",
            "Failures in our code, by part and kind of exception.",
            ["what", "reason"],
            registry=registry,
        )
        self._chosen = Counter(
            "presage_gateway_model_choices",
            "Requests to a pool, by model and reason.",
            ["model", "reason"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "presage_gateway_router_fallbacks",
            "Models chosen by the router's linear head, because its transformer was late.",
            registry=registry,
        )
        self._placed = Counter(
            "presage_gateway_placements",
            "Requests placed among several upstreams, by reason.",
            ["upstream", "reason"],
            registry=registry,
        )
        self._planned = Counter(
            "presage_gateway_prefill_plans",
            "Answered steps that a prefill ahead was planned after, or why it was not.",
            ["reason"],
            registry=registry,
        )
        self._prefills = Counter(
            "presage_gateway_prefills",
            "Prefills ahead by outcome; in shadow those that would have been sent.",
            ["mode", "outcome"],
            registry=registry,
        )
        self._prefilled = Counter(
            "presage_gateway_prefilled_tokens",
            "Tokens prefilled ahead, by whether the next request found them.",
            ["mode", "used"],
            registry=registry,
        )
        self._paused = Gauge(
            "presage_gateway_prefill_paused",
            "Workflow types without prefills ahead for a while, since too much was wasted.",
            registry=registry,
        )
        self._first = Histogram(
            "presage_gateway_first_token_seconds",
            "Seconds to the first part.",
            ["upstream"],
            buckets=_FIRST_S,
            registry=registry,
        )
        self._whole = Histogram(
            "presage_gateway_answer_seconds",
            "Seconds to the last part.",
            ["upstream"],
            buckets=_WHOLE_S,
            registry=registry,
        )
        self._decision = Histogram(
            "presage_gateway_decision_seconds",
            "Seconds to decide on a request.",
            buckets=_DECISION_S,
            registry=registry,
        )
        self._in_flight = Gauge("presage_gateway_in_flight", "Requests in flight.", registry=registry)
        self._workflows = Gauge("presage_gateway_workflows", "Running workflows.", registry=registry)
        self._open = Gauge(
            "presage_gateway_upstream_open", "Whether an upstream takes requests.", ["upstream"], registry=registry
        )
        self._registry.register(_Status(status))

    def refused(self, reason: str) -> None:
        """The gateway answered itself, or the client left."""
        self._refusals.labels(reason).inc()

    def failed(self, what: str, reason: str) -> None:
        """A part of the gateway failed; the request went on without it if it could."""
        self._errors.labels(what, reason).inc()

    def upstream_failed(self, upstream: str, reason: str) -> None:
        """An upstream could not be reached, or broke off."""
        self._failures.labels(upstream, reason).inc()

    def decided(self, seconds: float) -> None:
        """A request was decided on."""
        self._decision.observe(seconds)

    def model_chosen(self, model: str, reason: str, fallback: bool) -> None:
        """A model was chosen of a pool, by the linear head in place of a late transformer or not."""
        self._chosen.labels(model, reason).inc()
        self._fallbacks.inc(fallback)

    def placed(self, upstream: str, reason: str) -> None:
        """A request was placed among several upstreams."""
        self._placed.labels(upstream, reason).inc()

    def prefill_planned(self, reason: str) -> None:
        """A step was answered: `planned`, or why nothing is prefilled after it."""
        self._planned.labels(reason).inc()

    def prefill_judged(self, mode: str, outcome: str, tokens: int, used: bool) -> None:
        """What became of a prefill ahead is known."""
        self._prefills.labels(mode, outcome).inc()
        self._prefilled.labels(mode, "yes" if used else "no").inc(tokens)

    def prefill_paused(self, types: int) -> None:
        """So many workflow types are in a pause."""
        self._paused.set(types)

    def first_token(self, upstream: str, seconds: float) -> None:
        """The first part of an answer has come."""
        self._first.labels(upstream).observe(seconds)

    def answered(self, upstream: str, status: int, seconds: float) -> None:
        """An answer is complete."""
        self._answers.labels(upstream, str(status)).inc()
        self._whole.labels(upstream).observe(seconds)

    def upstream_open(self, upstream: str, is_open: bool) -> None:
        """Whether an upstream takes requests."""
        self._open.labels(upstream).set(is_open)

    def export(self, collector: Any) -> None:
        """Adds a collector of prometheus_client to the page."""
        self._registry.register(collector)

    def page(self, in_flight: int, workflows: int) -> bytes:
        """The page, in Prometheus' text format."""
        self._in_flight.set(in_flight)
        self._workflows.set(workflows)
        text: bytes = generate_latest(self._registry)
        return text


class _Status:
    """Exports a status by the metrics of engines, those that have samples."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client asks for them."""
        status = self._status()
        for metric in (*METRICS, counter(IDENTITIES)):
            samples = list(metric.read(status))
            if samples:
                kind: Any = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for labels, value in samples:
                    family.add_metric(labels, value)
                yield family
