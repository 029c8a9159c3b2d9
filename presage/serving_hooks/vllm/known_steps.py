"""What a forecast becomes once the step to come is known, because its request already waits.

PBKV updates a workflow's forecast when a step is computed. Between that and its arrival a step can wait long, and
just then, when the engine is full, its blocks would be judged by the chance that it comes, though it is there. So the
first row becomes a certainty and the later ones stay as they are: they were made for the case that the workflow goes
on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from presage.serving_hooks.forecaster import LiveForecast


def arrived(forecast: LiveForecast, agent: str) -> LiveForecast:
    """The next step has come, and is `agent`'s; as it was, for an agent the forecast does not name."""
    return _first(forecast, agent, forecast.probabilities[1:])


def interrupted(forecast: LiveForecast, agent: str) -> LiveForecast:
    """The step the forecast looks ahead from, `agent`'s, is to be computed again: all others are one further away."""
    return _first(forecast, agent, forecast.probabilities[:-1])


def _first(forecast: LiveForecast, agent: str, then: np.ndarray) -> LiveForecast:
    if agent not in forecast.agents:
        return forecast
    row = np.zeros((1, forecast.probabilities.shape[1]), np.float32)
    row[0, forecast.agents.index(agent)] = 1.0
    return replace(forecast, probabilities=np.concatenate([row, then]))
