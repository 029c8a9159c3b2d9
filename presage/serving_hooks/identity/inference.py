"""Identity of requests whose clients do not name their workflow: from ids that they send anyway, else from prompts.

In this order: the id of an earlier response, a trace or a conversation that came with an earlier request of a workflow;
a prompt that continues one (`presage/continuation.py`); a cache key that came with one; a prompt of a further agent
that holds what one began with (`presage/openings.py`); else nothing. Choices of one request are one step; a repeated
prompt begins anew.

A request that continues nothing may be a single one, as most chats are, or the first of a workflow. It is a workflow
at once, unless requests like it, of its agent, mostly stayed single; then it becomes one with the next request. Until
then it is served as a request without a workflow, so single requests do not weigh on those of workflows.

Agents are as the HTTP server recognised them (`observed.py`), else known by their first tokens: a name is given once
several workflows had them. Names are hashes without a key, the same after a restart.

Requests whose clients do name their workflow are looked up too, those of some workflows: how often that finds the named
one is the measured precision.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import intern
from typing import Final, Generic, Literal, TypeVar

from presage.applications import Applications
from presage.continuation import (
    CONFIDENCE,
    MOST_KNOWN,
    NAMED_FROM,
    REMEMBERED_S,
    UNKNOWN,
    UNKNOWN_TYPE,
    Link,
    PromptedWorkflow,
    PromptIndex,
    TokenPrompt,
    head_of,
)
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.openings import TEMPLATE, Openings
from presage.serving_hooks.workflows import Workflow
from presage.serving_hooks.workflows.choices import parent_of
from presage.serving_hooks.workflows.identity import BY_ID, DRAWN_IDS, IdentitySource, Step, scoped, workflow_key
from presage.serving_hooks.workflows.observed import NOTHING, Observed

SINGLE_S: Final = 120.0
"""Seconds from its answer after which a request that did not go on counts as a single one."""
MEASURED: Final = 8
"""One in so many workflows whose clients name them is looked up too."""
_MOST_IDS: Final = 2**16
_MOST_OPENINGS: Final = 4096
_MOST_PARENTS: Final = 64
_MOST_LEFT: Final = 1024
"""Requests that have left and whose answers may still be parsed."""

_MOST_PLACES: Final = 2**13
"""Requests whose place in their workflow is known."""

Checked = Literal["right", "wrong", "missed"]
"""A request of a named workflow was found to continue it, found to continue another one, or not found."""


@dataclass(slots=True, eq=False)
class Candidate(PromptedWorkflow):
    """What may be a workflow.

    Attributes:
        workflow_type, workflow_id: its names, once it is one.
        opening: what its first request looks like; requests that look alike share an `_Opening`.
        agents: of its steps.
        named: whether its client names it.
        runs: whether it is a workflow.
    """

    workflow_type: str = ""
    workflow_id: str = ""
    opening: tuple[str, str] = ("", "")
    named: bool = False
    runs: bool = False
    agents: set[str] = field(default_factory=set, repr=False)


@dataclass(slots=True)
class _Opening:
    """First requests that look alike: how many went on, how many stayed single, and how many came."""

    went_on: int = 0
    single: int = 0
    came: int = 0


@dataclass(slots=True)
class _Head:
    """An agent without a name: in how many workflows it was, and the number of the latest of these."""

    workflows: int = 0
    latest: int = 0


class Inference:
    """Identity of the requests of one engine.

    Args:
        key: of the hashes, secret where prompts are.
        block_tokens: of the blocks whose hashes prompts come with.
    """

    def __init__(self, key: bytes, block_tokens: int, clock: Callable[[], float]) -> None:
        self._sources: Counter[IdentitySource] = Counter()
        self._checked: Counter[Checked] = Counter()
        self._clock = clock
        self._known: PromptIndex[Candidate] = PromptIndex(key, block_tokens)
        self._begun_by = Openings(self._known)
        self._process = blake2b(b"process", digest_size=4, key=key[:64]).hexdigest()
        self._requests: dict[str, Candidate] = {}
        self._openings: _Latest[tuple[str, str], _Opening] = _Latest(_MOST_OPENINGS)
        self._unjudged: deque[tuple[float, Candidate]] = deque(maxlen=MOST_KNOWN)
        self._heads: _Latest[tuple[str, str], _Head] = _Latest(_MOST_OPENINGS)
        self._ids: _Latest[bytes, int] = _Latest(_MOST_IDS)
        self._applications: dict[str, Applications] = {}
        self._left: _Latest[str, tuple[Candidate, int]] = _Latest(_MOST_LEFT)
        self._places: _Latest[str, tuple[int, int]] = _Latest(_MOST_PLACES)
        self._parents: _Latest[tuple[str, Hashable], tuple[int, Step | None]] = _Latest(_MOST_PARENTS)

    def arrives(
        self,
        request_id: str,
        prompt: TokenPrompt,
        tenant: str,
        observed: Observed = NOTHING,
        folded: NameMapping = NO_NAMES,
    ) -> Step | None:
        """The step that a request is whose client names no workflow; None for one that begins what may be one.

        Args:
            tenant: of the client; "" without tenants.
            folded: names as the models have them.
        """
        self._known.expire(self._clock() - REMEMBERED_S)
        self._judge()
        parent = parent_of(request_id)
        if parent is not None and (choice := self._parents.get((parent, prompt.scope))) is not None:
            number, step = choice
            if (candidate := self._known.get(number)) is not None:
                self._requests[request_id] = candidate
            return step
        ids = _ids_of(tenant, observed)
        template = observed.agent or head_of(prompt.tokens[:TEMPLATE], least=1)
        candidate, source, confidence, link = self._owner(prompt, ids, template)
        self._sources[source] += 1
        head = (tenant, observed.agent or head_of(prompt.tokens))
        if candidate is None:
            opening = (tenant, f"{observed.workflow_type}\0{head[1]}")
            candidate = Candidate(prompt.scope, opening=opening)
            self._known.begin(candidate)
            self._begun_by.begins(candidate, prompt)
            self._openings.at(opening, _Opening).came += 1
        elif candidate.steps == 1 and not candidate.named:
            for alike in self._alike(candidate.opening):
                alike.went_on += 1
        self._begun_by.step(candidate, template)
        for kind, digest in ids:
            if kind != "response":
                self._ids.put(digest, candidate.number)
        response = _RESPONSE.match(request_id)
        if response is not None:
            self._ids.put(_digest(tenant, "response", response[0]), candidate.number)
        self._known.asked(candidate, prompt, self._clock(), link)
        begun = link.beginning if link is not None else None
        self._places.put(request_id, (candidate.steps, begun.request if begun is not None else 0))
        self._requests[request_id] = candidate
        agent = observed.agent or self._agent(head, candidate)
        step = self._step(candidate, agent, observed.workflow_type, tenant, folded, source, confidence)
        if parent is not None:
            self._parents.put((parent, prompt.scope), (candidate.number, step))
        return step

    def named(self, request_id: str, prompt: TokenPrompt, step: Step, workflow: Workflow | None) -> None:
        """A request whose client names its workflow, which is `workflow` if it runs already. One in eight is looked up.

        The choice is by the workflow, so that all requests of one are looked up, or none.
        """
        if zlib.crc32(step.workflow.encode("utf-8", "surrogatepass")) % MEASURED:
            return
        candidate = workflow.prompted if workflow is not None else None
        link = None
        if isinstance(candidate, Candidate) and self._known.get(candidate.number) is candidate:
            link = self._known.find(prompt)
            found = self._begun_by.find(prompt, step.agent, self._clock()) if link is None else link.workflow
            self._checked["missed" if found is None else "right" if found is candidate else "wrong"] += 1
        else:
            candidate = Candidate(
                prompt.scope, workflow_type=step.sent[0], workflow_id=step.workflow_id, named=True, runs=True
            )
            self._known.begin(candidate)
            self._begun_by.begins(candidate, prompt)
        self._begun_by.step(candidate, step.agent)
        self._known.asked(
            candidate, prompt, self._clock(), link if link is not None and link.workflow is candidate else None
        )
        self._requests[request_id] = candidate

    def runs(self, request_id: str, workflow: Workflow) -> None:
        """The request is a step of this running workflow."""
        candidate = self._requests.get(request_id)
        if candidate is not None:
            workflow.prompted = candidate

    def leaves(self, request_id: str, completed: bool, name: str | None = None) -> Candidate | None:
        """A request has left the engine; returns what it belongs to if its answer is to be read, by `answered`.

        A client that gives a first request up, and sends it again, has begun nothing with it. By its `name`, if it has
        one, `answered_last` knows the request.
        """
        candidate = self._requests.pop(request_id, None)
        if candidate is not None and completed and candidate.runs:
            self._left.put(name or request_id, (candidate, candidate.steps))
        if candidate is not None and completed and candidate.steps == 1 and not candidate.named:
            self._unjudged.append((self._clock(), candidate))
        if candidate is not None and not completed and candidate.steps == 1 and not candidate.named:
            self._known.forget(candidate)
        return candidate if completed else None

    def answered_last(self, name: str) -> str | None:
        """The key of the workflow whose latest step this completed request was, by its name or id."""
        candidate, steps = self._left.get(name) or (None, 0)
        return (
            workflow_key(candidate.workflow_type, candidate.workflow_id)
            if candidate is not None and candidate.steps == steps
            else None
        )

    def place(self, request_id: str) -> tuple[int, int]:
        """The number of a request in its inferred workflow, from 1, and of that whose answer it continues; else 0."""
        return self._places.get(request_id) or (0, 0)

    def answered(self, candidate: Candidate, both: TokenPrompt, prompt_tokens: int, request_id: str = "") -> None:
        """A request of it was answered; see `PromptIndex.answered`."""
        self._known.answered(candidate, both, prompt_tokens, self._clock(), self.place(request_id)[0])
        self._begun_by.answered(candidate, both, prompt_tokens)

    def ended(self, workflow: Workflow, told: bool) -> None:
        """A workflow has ended: what its prompts were is forgotten, unless nobody `told`, and it may come back."""
        candidate = workflow.prompted
        if not isinstance(candidate, Candidate):
            return
        if told:
            self._known.forget(candidate)
        else:
            candidate.runs = candidate.named

    def by_source(self) -> dict[str, int]:
        """Requests without a named workflow, by what identified theirs; "new" if nothing did."""
        return {str(source): times for source, times in self._sources.items()}

    def checks(self) -> dict[str, int]:
        """Requests of named workflows that were looked up too; see `Checked`."""
        return {str(outcome): times for outcome, times in self._checked.items()}

    @property
    def running(self) -> int:
        """Inferred workflows that run."""
        return sum(candidate.runs and not candidate.named for candidate in self._known)

    def debug_state(self) -> dict[str, int]:
        """Requests, to find leaks; what is remembered of their prompts outlives them, within bounds."""
        return {"requests of prompted workflows": len(self._requests)}

    def _owner(
        self, prompt: TokenPrompt, ids: Sequence[tuple[IdentitySource, bytes]], template: str
    ) -> tuple[Candidate | None, IdentitySource, float, Link[Candidate] | None]:
        owners = {
            kind: candidate for kind, digest in ids if (candidate := self._with_id(digest, prompt.scope)) is not None
        }
        for kind, candidate in owners.items():
            if kind != "cache key":
                return candidate, kind, BY_ID[kind], None
        link = self._known.find(prompt)
        if link is not None:
            return link.workflow, link.by, link.confidence, link
        if "cache key" in owners:
            return owners["cache key"], "cache key", BY_ID["cache key"], None
        opener = self._begun_by.find(prompt, template, self._clock())
        if opener is not None:
            return opener, "quoted", CONFIDENCE["quoted"], None
        return None, "new", 1.0, None

    def _with_id(self, digest: bytes, scope: Hashable) -> Candidate | None:
        number = self._ids.get(digest)
        candidate = self._known.get(number) if number is not None else None
        return candidate if candidate is not None and candidate.scope == scope else None

    def _judge(self) -> None:
        """Counts the first requests that stayed single, once that is clear."""
        before = self._clock() - SINGLE_S
        while self._unjudged and self._unjudged[0][0] < before:
            _, candidate = self._unjudged.popleft()
            if candidate.steps == 1:
                for alike in self._alike(candidate.opening):
                    alike.single += 1

    def _goes_on(self, opening: tuple[str, str]) -> bool:
        """Whether a first request is taken for that of a workflow: by those alike, else by all of its tenant."""
        for alike in self._alike(opening):
            if alike.went_on + alike.single >= NAMED_FROM:
                return alike.went_on >= alike.single
        return True

    def _alike(self, opening: tuple[str, str]) -> tuple[_Opening, _Opening]:
        return self._openings.at(opening, _Opening), self._openings.at((opening[0], ""), _Opening)

    def _agent(self, head: tuple[str, str], candidate: Candidate) -> str:
        """The name of an agent that only its first tokens identify; `UNKNOWN` until several workflows have shown it."""
        if not head[1]:
            return UNKNOWN
        seen = self._heads.at(head, _Head)
        if seen.latest != candidate.number:
            seen.latest, seen.workflows = candidate.number, seen.workflows + 1
        return intern(f"agent-{head[1]}") if seen.workflows >= NAMED_FROM else UNKNOWN

    def _step(
        self,
        candidate: Candidate,
        agent: str,
        workflow_type: str,
        tenant: str,
        folded: NameMapping,
        source: IdentitySource,
        confidence: float,
    ) -> Step | None:
        applications = self._applications.setdefault(tenant, Applications())
        if not candidate.runs:
            if source == "new" and not self._goes_on(candidate.opening):
                return None
            recognised = self._openings.at(candidate.opening, _Opening).came >= NAMED_FROM and agent != UNKNOWN
            begun = workflow_type or (_own_type(agent) if recognised else UNKNOWN_TYPE)
            candidate.workflow_type = applications.type_of(begun)
            candidate.workflow_id = scoped(tenant, f"{DRAWN_IDS[1]}{self._process}-{candidate.number}")
            candidate.runs = True
        if agent != UNKNOWN and not candidate.named and agent not in candidate.agents:
            own = workflow_type if workflow_type.startswith(f"{UNKNOWN_TYPE}-") else _own_type(agent)
            applications.step(own, candidate.workflow_type, begins=source == "new")
            candidate.agents.add(agent)
        return Step(
            workflow_type=intern(folded.workflow_type(candidate.workflow_type)),
            workflow_id=candidate.workflow_id,
            agent=intern(folded.agent(agent)),
            number=None if candidate.named else candidate.steps - 1,
            sent=(candidate.workflow_type, agent),
            source=source,
            confidence=confidence,
        )


def _own_type(agent: str) -> str:
    """The type of workflows that an agent begins, if nothing tells another."""
    return f"{UNKNOWN_TYPE}-{agent.removeprefix('agent-')}"


_RESPONSE: Final = re.compile(r"resp_[^_]+(?=_)")
"""The id of a response, with which vLLM's name of its request begins."""


def _ids_of(tenant: str, observed: Observed) -> list[tuple[IdentitySource, bytes]]:
    sent: list[tuple[IdentitySource, str | None]] = [
        ("response", observed.response),
        ("trace", observed.trace),
        ("conversation", observed.conversation),
        ("cache key", observed.cache_key),
    ]
    return [(kind, _digest(tenant, kind, value)) for kind, value in sent if value is not None]


def _digest(tenant: str, kind: str, sent: str) -> bytes:
    return blake2b("\0".join((tenant, kind, sent)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Latest(Generic[_Key, _Value]):
    """A table of the entries used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        return self._entries.get(key)

    def put(self, key: _Key, value: _Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def at(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        value = self._entries.get(key)
        self.put(key, value := make() if value is None else value)
        return value
