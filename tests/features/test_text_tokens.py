"""Identifiers become their kind; everything that may carry meaning stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.features.text_tokens import KIND, chunks_of, tokens_of_chunk


def tokens_of(text: str) -> list[str]:
    return [token for chunk in chunks_of(text) for token in tokens_of_chunk(chunk)]


def kinds(text: str) -> list[str]:
    """Tokens, kinds in angle brackets."""
    return [
        f"<{token[1:].strip().replace(' ', '-')}>" if token.startswith(KIND) else token for token in tokens_of(text)
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Fix ticket 483920, please", ["fix", "ticket", "<number-6>", ",", "please"]),
        ("exit code 0", ["exit", "code", "0"]),
        ("see https://a.example.com/x?y=1 (or mail x.y@z.com)", ["see", "<url>", "(", "or", "mail", "<email>", ")"]),
        ("550e8400-e29b-41d4-a716-446655440000", ["<uuid>"]),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiAxNn0.aWNjIaR-V71W3vq_YC", ["bearer", "<secret>"]),
        ("token ha3+EA+ige++5bgb4AEcClBj+4758a3G==", ["token", "<secret>"]),
        ("at 2026-11-22T10:00:01.5Z or 2026-11-22 or 12:30", ["at", "<time>", "or", "<time>", "or", "<time>"]),
        ("/srv/app/main.py src/main.py a/b/c C:\\Users\\x\\y.txt", ["<path-py>", "<path-py>", "<path>", "<path-txt>"]),
        ("and/or read/write", ["and", "/", "or", "read", "/", "write"]),
        ("commit 3f2a9bc 0xff01 " + "0a" * 20, ["commit", "<hex>", "<hex>", "<hex>"]),
        ("order ORD-0012345 INV2024 x1y2z3w", ["order", "ord", "-", "<number-7>", "<id>", "<id>"]),
        ("gpt4 v2 agent7 utf8", ["gpt4", "v2", "agent7", "utf8"]),
        ("#17 and 3.14", ["#", "<number-2>", "and", "<number-4>"]),
        ("数据库 wörter_ok\n", ["数", "据", "库", "wörter_ok", "\n"]),
        ("deadbeef cafe", ["deadbeef", "cafe"]),
        # Names are looked for no further than 64 characters back: with no bound a text costs its square.
        (32 * "a-" + "x1@y.com", ["a", "-", "<email>"]),
        (64 * "a" + "@y.com", ["<email>"]),
        ("src/" + 96 * "a" + "/x.py", ["<path-py>"]),
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    assert kinds(text) == tokens


@given(st.integers(10**5, 10**6 - 1), st.integers(10**5, 10**6 - 1))
def test_two_numbers_of_like_length_are_one_token(first: int, second: int) -> None:
    assert tokens_of(f"ticket {first}") == tokens_of(f"ticket {second}")


@given(st.uuids(), st.uuids())
def test_two_uuids_are_one_token(first: object, second: object) -> None:
    assert tokens_of(f"run {first}.") == tokens_of(f"run {second}.")


@given(st.text(st.characters(), max_size=200))
def test_any_text_has_tokens_without_white_space(text: str) -> None:
    for token in tokens_of(text):
        assert token
        assert token == "\n" or token.startswith(KIND) or not any(part.isspace() for part in token)


def test_no_text_can_spell_a_kind() -> None:
    assert not any(token.startswith(KIND) for token in tokens_of(f"{KIND}uuid {KIND}number 6"[:-1]))
