"""What long work tells on standard error: its stages, and that code is compiled, which takes half a minute once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Final

Progress = Callable[[str, float | None], None]
"""Progress callback: current stage, and the share done (0 to 1; None: unknown)."""

_LINE_EVERY_S: Final = 30.0


def note(text: str) -> None:
    """Print a note on standard error."""
    print(text, file=sys.stderr)


@contextmanager
def progress_lines() -> Iterator[Progress]:
    """A progress callback that prints each stage and, every half a minute, its share done and the time left."""
    last = ""
    begun = printed = time.monotonic()
    done = 0.0

    def report(doing: str, share: float | None) -> None:
        nonlocal last, done, begun, printed
        now = time.monotonic()
        if not share or share < done:
            begun = now
        done = share or 0.0
        if doing != last:
            print(f"{doing} …", file=sys.stderr, flush=True)
            last, printed = doing, now
        elif 0 < done < 1 and now - printed >= _LINE_EVERY_S:
            left = timedelta(seconds=round((now - begun) * (1 - done) / done))
            print(f"{doing}: {done:.0%}, {left} left", file=sys.stderr, flush=True)
            printed = now

    yield report


@cache
def say_when_compiling() -> None:
    """Print one line if numba compiles anything from now on; code that it loads from its cache counts as compiled."""
    from numba.core.event import Listener, register

    class FirstTime(Listener):
        said = False

        def on_start(self, event: Any) -> None:
            if not self.said:
                self.said = True
                folder = event.data["dispatcher"].stats.cache_path
                kept = f"; it is kept in {folder}" if folder else ""
                print(f"compiling for this processor, once, up to a minute{kept} …", file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            """Only the first start counts."""

    register("numba:compile", FirstTime())  # type: ignore[no-untyped-call]  # untyped in numba
