"""Sources of forecasts in a replay: the oracle, the oracle with noise, online counts, or a trained model.

The oracle reads the trace: agents in the order of step numbers, END after the last, even if the workflow was cut.
`noise:x` mixes it with a share x of the uniform distribution over outcomes, and its remaining tokens with those of a
random step. A model is called as in serving; callers exclude the workflows it was trained on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictor_kinds import KINDS, Kind
from presage.replay.workload import ReplayJob
from presage.serving_hooks.forecasting.circuit_breaker import Budget
from presage.serving_hooks.forecasting.forecaster import Forecaster, VersionedForecaster
from presage.serving_hooks.forecasting.online_counts import OnlineCounts
from presage.serving_hooks.forecasting.return_counts import QUANTILES
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.live import NO_RETURN, NOTHING, LiveForecast, LiveReturn

if TYPE_CHECKING:
    from presage.serving_hooks.forecasting.forecasts import Contexts, NextAgents, RemainingTokens, ReturnTimes
    from presage.serving_hooks.workflows.identity import Step

    class _Both(NextAgents, RemainingTokens, Protocol): ...


HORIZON: Final = 3
"""Steps the oracle looks ahead: the default K of the score."""

COUNTS: Final = "counts"
_PATIENT: Final = Budget(deadline_s=math.inf, hang_s=None)
"""The virtual clock does not advance while a predictor runs, so it has no deadline."""


class OracleForecaster:
    """Forecasts the recorded future from the trace, mixed with noise.

    Args:
        noise: share of the uniform distribution, 0 to 1.
    """

    def __init__(self, jobs: Sequence[ReplayJob], noise: float = 0.0) -> None:
        self._left = _left(jobs, noise)
        self._jobs = {(job.workflow_type, job.workflow_id): job for job in jobs}
        self._agents = tuple(sorted({step.agent for job in jobs for step in job.steps}))
        self._columns = {agent: column for column, agent in enumerate(self._agents)}
        self._noise = noise
        self._at: dict[str, int] = {}
        self._rows: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def on_prefill(
        self,
        workflow: Workflow,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """The next agents after this step."""
        self._at[workflow.key] = step or 0
        return self._after(workflow, PREFILL)

    def on_completion(self, workflow: Workflow, **_: Any) -> LiveForecast:
        """The same, after its output."""
        return self._after(workflow, COMPLETION)

    def close(self, workflow: Workflow) -> None:
        """The workflow has ended."""
        self._at.pop(workflow.key, None)

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float | None:
        """Output tokens of this step and all later ones."""
        return self._left[step.workflow_type, step.workflow_id][step.number or 0]

    def _after(self, workflow: Workflow, moment: Moment) -> LiveForecast:
        steps = self._jobs[workflow.step.workflow_type, workflow.step.workflow_id].steps
        index = self._at[workflow.key]
        coming = tuple(self._columns[step.agent] for step in steps[index + 1 : index + 1 + HORIZON])
        rows = self._rows.get(coming)
        if rows is None:
            end = len(self._agents)
            rows = np.full((HORIZON, end + 1), self._noise / (end + 1), np.float32)
            for k in range(HORIZON):
                rows[k, coming[k] if k < len(coming) else end] += 1.0 - self._noise
            self._rows[coming] = rows
        return LiveForecast("champion", len(steps), moment, rows, self._agents, None)


class OracleReturnTimes:
    """Forecasts the recorded return times, mixed with noise.

    A step returns when the first step that waits for no other one arrives. Where none does yet, because others of the
    workflow still run, there is no forecast.

    Args:
        noise: share of the distribution of all return times in the mixture, 0 to 1.
    """

    def __init__(self, jobs: Sequence[ReplayJob], noise: float = 0.0) -> None:
        self._jobs = {(job.workflow_type, job.workflow_id): job for job in jobs}
        self._noise = noise
        pauses = [step.pause_s for job in jobs for step in job.steps if step.parents]
        self._all = np.sort(np.asarray(pauses or [0.0]))
        self._end = len(jobs) / sum(len(job.steps) for job in jobs)
        self._done: defaultdict[str, set[int]] = defaultdict(set)

    def arrived(self, workflow: Workflow, step: Step, input_tokens: int, now: float) -> None:
        """Nothing to learn."""

    def completed(
        self, workflow: Workflow, step: Step, output_tokens: int, finish_reason: str | None, now: float
    ) -> LiveReturn:
        """The time until the next step, from the trace."""
        job, done = self._jobs[step.workflow_type, step.workflow_id], self._done[step.workflow]
        done.add(step.number or 0)
        if len(done) == len(job.steps):
            return self._mixed(math.inf, 1.0)
        ready = [
            waiting.pause_s
            for number, waiting in enumerate(job.steps)
            if number not in done and (step.number or 0) in waiting.parents and done.issuperset(waiting.parents)
        ]
        return self._mixed(min(ready), 0.0) if ready else NO_RETURN

    def answered(
        self, workflow: Workflow, step: Step, finish_reason: str | None, tools: Sequence[str] | None
    ) -> LiveReturn | None:
        """Nothing new: the trace is known."""
        return None

    def away(self, workflow: Workflow) -> tuple[LiveReturn, float] | None:
        """Nothing to explain in a replay."""
        return None

    def ended(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """The workflow has ended."""
        self._done.pop(workflow.key, None)

    def _mixed(self, true_s: float, end: float) -> LiveReturn:
        noise, levels = self._noise, np.asarray(QUANTILES)
        if not noise:
            return LiveReturn("champion", 1, end, QUANTILES, (true_s,) * len(QUANTILES), None)
        end = (1.0 - noise) * end + noise * self._end
        share = noise if math.isfinite(true_s) else 1.0  # of the noise, given that the workflow returns
        below = share * np.searchsorted(self._all, true_s) / len(self._all)
        places = np.where(levels <= below, levels, np.maximum(levels - (1.0 - share), below)) / share
        seconds = np.quantile(self._all, np.clip(places, 0.0, 1.0))
        seconds = np.where((levels > below) & (levels <= below + 1.0 - share), true_s, seconds)
        return LiveReturn("champion", 1, end, QUANTILES, tuple(seconds.tolist()), None)


class OutputLengthOracle:
    """Knows the output length of each request and nothing of its workflow: for shortest request first."""

    def __init__(self, jobs: Sequence[ReplayJob]) -> None:
        self._jobs = {(job.workflow_type, job.workflow_id): job for job in jobs}

    def remaining_tokens(self, workflow: Workflow, step: Step, input_tokens: int) -> float | None:
        """Output tokens of this step."""
        return float(self._jobs[step.workflow_type, step.workflow_id].steps[step.number or 0].output_tokens)


class LengthsOnly:
    """Passes steps to a source that forecasts remaining tokens, and blanks its forecasts of agents."""

    def __init__(self, source: NextAgents) -> None:
        self._source = source

    def on_prefill(self, workflow: Workflow, agent: str, **more: Any) -> LiveForecast:
        """No forecast."""
        return _blank(self._source.on_prefill(workflow, agent, **more))

    def on_completion(self, workflow: Workflow, **more: Any) -> LiveForecast:
        """No forecast."""
        return _blank(self._source.on_completion(workflow, **more))

    def close(self, workflow: Workflow) -> None:
        """The workflow has ended."""
        self._source.close(workflow)


def _blank(forecast: LiveForecast) -> LiveForecast:
    return replace(forecast, source="none", probabilities=NOTHING, agents=())


def _left(jobs: Sequence[ReplayJob], noise: float) -> dict[tuple[str, str], list[float]]:
    true = [np.cumsum([step.output_tokens for step in job.steps][::-1])[::-1] for job in jobs]
    all_steps = np.concatenate(true)
    chance = np.split(
        np.random.default_rng(0).choice(all_steps, len(all_steps)), np.cumsum([len(remaining) for remaining in true])
    )
    return {
        (job.workflow_type, job.workflow_id): ((1 - noise) * remaining + noise * other).tolist()
        for job, remaining, other in zip(jobs, true, chance, strict=False)
    }


Source = Callable[[Sequence[ReplayJob], Callable[[], float]], "_Both"]
"""Makes the source of forecasts of one run, from its jobs and clock."""

Returns = Callable[[Sequence[ReplayJob], Callable[[], float]], "ReturnTimes"]
"""Likewise that of return times."""


def known(name: str) -> bool:
    """Whether the name is that of a source that is not a model."""
    return name in ("oracle", COUNTS) or name.startswith("noise:")


def source(name: str, lengths: str | None = None, profile: str | None = None) -> Source:
    """A source of forecasts by its name.

    Args:
        name: oracle, noise:x with x from 0 to 1, counts, or the folder of a next-agent model.
        lengths: folder of a remaining-length model beside a next-agent model or counts.
        profile: folder of a profile behind them, before the counts.

    Raises:
        ConfigurationError: unknown name, or `lengths` or `profile` beside a source that needs none.
    """
    check_beside(name, lengths, profile)
    if name == "oracle":
        return lambda jobs, clock: OracleForecaster(jobs)
    if name.startswith("noise:"):
        share = _share(name)
        return lambda jobs, clock: OracleForecaster(jobs, share)
    return _model(None if name == COUNTS else Path(name), lengths, profile)


def return_times(name: str) -> Returns:
    """A source of return times by its name.

    Args:
        name: oracle, noise:x with x from 0 to 1, counts, or the folder of a return-time model.

    Raises:
        ConfigurationError: unknown name.
    """
    if name == "oracle":
        return lambda jobs, clock: OracleReturnTimes(jobs)
    if name.startswith("noise:"):
        share = _share(name)
        return lambda jobs, clock: OracleReturnTimes(jobs, share)
    kind, forecaster = _named_by("returns")
    if name == COUNTS:
        return lambda jobs, clock: forecaster(clock=clock)
    if not Path(name).is_dir():
        raise ConfigurationError(f"--returns {name}: no folder of a model, and none of oracle, noise:x and {COUNTS}")
    predictor = kind.load(name)
    return lambda jobs, clock: forecaster(predictor, budget=_PATIENT, clock=clock)


ContextSource = Callable[[Callable[[], float]], "Contexts"]
"""Makes the source of context growth of one run, from its clock."""


def contexts(of: str | ContextSource, clock: Callable[[], float]) -> Contexts:
    """The forecasts of a context-growth model, from its folder, or of another source."""
    if callable(of):
        return of(clock)
    kind, forecaster = _named_by("contexts")
    made: Contexts = forecaster(kind.load(of), budget=_PATIENT, clock=clock)
    return made


def _named_by(option: str) -> tuple[Kind, Callable[..., Any]]:
    """The kind whose model this option of `presage replay` names, and its forecaster."""
    kind = next(kind for kind in KINDS.values() if kind.replayed == option)
    assert kind.forecaster is not None
    return kind, kind.forecaster


def check_beside(name: str, lengths: str | None, profile: str | None) -> None:
    """Rejects a remaining-length model or a profile beside a source that forecasts everything itself.

    Raises:
        ConfigurationError: both are given.
    """
    if profile is not None and known(name) and name != COUNTS:
        raise ConfigurationError(
            f"--profile with --forecasts {name}: {name} already forecasts every step; give --forecasts a next-agent "
            f"model or {COUNTS}, or leave --profile out"
        )
    if lengths is not None and known(name) and name != COUNTS:
        raise ConfigurationError(
            f"--lengths with --forecasts {name}: {name} already forecasts remaining tokens; give --forecasts a "
            f"next-agent model or {COUNTS}, or leave --lengths out"
        )


def _share(name: str) -> float:
    try:
        share = float(name.removeprefix("noise:"))
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigurationError(f"--forecasts {name}: the share of noise is a number from 0 to 1, such as noise:0.2")
    return share


def _model(folder: Path | None, lengths: str | None, profile: str | None) -> Source:
    from presage.predictors.length.predictor import RemainingLengthPredictor
    from presage.predictors.next_agent.predictor import NextAgentPredictor
    from presage.predictors.profile.predictor import ProfilePredictor

    if folder is not None and not folder.is_dir():
        raise ConfigurationError(
            f"--forecasts {folder}: no folder of a model, and none of oracle, noise:x and {COUNTS}"
        )
    predictor = NextAgentPredictor.load(folder) if folder is not None else None
    left = RemainingLengthPredictor.load(Path(lengths)) if lengths is not None else None
    profiles = ProfilePredictor.load(Path(profile)) if profile is not None else None

    def made(jobs: Sequence[ReplayJob], clock: Callable[[], float]) -> _Both:
        agents = {step.agent for job in jobs for step in job.steps}
        vocabulary = predictor.vocabulary if predictor is not None else None
        if vocabulary is not None and all(vocabulary.agent(name) == vocabulary.unknown for name in agents):
            raise ConfigurationError(
                f"--forecasts {folder}: the model knows none of the {len(agents)} agents of these traces; it was "
                "trained on other applications: train one on traces of these"
            )
        return VersionedForecaster(
            Forecaster(predictor, lengths=left, profile=profiles, back_off=OnlineCounts(), budget=_PATIENT, clock=clock)
        )

    return made
