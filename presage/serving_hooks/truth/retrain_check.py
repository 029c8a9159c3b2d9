"""Is it time to train again? The alarm, run over traces that were recorded since.

The same following, figures and detectors as in an engine (`drift.py`), so what it says of a trace is what the engine
would have said. Retraining is due for a workflow type whose alarm stands at the end of the traces, and for one that no
model has seen and that came often enough to learn from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from presage.serving_hooks.truth.drift import Alarm, Drift, DriftConfig
from presage.serving_hooks.truth.live_accuracy import LiveAccuracy
from presage.serving_hooks.truth.outcomes import Followed
from presage.serving_hooks.truth.promoted import Promoted


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
        workflows: from `recorded.followed_of`, or kept from an engine.
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
