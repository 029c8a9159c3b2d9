"""Plans: what is written, what is merged, what is left out, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
    ],
)
def test_what_makes_no_plan_is_refused_in_one_line(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        wrong()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_function_that_keeps_an_object_is_refused() -> None:
    kept: list[str] = []

    def remembers(text: str) -> int:
        kept.append(text)
        return len(kept)

    with pytest.raises(ConfigurationError, match="keeps 'kept', a list"):
        function(remembers, given("q"))


@given_that(st.text(), st.text())
def test_braces_and_texts_come_through_a_template(static: str, value: str) -> None:
    escaped = static.replace("{", "{{").replace("}", "}}")
    plan = Plan("t", out=template(escaped + "{v}", v=value))
    assert plan.outputs["out"].operator.value == static + value  # type: ignore[attr-defined]


def test_items_of_nested_lists_are_told_apart() -> None:
    nested = map_each(given("rows"), lambda row: map_each(given("cells"), lambda cell: join([row, cell])))
    plan = Plan("nested", out=nested)
    assert plan.outputs["out"].items == frozenset()
