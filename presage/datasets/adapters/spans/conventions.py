"""The span record, and the attribute names of OpenTelemetry, OpenInference and MLflow that fill its fields.

A span may use names of several conventions (instrumentors write both during renames), and one tree may mix them, so
every span is read for all of them. OpenTelemetry's GenAI conventions are in development and rename attributes, and a
trace recorded last year must still read: older spellings and OpenLLMetry's are among the names. Log records, where some
instrumentations put prompts, are not read: texts come from attributes and events of spans. Values of `mlflow.`
attributes are JSON, also where MLflow exports them as OTLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

import pyarrow as pa


class Role(IntEnum):
    """Role of a span; `OTHER` only passes on parentage (HTTP, database, embedding, …)."""

    OTHER = 0
    LLM = 1
    TOOL = 2
    AGENT = 3
    CHAIN = 4
    WORKFLOW = 5


class Naming(IntEnum):
    """How well a span names the agent of the steps under it."""

    NOT = 0
    WEAKLY = 1  # a chain or workflow span, by its own name
    EXPLICITLY = 2  # an agent or tool span, or an attribute that names an agent


class Meaning(NamedTuple):
    """Interpreted attributes of a span.

    `label` is the name this span gives to the steps under it; `node` and `node_parent` are ids of the agent graph.
    """

    role: int = 0
    naming: int = 0
    label: str | None = None
    node: str | None = None
    node_parent: str | None = None
    workflow: str | None = None
    session: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    finish_reason: str | None = None
    system_prompt: str | None = None
    input_text: str | None = None
    output_text: str | None = None


_TYPES: Final = {
    "role": pa.int8(),
    "naming": pa.int8(),
    **dict.fromkeys(("input_tokens", "output_tokens", "cached_input_tokens"), pa.int32()),
    **dict.fromkeys(("system_prompt", "input_text", "output_text"), pa.large_string()),
}
SPAN_SCHEMA: Final = pa.schema(
    [
        ("trace", pa.string()),
        ("span", pa.string()),
        ("parent", pa.string()),
        ("remote", pa.bool_()),
        ("service", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("bad", pa.bool_()),
        ("file", pa.int32()),
        ("line", pa.int64()),
        *((name, _TYPES.get(name, pa.string())) for name in Meaning._fields),
    ]
)
"""A span on disk or, where `span` is null, the note that a span of this trace could not be read.

Times are nanoseconds since 1970; `end` is null while the span is unfinished. `remote`: its parent ran in another
process. `service` is the application it came from. `bad`: it lost a value to `skip_bad`, so its workflow is spoiled."""
CONTENT: Final = tuple(name for name in SPAN_SCHEMA.names if name not in ("file", "line"))
"""The columns in which two reports of one span must agree."""


KINDS: Final[Mapping[str, Mapping[str, Role]]] = {
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
    # Phoenix and Arize instrumentors.
    "openinference.span.kind": {
        "llm": Role.LLM,
        "tool": Role.TOOL,
        "agent": Role.AGENT,
        "chain": Role.CHAIN,
    },
    "mlflow.spanType": {
        "chat_model": Role.LLM,
        "llm": Role.LLM,
        "tool": Role.TOOL,
        "agent": Role.AGENT,
        "chain": Role.CHAIN,
        "task": Role.CHAIN,
        "workflow": Role.WORKFLOW,
    },
}
"""Attributes that define the role of a span, the best first, with the role of each value in lower case; any other value
means `Role.OTHER`."""

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "agent": ("gen_ai.agent.name", "agent.name", "graph.node.name"),
    "agent_id": ("gen_ai.agent.id",),
    "node": ("graph.node.id",),
    "node_parent": ("graph.node.parent_id",),
    "tool": ("gen_ai.tool.name", "tool.name"),
    "entity": ("traceloop.entity.name",),
    "session": (
        "gen_ai.conversation.id",
        "traceloop.association.properties.session_id",
        "session.id",
        "mlflow.trace.session",
    ),
    "workflow": ("gen_ai.workflow.name", "traceloop.workflow.name"),
    "graph_path": (
        "traceloop.association.properties.langgraph_checkpoint_ns",
        "traceloop.association.properties.langgraph_node",
    ),
    "metadata": ("metadata",),
    "model": (
        "gen_ai.request.model",
        "gen_ai.response.model",
        "llm.model_name",
        "llm.request.model_name",
        "llm.response.model_name",
        "mlflow.llm.model",
    ),
    "provider": ("gen_ai.provider.name", "gen_ai.system"),
    "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
    "cached_input_tokens": (
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.cache_read_input_tokens",
        "llm.token_count.prompt_details.cache_read",
        "llm.token_count.prompt_details.cache_input",
    ),
    "usage": ("mlflow.chat.tokenUsage",),
    "finish_reason": (
        "gen_ai.response.finish_reasons",
        "gen_ai.response.finish_reason",
        "gen_ai.response.stop_reason",
        "llm.response.finish_reason",
        "llm.response.stop_reason",
        "llm.finish_reason",
    ),
}
"""Attributes of each step field, the best first."""

MESSAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("gen_ai.system_instructions",),
    "input": (
        "gen_ai.input.messages",
        "gen_ai.prompt.",
        "gen_ai.prompt",
        "gen_ai.tool.call.arguments",
        "llm.input_messages.",
        "input.value",
        "mlflow.spanInputs",
    ),
    "output": (
        "gen_ai.output.messages",
        "gen_ai.completion.",
        "gen_ai.completion",
        "gen_ai.tool.call.result",
        "llm.output_messages.",
        "output.value",
        "mlflow.spanOutputs",
    ),
}
"""Attributes with messages or text, the best first; a name that ends in a dot is the prefix of messages flattened into
numbered attributes."""

MESSAGE_EVENTS: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
    "gen_ai.choice": "output",
}
"""Older span events that are one message each, and its role; "output" is what the model answered."""

USAGE: Final = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "cached_input_tokens": "cache_read_input_tokens",
}
"""Columns, and the keys of the usage object that hold them."""
