"""Prompts in other words: as many as promised, the same each time, and never none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from presage.training.next_agent.change import rewording

PROMPT = "\n".join(
    f"Rule {i} says this much. " + " ".join(f"word{chr(97 + i)}{chr(97 + j)}" for j in range(20)) for i in range(20)
)


def test_about_a_fifth_of_the_words_goes_and_a_fifth_of_the_sentences() -> None:
    before = {word for word in PROMPT.split() if word.isalpha()}
    kept = [len(before & set(rewording([PROMPT], salt)(PROMPT).split())) / len(before) for salt in range(20)]
    assert 0.5 < sum(kept) / len(kept) < 0.85


@given(st.lists(st.text(min_size=1), min_size=1), st.integers(0, 2**32 - 1))
def test_any_prompt_is_reworded_the_same_way_each_time_and_something_is_left(prompts: list[str], salt: int) -> None:
    first, second = rewording(prompts, salt), rewording(reversed(prompts), salt)
    for prompt in prompts:
        assert first(prompt) == second(prompt)
        assert len(first(prompt).split("\n")) == len(prompt.split("\n"))
