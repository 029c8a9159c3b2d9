"""A fitted predictor in a larger vocabulary: where the training of new traces starts from.

A new agent starts as the old one whose place it takes (`places`): its rows of the network's tables and its outcomes in
network and trees are that one's, and it stands beside it in the vocabulary, so that trees that compare the latest
agents take both for one. A new agent that takes nobody's place starts with the rows of the unknown agent. Before any
training the likelihood of new agents is tiny: forecasts of old traces stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.features.history import NEVER, RECENT
from presage.features.prefixes import Prefixes
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.boosting import UNREACHED, TreeEnsemble
from presage.predictors.next_agent.network_weights import NetworkWeights
from presage.predictors.next_agent.parts import TREES, NextAgentParts

_LEAST: Final = 7.0
"""Nats by which a new outcome is less likely than the one whose place it takes, until it is learnt."""


@dataclass(frozen=True)
class Start:
    """What a training starts from: the old parts over the new vocabulary, and how the old one lies in it."""

    parts: NextAgentParts
    extension: Extension


@dataclass(frozen=True)
class Extension:
    """An old vocabulary of V agents within a new one of V' agents.

    Attributes:
        takes: the old agent whose place a new one takes, by the new name; without one it is absent.
    """

    old: Vocabulary
    new: Vocabulary
    takes: Mapping[str, str]

    @cached_property
    def agents(self) -> NDArray[np.int64]:
        """The old agent that each new one starts from, int64 [V'+1]; V is the unknown one, also the last."""
        return np.array([self.old.agent(self.takes.get(name, name)) for name in self.new.agents] + [self.old.unknown])

    @cached_property
    def types(self) -> NDArray[np.int64]:
        """The old workflow type of each new one, int64 [T'+1]; T is the unknown one."""
        types = [self.old.workflow_type(name) for name in self.new.workflow_types]
        return np.array([*types, len(self.old.workflow_types)])

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where old agents are in the new vocabulary, int64 [V+1]; the unknown one, and END, last."""
        return np.array([self.new.agent(name) for name in self.old.agents] + [self.new.unknown])

    @cached_property
    def type_places(self) -> NDArray[np.int64]:
        """The same of workflow types, int64 [T+1]."""
        types = [self.new.workflow_type(name) for name in self.old.workflow_types]
        return np.array([*types, len(self.new.workflow_types)])

    @cached_property
    def added(self) -> NDArray[np.bool_]:
        """Which agents are new, bool [V'+1]."""
        added = np.ones(self.new.outcomes, bool)
        added[self.places] = False
        return added

    def before(self, prefixes: Prefixes) -> Prefixes:
        """New prefixes as the old predictor reads them: what is new is unknown."""
        agents = np.where(self.added, self.old.unknown, self.agents)
        outcomes = np.append(np.where(self.added, self.old.unseen, self.agents), self.old.unseen)
        return self._renamed(prefixes, agents, outcomes, self.old)

    def twins(self, prefixes: Prefixes) -> Prefixes:
        """The workflows of old types that call new agents, before they did: under the names of those whose places the
        new agents take, and without the steps of the others."""
        some = np.unique(prefixes.workflow[self.added[prefixes.agent]])
        some = some[self.types[prefixes.workflow_type[some]] < len(self.old.workflow_types)]
        twins = prefixes.take(some)
        nobody = self.added & (self.agents == self.old.unknown)
        before = np.where(nobody, self.new.unknown, self.places[self.agents])
        twins = twins.without_steps(nobody[twins.agent])
        return self._renamed(twins, before, np.append(before, self.new.unseen), self.new)

    def forecasts(self, old: NDArray[np.float32]) -> NDArray[np.float32]:
        """Forecasts of the old predictor, float32 [n, K, V+1], over the new outcomes; new agents never come."""
        out = np.zeros((*old.shape[:2], self.new.outcomes), np.float32)
        out[..., self.places] = old
        return out

    @staticmethod
    def _renamed(
        prefixes: Prefixes, agents: NDArray[np.int64], outcomes: NDArray[np.int64], vocabulary: Vocabulary
    ) -> Prefixes:
        has_outcome = prefixes.outcomes >= 0
        called = prefixes.called[:, : 1 + len(vocabulary.tools)]
        return replace(
            prefixes,
            vocabulary=vocabulary,
            agent=agents[prefixes.agent].astype(np.int32),
            outcomes=np.where(has_outcome, outcomes[prefixes.outcomes], prefixes.outcomes).astype(np.int32),
            called=called if vocabulary.tools else np.full_like(called, np.nan),
        )

    def extend(self, parts: NextAgentParts) -> NextAgentParts:
        """The parts over the new vocabulary: on old traces they forecast as before."""
        evidence = np.where(self.added, 0, parts.evidence[np.ix_(self.types, self.agents)])
        evidence[:-1][self.types[:-1] == len(self.old.workflow_types)] = 0
        return replace(
            parts,
            network=self._network(parts.network),
            trees={name: self._trees(parts.trees[name], least=_LEAST * (name == TREES[0])) for name in TREES},
            ngram=parts.ngram.extended(self.new, self.type_places, self.places),
            evidence=evidence.astype(np.int32),
        )

    def _outcomes(self, logits: NDArray[Any], new: NDArray[np.float32] | float) -> NDArray[Any]:
        """Logits [..., K (V+1)] over the new outcomes; `new`, [..., K, 1], are those of an agent in nobody's place."""
        shape = *logits.shape[:-1], logits.shape[-1] // self.old.outcomes
        free = self.added & (self.agents == self.old.unknown)
        by_outcome = np.where(free, new, logits.reshape(*shape, self.old.outcomes)[..., self.agents])
        return by_outcome.reshape(*shape[:-1], shape[-1] * self.new.outcomes)

    def _network(self, weights: NetworkWeights) -> NetworkWeights:
        old = {name: array.astype(np.float32) for name, array in weights.arrays.items()}
        width = self.old.outcomes
        new = dict(old)
        rows = np.append(0, self.agents + 1)
        new["recent"] = old["recent"][:, rows]
        new["kind"] = old["kind"][self.types]
        new["encoded"] = np.concatenate(
            [
                old["encoded"][:width][self.agents],
                old["encoded"][width : 2 * width][self.agents],
                old["encoded"][2 * width :],
            ]
        )
        # An agent that has not come yet reads as something: as nothing, before it is learnt.
        since = new["encoded"][self.new.outcomes : 2 * self.new.outcomes][self.added]
        new["moment"] = old["moment"] - since.sum(axis=0) / np.float32(1 + NEVER)
        for name in ("head", "head_bias", "skip", "agent_skip"):
            mean = old[name].reshape(*old[name].shape[:-1], -1, width).mean(axis=-1, keepdims=True)
            new[name] = self._outcomes(old[name], mean)
        new["head_bias"] = new["head_bias"] - _LEAST * np.tile(self.added, len(new["head_bias"]) // len(self.added))
        new["agent_skip"] = new["agent_skip"][self.agents]
        new["step_agent"] = old["step_agent"][self.agents]
        return NetworkWeights({name: array.astype(np.float16) for name, array in new.items()})

    def _trees(self, trees: TreeEnsemble, least: float) -> TreeEnsemble:
        old, new = self.old.outcomes, self.new.outcomes
        history, tools = RECENT + 2 * old + 2, len(self.old.tools)
        of_tools = np.array([self.new.tools.index(name) for name in self.old.tools], np.int64)
        moved = np.concatenate(
            [
                np.arange(RECENT),
                RECENT + self.places,
                RECENT + new + self.places,
                RECENT + 2 * new + np.arange(2),
                RECENT + 2 * new + 2 + of_tools,
            ]
        )
        rest = np.arange(int(trees.feature.max(initial=0)) + 1)
        rest = rest[history + tools :] + 2 * (new - old) + len(self.new.tools) - tools
        threshold = trees.threshold.copy()
        for column, places in (
            (trees.feature < RECENT, self.places),
            (trees.feature == history + tools + 1, self.type_places),
        ):
            named = column & (threshold < UNREACHED) & (threshold >= 0)
            threshold[named] = places[threshold[named].astype(np.int64)]
        base = self._outcomes(trees.base, trees.base.reshape(-1, old).mean(axis=1, keepdims=True))
        return TreeEnsemble(
            np.concatenate([moved, rest])[trees.feature].astype(np.int16),
            threshold,
            self._outcomes(trees.leaves, 0).astype(np.int8),
            self._outcomes(trees.scale, 1e-12).astype(np.float32),
            (base - least * np.tile(self.added, len(base) // new)).astype(np.float32),
        )
