"""An autoscaling policy of Ray Serve that follows the demand on the gateway's metrics page.

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: presage.gateway.exporters.ray_serve:DemandPolicy
        policy_kwargs: {page: "http://127.0.0.1:8100/metrics", model: small, requests_per_replica: 16}

Written to ray 2.60 (`serve.config.AutoscalingPolicy`), which calls the policy in its controller many times a second: a
thread reads the page, and a call only looks at the last one. It needs nothing of Ray. Without a recent page it follows
the requests in flight that Ray counts, as Ray's own policy does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol
from urllib.request import urlopen

from presage.gateway.exporters.demand import ModelDemand, read_demand

_TIMEOUT_S: Final = 2.0
_MOST_BYTES: Final = 8 * 2**20


class ServeContext(Protocol):
    """What the policy reads of ray.serve's AutoscalingContext."""

    total_num_requests: float
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int


def replicas(demands: Sequence[ModelDemand], model: str, quantile: float, requests_per_replica: float) -> int | None:
    """Replicas for the highest demand of a model from now until the last horizon; None if it is not among the demands.

    Replicas are kept until then, so a drop between two horizons closes none.
    """
    wanted = [demand.requests[quantile] for demand in demands if demand.model == model and quantile in demand.requests]
    return math.ceil(max(wanted) / requests_per_replica - 1e-9) if wanted else None


class DemandPolicy:
    """Replicas of one deployment.

    Args:
        page: address of the gateway's metrics page.
        model: as the gateway names it.
        requests_per_replica: requests that one replica serves at once.
        quantile: of the demand, one of those exported.
        every_s: seconds between two readings.
        keep_s: seconds for which a reading counts.
    """

    def __init__(
        self,
        page: str,
        model: str,
        requests_per_replica: float,
        quantile: float = 0.9,
        every_s: float = 1.0,
        keep_s: float = 10.0,
    ) -> None:
        if requests_per_replica <= 0:
            raise ValueError(f"requests_per_replica is {requests_per_replica}; give a number above 0")
        self._page, self._model, self._per_replica = page, model, requests_per_replica
        self._quantile, self._every_s, self._keep_s = quantile, every_s, keep_s
        self._last: tuple[float, int | None] = (-math.inf, None)
        self._reader: threading.Thread | None = None

    def __call__(self, ctx: ServeContext) -> tuple[int, dict[str, Any]]:
        """Replicas wanted, and the state that Ray keeps: where the number is from."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_on, name="presage-demand", daemon=True)
            self._reader.start()
        read_s, wanted = self._last
        fresh = wanted is not None and time.monotonic() - read_s <= self._keep_s
        if wanted is None or not fresh:
            wanted = math.ceil(ctx.total_num_requests / self._per_replica - 1e-9)
        bounded = min(max(wanted, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas)
        return bounded, {"presage": "forecast" if fresh else "requests"}

    def read(self) -> None:
        """Reads the page once; if that raises, the last reading stays."""
        with urlopen(self._page, timeout=_TIMEOUT_S) as answer:
            page = answer.read(_MOST_BYTES).decode()
        self._last = time.monotonic(), replicas(read_demand(page), self._model, self._quantile, self._per_replica)

    def _read_on(self) -> None:
        while True:
            with suppress(Exception):  # once the last reading is old, the requests in flight are followed
                self.read()
            time.sleep(self._every_s)
