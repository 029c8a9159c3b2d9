"""The profile of one workflow type: what can be said of it, how surely, and what cannot be said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.features.sequences import NUMBERS, OTHER, Alphabet, TypeSequences, WorkflowSteps
from presage.predictors.profile.agents import AgentNumbers, AgentUsage, Percentiles, agent_numbers
from presage.predictors.profile.automaton import END, Automaton, Sequenced, learn
from presage.predictors.profile.drift import drift
from presage.predictors.profile.expression import (
    END_OF,
    START_OF,
    Expression,
    OneStep,
    ParallelSteps,
    covers,
    express,
    from_json,
    text,
    to_json,
)
from presage.predictors.profile.merging import Merging
from presage.wording import counted


@dataclass(frozen=True)
class ProfileConfig:
    """Settings of a profile.

    Attributes:
        min_probability: rarer edges are pruned ...
        min_coverage: ... as long as this share of the training workflows keeps all its edges.
        percentile: share of the workflows, the shortest, whose loops give the bounds of the expression; longer ones do,
            too, up to twice as long.
        alpha: level of the test that keeps two states apart.
        min_evidence: fewest visits of a state, for the test and for a forecast.
        min_workflows: fewest workflows of a confident profile ...
        max_unseen: ... and greatest share of calls that a further workflow is expected to make for the first time, and
            of steps by agents that are not known by name.
        max_names: names in an expression; with more it is made of coarser states.
        max_states: states of an automaton.
        max_agents: agents of a workflow type that are known by name.
        templates: whether prompt templates are learnt where the traces hold prompts ...
        keep_stems: ... and keep the static parts of prompts as texts, which otherwise leave a digest alone.
    """

    min_probability: float = 0.05
    min_coverage: float = 0.97
    percentile: float = 0.99
    alpha: float = 0.001
    min_evidence: int = 5
    min_workflows: int = 30
    max_unseen: float = 0.05
    max_names: int = 30
    max_states: int = 300
    max_agents: int = 200
    templates: bool = True
    keep_stems: bool = False


LIMITS: Final = {
    "min_probability": (0.0, 1.0),
    "min_coverage": (0.0, 1.0),
    "percentile": (0.5, 1.0),
    "alpha": (1e-9, 0.5),
    "min_evidence": (1, 1e6),
    "max_names": (1, 1000),
    "max_states": (2, 100_000),
    "max_agents": (1, 10_000),
}
"""Ranges of the settings that have one."""

_SINGLE_SHARE: Final = 0.2
_SINGLES: Final = 10
_ONE_BLOCK: Final = 0.2
_PLANLESS: Final = ("groups", "any order")


@dataclass(frozen=True)
class TypeProfile:
    """What is known of one workflow type.

    Attributes:
        known: agents known by name, None if all are; and `blocks`, the agents that run in parallel.
        level: of `expression.LEVELS`, how coarse the expression is.
        covered: share of the training workflows that the expression covers.
        path: the symbols of the likeliest whole path, as text, and its probability.
        unseen: share of the calls that a further workflow is expected to make for the first time (Good and Turing).
        usage: of the agents; of the trained workflows.
        numbers: percentiles of the agents.
        doubts: why the profile is not confident; empty if it is.
        warnings: what could not be said.
    """

    workflows: int
    steps: int
    known: frozenset[str] | None
    blocks: tuple[tuple[str, ...], ...]
    automaton: Automaton
    expression: Expression
    level: str
    covered: float
    path: tuple[tuple[str, ...], float]
    unseen: float
    usage: AgentUsage
    numbers: AgentNumbers
    doubts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def confident(self) -> bool:
        """Whether the evidence suffices to act on."""
        return not self.doubts

    @cached_property
    def text(self) -> str:
        """The expression as people read it."""
        return text(self.expression)

    @cached_property
    def alphabet(self) -> Alphabet:
        """The symbols."""
        return Alphabet(self.blocks, self.known)

    def covers(self, steps: WorkflowSteps) -> bool:
        """Whether the expression describes a whole workflow."""
        return covers(self.expression, self.alphabet.items(steps))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `text` is the expression as people read it."""
        return {
            "workflows": self.workflows,
            "steps": self.steps,
            "known": None if self.known is None else sorted(self.known),
            "blocks": [list(block) for block in self.blocks],
            "text": self.text,
            "expression": to_json(self.expression),
            "level": self.level,
            "covered": self.covered,
            "path": [list(self.path[0]), self.path[1]],
            "unseen": self.unseen,
            "automaton": self.automaton.to_dict(),
            "usage": self.usage.to_dict(),
            "numbers": {
                agent: {number: asdict(values) for number, values in by.items()} for agent, by in self.numbers.items()
            },
            "confident": self.confident,
            "doubts": list(self.doubts),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises LookupError, TypeError or ValueError for anything else."""
        return cls(
            data["workflows"],
            data["steps"],
            None if data["known"] is None else frozenset(data["known"]),
            tuple(map(tuple, data["blocks"])),
            Automaton.from_dict(data["automaton"]),
            from_json(data["expression"]),
            data["level"],
            data["covered"],
            (tuple(data["path"][0]), data["path"][1]),
            data["unseen"],
            AgentUsage.from_dict(data["usage"]),
            {
                agent: {number: Percentiles.from_dict(values) for number, values in by.items()}
                for agent, by in data["numbers"].items()
            },
            tuple(data["doubts"]),
            tuple(data["warnings"]),
        )


def profile_of(sequences: TypeSequences, config: ProfileConfig) -> TypeProfile:
    """The profile of the workflows of one type, one or more."""
    workflows = sequences.workflows
    known_agents = _known(workflows, config)
    alphabet = Alphabet.of(workflows, known_agents)
    sequenced = [
        Sequenced(
            alphabet.items(w),
            w.complete,
            [[alphabet.name(w.agents[index]) for index in block] for block in w.blocks],
            _tokens_left(w, sequences.numbers),
        )
        for w in workflows
    ]
    merging = Merging(config.alpha, config.min_evidence, config.max_states)
    automaton, runs = learn(sequenced, merging, config.min_probability, config.min_coverage)
    whole = [
        run
        for w, run in zip(sequenced, runs, strict=True)
        if w.complete and all(to in automaton.states[state].kept for state, to in pairwise([0, *run, END]))
    ]
    bounding = _bounding(whole, config.percentile)
    expression, level = express(_labels(automaton), _edges(automaton, bounding), bounding, config.max_names)
    complete = [w for w in sequenced if w.complete]
    states, likelihood = automaton.dominant_path()
    usage = AgentUsage.of([alphabet.name(agent) for agent in w.agents] for w in workflows)
    unseen = _unseen(runs)
    doubts = _doubts(len(complete), unseen, usage, config)
    return TypeProfile(
        workflows=len(workflows),
        steps=sum(len(w.agents) for w in workflows),
        known=known_agents,
        blocks=tuple(alphabet.blocks),
        automaton=automaton,
        expression=expression,
        level=level,
        covered=sum(covers(expression, w.items) for w in complete) / len(complete) if complete else 0.0,
        path=(tuple(text(_label(automaton, state)) for state in states), likelihood),
        unseen=unseen,
        usage=usage,
        numbers=agent_numbers(workflows, sequences.numbers),
        doubts=tuple(doubts),
        warnings=tuple(_warnings(sequences, sequenced, alphabet, level, config)),
    )


def _tokens_left(workflow: WorkflowSteps, numbers: NDArray[np.float64]) -> list[list[float]]:
    """The output tokens left at the beginning of each step, by block; NaN before a step whose count is unknown."""
    produced = numbers[workflow.rows, NUMBERS.index("output_tokens")]
    left = np.cumsum(produced[::-1])[::-1].tolist()
    return [[left[index] for index in block] for block in workflow.blocks]


def _bounding(runs: list[list[int]], percentile: float) -> list[list[int]]:
    """The runs that give the bounds of the loops: not the longest where they are over twice as long as the others."""
    ordered = sorted(runs, key=len)
    usual = ordered[: math.ceil(percentile * len(runs))]
    return [run for run in ordered if len(run) <= 2 * len(usual[-1])]


def _known(workflows: Sequence[WorkflowSteps], config: ProfileConfig) -> frozenset[str] | None:
    """The agents known by name; None if all are. Where many names are of a single workflow, rare ones are no roles."""
    users = Counter(agent for w in workflows for agent in set(w.agents))
    names = sorted(users, key=lambda agent: (-users[agent], agent))
    single = [agent for agent in names if users[agent] == 1]
    if len(workflows) >= _SINGLES <= len(single) and len(single) > _SINGLE_SHARE * len(names):
        least = max(2.0, config.min_probability * len(workflows))
        names = [agent for agent in names if users[agent] >= least]
    names = names[: config.max_agents]
    return None if len(names) == len(users) else frozenset(names)


def _label(automaton: Automaton, number: int) -> Expression:
    state = automaton.states[number]
    if isinstance(state.symbol, tuple):
        return ParallelSteps(state.symbol, min(state.sizes), max(state.sizes))
    return OneStep(state.symbol or OTHER)


def _labels(automaton: Automaton) -> dict[int, Expression]:
    return {state: _label(automaton, state) for state in range(1, len(automaton.states))}


def _edges(automaton: Automaton, runs: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """The kept edges that a run takes: no others have bounds."""
    return {edge for run in runs for edge in zip([START_OF, *run], [*run, END_OF], strict=True)}


def _unseen(runs: Sequence[Sequence[int]]) -> float:
    """Of the different edges that each workflow takes, the share that no other workflow takes (Good, 1953)."""
    users = Counter(edge for run in runs for edge in {*zip([0, *run], [*run, END], strict=True)})
    return sum(times == 1 for times in users.values()) / max(sum(users.values()), 1)


def _doubts(complete: int, unseen: float, usage: AgentUsage, config: ProfileConfig) -> list[str]:
    doubts = []
    nameless = usage.agents[OTHER].mean / usage.steps if OTHER in usage.agents else 0.0
    if nameless > config.max_unseen:
        doubts.append(f"{nameless:.0%} of the steps are of agents counted as {OTHER}")
    if complete < config.min_workflows:
        doubts.append(f"{counted(complete, 'whole workflow')}, at least {config.min_workflows} are wanted")
    if unseen > config.max_unseen:
        doubts.append(
            f"{unseen:.0%} of the calls of a further workflow are expected to be new, at most {config.max_unseen:.0%} "
            "is wanted"
        )
    return doubts


def _warnings(
    sequences: TypeSequences,
    sequenced: Sequence[Sequenced],
    alphabet: Alphabet,
    level: str,
    config: ProfileConfig,
) -> list[str]:
    workflows, warnings = sequences.workflows, []
    names = {agent for w in workflows for agent in w.agents}
    if alphabet.known is not None:
        others = len(names) - len(alphabet.known & names)
        warnings.append(
            f"{counted(len(names), 'agent name')}; counted together as {OTHER} because they are of few workflows: "
            f"{others:,}. Check that names do not carry run numbers"
        )
    if level in _PLANLESS:
        warnings.append(
            "no plan is visible: agents call each other in circles, and the expression says only how often they run"
        )
    cut = sum(not w.complete for w in workflows)
    if cut:
        warnings.append(f"{counted(cut, 'workflow')} of {len(workflows)} were cut: their ends are unknown, not END")
    if sequences.overlapping:
        warnings.append(
            f"in {counted(sequences.overlapping, 'workflow')} steps overlap in time without parent_steps: a fan-out "
            "cannot be told from an order"
        )
    wide = sum(
        len(w.items) <= max(1, _ONE_BLOCK * len(steps.agents)) < len(steps.agents)
        for w, steps in zip(sequenced, workflows, strict=True)
    )
    if wide:
        warnings.append(
            f"{counted(wide, 'workflow')} run mostly in parallel: the order within their blocks is not described"
        )
    unknown = [
        name
        for name, column in zip(NUMBERS, sequences.numbers.T, strict=True)
        if all(np.isnan(column[w.rows]).all() for w in workflows)
    ]
    if unknown:
        warnings.append(f"not recorded, so without percentiles: {', '.join(unknown)}")
    half = len(workflows) // 2
    if sequences.timed and half >= config.min_evidence:
        earlier, later = (
            AgentUsage.of([alphabet.name(a) for a in w.agents] for w in part)
            for part in (workflows[:half], workflows[half:])
        )
        change = drift(earlier, later)
        if change.changed:
            shown = " ".join(change.sentences()[:3])
            warnings.append(
                f"the later half of the workflows differs from the earlier one: {shown} Train on one version alone"
            )
    return warnings
