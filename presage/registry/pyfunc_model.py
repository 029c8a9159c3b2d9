"""The code of a registered version: MLflow copies this file into the version and runs it on loading.

The version holds this file, the code of Presage that forecasts (`package.zip`) and a data-only artefact, no pickle, so
it loads with `MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false`. An installed Presage is used before `package.zip`: a version
must not replace, for the rest of a process, the Presage that its user installed. So old versions run on newer code, and
what this file calls (`load_predictor`, `answer_table`, `predictions`; the oldest: `forecast_workflows`) must keep names
and meaning.
"""

import sys
from importlib.util import find_spec
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext


class PresageModel(PythonModel):
    """A predictor behind MLflow's pyfunc interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the predictor from the artefact inside this version."""
        if find_spec("presage") is None:
            sys.path.append(context.artifacts["package"])
        from presage.registry.table import load_predictor

        self._folder = context.artifacts["artefact"]
        self._predictor = load_predictor(self._folder)

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame | pd.Series:
        """A table of answers: one row a workflow from the steps so far, or one row a prompt from prompts.

        Loaded with `model_config={"predictions_only": True}`: one prediction a row, for `mlflow.models.evaluate`.
        """
        from presage.registry.forms import answer_table, predictions

        answer = predictions if (context.model_config or {}).get("predictions_only") else answer_table
        return answer(self._folder, self._predictor, model_input)


set_model(PresageModel())
