"""The state of each workflow that admission decides on: its phase, its context, and how long it has been held.

Its context is the blocks it has used so far (only their hashes are kept), each once, less those that it shares with
other workflows of its type, plus the prompt that waits. What it will grow to is forecast by a model, or follows from
the steps that workflows of its type take and the tokens that each adds.

A decision reads the accounts as columns. A row is rewritten only when its own account changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from presage.serving_hooks.policies.admission import Phase
from presage.serving_hooks.policies.distinct import Distinct


@dataclass(slots=True)
class AdmissionRequest:
    """A request of a workflow.

    Attributes:
        new_tokens, reusable_tokens: of its prompt, by whether the workflow had computed them.
        held_before_s: seconds the workflow had been held when the request arrived.
        step: its number, from 1, once it has begun.
    """

    agent: str
    new_tokens: int
    reusable_tokens: int
    held_before_s: float = 0.0
    begun: bool = False
    step: int = 0


MOST_AGENTS: Final = 32
"""Agents of one workflow whose latest step is kept."""

_NONE: Final[dict[str, AdmissionRequest]] = {}
"""The requests of a workflow without any; never written to."""


@dataclass(slots=True)
class Account:
    """One workflow.

    Attributes:
        since: the start of its phase, in seconds of the caller's clock.
        agent: of the request that arrived last.
        held_s: seconds its requests were held over its life, up to `held_since` if they are held now.
        blocks, shared: all of its blocks, and those that it shares with other workflows.
        context_tokens: when a request arrived last, its own blocks and the prompt that came.
        first_tokens: the same when its first one arrived.
        foreseen: its own tokens when its growth was forecast last, and that growth; None without a forecast.
        latest: by agent the number of its latest step, and the blocks of its prompt and answer.
        bound_s: seconds for which it may wait over its life.
        deadline_at: when it has to have ended, on the caller's clock; infinity without a deadline.
        began_at: when its latest request began.
        aborted, expired: whether its client has aborted it, and whether nobody told its end.
        changed: whether its row in the columns of the policy is out of date.
    """

    workflow_type: str
    since: float
    held: bool = False
    phase: Phase = Phase.TOOL
    agent: str = ""
    requests: dict[str, AdmissionRequest] = field(default_factory=lambda: _NONE)
    blocks: Distinct = field(default_factory=Distinct)
    shared: Distinct = field(default_factory=Distinct)
    steps: int = 0
    context_tokens: float = 0.0
    first_tokens: float = 0.0
    foreseen: tuple[float, float] | None = None
    latest: dict[str, tuple[int, int]] = field(default_factory=dict)
    held_since: float | None = None
    held_s: float = 0.0
    bound_s: float = math.inf
    deadline_at: float = math.inf
    began_at: float = 0.0
    aborted: bool = False
    expired: bool = False
    changed: bool = False

    def arrives(self, request_id: str, agent: str, prompt_tokens: int, reusable_tokens: int, now: float) -> None:
        """A request arrives."""
        self.agent = agent
        self.requests = self.requests or {}
        self.requests[request_id] = AdmissionRequest(
            agent, prompt_tokens - reusable_tokens, reusable_tokens, self.waited_s(now)
        )
        self._move(now)

    def begins(self, request_id: str, hashes: Sequence[bytes], now: float) -> AdmissionRequest:
        """A request is selected for the first time."""
        request = self.requests[request_id]
        request.begun = True
        self.blocks.add(hashes)
        self.steps += 1
        request.step = self.steps
        self._move(now)
        return request

    def leaves(self, request_id: str, hashes: Sequence[bytes], now: float) -> None:
        """A request leaves the engine with these blocks computed."""
        request = self.requests.pop(request_id)
        if request.begun and (request.agent in self.latest or len(self.latest) < MOST_AGENTS):
            self.latest[request.agent] = request.step, len(hashes)
        if not self.requests:
            self.requests = _NONE  # an emptied table keeps its size
        self.blocks.add(hashes)
        self._move(now)

    def hold(self, held: bool, now: float) -> bool:
        """Sets whether it is held; returns whether that changed."""
        changed, self.held = held is not self.held, held
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

    def apart(self, agent: str, known_blocks: int) -> int:
        """Steps since the known blocks of a prompt were used.

        That was in the latest step, unless an agent continues its own conversation, of which no other step has more.
        """
        step, blocks = self.latest.get(agent, (self.steps, 0))
        return self.steps - step + 1 if known_blocks <= blocks else 1

    def own_tokens(self, block_tokens: int) -> int:
        """Tokens of the blocks that no other workflow has, and of prompts that have not begun."""
        waiting = sum([request.new_tokens for request in self.requests.values() if not request.begun])
        return max(0, len(self.blocks) - len(self.shared)) * block_tokens + waiting

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


class SharedPrefixes:
    """The prefixes that workflows share: system prompts and tools of an agent.

    Each agent's latest first prompt is kept, as hashes; the prompt of another workflow shares the blocks that it begins
    with. Beyond `most` agents the least recently seen one is dropped.
    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._latest: OrderedDict[tuple[str, str], Distinct] = OrderedDict()
        self._shared: dict[str, Distinct] = {}

    def __len__(self) -> int:
        """Number of shared blocks, each once."""
        return sum(map(len, self._shared.values()))

    def first_prompt(self, workflow_type: str, agent: str, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The first prompt of an agent in a workflow; returns the blocks that it shares with another workflow."""
        latest = self._latest.get((workflow_type, agent))
        shared = hashes[: latest.known(hashes)] if latest is not None else ()
        if shared:
            self._shared.setdefault(workflow_type, Distinct()).add(shared)
        self._latest[workflow_type, agent] = kept = Distinct()
        kept.add(hashes)
        self._latest.move_to_end((workflow_type, agent))
        if len(self._latest) > self._most:
            (gone, _), _ = self._latest.popitem(last=False)
            if all(name != gone for name, _ in self._latest):
                self._shared.pop(gone, None)
        return shared
