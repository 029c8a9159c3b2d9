"""The forecasts of a recording, as its engines made them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from presage.datasets.recording import FORECASTS


def read_forecasts(recording: Path) -> pa.Table:
    """All of them, as a table of FORECASTS, engine by engine."""
    files = sorted(recording.glob("engine-*/forecasts-*.arrows"))
    return pa.concat_tables([FORECASTS.empty_table(), *(pa.ipc.open_stream(file).read_all() for file in files)])
