"""Trace formats, one module each: what a source calls its fields stays in its module.

A reader takes a path and gives `Source` chunks: rows that conform to the schema, with their origin. Whole workflows are
checked later and across all sources (`presage.datasets.read`, which keeps all in memory, and `presage.datasets.ingest`,
which does not). A new format is one module, one line in `READERS` and, where a file name tells it, one in `SUFFIXES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from presage.datasets.adapters.jsonl import read_jsonl
from presage.datasets.adapters.parquet import read_parquet
from presage.datasets.adapters.source import Reader, Source

__all__ = ["READERS", "SUFFIXES", "Reader", "Source", "detect"]

READERS: Final[Mapping[str, Reader]] = {"jsonl": read_jsonl, "parquet": read_parquet}
SUFFIXES: Final[Mapping[str, str]] = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}


def detect(path: Path) -> str | None:
    """The format a file's name tells; None if it tells none."""
    return next((name for suffix, name in SUFFIXES.items() if path.name.endswith(suffix)), None)
