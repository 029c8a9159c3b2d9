"""The hooks' metrics at the end of vLLM's own page `/metrics`.

The figures are in the engine's process, and the API server's process serves the page. So the server queries the engines
when a client requests the page, and appends their metrics. This works with several API servers, each of which reports
the same figures, and with `--disable-log-stats`. vLLM's own statistics messages would drop our fields, and with several
API servers vLLM's page does not read the Prometheus registry of its process.

An engine answers between two iterations. If one takes longer than `PATIENCE_S`, the page has
`presage_engines_answered 0` and none of our other metrics. The page needs no key, so however often it is requested,
the engines get one query at a time, and the answer is reused for `FRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from presage.serving_hooks.status import read_status
from presage.serving_hooks.vllm.metrics import HISTOGRAMS, METRICS

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
PATIENCE_S: Final = 5.0
"""Half of Prometheus' default timeout of a scrape."""

FRESH_S: Final = 1.0
ANSWERED: Final = "presage_engines_answered"
ANSWERED_HELP: Final = (
    "1 where the engines have said in time what follows; 0, and nothing follows, where they have not."
)

Engines = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and status, as plain data, of each engine behind a server."""


class StatusCache:
    """Queries the engines for their status, one query at a time, at most once per `FRESH_S`.

    Args:
        ask: queries the engines.
        clock: monotonic seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[Engines]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._under_way: asyncio.Future[Engines] | None = None
        self._answer: tuple[float, Engines] | None = None

    async def __call__(self) -> Engines | None:
        """Their status, at most `FRESH_S` old; None where they do not answer in time or cannot."""
        if self._answer is not None and self._clock() - self._answer[0] < FRESH_S:
            return self._answer[1]
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._ask())
        # Not cancelled on a timeout: the next request waits for the same answer.
        done, _ = await asyncio.wait([self._under_way], timeout=PATIENCE_S)
        if not done or self._under_way.cancelled():
            return None
        error = self._under_way.exception()
        if error is not None:
            logger.debug("the engines did not report metrics: %s", type(error).__name__)
            return None
        self._answer = self._clock(), self._under_way.result()
        return self._answer[1]


def exposition(engines: Engines | None) -> bytes:
    """Our metrics in Prometheus' text format, including those without samples; None where engines have not answered."""
    from prometheus_client import generate_latest  # type: ignore[import-not-found]  # comes with vLLM
    from prometheus_client.core import (  # type: ignore[import-not-found]
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    families = [GaugeMetricFamily(ANSWERED, ANSWERED_HELP, value=float(engines is not None))]
    statuses = [(name, status) for name, reported in engines or () if (status := read_status(reported)) is not None]
    for metric in METRICS if engines is not None else ():
        kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=["engine", *metric.labels])
        for name, status in statuses:
            for labels, value in metric.read(status):
                family.add_metric([name, *labels], value)
        families.append(family)
    for histogram in HISTOGRAMS if engines is not None else ():
        family = HistogramMetricFamily(histogram.name, histogram.help, labels=["engine"])
        for name, status in statuses:
            if (found := histogram.read(status)) is not None:
                family.add_metric([name], list(found.up_to_s.items()), found.sum_s)
        families.append(family)
    text: bytes = generate_latest(_Collected(families))
    return text


class Appended:
    """ASGI middleware: appends our metrics to vLLM's page; passes everything else through unchanged.

    Args:
        app: vLLM's.
        ask: gives the status of the engines; None where they have not answered.
    """

    def __init__(self, app: Any, ask: Callable[[], Awaitable[Engines | None]]) -> None:
        self.app = app
        self.ask = ask

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request."""
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
            return exposition(await self.ask())
        except Exception as error:
            logger.warning("%s is served without the metrics of Presage: %s", PATH, type(error).__name__)
            return b""


class _Collected:
    """The collector that `generate_latest` wants."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _path(scope: Any) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_page(start: dict[str, Any]) -> bool:
    """Whether the answer is uncompressed text, to which lines can be appended."""
    headers = {name.lower(): value for name, value in start["headers"]}
    plain = headers.get(b"content-type", b"").startswith(b"text/plain") and b"content-encoding" not in headers
    return bool(start["status"] == 200 and plain)


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
