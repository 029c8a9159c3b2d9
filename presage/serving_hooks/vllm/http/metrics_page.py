"""The hooks' metrics at the end of vLLM's own page `/metrics`.

The figures are in the engine's process, and the API server's process serves the page. So the server queries the engines
when a client requests the page, and appends their metrics. vLLM's own statistics messages would drop our fields, and
with several API servers vLLM's page does not read the Prometheus registry of its process.

An engine answers between two iterations. If one takes longer than `PATIENCE_S`, the page has
`presage_engines_answered 0` and none of our other metrics. The page needs no key, so however often it is requested,
the engines get one query at a time, and the answer is reused for `FRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from starlette.datastructures import MutableHeaders

from presage.serving_hooks.metrics import HISTOGRAMS, METRICS
from presage.serving_hooks.status import read_status

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
PATIENCE_S: Final = 5.0
"""Half of Prometheus' default timeout of a scrape."""

FRESH_S: Final = 1.0
ANSWERED: Final = "presage_engines_answered"
ANSWERED_HELP: Final = "1 if the engines have answered in time; 0, and no other metrics follow, if they have not."

Engines = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and status, as plain data, of each engine behind a server."""


class StatusCache:
    """Queries the engines for their status with `ask`, one query at a time, at most once per `FRESH_S`."""

    def __init__(self, ask: Callable[[], Awaitable[Engines]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._query: asyncio.Future[Engines] | None = None
        self._answer: tuple[float, Engines] | None = None

    async def __call__(self) -> Engines | None:
        """Their status, at most `FRESH_S` old; None where they do not answer in time or cannot."""
        if self._answer is not None and self._clock() - self._answer[0] < FRESH_S:
            return self._answer[1]
        if self._query is None or self._query.done():
            self._query = asyncio.ensure_future(self._ask())
        # Not cancelled on a timeout: the next request waits for the same answer.
        done, _ = await asyncio.wait([self._query], timeout=PATIENCE_S)
        if not done or self._query.cancelled():
            return None
        error = self._query.exception()
        if error is not None:
            logger.debug("the engines did not report metrics: %s", type(error).__name__)
            return None
        self._answer = self._clock(), self._query.result()
        return self._answer[1]


def exposition(engines: Engines | None, types: bool = True) -> bytes:
    """Our metrics in Prometheus' text format, including those without samples; None where engines have not answered.

    Args:
        types: whether metrics by workflow type have samples.
    """
    from prometheus_client import generate_latest  # comes with vLLM
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    families: list[Any] = [GaugeMetricFamily(ANSWERED, ANSWERED_HELP, value=float(engines is not None))]
    statuses = [(name, status) for name, reported in engines or () if (status := read_status(reported)) is not None]
    for metric in METRICS if engines is not None else ():
        kind: Any = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=["engine", *metric.labels])
        for name, status in statuses if types or "workflow_type" not in metric.labels else ():
            for labels, value in metric.read(status):
                family.add_metric([name, *labels], value)
        families.append(family)
    for histogram in HISTOGRAMS if engines is not None else ():
        series = HistogramMetricFamily(histogram.name, histogram.help, labels=["engine"])
        for name, status in statuses:
            if (found := histogram.read(status)) is not None:
                series.add_metric([name], list(found.up_to_s.items()), found.sum_s)
        families.append(series)
    text: bytes = generate_latest(SimpleNamespace(collect=lambda: families))
    return text


class Appended:
    """ASGI middleware: appends our metrics to vLLM's page; passes everything else through unchanged.

    Args:
        types: as `exposition` takes it.
    """

    def __init__(self, app: Any, ask: Callable[[], Awaitable[Engines | None]], types: bool = True) -> None:
        self.app = app
        self.ask, self.types = ask, types

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "GET" or path != PATH:
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
                headers = MutableHeaders(raw=list(start["headers"]))
                plain = headers.get("content-type", "").startswith("text/plain") and "content-encoding" not in headers
                if start["status"] == 200 and plain:  # lines can be appended to uncompressed text
                    body += await self._ours()
                headers["content-length"] = str(len(body))
                await send({**start, "headers": headers.raw})
                await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, collect)

    async def _ours(self) -> bytes:
        try:
            return exposition(await self.ask(), self.types)
        except Exception as error:
            logger.warning("%s is served without the metrics of Presage: %s", PATH, type(error).__name__)
            return b""
