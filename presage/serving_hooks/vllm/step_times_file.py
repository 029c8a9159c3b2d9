"""Writes the tokens and the duration of each iteration to a file, to which `presage calibrate-cost` fits a cost model.

While the engine is busy, an iteration lasts from the previous update to its own, which includes all work between two
iterations and that of the policies. The first iteration after an idle time counts from its own start. The tokens are
those the iteration prefilled, decoded and attended to (all tokens its requests have in the cache after it), and the
pairs of a prefilled token and one up to it, as a replay counts them.

The file has one line per iteration after a line that describes the engine. It ends at `MOST` iterations; an existing
file is never overwritten: a number is added to the name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from presage.errors import ConfigurationError
from presage.serving_hooks.status import StepTimesStatus
from presage.serving_hooks.vllm.iteration_times import IterationTimer

logger = logging.getLogger(__name__)

FORMAT: Final = "presage_step_times"
VERSION: Final = 1

MOST: Final = 100_000
"""Iterations in a file, about 10 MB."""

_FLUSH_EVERY: Final = 64


class StepTimesFile:
    """A file of step times.

    Args:
        path: a number is added to the name if the file exists.
        engine: description of the engine, plain values.

    Raises:
        ConfigurationError: the file cannot be created.
    """

    def __init__(self, path: Path, engine: Mapping[str, Any], most: int = MOST) -> None:
        self.path, self._file = _begin(path)
        self.written = 0
        self._most = most
        self._timer = IterationTimer[tuple[int, int, int, int]]()
        self._busy_since: float | None = None
        self._file.write(json.dumps({FORMAT: VERSION, **engine}) + "\n")
        self._file.flush()

    def scheduled(self, output: object, tokens: tuple[int, int, int, int], began_at: float) -> None:
        """An iteration is scheduled, with its tokens prefilled, decoded and attended to, and its pairs."""
        self._timer.scheduled(output, tokens, began_at if self._busy_since is None else self._busy_since)

    def updated(self, output: object, now: float, busy: bool) -> None:
        """The output of an iteration came at `now`; `busy` means that requests are left. Iterations come in order."""
        timed = self._timer.updated(output, now)
        if timed is not None:
            self._write(*timed)
        self._busy_since = now if busy else None
        if not busy and not self._file.closed:
            self._file.flush()

    def status(self) -> StepTimesStatus:
        """The file, and the iterations written to it."""
        return StepTimesStatus(file=str(self.path), iterations=self.written)

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._file.close()

    def _write(self, tokens: tuple[int, int, int, int], seconds: float) -> None:
        prefilled, decoded, context, pairs = tokens
        if self._file.closed or not prefilled + decoded:
            return
        step: dict[str, float] = {
            "prefill_tokens": prefilled,
            "decode_tokens": decoded,
            "context_tokens": context,
            "pairs": pairs,
        }
        step |= {"seconds": seconds}
        self._file.write(json.dumps(step) + "\n")
        self.written += 1
        if self.written == self._most:
            self._file.close()
            logger.info("%s holds %d iterations; no more are written", self.path, self.written)
        elif self.written % _FLUSH_EVERY == 0:
            self._file.flush()


def _begin(path: Path) -> tuple[Path, IO[str]]:
    setting = f"additional_config: presage.step_times_file is {str(path)!r}"
    for number in range(1000):
        free = path if not number else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return free, free.open("x", encoding="utf-8")
        except FileExistsError:
            continue
        except OSError as error:
            reason = error.strerror or error
            raise ConfigurationError(f"{setting}: {reason}; give a file in an existing, writable folder") from None
    raise ConfigurationError(f"{setting}, and a thousand files with this name exist: give another name, or move them")
