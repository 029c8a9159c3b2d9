"""Which workflow a prompt goes on from: by whole earlier prompts and answers, else by parts of answers."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.continuation import MOST_SHARED, MOST_TRIED, WINDOW, PromptedWorkflow, PromptIndex, TokenPrompt, chained

BLOCK = 16


class Asked:
    """An index, and requests to it."""

    def __init__(self, **options: int) -> None:
        self.index: PromptIndex[PromptedWorkflow] = PromptIndex(b"a key of the tests", BLOCK, **options)
        self.by: str | None = None

    def prompt(self, tokens: Sequence[int], scope: str = "") -> TokenPrompt:
        return TokenPrompt(scope, chained(tokens, BLOCK), tokens)

    def ask(
        self, tokens: Sequence[int], answer: Sequence[int] = (), scope: str = "", now: float = 0.0
    ) -> PromptedWorkflow:
        """The workflow of a request, a new one if it continues none; it is answered at once."""
        link = self.index.find(self.prompt(tokens, scope))
        self.by = None if link is None else link.by
        of = PromptedWorkflow(scope) if link is None else link.workflow
        if link is None:
            self.index.begin(of)
        self.index.asked(of, self.prompt(tokens, scope), now, link)
        self.answer(of, tokens, answer, now)
        return of

    def answer(self, of: PromptedWorkflow, tokens: Sequence[int], answer: Sequence[int], now: float = 0.0) -> None:
        both = [*tokens, *answer]
        self.index.answered(of, self.prompt(both, str(of.scope)), len(tokens), now)


def drawn(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 50_000), k=n)


SYSTEM = drawn(0, 200)


@pytest.mark.parametrize("length", [3, BLOCK, 5 * BLOCK, 5 * BLOCK + 7])
def test_a_prompt_that_goes_on_from_a_prompt_and_its_answer_is_of_its_workflow(length: int) -> None:
    of, question, answer = Asked(), drawn(1, length), drawn(2, 9)
    first = of.ask(question, answer)
    assert of.ask([*question, *answer, *drawn(3, 40)]) is first
    assert of.by == "answered"
    assert first.steps == 2


def test_an_answer_that_its_client_changed_still_leaves_the_prompt() -> None:
    of, question = Asked(), SYSTEM + drawn(1, 20)
    first = of.ask(question, drawn(2, 50))
    assert of.ask([*question, *drawn(3, 60)]) is first
    assert of.by == "prompt"


def test_a_template_that_only_one_workflow_has_used_identifies_nobody() -> None:
    of = Asked()
    runs = [of.ask(SYSTEM + drawn(10 + n, 30), drawn(50 + n, 40)) for n in range(20)]
    assert len(set(runs)) == 20


def test_a_repeated_prompt_begins_a_workflow_and_what_both_have_identifies_neither() -> None:
    of, question = Asked(), SYSTEM + drawn(1, 20)
    one, two = of.ask(question, drawn(2, 50)), of.ask(question, drawn(3, 50))
    assert one is not two
    assert of.ask([*question, *drawn(2, 50), 7]) is one, "by its answer"
    assert of.ask([*question, *drawn(3, 50), 7]) is two
    assert of.ask([*question, *drawn(4, 50), 7]) not in (one, two)


def test_what_several_workflows_had_stays_nobodys_when_all_but_one_have_ended() -> None:
    of, question = Asked(), SYSTEM + drawn(1, 20)
    one, two = of.ask(question), of.ask(question)
    of.index.forget(one)
    assert of.ask([*question, 7, 8, 9]) is not two
    for _ in range(2 * MOST_SHARED):
        of.ask(question)
    assert of.ask([*question, 7, 8, 9, 10]) is not two


def test_another_agent_that_quotes_an_answer_is_of_its_workflow() -> None:
    of, plan = Asked(), drawn(2, 120)
    first = of.ask(SYSTEM + drawn(1, 20), plan)
    of.ask(SYSTEM + drawn(5, 20), drawn(6, 120))
    other = drawn(9, 90) + plan[10:100] + drawn(8, 30)
    assert of.ask(other) is first
    assert of.by == "quoted"


def test_a_compacted_history_is_found_by_the_answers_that_it_still_holds() -> None:
    of, question = Asked(), SYSTEM + drawn(1, 20)
    history = list(question)
    for turn in range(4):
        first = of.ask(history, drawn(100 + turn, 80))
        history += drawn(100 + turn, 80) + drawn(200 + turn, 30)
    assert of.ask(SYSTEM + drawn(7, 25) + history[-220:]) is first


def test_an_answer_that_repeats_its_prompt_identifies_nobody() -> None:
    of = Asked()
    first = of.ask(SYSTEM + drawn(1, 20), SYSTEM[:150])
    assert of.ask(drawn(3, 40) + SYSTEM) is not first


def test_an_answer_that_two_workflows_got_identifies_neither() -> None:
    of, refusal = Asked(), drawn(2, 100)
    of.ask(SYSTEM + drawn(1, 20), refusal)
    of.ask(SYSTEM + drawn(3, 20), refusal)
    of.ask(drawn(4, 30) + refusal)
    assert of.by is None


def test_branches_are_of_the_workflow_that_they_leave() -> None:
    of, question, answer = Asked(), SYSTEM + drawn(1, 20), drawn(2, 30)
    first = of.ask(question, answer)
    branches = [of.ask([*question, *answer, *drawn(30 + n, 25)], drawn(40 + n, 20)) for n in range(5)]
    assert set(branches) == {first}


@pytest.mark.parametrize("warm", [[SYSTEM], [SYSTEM[:100], SYSTEM]])
@pytest.mark.parametrize("answer", [[], [7], drawn(1, WINDOW - 1)])
def test_a_prompt_that_only_fills_the_cache_joins_no_sessions(warm: list[list[int]], answer: list[int]) -> None:
    of = Asked()
    for prompt in warm:
        of.ask(prompt, answer)
    begun = [*SYSTEM, *answer] if answer else SYSTEM
    turns = [[*begun, *drawn(30 + n, 40)] for n in range(20)]
    sessions = [of.ask(turn, drawn(60 + n, 40)) for n, turn in enumerate(turns)]
    assert len(set(sessions)) == 20, "at most one is taken for what follows"
    later = [of.ask([*turn, *drawn(60 + n, 40), *drawn(90 + n, 30)]) for n, turn in enumerate(turns)]
    assert later == sessions


def test_a_prompt_that_is_sent_again_goes_on_from_the_same_beginning() -> None:
    of, question = Asked(), SYSTEM + drawn(1, 20)
    first = of.ask(question, drawn(2, 50))
    again = [*question, *drawn(3, 60)]  # its answer was changed
    assert of.ask(again) is of.ask(again) is first
    assert of.ask([*question, *drawn(2, 50), *drawn(4, 60)]) is first
    assert of.ask([*question, *drawn(5, 60)]) is not first


def test_a_prompt_is_compared_with_few_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    of, base, compared = Asked(), drawn(1, 40 * BLOCK), list[int]()
    for n in range(4 * MOST_TRIED):
        at = BLOCK * (1 + n % 39)
        of.ask([*base[:at], *drawn(100 + n, 1 + n % (BLOCK - 1))])
    whole = PromptIndex.__dict__["_end"]
    monkeypatch.setattr(PromptIndex, "_end", lambda *args: compared.append(1) or whole(*args))
    of.index.find(of.prompt([*base, 1, 2, 3]))
    assert len(compared) <= MOST_TRIED


def test_scopes_know_nothing_of_each_other() -> None:
    of, question, answer = Asked(), SYSTEM + drawn(1, 20), drawn(2, 100)
    first = of.ask(question, answer, scope="tenant a")
    assert of.ask([*question, *answer, 5], scope="tenant b") is not first
    assert of.ask([*drawn(9, 40), *answer], scope="tenant b") is not first
    assert of.ask([*question, *answer, 5], scope="tenant a") is first


def test_images_that_look_alike_as_tokens_are_told_apart() -> None:
    index: PromptIndex[PromptedWorkflow] = PromptIndex(b"k", BLOCK)
    tokens, first = [5, 6, 7, 7, 7, 8], PromptedWorkflow("")
    index.begin(first)
    index.asked(first, TokenPrompt("", (), tokens, [(2, 5, b"a cat")]))
    later = [*tokens, 9]
    link = index.find(TokenPrompt("", (), later, [(2, 5, b"a cat")]))
    assert link is not None
    assert link.workflow is first
    assert index.find(TokenPrompt("", (), later, [(2, 5, b"a dog")])) is None
    assert index.find(TokenPrompt("", (), later)) is None


def test_forgotten_workflows_leave_nothing() -> None:
    of = Asked()
    runs = [of.ask(SYSTEM + drawn(10 + n, 30), drawn(50 + n, 40), scope=str(n % 3), now=n) for n in range(30)]
    of.index.expire(before=10)
    assert len(of.index) == 20
    for one in runs:
        of.index.forget(one)
    assert set(of.index.debug_state().values()) == {0}


def test_memory_is_bounded_for_any_number_of_single_requests() -> None:
    of = Asked(most=50)
    for n in range(500):
        of.ask(drawn(n, 20), drawn(1000 + n, 20), scope=str(n % 100))
    state = of.index.debug_state()
    assert state["prompted workflows"] == 50
    assert state["beginnings"] <= 100
    assert state["scopes"] <= 50


def test_one_block_repeated_costs_one_entry_a_request_and_links_as_any_prompt() -> None:
    of = Asked()
    first = of.ask([7] * 4000, [7] * 100)
    assert of.ask([7] * 5000) is first, "it begins with the whole earlier prompt"
    assert of.index.debug_state()["beginnings"] <= 4


def test_slots_for_parts_are_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="parts is 3; give a power of two"):
        PromptIndex(b"k", BLOCK, parts=3)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 20),
)
def test_a_lone_workflow_is_continued_by_whatever_goes_on_from_it(
    question: list[int], answer: list[int], more: list[int], block: int
) -> None:
    index: PromptIndex[PromptedWorkflow] = PromptIndex(b"k", block)
    of = PromptedWorkflow("")
    index.begin(of)
    index.asked(of, TokenPrompt("", chained(question, block), question))
    both = question + answer
    index.answered(of, TokenPrompt("", chained(both, block), both), len(question))
    for longer in (question + more, both + more):
        link = index.find(TokenPrompt("", chained(longer, block), longer))
        assert link is not None
        assert link.workflow is of
    link = index.find(TokenPrompt("", chained(question, block), question))
    assert link is None or link.by == "quoted", "a repeat continues nothing"


@given(st.integers(0, 40), st.integers(0, 40), st.integers(3 * WINDOW - 1, 120), st.integers(0, 2**32))
def test_texts_with_enough_tokens_in_common_share_a_part(before: int, behind: int, common: int, seed: int) -> None:
    of, rng = Asked(), random.Random(seed)
    shared = [rng.randrange(10**6) for _ in range(common)]
    first = of.ask([1, 2, 3], shared)
    text = [rng.randrange(10**6, 10**7) for _ in range(before)] + shared + [rng.randrange(10**8) for _ in range(behind)]
    assert of.ask([9, 9, *text]) is first
