"""The alarm: a workflow type is no longer what its model was promoted on, and why.

Of each workflow type the figures of `promoted.py` are watched: agents never seen in training, accuracy one step ahead
at both moments, coverage at every quantile, and the call graph. Each has its detector (`detector.py`), whose limit is
the end of the promoted interval; a weighted mean of a type's detectors is one as well, and raises the alarm. So one
bound holds for all figures of a type together: as long as every true mean lies inside its interval, the chance of an
alarm among n workflows is at most n / `workflows` · `false_alarms`, however often one looks.

A workflow type that came without promoted figures is held against its own beginning: the first half of `learn_from`
workflows give the call graph, the second half the figures. That finds what changes later, not what was wrong from the
start. Figures that came without a call graph (`promoted_of_metrics`) wait for one, and go before what was learnt.

Workflows that were cut, or fell silent, show no end. Where the promoted figures are of workflows that have all ended,
those are held against the beginning of their own kind. The bound holds for both together, as it counts workflows.

An alarm ends when, in a whole block of `recovery` workflows after it, the mean of each figure that raised it lies back
on the right side of its limit; a figure without evidence in the block (a model that is no longer asked has none) keeps
it up. It also ends by `reset`, when another version takes over. Then the detectors begin anew.

Workflows are taken as they end. Right after a start those that end are the short ones, which may differ from the mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from presage.serving_hooks.truth.alarm import Alarm, Kind, Recovered
from presage.serving_hooks.truth.outcomes import Followed
from presage.serving_hooks.truth.promoted import Promoted
from presage.serving_hooks.truth.watch import DriftConfig, Watch

__all__ = ["Alarm", "Drift", "DriftConfig", "Kind", "Recovered"]


class Drift:
    """Watches every workflow type.

    Args:
        promoted: figures by workflow type. They are never forgotten; others are, where types are too many.
        config: rates of false alarms and sizes.

    Attributes:
        alarms: those that stand, by workflow type.
        raised: how many there have been.
    """

    def __init__(self, promoted: Mapping[str, Promoted] | None = None, config: DriftConfig | None = None) -> None:
        self.config = config or DriftConfig()
        self.alarms: dict[str, Alarm] = {}
        self.raised = 0
        self._promoted: dict[str, Watch] = {}
        self._others: OrderedDict[str, Watch] = OrderedDict()
        for name, figures in (promoted or {}).items():
            self.reset(name, figures)

    def followed(self, workflow: Followed) -> Alarm | Recovered | None:
        """A workflow is over: the alarm it raises, or the end of one."""
        name = workflow.workflow_type
        said = self._of(workflow).followed(workflow)
        if isinstance(said, Alarm):
            self.raised += 1
        if said is not None:
            self._settle(name)
        return None if isinstance(said, Recovered) and name in self.alarms else said

    def falls_back(self, workflow_type: str, kind: Kind | None = None) -> bool:
        """Whether forecasts for this workflow type are to come from back-off counts; of this kind, or of any."""
        alarm = self.alarms.get(workflow_type)
        return alarm is not None and (kind is None or alarm.speaks_of(kind))

    def promoted(self, workflow_type: str) -> Promoted | None:
        """What a type is held against; None as long as that is being learnt."""
        of = self._promoted.get(workflow_type) or self._others.get(workflow_type)
        return of.promoted if of is not None else None

    def watched(self, workflow_type: str) -> int:
        """Workflows of a type held against its figures, from the last reset or recovery."""
        of = self._promoted.get(workflow_type) or self._others.get(workflow_type)
        return of.workflows if of is not None else 0

    def reset(self, workflow_type: str, promoted: Promoted | None = None) -> None:
        """Another model answers for this type: its alarm ends, and what it is held against is this, or is learnt."""
        self.alarms.pop(workflow_type, None)
        self._promoted.pop(workflow_type, None)
        self._others.pop(workflow_type, None)
        if promoted is not None:
            self._promoted[workflow_type] = Watch(workflow_type, self.config, promoted)

    def _settle(self, name: str) -> None:
        """The alarm that stands for a type: that of its promoted figures, where both of its watches have one."""
        watches = (self._promoted.get(name), self._others.get(name))
        standing = [of.alarm for of in watches if of is not None and of.alarm is not None]
        self.alarms.pop(name, None)
        if standing:
            self.alarms[name] = standing[0]

    def _of(self, workflow: Followed) -> Watch:
        name = workflow.workflow_type
        of = self._promoted.get(name)
        if of is not None and (workflow.ended or of.promoted is None or not of.promoted.ended):
            return of
        of = self._others.get(name)
        if of is None:
            of = self._others[name] = Watch(name, self.config, None)
            if len(self._others) > self.config.types:
                self._settle(self._others.popitem(last=False)[0])
        self._others.move_to_end(name)
        return of
