"""Rows that wait on disk, partitioned by a key.

Spans, and steps that wait for other traces, are more than memory holds. Each `Partitions.add` becomes one Arrow file
with a record batch for every partition, so nothing but the batch in hand is in memory and no file stays open. Files are
mapped, not read: a column nobody asks for costs nothing. They may hold private text, so they live in a folder only
their owner may enter, and are gone when the context ends.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema.columns import dictionary_encoded
from presage.errors import OutputError


class Partitions:
    """A temporary folder of partitioned rows; use it as a context.

    Args:
        count: how many partitions.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._folder = Path(tempfile.mkdtemp(prefix="presage-"))
        self._runs: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, rows: pa.Table, key: str) -> None:
        """Write rows; those with the same string in column `key` land in the same partition, in the order given.

        Raises:
            OutputError: the disk of the temporary folder is full.
        """
        if not rows.num_rows:
            return
        homes = _homes(rows.column(key), self.count)
        order = np.argsort(homes, kind="stable")
        ends = np.searchsorted(homes[order], np.arange(self.count), side="right").tolist()
        rows = rows.take(pa.array(order)).combine_chunks()
        path = self._folder / f"{len(self._runs)}.arrow"
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
                start = 0
                for end in ends:
                    part = rows.slice(start, end - start)
                    writer.write_batch(
                        part.to_batches()[0] if part.num_rows else pa.RecordBatch.from_pylist([], schema=rows.schema)
                    )
                    start = end
        except OSError as error:
            raise OutputError(
                f"temporary files in {self._folder.parent}: {error.strerror or error}; free space there, or set TMPDIR "
                "to a larger disk"
            ) from error
        self._runs.append(path)

    def rows(self, number: int) -> pa.Table | None:
        """The rows of one partition, in the order they were written; None if there are none."""
        batches = []
        for path in self._runs:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(number)
            if batch.num_rows:
                batches.append(batch)
        return pa.Table.from_batches(batches) if batches else None


def _homes(column: pa.ChunkedArray, partitions: int) -> NDArray[np.int64]:
    """The partition of each row, the same in every process; int64 [rows]."""
    encoded = dictionary_encoded(column)
    home = np.array([zlib.crc32(key.encode()) % partitions for key in encoded.dictionary.to_pylist()], np.int64)
    homes: NDArray[np.int64] = home[encoded.indices.to_numpy(zero_copy_only=False)]
    return homes
