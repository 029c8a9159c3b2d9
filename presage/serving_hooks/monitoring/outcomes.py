"""Compares forecasts with their outcomes and sums them up by workflow.

Steps of one workflow depend on each other, so all statistics are over workflows. A forecast made at step t is judged k
steps ahead when step t + k begins, or when the workflow ends after step t + k − 1: then the outcome is END, and later
horizons are not judged (as in `features/prefixes.py`). Remaining tokens are judged when the workflow ends. What is
unknown is not counted:

- the end and the remaining tokens of a workflow that expired, or was aborted within a step;
- the agents of missed steps, and transitions across them; a later step is still judged at its distance;
- the remaining tokens at steps before one whose output tokens are unknown.

A step number seen before is a repetition and changes nothing. Without step numbers every beginning is a new step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from presage.features.moment import MOMENTS, Moment
from presage.predictors.common.forecast import Source
from presage.predictors.common.probabilities import BINS
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.identity import shared
from presage.serving_hooks.workflows.live import (
    LAYER_LEFT_OUT,
    STATES_LEFT_OUT,
    STEPS_KEPT,
    Counted,
    LiveForecast,
    LiveLengths,
    token_count,
)

COUNTS: Final = "counts"
"""The model of forecasts from online counts (`online_counts.py`)."""

PROFILE: Final = "profile"
"""Begins the name of a workflow profile among models."""

END: Final = ""
"""The end of a workflow in place of an agent, which always has a name; as the first of a pair, the start."""

_BINS: Final = np.float32(BINS)
_PLACE: Final = {moment: place for place, moment in enumerate(MOMENTS)}

LEAST_PROBABILITY: Final = 1e-12
"""A forecast that ruled out the actual outcome costs 27.6 nats, not infinity."""


def model_of(source: Source, version: int | None, reason: str | None) -> str:
    """The model that made a forecast: "version 3", "no version" for a predictor from a folder, or `COUNTS`.

    A profile is "profile version 3" or "profile no version".

    A forecast from counts gives the reason why the predictor made none; a predictor's own back-off gives no reason, or
    one about its hidden states.
    """
    if source == "profile":
        return f"{PROFILE} {'no version' if version is None else f'version {version}'}"
    if version is not None:
        return f"version {version}"
    return COUNTS if source == "back-off" and reason not in (None, STATES_LEFT_OUT, LAYER_LEFT_OUT) else "no version"


def is_predictor(model: str) -> bool:
    """Whether the name of a model is that of a predictor, which promoted figures and counts are compared with."""
    return model != COUNTS and not model.startswith(PROFILE)


def likeliest(forecast: LiveForecast | Counted) -> str:
    """The agent, or `END`, that a forecast holds most likely one step ahead."""
    top = int(forecast.probabilities[0].argmax())
    return forecast.agents[top] if top < len(forecast.agents) else END


_MOST_SINGLE: Final = 200


class Tally:
    """Sums over the next-agent forecasts of one model in one workflow.

    The sums take 1.8 KB, so the first forecasts are kept one by one: most workflows have few.
    """

    __slots__ = ("_flat", "_horizon", "_planes", "_single")

    def __init__(self, horizon: int) -> None:
        self._horizon, self._planes = horizon, len(MOMENTS) * horizon * BINS
        self._single = array("d")  # five numbers each: place and what `_sum` adds to its four planes
        self._flat: array[float] | None = None

    @property
    def sums(self) -> NDArray[np.float32]:
        """Float32 [5, 2, K, BINS]. The five planes by moment, horizon and confidence bin: positions judged, their
        confidence, correct ones, negative log-likelihood in nats, and the positions it covers.
        """
        return np.frombuffer(self._summed(), np.float32).reshape(5, len(MOMENTS), self._horizon, BINS)

    def add(self, moment: Moment, horizon: int, right: bool, confidence: float, given: float | None) -> None:
        """Counts a forecast `horizon` steps ahead, from 1, and whether its most likely outcome came true.

        `confidence` is the probability of the most likely outcome, `given` that of the actual one; None if the forecast
        has no column for it.
        """
        place = min(int(np.float32(confidence) * _BINS), BINS - 1)
        index = (_PLACE[moment] * self._horizon + horizon - 1) * BINS + place
        nats = 0.0 if given is None else -log(max(given, LEAST_PROBABILITY))
        self._single.extend((index, confidence, right, nats, given is not None))
        if len(self._single) > _MOST_SINGLE:
            self._summed()

    def _summed(self) -> array[float]:
        # Not a NumPy array, which is slow at adding single numbers.
        plane, single = self._planes, iter(self._single)
        flat = self._flat = self._flat or array("f", bytes(4 * 5 * plane))
        for place, *added in zip(single, single, single, single, single, strict=True):
            index = int(place)
            flat[index] += 1.0
            for number in added:
                index += plane
                flat[index] += number
        self._single = array("d")
        return flat

    def judge(self, forecast: LiveForecast, horizon: int, actual: str) -> None:
        """Counts row `horizon` of a forecast, from 1, whose outcome was this agent, or `END`.

        The first of equally likely outcomes counts as the most likely one.
        """
        row = forecast.probabilities[horizon - 1]
        top = int(row.argmax())
        column = None
        if actual == END:
            column = len(row) - 1
        elif actual in forecast.agents:
            column = forecast.agents.index(actual)
        given = float(row[column]) if column is not None else None
        self.add(forecast.moment, horizon, top == column, float(row[top]), given)


@dataclass(slots=True)
class LengthTally:
    """Sums over the forecasts of remaining tokens of one model in one workflow.

    Attributes:
        judged: steps whose remaining tokens are known.
        within: of those, how many were at most each of the Q forecast quantiles, int64 [Q].
    """

    quantiles: tuple[float, ...]
    judged: int
    within: NDArray[np.int64]


@dataclass(slots=True)
class AgainstCounts:
    """One step ahead, the predictor or the profile beside online counts, at the steps that both forecast; of the
    predictor those where it does not back off.

    Attributes:
        judged: those steps, and the end of the workflow.
        model, counts: of those, the ones whose agent, or end, the predictor (or profile) and the counts held most
            likely. The predictor's is its latest forecast before the step.
    """

    judged: int = 0
    model: int = 0
    counts: int = 0

    def judge(self, model: str, counts: str, actual: str) -> None:
        """Counts a step, or the end, by what each held most likely."""
        self.judged += 1
        self.model += model == actual
        self.counts += counts == actual


@dataclass(frozen=True, slots=True)
class Followed:
    """The sums of a workflow that has ended.

    Attributes:
        ended: whether it finished; else it expired or was aborted.
        transitions: counts of (before, after), one agent right after another; `END` as the first is the start.
        next_agent: sums by model, as named by `model_of`; the model that forecast last is the last key.
        lengths: likewise for remaining tokens.
        against_counts, profile_against_counts: the predictor, and the profile, beside online counts.
    """

    workflow_type: str
    ended: bool
    transitions: Mapping[tuple[str, str], int]
    next_agent: Mapping[str, Tally]
    lengths: Mapping[str, LengthTally]
    against_counts: AgainstCounts = field(default_factory=AgainstCounts)
    profile_against_counts: AgainstCounts = field(default_factory=AgainstCounts)


TRANSITIONS_KEPT: Final = 256
MODELS_KEPT: Final = 4


@dataclass(slots=True, eq=False)
class WorkflowOutcomes:
    """Judges the forecasts of one running workflow as their outcomes become known.

    Attributes:
        horizon: K; of a longer forecast, the first K steps ahead are judged.
        steps: number of the next step, as far as known.
        last: agent of the last step; `END` before the first one, None if unknown.
        open: (step, model, forecast) of forecasts not fully judged yet.
        open_lengths: tokens produced before each of the first steps, and the forecast of remaining tokens made there.
    """

    workflow_type: str
    horizon: int = 3
    steps: int = 0
    within: bool = False
    produced: float = 0.0
    last: str | None = END
    open: list[tuple[int, str, LiveForecast]] = field(default_factory=list)  # a few: a deque would have room for 64
    open_lengths: list[tuple[float, LiveLengths]] = field(default_factory=list)
    transitions: dict[tuple[str, str], int] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    lengths: dict[str, LengthTally] = field(default_factory=dict)
    against_counts: AgainstCounts = field(default_factory=AgainstCounts)
    profile_against_counts: AgainstCounts = field(default_factory=AgainstCounts)

    def begun(
        self,
        agent: str,
        forecast: LiveForecast,
        step: int | None = None,
        counted: str | None = None,
        profiled: str | None = None,
    ) -> None:
        """Records the start of a step, the outcome of earlier forecasts. An agent without a name is not counted.

        `forecast` is the predictor's at this step's prefill, even if counts were used instead; `step` is its number,
        from 0, if the caller knows it; `counted` and `profiled` are the agents, or `END`, that online counts and the
        profile held most likely here.
        """
        agent, number = agent if isinstance(agent, str) else "", _number(step)
        number = self.steps if number is None else number
        if number < self.steps:
            return
        if number > self.steps:
            self.last = None
        if number > self.steps or self.within:
            self.open_lengths = []
        if agent:
            self._judge(agent, number, counted, profiled)
        self.last, self.steps, self.within = shared(agent) or None, number + 1, True
        self._keep(number, forecast)
        if forecast.remaining.tokens and len(self.open_lengths) < STEPS_KEPT:
            self.open_lengths.append((self.produced, forecast.remaining))

    def again(self, forecast: LiveForecast) -> None:
        """Replaces the latest forecast of the latest step by one made with its state."""
        if self.open and self.open[-1][0] == self.steps - 1:
            self.open.pop()
        self._keep(self.steps - 1, forecast)

    def completed(self, forecast: LiveForecast, output_tokens: object = None) -> None:
        """Records that the latest step has produced its last token; `forecast` was made at that moment."""
        if not self.within:
            return
        self.within = False
        self._keep(self.steps - 1, forecast)
        produced = token_count(output_tokens)
        if produced is None:
            self.open_lengths = []
        else:
            self.produced += produced

    def ended(
        self, reason: EndReason = EndReason.FINISHED, counted: str | None = None, profiled: str | None = None
    ) -> Followed:
        """The sums, once the workflow has ended: an outcome only if it finished. The others as in `begun`."""
        whole = reason is EndReason.FINISHED and not self.within
        if whole:
            self._judge(END, self.steps, counted, profiled)
            self._judge_lengths()
        return Followed(
            self.workflow_type,
            whole,
            self.transitions,
            self.tallies,
            self.lengths,
            self.against_counts,
            self.profile_against_counts,
        )

    def _judge_lengths(self) -> None:
        for before, forecast in self.open_lengths:
            model = model_of(forecast.source, forecast.version, forecast.reason)
            tally = self.lengths.get(model)
            if tally is None and len(self.lengths) < MODELS_KEPT:
                width = len(forecast.quantiles)
                tally = self.lengths[model] = LengthTally(forecast.quantiles, 0, np.zeros(width, np.int64))
            if tally is not None and tally.quantiles == forecast.quantiles:
                tally.judged += 1
                tally.within += [self.produced - before <= most for most in forecast.tokens]

    def _keep(self, step: int, forecast: LiveForecast) -> None:
        while self.open and self.open[0][0] <= step - self.horizon:
            del self.open[0]
        if len(forecast.probabilities):
            model = model_of(forecast.source, forecast.version, forecast.reason)
            self.open.append((step, model, forecast))
            if model in self.tallies:
                self.tallies[model] = self.tallies.pop(model)  # keep the latest last

    def _judge(self, agent: str, step: int, counted: str | None, profiled: str | None) -> None:
        """Judges open forecasts of this step by its agent, or by `END` after the last step."""
        if counted is not None and self.open and self.open[-1][0] == step - 1:
            _, model, forecast = self.open[-1]
            # Where the predictor backs off, counts forecast in its place already.
            if is_predictor(model) and forecast.source == "champion":
                self.against_counts.judge(likeliest(forecast), counted, agent)
        if counted is not None and profiled is not None and step == self.steps:
            self.profile_against_counts.judge(profiled, counted, agent)
        if self.last is not None:
            pair = (self.last, shared(agent))
            if pair in self.transitions or len(self.transitions) < TRANSITIONS_KEPT:
                self.transitions[pair] = self.transitions.get(pair, 0) + 1
        for made_at, model, forecast in self.open:
            ahead = step - made_at
            if ahead <= min(self.horizon, len(forecast.probabilities)):
                if model not in self.tallies and len(self.tallies) < MODELS_KEPT:
                    self.tallies[model] = Tally(self.horizon)
                if model in self.tallies:
                    self.tallies[model].judge(forecast, ahead, agent)


def _number(step: object) -> int | None:
    """The step number, or None if it is not valid."""
    if isinstance(step, int | np.integer) and not isinstance(step, bool) and step >= 0:
        return int(step)
    return None
