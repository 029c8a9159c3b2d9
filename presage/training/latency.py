"""How long one warm forecast takes: what the latency gate judges."""

from __future__ import annotations

import time
from itertools import cycle, pairwise

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.predictors.next_agent import NextAgentPredictor

_STEPS = 1000
_WARM_UP = 50


def forecast_latency_us(predictor: NextAgentPredictor, prefixes: Prefixes) -> float:
    """Median of one forecast with its state, microseconds, over a thousand steps and both moments.

    The state's projection counts; making a state out of a text does not, since that is the encoder's time. One thread,
    as measured, on whatever else the machine is doing.
    """
    out = np.empty((predictor.horizon, predictor.vocabulary.outcomes), np.float32)
    sizes = np.nan_to_num(prefixes.sizes, nan=0.0).tolist()
    taken: list[int] = []
    # Around and around a short trace: the first forecasts after loading a model wait for its code.
    for w, (start, stop) in cycle(enumerate(pairwise(prefixes.offsets.tolist()))):
        if len(taken) >= 2 * (_STEPS + _WARM_UP):
            break
        types = predictor.vocabulary.workflow_types
        index = int(prefixes.workflow_type[w])
        workflow = predictor.open(types[index] if index < len(types) else "")
        for row in range(start, stop):
            state = {moment: _state(prefixes, moment, row) for moment in MOMENTS}
            input_tokens, output_tokens = sizes[row]
            agent = int(prefixes.agent[row])
            begun = time.perf_counter_ns()
            predictor.prefilled(workflow, agent, input_tokens, predictor.project(PREFILL, state[PREFILL]), out)
            between = time.perf_counter_ns()
            predictor.completed(workflow, output_tokens, predictor.project(COMPLETION, state[COMPLETION]), out)
            taken += [between - begun, time.perf_counter_ns() - between]
    return float(np.median(taken[2 * _WARM_UP :])) / 1000


def _state(prefixes: Prefixes, moment: Moment, row: int) -> NDArray[np.float32] | None:
    states = prefixes.states.get(moment)
    return None if states is None or np.isnan(states[row, 0]) else states[row]
