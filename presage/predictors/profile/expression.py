"""The bounded regular expression of an automaton: how people read it, and which workflows it covers.

    planner explorer{3,12} (coder tester){1,4} [reader ‖ searcher]{2,5} (fixer | reviewer)?

`a b`: one after the other. `x{3,12}`: 3 to 12 times; `x{3}` 3 times; `x?` once or not at all. `(a | b)`: one of them.
`[a ‖ b]{2,5}`: 2 to 5 steps of these agents in parallel, in any order and mixture. `<other>`: any agent that is not
named. A name that is not of letters, digits, `_ . : / -` stands in quotes.

State elimination (Brzozowski and McCluskey, 1963), with counted loops instead of stars: when a state is eliminated, its
loop gets the least and greatest number of rounds that a covered training workflow made there, which is the length of
its runs in the sequence of states that are not eliminated yet. Counts of different loops are independent in the
expression, so it describes more than the automaton, never less.

An automaton of an application without a plan makes an expression that nobody can read. With more than `max_names` names
it
is made again, coarser: one state an agent (`agents`); then any order of agents that call each other in circles
    (`groups`); then any order of all agents (`any order`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import numpy as np

from presage.features.sequences import Item

LEVELS: Final = ("states", "agents", "groups", "any order")
_START, _END = -1, -2
_PLAIN: Final = re.compile(r"[\w.:/-]+|<other>")


@dataclass(frozen=True)
class OneStep:
    """One step of an agent."""

    agent: str


@dataclass(frozen=True)
class ParallelSteps:
    """`low` to `high` parallel steps of these agents."""

    agents: tuple[str, ...]
    low: int
    high: int


@dataclass(frozen=True)
class StepChain:
    """One after the other; nothing if empty."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class StepChoice:
    """One of several, sorted by their text."""

    options: tuple[Expression, ...]

    @cached_property
    def steps(self) -> frozenset[str]:
        """The agents of the options that are one step."""
        return frozenset(option.agent for option in self.options if isinstance(option, OneStep))

    @cached_property
    def others(self) -> tuple[Expression, ...]:
        """The other options."""
        return tuple(option for option in self.options if not isinstance(option, OneStep))


@dataclass(frozen=True)
class RepeatedSteps:
    """`low` to `high` times."""

    body: Expression
    low: int
    high: int


Expression = OneStep | ParallelSteps | StepChain | StepChoice | RepeatedSteps
NOTHING: Final = StepChain(())


def chain(*parts: Expression) -> Expression:
    """One after the other, with neighbours that repeat each other joined."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, StepChain) else (part,)
    joined = True
    while joined:
        joined = any(_join_at(flat, index) for index in range(len(flat)))
    return flat[0] if len(flat) == 1 else StepChain(tuple(flat))


def _join_at(parts: list[Expression], index: int) -> bool:
    """Join the part at a place with its neighbours, where that makes one repetition; whether it did."""
    here = parts[index]
    if index + 1 < len(parts):
        (body, low, high), (other, least, most) = _counted(here), _counted(parts[index + 1])
        if body == other:
            parts[index : index + 2] = [repeat(body, low + least, high + most)]
            return True
    if not isinstance(here, RepeatedSteps) or not isinstance(here.body, StepChain):
        return False
    body_parts = list(here.body.parts)
    size = len(body_parts)
    for before in range(size, -1, -1):  # `b (a b){1,3} a` is `(b a){2,4}`
        begin, end = index - before, index + 1 + size - before
        turned = body_parts[size - before :] + body_parts[: size - before]
        if begin >= 0 and parts[begin:index] + parts[index + 1 : end] == turned:
            parts[begin:end] = [repeat(StepChain(tuple(turned)), here.low + 1, here.high + 1)]
            return True
    return False


def _counted(part: Expression) -> tuple[Expression, int, int]:
    """What is repeated, and the least and greatest number of times; `(a{3})?` is a between 0 and 3 times."""
    if not isinstance(part, RepeatedSteps):
        return part, 1, 1
    body, low, high = _counted(part.body)
    return body, low * part.low, high * part.high


def repeat(body: Expression, low: int, high: int) -> Expression:
    """`low` to `high` times."""
    if high == 0 or body == NOTHING:
        return NOTHING
    if (low, high) == (1, 1):
        return body
    if isinstance(body, RepeatedSteps) and body.low <= 1:
        return repeat(body.body, low * body.low, high * body.high)
    return RepeatedSteps(body, low, high)


def choice(*options: Expression) -> Expression:
    """One of several, with what they have in common at their beginning and end factored out."""
    flat, optional = set[Expression](), False
    for option in options:
        if isinstance(option, RepeatedSteps) and not option.low:
            option, optional = repeat(option.body, 1, option.high), True
        flat.update(option.options if isinstance(option, StepChoice) else (option,))
    optional = optional or NOTHING in flat
    merged = _merged(sorted(flat - {NOTHING}, key=text))
    if not merged:
        return NOTHING
    if optional:  # `x{0,2} y | x{1,2}`, or nothing, is `x{0,2} y | x{0,2}`, which has a common beginning
        ends = {
            part for option in merged if isinstance(option, StepChain) for part in (option.parts[0], option.parts[-1])
        }
        for index, option in enumerate(merged):
            body, low, high = _counted(option)
            if low == 1 and (wider := RepeatedSteps(body, 0, high)) in ends:
                merged[index], optional = wider, False
                break
    expression = merged[0] if len(merged) == 1 else _factored(merged)
    if expression is None:
        expression = StepChoice(tuple(merged))
    return repeat(expression, 0, 1) if optional else expression


def _merged(options: list[Expression]) -> list[Expression]:
    """Options that differ in their counts alone as one, and a step as a block of one where there is such a block."""
    same: dict[Expression, list[Expression]] = {}
    blocks: dict[tuple[str, ...], tuple[int, int]] = {}
    for option in options:
        if isinstance(option, ParallelSteps):
            low, high = blocks.get(option.agents, (option.low, option.high))
            blocks[option.agents] = min(low, option.low), max(high, option.high)
        else:
            same.setdefault(_counted(option)[0], []).append(option)
    for agents in blocks:
        for agent in agents:
            if same.get(OneStep(agent)) == [OneStep(agent)]:
                del same[OneStep(agent)]
                blocks[agents] = 1, blocks[agents][1]
    merged: list[Expression] = [ParallelSteps(agents, *bounds) for agents, bounds in blocks.items()]
    for body, alike in same.items():
        _, lows, highs = zip(*map(_counted, alike), strict=True)
        merged.append(alike[0] if len(alike) == 1 else repeat(body, min(lows), max(highs)))
    return sorted(merged, key=text)


def _factored(options: list[Expression]) -> Expression | None:
    """The choice with a common beginning or end of some of its options written once; None if no two share one."""
    split = [list(option.parts) if isinstance(option, StepChain) else [option] for option in options]
    for place in (-1, 0):
        shared: dict[Expression, list[int]] = {}
        for index, parts in enumerate(split):
            shared.setdefault(parts[place], []).append(index)
        common, users = max(shared.items(), key=lambda part_users: len(part_users[1]))
        if len(users) > 1:
            rests = [StepChain(tuple(split[index][:-1] if place else split[index][1:])) for index in users]
            inner = choice(*(rest.parts[0] if len(rest.parts) == 1 else rest for rest in rests))
            factored = chain(inner, common) if place else chain(common, inner)
            return choice(factored, *(option for index, option in enumerate(options) if index not in users))
    return None


def text(of: Expression) -> str:
    """The expression as people read it."""
    match of:
        case OneStep():
            return _name(of.agent)
        case ParallelSteps():
            return f"[{' ‖ '.join(map(_name, of.agents))}]{_bounds(of.low, of.high)}"
        case StepChain():
            return " ".join(f"({text(part)})" if isinstance(part, StepChoice) else text(part) for part in of.parts)
        case StepChoice():
            return " | ".join(map(text, of.options))
        case RepeatedSteps():
            body = text(of.body)
            inner = body if isinstance(of.body, OneStep) else f"({body})"
            return f"{inner}?" if (of.low, of.high) == (0, 1) else f"{inner}{_bounds(of.low, of.high)}"


def _name(agent: str) -> str:
    return agent if _PLAIN.fullmatch(agent) else json.dumps(agent, ensure_ascii=False)


def _bounds(low: int, high: int) -> str:
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def names(of: Expression) -> int:
    """How many names the text has."""
    match of:
        case OneStep():
            return 1
        case ParallelSteps():
            return len(of.agents)
        case RepeatedSteps():
            return names(of.body)
        case StepChain():
            return sum(map(names, of.parts))
        case StepChoice():
            return sum(map(names, of.options))


def covers(of: Expression, items: Sequence[Item]) -> bool:
    """Whether a whole workflow is among those that the expression describes."""
    return len(items) in _ends(of, items, {0})


def _ends(expression: Expression, items: Sequence[Item], starts: set[int]) -> set[int]:
    """Where the expression can end if it begins at one of these places."""
    match expression:
        case OneStep():
            return {start + 1 for start in starts if start < len(items) and items[start] == Item(expression.agent)}
        case ParallelSteps():
            return {start + 1 for start in starts if start < len(items) and _in_block(items[start], expression)}
        case StepChain():
            for part in expression.parts:
                starts = _ends(part, items, starts) if starts else starts
            return starts
        case StepChoice():
            single = {
                start + 1
                for start in starts
                if start < len(items) and items[start].size == 1 and items[start].symbol in expression.steps
            }
            return single.union(*(_ends(option, items, starts) for option in expression.others))
        case RepeatedSteps():
            ends = set(starts) if not expression.low else set()
            front = set(starts)
            for round_ in range(1, expression.high + 1):
                front = _ends(expression.body, items, front)
                if round_ >= expression.low:
                    front -= ends  # reached in fewer rounds before
                    ends |= front
                if not front:
                    break
            return ends


def _in_block(item: Item, block: ParallelSteps) -> bool:
    agents = item.symbol if isinstance(item.symbol, tuple) else (item.symbol,)
    return set(agents) <= set(block.agents) and block.low <= item.size <= block.high


def to_json(of: Expression) -> Any:
    """JSON values."""
    match of:
        case OneStep():
            return of.agent
        case ParallelSteps():
            return {"block": list(of.agents), "bounds": [of.low, of.high]}
        case StepChain():
            return {"chain": [to_json(part) for part in of.parts]}
        case StepChoice():
            return {"choice": [to_json(option) for option in of.options]}
        case RepeatedSteps():
            return {"repeat": to_json(of.body), "bounds": [of.low, of.high]}


def from_json(data: Any) -> Expression:
    """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
    if isinstance(data, str):
        return OneStep(data)
    if "block" in data:
        return ParallelSteps(tuple(data["block"]), *_pair(data["bounds"]))
    if "chain" in data:
        return StepChain(tuple(map(from_json, data["chain"])))
    if "choice" in data:
        return StepChoice(tuple(map(from_json, data["choice"])))
    return RepeatedSteps(from_json(data["repeat"]), *_pair(data["bounds"]))


def _pair(bounds: Sequence[int]) -> tuple[int, int]:
    low, high = bounds
    return low, high


def express(
    labels: Mapping[int, Expression],
    edges: Collection[tuple[int, int]],
    runs: Sequence[Sequence[int]],
    max_names: int,
) -> tuple[Expression, str]:
    """The expression of a graph with START and END, and the level of LEVELS that it was made at.

    Args:
        labels: what each state contributes.
        edges: between states; `START_OF` and `END_OF` name the ends.
        runs: the states of each covered workflow, which give the bounds of the loops.
    """
    for level in LEVELS:
        group = _groups(level, labels, edges)
        merged: dict[int, list[Expression]] = {}
        for state in sorted(labels):
            merged.setdefault(group[state], []).append(labels[state])
        coarse = {state: choice(*alike) for state, alike in merged.items()}
        group |= {_START: _START, _END: _END}
        moved = {(group[a], group[b]) for a, b in edges}
        expression = _eliminate(coarse, moved, [[group[state] for state in run] for run in runs], max_names)
        if expression is not None:
            return expression, level
    return repeat(choice(*labels.values()), *_range(len(run) for run in runs)), LEVELS[-1]


START_OF, END_OF = _START, _END
"""The numbers of the start and the end in the edges of `express`."""


def _groups(level: str, labels: Mapping[int, Expression], edges: Collection[tuple[int, int]]) -> dict[int, int]:
    """The group of each state, by the number of one of them."""
    if level == "states":
        return {state: state for state in labels}
    if level == "any order":
        return dict.fromkeys(labels, min(labels))
    first: dict[Any, int] = {}
    agent = {state: first.setdefault(_agents_of(label), state) for state, label in sorted(labels.items())}
    if level == "agents":
        return agent
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    inner = [(agent[a], agent[b]) for a, b in edges if a in agent and b in agent]
    size = max(labels) + 1
    rows, columns = np.array(inner or [(0, 0)]).T
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, size))
    component = connected_components(graph, connection="strong")[1]
    member: dict[int, int] = {}
    return {state: member.setdefault(int(component[shared_by]), shared_by) for state, shared_by in agent.items()}


def _agents_of(label: Expression) -> Any:
    return label.agents if isinstance(label, ParallelSteps) else label


def _eliminate(
    labels: Mapping[int, Expression],
    edges: Collection[tuple[int, int]],
    runs: list[list[int]],
    max_names: int,
) -> Expression | None:
    """The expression between start and end; None once it has too many names."""
    between: dict[tuple[int, int], Expression] = dict.fromkeys(edges, NOTHING)
    size = dict.fromkeys(edges, 0)
    left = set(labels)
    while left:
        into: dict[int, list[int]] = {state: [] for state in left}
        out: dict[int, list[int]] = {state: [] for state in left}
        for a, b in sorted(between):
            if a != b:
                if a in left:
                    out[a].append(b)
                if b in left:
                    into[b].append(a)

        def cost(
            state: int, into: dict[int, list[int]] = into, out: dict[int, list[int]] = out
        ) -> tuple[int, int, int]:
            own = names(labels[state]) + size.get((state, state), 0)
            copied = own * (len(into[state]) * len(out[state]) - 1)
            copied += sum(size[a, state] for a in into[state]) * (len(out[state]) - 1)
            copied += sum(size[state, b] for b in out[state]) * (len(into[state]) - 1)
            return copied, len(into[state]) * len(out[state]), -state

        state = min(left, key=cost)
        core, loop = labels[state], between.pop((state, state), None)
        if loop is not None:
            low, high = _range(len(list(same)) for run in runs for visited, same in groupby(run) if visited == state)
            core = chain(core, repeat(chain(loop, core), low - 1, high - 1))
        for a in into[state]:
            for b in out[state]:
                way = chain(between[a, state], core, between[state, b])
                between[a, b] = choice(between[a, b], way) if (a, b) in between else way
                size[a, b] = names(between[a, b])
                if size[a, b] > max_names:
                    return None
        between = {edge: label for edge, label in between.items() if state not in edge}
        runs = [[visited for visited in run if visited != state] for run in runs]
        left.discard(state)
    return between.get((_START, _END), NOTHING)


def _range(numbers: Iterable[int]) -> tuple[int, int]:
    counts = list(numbers)
    return min(counts, default=1), max(counts, default=1)
