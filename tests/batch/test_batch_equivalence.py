"""Random plans: whatever is merged, shared, folded and reordered, every row has the values of a plain interpreter."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import operator
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_samples import ENGINE, Echo
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st

from presage.batch import Plan, branch, call, function, given, join, loop, map_each, template
from presage.batch import operators as ops
from presage.batch.operators import Operator
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.run import BatchRun, RunSettings
from presage.batch.schedule import soft_order

EXAMPLES = 100
FIELDS = ("words", "more", "number")
ROWS = st.fixed_dictionaries(
    {
        "words": st.sampled_from(["ab,c", "c,ab,c", "", "ab"]),
        "more": st.sampled_from(["x,ab", "c", "\ud83d,é"]),
        "number": st.integers(0, 2),
    }
)


def text_of(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


def answer_to(body: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return "".join("abc de,"[int(letter, 16) % 7] for letter in digest[:10])


class Oracle:
    """What a plan means, read off its operators: nothing is merged, kept or computed ahead."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row

    def value(self, of: Operator, items: Mapping[int, Any]) -> Any:
        match of:
            case ops.Constant(value):
                return value
            case ops.Given(name):
                return self.row[name]
            case ops.EachItem():
                return items[id(of)]
            case ops.Template(texts, values):
                filled = [text_of(self.value(value, items)) for value in values]
                return "".join(text + value for text, value in zip(texts, [*filled, ""], strict=True))
            case ops.Join(values, separator):
                came = [self.value(value, items) for value in values]
                flat = [text_of(one) for value in came for one in (value if isinstance(value, list) else [value])]
                return separator.join(flat)
            case ops.Function(called, arguments):
                return called(*(self.value(argument, items) for argument in arguments))
            case ops.Conditional(condition, then, otherwise):
                return self.value(then if self.value(condition, items) else otherwise, items)
            case ops.MapEach(over, item, body):
                return [self.value(body, {**items, id(item): each}) for each in self.value(over, items)]
            case ops.Call(_, messages, _, parameters):
                said = [{"role": role, "content": text_of(self.value(text, items))} for role, text in messages]
                return answer_to({"model": "tiny", "messages": said, **parameters})
        raise AssertionError(of)


@dataclass
class Marks:
    mark: str

    def put(self, value: Any) -> str:
        return text_of(value) + self.mark


def composed(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(value: Any) -> Any:
        return second(first(value))

    return both


def cut(value: Any) -> list[str]:
    return [word for word in text_of(value).split(",") if word][:3]


def changed(value: Any) -> list[Any]:
    """Changes its argument, which others read too."""
    if not isinstance(value, list):
        return cut(value)
    value.append("new")
    return value[-2:]


def numbers(value: Any) -> tuple[int, ...]:
    return tuple(range(len(text_of(value)) % 3))


TEXT_FUNCTIONS: list[Callable[[Any], Any]] = [
    Marks("-1").put,
    Marks("-2").put,
    composed(composed(text_of, str.upper), str.strip),
    composed(composed(text_of, str.lower), str.strip),
    composed(text_of, re.compile("a").split),
    composed(text_of, re.compile("b").split),
    composed(text_of, functools.partial(re.sub, "a", "z")),
    composed(text_of, functools.partial(re.sub, "a", "y")),
    composed(cut, "+".join),
    composed(cut, "*".join),
    composed(text_of, {"ab": 1}.get),
    composed(text_of, {"ab": 2}.get),
    composed(text_of, operator.itemgetter(slice(0, 1))),
    composed(text_of, operator.itemgetter(slice(0, 2))),
    cut,
    changed,
    *(lambda value, kept=kept: text_of(value) + kept for kept in "!?"),
    *(lambda value, kept=kept: [text_of(value), *kept] for kept in (["m"], ["n"], ("m",))),
]
LIST_FUNCTIONS: list[Callable[[Any], Any]] = [cut, numbers, changed, composed(cut, sorted)]
CONDITIONS: list[Callable[[Any], Any]] = [lambda value: "a" in text_of(value), lambda value: len(text_of(value)) < 9]


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Operator]:
    def built(pool: list[Operator], depth: int) -> Operator:
        """An operator of those in the pool, which it joins."""

        def one() -> Operator:
            return draw(st.sampled_from(pool))

        kinds = ["call", "template", "join", "function", "branch", "loop", *(["map"] * 2 if depth < 2 else [])]
        made: Operator
        match draw(st.sampled_from(kinds)):
            case "call":
                system = draw(st.sampled_from(["", "S", "T"]))
                seed = draw(st.sampled_from([{}, {"seed": 1}, {"stop": ["b", "c"]}, {"stop": ["c", "b"]}]))
                made = call(draw(st.sampled_from("xy")), one(), system=system, max_tokens=5, **seed)
            case "template":
                text = draw(st.sampled_from(["{a} and {b}", "{{a}} {a}{b}", "{b}{a}"]))
                made = template(text, a=one(), b=draw(st.sampled_from([*pool, "constant"])))
            case "join":
                made = join([one(), one()], draw(st.sampled_from([", ", "\n"])))
            case "function":
                made = function(draw(st.sampled_from(TEXT_FUNCTIONS)), one())
            case "branch":
                made = branch(function(draw(st.sampled_from(CONDITIONS)), one()), one(), one())
            case "loop":
                kept = one()
                made = loop(
                    one(),
                    lambda value: call("again", template("{v} after {k}", v=value, k=kept), max_tokens=4),
                    until=draw(st.sampled_from(CONDITIONS)),
                    at_most=draw(st.integers(1, 3)),
                )
            case _:

                def body(item: Operator) -> Operator:
                    inner = [*pool, item, item, item]
                    for _ in range(draw(st.integers(0, 2))):
                        built(inner, depth + 1)
                    return inner[-1]

                over = function(draw(st.sampled_from(LIST_FUNCTIONS)), one())
                made = map_each(over, body)
        pool.append(made)
        return made

    pool: list[Operator] = [given(name) for name in FIELDS]
    for _ in range(draw(st.integers(2, 9))):
        built(pool, 0)
    wanted = draw(st.lists(st.sampled_from(pool[len(FIELDS) :]), min_size=1, max_size=4))
    return {f"o{number}": made for number, made in enumerate(wanted)}


@given_that(outputs(), st.lists(ROWS, min_size=1, max_size=3), st.booleans())
@settings(max_examples=EXAMPLES)
def test_every_row_has_the_values_of_a_plain_interpreter(
    written: dict[str, Operator], rows: list[dict[str, Any]], ordered: bool
) -> None:
    plan = Plan("random", **written)
    server = Echo(lambda said: answer_to(next(body for body in server.asked if body["messages"] is said)))
    with tempfile.TemporaryDirectory() as folder:
        order = soft_order(plan, tree_of(plan, field_tokens(plan, rows)), rows) if ordered else None
        limits = RunSettings(concurrency=3, open_rows=2)
        run = BatchRun(plan, rows, [ENGINE], Path(folder), order=order, settings=limits, transport=server)
        try:
            asyncio.run(run.run())
            results = list(run.results())
        finally:
            run.close()
    for number, (row, result) in enumerate(zip(rows, results, strict=True)):
        wanted = {name: Oracle(row).value(made, {}) for name, made in written.items()}
        assert result == {"id": number, **json.loads(text_of(json.dumps(wanted, ensure_ascii=False))), "error": None}
