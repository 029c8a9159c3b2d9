"""Which inputs of a step are at hand where a predictor serves: the sources, and the profiles made of them.

A model trained on texts and used without them is another model. So an evaluation masks what a profile lacks and judges
again, and a promotion is judged under the profile of what will ask it: vLLM's scheduler sees token counts and hidden
states, never a text; a gateway sees texts, never a hidden state.
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
"""Columns of the trace that a source supplies: token counts; the request as its client wrote it, its model's name
included; hidden states of the model that served it. Workflow type, agent, order and kind of steps are always there."""

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
"""The profiles of an evaluation, the fullest but one last: `engine` is what our hooks in vLLM supply."""

FULL: Final = "+states"

TARGETS: Final[Mapping[str, str]] = MappingProxyType({"engine": "engine", "gateway": "+text", "full": FULL})
"""Profile by where a version is promoted to."""


def masked(table: pa.Table, sources: Sources) -> pa.Table:
    """The same trace with the columns of all other sources null."""
    for source, columns in COLUMNS.items():
        for name in columns if source not in sources else ():
            if name in table.column_names:
                at = table.schema.get_field_index(name)
                field = table.schema.field(at)
                table = table.set_column(at, field, pa.nulls(len(table), field.type))
    return table
