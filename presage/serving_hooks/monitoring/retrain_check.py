"""Decides whether to retrain: replays recorded traces through the drift alarm of an engine (`drift.py`).

Retraining is due for a workflow type with an alarm at the end of the traces, and for one that is absent from the
training data but frequent enough to learn from. Workflows are replayed one by one in the order of their start, each
with all its events: so a truncated trace does not favour short workflows.
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
from presage.serving_hooks.monitoring.drift import Alarm, Drift, DriftConfig
from presage.serving_hooks.monitoring.live_accuracy import LiveAccuracy
from presage.serving_hooks.monitoring.outcomes import Followed, WorkflowOutcomes
from presage.serving_hooks.monitoring.promoted import Promoted
from presage.serving_hooks.workflows import EndReason
from presage.serving_hooks.workflows.live import NO_LENGTHS, NOTHING, LiveForecast, LiveLengths

_COLUMNS: Final = ("workflow_type", "workflow_id", "step", "agent", "output_tokens", "complete")


@dataclass(frozen=True)
class TraceForecasts:
    """Forecasts of the models at each of the n rows of a trace.

    Attributes:
        agents, probabilities: names of the first V columns, and by moment float32 [n, K, V+1], END last; empty without
            such a model.
        quantiles, tokens: Q numbers, rising, and float32 [n, Q], tokens left when the row's step begins; rows of NaN
            without a forecast.
    """

    agents: tuple[str, ...] = ()
    probabilities: Mapping[Moment, NDArray[np.float32]] = field(default_factory=dict)
    version: int | None = None
    quantiles: tuple[float, ...] = ()
    tokens: NDArray[np.float32] | None = None
    lengths_version: int | None = None

    def at(self, row: int, moment: Moment) -> LiveForecast:
        """The forecast at a row, as the forecaster would have made it."""
        probabilities = self.probabilities.get(moment)
        remaining = NO_LENGTHS
        if moment == PREFILL and self.tokens is not None and np.isfinite(self.tokens[row]).all():
            tokens = tuple(self.tokens[row].tolist())
            remaining = LiveLengths("champion", 0, self.quantiles, tokens, 0, self.lengths_version)
        if probabilities is None:
            return LiveForecast("none", 0, moment, NOTHING, (), None, None, remaining)
        return LiveForecast("champion", 0, moment, probabilities[row], self.agents, self.version, None, remaining)


def followed_of(table: pa.Table, forecasts: TraceForecasts) -> Iterator[Followed]:
    """The sums of each workflow of a trace's served steps, by the time of its first step if recorded."""
    horizon = max((probabilities.shape[1] for probabilities in forecasts.probabilities.values()), default=1)
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in _COLUMNS}
    for rows in _by_time(table):
        outcomes = WorkflowOutcomes(columns["workflow_type"][rows[0]], horizon)
        for row in rows:
            outcomes.begun(columns["agent"][row], forecasts.at(row, PREFILL), columns["step"][row])
            outcomes.completed(forecasts.at(row, COMPLETION), columns["output_tokens"][row])
        yield outcomes.ended(EndReason.FINISHED if columns["complete"][rows[0]] else EndReason.ABORTED)


def _by_time(table: pa.Table) -> list[range]:
    """The rows of each workflow; workflows without a time come first, in the order of the table."""
    codes = workflow_codes(table)
    ends = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes)).tolist()
    begins = [0, *ends[:-1]]
    started = pc.fill_null(pc.cast(table["started_at"], pa.int64()), np.iinfo(np.int64).min).to_numpy()
    order = np.argsort(started[begins], kind="stable").tolist()
    return [range(begins[place], ends[place]) for place in order]


def retrain_check(
    workflows: Iterable[Followed],
    promoted: Mapping[str, Promoted] | None = None,
    known_types: Collection[str] | None = None,
    config: DriftConfig | None = None,
) -> dict[str, Any]:
    """Runs the drift alarm over workflows, oldest first.

    Args:
        workflows: from `followed_of`, or kept from an engine.
        promoted: figures by type; a type without any is compared with its own first workflows.
        known_types: types in the training data; None if unknown.
        config: of the alarm; a type absent from the training data is due from `learn_from` workflows on.

    Returns:
        JSON values: `due`, whether retraining is due for any type, and under `workflow_types` for each type:

        - `due`: whether retraining is due;
        - `workflows`: in the traces; `watched`: of those, compared with the figures, 0 if there were too few;
        - `alarms_raised`: including those that ended; `alarm`: the one at the end of the traces, or null;
        - `never_seen`: whether the type is absent from the training data;
        - `latest`: figures of each model on the latest workflows.
    """
    drift, live = Drift(promoted, config), LiveAccuracy()
    count: Counter[str] = Counter()
    watched: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for workflow in workflows:
        name = workflow.workflow_type
        count[name] += 1
        watch = drift.watch(name)
        watched[name] += watch is not None and watch.promoted is not None
        raised[name] += isinstance(drift.followed(workflow), Alarm)
        live.followed(workflow)
    latest = live.to_dict()
    types = {}
    for name, seen in sorted(count.items()):
        alarm = drift.alarms.get(name)
        never = known_types is not None and name not in known_types
        types[name] = {
            "due": alarm is not None or (never and seen >= drift.config.learn_from),
            "workflows": seen,
            "watched": watched[name],
            "alarms_raised": raised[name],
            "alarm": alarm.to_dict() if alarm is not None else None,
            "never_seen": never,
            "latest": latest.get(name, {}),
        }
    return {"due": any(checked["due"] for checked in types.values()), "workflow_types": types}
