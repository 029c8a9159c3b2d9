"""What may stand in a row: names and counts come with requests, so they are looked at once more."""

from __future__ import annotations

from typing import Final

MAX_NAME: Final = 256
"""Characters of a name; the step of a longer one is not recorded."""

NO_NAME: Final = f"not recorded: no name, or none of at most {MAX_NAME} printable characters"

_MOST: Final = 2**31


def is_name(value: object) -> bool:
    """Whether it is a text of some printable characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def name_or_none(value: object) -> str | None:
    """The same text, or nothing."""
    return value if isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable() else None


def count_or_none(value: object) -> int | None:
    """A whole number from 0 that a column can hold, or nothing."""
    return value if isinstance(value, int) and 0 <= value < _MOST else None
