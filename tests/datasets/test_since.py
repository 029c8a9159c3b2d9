"""Moments as users write them."""

from __future__ import annotations

import datetime as dt

import pytest

from presage.datasets.since import parse_moment
from presage.errors import ConfigurationError

NEW_YEAR = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "text", ["2026-01-01T00:00:00Z", "2026-01-01 01:00+01:00", "20260101T000000+0000", "1767225600", "1767225600.0"]
)
def test_one_moment_in_many_spellings(text: str) -> None:
    assert parse_moment(text, "--since") == NEW_YEAR


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-01-01", "no zone"),
        ("2026-01-01T00:00:00", "no zone"),
        ("yesterday", "no such time"),
        ("", "no such time"),
        ("1767225600000", "no such time \\(milliseconds\\?\\)"),
        ("nan", "no such time"),
        ("inf", "no such time"),
        ("2026-13-01T00:00:00Z", "no such time"),
    ],
)
def test_what_is_no_moment_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--since '{text}': {words}"):
        parse_moment(text, "--since")
