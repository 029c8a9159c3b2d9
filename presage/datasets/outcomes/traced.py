"""Outcomes from traces: what a router learns from served steps.

Each LLM step with a prompt, a model and an outcome is a row. Its outcome is its own score, where somebody judged its
answer alone, else the success of its workflow, which all of its steps share. Steps of one workflow, and workflows of
one task, are one group, so no split divides them; where no task is recorded, workflows that begin with the same prompt
are of one task. The router's `task` is workflow type and agent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa

from presage.datasets.outcomes import normalise
from presage.datasets.outcomes.files import GatheredOutcomes, OutcomeRow, OutcomesRead
from presage.datasets.schema.messages import routed_prompt
from presage.errors import TraceError

_COLUMNS: Final = (
    "workflow_type", "workflow_id", "agent", "task", "kind", "model", "output_tokens", "finish_reason",
    "system_prompt", "input_text", "success", "step_score",
)  # fmt: skip


def outcomes_of(table: pa.Table) -> OutcomesRead:
    """The outcomes of a valid trace in canonical order; `skipped` counts its other LLM steps by what they lack.

    Raises TraceError if no step has all of it.
    """
    gathered, skipped = GatheredOutcomes(), Counter[str]()
    workflow, group = ("", ""), None
    for batch in table.select(_COLUMNS).to_batches():
        for row in batch.to_pylist():
            if workflow != (row["workflow_type"], row["workflow_id"]):
                workflow, group = (row["workflow_type"], row["workflow_id"]), None
            if row["kind"] != "llm":
                continue
            prompt = normalise(routed_prompt(row["system_prompt"], row["input_text"]) or "")
            group = group or (row["task"] or prompt or None)
            lack = _lack(row, prompt)
            if lack is not None:
                skipped[lack] += 1
                continue
            gathered.add(_outcome(row, group))
    if not gathered.prompts:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.items()) or "no LLM step"
        raise TraceError(
            f"no step with a prompt, a model and an outcome ({reasons}); record with text on, and report outcomes to "
            "the gateway (docs/gateway_models.md)"
        )
    return gathered.finish(dict(skipped))


def _lack(row: Mapping[str, Any], prompt: str) -> str | None:
    if row["finish_reason"] == "abort":
        return "aborted step"
    if row["success"] is None and row["step_score"] is None:
        return "step without an outcome"
    if not prompt:
        return "step without a prompt"
    return None if row["model"] else "step without a model"


def _outcome(row: Mapping[str, Any], group: str | None) -> OutcomeRow:
    score, tokens = row["step_score"], row["output_tokens"]
    digest = blake2b(f"{row['workflow_type']}\0{group}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return OutcomeRow(
        prompt=routed_prompt(row["system_prompt"], row["input_text"]) or "",
        model=row["model"],
        correct=float(row["success"] if score is None else score),
        task=f"{row['workflow_type']}/{row['agent']}",
        output_tokens=math.nan if tokens is None else float(tokens),
        cost=math.nan,
        group=digest,
    )
