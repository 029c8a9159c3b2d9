"""A compiled plan: the graph of operators with structural hashes, optimised before it runs.

Source: Helium (Wadlom et al., 2026), section 4. What no output needs is left out; operators that say the same of the
same are one; what depends on no row is computed once; a branch whose condition is known is replaced by its side. Calls
with a temperature, programs, and functions of which nobody knows what they do are alike only if they are one object.
"""

from __future__ import annotations

import copy
import hashlib
import json
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from presage.batch.function_key import is_installed, value_key
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
    RowFailedError,
    Template,
    name_of,
    parts_of,
    said_by,
)
from presage.errors import ConfigurationError

RESULT_COLUMNS: Final = ("id", "error")
"""Columns of every result beside the outputs."""
_IMMUTABLE: Final = (str, int, float, bool, bytes, type(None))
_MESSAGE: Final = 300
"""Characters of an error's message in the results."""


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of a compiled plan.

    Attributes:
        key: its structural hash: that of all it depends on. The same in every run of the same plan.
        items: keys of the items of `map_each` that it reads.
    """

    key: str
    operator: Operator
    parts: tuple[Node, ...]
    items: frozenset[str] = frozenset()


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
        if outside := [key for key, node in self.outputs.items() if node.items]:
            raise ConfigurationError(
                f"plan {name!r}: output {outside[0]!r} uses an item of a map_each outside its body, where it is unknown"
            )
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
            if missing := [part for part in (*parts_of(operator), *_within(operator)) if id(part) not in self.of]:
                waiting.extend(reversed(missing))
                continue
            waiting.pop()
            self.of[id(operator)] = operator, self._compiled(operator)
        return self.of[id(root)][1]

    def _compiled(self, operator: Operator) -> Node:
        parts = tuple(self.of[id(part)][1] for part in parts_of(operator))
        if (node := self._known(operator, parts)) is not None:
            self.folded += 1
            return node
        said = [type(operator).__name__, said_by(operator), [part.key for part in parts]]
        key = _hash(said)
        if _alone(operator):
            self.samples[key] += 1
            key = _hash([*said, self.samples[key]])
        around = [self.of[id(item)][1] for item in _within(operator)]
        items = frozenset[str]().union(*(part.items for part in (*parts, *around)))
        if isinstance(operator, EachItem):
            items |= {key}
        elif isinstance(operator, MapEach):
            items -= {parts[1].key}
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
        try:
            value = evaluated(operator, constants)
        except RowFailedError as error:  # it would fail every row
            raise ConfigurationError(str(error)) from None
        if (said := value_key(value)) is None:  # it is computed where it is used
            return None
        key = _hash(["Constant", said, []])
        return self.made.setdefault(key, Node(key, Constant(value), ()))


def _within(operator: Operator) -> tuple[EachItem, ...]:
    return operator.within if isinstance(operator, Call | CallingProgram) and _alone(operator) else ()


def _alone(operator: Operator) -> bool:
    """Whether it is like no other, however much alike they look."""
    match operator:
        case Call():
            return not operator.deterministic
        case Function():
            return operator.code is None
    return isinstance(operator, CallingProgram)


def evaluated(operator: Operator, values: list[Any]) -> Any:
    """The value of an operator that asks no model, from those of its parts.

    Raises:
        RowFailedError: a function raised an error, or a value is none of text, numbers, lists and dictionaries where
            one is wanted.
    """
    match operator:
        case Constant(value):
            return value
        case Template(texts, _):
            return "".join(piece for pair in zip(texts, (*map(as_text, values), ""), strict=True) for piece in pair)
        case Join(_, separator):
            flat = [part for value in values for part in (value if isinstance(value, list) else [value])]
            return separator.join(map(as_text, flat))
        case Function(called, _, _):
            return _called(called, values)
    raise AssertionError(operator)


def _called(called: Callable[..., Any], values: list[Any]) -> Any:
    """A function's value; it gets values of its own, as others read them too."""
    name = name_of(called)
    try:
        value = called(*(value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value) for value in values))
    except (Exception, SystemExit) as error:
        kind = f"function {name} raised {type(error).__name__}"
        raise RowFailedError(f"{kind}{what_and_where(error)}", kind=kind) from error
    if isinstance(value, Iterator | Awaitable | AsyncIterator):
        raise RowFailedError(
            f"function {name} returned a {type(value).__name__}, which can be read once; return a list"
        )
    return value


def what_and_where(error: BaseException) -> str:
    """An error's message and the user's line that it comes from, to follow its kind."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in frames if not is_installed(frame.filename)
    ]
    message = " ".join(str(error).split())[:_MESSAGE]
    return (f": {message}" if message else "") + (lines[-1] if lines else "")


def as_text(value: Any) -> str:
    """A value within a prompt: text as it is, everything else as JSON.

    Raises:
        RowFailedError: it is no JSON value.
    """
    if isinstance(value, str):
        return valid_text(value)
    try:
        return valid_text(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        raise RowFailedError(
            f"a {type(value).__name__} in a prompt; text, numbers, lists and dictionaries of these are wanted"
        ) from None


def valid_text(text: str) -> str:
    """A text with U+FFFD for half a surrogate pair, which has no UTF-8 and which JavaScript's cut texts hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def text_columns(results: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[str | None]]:
    """Columns of results as texts; values that are no text are JSON."""
    return {name: [None if row[name] is None else as_text(row[name]) for row in results] for name in names}


def _hash(said: Any) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _ordered(roots: Iterable[Node]) -> list[Node]:
    by_key: dict[str, Node] = {}
    waiting = list(reversed(list(roots)))
    while waiting:
        node = waiting[-1]
        if node.key in by_key:
            waiting.pop()
        elif missing := [part for part in node.parts if part.key not in by_key]:
            waiting.extend(reversed(missing))
        else:
            by_key[waiting.pop().key] = node
    return list(by_key.values())


def _objects(roots: Iterable[Operator]) -> set[int]:
    """Identities of all operators below some. The plan holds on to them, so no identity is used twice."""
    identities: set[int] = set()
    waiting = list(roots)
    while waiting:
        operator = waiting.pop()
        if id(operator) not in identities:
            identities.add(id(operator))
            waiting.extend(parts_of(operator))
    return identities
