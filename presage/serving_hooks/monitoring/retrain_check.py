"""Is it time to train again? Recorded traces, told and judged as in an engine, and the alarm run over them.

The same tracker, figures and detectors as in an engine (`drift.py`), so what is said of a trace is what the engine
would have said. Retraining is due for a workflow type whose alarm stands at the end of the traces, and for one that no
model has seen and that came often enough to learn from.

Forecasts of a whole trace are made at once beforehand, which gives the numbers of one event after the other. Workflows
come one after the other in the order in which they began, each with all its events: so whether one is judged does not
hang on how long it takes, and a trace that was cut leaves no more short ones than long ones.
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
    """What models forecast at each of the n rows of a trace.

    Attributes:
        agents: names of the first V columns.
        probabilities: float32 [n, K, V+1], END last, by moment; empty without such a model.
        version: of that model.
        quantiles: Q numbers, rising; none without a model of lengths.
        tokens: float32 [n, Q], tokens left when the row's step begins; rows of NaN where nothing was said.
        lengths_version: of that model.
    """

    agents: tuple[str, ...] = ()
    probabilities: Mapping[Moment, NDArray[np.float32]] = field(default_factory=dict)
    version: int | None = None
    quantiles: tuple[float, ...] = ()
    tokens: NDArray[np.float32] | None = None
    lengths_version: int | None = None

    def at(self, row: int, moment: Moment) -> LiveForecast:
        """As the forecaster would have said it."""
        of = self.probabilities.get(moment)
        remaining = NO_LENGTHS
        if moment == PREFILL and self.tokens is not None and np.isfinite(self.tokens[row]).all():
            tokens = tuple(self.tokens[row].tolist())
            remaining = LiveLengths("champion", 0, self.quantiles, tokens, 0, self.lengths_version)
        if of is None:
            return LiveForecast("none", 0, moment, NOTHING, (), None, None, remaining)
        return LiveForecast("champion", 0, moment, of[row], self.agents, self.version, None, remaining)


def followed_of(table: pa.Table, said: Said) -> Iterator[Followed]:
    """Each workflow of a trace in canonical order, by the time of its first step where there are times.

    Args:
        table: n rows.
        said: what was forecast at each of them.
    """
    found: list[Followed] = []
    horizon = max((of.shape[1] for of in said.probabilities.values()), default=1)
    following = OutcomeTracker(found.append, horizon)
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in _COLUMNS}
    for rows in _by_time(table):
        for row in rows:
            _tell(following, columns, said, row)
        ids = columns["workflow_type"][rows[0]], columns["workflow_id"][rows[0]]
        following.ended(*ids, EndReason.FINISHED if columns["complete"][rows[0]] else EndReason.ABORTED)
        yield found.pop()


def _tell(following: OutcomeTracker, columns: Mapping[str, list[Any]], said: Said, row: int) -> None:
    """A step: a tool produces no tokens, and of an LLM they may not be known."""
    of = {name: values[row] for name, values in columns.items()}
    ids = (of["workflow_type"], of["workflow_id"])
    following.begun(*ids, of["agent"], said.at(row, PREFILL), of["step"])
    tokens = of["output_tokens"] if of["kind"] == "llm" else 0
    following.completed(*ids, said.at(row, COMPLETION), tokens)


def _by_time(table: pa.Table) -> list[range]:
    """The rows of each workflow; those without a time stay where they are, before the others."""
    codes = workflow_codes(table)
    ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes)).tolist()
    begins = [0, *ends[:-1]]
    started = pc.fill_null(pc.cast(table["started_at"], pa.int64()), np.iinfo(np.int64).min).to_numpy()
    order = np.argsort(started[begins], kind="stable").tolist()
    return [range(begins[place], ends[place]) for place in order]


@dataclass(frozen=True)
class TypeCheck:
    """One workflow type.

    Attributes:
        workflows: in the traces.
        watched: of those, how many were held against the figures; 0: too few to tell anything.
        raised: alarms, also those that ended by themselves.
        alarm: the one that stands at the end.
        never_seen: no model has seen the type.
        due: whether a model is to be trained again.
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
    """Every workflow type of some traces.

    Attributes:
        types: by name.
        live: figures of the latest workflows.
    """

    types: Mapping[str, TypeCheck]
    live: LiveAccuracy

    @property
    def due(self) -> bool:
        """Whether it is for any type."""
        return any(of.due for of in self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; "latest" has the figures of each model on the latest workflows."""
        latest = self.live.to_dict()
        told = {name: {**of.to_dict(), "latest": latest.get(name, {})} for name, of in self.types.items()}
        return {"due": self.due, "workflow_types": told}


def retrain_check(
    workflows: Iterable[Followed],
    promoted: Mapping[str, Promoted] | None = None,
    known_types: Collection[str] | None = None,
    config: DriftConfig | None = None,
) -> RetrainCheck:
    """Runs the alarm over workflows, oldest first.

    Args:
        workflows: from `followed_of`, or kept from an engine.
        promoted: what types are held against; another type is held against its own first workflows.
        known_types: those that the models were trained on; None if that is not known.
        config: of the alarm; a type never seen is due from `learn_from` workflows on.
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
