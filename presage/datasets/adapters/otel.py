"""OpenTelemetry's GenAI conventions: the names in use, the older spellings, and those of OpenLLMetry beside them.

The conventions are in development and rename attributes; a trace that was recorded last year must still read. Log
records, where some instrumentations put prompts, are not read: texts come from attributes and events of spans.
"""

from __future__ import annotations

from typing import Final

from presage.datasets.adapters.conventions import Convention
from presage.datasets.adapters.spans import Role

OTEL: Final = Convention(
    kind={
        "gen_ai.operation.name": {
            "chat": Role.LLM,
            "text_completion": Role.LLM,
            "generate_content": Role.LLM,
            "execute_tool": Role.TOOL,
            "invoke_agent": Role.AGENT,
            "invoke_workflow": Role.WORKFLOW,
        },
        # OpenLLMetry: before it knew operation names, and for its own decorators.
        "traceloop.span.kind": {
            "tool": Role.TOOL,
            "agent": Role.AGENT,
            "task": Role.CHAIN,
            "workflow": Role.WORKFLOW,
        },
        "llm.request.type": {"chat": Role.LLM, "completion": Role.LLM},
    },
    names={
        "agent": ("gen_ai.agent.name",),
        "agent_id": ("gen_ai.agent.id",),
        "tool": ("gen_ai.tool.name",),
        "entity": ("traceloop.entity.name",),
        "session": ("gen_ai.conversation.id", "traceloop.association.properties.session_id"),
        "workflow": ("gen_ai.workflow.name", "traceloop.workflow.name"),
        "graph_path": (
            "traceloop.association.properties.langgraph_checkpoint_ns",
            "traceloop.association.properties.langgraph_node",
        ),
        "model": ("gen_ai.request.model", "gen_ai.response.model"),
        "provider": ("gen_ai.provider.name", "gen_ai.system"),
        "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
        "cached_input_tokens": (
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.usage.cache_read_input_tokens",
        ),
        "finish_reason": (
            "gen_ai.response.finish_reasons",
            "gen_ai.response.finish_reason",
            "gen_ai.response.stop_reason",
            "llm.response.finish_reason",
            "llm.response.stop_reason",
        ),
    },
    messages={
        "system": ("gen_ai.system_instructions",),
        "input": ("gen_ai.input.messages", "gen_ai.prompt.", "gen_ai.prompt", "gen_ai.tool.call.arguments"),
        "output": ("gen_ai.output.messages", "gen_ai.completion.", "gen_ai.completion", "gen_ai.tool.call.result"),
    },
)

MESSAGE_EVENTS: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
    "gen_ai.choice": "output",
}
"""Older span events that are one message each, and its role; "output" is what the model answered."""
