"""The table of dialects: for each source of spans, the attributes that hold what a step needs.

A new dialect is a row here and a test. A span may mix dialects (instrumentors write both during renames, exporters add
their own), so every span is read for all of them; where two give the same field, the earlier row wins, and inside a row
the earlier name. docs/traces.md lists the rows with what each lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from presage.datasets.adapters.spans.conventions import Role


def _roles(**values: str) -> dict[str, Role]:
    """Roles by value, from the values of each role, separated by blanks."""
    return {value: Role[role] for role, names in values.items() for value in names.split()}


class Dialect(NamedTuple):
    """One source of spans.

    `kinds` maps the attributes that say what a span is to the role of each value, in lower case. `names` maps each
    field to its attributes, separated by blanks; one that ends in a dot is the prefix of messages flattened into
    numbered attributes.
    `cached_outside`: its input count leaves out what was read from or written to the cache.
    """

    name: str
    version: str
    kinds: Mapping[str, Mapping[str, Role]]
    names: Mapping[str, str]
    cached_outside: bool = False


_RUN_TYPES: Final = _roles(
    LLM="llm chat_model generation",
    TOOL="tool",
    NODE="agent",
    CHAIN="chain task workflow span entry step",
    JUDGE="guardrail evaluator",
    OTHER="retriever embedding reranker parser prompt memory event unknown",
)
"""What tracing products call the kinds of a run."""

DIALECTS: Final = (
    # It calls a prompt template an operation "chat", so its own word comes first.
    Dialect("LangSmith's OpenTelemetry exporter", "langsmith 0.3 to 0.15", {"langsmith.span.kind": _RUN_TYPES}, {
        "session": "langsmith.metadata.session_id langsmith.metadata.thread_id langsmith.metadata.conversation_id",
        "graph_path": "langsmith.metadata.langgraph_checkpoint_ns langsmith.metadata.langgraph_node",
        "usage": "langsmith.metadata.usage_metadata",
    }),
    # What a span looked like when it began is exported too.
    Dialect("Pydantic Logfire", "logfire 3 to 5", {"logfire.span_type": _roles(OTHER="pending_span log")}, {
        "template_name": "name",
    }),
    Dialect("OpenTelemetry GenAI", "semantic conventions 1.27 to 1.41, and their own 0.1", {
        "gen_ai.operation.name": _roles(
            LLM="chat text_completion generate_content completion completions chat.completions chat_completions "
            "chat_completion responses response text.completions chat.streaming_completions acompletion aresponses "
            "atext_completion anthropic_messages messages messages.create converse converse_stream invoke_model "
            "invoke_model_with_response_stream generate generate_text stream_text inference call_llm llm",
            TOOL="execute_tool tool_call call_tool execute_function function_call tool",
            AGENT="invoke_agent",
            WORKFLOW="invoke_workflow invoke_swarm invoke_graph invoke_crew workflow",
            CHAIN="execute_task task chain agent_workflow orchestrate_tools execute_event_loop_cycle plan",
            JUDGE="evaluate evaluation guardrail",
            OTHER="embeddings embedding aembedding create_agent retrieval retriever rerank moderation "
            "image_generation speech transcription prompt parser handoff",
        ),
        "gen_ai.span.kind": _RUN_TYPES,  # of Alibaba's LoongSuite and Future AGI
    }, {
        "provider": "gen_ai.provider.name gen_ai.system", "model": "gen_ai.request.model gen_ai.response.model",
        "agent": "gen_ai.agent.name", "agent_id": "gen_ai.agent.id", "tool": "gen_ai.tool.name mcp.tool.name",
        "call": "gen_ai.response.id gen_ai.tool.call.id", "workflow": "gen_ai.workflow.name",
        "session": "gen_ai.conversation.id gen_ai.session.id gen_ai.thread.id", "error": "error.type",
        "http_status": "http.response.status_code http.status_code",
        "input_tokens": "gen_ai.usage.input_tokens gen_ai.usage.prompt_tokens gen_ai.response.input_tokens "
        "gen_ai.response.prompt_tokens",
        "output_tokens": "gen_ai.usage.output_tokens gen_ai.usage.completion_tokens gen_ai.response.output_tokens "
        "gen_ai.response.completion_tokens", "total_tokens": "gen_ai.usage.total_tokens",
        "cached_input_tokens": "gen_ai.usage.cache_read.input_tokens gen_ai.usage.cache_read_input_tokens "
        "gen_ai.usage.details.cache_read_tokens gen_ai.usage.details.cache_read_input_tokens "
        "gen_ai.usage.details.cached_tokens gen_ai.usage.cached_input_tokens gen_ai.usage.input_tokens.cached "
        "gen_ai.usage.cached_tokens gen_ai.usage.cache_read_tokens",
        "cache_written_tokens": "gen_ai.usage.cache_creation.input_tokens gen_ai.usage.cache_creation_input_tokens "
        "gen_ai.usage.cache_write.input_tokens gen_ai.usage.cache_write_input_tokens "
        "gen_ai.usage.details.cache_write_tokens gen_ai.usage.details.cache_creation_input_tokens "
        "gen_ai.usage.input_tokens.cache_write gen_ai.usage.cache_write_tokens gen_ai.usage.cache_creation_tokens",
        "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens gen_ai.usage.reasoning_tokens "
        "gen_ai.usage.experimental.reasoning_tokens gen_ai.usage.details.reasoning_tokens "
        "gen_ai.usage.details.thoughts_tokens gen_ai.usage.output_tokens.reasoning",
        "finish_reason": "gen_ai.response.finish_reasons gen_ai.response.finish_reason gen_ai.response.stop_reason",
        "system": "gen_ai.system_instructions",
        "input": "gen_ai.input.messages gen_ai.prompt. gen_ai.prompt gen_ai.tool.call.arguments",
        "output": "gen_ai.output.messages gen_ai.completion. gen_ai.completion gen_ai.tool.call.result",
    }),
    Dialect("OpenLLMetry (Traceloop), LiteLLM", "0.20 to 0.62; LiteLLM 1.50 to 1.80", {
        "traceloop.span.kind": _roles(TOOL="tool", NODE="agent", CHAIN="task", WORKFLOW="workflow"),
        "llm.request.type": _roles(
            LLM="chat completion acompletion text_completion responses aresponses anthropic_messages",
            OTHER="embedding aembedding rerank arerank",
        ),
    }, {
        "entity": "traceloop.entity.name",
        "session": "traceloop.association.properties.session_id traceloop.association.properties.thread_id "
        "traceloop.association.properties.conversation_id", "workflow": "traceloop.workflow.name",
        "graph_path": "traceloop.association.properties.langgraph_checkpoint_ns "
        "traceloop.association.properties.langgraph_node", "model": "llm.request.model llm.response.model",
        "provider": "llm.vendor", "input_tokens": "llm.usage.prompt_tokens",
        "output_tokens": "llm.usage.completion_tokens", "total_tokens": "llm.usage.total_tokens",
        "cached_input_tokens": "llm.usage.cache_read_input_tokens",
        "cache_written_tokens": "llm.usage.cache_creation_input_tokens",
        "reasoning_tokens": "llm.usage.reasoning_tokens",
        "finish_reason": "llm.response.finish_reason llm.response.stop_reason",
        "input": "llm.prompts. traceloop.entity.input", "output": "llm.completions. traceloop.entity.output",
    }),
    Dialect("Vercel AI SDK", "ai 4 to 6", {
        "ai.operationId": _roles(
            LLM="ai.generatetext ai.generatetext.dogenerate ai.streamtext ai.streamtext.dostream ai.generateobject "
            "ai.generateobject.dogenerate ai.streamobject ai.streamobject.dostream",
            TOOL="ai.toolcall",
            OTHER="ai.embed ai.embed.doembed ai.embedmany ai.embedmany.doembed ai.rerank ai.rerank.dorerank",
        ),
    }, {
        "provider": "ai.model.provider", "model": "ai.model.id ai.response.model",
        "agent": "ai.telemetry.functionId ai.telemetry.metadata.agentName ai.telemetry.metadata.agent",
        "tool": "ai.toolCall.name", "call": "ai.response.id ai.toolCall.id",
        "session": "ai.telemetry.metadata.sessionId ai.telemetry.metadata.conversationId "
        "ai.telemetry.metadata.threadId ai.telemetry.metadata.chatId",
        "input_tokens": "ai.usage.inputTokens ai.usage.promptTokens",
        "output_tokens": "ai.usage.outputTokens ai.usage.completionTokens", "total_tokens": "ai.usage.totalTokens",
        "cached_input_tokens": "ai.usage.cachedInputTokens ai.usage.inputTokenDetails.cacheReadTokens",
        "cache_written_tokens": "ai.usage.inputTokenDetails.cacheWriteTokens",
        "reasoning_tokens": "ai.usage.reasoningTokens ai.usage.outputTokenDetails.reasoningTokens",
        "finish_reason": "ai.response.finishReason", "input": "ai.prompt.messages ai.prompt ai.toolCall.args",
        "output": "ai.response.text ai.response.object ai.response.toolCalls ai.toolCall.result",
    }),
    Dialect("Claude Code", "2.1 (beta tracing)", {
        "span.type": _roles(
            LLM="llm_request", TOOL="tool", CHAIN="interaction",
            OTHER="tool.execution tool.blocked_on_user tool.blocked hook",
        ),
    }, {
        "model": "model", "entity": "tool_name", "call": "request_id tool_use_id", "input_tokens": "input_tokens",
        "output_tokens": "output_tokens", "cached_input_tokens": "cache_read_tokens",
        "cache_written_tokens": "cache_creation_tokens", "finish_reason": "stop_reason",
    }, cached_outside=True),
    Dialect("OpenInference, Phoenix, Arize", "semantic conventions 0.1.9 to 0.1.24", {
        "openinference.span.kind": _roles(
            LLM="llm", TOOL="tool", NODE="agent", CHAIN="chain",
            OTHER="embedding retriever reranker prompt unknown", JUDGE="guardrail evaluator",
        ),
    }, {
        "provider": "llm.provider llm.system",
        "model": "llm.model_name llm.request.model_name llm.response.model_name",
        "agent": "agent.name graph.node.name", "node": "graph.node.id", "node_parent": "graph.node.parent_id",
        "tool": "tool.name", "session": "session.id", "metadata": "metadata",
        "input_tokens": "llm.token_count.prompt", "output_tokens": "llm.token_count.completion",
        "total_tokens": "llm.token_count.total",
        "cached_input_tokens": "llm.token_count.prompt_details.cache_read "
        "llm.token_count.prompt_details.cache_input",
        "cache_written_tokens": "llm.token_count.prompt_details.cache_write", "finish_reason": "llm.finish_reason",
        "reasoning_tokens": "llm.token_count.completion_details.reasoning",
        "input": "llm.input_messages. input.value", "output": "llm.output_messages. output.value",
    }),
    Dialect("MLflow", "2.20 to 3.17", {"mlflow.spanType": {**_RUN_TYPES, "workflow": Role.WORKFLOW}}, {
        "session": "mlflow.trace.session", "model": "mlflow.llm.model", "provider": "mlflow.llm.provider",
        "instrumentation": "mlflow.message.format",
        "usage": "mlflow.chat.tokenUsage", "input": "mlflow.spanInputs", "output": "mlflow.spanOutputs",
    }),
    Dialect("Langfuse", "SDK 3 to 5, export files", {"langfuse.observation.type": _RUN_TYPES}, {
        "session": "langfuse.session.id langfuse.trace.metadata.session_id "
        "langfuse.observation.metadata.session_id langfuse.observation.metadata.thread_id",
        "workflow": "langfuse.trace.name", "model": "langfuse.observation.model.name",
        "metadata": "langfuse.observation.metadata",
        "graph_path": "langfuse.observation.metadata.langgraph_checkpoint_ns "
        "langfuse.observation.metadata.langgraph_node", "usage": "langfuse.observation.usage_details",
        "input": "langfuse.observation.input", "output": "langfuse.observation.output",
    }, cached_outside=True),
    Dialect("Spring AI (Micrometer)", "1.0 to 1.1", {
        "spring.ai.kind": _roles(TOOL="tool_call", OTHER="chat_client advisor vector_store"),
    }, {
        "tool": "spring.ai.tool.definition.name", "session": "spring.ai.chat.client.conversation.id",
        "input": "spring.ai.tool.call.arguments", "output": "spring.ai.tool.call.result",
    }),
    Dialect("Google ADK", "1.0 to 1.20", {}, {
        "session": "gcp.vertex.agent.session_id",
        "input": "gcp.vertex.agent.llm_request gcp.vertex.agent.tool_call_args",
        "output": "gcp.vertex.agent.llm_response gcp.vertex.agent.tool_response",
    }),
    Dialect("Microsoft Agent Framework", "1.0 to 1.2", {}, {"agent": "executor.id", "workflow": "workflow.name"}),
    Dialect("pydantic-ai, Strands, older versions", "pydantic-ai 0.0 to 2.68; Strands 0.1 to 1.62", {}, {
        "agent": "agent_name strands.agent.name", "model": "model_name model_id", "input": "tool_arguments",
        "output": "tool_response", "events": "events",
    }),
)  # fmt: skip
"""The best first."""

MESSAGE_EVENTS: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
    "gen_ai.choice": "output",
}
"""Events that are one message each, on spans or in log records, and its role; "output" is what the model answered."""

USAGE: Final[Mapping[str, str]] = {
    "input_tokens": "input_tokens input prompt_tokens promptTokens inputTokens",
    "output_tokens": "output_tokens output completion_tokens completionTokens outputTokens",
    "reasoning_tokens": "reasoning_tokens output_reasoning_tokens output_reasoning reasoning reasoningTokens",
    "total_tokens": "total_tokens total totalTokens",
    "cached_input_tokens": "cache_read_input_tokens input_cached_tokens input_cache_read cache_read cached_tokens",
    "cache_written_tokens": "cache_creation_input_tokens input_cache_creation cache_write",
}
"""Fields, and the keys of usage objects that hold them, separated by blanks."""
