"""The state of each workflow that admission decides on: its phase, its working set, and how long it has been held.

Its working set is the blocks it has used so far (only their hashes are kept), each once, plus the tokens its next step
is expected to add: the waiting prompt, or the mean of new tokens per step; and the output of a step, or the workflow's
remaining tokens if fewer. Prefixes that several workflows share count for each, and so do tokens that no later prompt
reads: this overestimates by about the same factor at every load, and losses are measured against the same loads.

A decision reads the accounts as columns. A row is rewritten only when its own account changes; the mean step, which
changes with every step of any workflow, is applied to all rows before a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from presage.serving_hooks.policies.admission import Phase, WorkflowColumns
from presage.serving_hooks.policies.distinct import Distinct
from presage.serving_hooks.policies.next_use import ReturnCurve
from presage.serving_hooks.policies.workload import WorkloadMeans


@dataclass(slots=True)
class AdmissionRequest:
    """A request of a workflow.

    Attributes:
        new_tokens, reusable_tokens: of its prompt, by whether the workflow had computed them.
        held_before_s: seconds the workflow had been held when the request arrived.
    """

    new_tokens: int
    reusable_tokens: int
    held_before_s: float = 0.0
    begun: bool = False


_NONE: Final[dict[str, AdmissionRequest]] = {}
"""The requests of a workflow without any; never written to."""


@dataclass(slots=True)
class Account:
    """One workflow.

    Attributes:
        since: the start of its phase, in seconds of the caller's clock.
        exempt: whether it has been held for the maximal time.
        held_s: seconds its requests were held over its life, up to `held_since` if they are held now.
        kept: whether it has not been held since its last step, so that other workflows evicted any lost blocks.
        bound_s: seconds from its arrival for which its request may be held; NaN for the default.
        left_at, load_area: when its last step ended, and ∫ load dt until then.
    """

    workflow_type: str
    since: float
    held: bool = False
    exempt: bool = False
    phase: Phase = Phase.TOOL
    agent: str = ""
    remaining_tokens: float = math.inf
    requests: dict[str, AdmissionRequest] = field(default_factory=lambda: _NONE)
    blocks: Distinct = field(default_factory=Distinct)
    steps: int = 0
    new_tokens: int = 0
    held_since: float | None = None
    held_s: float = 0.0
    kept: bool = True
    bound_s: float = math.nan
    left_at: float = -math.inf
    load_area: float = 0.0

    def arrives(
        self, request_id: str, agent: str, prompt_tokens: int, reusable_tokens: int, remaining_tokens: float, now: float
    ) -> None:
        """A request arrives."""
        self.agent, self.remaining_tokens = agent, remaining_tokens
        self.requests = self.requests or {}
        self.requests[request_id] = AdmissionRequest(
            prompt_tokens - reusable_tokens, reusable_tokens, self.waited_s(now)
        )
        self._move(now)

    def begins(self, request_id: str, hashes: Sequence[bytes], now: float) -> AdmissionRequest:
        """A request is selected for the first time."""
        request = self.requests[request_id]
        request.begun = True
        self.blocks.add(hashes)
        self.steps += 1
        self.new_tokens += request.new_tokens
        self._move(now)
        return request

    def leaves(self, request_id: str, hashes: Sequence[bytes], output_tokens: int, now: float) -> None:
        """A request leaves the engine with these blocks computed."""
        del self.requests[request_id]
        if not self.requests:
            self.requests = _NONE  # an emptied table keeps its size
        self.kept = not self.held
        self.blocks.add(hashes)
        self.remaining_tokens = max(0.0, self.remaining_tokens - output_tokens)
        self._move(now)

    def hold(self, held: bool, now: float) -> bool:
        """Sets whether it is held; returns whether that changed."""
        changed, self.held = held is not self.held, held
        self.kept = self.kept and not held
        self._settle(now)
        return changed

    def waited_s(self, now: float) -> float:
        """Seconds its requests have been held over its life."""
        return self.held_s if self.held_since is None else self.held_s + now - self.held_since

    def waited_for_s(self, request: AdmissionRequest, now: float) -> float:
        """Seconds a request that has not begun before now has been held."""
        return self.waited_s(now) - request.held_before_s

    def waits(self) -> bool:
        """Whether it is held and has a waiting request."""
        return self.held and self.phase is Phase.READY

    def seen(self, block_tokens: int) -> tuple[float, int, int]:
        """Its working set: known tokens, number of expected outputs, and number of expected mean prompts."""
        known = len(self.blocks) * block_tokens
        if self.phase is not Phase.TOOL:
            waiting = sum([request.new_tokens for request in self.requests.values() if not request.begun])
            return known + waiting, len(self.requests), 0
        return (known + self.new_tokens / self.steps, 1, 0) if self.steps else (known, 1, 1)

    def _move(self, now: float) -> None:
        if not self.requests:
            phase = Phase.TOOL
        elif any(request.begun for request in self.requests.values()):
            phase = Phase.STEP
        else:
            phase = Phase.READY
        if phase is not self.phase:
            self.phase, self.since = phase, now
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self.waits():
            self.held_s, self.held_since = self.waited_s(now), None
        elif self.held_since is None:
            self.held_since = now


Returning = Callable[[str], "tuple[ReturnCurve, float] | None"]
"""The forecast of the return time of a workflow that is away, and since when it is; None without one."""

_TERMS: Final = np.dtype([("known", "f8"), ("outputs", "f8"), ("news", "f8"), ("agent", "i8"), ("pause", "f8")])


class Columns:
    """Writes the `changed` accounts into the columns of the policy; `block_tokens` are those of one block hash.

    The pause is the half-life of the forecast of the return time, since the policy lets it halve the weight of a
    workflow; the policy counts the time that has passed. Without a forecast it is the mean after a step of the agent.
    """

    def __init__(
        self, columns: WorkflowColumns, workload: WorkloadMeans, block_tokens: int, returning: Returning
    ) -> None:
        self._columns, self._workload, self._block_tokens = columns, workload, block_tokens
        self._returning = returning
        self._terms = np.zeros(0, _TERMS)
        self.changed: dict[str, Account] = {}

    def refresh(self) -> None:
        """Brings the columns of all workflows up to date."""
        if self.changed:
            self._write()
        workload, facts, terms = self._workload, self._columns.facts, self._terms
        output = np.minimum(workload.output_tokens.mean, facts["remaining"])
        facts["footprint"] = terms["known"] + terms["outputs"] * output + terms["news"] * workload.new_tokens.mean
        pause = np.where(np.isnan(terms["pause"]), workload.pauses_s()[terms["agent"]], terms["pause"])
        facts["pause"] = np.where(facts["phase"] == Phase.TOOL, pause, np.nan)

    def _write(self) -> None:
        """Writes all changed rows at once: one array assignment costs as much as a dozen elements."""
        columns, workload = self._columns, self._workload
        rows, facts, terms = [], [], []
        for name, account in self.changed.items():
            rows.append(columns.place(name))
            remaining, bound_s = account.remaining_tokens, account.bound_s
            facts.append((account.phase, account.since, 0.0, remaining, math.nan, bound_s))
            agent = workload.agent(account.workflow_type, account.agent)
            found = self._returning(name) if account.phase is Phase.TOOL else None
            pause = math.nan if found is None else found[0].half_life_s
            terms.append((*account.seen(self._block_tokens), agent, pause))
        self.changed.clear()
        missing = len(columns.facts) - len(self._terms)
        if missing:
            self._terms = np.concatenate([self._terms, np.zeros(missing, _TERMS)])
        columns.facts[rows] = np.array(facts, columns.facts.dtype)
        self._terms[rows] = np.array(terms, _TERMS)
