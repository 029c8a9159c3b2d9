"""The code of a registered version: MLflow copies this file into it and runs it when the version is loaded.

It relies on Presage being installed where it runs and adds nothing to it but the shape of a table, which goes by the
kind of the predictor (`presage.registry.forms`). The version holds this text and a data-only artefact, no pickle, so it
loads with `MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false`.

Old versions keep the copy they were registered with; what it calls (`load_predictor`, `forecast_workflows` in the
oldest, `answer_table`) must therefore keep its meaning.
"""

from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext


class PresageModel(PythonModel):
    """A predictor behind MLflow's pyfunc interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the predictor from the artefact inside this version."""
        from presage.registry.table import load_predictor

        self._folder = context.artifacts["artefact"]
        self._predictor = load_predictor(self._folder)

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """A table of answers: one row a workflow from the steps so far, or one row a prompt from prompts."""
        from presage.registry.forms import answer_table

        return answer_table(self._folder, self._predictor, model_input)


set_model(PresageModel())
