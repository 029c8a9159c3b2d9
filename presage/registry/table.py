"""Forecasts for a table of steps, as MLflow serves them.

Input: one row a step, with the columns of the trace schema; one or more workflows, rows in any order. Output: one row a
workflow, in order of first appearance; or one prediction a step, as `mlflow.models.evaluate` needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from presage.errors import TraceError
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import read_artefact

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from mlflow.models import ModelSignature

REQUIRED: Final = {"workflow_type": "string", "workflow_id": "string", "step": "long", "agent": "string"}

# Token counts are doubles: a JSON table with a missing count arrives as floating point, and MLflow does not convert
# that to an integer column.
OPTIONAL: Final = {
    "kind": "string",
    "model": "string",
    "input_tokens": "double",
    "output_tokens": "double",
    "finish_reason": "string",
    "started_at": "double",  # epoch seconds
    "ended_at": "double",
    "system_prompt": "string",
    "input_text": "string",
    "output_text": "string",
    "prefill_state": "array",
    "completion_state": "array",
}

_INTEGERS: Final = ("step", "input_tokens", "output_tokens")


class ForecastAnswer(Protocol):
    """A forecast of any kind."""

    @property
    def prediction(self) -> str | float:
        """The single most likely outcome."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The forecast as JSON values, with `source` and `evidence`."""
        ...


class Predictor(Protocol):
    """A predictor for the steps of one workflow."""

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> ForecastAnswer:
        """The forecast after the given steps of one workflow."""
        ...


def load_predictor(folder: str | Path) -> Predictor:
    """Load the predictor of an artefact folder; raises ArtefactError if it is none, or of an unknown kind."""
    kind = KINDS[read_artefact(Path(folder)).kind]
    predictor: Predictor = kind.load(Path(folder))
    return predictor


def forecast_workflows(predictor: Predictor, table: pd.DataFrame) -> pd.DataFrame:
    """Forecast every workflow in a table of steps: one row a step, the columns `REQUIRED` and any of `OPTIONAL`.

    Missing values and empty states are left out of the step. Returns one row a workflow, in order of first appearance:
    `workflow_id`, `source`, `evidence` (training steps behind the forecast), `prediction` and `forecast` (all of it,
    JSON values). Raises TraceError if a required column or value is missing.
    """
    import pandas as pd

    answers = []
    for rows in _workflows(table):
        forecast = predictor.forecast([step for _, step in rows])
        values = forecast.to_dict()
        answers.append((rows[0][1]["workflow_id"], values["source"], values["evidence"], forecast.prediction, values))
    return pd.DataFrame(answers, columns=["workflow_id", "source", "evidence", "prediction", "forecast"])


def predict_steps(predictor: Predictor, table: pd.DataFrame) -> pd.Series:
    """The prediction after each step of a table as in `forecast_workflows`, one a row, in the order of the table.

    None for tool calls before the first LLM step.
    """
    import pandas as pd

    predictions: dict[int, str | float | None] = {}
    for rows in _workflows(table):
        steps = [step for _, step in rows]
        asked = False
        for count, (row, step) in enumerate(rows, start=1):
            asked |= step.get("kind", "llm") == "llm"
            predictions[row] = predictor.forecast(steps[:count]).prediction if asked else None
    return pd.Series([predictions[row] for row in range(len(table))], index=table.index, name="prediction")


def _workflows(table: pd.DataFrame) -> list[list[tuple[int, dict[str, Any]]]]:
    """The steps of each workflow, in order, each with its row."""
    if missing := [column for column in REQUIRED if column not in table.columns]:
        raise TraceError(f"found columns {', '.join(map(str, table.columns))}; wanted {', '.join(missing)} as well.")
    columns = [column for column in (*REQUIRED, *OPTIONAL) if column in table.columns]
    workflows: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for row, values in enumerate(zip(*(table[column] for column in columns), strict=True)):
        step = {column: _value(column, value) for column, value in zip(columns, values, strict=True)}
        step = {column: value for column, value in step.items() if value is not None}
        if absent := [column for column in REQUIRED if column not in step]:
            raise TraceError(f"row {row}: found no value for {', '.join(absent)}; wanted one.")
        workflows.setdefault((step["workflow_type"], step["workflow_id"]), []).append((row, step))
    return [sorted(rows, key=lambda row_step: row_step[1]["step"]) for rows in workflows.values()]


def example_table(example: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """An input example that MLflow can write: the columns of the signature, states as plain lists.

    Raises TraceError for no rows, or if a required column is missing.
    """
    import pandas as pd

    table = example if isinstance(example, pd.DataFrame) else pd.DataFrame([dict(step) for step in example])
    if missing := [column for column in REQUIRED if column not in table.columns]:
        raise TraceError(f"the input example lacks {', '.join(missing)}; wanted at least one step with them.")
    table = table[[column for column in (*REQUIRED, *OPTIONAL) if column in table.columns]].copy()
    for column in table.columns:
        if OPTIONAL.get(column) == "array":
            table[column] = pd.Series(
                [[] if _is_missing(state) else np.asarray(state, float).tolist() for state in table[column]],
                index=table.index,
                dtype=object,
            )
        elif OPTIONAL.get(column) == "double":
            table[column] = table[column].astype(float)
        elif column == "step":
            table[column] = table[column].astype("int64")
        else:
            table[column] = table[column].astype(object).where(table[column].notna(), None)
    # MLflow cannot check the type of an empty column against the signature.
    return table.drop(columns=[name for name in table.columns if all(map(_is_missing, table[name]))])


def signature(prediction: str) -> ModelSignature:
    """The MLflow signature of versions that forecast workflows; `prediction` is MLflow's type of that column."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, Array, ColSpec, DataType, Schema, TensorSpec

    def column(name: str, kind: str, required: bool) -> ColSpec:
        return ColSpec(Array(DataType.double) if kind == "array" else kind, name, required=required)

    inputs: list[ColSpec | TensorSpec] = [column(name, kind, True) for name, kind in REQUIRED.items()]
    inputs += [column(name, kind, False) for name, kind in OPTIONAL.items()]
    answers: list[ColSpec | TensorSpec] = [
        ColSpec("string", "workflow_id"),
        ColSpec("string", "source"),
        ColSpec("long", "evidence"),
        ColSpec(prediction, "prediction"),
        ColSpec(AnyType(), "forecast"),  # type: ignore[no-untyped-call]  # untyped in MLflow
    ]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(answers))


def _value(column: str, value: Any) -> Any:
    """A cell in the type of the trace schema; None if missing."""
    if _is_missing(value):
        return None
    if column in _INTEGERS:
        return int(value)
    if OPTIONAL.get(column) == "array":
        return np.asarray(value, dtype=np.float32)
    return value


def _is_missing(value: Any) -> bool:
    import pandas as pd

    if isinstance(value, list | np.ndarray):
        return len(value) == 0  # MLflow's server accepts no null in a column of arrays: an empty array means missing
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
