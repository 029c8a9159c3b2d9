"""Plans: what is written, what is merged, what is left out, and what is refused."""

from __future__ import annotations

import collections
import functools
import operator
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_samples import reviews
from hypothesis import given as given_that
from hypothesis import strategies as st

from presage.batch import Plan, branch, call, function, given, join, loop, map_each, template
from presage.batch.operators import Operator
from presage.errors import ConfigurationError

HERE = str(Path(__file__).parent)


async def asynchronous(text: str) -> str:
    return text


def item_outside() -> Plan:
    items: list[Operator] = []

    def body(item: Operator) -> Operator:
        items.append(item)
        return join(items)

    map_each(given("q"), body)
    return Plan("p", out=map_each(given("r"), body))


def test_operators_that_say_the_same_are_one() -> None:
    def answer() -> Operator:
        return call("expert", template("{q}?", q=given("q")), system="Be brief.")

    plan = Plan("twice", both=join([answer(), answer()]), other=answer())
    assert len(plan.calls) == 1
    assert plan.optimised.shared > 0


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "b"},
        {"prompt": "a", "system": "s"},
        {"prompt": "a", "max_tokens": 5},
        {"prompt": "a", "model": "m"},
        {"prompt": "a", "stop": ["x"]},
    ],
)
def test_calls_that_say_something_else_are_two(other: dict[str, Any]) -> None:
    assert len(Plan("two", out=join([call("x", "a"), call("x", **other)])).calls) == 2


def test_every_sample_is_a_call_of_its_own_and_one_object_is_one_sample() -> None:
    one = call("x", "a", temperature=1.0)
    plan = Plan("samples", out=join([one, one, call("x", "a", temperature=1.0)]))
    assert len(plan.calls) == 2
    again = Plan("samples", out=join([call("x", "a", temperature=1.0) for _ in range(2)]))
    assert {node.key for node in again.calls} == {node.key for node in plan.calls}


def test_what_no_wanted_output_needs_is_left_out() -> None:
    plan = reviews().only(["points"])
    assert {node.operator.agent for node in plan.calls} == {"lister"}  # type: ignore[attr-defined]
    assert plan.optimised.pruned > 0
    assert plan.fields == ["question"]


def test_what_depends_on_no_row_is_computed_once_and_a_known_branch_is_its_side() -> None:
    rules = function(", ".join, function(str.split, "be brief"))
    long = function(len, rules)
    plan = Plan("folded", out=branch(long, call("x", template("{r} {q}", r=rules, q=given("q"))), call("y", "never")))
    assert [node.operator.agent for node in plan.calls] == ["x"]  # type: ignore[attr-defined]
    assert plan.optimised.folded == 4  # three functions and the branch


def test_a_loop_is_as_many_branches_as_its_bound() -> None:
    plan = Plan("loop", out=loop(given("q"), lambda text: call("x", text), until=bool, at_most=4))
    assert len(plan.calls) == 4
    deep = Plan("deep", out=loop(given("q"), lambda text: call("x", text), until=bool, at_most=3000))
    assert len(deep.calls) == 3000


def test_the_key_of_a_plan_is_the_same_in_every_process() -> None:
    code = f"import sys; sys.path.insert(0, {HERE!r}); from batch_samples import reviews; print(reviews().key)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == reviews().key + "\n"


def test_a_function_is_another_if_its_code_its_values_or_its_helpers_are() -> None:
    def made(kept: int) -> Callable[[str], bool]:
        return lambda text: len(text) > kept and text not in {"a", "b"}

    def key(of: Callable[[str], Any]) -> str:
        return Plan("f", out=function(of, given("q"))).key

    assert key(made(1)) == key(made(1))
    assert key(made(1)) != key(made(2))
    assert key(lambda text: text + "a") != key(lambda text: text + "b")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: template("{a} {b}", a="x"), "{b} is no plain name"),
        (lambda: template("{a}", a="x", b="y"), "no {b} in the text"),
        (lambda: template("{a:>3}", a="x"), "no plain name"),
        (lambda: template("{", a="x"), "write {{ and }} for braces"),
        (lambda: call("", "x"), "agent without a name"),
        (lambda: call("x", "y", temperature=-1), "temperature is -1"),
        (lambda: call("x", "y", max_tokens=0), "max_tokens 0"),
        (lambda: call("x", "y", history=[("tool", "z")]), "role 'tool'"),
        (lambda: call("x", "y", stream=True), "stream is not for a batch"),
        (lambda: call("x", "y", n=2), "n is not for a batch"),
        (lambda: call("x", 3), "came int"),  # type: ignore[arg-type]
        (lambda: loop("x", lambda text: text, until=bool, at_most=0), "at_most is 0"),
        (lambda: Plan("p"), "has a name and outputs"),
        (lambda: Plan("p", out="text"), "is a str, not an operator"),  # type: ignore[arg-type]
        (lambda: Plan("p", wanted=["b"], a=given("q")), "no output 'b'; it has a"),
        (lambda: Plan("p", out=function(int, "x")), "function int raised ValueError"),
        (lambda: function(asynchronous, given("q")), "function asynchronous is asynchronous"),
        (lambda: call("x", "y", stop={"a"}), "a parameter is no JSON value"),
        (lambda: item_outside(), "output 'out' uses an item of a map_each outside"),
    ],
)
def test_what_makes_no_plan_is_refused_in_one_line(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        wrong()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@dataclass
class Suffix:
    kept: str

    def add(self, text: str) -> str:
        return text + self.kept

    def __call__(self, text: str) -> str:
        return self.add(text)


def composed(*functions: Callable[[Any], Any]) -> Callable[[Any], Any]:
    first, *others = functions
    if not others:
        return first
    rest = composed(*others)
    return lambda value: rest(first(value))


def module(pattern: str) -> Any:
    """One of two modules with a function of one name, which reads what its module holds, also from nested code."""
    made = types.ModuleType("helpers")
    code = f"import re\nP = re.compile({pattern!r})\ndef clean(text): return [P.sub('', word) for word in text]"
    exec(code, vars(made))
    return made


def reads(helpers: Any) -> Callable[[str], Any]:
    """A function that reads `helpers.clean`, as of a module that it has imported."""
    names = {"helpers": helpers}
    exec("def tidy(text): return helpers.clean(text)", names)
    return names["tidy"]  # type: ignore[no-any-return]


class Base:
    def run(self, text: str) -> str:
        return self.word() + text  # type: ignore[attr-defined,no-any-return]


class One(Base):
    def word(self) -> str:
        return "a"


class Other(Base):
    def word(self) -> str:
        return "b"


DIFFERENT: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (Suffix("a").add, Suffix("b").add),
    (Suffix("a"), Suffix("b")),
    (One().run, Other().run),
    ("-".join, "+".join),
    ({"x": 1}.get, {"x": 2}.get),
    (composed(str.upper, str.strip, str.strip), composed(str.lower, str.strip, str.strip)),
    (functools.partial(str.split, sep="a"), functools.partial(str.split, sep="b")),
    (re.compile("a").sub, re.compile("a", re.IGNORECASE).sub),
    (operator.itemgetter("a"), operator.itemgetter("b")),
    (functools.cache(composed(str.upper, str.strip)), functools.cache(composed(str.lower, str.strip))),
    (lambda text, *, kept=["a"]: text in kept, lambda text, *, kept=["b"]: text in kept),
    (module("a").clean, module("b").clean),
    (reads(module("a")), reads(module("b"))),
    (collections.Counter("a").get, collections.Counter("b").get),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_functions_that_are_bound_to_or_close_over_something_else_are_two(
    one: Callable[..., Any], other: Callable[..., Any]
) -> None:
    plan = Plan("f", a=function(one, given("q")), b=function(other, given("q")), again=function(one, given("q")))
    assert plan.outputs["a"].key != plan.outputs["b"].key
    assert plan.outputs["a"].key == plan.outputs["again"].key


def test_a_function_that_cannot_be_looked_into_is_like_no_other_and_its_plan_the_same_after_a_kill() -> None:
    def made() -> Plan:
        return Plan("f", **{name: function(threading.Lock().acquire, given("q")) for name in "ab"})

    assert made().outputs["a"].key != made().outputs["b"].key
    assert made().key == made().key


def test_values_that_only_look_alike_as_json_are_two() -> None:
    alike = [lambda: (1, 2), lambda: [1, 2], lambda: {1: 2, 3: 4}, lambda: {3: 4, 1: 2}, lambda: {"1": 2, "3": 4}]
    plan = Plan("v", **{f"o{number}": function(value) for number, value in enumerate(alike)})
    assert len({node.key for node in plan.outputs.values()}) == 5
    schemas = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]  # a grammar writes properties in this order
    assert len(Plan("c", out=join([call("x", "q", response_format=schema) for schema in schemas])).calls) == 2


@given_that(st.text(), st.text())
def test_braces_and_texts_come_through_a_template(static: str, value: str) -> None:
    escaped = static.replace("{", "{{").replace("}", "}}")
    plan = Plan("t", out=template(escaped + "{v}", v=value))
    assert plan.outputs["out"].operator.value == static + value  # type: ignore[attr-defined]


def test_items_of_nested_lists_are_told_apart() -> None:
    nested = map_each(given("rows"), lambda row: map_each(given("cells"), lambda cell: join([row, cell])))
    plan = Plan("nested", out=nested)
    assert plan.outputs["out"].items == frozenset()
