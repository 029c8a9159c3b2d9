"""Our metrics at the end of vLLM's own page, `/metrics`.

The figures live in the engine's process, the page is answered by the API server's. Three ways were weighed:

- sending them with vLLM's statistics, for a stat logger plugin. What vLLM sends is of a fixed shape and drops what it
  does not know, no engine sends any with `--disable-log-stats`, and with several API servers each hears of some steps;
- a collector in Prometheus' registry. With several API servers vLLM's page reads files of all of them, and no registry;
- asking the engines when somebody looks at the page, as `/v1/workflows/status` does, and writing what they say behind
  what vLLM has written. That works with one API server and with several, of which each gives the same figures, costs
  the engine nothing between two looks, and leaves vLLM's page as it is when anything fails. It is what stands here.

An engine answers between two iterations. One that takes longer than `PATIENCE_S` is not waited for: the page then has
`presage_engines_answered 0` and none of our other metrics. Nobody needs a key for this page, so however often it is
asked for, the engines are asked once at a time, and not again within `FRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from presage.serving_hooks.vllm.metrics import HISTOGRAMS, METRICS
from presage.serving_hooks.vllm.metrics_read import Status

PATH: Final = "/metrics"
PATIENCE_S: Final = 5.0
"""Half of what Prometheus itself gives a target, if it is told nothing else."""

FRESH_S: Final = 1.0
ANSWERED: Final = "presage_engines_answered"
ANSWERED_HELP: Final = (
    "1 where the engines have said in time what follows; 0, and nothing follows, where they have not."
)

logger = logging.getLogger(__name__)

Engines = Sequence[tuple[str, Status]]
"""Name and status of each engine behind a server."""


class Asked:
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
