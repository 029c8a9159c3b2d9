"""The collector of garbage while a replay runs: it would look through all of vLLM and all prompts again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_OFTEN: Final = (50_000, 20, 20)
"""Rarely enough to be of no weight, often enough that requests, which refer to themselves, do not pile up."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """What is there stays out of it, and what comes is looked through more seldom; as before afterwards."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_OFTEN)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
