"""A moment as a user writes it."""

from __future__ import annotations

import datetime as dt

from presage.errors import ConfigurationError


def parse_moment(text: str, name: str) -> dt.datetime:
    """A time with its zone.

    Args:
        text: ISO 8601 with a zone, or epoch seconds.
        name: of the option, for the error.

    Raises:
        ConfigurationError: it is neither, or out of the range of times.
    """
    wanted = (
        "a date and time in ISO 8601 with a zone (2026-01-31T00:00:00Z, 2026-01-31T09:30+02:00) or epoch seconds is "
        "wanted"
    )
    try:
        seconds = float(text)
    except ValueError:
        seconds = None
    try:
        moment = dt.datetime.fromisoformat(text) if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        hint = "" if seconds is None else " (milliseconds?)"
        raise ConfigurationError(f"{name} {text!r}: no such time{hint}; {wanted}") from None
    if moment.tzinfo is None:
        raise ConfigurationError(f"{name} {text!r}: no zone; {wanted}: add Z for UTC")
    return moment
