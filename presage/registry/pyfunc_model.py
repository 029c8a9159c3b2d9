"""The code of a registered version: MLflow copies this file into the version and runs it on loading.

It needs Presage installed. The version holds this file and a data-only artefact, no pickle, so it loads with
`MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false`. Old versions keep their copy: the functions it calls (`load_predictor`,
`answer_table`; `forecast_workflows` in the oldest) must keep names and meaning.
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
