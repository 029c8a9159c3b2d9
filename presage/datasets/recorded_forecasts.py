"""The forecasts of a recording with their outcomes, from steps and ends recorded later."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from presage.datasets.adapters.recording import END_NUMBERS, batches, ended_runs, engines
from presage.datasets.recording import FORECASTS

END: Final = "END"
_STEP_COLUMNS: Final = ("run", "step", "agent", "output_tokens")

SCHEMA: Final = pa.schema(
    [
        pa.field("instance", pa.string(), False),
        *FORECASTS,
        pa.field("came", pa.list_(pa.string()), False),
        ("came_tokens", pa.int64()),
    ]
)
"""FORECASTS, the engine, and the outcomes. `came`: the agents 1, 2, … K steps later, END last where the run ended
before, shorter where later steps are unknown. `came_tokens`: output tokens of this and all later steps of the run (at
completion of the later ones alone), null where one is unknown."""


@dataclass
class _Run:
    """Agents and output tokens by step, and the number of steps after which the run ended."""

    agents: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, int | None] = field(default_factory=dict)
    steps: int | None = None

    def came(self, step: int, horizon: int) -> list[str]:
        """The outcomes after a step, up to the first unknown one."""
        found: list[str] = []
        for later in range(step + 1, step + 1 + horizon):
            if later == self.steps:
                return [*found, END]
            if later not in self.agents:
                return found
            found.append(self.agents[later])
        return found

    def came_tokens(self, first: int) -> int | None:
        """Output tokens from a step to the end of the run."""
        if self.steps is None:
            return None
        tokens = [self.tokens.get(step) for step in range(first, self.steps)]
        return None if None in tokens else sum(filter(None, tokens))


def read_forecasts(path: str | Path) -> tuple[pa.Table, Mapping[str, int]]:
    """All forecasts of a recording with their outcomes, as a table of SCHEMA, and counts of unreadable items by reason.

    Keeps all forecasts, and the agents and tokens of all recorded steps of one engine, in memory. `path` is the folder
    of a recording, or of one engine in it; raises TraceError for another, or another version.
    """
    lost = Counter[str]()
    tables = [SCHEMA.empty_table()]
    for engine in engines(Path(path)):
        # In this order, an outcome is on disk before it is looked up.
        made = [batch for batch, _ in batches(engine, "forecasts", None, lost)]
        runs: dict[int, _Run] = defaultdict(_Run)
        for number, steps in ended_runs(batch for batch, _ in batches(engine, "ends", END_NUMBERS, lost)).items():
            runs[number].steps = steps
        for batch, _ in batches(engine, "steps", _STEP_COLUMNS, lost):
            for row in batch.to_pylist():
                run = runs[row["run"]]
                run.agents[row["step"]], run.tokens[row["step"]] = row["agent"], row["output_tokens"]
        tables += [_with_outcomes(pa.Table.from_batches([batch]), engine.name, runs) for batch in made]
    return pa.concat_tables(tables), lost


def _with_outcomes(made: pa.Table, instance: str, runs: Mapping[int, _Run]) -> pa.Table:
    came, tokens = [], []
    rows = zip(*(made[name].to_pylist() for name in ("run", "step", "moment")), strict=True)
    widths = [
        np.array(made[name].combine_chunks().value_lengths().fill_null(0)) for name in ("agents", "probabilities")
    ]
    horizons = widths[1] // (widths[0] + 1)
    for (number, step, moment), horizon in zip(rows, horizons.tolist(), strict=True):
        run = runs.get(number, _Run())
        came.append(run.came(step, horizon))
        tokens.append(run.came_tokens(step + (moment == "completion")))
    columns = [pa.array([instance] * made.num_rows, pa.string()), *made.columns]
    return pa.table([*columns, pa.array(came, SCHEMA.field("came").type), pa.array(tokens, pa.int64())], schema=SCHEMA)
