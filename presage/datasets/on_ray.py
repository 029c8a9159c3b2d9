"""The first pass of an ingestion on Ray Data: the very function that reads a group of paths here, on many workers.

Ray is imported here and nowhere else. Without a cluster named by `RAY_ADDRESS` it starts one of its own on
this machine. The workers write their runs where the store is, so they must see the same file system.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from presage.datasets.paths_to_spill import PathsToSpill
from presage.datasets.spill import Run, Spilled
from presage.errors import ConfigurationError, OutputError, PresageError, TraceError


class _Answer(msgspec.Struct):
    """What a worker gives back; an error travels as its words, since an exception may not survive the journey."""

    sources: list[Spilled] = []
    runs: list[Run] = []
    read_bytes: int = 0
    bad_input: str | None = None
    not_written: str | None = None


def spill_on_ray(
    tasks: Sequence[PathsToSpill], progress: Callable[[int], None]
) -> Iterator[tuple[list[Spilled], list[Run]]]:
    """Read groups of paths, in whatever order they end.

    Args:
        tasks: the groups.
        progress: called with the bytes on disk of each group that was read.

    Raises:
        TraceError: as the readers.
        OutputError: a worker could not write its runs.
        ConfigurationError: Ray is not installed.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed, which is wanted to read traces on a cluster: pip install 'presage[distributed]', or "
            "leave --ray out"
        ) from error
    if not tasks:
        return

    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        items = [{"task": msgspec.json.encode(task).decode()} for task in tasks]
        answers = ray.data.from_items(items, override_num_blocks=len(items)).map(_answer)
        for row in answers.iter_rows():
            answer = msgspec.json.decode(row["answer"], type=_Answer)
            if answer.bad_input is not None:
                raise TraceError(answer.bad_input)
            if answer.not_written is not None:
                raise OutputError(answer.not_written)
            progress(answer.read_bytes)
            yield answer.sources, answer.runs
    finally:
        if ours:
            ray.shutdown()


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """On a worker."""
    task = msgspec.json.decode(row["task"], type=PathsToSpill)
    try:
        sources, runs = task.spill()
        answer = _Answer(sources, runs, task.size)
    except OSError as error:
        answer = _Answer(not_written=f"{task.folder}: cannot be written by a Ray worker ({error.strerror or error})")
    except PresageError as error:
        answer = _Answer(bad_input=str(error))
    return {"answer": msgspec.json.encode(answer).decode()}
