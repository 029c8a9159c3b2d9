"""Live accuracy of forecasts by workflow type and model version, over the latest `window` workflows of each.

The definitions are those of `presage evaluate`; intervals are by bootstrap over workflows, since events inside one
workflow depend on each other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import isnan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import MOMENTS, Moment
from presage.predictors.common.bootstrap import share_ci
from presage.predictors.common.probabilities import calibration_error, filled_bins
from presage.serving_hooks.monitoring.outcomes import Followed, LengthTally

RESAMPLES: Final = 1000
_SEED: Final = 0
"""Seed of the bootstrap, so that the same workflows give the same interval."""


class LiveAccuracy:
    """Figures of the latest `window` workflows of each pair of type and model; of the `most` recently active pairs."""

    def __init__(self, window: int = 200, most: int = 64) -> None:
        self.window, self.most = window, most
        self._agents: OrderedDict[tuple[str, str], deque[NDArray[np.float32]]] = OrderedDict()
        self._lengths: OrderedDict[tuple[str, str], deque[LengthTally]] = OrderedDict()
        self._cached: dict[tuple[str, str], dict[str, Any]] = {}

    def followed(self, workflow: Followed) -> None:
        """Counts a workflow that has ended."""
        for model, tally in workflow.next_agent.items():
            self._window(self._agents, workflow.workflow_type, model).append(tally.sums)
        for model, lengths in workflow.lengths.items():
            self._window(self._lengths, workflow.workflow_type, model).append(lengths)

    def models(self) -> tuple[tuple[str, str], ...]:
        """The pairs of workflow type and model that have figures."""
        return tuple(sorted({*self._agents, *self._lengths}))

    def agents(self, workflow_type: str, model: str, resamples: int = RESAMPLES) -> dict[Moment, dict[str, Any]]:
        """Accuracy of next-agent forecasts by moment, as JSON values; empty if none was judged.

        Each figure is a list of K, null for a horizon without judged positions:

        - `accuracy`: share of positions whose most likely outcome came true, and `ci95`, its interval over workflows;
        - `ece`: expected calibration error;
        - `nll`: negative log-likelihood in nats, over positions whose outcome the forecast has a column for;
        - `unseen`: share of the positions whose outcome it has no column for;
        - `positions`: number of judged positions.

        `model` is a name by `outcomes.model_of`. Without `resamples` of the bootstrap there are no intervals (null),
        for calls from an engine's thread.
        """
        window = self._agents.get((workflow_type, model))
        if not window:
            return {}
        sums = np.stack(list(window)).astype(np.float64)  # [W, 5, 2, K, BINS]
        by_workflow = sums.sum(axis=-1)
        return {
            moment: self._at(sums.sum(axis=0)[:, index], by_workflow[:, :, index], resamples)
            for index, moment in enumerate(MOMENTS)
        }

    def lengths(self, workflow_type: str, model: str, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Coverage of the forecast quantiles of remaining tokens, as JSON values; empty if none was judged.

        By quantile, the share of steps whose remaining tokens were at most the forecast, its interval over workflows,
        and the number of judged steps. Arguments as in `agents`.
        """
        window = self._lengths.get((workflow_type, model))
        if not window:
            return {}
        quantiles = window[-1].quantiles
        same = [tally for tally in window if tally.quantiles == quantiles]
        within = np.stack([tally.within for tally in same])
        judged = np.array([tally.judged for tally in same])
        total = int(judged.sum())
        names = [f"{q:g}" for q in quantiles]
        return {
            "coverage": {name: float(within[:, index].sum() / total) for index, name in enumerate(names)},
            "coverage_ci95": {name: _interval(within[:, index], judged, resamples) for index, name in enumerate(names)},
            "steps": total,
        }

    def to_dict(self, resamples: int = RESAMPLES) -> dict[str, dict[str, dict[str, Any]]]:
        """All figures by workflow type and model, as JSON values; `resamples` as in `agents`.

        Without intervals, figures are cached until the next workflow of their type and model.
        """
        figures: dict[str, dict[str, dict[str, Any]]] = {}
        for name, model in self.models():
            of_model = self._cached.get((name, model)) if not resamples else None
            if of_model is None:
                moments = self.agents(name, model, resamples)
                of_model = {**({"moments": moments} if moments else {}), **self.lengths(name, model, resamples)}
                if not resamples:
                    self._cached[name, model] = of_model
            figures.setdefault(name, {})[model] = of_model
        return figures

    def _window(self, windows: OrderedDict[tuple[str, str], deque[Any]], workflow_type: str, model: str) -> deque[Any]:
        key = (workflow_type, model)
        self._cached.pop(key, None)
        if key not in windows:
            windows[key] = deque(maxlen=self.window)
            if len(windows) > self.most:
                self._cached.pop(windows.popitem(last=False)[0], None)
        windows.move_to_end(key)
        return windows[key]

    def _at(self, bins: NDArray[Any], by_workflow: NDArray[Any], resamples: int) -> dict[str, Any]:
        """Figures at one moment, from sums [5, K, BINS] over all workflows and [W, 5, K] by workflow."""
        positions, confidence, correct, surprise, listed = bins
        total, judged = positions.sum(axis=-1), listed.sum(axis=-1)
        horizons = range(len(total))
        errors = [calibration_error(filled_bins(positions[k], confidence[k], correct[k])) for k in horizons]
        return {
            "accuracy": [_share(correct[k].sum(), total[k]) for k in horizons],
            "ci95": [_interval(by_workflow[:, 2, k], by_workflow[:, 0, k], resamples) for k in horizons],
            "ece": [_json(error) for error in errors],
            "nll": [_share(surprise[k].sum(), judged[k]) for k in horizons],
            "unseen": [_share(total[k] - judged[k], total[k]) for k in horizons],
            "positions": [int(count) for count in total],
        }


def _interval(part: NDArray[Any], whole: NDArray[Any], resamples: int) -> list[float | None]:
    if not resamples:
        return [None, None]
    return [_json(end) for end in share_ci(part, whole, np.random.default_rng(_SEED), resamples)]


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _json(value: float) -> float | None:
    return None if isnan(value) else value
