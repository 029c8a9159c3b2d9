"""Decides whether to retrain: replays recorded traces through the drift alarm.

The replay uses the outcome tracker, figures and detectors of an engine (`drift.py`), so it raises the same alarms.
Retraining is due for a workflow type with an alarm at the end of the traces, and for one that is absent from the
training data but frequent enough to learn from.

Forecasts of a whole trace are made in one batch beforehand; they equal those made event by event. Workflows are
replayed one by one in the order of their start, each with all its events: whether a workflow is judged then does not
depend on its duration, and a truncated trace does not favour short workflows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.forecasting.live import NO_LENGTHS, NOTHING, LiveForecast, LiveLengths
from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.outcomes import Followed, OutcomeTracker
from presage.serving_hooks.monitoring.promoted import Promoted
from presage.serving_hooks.workflows import EndReason

_COLUMNS: Final = ("workflow_type", "workflow_id", "step", "agent", "kind", "output_tokens", "complete")


@dataclass(frozen=True)
class Said:
    """Forecasts of the models at each of the n rows of a trace.

    Attributes:
        agents: names of the first V columns.
        probabilities: float32 [n, K, V+1], END last, by moment; empty without such a model.
        version: of that model.
        quantiles: Q numbers, rising; none without a model of lengths.
        tokens: float32 [n, Q], tokens left when the row's step begins; rows of NaN without a forecast.
        lengths_version: of that model.
    """

    agents: tuple[str, ...] = ()
    probabilities: Mapping[Moment, NDArray[np.float32]] = field(default_factory=dict)
    version: int | None = None
    quantiles: tuple[float, ...] = ()
    tokens: NDArray[np.float32] | None = None
    lengths_version: int | None = None

    def at(self, row: int, moment: Moment) -> LiveForecast:
        """The forecast at a row, as the forecaster would have made it."""
        of = self.probabilities.get(moment)
        remaining = NO_LENGTHS
        if moment == PREFILL and self.tokens is not None and np.isfinite(self.tokens[row]).all():
            tokens = tuple(self.tokens[row].tolist())
            remaining = LiveLengths("champion", 0, self.quantiles, tokens, 0, self.lengths_version)
        if of is None:
            return LiveForecast("none", 0, moment, NOTHING, (), None, None, remaining)
        return LiveForecast("champion", 0, moment, of[row], self.agents, self.version, None, remaining)


def followed_of(table: pa.Table, forecasts: Said) -> Iterator[Followed]:
    """The sums of each workflow of a trace, by the time of its first step if recorded.

    Args:
        table: n rows in canonical order.
        forecasts: at each row.
    """
    ended: list[Followed] = []
    horizon = max((of.shape[1] for of in forecasts.probabilities.values()), default=1)
    tracker = OutcomeTracker(ended.append, horizon)
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in _COLUMNS}
    for rows in _by_time(table):
        for row in rows:
            _replay_step(tracker, columns, forecasts, row)
        ids = columns["workflow_type"][rows[0]], columns["workflow_id"][rows[0]]
        tracker.ended(*ids, EndReason.FINISHED if columns["complete"][rows[0]] else EndReason.ABORTED)
        yield ended.pop()


def _replay_step(tracker: OutcomeTracker, columns: Mapping[str, list[Any]], forecasts: Said, row: int) -> None:
    """Replays a step. A tool produces no tokens; those of an LLM may be unknown."""
    of = {name: values[row] for name, values in columns.items()}
    ids = (of["workflow_type"], of["workflow_id"])
    tracker.begun(*ids, of["agent"], forecasts.at(row, PREFILL), of["step"])
    tokens = of["output_tokens"] if of["kind"] == "llm" else 0
    tracker.completed(*ids, forecasts.at(row, COMPLETION), tokens)


def _by_time(table: pa.Table) -> list[range]:
    """The rows of each workflow; workflows without a time come first, in the order of the table."""
    codes = workflow_codes(table)
    ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes)).tolist()
    begins = [0, *ends[:-1]]
    started = pc.fill_null(pc.cast(table["started_at"], pa.int64()), np.iinfo(np.int64).min).to_numpy()
    order = np.argsort(started[begins], kind="stable").tolist()
    return [range(begins[place], ends[place]) for place in order]


@dataclass(frozen=True)
class TypeCheck:
    """The result for one workflow type.

    Attributes:
        workflows: in the traces.
        watched: of those, compared with the figures; 0 if there were too few.
        raised: alarms raised, including those that ended.
        alarm: the alarm at the end of the traces, if any.
        never_seen: whether the type is absent from the training data.
        due: whether retraining is due.
    """

    workflows: int
    watched: int
    raised: int
    alarm: Alarm | None
    never_seen: bool
    due: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "due": self.due,
            "workflows": self.workflows,
            "watched": self.watched,
            "alarms_raised": self.raised,
            "alarm": self.alarm.to_dict() if self.alarm is not None else None,
            "never_seen": self.never_seen,
        }


@dataclass(frozen=True)
class RetrainCheck:
    """The result for all workflow types of a trace.

    Attributes:
        types: by name.
        live: figures of the latest workflows.
    """

    types: Mapping[str, TypeCheck]
    live: LiveAccuracy

    @property
    def due(self) -> bool:
        """Whether retraining is due for any type."""
        return any(of.due for of in self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; "latest" holds the figures of each model on the latest workflows."""
        latest = self.live.to_dict()
        types = {name: {**of.to_dict(), "latest": latest.get(name, {})} for name, of in self.types.items()}
        return {"due": self.due, "workflow_types": types}


def retrain_check(
    workflows: Iterable[Followed],
    promoted: Mapping[str, Promoted] | None = None,
    known_types: Collection[str] | None = None,
    config: DriftConfig | None = None,
) -> RetrainCheck:
    """Runs the drift alarm over workflows, oldest first.

    Args:
        workflows: from `followed_of`, or kept from an engine.
        promoted: figures by type; a type without any is compared with its own first workflows.
        known_types: types in the training data; None if unknown.
        config: of the alarm; a type absent from the training data is due from `learn_from` workflows on.
    """
    drift, live = Drift(promoted, config), LiveAccuracy()
    count: Counter[str] = Counter()
    watched: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for workflow in workflows:
        name = workflow.workflow_type
        count[name] += 1
        watched[name] += drift.promoted(name) is not None
        raised[name] += isinstance(drift.followed(workflow), Alarm)
        live.followed(workflow)
    types = {}
    for name, seen in sorted(count.items()):
        alarm = drift.alarms.get(name)
        never = known_types is not None and name not in known_types
        due = alarm is not None or (never and seen >= drift.config.learn_from)
        types[name] = TypeCheck(seen, watched[name], raised[name], alarm, never, due)
    return RetrainCheck(types, live)
