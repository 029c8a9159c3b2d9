"""Input profiles: which inputs of a step are available where a predictor serves.

A predictor trained with texts behaves differently without them. So an evaluation masks the inputs that a profile lacks
and scores again, and a promotion is decided under the profile of the predictor's clients: vLLM's scheduler has token
counts and hidden states but no text; a gateway has texts but no hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import pyarrow as pa

Source = Literal["tokens", "text", "states"]

TOKENS: Final = "tokens"
TEXT: Final = "text"
STATES: Final = "states"

COLUMNS: Final[Mapping[Source, tuple[str, ...]]] = MappingProxyType(
    {
        TOKENS: ("input_tokens", "output_tokens", "cached_input_tokens"),
        TEXT: ("system_prompt", "input_text", "output_text", "model"),
        STATES: ("prefill_state", "completion_state"),
    }
)
"""Trace columns by source: token counts; the request as the client sent it, including the model name; hidden states of
the serving model. Workflow type, agent, order and kind of steps are always available."""

Sources = frozenset[Source]

PROFILES: Final[Mapping[str, Sources]] = MappingProxyType(
    {
        "ids": frozenset(),
        "ids+tokens": frozenset((TOKENS,)),
        "+text": frozenset((TOKENS, TEXT)),
        "+states": frozenset((TOKENS, TEXT, STATES)),
        "engine": frozenset((TOKENS, STATES)),
    }
)
"""The profiles of an evaluation; `engine` is what our hooks in vLLM supply."""

FULL: Final = "+states"

TARGETS: Final[Mapping[str, str]] = MappingProxyType({"engine": "engine", "gateway": "+text", "full": FULL})
"""Profile by promotion target."""


def masked(table: pa.Table, sources: Sources) -> pa.Table:
    """The trace with the columns of all other sources set to null."""
    for source, columns in COLUMNS.items():
        for name in columns if source not in sources else ():
            if name in table.column_names:
                at = table.schema.get_field_index(name)
                field = table.schema.field(at)
                table = table.set_column(at, field, pa.nulls(len(table), field.type))
    return table
