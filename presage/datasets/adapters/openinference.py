"""OpenInference's attribute names (Phoenix and Arize instrumentors)."""

from __future__ import annotations

from typing import Final

from presage.datasets.adapters.conventions import Convention
from presage.datasets.adapters.spans import Role

OPENINFERENCE: Final = Convention(
    kind={
        "openinference.span.kind": {
            "llm": Role.LLM,
            "tool": Role.TOOL,
            "agent": Role.AGENT,
            "chain": Role.CHAIN,
        }
    },
    names={
        "agent": ("agent.name", "graph.node.name"),
        "node": ("graph.node.id",),
        "node_parent": ("graph.node.parent_id",),
        "tool": ("tool.name",),
        "session": ("session.id",),
        "model": ("llm.model_name", "llm.request.model_name", "llm.response.model_name"),
        "input_tokens": ("llm.token_count.prompt",),
        "output_tokens": ("llm.token_count.completion",),
        "cached_input_tokens": (
            "llm.token_count.prompt_details.cache_read",
            "llm.token_count.prompt_details.cache_input",
        ),
        "finish_reason": ("llm.finish_reason",),
        "metadata": ("metadata",),
    },
    messages={"input": ("llm.input_messages.", "input.value"), "output": ("llm.output_messages.", "output.value")},
)
