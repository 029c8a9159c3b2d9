"""Agents that a model does not know: whose place they take, and how often they come where no agent is missing.

A model names the agents of its training alone. Once a workflow type calls another one, two things are learnt of it.

**Whose place it takes.** Before each step of a new agent the model has forecast who comes. The new agent stands for the
known one that was likeliest there, in the geometric mean over its latest steps, if this is likely enough and well ahead
of the second, and does not work beside it in the same workflows: two agents that do are two. The model
then reads its steps as those of the known agent, and what it forecasts of the known agent is shared out among all that
stand for it (one of two, after a split, or while a release reaches one workflow after the other).

**How often the others come.** Online counts since the first new agent came say, after the same agents, how likely a new
one is that stands for nobody; the model's forecast is of the rest: p(o) = (1 - u) p_model(o) for what the model knows,
with u the sum of the counts' p(o) over such new agents. This forecast and the counts' own are then mixed, after each
agent by how well both have forecast there (dynamic model averaging: Raftery, Kárný and Ettler, 2010), since what
follows a known agent may have changed as well.

Both are of one version, workflow type and tenant. A type that calls known agents alone is forecast by the model as it
is, and costs the lookup of its name.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import TYPE_CHECKING, Final

import numpy as np

from presage.serving_hooks.forecasting.online_counts import BackoffConfig, OnlineCounts, type_to_drop
from presage.serving_hooks.workflows.identity import unscoped

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from presage.predictors.next_agent.predictor import NextAgentPredictor
    from presage.serving_hooks.workflows.live import LiveForecast

LEAST_STEPS: Final = 5
LEAST_WORKFLOWS: Final = 3
"""Steps of a new agent, and workflows with it, before it may stand for a known one."""
LIKELY: Final = 0.35
"""Least geometric mean of the probability that the known agent comes. It is measured before the model reads the new
agent as the known one, and then rises: right ones began at .37 to .9 on public traces, wrong ones at .2 to .28."""
_LEAST: Final = 1e-3
"""No forecast counts as less likely than that, so that one surprise does not outweigh all other steps."""
_LEAD: Final = 3.0
"""Nats by which the known agent must be ahead of the second."""
_BESIDE: Final = 0.1
"""Share of the workflows in which both may work."""
_FORGETTING: Final = 1 - 1 / 64
"""Weight of everything that was seen before, at each step of the new agent."""
_AHEAD: Final = 3.0
"""Nats by which the model is ahead of the counts after an agent before anything is known."""
_FADING: Final = 0.95
"""Weight of what is known of that at each further step."""
MOST_NEW: Final = 32
"""New agents of one workflow type; further ones are forecast by the counts alone."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expected:
    """What was forecast of the next step of a workflow whose type calls new agents.

    Attributes:
        agent: the one after which it was.
        modelled: the model's own forecast, float32 [V+1].
        names: agents of the first N columns of the forecast with the new agents.
        ours, counted: this forecast and that of the counts, float32 [N+1]; None where the counts have none.
    """

    agent: str
    modelled: NDArray[np.float32]
    names: tuple[str, ...] = ()
    ours: NDArray[np.float32] | None = None
    counted: NDArray[np.float32] | None = None


class NewAgents:
    """Of all workflow types that one version forecasts; keys are workflow types scoped by tenant.

    Args:
        predictor: whose vocabulary tells known agents from new ones.
        config: of the counts.
    """

    def __init__(self, predictor: NextAgentPredictor, config: BackoffConfig) -> None:
        self._knows = predictor.vocabulary.knows_agent
        self._agents = predictor.vocabulary.agents
        self._index = predictor.vocabulary.agent
        self._counts = OnlineCounts(config)
        self._of_names = np.ones(len(self._agents))
        self._of_names[predictor.vocabulary.new_agents] = 0.0  # nobody takes the place of whoever is new
        first = predictor.parts.ngram.transitions()[-1, : len(self._agents)] + _LEAST
        self._first: NDArray[np.float64] = first / first.sum()
        self._types: OrderedDict[str, _ChangedType] = OrderedDict()

    def begun(
        self, key: str, agent: str, recent: Sequence[str], expected: Expected | None, *, first: bool
    ) -> str | None:
        """A step begins; returns the known agent that its agent stands for, None for a known one or of nobody's place.

        Args:
            key, agent: scoped workflow type, and the agent's name as it was sent.
            recent: the agents before it, oldest first.
            expected: what was forecast of it; None if that is unknown.
            first: whether it is the first step of the workflow.
        """
        changed = self._types.get(key)
        new = not self._knows(agent)
        agent = agent if new else self._agents[self._index(agent)]
        if changed is None:
            if not new:
                return None
            changed = self._types[key] = _ChangedType()
            if len(self._types) > self._counts.config.types:
                del self._types[type_to_drop(self._types)]
        self._counts.of_type(key).follow(recent, agent)
        if expected is not None:
            changed.judge(expected, agent)
        if not new:
            return None
        self._types.move_to_end(key)
        likely = self._first if first else expected.modelled[:-1] if expected is not None else None
        if likely is not None and likely.sum() > _LEAST:
            changed.came(agent, self._of_names * likely / likely.sum())
        return changed.stands_for.get(agent)

    def follows(self, key: str) -> bool:
        """Whether the workflow type has called a new agent."""
        return key in self._types

    def forecast(self, key: str, recent: Sequence[str], live: LiveForecast) -> tuple[LiveForecast, Expected | None]:
        """The model's forecast after the agents `recent`, with the new agents in it, and what to tell the next step."""
        changed = self._types.get(key)
        if changed is None or not recent:
            return live, None
        agent = recent[-1]
        counted = self._counts.next_agents(key, recent)
        if counted is None and not changed.stands_for:
            return live, Expected(agent, live.probabilities[0])
        shares = {} if counted is None else dict(zip(counted.agents, counted.probabilities[:, :-1].T, strict=True))
        modelled = set(live.agents)  # new agents of this workflow too, where the model numbers them
        standing = [name for name in changed.stands_for if name not in modelled]
        free = [name for name in shares if not (name in modelled or name in changed.stands_for or self._knows(name))]
        names = (*live.agents, *standing, *free)
        column = {name: place for place, name in enumerate(names)}
        probabilities = np.zeros((len(live.probabilities), len(names) + 1), np.float32)
        probabilities[:, : len(live.agents)], probabilities[:, -1] = (
            live.probabilities[:, :-1],
            live.probabilities[:, -1],
        )
        nothing = np.zeros(len(probabilities), np.float32)
        for replaced, members in changed.members().items():
            places = [column[name] for name in (replaced, *members)]
            came = np.stack([shares.get(name, nothing) for name in (replaced, *members)], axis=1)
            total = came.sum(axis=1, keepdims=True)
            even = np.array([0.0, *(1 / len(members) for _ in members)], np.float32)  # the old name is likely gone
            split = np.where(total > _LEAST, came / (total + (total == 0)), even)
            probabilities[:, places] = probabilities[:, places].sum(axis=1, keepdims=True) * split
        if free:
            of_free = np.stack([shares[name] for name in free], axis=1)
            probabilities *= 1 - of_free.sum(axis=1, keepdims=True)
            probabilities[:, [column[name] for name in free]] = of_free
        expected = Expected(agent, live.probabilities[0])
        if counted is not None:
            of_counts = np.zeros_like(probabilities)
            of_counts[:, [*(column[name] for name in counted.agents), -1]] = counted.probabilities
            expected = Expected(agent, live.probabilities[0], names, probabilities[0], of_counts[0])
            probabilities = of_counts + np.float32(changed.share(agent)) * (probabilities - of_counts)
        return replace(
            live, probabilities=probabilities, agents=names, known_as=changed.stands_for.get(agent)
        ), expected

    def ended(self, key: str, recent: Sequence[str], called: Sequence[str], expected: Expected | None) -> None:
        """A workflow has ended after the agents `recent`; `called` are all its agents, without repetition."""
        changed = self._types.get(key)
        if changed is None:
            return
        if expected is not None:
            changed.judge(expected, None)
        self._counts.of_type(key).follow(recent, None)
        known_places = [self._index(name) for name in called if self._knows(name)]
        for name in called:
            change = changed.worked(name, known_places)
            if change is not None:
                place, likely = change
                before = changed.stands_for.pop(name, None)
                if place is not None:
                    changed.stands_for[name] = self._agents[place]
                if changed.stands_for.get(name) != before:
                    logger.info("%s", _told(unscoped(key), name, before, changed.stands_for.get(name), likely))


def _told(workflow_type: str, name: str, before: str | None, now: str | None, likely: float) -> str:
    if now is None:
        return f"workflow type {workflow_type!r}: the new agent {name!r} no longer stands for {before!r}"
    return (
        f"workflow type {workflow_type!r}: the new agent {name!r} comes where the model expects {now!r} "
        f"(probability {likely:.2f}), and is forecast as this agent"
    )


class _ChangedType:
    """The new agents of one workflow type.

    Attributes:
        stands_for: the known agent by new agent.
    """

    def __init__(self) -> None:
        self.stands_for: dict[str, str] = {}
        self._new: dict[str, _Place] = {}
        self._leads: OrderedDict[str, float] = OrderedDict()  # nats by which our forecast leads the counts, by agent

    def members(self) -> dict[str, list[str]]:
        """The new agents by the known one that they stand for."""
        members: dict[str, list[str]] = {}
        for name, replaced in self.stands_for.items():
            members.setdefault(replaced, []).append(name)
        return members

    def share(self, agent: str) -> float:
        """The weight of our forecast after an agent; the rest is that of the counts."""
        return 1 / (1 + exp(-self._leads.get(agent, _AHEAD)))

    def judge(self, expected: Expected, came: str | None) -> None:
        """This agent, or the end if None, came where this was expected."""
        if expected.ours is None or expected.counted is None:
            return
        place = -1
        if came is not None:
            if came not in expected.names:
                return
            place = expected.names.index(came)
        ours, counted = (log(max(float(row[place]), _LEAST)) for row in (expected.ours, expected.counted))
        before = self._leads.pop(expected.agent, _AHEAD)
        self._leads[expected.agent] = _AHEAD + (before - _AHEAD) * _FADING + ours - counted
        if len(self._leads) > 2 * MOST_NEW:
            self._leads.popitem(last=False)

    def came(self, name: str, likely: NDArray[np.floating]) -> None:
        """A step of a new agent began where the known ones were so likely, [V]."""
        place = self._new.get(name)
        if place is None:
            if len(self._new) == MOST_NEW:
                return
            place = self._new[name] = _Place(len(likely))
        place.steps = place.steps * _FORGETTING + 1
        place.likely = place.likely * _FORGETTING + np.log(np.maximum(likely, _LEAST))

    def worked(self, name: str, beside: Sequence[int]) -> tuple[int | None, float] | None:
        """A workflow with this agent has ended in which the known ones `beside` worked too.

        Returns:
            The place of the known agent that it takes, None for nobody's, and how likely that one was; None if the
            agent is not a new one.
        """
        place = self._new.get(name)
        if place is None:
            return None
        place.workflows = place.workflows * _FORGETTING + 1
        place.beside *= _FORGETTING
        place.beside[beside] += 1
        if place.steps < LEAST_STEPS or place.workflows < LEAST_WORKFLOWS:
            return None
        second, first = np.argsort(place.likely)[-2:]
        likely = float(np.exp(place.likely[first] / place.steps))
        sure = likely >= LIKELY and place.likely[first] - place.likely[second] >= _LEAD
        return (int(first) if sure and place.beside[first] <= _BESIDE * place.workflows else None), likely


class _Place:
    """Where a new agent came: sums over its steps and its workflows, the older ones with less weight.

    Attributes:
        steps, workflows: how many.
        likely: float64 [V], of the logarithm of the probability of each known agent.
        beside: float64 [V], workflows in which the known agent worked too.
    """

    def __init__(self, agents: int) -> None:
        self.steps = self.workflows = 0.0
        self.likely, self.beside = np.zeros(agents), np.zeros(agents)
