"""The back-off trigram as a source of forecasts: the baseline that a trained model has to beat.

One lookup a step. What is left of a workflow it says by a median: of the output tokens that were left when a step of
this agent, in this workflow type, arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.predictors.ngram import START, lookup
from presage.serving_hooks.forecasting.live import LiveForecast
from presage.serving_hooks.replay.taught import Taught

if TYPE_CHECKING:
    from presage.serving_hooks.vllm.metadata import Step


class Markov:
    """Says what usually came after the last three agents.

    Args:
        taught: what was learnt.
    """

    def __init__(self, taught: Taught) -> None:
        self._table, self._medians = taught.markov.table, taught.medians
        vocabulary = taught.markov.vocabulary
        self._names = vocabulary.agents
        self._types = {name: index for index, name in enumerate(vocabulary.workflow_types)}
        self._agents = {name: index for index, name in enumerate(self._names)}
        self._last: dict[tuple[str, str], tuple[int, int, int]] = {}

    def on_prefill(
        self,
        workflow_type: str,
        workflow_id: str,
        agent: str,
        *,
        step: int | None = None,
        input_tokens: int | None = None,
    ) -> LiveForecast:
        """What comes after this step."""
        before = self._last.get((workflow_type, workflow_id), (START, START, START))
        self._last[workflow_type, workflow_id] = self._agents.get(agent, len(self._names)), *before[:2]
        return self._after(workflow_type, workflow_id, PREFILL)

    def on_completion(self, workflow_type: str, workflow_id: str, *, output_tokens: int | None = None) -> LiveForecast:
        """The same, once it has completed."""
        return self._after(workflow_type, workflow_id, COMPLETION)

    def close(self, workflow_type: str, workflow_id: str) -> None:
        """The workflow has ended."""
        self._last.pop((workflow_type, workflow_id), None)

    def remaining_tokens(self, step: Step, input_tokens: int) -> float | None:
        """The median of what was left; None for an agent that was never seen."""
        return self._medians.get((step.workflow_type, step.agent))

    def _after(self, workflow_type: str, workflow_id: str, moment: Moment) -> LiveForecast:
        kind = self._types.get(workflow_type, len(self._types))
        row = lookup(self._table.keys, self._table.values, kind, *self._last[workflow_type, workflow_id])
        evidence = int(self._table.evidence[row])
        return LiveForecast("back-off", evidence, moment, self._table.rows[row], self._names, None)
