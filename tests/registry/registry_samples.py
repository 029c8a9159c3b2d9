"""Steps, figures and a stand-in predictor that the registry tests share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from presage.predictors.common.artefact import read_artefact

STEPS = [
    {"workflow_type": "w", "workflow_id": "w-1", "step": 0, "agent": "planner", "input_tokens": 7},
    {"workflow_type": "w", "workflow_id": "w-1", "step": 1, "agent": "coder"},
    {"workflow_type": "w", "workflow_id": "w-2", "step": 0, "agent": "planner", "input_text": "fix it"},
]
METRICS = {
    "kind": "next-agent",
    "model": "folder",
    "version": None,
    "workflows": 12,
    "moments": {"prefill": {"accuracy": [0.9, 0.8], "ci95": [[0.8, 1.0], [0.7, 0.9]], "states": False}},
    "baselines": {"markov-3": {"accuracy": [0.7, 0.6]}},
}


class EchoForecast:
    def __init__(self, steps: Sequence[Mapping[str, Any]], bias: float) -> None:
        self.steps, self.bias = steps, bias

    @property
    def prediction(self) -> str:
        return str(self.steps[-1]["agent"])

    def to_dict(self) -> dict[str, Any]:
        agents = {str(step["agent"]): self.bias for step in self.steps}
        return {"source": "champion", "evidence": len(self.steps), "horizons": [{"agents": agents, "end": 0.25}]}


class EchoPredictor:
    """Stands in for `NextAgentPredictor`: forecasts the agents it was shown, and remembers the steps."""

    def __init__(self, bias: float) -> None:
        self.bias = bias
        self.seen: list[list[Mapping[str, Any]]] = []

    @classmethod
    def load(cls, folder: Path) -> "EchoPredictor":
        return cls(float(read_artefact(folder, kind="next-agent").tensors["bias"]))

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> EchoForecast:
        self.seen.append(list(steps))
        return EchoForecast(steps, self.bias)
