"""The reference figures that an engine compares live forecasts with; promotion keeps them in the run of the version.

They use names and token counts only: the hooks read no texts, and not every engine supplies hidden states. Better
forecasts, with states, raise no alarm. Only workflows that ended count: the figures of an aborted one depend on where
it stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from presage.features.input_profiles import PROFILES, TARGETS, masked
from presage.features.lengths import length_rows
from presage.features.prefixes import prefixes_of
from presage.kinds.loaded import Loaded
from presage.registry.connect import Registry, attach
from presage.serving_hooks.monitoring.promoted import (
    PROMOTED_FILE,
    PROMOTED_FOLDER,
    Promoted,
    promoted_by_type,
    promoted_json,
)
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of

AT_LEAST: Final = 20
"""Fewest workflows of a type for reference figures."""

_NAMED: Final = 8


def promotion_figures(
    candidate: Loaded, table: pa.Table, note: Callable[[str], None], target: str
) -> dict[str, Promoted] | None:
    """Reference figures by workflow type, with the inputs of a profile (a key of `TARGETS`): what is promised.

    The table has unseen traces in canonical order. None for a kind that is not monitored.
    """
    kind = candidate.kind.name
    if kind not in ("next-agent", "remaining-length"):
        return None
    if kind == "remaining-length" and candidate.predictor.target != "remaining":
        return None
    supplied = masked(table, PROFILES[TARGETS[target]])
    ended = [
        workflow for workflow in followed_of(supplied, forecasts_of({kind: candidate}, supplied)) if workflow.ended
    ]
    promoted = promoted_by_type(ended, AT_LEAST)
    if few := sorted(set(pc.unique(table["workflow_type"]).to_pylist()) - promoted.keys()):
        more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
        note(
            f"fewer than {AT_LEAST} ended workflows of {', '.join(map(repr, few[:_NAMED]))}{more}: an engine will "
            "compare these workflow types with their own first workflows"
        )
    return promoted


def keep_figures(registry: Registry, name: str, version: int, promoted: dict[str, Promoted]) -> None:
    """Attach the figures to the run of the version, in place of those of an earlier promotion; raises RegistryError."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / PROMOTED_FILE
        file.write_text(promoted_json(promoted), encoding="utf-8")
        attach(registry, name, version, [file], PROMOTED_FOLDER)


def forecasts_of(loaded: Mapping[str, Loaded], table: pa.Table) -> TraceForecasts:
    """Forecast every row of a table of served steps with the predictors by kind: one or both."""
    forecasts = TraceForecasts()
    if "next-agent" in loaded:
        model = loaded["next-agent"]
        predictor = model.predictor
        prefixes = prefixes_of(table, predictor.vocabulary, predictor.horizon)
        both = predictor.predict_both(prefixes.with_states(predictor.source.states(table)))
        forecasts = replace(forecasts, agents=predictor.vocabulary.agents, probabilities=both, version=model.version)
    if "remaining-length" in loaded:
        model = loaded["remaining-length"]
        predictor = model.predictor
        tokens = predictor.predict(length_rows(table, predictor.encoder))
        forecasts = replace(forecasts, quantiles=predictor.quantiles, tokens=tokens, lengths_version=model.version)
    return forecasts
