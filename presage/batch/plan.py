"""A compiled plan: the graph of operators with structural hashes, optimised before it runs.

Source: Helium (Wadlom et al., 2026), section 4. What no output needs is left out; operators that say the same of the
same are one; what depends on no row is computed once; a branch whose condition is known is replaced by its side. Calls
with a temperature, and programs, are alike only if they are one object in the plan, since each is a sample of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from presage.batch.operators import (
    Call,
    CallingProgram,
    Conditional,
    Constant,
    EachItem,
    Function,
    Given,
    Join,
    MapEach,
    Operator,
    Template,
    parts_of,
    said_by,
)
from presage.errors import ConfigurationError

RESULT_COLUMNS: Final = ("id", "error")
"""Columns of every result beside the outputs."""


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of a compiled plan.

    Attributes:
        key: its structural hash: that of all it depends on. The same in every run of the same plan.
        items: depths of the `map_each` whose items it reads.
    """

    key: str
    operator: Operator
    parts: tuple[Node, ...]
    items: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Optimised:
    """What compiling has saved, in operators.

    Attributes:
        written: as the plan's file made them, those for outputs that were not asked for included.
        pruned: needed by no output that was asked for.
        shared: said the same of the same as another.
        folded: depend on no row, and were computed while compiling.
    """

    written: int
    pruned: int
    shared: int
    folded: int


class Plan:
    """What is done for every row.

    Attributes:
        name: of the workflow type, as the engine's forecasts know it.
        outputs: the compiled operators of the outputs, by name.
        nodes: every compiled operator, each after those it reads.
    """

    def __init__(self, name: str, /, *, wanted: Iterable[str] | None = None, **outputs: Operator) -> None:
        """Compile a plan.

        Args:
            wanted: outputs to compute; default: all.

        Raises:
            ConfigurationError: no output, an unknown one, one named as a column of all results, or what is no operator.
        """
        if not name or not outputs:
            raise ConfigurationError('a plan has a name and outputs: Plan("review", answer=...)')
        for key, made in outputs.items():
            if not isinstance(made, Operator):
                raise ConfigurationError(f"plan {name!r}: output {key!r} is a {type(made).__name__}, not an operator")
        if taken := [key for key in RESULT_COLUMNS if key in outputs]:
            raise ConfigurationError(f"plan {name!r}: results have a column {taken[0]!r} already; rename the output")
        chosen = list(outputs) if wanted is None else list(wanted)
        if unknown := [key for key in chosen if key not in outputs]:
            raise ConfigurationError(f"plan {name!r}: no output {unknown[0]!r}; it has {', '.join(outputs)}")
        self.name = name
        self._written = outputs
        compiler = _Compiler()
        self.outputs: dict[str, Node] = {key: compiler.node(outputs[key]) for key in chosen}
        self.nodes = _ordered(self.outputs.values())
        everything = _objects(outputs.values())
        reached = _objects(outputs[key] for key in chosen)
        self.optimised = Optimised(len(everything), len(everything) - len(reached), compiler.shared, compiler.folded)

    def only(self, wanted: Iterable[str]) -> Plan:
        """The plan of some of its outputs."""
        return Plan(self.name, wanted=wanted, **self._written)

    @property
    def calls(self) -> list[Node]:
        """The calls of models, in the order of `nodes`."""
        return [node for node in self.nodes if isinstance(node.operator, Call)]

    @property
    def fields(self) -> list[str]:
        """Names of the fields that a row must have."""
        return sorted({node.operator.field for node in self.nodes if isinstance(node.operator, Given)})

    @property
    def key(self) -> str:
        """Hash of the plan: a run goes on only with the plan that it was begun with."""
        return _hash([self.name, {name: node.key for name, node in self.outputs.items()}])


@dataclass
class _Compiler:
    """Compiled operators by object and by hash. Objects are kept, so that no other takes the place of one."""

    of: dict[int, tuple[Operator, Node]] = field(default_factory=dict)
    made: dict[str, Node] = field(default_factory=dict)
    samples: Counter[str] = field(default_factory=Counter)
    shared: int = 0
    folded: int = 0

    def node(self, root: Operator) -> Node:
        """Compile an operator and all it reads, without recursion: a loop may be deep."""
        waiting = [root]
        while waiting:
            operator = waiting[-1]
            if id(operator) in self.of:
                waiting.pop()
                continue
            if missing := [part for part in parts_of(operator) if id(part) not in self.of]:
                waiting.extend(reversed(missing))
                continue
            waiting.pop()
            self.of[id(operator)] = operator, self._compiled(operator)
        return self.of[id(root)][1]

    def _compiled(self, operator: Operator) -> Node:
        parts = tuple(self.of[id(part)][1] for part in parts_of(operator))
        if (known := self._known(operator, parts)) is not None:
            self.folded += 1
            return known
        items = frozenset[int]().union(*(part.items for part in parts))
        if isinstance(operator, EachItem):
            items = frozenset({operator.depth})
        elif isinstance(operator, MapEach):
            items = parts[0].items | (parts[1].items - {operator.depth})
        said = [type(operator).__name__, said_by(operator), [part.key for part in parts]]
        key = _hash(said)
        if isinstance(operator, CallingProgram) or (isinstance(operator, Call) and not operator.deterministic):
            self.samples[key] += 1
            key = _hash([*said, self.samples[key]])
        return self._node(Node(key, operator, parts, items))

    def _node(self, node: Node) -> Node:
        if node.key in self.made:
            self.shared += 1
            return self.made[node.key]
        self.made[node.key] = node
        return node

    def _known(self, operator: Operator, parts: tuple[Node, ...]) -> Node | None:
        """What stands for it where its value, or its side, is known now."""
        if isinstance(operator, Conditional) and isinstance(parts[0].operator, Constant):
            return parts[1] if parts[0].operator.value else parts[2]
        if not isinstance(operator, Template | Join | Function):
            return None
        constants = [part.operator.value for part in parts if isinstance(part.operator, Constant)]
        if len(constants) < len(parts):
            return None
        value = evaluated(operator, constants)
        try:
            key = _hash(["Constant", value, []])
        except TypeError:  # no JSON value: it is computed where it is used
            return None
        return self.made.setdefault(key, Node(key, Constant(value), ()))


def evaluated(operator: Operator, values: list[Any]) -> Any:
    """The value of an operator that asks no model, from those of its parts.

    Raises:
        ConfigurationError: a function raised an error; its name and kind are told, not its text.
    """
    match operator:
        case Constant(value):
            return value
        case Template(texts, _):
            return "".join(piece for pair in zip(texts, (*map(as_text, values), ""), strict=True) for piece in pair)
        case Join(_, separator):
            flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
            return separator.join(map(as_text, flat))
        case Function(called, _, _):
            try:
                return called(*values)
            except Exception as error:
                name = getattr(called, "__qualname__", "function")
                raise ConfigurationError(f"function {name} raised {type(error).__name__}") from error
    raise AssertionError(operator)


def as_text(value: Any) -> str:
    """A value within a prompt: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_columns(results: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[str | None]]:
    """Columns of results as texts; values that are no text are JSON."""
    return {name: [None if row[name] is None else as_text(row[name]) for row in results] for name in names}


def _hash(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:32]


def _ordered(roots: Iterable[Node]) -> list[Node]:
    found: dict[str, Node] = {}
    waiting = list(reversed(list(roots)))
    while waiting:
        node = waiting[-1]
        if node.key in found:
            waiting.pop()
        elif missing := [part for part in node.parts if part.key not in found]:
            waiting.extend(reversed(missing))
        else:
            found[waiting.pop().key] = node
    return list(found.values())


def _objects(roots: Iterable[Operator]) -> set[int]:
    """Identities of all operators below some. The plan holds on to them, so no identity is used twice."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        operator = waiting.pop()
        if id(operator) not in found:
            found.add(id(operator))
            waiting.extend(parts_of(operator))
    return found
