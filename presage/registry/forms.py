"""What goes into and comes out of a registered version when MLflow serves it, by kind of predictor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd  # type: ignore[import-untyped]

from presage.predictors.artefact import read_artefact
from presage.registry import prompts, table

if TYPE_CHECKING:
    from mlflow.models import ModelSignature


@dataclass(frozen=True)
class Form:
    """A table in, a table out.

    Attributes:
        example: rows as MLflow can write them beside a version.
        signature: of the version.
        answer: what a predictor says of a table.
    """

    example: Callable[[pd.DataFrame | Sequence[Mapping[str, Any]]], pd.DataFrame]
    signature: Callable[[], "ModelSignature"]
    answer: Callable[[Any, pd.DataFrame], pd.DataFrame]


_STEPS: Final = Form(table.example_table, table.signature, table.forecast_workflows)
_PROMPTS: Final = Form(prompts.example_prompts, prompts.signature, prompts.route_prompts)


def form_of(kind: str) -> Form:
    """Steps of workflows for whatever forecasts them, prompts for a router."""
    return _PROMPTS if kind == "router" else _STEPS


def answer_table(folder: str | Path, predictor: Any, rows: pd.DataFrame) -> pd.DataFrame:
    """What the predictor loaded from an artefact folder says of a table of its kind."""
    return form_of(read_artefact(Path(folder)).kind).answer(predictor, rows)
