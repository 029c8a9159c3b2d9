"""What a span is to us, whatever wrote it: the one record between the formats and the trees.

A format module turns its files into `Span`s; `span_tree.py` and `workflows.py` know nothing else. A record keeps what
a step may need (tokens, texts, names) and what the tree needs (ids, times, the role), and is spilled to disk as a row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import pyarrow as pa


class Role(IntEnum):
    """What a span stands for; `OTHER` covers all that only passes parentage on (HTTP, database, embedding, …)."""

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


class Span(NamedTuple):
    """One span, or (with `span` None) the note that a span of this trace could not be read.

    Times are nanoseconds since 1970; `end` is None while the span is unfinished. `label` is the name this span gives
    to the steps under it, `node` and `node_parent` are ids of the agent graph, `service` is the application the span
    came from, `remote` says that its parent ran in another process. `bad` marks a span that lost a value to
    `skip_bad`: its workflow is spoiled.
    """

    trace: str
    span: str | None
    parent: str | None
    remote: bool
    service: str | None
    start: int
    end: int | None
    bad: bool
    file: int
    line: int
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


SPAN_SCHEMA: Final = pa.schema(
    [
        pa.field("trace", pa.string()),
        pa.field("span", pa.string()),
        pa.field("parent", pa.string()),
        pa.field("remote", pa.bool_()),
        pa.field("service", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("bad", pa.bool_()),
        pa.field("file", pa.int32()),
        pa.field("line", pa.int64()),
        pa.field("role", pa.int8()),
        pa.field("naming", pa.int8()),
        pa.field("label", pa.string()),
        pa.field("node", pa.string()),
        pa.field("node_parent", pa.string()),
        pa.field("workflow", pa.string()),
        pa.field("session", pa.string()),
        pa.field("model", pa.string()),
        pa.field("input_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("cached_input_tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("system_prompt", pa.large_string()),
        pa.field("input_text", pa.large_string()),
        pa.field("output_text", pa.large_string()),
    ]
)
CONTENT: Final = tuple(name for name in SPAN_SCHEMA.names if name not in ("file", "line"))
"""The columns in which two reports of one span must agree."""
