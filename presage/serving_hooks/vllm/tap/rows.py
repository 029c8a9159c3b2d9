"""Rows of a step, projected on the device they are on, so that 16 numbers travel and not 5120.

As in training: a state is rounded to float16, as traces keep it, then x @ W + b is summed in float64 and rounded to
float32 (`features/project_rows.py`), so that a predictor is given the bits that it learnt from. Whole states travel
for a recorder alone, as float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from presage.features.moment import Moment
from presage.serving_hooks.forecasting.live import Projection


class Projector:
    """The projections of a predictor, on the device of the rows once they are seen.

    Args:
        projections: W float32 [d, p] and b [p] by moment.
    """

    def __init__(self, projections: Mapping[Moment, Projection]) -> None:
        self._projections = {
            moment: (torch.from_numpy(weights).double(), torch.from_numpy(bias).double())
            for moment, (weights, bias) in projections.items()
        }

    def __contains__(self, moment: Moment) -> bool:
        return moment in self._projections

    def project(self, moment: Moment, rows: torch.Tensor, which: Sequence[int]) -> tuple[Any, Any]:
        """States float32 [n, p] on the host of rows [batch, d], and the event after which they are there, or None."""
        if self._projections[moment][0].device != rows.device:
            weights, bias = self._projections[moment]
            self._projections[moment] = weights.to(rows.device), bias.to(rows.device)
        weights, bias = self._projections[moment]
        picked = rows.index_select(0, _index(which, rows.device)).half().double()
        return _to_host(torch.addmm(bias, picked, weights).float())


def whole(rows: torch.Tensor, which: Sequence[int]) -> tuple[Any, Any]:
    """States float16 [n, d] on the host of rows [batch, d], and the event after which they are there, or None."""
    return _to_host(rows.index_select(0, _index(which, rows.device)).half())


def _index(which: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers on the device; without waiting for it."""
    host = torch.tensor(which, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _to_host(states: torch.Tensor) -> tuple[Any, Any]:
    if states.device.type != "cuda":
        return states.cpu().numpy(), None
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    host.copy_(states, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready
