"""How good forecasts are live, by workflow type and model version: what `presage evaluate` says of held-out traces.

Of the latest workflows of each, `window` of them: older ones are forgotten whole. Definitions are those of evaluation:
accuracy is the share of positions, intervals are by bootstrap over workflows (`predictors/common/bootstrap.py`), since
events inside one workflow depend on each other, and calibration error has the bins of
`predictors/common/probabilities.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.moment import MOMENTS, Moment
from presage.predictors.common.bootstrap import share_ci
from presage.predictors.common.probabilities import calibration_error, filled_bins
from presage.serving_hooks.monitoring.outcomes import Followed, LengthTally

RESAMPLES: Final = 1000
_SEED: Final = 0
"""Of the bootstrap: the same workflows give the same interval."""

Ends = tuple[float, float]


@dataclass(frozen=True)
class AgentFigures:
    """Of one moment, K numbers each; NaN where nothing was judged.

    Attributes:
        accuracy: share of positions whose likeliest outcome came true.
        ci95: its interval, over workflows.
        ece: expected calibration error.
        nll: surprise of what came, nats a position that the forecast has a column for.
        unseen: share of the positions where it has none.
        positions: judged.
    """

    accuracy: tuple[float, ...]
    ci95: tuple[Ends, ...]
    ece: tuple[float, ...]
    nll: tuple[float, ...]
    unseen: tuple[float, ...]
    positions: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, null where nothing was judged."""
        return {
            "accuracy": [_json(x) for x in self.accuracy],
            "ci95": [[_json(end) for end in ends] for ends in self.ci95],
            "ece": [_json(x) for x in self.ece],
            "nll": [_json(x) for x in self.nll],
            "unseen": [_json(x) for x in self.unseen],
            "positions": list(self.positions),
        }


@dataclass(frozen=True)
class LiveLengthFigures:
    """Coverage of the tokens left.

    Attributes:
        coverage: by quantile, the share of steps whose tokens left kept within it.
        ci95: its interval, over workflows.
        steps: judged.
    """

    coverage: Mapping[float, float]
    ci95: Mapping[float, Ends]
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; quantiles are keys such as "0.9"."""
        return {
            "coverage": {f"{q:g}": of for q, of in self.coverage.items()},
            "coverage_ci95": {f"{q:g}": [_json(end) for end in ends] for q, ends in self.ci95.items()},
            "steps": self.steps,
        }


class LiveAccuracy:
    """The latest workflows of every type and model.

    Args:
        window: workflows that figures are of.
        most: pairs of workflow type and model that are kept; the one longest unheard of makes room.
    """

    def __init__(self, window: int = 200, most: int = 64) -> None:
        for name, value in (("window", window), ("most", most)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; give 1 or more")
        self.window, self.most = window, most
        self._agents: OrderedDict[tuple[str, str], deque[NDArray[np.float32]]] = OrderedDict()
        self._lengths: OrderedDict[tuple[str, str], deque[LengthTally]] = OrderedDict()
        self._told: dict[tuple[str, str], dict[str, Any]] = {}

    def followed(self, workflow: Followed) -> None:
        """A workflow is over."""
        for model, tally in workflow.next_agent.items():
            self._window(self._agents, workflow.workflow_type, model).append(tally.sums)
        for model, lengths in workflow.lengths.items():
            self._window(self._lengths, workflow.workflow_type, model).append(lengths)

    def models(self) -> tuple[tuple[str, str], ...]:
        """Workflow type and model of everything there are figures of."""
        return tuple(sorted({*self._agents, *self._lengths}))

    def agents(self, workflow_type: str, model: str, resamples: int = RESAMPLES) -> dict[Moment, AgentFigures]:
        """How right forecasts of the next agents were; empty where none was judged.

        Args:
            workflow_type: of the workflows.
            model: as `outcomes.model_of` has it.
            resamples: of the bootstrap; 0 leaves intervals out (NaN), for who asks in an engine's thread.
        """
        window = self._agents.get((workflow_type, model))
        if not window:
            return {}
        sums = np.stack(list(window)).astype(np.float64)  # [W, 5, 2, K, BINS]
        by_workflow = sums.sum(axis=-1)
        return {
            moment: self._at(sums.sum(axis=0)[:, at], by_workflow[:, :, at], resamples)
            for at, moment in enumerate(MOMENTS)
        }

    def lengths(self, workflow_type: str, model: str, resamples: int = RESAMPLES) -> LiveLengthFigures | None:
        """How well quantiles of the tokens left cover; None where none was judged. Arguments as those of `agents`."""
        window = self._lengths.get((workflow_type, model))
        if not window:
            return None
        quantiles = window[-1].quantiles
        same = [tally for tally in window if tally.quantiles == quantiles]
        within = np.stack([tally.within for tally in same])
        judged = np.array([tally.judged for tally in same])
        total = int(judged.sum())
        return LiveLengthFigures(
            {q: float(within[:, at].sum() / total) for at, q in enumerate(quantiles)},
            {q: _interval(within[:, at], judged, resamples) for at, q in enumerate(quantiles)},
            total,
        )

    def to_dict(self, resamples: int = RESAMPLES) -> dict[str, dict[str, dict[str, Any]]]:
        """All figures by workflow type and model, as JSON values; `resamples` as of `agents`.

        Without intervals only those are computed that have had a workflow since they were last asked for.
        """
        told: dict[str, dict[str, dict[str, Any]]] = {}
        for name, model in self.models():
            of = self._told.get((name, model)) if not resamples else None
            if of is None:
                of = self._of(name, model, resamples)
                if not resamples:
                    self._told[name, model] = of
            told.setdefault(name, {})[model] = of
        return told

    def _of(self, name: str, model: str, resamples: int) -> dict[str, Any]:
        lengths = self.lengths(name, model, resamples)
        moments = {moment: of.to_dict() for moment, of in self.agents(name, model, resamples).items()}
        return {**({"moments": moments} if moments else {}), **(lengths.to_dict() if lengths else {})}

    def _window(self, of: OrderedDict[tuple[str, str], deque[Any]], workflow_type: str, model: str) -> deque[Any]:
        key = (workflow_type, model)
        self._told.pop(key, None)
        if key not in of:
            of[key] = deque(maxlen=self.window)
            if len(of) > self.most:
                self._told.pop(of.popitem(last=False)[0], None)
        of.move_to_end(key)
        return of[key]

    def _at(self, bins: NDArray[Any], by_workflow: NDArray[Any], resamples: int) -> AgentFigures:
        """From sums [5, K, BINS] over all workflows, and [W, 5, K] of each."""
        positions, sure, right, surprise, known = bins
        total, judged = positions.sum(axis=-1), known.sum(axis=-1)
        horizons = range(len(total))
        return AgentFigures(
            accuracy=tuple(_share(right[k].sum(), total[k]) for k in horizons),
            ci95=tuple(_interval(by_workflow[:, 2, k], by_workflow[:, 0, k], resamples) for k in horizons),
            ece=tuple(calibration_error(filled_bins(positions[k], sure[k], right[k])) for k in horizons),
            nll=tuple(_share(surprise[k].sum(), judged[k]) for k in horizons),
            unseen=tuple(_share(total[k] - judged[k], total[k]) for k in horizons),
            positions=tuple(int(count) for count in total),
        )


def _interval(part: NDArray[Any], whole: NDArray[Any], resamples: int) -> Ends:
    return share_ci(part, whole, np.random.default_rng(_SEED), resamples) if resamples else (nan, nan)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else nan


def _json(value: float) -> float | None:
    return None if isnan(value) else value
