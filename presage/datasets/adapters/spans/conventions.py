"""The span record: what is kept of a span of any dialect, in memory, on disk and for its tree."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

import pyarrow as pa


class Role(IntEnum):
    """Role of a span; `OTHER` only passes on parentage (HTTP, database, embedding, …)."""

    OTHER = 0
    LLM = 1
    TOOL = 2
    AGENT = 3  # an agent that is a step where nothing inside it is: it runs elsewhere
    CHAIN = 4
    WORKFLOW = 5
    NODE = 6  # an agent by a framework's word, which names steps and is none
    MAYBE = 7  # carries a model or tokens under an unknown operation: a request where no step is inside
    JUDGE = 8  # a guardrail or an evaluator, which names the requests inside and is none itself


class Flag(IntFlag):
    """What happened to a span."""

    ERROR = 1  # its status is an error
    UNANSWERED = 2  # a request that failed without any output
    PAUSED = 4  # it waits for somebody outside
    LOST = 8  # it lost attributes before it was exported
    OUTSIDE = 16  # its input count left the cache out; that is added


class Naming(IntEnum):
    """How well a span names the agent of the steps under it."""

    NOT = 0
    WEAKLY = 1  # a chain or workflow span, by its own name
    EXPLICITLY = 2  # an agent or tool span, or an attribute that names an agent


class Meaning(NamedTuple):
    """Interpreted attributes of a span.

    `label` is the name this span gives to the steps under it; `node` and `node_parent` are ids of the agent graph;
    `call` is the id of a response or of a tool call; `instrumentation` is what recorded the span.
    """

    role: int = 0
    naming: int = 0
    label: str | None = None
    node: str | None = None
    node_parent: str | None = None
    workflow: str | None = None
    session: str | None = None
    model: str | None = None
    provider: str | None = None
    instrumentation: str | None = None
    call: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    cache_written_tokens: int | None = None
    finish_reason: str | None = None
    flags: int = 0
    system_prompt: str | None = None
    input_text: str | None = None
    output_text: str | None = None


_OF_ANY_SPAN: Final = ("trace", "span", "parent", "remote", "service", "start", "end", "links", "file", "line")
_TYPES: Final = {
    **dict.fromkeys(("start", "end", "line"), pa.int64()),
    **dict.fromkeys(("role", "naming", "flags"), pa.int8()),
    **dict.fromkeys(("input_tokens", "output_tokens", "cached_input_tokens", "cache_written_tokens"), pa.int32()),
    **dict.fromkeys(("system_prompt", "input_text", "output_text"), pa.large_string()),
    "remote": pa.bool_(),
    "file": pa.int32(),
}
SPAN_SCHEMA: Final = pa.schema([(name, _TYPES.get(name, pa.string())) for name in (*_OF_ANY_SPAN, *Meaning._fields)])
"""A span on disk or, where `span` is null, the note that a span of this trace could not be read.

Times are nanoseconds since 1970; `end` is null while the span is unfinished. `remote`: its parent ran in another
process. `service` is the application it came from. `links` are the ids of the other traces that the first span of a
trace links to, separated by blanks."""
COPIED: Final = "step copied from another trace, as into a fork of its session: counted there"
TWIN: Final = "request that a framework and its client both recorded, apart: one step"
CONTINUED: Final = "trace that continues another by a link: one workflow"
LINKS_MISSING: Final = "trace that links to others that are not here"
LINKS_DOUBTED: Final = "trace that links to several others, or to another session: apart, and none of them complete"
INFORMATION: Final = (
    "span of a kind that is no step",
    "span reported again",
    "span exported twice",
    COPIED,
    TWIN,
    "span with an error",
    "failed attempt",
    "agent without a request",
    "request that was open around its tools",
    CONTINUED,
    LINKS_MISSING,
    "trace that paused",
    "trace whose root failed",
)
"""How the notices begin that tell by which rule something was rightly no step, or is no success."""


def doubtful(notices: Mapping[str, int]) -> dict[str, int]:
    """The notices of what was not read, was lost or dropped, or is read by a guess: all others than `INFORMATION`."""
    return {what: count for what, count in notices.items() if not what.startswith(INFORMATION)}


CONTENT: Final = tuple(name for name in SPAN_SCHEMA.names if name not in ("span", "parent", "file", "line"))
"""The columns in which a span and its twin agree."""
