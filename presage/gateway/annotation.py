"""What the gateway tells an engine or a router about a request (Pythia's `sys_annotations`), in one convention.

Dialects translate it. The polarity is ours alone here: of two ranks the LOWER runs first, as of vLLM's priorities.
"""

from __future__ import annotations

from dataclasses import dataclass

from presage.predictors.common.forecast import Source
from presage.serving_hooks.workflows.identity import Step


@dataclass(frozen=True, slots=True)
class Annotation:
    """Identity and forecasts of one request; what is unknown is None or empty.

    Attributes:
        step: the workflow, with its tenant, and the agent as the client calls it.
        sent_id: the workflow's name as servers get it; "" if that is the client's own, without a tenant.
        number: of the step in its workflow, from 0, as the gateway counts.
        rank: forecast output tokens of the workflow, this step's included, or what stands for them (`ranks.py`); the
            LOWER runs first.
        rank_from: what the rank is made of.
        remaining_tokens: p50 and p99 of the output tokens of this step and all later ones.
        output_tokens: p50 and p99 of the output tokens of this step.
        next_agents: (agent, probability) of the next step, the likeliest first; those of 1 % and more.
        end: probability that this step is the last.
        return_s: p50 and p99 of the seconds from the answer to the workflow's next request, given that it returns.
        time_to_live_s: seconds after the answer for which a cache should keep the workflow's blocks.
        deadline_s: seconds from the arrival within which the first token is due.
        capacity_group: requests that one reservation of capacity covers: workflow type and agent.
        source, evidence: of the next-agent forecast.
    """

    step: Step
    number: int
    rank: float | None = None
    rank_from: str = "forecast"
    remaining_tokens: tuple[float, float] | None = None
    output_tokens: tuple[float, float] | None = None
    next_agents: tuple[tuple[str, float], ...] = ()
    end: float | None = None
    return_s: tuple[float, float] | None = None
    time_to_live_s: float | None = None
    deadline_s: float | None = None
    capacity_group: str = ""
    sent_id: str = ""
    source: Source = "none"
    evidence: int = 0
