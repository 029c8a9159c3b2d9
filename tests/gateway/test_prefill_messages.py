"""Messages from the text of a prompt's beginning: exactly or not at all, whatever the messages hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.datasets.schema.messages import split_system
from presage.gateway.prefill.budget import LEAST_JUDGED, PrefillBudget
from presage.gateway.prefill.messages import (
    PlainMessage,
    StepMessages,
    form_of,
    messages_of,
    plain_messages,
    prompt_inputs,
    rendered,
)

CONTENT = st.text("ab\n", min_size=1, max_size=6)
SYSTEM = st.lists(CONTENT, max_size=2)
OTHER = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), CONTENT), min_size=1, max_size=4)


def messages(system: list[str], other: list[tuple[str, str]]) -> tuple[PlainMessage, ...]:
    return (*(PlainMessage("system", one) for one in system), *(PlainMessage(*one) for one in other))


def flat(given: Any) -> str:
    system, other = split_system([{"role": one.role, "content": one.content} for one in given])
    return (system or "") + (other or "")


@st.composite
def three_runs(draw: Any) -> list[tuple[list[StepMessages], tuple[PlainMessage, ...]]]:
    """Three workflows of one application: their steps, and the prompt after them, made of these by the same rules."""
    shape = [(draw(st.sampled_from("xy")), draw(st.integers(1, 2))) for _ in range(draw(st.integers(0, 3)))]
    system, found = draw(SYSTEM), []
    sources = [(step, of) for step, (_, count) in enumerate(shape) for of in (*range(count), None)]
    copies = [st.sampled_from(sources)] if sources else []
    rules = [
        (draw(st.sampled_from(["user", "assistant"])), draw(st.one_of(CONTENT, st.none(), *copies)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    for _ in range(3):
        steps = [
            StepMessages(agent, messages([], [("user", draw(CONTENT)) for _ in range(count)]), draw(CONTENT))
            for agent, count in shape
        ]
        other = []
        for role, rule in rules:
            if isinstance(rule, tuple):
                step, of = steps[rule[0]], rule[1]
                rule = step.answer if of is None else (step.messages or ())[of].content
            other.append((role, rule or draw(CONTENT)))
        found.append((steps, messages(system, other)))
    return found


@settings(max_examples=300)
@given(three_runs())
def test_a_beginning_is_exact_or_there_is_none(runs: Any) -> None:
    """Two prompts alike, and a further one that is alike, too: each beginning of its text gives its own messages."""
    (steps, one), (further, two), (now, prompt) = runs
    form = form_of(one, {}, steps).joined(form_of(two, {}, further))
    if form.joined(form_of(prompt, {}, now)) != replace(form, prompts=3):
        return  # they were alike by chance
    for length in range(len(flat(prompt)) + 1):
        found = messages_of(flat(prompt)[:length], form, now)
        if not isinstance(found, str):
            assert rendered(prompt).startswith(rendered(found, open_=True))


@given(SYSTEM, OTHER)
def test_one_message_after_the_system_prompt_is_always_mapped(system: list[str], other: list[tuple[str, str]]) -> None:
    drawn = messages(system, other[:1])
    form = form_of(drawn, {}, [])
    for length in range(len(flat(drawn)) + 1):
        found = messages_of(flat(drawn)[:length], form, [])
        if length < len("\n\n".join(system)):
            assert found == "another system prompt"
        else:
            assert not isinstance(found, str)
            assert rendered(drawn).startswith(rendered(found, open_=True))


def test_a_shared_conversation_is_mapped_to_its_end() -> None:
    """Each agent has a system prompt of its own and all that was said: none of it is in a cache for it."""

    def run(number: int) -> tuple[list[StepMessages], tuple[PlainMessage, ...]]:
        task, notes, draft = f"Task {number}.\n\nIn parts.", f"Notes {number}.\n\nMore.", f"Draft {number}"
        said = [("user", task), ("assistant", notes), ("assistant", draft)]
        first = StepMessages("researcher", messages(["You search."], said[:1]), notes)
        second = StepMessages("writer", messages(["You write."], said[:2]), draft)
        return [first, second], messages(["You review."], said)

    (steps, one), (further, two), (now, three) = map(run, range(3))
    form = form_of(one, {}, steps).joined(form_of(two, {}, further))
    assert form.prompts == 2
    assert messages_of(flat(three), form, now) == list(three)
    assert messages_of(flat(three)[:-3], form, now) == [*three[:-1], PlainMessage("assistant", "Draf")]
    inside = len("You review.") + 8
    assert messages_of(flat(three)[:inside], form, now) == [three[0], PlainMessage("user", "Task 2.")]
    other = [replace(now[0], messages=messages(["You search."], [("user", "Another task.")])), now[1]]
    assert messages_of(flat(three), form, other) == "unclear where messages end"


def test_prompts_of_other_roles_inputs_or_system_messages_are_not_alike() -> None:
    first = form_of(messages(["s"], [("user", "a")]), {"model": "m"}, [])
    for other in (
        form_of(messages(["t"], [("user", "a")]), {"model": "m"}, []),
        form_of(messages(["s"], [("user", "a"), ("user", "a")]), {"model": "m"}, []),
        form_of(messages(["s"], [("user", "a")]), {"model": "m", "tools": [1]}, []),
    ):
        assert first.joined(other) == other
    assert first.joined(first).prompts == 2


def test_one_prompt_that_differs_puts_the_others_in_doubt_and_two_replace_them() -> None:
    def form(first: str) -> Any:
        return form_of(
            messages(["s"], [("user", first), ("user", "b")]),
            {},
            [StepMessages("x", None, "one"), StepMessages("y", None, "two")],
        )

    of_x, of_y, neither = form("one"), form("two"), form("three")
    alike = of_x.joined(of_x)
    doubted = alike.joined(neither)
    assert (alike.prompts, doubted.prompts, doubted.origins) == (2, 1, alike.origins)
    assert doubted.joined(of_x) == alike
    assert doubted.joined(of_y).joined(of_y) == of_y.joined(of_y)
    free = form("three").joined(form("four"))
    assert (free.prompts, free.constants, free.origins) == (2, (None,), (frozenset(),))
    assert free.joined(form("five")).prompts == 3


@pytest.mark.parametrize(
    "strange",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        {"messages": [{"role": "system", "content": "b"}]},
        {"messages": []},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
    ],
)  # fmt: skip
def test_what_is_no_role_and_text_is_not_mapped(strange: dict[str, Any]) -> None:
    assert plain_messages(strange) is None


def test_inputs_of_a_template_are_kept_and_salts_are_not() -> None:
    given = {"model": "m", "tools": [], "temperature": 1.0, "cache_salt": "a", "documents": None, "stream": True}
    assert prompt_inputs(given) == {"model": "m", "tools": []}


def test_a_budget_pauses_above_its_share_and_begins_anew() -> None:
    budget = PrefillBudget(0.5, 10, 60.0)
    for at in range(LEAST_JUDGED):
        assert budget.may_send(0.0)
        budget.sent()
        budget.judged(100, right=at % 2 == 0, now=0.0)
    assert budget.wasted == 0.5
    budget.sent()
    budget.judged(100, right=False, now=0.0)
    assert (budget.paused(59.0), budget.paused(60.0), budget.wasted) == (True, False, None)


def test_no_more_than_a_window_is_sent_of_which_nothing_is_known() -> None:
    budget = PrefillBudget(0.5, 10, 60.0)
    for _ in range(10):
        assert budget.may_send(0.0)
        budget.sent()
    assert not budget.may_send(0.0)
    budget.judged(1, right=True, now=0.0)
    assert budget.may_send(0.0)
