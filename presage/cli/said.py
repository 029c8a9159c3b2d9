"""What loaded models forecast at every row of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.cli.kinds import Loaded
    from presage.serving_hooks.truth.recorded import Said


def said(loaded: Mapping[str, Loaded], table: pa.Table) -> Said:
    """What the models forecast at every row.

    Args:
        loaded: by kind: one of next agents, one of the tokens that remain, or both.
        table: n rows in canonical order.
    """
    from dataclasses import replace

    import numpy as np
    import pyarrow.compute as pc

    from presage.features.lengths import length_rows
    from presage.features.prefixes import prefixes_of
    from presage.serving_hooks.truth.recorded import Said

    said = Said()
    if "next-agent" in loaded:
        of = loaded["next-agent"]
        predictor = of.predictor
        prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon)
        both = predictor.predict_both(prefixes.with_states(predictor.source.states(table)))
        said = replace(said, agents=predictor.vocabulary.agents, probabilities=both, version=of.version)
    llm = np.asarray(pc.equal(table["kind"], "llm").to_numpy(), bool)
    if "remaining-length" in loaded and llm.any():
        of = loaded["remaining-length"]
        predictor = of.predictor
        tokens = np.full((table.num_rows, len(predictor.quantiles)), np.nan, np.float32)
        tokens[llm] = predictor.predict(length_rows(table, predictor.encoder))
        said = replace(said, quantiles=predictor.quantiles, tokens=tokens, lengths_version=of.version)
    return said
