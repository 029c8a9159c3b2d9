"""Words in messages and reports: counted nouns, the name meant by a misspelt one, and how to install an extra."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_SIMILAR: Final = 0.7


def counted(number: float, noun: str, plural: str = "") -> str:
    """A number of things: "1 workflow", "2,000 workflows"; `plural` is for nouns that take more than an s."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"


def letters(name: str) -> str:
    """A name without case and punctuation."""
    return "".join(filter(str.isalnum, name)).casefold()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to a misspelt one; None if none is."""
    spelt = {letters(one): one for one in known}
    found = get_close_matches(letters(name), spelt, n=1, cutoff=_SIMILAR)
    return spelt[found[0]] if found else None


def install(extra: str) -> str:
    """How to install an extra of Presage, which is on no package index."""
    return f"pip install '.[{extra}]' in a checkout of Presage, or './presage-VERSION-py3-none-any.whl[{extra}]'"
