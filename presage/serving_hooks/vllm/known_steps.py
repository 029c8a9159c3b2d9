"""What a forecast becomes once the step to come is known, because its request already waits.

PBKV updates a workflow's forecast when a step is computed. Between that and its arrival a step can wait long, and
just then, when the engine is full, its blocks would be judged by the chance that it comes, though it is there. So the
first row becomes a certainty and the later ones stay as they are: they were made for the case that the workflow goes
on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.serving_hooks.forecasting.live import LiveForecast


def arrived(forecast: LiveForecast, agent: str) -> NDArray[np.float32]:
    """Its probabilities [K, V+1] where the next step has come, `agent`'s; as they are, if it does not name that."""
    return _first(forecast, agent, forecast.probabilities[1:])


def interrupted(forecast: LiveForecast, agent: str) -> NDArray[np.float32]:
    """The same where the step it looks ahead from, `agent`'s, is to be computed again: all others are one further."""
    return _first(forecast, agent, forecast.probabilities[:-1])


def _first(forecast: LiveForecast, agent: str, then: NDArray[np.float32]) -> NDArray[np.float32]:
    if agent not in forecast.agents:
        return forecast.probabilities
    rows = np.zeros_like(forecast.probabilities)
    rows[0, forecast.agents.index(agent)] = 1.0
    rows[1:] = then
    return rows
