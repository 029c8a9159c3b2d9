"""The bounded expression: its notation, its algebra, and that it covers what it was made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import coding, profile, table_of

from presage.features.sequences import Item
from presage.predictors.profile.expression import (
    LEVELS,
    NOTHING,
    Expression,
    OneStep,
    ParallelSteps,
    chain,
    choice,
    covers,
    from_json,
    repeat,
    text,
    to_json,
)

A, B, C = (OneStep(name) for name in "abc")
BLOCK = ParallelSteps(("r", "s"), 2, 5)


def items(word: str) -> list[Item]:
    return [Item(letter) for letter in word]


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (chain(A, A, repeat(A, 1, 10)), "a{3,12}"),
        (chain(A, B, repeat(chain(A, B), 0, 3)), "(a b){1,4}"),
        (chain(A, repeat(chain(B, A), 0, 3), B), "(a b){1,4}"),
        (chain(A, repeat(chain(B, A), 0, 3)), "a (b a){0,3}"),
        (choice(NOTHING, A), "a?"),
        (choice(repeat(A, 1, 2), repeat(A, 3, 4), NOTHING), "a{0,4}"),
        (choice(chain(A, B, C), chain(A, C)), "a b? c"),
        (choice(chain(A, C), chain(B, C)), "(a | b) c"),
        (choice(A, chain(A, choice(NOTHING, A))), "a{1,2}"),
        (choice(chain(repeat(A, 0, 2), B), repeat(A, 1, 2), NOTHING), "a{0,2} b?"),
        (choice(OneStep("r"), BLOCK), "[r ‖ s]{1,5}"),
        (repeat(repeat(A, 0, 2), 2, 3), "a{0,6}"),
        (repeat(A, 2, 2), "a{2}"),
        (OneStep("Chief Officer"), '"Chief Officer"'),
        (repeat(choice(A, B), 0, 1), "(a | b)?"),
        (NOTHING, ""),
    ],
)
def test_the_expression_as_people_read_it(made: Expression, written: str) -> None:
    assert text(made) == written


@pytest.mark.parametrize(
    ("of", "yes", "no"),
    [
        (repeat(A, 2, 3), ["aa", "aaa"], ["", "a", "aaaa", "aab"]),
        (chain(A, choice(B, NOTHING), C), ["ac", "abc"], ["ab", "abbc", "c"]),
        (repeat(choice(A, chain(A, B)), 1, 2), ["a", "ab", "aab", "aba"], ["b", "abb", ""]),
        (NOTHING, [""], ["a"]),
    ],
)
def test_which_workflows_are_covered(of: Expression, yes: Sequence[str], no: Sequence[str]) -> None:
    assert all(covers(of, items(word)) for word in yes)
    assert not any(covers(of, items(word)) for word in no)


def test_a_block_is_a_number_of_its_agents() -> None:
    assert covers(BLOCK, [Item(("r", "s"), 2)])
    assert covers(BLOCK, [Item(("s",), 5)])
    assert not covers(BLOCK, [Item(("r", "s"), 6)])
    assert not covers(BLOCK, [Item(("r", "x"), 2)])
    assert not covers(BLOCK, items("r"))  # fewer than two
    assert covers(choice(OneStep("r"), BLOCK), items("r"))


workflows = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=12)


@given(workflows, st.sampled_from([1, 3, 30]))
def test_every_workflow_that_it_was_made_of_is_covered(words: list[str], max_names: int) -> None:
    made = profile(table_of(words), min_coverage=1.0, percentile=1.0, max_names=max_names)
    assert all(covers(made.expression, items(word)) for word in words)
    assert made.covered == 1.0
    assert made.level in LEVELS


@given(workflows)
def test_json_values_give_the_same_expression(words: list[str]) -> None:
    made = profile(table_of(words)).expression
    assert from_json(to_json(made)) == made


@given(st.lists(st.sampled_from([NOTHING, A, B, repeat(A, 0, 2), chain(A, B), chain(repeat(A, 0, 2), C)]), max_size=4))
def test_a_choice_covers_exactly_what_its_options_cover(options: list[Expression]) -> None:
    words = ["", "a", "b", "c", "ab", "aa", "ac", "aac", "aaa", "ba"]
    made = choice(*options)
    covered = {word for word in words if any(covers(of, items(word)) for of in options)}
    assert {word for word in words if covers(made, items(word))} == (covered if options else {""})


@given(st.lists(st.sampled_from([A, B, repeat(A, 1, 2), chain(A, B), repeat(chain(A, B), 1, 2)]), max_size=4))
def test_a_chain_covers_what_its_parts_cover_one_after_the_other(parts: list[Expression]) -> None:
    words = {""}
    for part in parts:
        ends = [word for word in ("a", "b", "aa", "ab", "abab") if covers(part, items(word))]
        words = {begun + end for begun in words for end in ends}
    made = chain(*parts)
    assert all(covers(made, items(word)) for word in words)
    assert not covers(made, items("c"))


def test_the_plan_of_an_application_is_found() -> None:
    made = profile(table_of(coding(500)))
    assert made.text == "planner explorer{3,12} (coder tester){1,4} reviewer?"
    assert made.level == "states"


def test_agents_in_any_order_are_said_to_be_so() -> None:
    import random

    rng = random.Random(0)
    made = profile(table_of([rng.choices("abcdefgh", k=rng.randint(2, 30)) for _ in range(300)]))
    assert made.level in {"groups", "any order"}
    assert made.text == "(a | b | c | d | e | f | g | h){2,30}"
    assert any("no plan is visible" in one for one in made.warnings)
