"""Whose request is it? Recognises the workflow and the agent of a request whose client was not changed.

Sources, the best first:

1. explicit: names that the client sent (`sent_names.py`)
2. session: an id of a session or conversation, in a header, a field of the API or the baggage of a trace; without a
   workflow id a session is a workflow. `prompt_cache_key` only where nothing else identifies the request and it looks
   drawn at random, since applications also set it by user or for all their requests
3. response: `previous_response_id` of an answer that passed through here
4. trace: the W3C trace id of a request that was seen before. A new trace id does not begin a workflow where the prompt
   continues one: a client without an enclosing span draws one for each request. Then a conversation in the baggage,
   which is one agent's: an agent that another one calls has its own, in the same trace
5. continuation: the prompt goes on from an earlier prompt and its answer, or holds what marks a workflow (ids of its
   tool calls, sentences of its answers), or another agent's prompt holds, inside a template, the message that began one
6. new: nothing identifies it

Whatever a request sends beside its identity is learnt, so later requests of its workflow need less.

An identical prompt is not a continuation: many workflows begin with the same prompt. Repeated by its agent, it begins a
new workflow, unless the client's library marks it as a retry (`x-stainless-retry-count`). Sent within a minute by
another agent, it is of the same workflow: a router hands a question on, or several agents get it. A prompt that goes on
from one that several workflows sent belongs to the one whose answer it holds; if they have one answer too, to one of
them that nobody went on from, or that this agent is new to.

Only digests are kept (`conversations.py`). All of it is a tenant's own: another tenant's id, trace, response or prompt
identifies nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, islice
from secrets import token_hex
from sys import intern
from typing import Any, Final, Literal

from presage.features.agent_fingerprint import LONGEST_SYSTEM
from presage.features.agent_names import AgentNames, Name
from presage.serving_hooks.counts import ERRORS, IDENTITIES, EventCounts
from presage.serving_hooks.identity.agents import UNKNOWN, Agents, RecognisedAgent
from presage.serving_hooks.identity.conversations import (
    Conversation,
    Conversations,
    Digest,
    Kind,
    Owners,
    TenantIndex,
)
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.identity.sent_names import sent_names, sent_session
from presage.serving_hooks.identity.trace_context import TraceContext, trace_context
from presage.serving_hooks.identity.turns import (
    LONGEST_TEXT,
    completion_bytes,
    edges,
    is_unique,
    of_messages,
    phrases,
    sentences,
    system_text,
    tool_ids,
    turns,
    values_of,
    without_label,
)
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import (
    BY_ID,
    DRAWN_IDS,
    IdentitySource,
    Step,
    scoped,
    tenant_of,
    workflow_key,
)
from presage.serving_hooks.workflows.metadata import SentNames, name
from presage.serving_hooks.workflows.tenants import ANONYMOUS

WorkflowSource = Literal["explicit", "session", "response", "trace", "continuation", "new"]
AgentSource = Literal["explicit", "trace", "fingerprint", "none"]

ANSWERED, PROMPT, SHARED, TOOL_ID, PASSED_ON, QUOTED = "answered", "prompt", "shared", "tool id", "passed on", "quoted"
CONFIDENCE: Final[Mapping[str, float]] = {
    "explicit": 1.0,
    **BY_ID,
    ANSWERED: 0.99,
    PROMPT: 0.95,
    SHARED: 0.9,
    TOOL_ID: 0.99,
    PASSED_ON: 0.95,
    QUOTED: 0.95,
    "new": 0.7,
}
"""Shares of requests given to the right workflow, by what identified them, rounded down. Those of continuations and new
workflows are measured (benchmarks/gateway_identity.py), the others are what the protocols promise."""

LEAST_PREFIX: Final = 64
"""Bytes of an earlier prompt that a later one must begin with, if it does not hold the answer."""
LEAST_SHARED: Final = 20
"""Bytes of a prompt that another agent may have been given too."""
SHARED_S: Final = 60.0
"""Seconds since the latest request of a workflow within which another agent joins it by the same prompt."""
LEAST_PASSED_ON: Final = 96
"""Bytes of sentences of one workflow's answers that a prompt must hold. With 48, two of a hundred pairs were wrong in
traces of agents that work on the same questions at the same time; with 96 none, at next to the same recall."""
LEAST_OWN: Final = 48
"""Bytes of an answer in the agent's own history: greetings and refusals are in many."""
LEAST_WHOLE: Final = 20
"""Bytes of an answer, of an argument of a tool call or of a tool's result, that is the whole input of another agent."""
_LEAST_WORDS: Final = 4
LEAST_QUOTED: Final = 2
"""Phrases of the message that began a workflow, and of no other that is active, that a prompt must hold."""
QUOTED_SHARE: Final = 0.9
"""Of such phrases, from the first to the last: two applications may read one document, but ask other things."""
QUOTED_S: Final = 180.0
"""Seconds since the latest request of a workflow within which its opening is compared."""
MOST_WORDS: Final = 512
"""Of the latest message and of the system prompt, each, that are compared with openings."""
MOST_SENTENCES: Final = 96
"""Of one answer."""
MOST_LOOKED_UP: Final = 256
"""Sentences of one prompt."""
_MOST_CHOICES: Final = 16
_MOST_LINES: Final = 32
_MOST_IDS: Final = 16
_LATEST: Final = 32
"""Messages at the end of a prompt whose tool calls are looked up."""
_LATEST_LEARNT: Final = 4
_LATEST_TURNS: Final = 8
_MOST_AGENTS: Final = 64
_LONGEST_ID: Final = 512
_OWN_BYTES: Final = 2**16
"""Of a prompt's end, where sentences of its answer are searched that it only repeats."""
RETRY_HEADER: Final = "x-stainless-retry-count"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is, and how sure that is.

    Attributes:
        step: workflow and agent; of a request that nothing identifies, of a workflow of its own.
        workflow_confidence, agent_confidence: share of such requests that get the right one, from 0 to 1.
        end: digest of the prompt, for `Identifier.answered`.
        number: of the request in this process, from 1.
        goes_on_from: the request of this workflow whose answer the prompt goes on from; 0 if it shows none.
        quotes: those whose answers stand in it otherwise.
        known_as: what the models call the agent with this system prompt, where they lack the agent's name.
    """

    step: Step
    workflow_source: WorkflowSource
    workflow_confidence: float
    agent_source: AgentSource
    agent_confidence: float
    end: bytes = field(default=b"", repr=False, compare=False)
    known_as: Name | None = None
    number: int = field(default=0, compare=False)
    goes_on_from: int = field(default=0, compare=False)
    quotes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class _Prompt:
    """What is compared of a prompt.

    Attributes:
        points: digests of its beginnings, the longest first, with their lengths in bytes; the first is all of it.
    """

    turns: list[bytes]
    points: list[tuple[bytes, int]]
    links: list[bytes]
    end: bytes
    size: int


@dataclass(frozen=True, slots=True)
class _Link:
    """A workflow, and what identified it.

    Attributes:
        own: turns at the beginning of the prompt that hold an answer of this workflow, so that no other has them; 0 if
            the prompt does not show that.
        marks: digests of what it holds of answers.
    """

    conversation: Conversation
    source: WorkflowSource
    confidence: float
    own: int = 0
    marks: tuple[bytes, ...] = ()


class Identifier:
    """Identity of requests, on one thread.

    Args:
        names: of agents, from a file.
        counts: where identities are counted by their sources.
        most_conversations: workflows that are known at a time.

    Attributes:
        agents: whose requests they are.
    """

    def __init__(self, *, names: AgentNames | None = None, counts: EventCounts, most_conversations: int) -> None:
        self._counts = counts
        self._conversations = Conversations(most_conversations)
        self.agents = Agents(names)
        self._process, self._numbers, self._requests = token_hex(4), count(), count(1)

    def identify(self, request: ApiRequest) -> Identity:
        """The identity of a request that has arrived. Does not raise."""
        try:
            identity = self._identify(request)
        except Exception as error:
            self._counts.add(ERRORS, "identity", type(error).__name__)
            identity = Identity(Step("", scoped(request.tenant, self._new_id()), ""), "new", 0.0, "none", 0.0)
        self._counts.add(IDENTITIES, identity.workflow_source, identity.agent_source)
        return identity

    def answered(
        self, identity: Identity, request: ApiRequest, response_id: str | None, answers: Sequence[Any]
    ) -> None:
        """The answers to a request, one a choice (of the responses API: its output items). Does not raise."""
        try:
            self._answered(identity, request, response_id, answers)
        except Exception as error:
            self._counts.add(ERRORS, "identity", type(error).__name__)

    def ended(self, workflow: Workflow, reason: EndReason = EndReason.FINISHED) -> None:
        """A workflow has ended: what is kept of it is dropped, but for what tells one that goes on after it expired."""
        step = workflow.step
        self._conversations.forget(tenant_of(step.workflow_id), step.workflow, reason is EndReason.EXPIRED)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {**self._conversations.debug_state(), **self.agents.debug_state()}

    def _identify(self, request: ApiRequest) -> Identity:
        tenant, system = request.tenant, system_text(request, LONGEST_SYSTEM)
        index = self._conversations.of(tenant)
        agent = self.agents.recognise(tenant, system, request.tools, partial(_own_text, index))
        if tenant == ANONYMOUS:  # whoever they are, they are not one client
            step = Step(request.given_type or f"app-{agent.key}", scoped(tenant, self._new_id()), agent.name)
            return Identity(step, "new", CONFIDENCE["new"], "fingerprint" if agent.confidence else "none", 0.0)
        sent, trace = sent_names(request, self._counts), trace_context(request.headers)
        prompt = _read(index, request)
        link = self._workflow(index, request, sent, trace, prompt, agent, system)
        role, agent_source, agent_confidence = self._role(sent, trace, agent)
        conversation = link.conversation
        number, goes_on_from = next(self._requests), _goes_on_from(conversation, prompt, role)
        quoted = (conversation.requests[mark][0] for mark in link.marks if mark in conversation.requests)
        quotes = () if goes_on_from else tuple(sorted(set(quoted)))
        self._learn(index, link, request, trace, prompt, role, agent)
        if prompt.end:
            conversation.requests[prompt.end] = number, role
        source: IdentitySource = "prompt" if link.source == "continuation" else link.source
        names = conversation.workflow_type, conversation.workflow_id, role
        step = Step(*names, sent.number, sent.last, source=source, confidence=link.confidence)
        known_as = agent.known_as if self.agents.may_be_renamed(role) else None
        how = link.source, link.confidence, agent_source, agent_confidence
        return Identity(step, *how, prompt.end, known_as, number, goes_on_from, quotes)

    def _role(self, sent: SentNames, trace: TraceContext, agent: RecognisedAgent) -> tuple[str, AgentSource, float]:
        if sent.agent:
            return intern(str(sent.agent)), "explicit", 1.0
        named = name(trace.agent, "agent", self._counts)
        if named:
            return intern(str(named)), "trace", CONFIDENCE["trace"]
        return intern(agent.name), "fingerprint" if agent.confidence else "none", agent.confidence

    def _workflow(
        self,
        index: TenantIndex,
        request: ApiRequest,
        sent: SentNames,
        trace: TraceContext,
        prompt: _Prompt,
        agent: RecognisedAgent,
        system: str,
    ) -> _Link:
        """The workflow of a request, a new one if it continues none."""
        tenant = request.tenant
        given_type = sent.workflow_type or name(trace.workflow_type, "workflow_type", self._counts)
        workflow_type = given_type or request.given_type or agent.workflow_type
        workflow_type = workflow_type or index.applications.type_of(f"app-{agent.key}")
        session = sent.workflow_id or sent.session_id or sent_session(request, self._counts)
        session = session or name(trace.session, "session_id", self._counts)
        if session:
            named = self._named(index, tenant, session, sent.workflow_type, workflow_type)
            return _Link(named, "explicit" if sent.workflow_id else "session", CONFIDENCE["session"])
        owner = _only(index, "response", request.body.get("previous_response_id"))
        if owner is not None:
            return _Link(owner, "response", CONFIDENCE["response"])
        owner = _only(index, "trace", trace.trace_id)
        if owner is not None:
            return _Link(owner, "trace", CONFIDENCE["trace"])
        conversation = name(trace.conversation, "session_id", self._counts)
        if conversation:
            named = self._named(index, tenant, conversation, sent.workflow_type, workflow_type)
            return _Link(named, "session", CONFIDENCE["session"])
        link = _continued(index, prompt, agent.name, request.headers.get(RETRY_HEADER))
        if link is not None:
            return link
        owner = _only(index, "cache key", _cache_key(request))
        if owner is not None:
            return _Link(owner, "session", CONFIDENCE["cache key"])
        link = _marked(index, request, prompt, system, agent.name)
        opening, above = prompt.turns[-1] if prompt.turns else b"", system.encode("utf-8", "surrogatepass")
        asked, under = phrases(opening, MOST_WORDS), phrases(above, MOST_WORDS)
        if link is None and agent.confidence:
            link = _shared(index, prompt, agent.name, request.at_s)
            if link is not None and link.conversation not in index.owners("prompts", prompt.points[0][0]):
                index.add_opening(link.conversation, asked, edges(opening), under)
        link = link or _quoted(index, prompt, asked, under, agent.name, request.at_s)
        if link is not None:
            return link
        workflow_id = f"trace-{trace.trace_id}" if trace.trace_id else self._new_id()
        begun: WorkflowSource = "trace" if trace.trace_id else "new"
        begins = self._begin(tenant, workflow_type, workflow_id)
        index.add_opening(begins, asked, edges(opening), under)
        for line in islice(_lines([opening]), _MOST_LINES):
            index.add(begins, "marks", index.digest("asked", line))
        return _Link(begins, begun, CONFIDENCE[begun])

    def _named(
        self, index: TenantIndex, tenant: str, workflow_id: str, given_type: str | None, workflow_type: str
    ) -> Conversation:
        digest = index.digest("workflow", workflow_id.encode())
        owners = [owner for owner in index.owners("ids", digest) if given_type in (None, owner.workflow_type)]
        conversation = owners[-1] if owners else self._begin(tenant, workflow_type, workflow_id)
        index.add(conversation, "ids", digest)
        return conversation

    def _begin(self, tenant: str, workflow_type: str, workflow_id: str) -> Conversation:
        workflow_type, scoped_id = intern(str(workflow_type)), scoped(tenant, workflow_id)
        conversation = Conversation(tenant, workflow_type, scoped_id, workflow_key(workflow_type, scoped_id))
        self._conversations.begin(conversation)
        return conversation

    def _new_id(self) -> str:
        return f"{DRAWN_IDS[0]}{self._process}-{next(self._numbers)}"

    def _learn(
        self,
        index: TenantIndex,
        link: _Link,
        request: ApiRequest,
        trace: TraceContext,
        prompt: _Prompt,
        role: str,
        agent: RecognisedAgent,
    ) -> None:
        conversation = link.conversation
        if agent.confidence and role not in conversation.agents:
            index.applications.step(f"app-{agent.key}", conversation.workflow_type, not conversation.agents)
        index.conversations.move_to_end(conversation.workflow)
        conversation.active_at = request.at_s
        if len(conversation.agents) < _MOST_AGENTS:
            conversation.agents[role] = None
        for what, sent in (("trace", trace.trace_id), ("cache key", _cache_key(request))):
            if sent:
                index.add(conversation, "ids", index.digest(what, sent.encode()))
        for tool_id in _tool_ids(request, _LATEST_LEARNT):
            index.add(conversation, "ids", index.digest("tool", tool_id.encode()))
        for result in filter(_is_telling, _tool_results(request)):  # a handoff may pass it on without its call
            index.add(conversation, "marks", index.digest("whole", result))
        kind: Kind = "answered" if link.own else "prompts"
        if prompt.links:
            index.add_text(conversation, kind, prompt.turns[0], prompt.links)
        elif prompt.turns:
            index.add(conversation, kind, prompt.end)
            if 0 < link.own < len(prompt.turns) - 1:  # clients change the latest message when it has been answered
                index.add(conversation, kind, prompt.points[1][0])

    def _answered(self, identity: Identity, request: ApiRequest, response_id: object, answers: Sequence[Any]) -> None:
        index = self._conversations.of(request.tenant)
        conversation = index.conversations.get(identity.step.workflow)
        if conversation is None:  # it has ended, or its tenant is nobody
            return
        if isinstance(response_id, str) and 0 < len(response_id) <= _LONGEST_ID:
            index.add(conversation, "ids", index.digest("response", response_id.encode("utf-8", "surrogatepass")))
        given = list(answers[:_MOST_CHOICES]) if request.endpoint != "responses" else [list(answers)]
        texts: list[bytes] = []
        of_this = identity.number, identity.step.sent[1]
        for answer in given:
            parts = answer if isinstance(answer, list) else [answer]
            said = of_messages(parts)
            texts += said
            if request.endpoint == "completions":
                text = completion_bytes(request.body.get("prompt")) + _raw(answer)
                index.add_text(conversation, "answered", text, index.links(text))
            elif said and identity.end:
                answered = index.chain(said, identity.end)[-1]
                index.add(conversation, "answered", answered)
                conversation.requests[answered] = of_this
            for part in parts:
                for tool_id in tool_ids(part):
                    index.add(conversation, "ids", index.digest("tool", tool_id.encode()))
        own = _own(request)
        for value in [value for text in texts for value in values_of(text)]:
            marks = [("sentence", sentence) for sentence in sentences(value, MOST_SENTENCES) if sentence not in own]
            if _is_telling(value) and value not in own:
                marks.append(("whole", value))
                if b"\n" not in value and value not in texts:
                    marks.append(("line", without_label(value)))
            for what, mark in marks:
                digest = index.digest(what, mark)
                index.add(conversation, "marks", digest)
                conversation.requests[digest] = of_this


def _read(index: TenantIndex, request: ApiRequest) -> _Prompt:
    if request.endpoint == "completions":
        text = completion_bytes(request.body.get("prompt"))
        if not text:
            return _Prompt([], [], [], b"", 0)
        links = index.links(text)
        return _Prompt([text], index.text_points(text, links), links, b"", len(text))
    read_turns = turns(request)
    digests = index.chain(read_turns)
    lengths = list(accumulate(map(len, read_turns)))
    points = list(zip(reversed(digests), reversed(lengths), strict=True))
    return _Prompt(read_turns, points, [], digests[-1] if digests else b"", lengths[-1] if lengths else 0)


def _continued(index: TenantIndex, prompt: _Prompt, agent: str, retry: object) -> _Link | None:
    """The workflow that sent the longest beginning of this prompt."""
    for place, (digest, length) in enumerate(prompt.points):
        own = len(prompt.points) - place
        owners = index.owners("answered", digest)
        if owners:
            alone = len(owners) == 1
            owner = owners[0] if alone else _least_continued(owners, digest, agent)
            index.continued(owner, "answered", digest)
            return _Link(owner, "continuation", CONFIDENCE[ANSWERED] / len(owners), own if alone else 0)
        retried = length == prompt.size and retry not in (None, "0")
        if length < LEAST_PREFIX and not retried:
            continue
        owners = index.owners("prompts", digest)
        if length == prompt.size:
            owners = owners[-1:] if retried else ()
        whole = prompt.end or index.digest("prompt", prompt.turns[0])
        # Many workflows may begin like this, but only one did.
        if len(owners) == 1 and (retried or index.goes_on(owners[0], digest, whole)):
            index.continued(owners[0], "prompts", digest)
            return _Link(owners[0], "continuation", CONFIDENCE[PROMPT])
    return None


def _goes_on_from(conversation: Conversation, prompt: _Prompt, agent: str) -> int:
    """The latest request of the workflow with whose prompt and answer, or own agent's prompt, this prompt begins."""
    for digest, length in prompt.points if prompt.end else ():
        number, by = conversation.requests.get(digest, (0, ""))
        if number and length < prompt.size and (by == agent or digest in conversation.digests["answered"]):
            return number
    return 0


def _least_continued(owners: Owners, digest: bytes, agent: str) -> Conversation:
    return min(owners, key=lambda owner: (owner.digests["answered"].get(digest, 0), agent not in owner.agents))


def _shared(index: TenantIndex, prompt: _Prompt, agent: str, now: float) -> _Link | None:
    """The only workflow with this prompt, or that began with it as a line of a longer message, in which this agent has
    sent nothing; with several, precision goes first.
    """
    if prompt.size < LEAST_SHARED or not prompt.points:
        return None
    asked = prompt.turns[-1]
    line = index.owners("marks", index.digest("asked", without_label(asked))) if b"\n" not in asked else ()
    fits = [
        owner
        for owner in {*index.owners("prompts", prompt.points[0][0]), *line}
        if agent not in owner.agents and now - owner.active_at <= SHARED_S
    ]
    return _Link(fits[0], "continuation", CONFIDENCE[SHARED]) if len(fits) == 1 else None


def _quoted(
    index: TenantIndex, prompt: _Prompt, asked: Sequence[int], under: Sequence[int], agent: str, now: float
) -> _Link | None:
    """The only active workflow whose whole opening stands in a message or its system prompt, all by phrases, or in the
    first message, if the agent is new to it.

    Phrases that several active workflows have are those of a template, or of a question that two have at a time. A
    message that is the opening, or to the same agent begins as it does, is a new one.
    """

    def only(phrase: Digest) -> Conversation | None:
        if phrase in index.common:
            return None
        active = [owner for owner in index.owners("openings", phrase) if now - owner.active_at <= QUOTED_S]
        return active[0] if len(active) == 1 else None

    first = phrases(prompt.turns[0], MOST_WORDS) if len(prompt.turns) > 1 else ()
    held = {*asked, *under, *first}
    counts = Counter(owner for owner in map(only, held) if owner is not None)
    best = counts.most_common(2)
    if not best or best[0][1] < LEAST_QUOTED or (len(best) > 1 and best[1][1] * 2 > best[0][1]):
        return None
    owner = best[0][0]
    sent = index.owners("prompts", prompt.points[0][0]) if prompt.points else ()
    is_new = agent not in owner.agents and owner not in sent
    opening = list(owner.digests["openings"])
    if not is_new:
        held -= {*first} - {*asked, *under}
    # Of what began it, its agent has a template, which may still be unknown.
    begins = agent == next(iter(owner.agents))
    own = [phrase in held for phrase in opening if (begins and agent != UNKNOWN) or only(phrase) is owner]
    if not any(own):
        return None
    begin, end = own.index(True), len(own) - own[::-1].index(True)
    # Phrases across the edge of the first agent's template are in no other prompt: as many as it has words, up to 4.
    template = [max((n for n, edge in enumerate(edges, 1) if edge in index.common), default=0) for edges in owner.edges]
    whole = begin <= template[0] and len(own) - end <= template[1]
    again = (asked and {*asked} <= {*opening}) or (begins and asked[:1] == opening[:1])
    if again or not whole or sum(own) < QUOTED_SHARE * (end - begin):
        return None
    return _Link(owner, "continuation", CONFIDENCE[QUOTED])


def _own_text(index: TenantIndex, system: str) -> str:
    """A system prompt without the sentences that answers have written into it."""
    text = system.encode("utf-8", "surrogatepass")
    for sentence in sentences(text, MOST_LOOKED_UP):
        if index.owners("marks", index.digest("sentence", sentence)):
            text = text.replace(sentence, b"")
    return text.decode("utf-8", "surrogatepass")


def _sole(owners: Owners, agent: str) -> Conversation | None:
    """The only workflow, or the only one that this agent is new to."""
    fits = owners if len(owners) == 1 else [owner for owner in owners if agent not in owner.agents]
    return fits[0] if len(fits) == 1 else None


def _marked(index: TenantIndex, request: ApiRequest, prompt: _Prompt, system: str, agent: str) -> _Link | None:
    """The workflow whose tool calls or answers this prompt holds."""
    for tool_id in _tool_ids(request, _LATEST):
        owner = _only(index, "tool", tool_id)
        if owner is not None:
            return _Link(owner, "continuation", CONFIDENCE[TOOL_ID])
    places, (handed, results) = range(len(prompt.turns) - 1, -1, -1), _handed(request)
    for place in (*places[:_LATEST_TURNS], *places[max(_LATEST_TURNS, len(places) - 1) :]):
        turn = prompt.turns[place]
        digest = index.digest("whole", turn)
        owner = _sole(index.owners("marks", digest), agent)
        # Many conversations hold one short answer, or one result of a tool.
        told = turn not in results and (not place or turn in handed or len(turn) >= LEAST_OWN)
        if owner is not None and told:
            index.add(owner, "marks", digest)  # now the latest
            own = place + 1 if place < len(places) - 1 else 0
            return _Link(owner, "continuation", CONFIDENCE[PASSED_ON], own, (digest,))
    for line in _lines([*handed, system.encode("utf-8", "surrogatepass")]):
        digest = index.digest("line", line)
        owner = _sole(index.owners("marks", digest), agent)
        if owner is not None:
            return _Link(owner, "continuation", CONFIDENCE[PASSED_ON], 0, (digest,))
    matched: dict[Conversation, list[bytes]] = defaultdict(list)
    lengths: Counter[Conversation] = Counter()
    for sentence in _sentences(prompt.turns, system):
        digest = index.digest("sentence", sentence)
        owner = _sole(index.owners("marks", digest), agent)
        if owner is not None:
            matched[owner].append(digest)
            lengths[owner] += len(sentence)
    best = lengths.most_common(2)
    if not best or best[0][1] < LEAST_PASSED_ON or (len(best) > 1 and best[1][1] * 2 > best[0][1]):
        return None
    owner = best[0][0]
    for digest in matched[owner]:
        index.add(owner, "marks", digest)
    return _Link(owner, "continuation", CONFIDENCE[PASSED_ON], 0, tuple(matched[owner]))


def _lines(texts: Sequence[bytes]) -> dict[bytes, None]:
    """Lines that may be the argument of a call, in the template of the agent that it calls."""
    lines = (line for text in texts for line in text[:LONGEST_TEXT].split(b"\n", MOST_LOOKED_UP)[:MOST_LOOKED_UP])
    return dict.fromkeys(filter(_is_telling, map(without_label, islice(lines, MOST_LOOKED_UP))))


def _sentences(texts: Sequence[bytes], system: str) -> dict[bytes, None]:
    unique = dict.fromkeys(sentences(system.encode("utf-8", "surrogatepass"), MOST_LOOKED_UP // 4))
    for text in reversed(texts):
        if len(unique) >= MOST_LOOKED_UP:
            break
        unique |= dict.fromkeys(sentences(text, MOST_LOOKED_UP - len(unique)))
    return unique


def _only(index: TenantIndex, kind: str, sent: object) -> Conversation | None:
    """The workflow with this id, if there is only one."""
    if not isinstance(sent, str) or not 0 < len(sent) <= _LONGEST_ID:
        return None
    owners = index.owners("ids", index.digest(kind, sent.encode("utf-8", "surrogatepass")))
    return owners[0] if len(owners) == 1 else None


def _cache_key(request: ApiRequest) -> str | None:
    key = request.body.get("prompt_cache_key")
    return key if isinstance(key, str) and is_unique(key) else None


def _tool_ids(request: ApiRequest, latest: int) -> list[str]:
    messages: list[Any] = request.messages[-latest:] if isinstance(request.messages, list) else []
    return list(islice((tool_id for message in reversed(messages) for tool_id in tool_ids(message)), _MOST_IDS))


def _tool_results(request: ApiRequest) -> list[bytes]:
    """Results of tools among the latest messages."""
    latest = request.messages[-_LATEST_LEARNT:] if isinstance(request.messages, list) else []
    return of_messages(list(filter(_is_result, latest)))


def _is_result(message: object) -> bool:
    return isinstance(message, dict) and (
        message.get("role") in ("tool", "function") or str(message.get("type")).endswith("_output")
    )


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and (
        message.get("role") == "assistant" or str(message.get("type")).endswith("_call")
    )


def _handed(request: ApiRequest) -> tuple[list[bytes], list[bytes]]:
    """The turns after the agent's own latest answer, which others may have handed on, and the results of its tools."""
    given = request.messages if isinstance(request.messages, list) else [request.messages]
    results = list(filter(_is_result, given[-_LATEST:]))
    place = len(given)
    while place and not _is_answer(given[place - 1]):
        place -= 1
    return of_messages([message for message in given[place:] if not _is_result(message)]), of_messages(results)


def _is_telling(text: bytes) -> bool:
    """Whether a whole text is long enough to be told apart."""
    return len(text) >= LEAST_WHOLE and text.count(b" ") >= _LEAST_WORDS - 1


def _own(request: ApiRequest) -> bytes:
    """The end of a prompt with its system prompt: what an answer may only repeat."""
    if request.endpoint == "completions":
        return completion_bytes(request.body.get("prompt"))[-_OWN_BYTES:]
    given = request.messages
    latest = of_messages(given[-_LATEST:] if isinstance(given, list) else given)
    values = [value for turn in latest for value in values_of(turn)]
    return b"\n".join((system_text(request, LONGEST_SYSTEM).encode("utf-8", "surrogatepass"), *values))[-_OWN_BYTES:]


def _raw(answer: object) -> bytes:
    """The text of a completion, to the letter."""
    content = answer.get("content") if isinstance(answer, dict) else answer
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else b""
