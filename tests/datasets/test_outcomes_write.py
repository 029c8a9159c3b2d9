"""Outcomes that are written are the outcomes that are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from presage.datasets.outcomes.files import read_outcomes, write_outcomes
from presage.datasets.outcomes.law import generate_outcomes
from presage.datasets.outcomes.schema import outcomes_digest
from presage.errors import OutputError


def test_written_and_read_are_the_same(tmp_path: Path) -> None:
    drawn = generate_outcomes(80, 3).outcomes
    rows = write_outcomes(drawn, tmp_path / "new" / "outcomes.jsonl")
    found = read_outcomes([tmp_path / "new"])
    assert rows == found.rows == int((~np.isnan(drawn.correct)).sum())
    assert outcomes_digest(found.outcomes) == outcomes_digest(drawn)
    assert found.outcomes.task == drawn.task


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        write_outcomes(generate_outcomes(3, 0).outcomes, tmp_path / "file" / "outcomes.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
