"""Input profiles: which inputs of a step are available where a predictor serves.

A predictor trained with texts behaves differently without them. So an evaluation masks the inputs that a profile lacks
and scores again, and a promotion is decided under the profile of the predictor's clients: an engine with our hooks has
token counts, the tools that answers call, and hidden states, but no text; a gateway has texts but no hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import pyarrow as pa

Source = Literal["tokens", "answers", "text", "states"]

TOKENS: Final = "tokens"
ANSWERS: Final = "answers"
TEXT: Final = "text"
STATES: Final = "states"

COLUMNS: Final[Mapping[Source, tuple[str, ...]]] = MappingProxyType(
    {
        TOKENS: ("input_tokens", "output_tokens", "cached_input_tokens"),
        ANSWERS: ("tools_called",),
        TEXT: ("system_prompt", "input_text", "output_text", "model"),
        STATES: ("prefill_state", "completion_state"),
    }
)
"""Trace columns by source: token counts; what a parsed answer calls; the request as the client sent it, including the
model name; hidden states of the serving model. Workflow type, agent, order and kind of steps are always available."""

Sources = frozenset[Source]

PROFILES: Final[Mapping[str, Sources]] = MappingProxyType(
    {
        "ids": frozenset(),
        "ids+tokens": frozenset((TOKENS,)),
        "+text": frozenset((TOKENS, ANSWERS, TEXT)),
        "+states": frozenset((TOKENS, ANSWERS, TEXT, STATES)),
        "engine": frozenset((TOKENS, ANSWERS, STATES)),
    }
)
"""The profiles of an evaluation; `engine` is what our hooks in vLLM supply."""

FULL: Final = "+states"
ENGINE: Final = "engine"

TARGETS: Final[Mapping[str, str]] = MappingProxyType({"engine": "engine", "gateway": "+text", "full": FULL})
"""Profile by promotion target."""


ALL_INPUTS: Final = "all_inputs_"
"""Prefix of a headline figure with all inputs of the traces, where an engine gets another."""


def as_served(metrics: Mapping[str, Any], profile: str = ENGINE) -> Mapping[str, Any]:
    """A `metrics.json` whose figures are those under one profile; unchanged if it has none of its own (a router)."""
    own_figures = metrics.get("profiles", {}).get(profile)
    if own_figures is None:
        return metrics
    moments = {
        name: {**figures, **own_figures["moments"][name]} for name, figures in metrics.get("moments", {}).items()
    }
    own = {name: figures for name, figures in own_figures.items() if name not in ("behind", "moments")}
    return {**metrics, **own, **({"moments": moments} if moments else {})}


def masked(table: pa.Table, sources: Sources) -> pa.Table:
    """The trace with the columns of all other sources set to null."""
    for source, columns in COLUMNS.items():
        for name in columns if source not in sources else ():
            if name in table.column_names:
                position = table.schema.get_field_index(name)
                field = table.schema.field(position)
                table = table.set_column(position, field, pa.nulls(len(table), field.type))
    return table
