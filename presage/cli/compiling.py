"""Says on standard error that code is being compiled, which takes half a minute once, and where it is kept."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


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
