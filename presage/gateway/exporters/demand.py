"""Demand of each model ahead of time as Prometheus gauges, and read back from them.

    presage_demand_requests{model="small",horizon_s="31",quantile="0.9"} 12.4

Demand counts requests in flight, held ones included (`policies/scaling.py`): what engines, or replicas, must have room
for at that moment. `horizon_s` 0 is now; it has one value for all quantiles. Without a forecast there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

GAUGE: Final = "presage_demand_requests"
QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class ModelDemand:
    """Requests of a model that will be in flight `horizon_s` from now, by quantile."""

    model: str
    horizon_s: float
    requests: Mapping[float, float]


def model_demand(
    models: Sequence[str],
    now: NDArray[np.float64],
    horizons_s: NDArray[np.float64],
    ahead: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    quantiles: Sequence[float] = QUANTILES,
) -> list[ModelDemand]:
    """The demand of each model now and at each later horizon.

    Quantiles are those of a normal distribution with one request more of variance, as the autoscaler's before it has
    seen its own errors.

    Args:
        now: requests in flight, [models].
        horizons_s: [horizons].
        ahead: mean and variance of the forecast, [horizons, models] each; None without one.
    """
    demands = [
        ModelDemand(model, 0.0, dict.fromkeys(quantiles, float(requests)))
        for model, requests in zip(models, now, strict=True)
    ]
    if ahead is None:
        return demands
    mean, spread = ahead[0], np.sqrt(ahead[1] + 1.0)
    for place, horizon_s in enumerate(horizons_s.tolist()):
        for column, model in enumerate(models):
            normal = NormalDist(float(mean[place, column]), float(spread[place, column]))
            if horizon_s > 0:
                demands.append(ModelDemand(model, horizon_s, {q: max(0.0, normal.inv_cdf(q)) for q in quantiles}))
    return demands


class DemandGauges:
    """Exports demands on a page of prometheus_client: register it with the page's CollectorRegistry.

    Args:
        demands: called for each page. Its models are those that are served, never names that clients send.
    """

    def __init__(self, demands: Callable[[], Iterable[ModelDemand]]) -> None:
        self._demands = demands

    def describe(self) -> Iterator[Metric]:
        """The family without values, which prometheus_client asks for at registration."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """The family, as prometheus_client asks for it."""
        family = self._family()
        for demand in self._demands():
            for quantile, requests in demand.requests.items():
                family.add_metric([demand.model, f"{demand.horizon_s:g}", f"{quantile:g}"], requests)
        yield family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(GAUGE, "Requests that will be in flight.", labels=("model", "horizon_s", "quantile"))


def read_demand(page: str) -> list[ModelDemand]:
    """The demands on a page in Prometheus' text format; [] if it has none.

    Raises:
        ValueError: the page is not in that format.
    """
    by_key: dict[tuple[str, float], dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples if family.name == GAUGE else ():
            key = sample.labels["model"], float(sample.labels["horizon_s"])
            by_key.setdefault(key, {})[float(sample.labels["quantile"])] = sample.value
    return [ModelDemand(model, horizon_s, requests) for (model, horizon_s), requests in by_key.items()]
