"""Whether the forecasts of a workflow type have shown enough to be acted on: the shadow that a new type begins in.

Pythia (§5) lets a new workflow or version run on the reactive fallback, and profiles it in the background, until "safe
statistical confidence intervals are established"; which intervals, and how safe, it leaves open. Here the rule is:

    after at least `least` workflows of a type, once it is shown that the forecasts of one model, one step ahead, are
    right at most `TOLERANCE` less often than they say themselves; false with a probability of at most `RISK`.

Calibration and not accuracy, because decisions take probabilities at their word: a forecast that knows little and says
so changes little, one that is sure and wrong gives up the blocks that are needed.

A workflow gives one number, the mean over its forecasts of (right − probability of the likeliest outcome), so that
steps of one workflow, which depend on each other, are not counted as many. With x = (1 + that) / 2 in [0, 1] and
m = (1 − TOLERANCE) / 2, a bet that the mean of x is above m,

    W_n = mean over λ of Π_t (1 + λ (x_t − m)),   0 ≤ λ < 1/m

has a mean of at most 1 as long as it is not (Waudby-Smith & Ramdas, 2024, §4), so it ever reaches 1 / RISK with a
probability of at most RISK (Ville), however often one looks. What it asks is that one workflow does not tell of the
next. The bets are those of truth/detector.py.

What suffices is a type and a model, "version 3" or the counts: another version begins in shadow again. A new version of
an application does where its type has another name. What happens later to a type that suffices is the drift alarm's
business. Types beyond `MOST` make room, first those that have shown least: names come with requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.truth.detector import SHARES
from presage.serving_hooks.truth.following import Following
from presage.serving_hooks.truth.outcomes import Followed, Tally, model_of

TOLERANCE: Final = 0.1
RISK: Final = 0.05
MOST: Final = 1000
"""Pairs of workflow type and model."""

_LIMIT: Final = (1 - TOLERANCE) / 2
_BETS: Final[NDArray[np.float64]] = np.array(SHARES) / _LIMIT


class _Shown:
    """Of one type and model: workflows, the logarithms of the bets' worth, and whether it suffices."""

    __slots__ = ("suffices", "workflows", "worth")

    def __init__(self) -> None:
        self.workflows, self.suffices = 0, False
        self.worth: NDArray[np.float64] = np.zeros(len(_BETS))

    def add(self, surplus: float) -> None:
        self.workflows += 1
        self.worth += np.log1p(_BETS * ((1 + surplus) / 2 - _LIMIT))

    def odds(self) -> float:
        """W_n."""
        return float(np.exp(np.minimum(self.worth, 600.0)).mean())


class Evidence:
    """What came true of the forecasts of every workflow type.

    Args:
        least: workflows that a type and model must have, however good they are.
        changed: called when a type suffices that did not.

    Attributes:
        following: is told of forecasts, and tells `followed`.
    """

    def __init__(self, least: int, changed: Callable[[], None]) -> None:
        self.following = Following(self.followed, horizon=1)
        self._least, self._changed = least, changed
        self._shown: OrderedDict[tuple[str, str], _Shown] = OrderedDict()
        self._asked: OrderedDict[str, str] = OrderedDict()
        self._sufficing = 0

    def suffices(self, workflow_type: str | None) -> bool:
        """Whether the model that forecast last for a type has shown enough; None: any model for any type."""
        if workflow_type is None:
            return self._sufficing > 0
        shown = self._shown.get((workflow_type, self._asked.get(workflow_type, "")))
        return shown is not None and shown.suffices

    def forecast(self, workflow_type: str, forecast: LiveForecast) -> None:
        """A forecast was made: by this model the type is judged from now on. One that says nothing is none."""
        if len(forecast.probabilities):
            self._asked[workflow_type] = model_of(forecast.source, forecast.version, forecast.reason)
            self._asked.move_to_end(workflow_type)
            if len(self._asked) > MOST:
                self._asked.popitem(last=False)

    def followed(self, workflow: Followed) -> None:
        """A workflow is over."""
        for model, tally in workflow.next_agent.items():
            surplus = _surplus(tally)
            if surplus is None:
                continue
            key = (workflow.workflow_type, model)
            shown = self._shown.setdefault(key, _Shown())
            self._shown.move_to_end(key)
            shown.add(surplus)
            if not shown.suffices and shown.workflows >= self._least and shown.odds() >= 1 / RISK:
                shown.suffices = True
                self._sufficing += 1
                self._changed()
        while len(self._shown) > MOST:
            self._make_room()

    def status(self) -> dict[str, Any]:
        """Of each type and model: workflows, odds (at 1 / RISK they are enough), and whether it suffices."""
        return {
            name: {
                model: {"workflows": shown.workflows, "odds": round(shown.odds(), 3), "suffices": shown.suffices}
                for (of, model), shown in self._shown.items()
                if of == name
            }
            for name in dict.fromkeys(of for of, _ in self._shown)
        }

    def _make_room(self) -> None:
        key = next((key for key, shown in self._shown.items() if not shown.suffices), next(iter(self._shown)))
        self._sufficing -= self._shown.pop(key).suffices


def _surplus(tally: Tally) -> float | None:
    """Mean of (right − probability said) over a workflow's forecasts of the next step; None where none was judged."""
    positions, sure, right = (float(of) for of in tally.sums[:3, :, 0].sum(axis=(1, 2), dtype=np.float64))
    surplus = (right - sure) / positions if positions else math.nan
    return min(1.0, max(-1.0, surplus)) if math.isfinite(surplus) else None
