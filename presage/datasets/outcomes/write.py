"""Outcomes to a file: one JSON object a row that has a label, as `read_outcomes` reads them."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np

from presage.datasets.outcomes.schema import Outcomes
from presage.errors import OutputError


def write_outcomes(outcomes: Outcomes, path: Path) -> int:
    """Writes a `.jsonl` file, whole or not at all, in the place of one that is there; returns the number of rows.

    Raises:
        OutputError: it cannot be written.
    """
    rows = np.argwhere(~np.isnan(outcomes.correct)).tolist()
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("x", encoding="utf-8") as file:
            for prompt, model in rows:
                file.write(json.dumps(_row(outcomes, prompt, model), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return len(rows)


def _row(outcomes: Outcomes, prompt: int, model: int) -> dict[str, object]:
    correct, tokens, cost = (
        float(of[prompt, model]) for of in (outcomes.correct, outcomes.output_tokens, outcomes.cost)
    )
    row: dict[str, object] = {"prompt": outcomes.prompts[prompt], "model": outcomes.models[model], "correct": correct}
    if outcomes.task[prompt] is not None:
        row["task"] = outcomes.task[prompt]
    if not np.isnan(tokens):
        row["output_tokens"] = int(tokens)
    if not np.isnan(cost):
        row["cost"] = cost
    return row
