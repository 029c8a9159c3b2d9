"""A predictor for Dynamo's planner: the requests of its next interval, from the demand that the gateway forecasts.

Dynamo's planner (1.6, planner/plugins/proto/v1/plugin.proto) calls `PredictPlugin.Predict` with the traffic of the
last interval, and sizes prefill and decode by the answer. It counts requests that arrive in an interval, the gateway
those in flight. With L in flight, N arriving in T seconds, and W seconds a request, L = N · W / T (Little), so for a W
that does not change

    predicted requests = requests of the interval · L ahead / mean L of the interval.

Prompt and output lengths and the hit rate stay unset, which leaves them to Dynamo's own predictor: demand counts
requests and knows none of these. Without traffic, a forecast or requests in flight, or if anything fails, the whole
answer is empty.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from presage.gateway.exporters.demand import ModelDemand
from presage.gateway.hosts.grpc_messages import messages, serve_method

PACKAGE: Final = "dynamo.planner.plugin.v1"
PLUGIN: Final = "presage"
MESSAGES: Final = messages(
    PACKAGE,
    {
        "PredictStageRequest": "1 context PipelineContext",
        "PipelineContext": "1 request_id string, 3 observations ObservationData",
        "ObservationData": "1 traffic TrafficMetrics",
        "TrafficMetrics": "1 duration_s float, 2 num_req float, 3 isl float, 4 osl float, 5 kv_hit_rate float",
        "PredictStageResponse": "1 predictions PredictionData, 2 reason string, 3 final bool",
        "PredictionData": "1 predicted_num_req float, 2 predicted_isl float, 3 predicted_osl float, 4 source string, "
        "5 predicted_kv_hit_rate float",
    },
)
_SAMPLE_S: Final = 1.0
_STOP_S: Final = 5.0
_MEDIAN: Final = 0.5
_MOST_SAMPLES: Final = 3600
_MOST_BYTES: Final = 16 * 2**20

_log = logging.getLogger(__name__)


class RequestPredictor:
    """Predicts the requests of an interval.

    Args:
        demands: of each model, now and ahead; the planner sizes for all of them together.
        clock: monotonic seconds.
    """

    def __init__(self, demands: Callable[[], Iterable[ModelDemand]], clock: Callable[[], float]) -> None:
        self._demands, self._clock = demands, clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)

    def sample(self) -> dict[float, float]:
        """Notes the requests in flight; returns those of each horizon in seconds, 0 being now."""
        in_flight: dict[float, float] = {0.0: 0.0}
        for demand in self._demands():
            in_flight[demand.horizon_s] = in_flight.get(demand.horizon_s, 0.0) + demand.requests[_MEDIAN]
        self._samples.append((self._clock(), in_flight[0.0]))
        return in_flight

    def predicted(self, requests: float, interval_s: float) -> float | None:
        """Requests of the next interval, by the most in flight ahead; None if nothing is known.

        Args:
            requests: that arrived in the last `interval_s` seconds.
        """
        ahead = [value for horizon_s, value in self.sample().items() if horizon_s > 0]
        since = self._clock() - interval_s
        seen = [value for taken_s, value in self._samples if taken_s >= since]
        mean = sum(seen) / len(seen)
        if not ahead or mean <= 0 or requests <= 0:
            return None
        predicted = requests * max(ahead) / mean
        return predicted if math.isfinite(predicted) else None

    async def predict(self, request: Any, _: Any) -> Any:
        """Answers `Predict`."""
        answer = MESSAGES["PredictStageResponse"]()
        try:
            traffic = request.context.observations.traffic
            predicted = self.predicted(traffic.num_req, traffic.duration_s)
            if predicted is not None:
                answer.predictions.predicted_num_req, answer.predictions.source = predicted, PLUGIN
        except Exception as error:
            _log.warning("no prediction for Dynamo's planner: %s", type(error).__name__)
        return answer

    async def sample_on(self) -> None:
        """Notes the requests in flight every second."""
        while True:
            with suppress(Exception):  # `predict` says so
                self.sample()
            await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def serving(predictor: RequestPredictor, address: str) -> AsyncIterator[int]:
    """Answers Dynamo's planner on an address, host:port; gives the port.

    Raises:
        RuntimeError: the address cannot be listened on.
    """
    request, service = MESSAGES["PredictStageRequest"], f"{PACKAGE}.PredictPlugin"
    server, port = await serve_method(
        address, service, "Predict", predictor.predict, request, streams=False, most_bytes=_MOST_BYTES
    )
    sampling = asyncio.create_task(predictor.sample_on())
    try:
        yield port
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await server.stop(_STOP_S)
