"""One group of an ingestion's sources, as a process here or a worker elsewhere reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from presage.datasets.read import open_source
from presage.datasets.spill import Run, Spilled, spill


class PathsToSpill(msgspec.Struct):
    """A group of paths to read, and how; says everything, so that another process can do it."""

    numbers: list[int]
    paths: list[str]
    size: int
    source_format: str
    skip_bad: bool
    folder: str
    prefix: str

    def spill(self, progress: Callable[[int], None] = lambda _: None) -> tuple[list[Spilled], list[Run]]:
        """Read the group into runs; as `presage.datasets.spill.spill`."""
        opened = [open_source(path, source_format=self.source_format, skip_bad=self.skip_bad) for path in self.paths]
        sources = zip(self.numbers, self.paths, opened, strict=True)
        return spill(((n, path, begin()) for n, path, begin in sources), Path(self.folder), self.prefix, progress)
