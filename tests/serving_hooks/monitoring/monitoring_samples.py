"""Sample forecasts, and sample workflows whose forecasts are judged."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.monitoring.outcomes import END, Followed, LengthTally, Tally, WorkflowOutcomes
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import NO_LENGTHS, NO_MODEL, NOTHING, LiveForecast, LiveLengths

AGENTS = ("a", "b", "c")


def forecast_of(
    *rows: Sequence[float], moment: Moment = PREFILL, version: int | None = 1, tokens: tuple[float, ...] = ()
) -> LiveForecast:
    """A forecast of these rows [K, V+1] over `AGENTS`, END last; `tokens` at quantiles .5 and .9."""
    left = LiveLengths("champion", 9, (0.5, 0.9)[: len(tokens)], tokens, 0, version) if tokens else NO_LENGTHS
    return LiveForecast("champion", 9, moment, np.array(rows, np.float32), AGENTS, version, None, left)


def sure_of(*agents: str, moment: Moment = PREFILL) -> LiveForecast:
    """Sure of one agent, or END, at each horizon."""
    columns = (*AGENTS, END)
    return forecast_of(*([float(column == agent) for column in columns] for agent in agents), moment=moment)


def silent(moment: Moment = PREFILL) -> LiveForecast:
    return LiveForecast("none", 0, moment, NOTHING, (), None, NO_MODEL)


def walk(outcomes: WorkflowOutcomes, word: str, *, cut: bool = False) -> Followed:
    """A workflow of one letter a step, without forecasts."""
    for step, agent in enumerate(word):
        outcomes.begun(agent, silent(), step)
        outcomes.completed(silent(COMPLETION), 10)
    return outcomes.ended(EndReason.ABORTED if cut else EndReason.FINISHED)


def followed(
    word: str = "abc",
    right: int = 5,
    judged: int = 10,
    within: int | None = None,
    *,
    workflow_type: str = "t",
    model: str = "version 1",
    confidence: float = 0.5,
) -> Followed:
    """A workflow of one letter a step, in which so many of its forecasts at prefill, one step ahead, came true."""
    symbols = (END, *word, END)
    transitions: dict[tuple[str, str], int] = {}
    for pair in pairwise(symbols):
        transitions[pair] = transitions.get(pair, 0) + 1
    tally = Tally(1)
    for number in range(judged):
        hit = number < right
        tally.add(PREFILL, 1, hit, confidence, confidence if hit else 0.1)
    lengths: Mapping[str, LengthTally] = {}
    if within is not None:
        lengths = {model: LengthTally((0.9,), 10, np.array([within]))}
    return Followed(workflow_type, True, transitions, {model: tally} if judged else {}, lengths)
