"""Likely causes of figures that differ from the promised ones, each with what mends it.

They compare the agents that workflows call with those of the promoted call graph, so they name what a serving engineer
can look up: agents that are new, renamed, or never served here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from presage.features.input_profiles import ANSWERS
from presage.serving_hooks.monitoring.outcomes import END
from presage.serving_hooks.monitoring.promoted import Transitions

RETRAIN: Final = "train on recent traces (train-predictor) and promote the version (presage promote)"

CALLED: Final = 50
"""Latest workflows that are looked at. Of an agent with 5 % of the steps, they call none by chance in 1 % of cases."""
_SHARE: Final = 0.05
_NAMED: Final = 3


@dataclass(frozen=True)
class Cause:
    """A likely cause, and the change or command that mends it."""

    text: str
    mend: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"text": self.text, "mend": self.mend}


OTHER_TYPE: Final = Cause(
    "the version was promoted without figures of this workflow type",
    f"correct workflow_type in the requests, or {RETRAIN}",
)
CHANGED: Final = Cause("the same agents call each other in other ways than in the traces of the promotion", RETRAIN)


def missing_inputs(inputs: Sequence[str]) -> Cause:
    """The version was judged with inputs that this engine does not supply."""
    mend = "supply them, or promote under what it supplies (presage promote --profile engine)"
    if ANSWERS in inputs:
        mend = "serve chat completions and have vLLM parse their tool calls (--tool-call-parser); else " + mend
    return Cause(f"the version was promoted with {', '.join(inputs)}, which this engine does not supply", mend)


def causes_of(promoted: Transitions, called: Collection[frozenset[str]]) -> tuple[Cause, ...]:
    """Causes that the agents of the latest workflows show; `CHANGED` if they show none.

    Args:
        promoted: the call graph of the promotion.
        called: the agents that each of the latest `CALLED` workflows has called; fewer at first.
    """
    workflows = Counter(agent for agents in called for agent in agents)
    least = max(_SHARE * len(called), 1.0)
    new = [name for name, count in workflows.most_common() if name not in promoted.agents and count >= least]
    steps = Counter[str]()
    for (_, agent), times in promoted.counts.items():
        if agent != END:
            steps[agent] += times
    total = steps.total()
    gone = [name for name, times in steps.most_common() if not workflows[name] and times >= _SHARE * total]
    if len(called) < CALLED:
        gone = []
    if new and gone:
        return (
            Cause(
                f"agents are called otherwise: {_names(new)} instead of {_names(gone)}",
                f"send the names of the traces, or {RETRAIN}",
            ),
        )
    if new:
        return (Cause(f"agents that the traces do not have: {_names(new)}", RETRAIN),)
    if gone:
        return (
            Cause(
                f"agents of the traces that this engine never serves: {_names(gone)}",
                "if they are tools, give their rows kind tool; if another server gets them, send it here too; then "
                + RETRAIN,
            ),
        )
    return (CHANGED,)


def _names(agents: Sequence[str]) -> str:
    """The first of these names, quoted, since clients choose them."""
    more = f" and {len(agents) - _NAMED} more" if len(agents) > _NAMED else ""
    return ", ".join(map(repr, agents[:_NAMED])) + more
