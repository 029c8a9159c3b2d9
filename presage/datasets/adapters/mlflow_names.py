"""MLflow's attribute names; its values are JSON, also where MLflow exports them as OTLP."""

from __future__ import annotations

from typing import Final

from presage.datasets.adapters.conventions import Convention
from presage.datasets.adapters.spans import Role

MLFLOW: Final = Convention(
    kind={
        "mlflow.spanType": {
            "chat_model": Role.LLM,
            "llm": Role.LLM,
            "tool": Role.TOOL,
            "agent": Role.AGENT,
            "chain": Role.CHAIN,
            "task": Role.CHAIN,
            "workflow": Role.WORKFLOW,
        }
    },
    names={
        "session": ("mlflow.trace.session",),
        "model": ("mlflow.llm.model",),
        "usage": ("mlflow.chat.tokenUsage",),
    },
    messages={"input": ("mlflow.spanInputs",), "output": ("mlflow.spanOutputs",)},
)
JSON_PREFIX: Final = "mlflow."
USAGE: Final = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "cached_input_tokens": "cache_read_input_tokens",
}
"""Columns, and the keys of the usage object that hold them."""
