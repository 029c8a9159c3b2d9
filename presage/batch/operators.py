"""The operators of a batch plan: what is done for every row of the inputs, as a graph that is built before it runs.

    question = given("question")
    drafts = [call(role, question, system=f"You are a {role}.") for role in ("lawyer", "doctor")]
    answer = call("writer", template("Combine these answers:\\n{all}", all=join(drafts)))
    plan = Plan("map-reduce", answer=answer)

Calling one of the functions here runs nothing: it returns an operator that others take as their input. Source: Helium
(Wadlom et al., 2026), appendix C. Departures: `branch` and `loop`, which it does not have, and `map_each` over lists
that are known when the plan runs.
"""

from __future__ import annotations

import copy
import inspect
import json
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from presage.batch.function_key import value_key
from presage.errors import ConfigurationError

_ITEMS: ContextVar[tuple[EachItem, ...]] = ContextVar("presage_batch_items", default=())
"""Those of the `map_each` whose bodies are being built, outermost first."""
_KEPT_BACK: Final = ("messages", "n", "stream", "stream_options")
ROLES: Final = ("system", "user", "assistant")

Ask = Callable[[str, Mapping[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Asks a model for a program: an agent and the body of a chat completion in, HTTP status and body of the answer out."""


class RowFailedError(Exception):
    """A row has no result; the text says why, for whoever reads the results.

    Attributes:
        kind: the same without what differs from row to row, to be counted; it holds nothing of the row's texts.
        status: HTTP status of an engine that refused a call.
    """

    def __init__(self, why: str, status: int = 502, *, kind: str = "") -> None:
        super().__init__(why)
        self.kind = kind or why
        self.status = status


class Operator:
    """Base of all operators."""


@dataclass(frozen=True, eq=False)
class Constant(Operator):
    """A value that is the same for every row."""

    value: Any


@dataclass(frozen=True, eq=False)
class Given(Operator):
    """A field of the row."""

    field: str


@dataclass(frozen=True, eq=False)
class EachItem(Operator):
    """The item of a `map_each` over a list, by how many others surround it."""

    over: Operator
    depth: int


def _surrounding() -> tuple[EachItem, ...]:
    return _ITEMS.get()


@dataclass(frozen=True, eq=False)
class Template(Operator):
    """Text of static pieces and values in turns: texts[0] values[0] texts[1] values[1] … texts[-1]."""

    texts: tuple[str, ...]
    values: tuple[Operator, ...]


@dataclass(frozen=True, eq=False)
class Call(Operator):
    """A call of a language model; its value is the answer's text.

    Attributes:
        messages: role and text, in order.
        model: its name at the engine; "": the only one that the engine serves.
        parameters: of the request, as OpenAI's API names them.
        output_tokens: expected, for the schedule.
        within: items of the `map_each` around it: a sample is drawn for each, whether it reads them or not.
    """

    agent: str
    messages: tuple[tuple[str, Operator], ...]
    model: str
    parameters: Mapping[str, Any]
    output_tokens: float
    within: tuple[EachItem, ...] = field(default_factory=_surrounding)

    @property
    def deterministic(self) -> bool:
        """Whether the same prompt has the same answer."""
        return not self.parameters.get("temperature")


@dataclass(frozen=True, eq=False)
class Function(Operator):
    """A deterministic Python function of values.

    Attributes:
        code: key of what it does; None: it cannot be known, so it is like no other function.
    """

    function: Callable[..., Any]
    arguments: tuple[Operator, ...]
    code: str | None


@dataclass(frozen=True, eq=False)
class MapEach(Operator):
    """The list of the body's values, one for each item of a list."""

    over: Operator
    item: EachItem
    body: Operator

    @property
    def depth(self) -> int:
        """How many others surround it."""
        return self.item.depth


@dataclass(frozen=True, eq=False)
class Conditional(Operator):
    """One of two values; the other is not computed."""

    condition: Operator
    then: Operator
    otherwise: Operator


@dataclass(frozen=True, eq=False)
class Join(Operator):
    """Texts, and the texts of lists, with a separator between them."""

    values: tuple[Operator, ...]
    separator: str


@dataclass(frozen=True, eq=False)
class CallingProgram(Operator):
    """A program that asks models itself: its calls are found as it runs.

    Attributes:
        names: of its inputs.
        run: from the inputs by name, and what asks models, its value. It may raise RowFailedError, and must let the
            errors of what asks through.
        code: what tells it from others.
        known: what is known of it before it runs, in lines for people.
        within: as of a call.
    """

    names: tuple[str, ...]
    inputs: tuple[Operator, ...]
    run: Callable[[dict[str, Any], Ask], Awaitable[Any]]
    code: str
    known: tuple[str, ...] = ()
    within: tuple[EachItem, ...] = field(default_factory=_surrounding)


def parts_of(operator: Operator) -> tuple[Operator, ...]:
    """The operators whose values one reads."""
    match operator:
        case Template(_, values) | Join(values, _):
            return values
        case Call(_, messages):
            return tuple(text for _, text in messages)
        case Function(_, arguments) | CallingProgram(_, arguments):
            return arguments
        case EachItem(over):
            return (over,)
        case MapEach(over, item, body):
            return over, item, body
        case Conditional(condition, then, otherwise):
            return condition, then, otherwise
    return ()


def said_by(operator: Operator) -> Any:
    """What tells an operator from others of its kind with the same parts; a JSON value."""
    match operator:
        case Constant(value):
            return value_key(value)
        case Given(said) | EachItem(_, said) | Template(said) | Join(_, said):
            return said
        case Function(_, _, code):
            return code
        case CallingProgram(names, _, _, code):
            return [list(names), code]
        case Call(agent, messages, model, parameters):
            return [agent, [role for role, _ in messages], model, json.dumps(sorted(parameters.items()))]
    return None


def given(field: str) -> Operator:
    """A field of the row."""
    return Given(field)


def template(text: str, /, **values: Operator | str) -> Operator:
    """Text with `{name}` for the value of an operator; `{{` and `}}` are braces.

    Raises:
        ConfigurationError: a name without a value or a value without a name, a conversion or a format.
    """
    texts, operators = [""], []
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigurationError(f"template: {error}; write {{{{ and }}}} for braces") from None
    for static, name, form, conversion in pieces:
        texts[-1] += static
        if name is None:
            continue
        if name not in values or form or conversion:
            raise ConfigurationError(
                f"template: {{{name}}} is no plain name with a value; it has {', '.join(values) or 'none'}"
            )
        operators.append(_operator(values[name]))
        texts.append("")
    used = {name for _, name, _, _ in pieces}
    if unused := [name for name in values if name not in used]:
        raise ConfigurationError(f"template: no {{{unused[0]}}} in the text for this value")
    return Template(tuple(texts), tuple(operators))


def call(
    agent: str,
    prompt: Operator | str,
    *,
    system: Operator | str = "",
    history: Sequence[tuple[str, Operator | str]] = (),
    model: str = "",
    temperature: float = 0.0,
    max_tokens: int = 256,
    output_tokens: float | None = None,
    **parameters: Any,
) -> Operator:
    """A call of a language model, as an agent.

    Args:
        history: messages between system prompt and prompt, as role and text.
        model: default: the one that the engine serves.
        temperature: at 0 equal prompts are asked once; else each call of a plan is asked by itself.
        output_tokens: expected length of the answer, for the schedule; default: half of `max_tokens`.
        parameters: further ones of the request, such as `stop` or `seed`.

    Raises:
        ConfigurationError: a name, role or parameter that no call can have.
    """
    if not agent:
        raise ConfigurationError('call: an agent without a name; name it by its role, such as "critic"')
    try:
        parameters = copy.deepcopy(parameters)
        json.dumps(parameters)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"call of {agent!r}: a parameter is no JSON value ({error})") from None
    if temperature < 0 or max_tokens < 1:
        raise ConfigurationError(
            f"call of {agent!r}: temperature is {temperature} and max_tokens {max_tokens}; 0 and 1 are the least"
        )
    if kept := [name for name in _KEPT_BACK if name in parameters]:
        raise ConfigurationError(
            f"call of {agent!r}: {kept[0]} is not for a batch, which reads one whole answer a call"
        )
    if wrong := [role for role, _ in history if role not in ROLES]:
        raise ConfigurationError(f"call of {agent!r}: role {wrong[0]!r} in its history; one of {', '.join(ROLES)}")
    said = [("system", system)] if not isinstance(system, str) or system else []
    messages = tuple((role, _operator(text)) for role, text in (*said, *history, ("user", prompt)))
    asked = {"temperature": temperature, "max_tokens": max_tokens, **parameters}
    return Call(agent, messages, model, asked, max_tokens / 2 if output_tokens is None else output_tokens)


def function(called: Callable[..., Any], *arguments: Operator | str) -> Operator:
    """A Python function of values that depends on nothing else: text, numbers, lists and dictionaries.

    Functions that do the same to the same are computed once. What a function does is its code and all that this reads,
    to any depth (`function_key`); one that holds on to something that cannot be looked into, such as an open file, is
    computed by itself.

    Raises:
        ConfigurationError: it is asynchronous.
    """
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigurationError(
            f"function {name_of(called)} is asynchronous; a function that returns its value is wanted"
        )
    return Function(called, tuple(_operator(argument) for argument in arguments), value_key(called))


def name_of(called: Callable[..., Any]) -> str:
    """How people know a function."""
    return str(getattr(called, "__qualname__", type(called).__qualname__))


def map_each(over: Operator, body: Callable[[Operator], Operator]) -> Operator:
    """The list of `body(item)` for each item of a list. An item may be used within its body only."""
    surrounding = _ITEMS.get()
    item = EachItem(over, len(surrounding))
    before = _ITEMS.set((*surrounding, item))
    try:
        return MapEach(over, item, _operator(body(item)))
    finally:
        _ITEMS.reset(before)


def branch(condition: Operator, then: Operator | str, otherwise: Operator | str) -> Operator:
    """`then` where the condition holds, as Python reads truth; else `otherwise`."""
    return Conditional(condition, _operator(then), _operator(otherwise))


def loop(
    start: Operator | str,
    body: Callable[[Operator], Operator],
    *,
    until: Callable[[Any], Any],
    at_most: int,
) -> Operator:
    """`body` of the latest value again and again, until `until(value)` holds or the body ran `at_most` times.

    The bound makes a plan finite: it is written out as so many branches.
    """
    if at_most < 1:
        raise ConfigurationError(f"loop: at_most is {at_most}; 1 is the least")
    value = _operator(start)
    for _ in range(at_most):
        value = Conditional(function(until, value), value, body(value))
    return value


def join(values: Operator | Sequence[Operator | str], separator: str = "\n\n") -> Operator:
    """Texts, or a list's texts, as one text."""
    parts = (values,) if isinstance(values, Operator) else tuple(_operator(value) for value in values)
    return Join(parts, separator)


def _operator(value: Operator | str) -> Operator:
    if isinstance(value, Operator):
        return value
    if isinstance(value, str):
        return Constant(value)
    raise ConfigurationError(f"a plan takes operators and texts; came {type(value).__name__}: use function() for it")
