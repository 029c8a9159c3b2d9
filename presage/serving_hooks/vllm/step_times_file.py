"""Writes the tokens and the duration of each iteration to a file, to which `presage calibrate-cost` fits a cost model.

While the engine is busy, an iteration lasts from the previous update to its own, which includes all work between two
iterations. The first iteration after an idle time counts from its own start. The tokens are those the iteration
prefilled, decoded and attended to (all tokens its requests have in the cache after it), as a replay counts them.

The file has one line per iteration after a line that describes the engine. It ends at `MOST` iterations; an existing
file is never overwritten: a number is added to the name.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from presage.errors import ConfigurationError
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.vllm.config import read_config
from presage.serving_hooks.vllm.engine import EnginePort, Iteration
from presage.serving_hooks.vllm.modes import Switch

logger = logging.getLogger(__name__)

FORMAT: Final = "presage_step_times"
VERSION: Final = 1

MOST: Final = 100_000
"""Iterations in a file, about 10 MB."""

_FLUSH_EVERY: Final = 64
_UNDER_WAY: Final = 64
"""Iterations in flight, more than any pipeline has; those without an update are dropped."""


class StepTimesFile:
    """A file of step times.

    Args:
        path: a number is added to the name if the file exists.
        engine: description of the engine, plain values.
        most: limit of iterations.

    Raises:
        ConfigurationError: the file cannot be created.
    """

    def __init__(self, path: Path, engine: Mapping[str, Any], most: int = MOST) -> None:
        self.path, self._file = _begin(path)
        self.written = 0
        self._most = most
        self._under_way: deque[tuple[object, tuple[int, int, int], float]] = deque(maxlen=_UNDER_WAY)
        self._busy_since: float | None = None
        self._file.write(json.dumps({FORMAT: VERSION, **engine}) + "\n")
        self._file.flush()

    def scheduled(self, output: object, tokens: tuple[int, int, int], began_at: float) -> None:
        """An iteration is scheduled, with its tokens prefilled, decoded and attended to."""
        if not self._file.closed:
            self._under_way.append((output, tokens, began_at))

    def updated(self, output: object, now: float, busy: bool) -> None:
        """The output of an iteration came at `now`; `busy` means that requests are left. Iterations come in order."""
        while self._under_way:
            known, tokens, began_at = self._under_way.popleft()
            if known is output:
                self._write(tokens, now - (began_at if self._busy_since is None else self._busy_since))
                break
        self._busy_since = now if busy else None
        if not busy and not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._file.close()

    def _write(self, tokens: tuple[int, int, int], seconds: float) -> None:
        prefilled, decoded, context = tokens
        if self._file.closed or not prefilled + decoded:
            return
        step = {"prefill_tokens": prefilled, "decode_tokens": decoded, "context_tokens": context, "seconds": seconds}
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


class TimedSteps:
    """A mixin before the policies, so that the times include them."""

    clock: ClassVar[Callable[[], float]]  # `Policies` sets this and the port
    engine_port: EnginePort
    _counts: EventCounts  # also set by `Policies`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        port = self.engine_port
        path = read_config(port.config.additional).step_times_file
        self._timing = Switch("step times", self._counts)
        self._step_times = None if path is None else StepTimesFile(Path(path), port.described())

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedules one iteration."""
        if self._step_times is None:
            return super().schedule(throttle_prefills)  # type: ignore[misc]
        began_at = type(self).clock()
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        self._timing.attempt(self._scheduled, self._step_times, output, began_at)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Processes the output of an iteration."""
        if self._step_times is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        now = type(self).clock()
        answers = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._timing.attempt(self._step_times.updated, scheduler_output, now, self.engine_port.busy)
        return answers

    def shutdown(self) -> None:
        """Closes the file, then shuts vLLM's scheduler down."""
        if self._step_times is not None:
            self._timing.attempt(self._step_times.close)
        super().shutdown()  # type: ignore[misc]

    def presage_status(self) -> dict[str, Any]:
        """The status of the policies, and of the file."""
        status: dict[str, Any] = super().presage_status()  # type: ignore[misc]
        if self._step_times is not None:
            file = self._step_times
            status["step_times"] = {"on": self._timing.on, "file": str(file.path), "iterations": file.written}
        return status

    def _scheduled(self, file: StepTimesFile, output: Iteration, began_at: float) -> None:
        decoded, prefilled = self.engine_port.iteration_tokens(output)
        file.scheduled(output, (prefilled, decoded, self.engine_port.context_tokens(output)), began_at)
