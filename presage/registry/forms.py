"""The tables that MLflow serves, by kind: steps of workflows (`table.py`), or one prompt a row (router)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd  # type: ignore[import-untyped]

from presage.errors import InputError
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import read_artefact
from presage.registry.table import example_table, forecast_workflows, predict_steps, signature

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

    from presage.predictors.router.predictor import RouterPredictor

PROMPT: Final = "prompt"


def route_prompts(router: "RouterPredictor", table: pd.DataFrame) -> pd.DataFrame:
    """Probabilities for every prompt of a table with the column `prompt`; raises InputError if it or a value is
    missing.

    Returns one row a prompt, in the same order: `source`, `prediction` (the pick) and `forecast` (all of the answer,
    JSON values).
    """
    answers = [router.forecast(prompt) for prompt in _prompts(table)]
    rows = [(answer.source, answer.prediction, answer.to_dict()) for answer in answers]
    return pd.DataFrame(rows, columns=["source", "prediction", "forecast"])


def predict_prompts(router: "RouterPredictor", table: pd.DataFrame) -> pd.Series:
    """The pick for every prompt of a table as in `route_prompts`."""
    picks = [router.forecast(prompt).prediction for prompt in _prompts(table)]
    return pd.Series(picks, index=table.index, name="prediction")


def example_prompts(example: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """An input example that MLflow can write; raises InputError for no row, or a missing prompt."""
    prompts = _prompts(example if isinstance(example, pd.DataFrame) else pd.DataFrame([dict(row) for row in example]))
    if not prompts:
        raise InputError("the input example has no row; wanted at least one prompt")
    return pd.DataFrame({PROMPT: prompts})


def prompt_signature(prediction: str) -> "ModelSignature":
    """The MLflow signature of routers; `prediction` is MLflow's type of that column."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, Schema

    answer = ColSpec(AnyType(), "forecast")  # type: ignore[no-untyped-call]  # untyped in MLflow
    outputs = Schema([ColSpec("string", "source"), ColSpec(prediction, "prediction"), answer])
    return ModelSignature(inputs=Schema([ColSpec("string", PROMPT)]), outputs=outputs)


def _prompts(table: pd.DataFrame) -> list[str]:
    if PROMPT not in table.columns:
        raise InputError(f"found columns {', '.join(map(str, table.columns)) or 'none'}; wanted the column {PROMPT}")
    prompts: list[Any] = table[PROMPT].tolist()
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise InputError(f"row {row}: the prompt is a {type(prompt).__name__}; wanted text")
    return prompts


@dataclass(frozen=True)
class Form:
    """Functions that make the input example, the MLflow signature from the type of a prediction, and from predictor and
    input the output table, or one prediction a row.
    """

    example: Callable[[pd.DataFrame | Sequence[Mapping[str, Any]]], pd.DataFrame]
    signature: Callable[[str], "ModelSignature"]
    answer: Callable[[Any, pd.DataFrame], pd.DataFrame]
    predict: Callable[[Any, pd.DataFrame], pd.Series]


_STEPS: Final = Form(example_table, signature, forecast_workflows, predict_steps)
_PROMPTS: Final = Form(example_prompts, prompt_signature, route_prompts, predict_prompts)


def form_of(kind: str) -> Form:
    """The tables of a kind."""
    return _PROMPTS if KINDS[kind].reads_prompts else _STEPS


def answer_table(folder: str | Path, predictor: Any, rows: pd.DataFrame) -> pd.DataFrame:
    """The answers of a predictor, loaded from this artefact folder, to an input table."""
    return form_of(read_artefact(Path(folder)).kind).answer(predictor, rows)


def predictions(folder: str | Path, predictor: Any, rows: pd.DataFrame) -> pd.Series:
    """The prediction of a predictor, loaded from this artefact folder, for each row of an input table."""
    return form_of(read_artefact(Path(folder)).kind).predict(predictor, rows)
