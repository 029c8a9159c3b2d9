"""The probabilistic automaton of one workflow type, and how a running workflow moves through it.

States come from `merging.py`; state 0 is the start. Probabilities are shares of the visits whose outcome is known, with
Wilson's interval. It takes each visit of a state as a new draw, which is what the automaton claims.

Pruning follows the learning: an edge below `min_probability` is dropped, the least used first, as long as the share of
training workflows that run through kept edges alone stays at or above `min_coverage`. Pythia (§4.1) prunes every edge
below 5 %; `min_coverage` 0 does that, too. Where loops are long, that leaves few whole workflows: of 20 steps with 3 %
of rare calls each, 54 %. Dropped edges keep their counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np

from presage.features.sequences import Alphabet, Item, Parents, Symbol
from presage.predictors.profile.merging import Merging, merge_tree, prefix_tree

END: Final = -1
"""The outcome that a workflow ends, among the numbers of states."""

QUANTILES: Final = (0.5, 0.9, 0.99)
_Z95: Final = 1.959964


def wilson(count: float, total: float) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927); 0 to 1 without any observation."""
    if not total:
        return 0.0, 1.0
    share, z2 = count / total, _Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True)
class LeftAtState:
    """What training workflows had left at one state: how many observations, their mean and QUANTILES.

    As observed, so neither the steps to come nor their lengths are taken as independent.
    """

    observations: int
    mean: float
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, observed: Sequence[float]) -> Self | None:
        """None without an observation."""
        if not observed:
            return None
        values = np.asarray(observed, np.float64)
        quantiles = np.quantile(values, QUANTILES, method="higher")
        return cls(len(values), float(values.mean()), tuple(quantiles.tolist()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Self | None:
        """From the JSON values of its attributes."""
        return None if data is None else cls(data["observations"], data["mean"], tuple(data["quantiles"]))


@dataclass(frozen=True)
class ProfileState:
    """A state.

    Attributes:
        symbol: of every edge that leads here; None at the start.
        visits: of training workflows.
        counts: how often each state, or END, came next.
        kept: the outcomes that were not pruned.
        left: steps after one here; None if no workflow is known to have ended from here.
        tokens: output tokens at the beginning of a step here, its own included; None if they were not recorded, and
            in artefacts that were written before they were kept.
        distance: fewest steps to the end over kept edges; None if there is no way.
        members, sizes: of a block, steps by agent, and blocks by number of steps.
    """

    symbol: Symbol | None
    visits: int
    counts: Mapping[int, int]
    kept: frozenset[int]
    left: LeftAtState | None = None
    tokens: LeftAtState | None = None
    distance: int | None = None
    members: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """Visits whose outcome is known."""
        return sum(self.counts.values())

    @property
    def pruned(self) -> float:
        """Share of the known outcomes that was pruned."""
        return sum(times for to, times in self.counts.items() if to not in self.kept) / max(self.known, 1)

    def agents(self) -> dict[str, float]:
        """Shares of the agents of a step here."""
        total = sum(self.members.values())
        return {agent: times / total for agent, times in self.members.items()}


@dataclass(frozen=True)
class ProfilePlace:
    """Where a workflow is: a state, how many steps of its block have begun, and whether every step took a known edge.

    `state` is None after an agent that no state has.
    """

    state: int | None = 0
    within: int = 0
    on_graph: bool = True
    block: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Automaton:
    """The states of one workflow type."""

    states: Sequence[ProfileState]

    def successors(self, at: int) -> dict[Symbol, int]:
        """The states that an edge leads to, pruned ones too, by symbol."""
        return self._successors[at]

    @cached_property
    def _successors(self) -> list[dict[Symbol, int]]:
        successors: list[dict[Symbol, int]] = [{} for _ in self.states]
        for number, state in enumerate(self.states):
            for to in state.counts:
                symbol = self.states[to].symbol if to != END else None
                if symbol is not None:
                    successors[number][symbol] = to
        return successors

    def calls(self, items: Iterable[Item], complete: bool) -> Iterator[bool]:
        """Whether each call of a workflow, and its end if it is `complete`, takes a kept edge."""
        state: int | None = 0
        for item in items:
            to = None if state is None else self.successors(state).get(item.symbol)
            yield state is not None and to in self.states[state].kept
            state = self._usual(item.symbol) if to is None else to
        if complete:
            yield state is not None and END in self.states[state].kept

    def _usual(self, *symbols: Symbol | None) -> int | None:
        """The most visited state with one of the symbols."""
        alike = [number for number, state in enumerate(self.states) if number and state.symbol in symbols]
        return max(alike, key=lambda number: self.states[number].visits, default=None)

    def step(self, place: ProfilePlace, agent: str, index: int, parents: Parents, alphabet: Alphabet) -> ProfilePlace:
        """The place after a further step of a running workflow.

        A step of the block's agents that waits for no step of the block belongs to it. After an unknown edge the most
        visited state of the agent is taken; the workflow has left the graph.
        """
        name, block = alphabet.name(agent), alphabet.block(agent)
        if (
            place.state is not None
            and block is not None
            and self.states[place.state].symbol == block
            and parents is not None
            and place.block.isdisjoint(parents)
        ):
            return ProfilePlace(place.state, place.within + 1, place.on_graph, place.block | {index})
        after = {} if place.state is None else self.successors(place.state)
        to = max(
            (after[symbol] for symbol in (name, block) if symbol is not None and symbol in after),
            key=lambda state: self.states[place.state or 0].counts[state],
            default=None,
        )
        on_graph = place.on_graph and to is not None
        if to is None:
            to = self._usual(name, block)
        return ProfilePlace(to, 1, on_graph, frozenset((index,)))

    def moves(self, at: int, within: int) -> Iterator[tuple[int, int, float]]:
        """Where one further step leads from a state of whose block so many steps have begun, and how likely.

        Each is a state or END, and the steps of its block that have begun then. A block that has begun may continue.
        """
        state = self.states[at]
        longer = sum(times for size, times in state.sizes.items() if size > within)
        more = longer / max(longer + state.sizes.get(within, 0), 1) if isinstance(state.symbol, tuple) else 0.0
        if more:
            yield at, within + 1, more
        for to, times in state.counts.items():
            p = (1 - more) * times / state.known
            if p:
                yield to, 1, p

    def outcomes(self, place: ProfilePlace) -> dict[str | None, float]:
        """Probability of each next agent and of END (None); empty where nothing is known."""
        probabilities: dict[str | None, float] = {}
        for to, _, p in () if place.state is None else self.moves(place.state, place.within):
            if to == END:
                probabilities[None] = p
            else:
                for agent, share in self.states[to].agents().items():
                    probabilities[agent] = probabilities.get(agent, 0.0) + p * share
        return probabilities

    def dominant_path(self) -> tuple[list[int], float]:
        """The likeliest whole path, without the start, and its probability (Dijkstra's algorithm)."""
        import heapq

        queue: list[tuple[float, int, list[int]]] = [(0.0, 0, [])]
        done: set[int] = set()
        while queue:
            cost, state, path = heapq.heappop(queue)
            if state == END:
                return path, math.exp(-cost)
            if state in done:
                continue
            done.add(state)
            for to, times in self.states[state].counts.items():
                further = path if to == END else [*path, to]
                heapq.heappush(queue, (cost - math.log(times / self.states[state].known), to, further))
        return [], 0.0

    @property
    def pruned(self) -> float:
        """Share of all known outcomes that was pruned."""
        return sum(state.pruned * state.known for state in self.states) / max(
            sum(state.known for state in self.states), 1
        )

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON values."""
        return [
            {
                "symbol": list(state.symbol) if isinstance(state.symbol, tuple) else state.symbol,
                "visits": state.visits,
                "edges": [[to, times, to in state.kept] for to, times in sorted(state.counts.items())],
                "left": None if state.left is None else vars(state.left),
                "tokens": None if state.tokens is None else vars(state.tokens),
                "distance": state.distance,
                "members": state.members,
                "sizes": sorted(state.sizes.items()),
            }
            for state in self.states
        ]

    @classmethod
    def from_dict(cls, data: Sequence[Mapping[str, Any]]) -> Automaton:
        """Inverse of `to_dict`; raises ValueError for an edge to no state."""
        states = []
        for written in data:
            symbol = written["symbol"]
            if any(not END <= to < len(data) for to, _, _ in written["edges"]):
                raise ValueError("an edge leads to no state")
            states.append(
                ProfileState(
                    tuple(symbol) if isinstance(symbol, list) else symbol,
                    written["visits"],
                    {to: times for to, times, _ in written["edges"]},
                    frozenset(to for to, _, kept in written["edges"] if kept),
                    LeftAtState.from_dict(written["left"]),
                    LeftAtState.from_dict(written.get("tokens")),
                    written["distance"],
                    dict(written["members"]),
                    dict(map(tuple, written["sizes"])),
                )
            )
        return cls(states)


@dataclass(frozen=True)
class Sequenced:
    """A training workflow: its items, whether it reached its end, and its agents by item.

    `tokens` are the output tokens that were left at the beginning of each step, its own included, by item; NaN where a
    count is unknown.
    """

    items: Sequence[Item]
    complete: bool
    agents: Sequence[Sequence[str]]
    tokens: Sequence[Sequence[float]]


def learn(
    workflows: Sequence[Sequenced], merging: Merging, min_probability: float, min_coverage: float
) -> tuple[Automaton, list[list[int]]]:
    """Learn, prune and measure the automaton; also returns the run of each workflow, without the start."""
    tree = prefix_tree(([item.symbol for item in w.items], w.complete) for w in workflows)
    nodes = merge_tree(tree, merging)
    number = {node: index for index, node in enumerate(nodes)}
    counts: list[dict[int, int]] = [
        {
            **{number[node.next[symbol]]: times for symbol, times in node.taken.items()},
            **({END: node.ends} if node.ends else {}),
        }
        for node in nodes
    ]
    runs = [_run(nodes[0], w.items, number) for w in workflows]
    kept = _pruned(counts, runs, [w.complete for w in workflows], min_probability, min_coverage)
    left: list[list[int]] = [[] for _ in nodes]
    tokens: list[list[float]] = [[] for _ in nodes]
    members, sizes = [Counter[str]() for _ in nodes], [Counter[int]() for _ in nodes]
    for w, run in zip(workflows, runs, strict=True):
        total, done = sum(item.size for item in w.items), 0
        if w.complete:
            left[0].append(total)
            for state, left_there in zip((0, *run), (w.tokens[0][:1], *w.tokens), strict=True):
                tokens[state] += [number for number in left_there if not math.isnan(number)]
        for state, item, names in zip(run, w.items, w.agents, strict=True):
            done += item.size
            members[state].update(names)
            if isinstance(item.symbol, tuple):
                sizes[state][item.size] += 1
            if w.complete:
                left[state].append(total - done)
    distance = _distances(counts, kept)
    states = [
        ProfileState(
            node.symbol,
            node.visits,
            counts[state],
            kept[state],
            LeftAtState.of(left[state]),
            LeftAtState.of(tokens[state]),
            distance[state],
            dict(members[state]),
            sizes[state],
        )
        for state, node in enumerate(nodes)
    ]
    return Automaton(states), runs


def _run(start: Any, items: Iterable[Item], number: Mapping[Any, int]) -> list[int]:
    node, run = start, []
    for item in items:
        node = node.next[item.symbol]
        run.append(number[node])
    return run


def _pruned(
    counts: Sequence[Mapping[int, int]],
    runs: Sequence[Sequence[int]],
    complete: Sequence[bool],
    min_probability: float,
    min_coverage: float,
) -> list[frozenset[int]]:
    rare: dict[tuple[int, int], set[int]] = {}
    for state, leaving in enumerate(counts):
        total = sum(leaving.values())
        rare |= {(state, to): set() for to, times in leaving.items() if times < min_probability * total}
    for workflow, run in enumerate(runs):
        path = [0, *run, *((END,) if complete[workflow] else ())]
        for edge in {*pairwise(path)} & rare.keys():
            rare[edge].add(workflow)
    budget, lost = (1 - min_coverage) * len(runs), set[int]()
    kept = [set(leaving) for leaving in counts]
    for (state, to), users in sorted(rare.items(), key=lambda edge_users: (len(edge_users[1]), edge_users[0])):
        if len(lost | users) <= budget:
            lost |= users
            kept[state].discard(to)
    return [frozenset(edges) for edges in kept]


def _distances(counts: Sequence[Mapping[int, int]], kept: Sequence[frozenset[int]]) -> list[int | None]:
    """Fewest steps to the end over kept edges, breadth first from the end."""
    before: dict[int, list[int]] = {}
    for state in range(len(counts)):
        for to in kept[state]:
            before.setdefault(to, []).append(state)
    distances: list[int | None] = [None] * len(counts)
    front, steps = before.get(END, []), 0
    while front:
        for state in front:
            distances[state] = steps
        steps += 1
        front = list({earlier for state in front for earlier in before.get(state, ()) if distances[earlier] is None})
    return distances
