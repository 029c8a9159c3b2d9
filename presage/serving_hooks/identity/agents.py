"""Recognises the agent of a request by its system prompt and its tools.

Named from a trace where its fingerprint is known (`features/agent_names.py`), else `agent-<8 hex>`, unless the file of
names has a name for that. Prompts of one agent form a cluster, whose first prompt names it. Clusters are of one tenant
each and bounded; one that was dropped and comes back has the same name, since the name is a hash of the prompt's head
and the tools.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from presage.features.agent_fingerprint import (
    Fingerprint,
    MaskedPrompt,
    Pieces,
    masked_prompt,
    tools_digest,
)
from presage.features.agent_names import ID, AgentNames, Name

UNKNOWN: Final = "assistant"
"""The agent of requests without system prompt and tools."""
MOST_CLUSTERS: Final = 256
"""Agents of a tenant that are told apart at a time."""
MOST_PROMPTS: Final = 4096
"""Digests of system prompts of a tenant whose agent is remembered."""
MOST_ROLES: Final = 8
"""Agents whose prompts differ in few words only; of more, these words are values, such as a user's name."""
MOST_TOOLS: Final = 512
CONFIDENCE: Final = 0.95
"""Of an agent without a name from a trace; measured by benchmarks/gateway_identity.py."""
_LONG_NUMBERS: Final = re.compile(rb"\d[\d:.,T-]*\d")


@dataclass(frozen=True, slots=True)
class RecognisedAgent:
    """The agent of a request.

    Attributes:
        name: from a file of names, or made of a hash.
        workflow_type: from a file of names; "" if unknown.
        key: 8 hexadecimal digits, for a workflow type made of a hash.
        confidence: 0 if nothing identifies it.
        known_as: what the models call the agent with this system prompt; None if they do not know it.
    """

    name: str
    workflow_type: str
    key: str
    confidence: float
    known_as: Name | None = None


@dataclass(slots=True)
class _Cluster:
    first: Fingerprint
    tools: str
    agent: RecognisedAgent


class _Tenant:
    __slots__ = ("clusters", "prompts")

    def __init__(self) -> None:
        self.clusters: OrderedDict[str, _Cluster] = OrderedDict()
        self.prompts: OrderedDict[bytes, RecognisedAgent] = OrderedDict()


class Agents:
    """The agents of all tenants.

    Args:
        names: of agents, which count before those of models.
    """

    def __init__(self, names: AgentNames | None = None) -> None:
        self._given, self._names = names, [names] if names is not None else []
        self._models: AgentNames | None = None
        self._tenants: dict[str, _Tenant] = {}
        self._pieces: Pieces = {}

    def recognise(
        self, tenant: str, system: str, tools: Sequence[str], own_text: Callable[[str], str] = str
    ) -> RecognisedAgent:
        """The agent with this system prompt ("" for none) and these tools.

        Args:
            own_text: leaves out of a system prompt what other agents have written into it.
        """
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant()
        offered = "\0".join(tools[:MOST_TOOLS]).encode("utf-8", "surrogatepass")
        text = system.encode("utf-8", "surrogatepass")
        exact = blake2b(text + b"\0" + offered, digest_size=12).digest()
        agent = own.prompts.get(exact)
        if agent is not None:
            own.prompts.move_to_end(exact)
            return agent
        # A clock in the prompt changes it with each request: most such prompts are known without their numbers.
        timeless = blake2b(_LONG_NUMBERS.sub(b"0", text) + b"\0" + offered, digest_size=12, person=b"timeless").digest()
        agent = own.prompts.get(timeless)
        digests = [exact, timeless]
        if agent is None:
            system = own_text(system)
            prompt = masked_prompt(system, self._pieces)
            digests.append(blake2b(prompt.exact.encode() + b"\0" + offered, digest_size=12, person=b"masked").digest())
            agent = own.prompts.get(digests[-1])
        if agent is None:
            agent = self._cluster(own, system, prompt, tools[:MOST_TOOLS])
        for digest in digests:
            own.prompts[digest] = agent
            own.prompts.move_to_end(digest)
        while len(own.prompts) > MOST_PROMPTS:
            own.prompts.popitem(last=False)
        return agent

    def take_names(self, names: AgentNames | None) -> None:
        """From now on, agents have the names that the models call them by."""
        all_names = [source for source in (self._given, names) if source is not None]
        if all_names != self._names:
            self._names, self._models = all_names, names
            self._tenants.clear()  # who an agent is, is asked anew

    def may_be_renamed(self, agent: str) -> bool:
        """Whether the models have names of agents, and not this one; an id that was made here is no name."""
        return self._models is not None and agent not in self._models.agents and not ID.fullmatch(agent)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "agent_clusters": sum(len(agents.clusters) for agents in self._tenants.values()),
            "agent_prompts": sum(len(agents.prompts) for agents in self._tenants.values()),
        }

    def _cluster(self, own: _Tenant, system: str, prompt: MaskedPrompt, tools: Sequence[str]) -> RecognisedAgent:
        if not system.strip() and not tools:
            return RecognisedAgent(UNKNOWN, "", prompt.exact[:8], 0.0)
        fingerprint, offered = prompt.fingerprint(), tools_digest(tools)
        key = blake2b(f"{fingerprint.head}\0{offered}".encode(), digest_size=4).hexdigest()
        by_source = {id(names): names.find(fingerprint) for names in self._names} if system.strip() else {}
        named = next(filter(None, by_source.values()), None)
        of_models = self._models.find_reworded(fingerprint) if self._models is not None and system.strip() else None
        if named is not None:
            (workflow_type, name), similarity = named
            return RecognisedAgent(name, workflow_type, key, similarity, of_models and of_models[0])
        family = [cluster for cluster in own.clusters.values() if _alike(cluster, fingerprint, offered)]
        same = [cluster for cluster in family if cluster.first.same_agent(fingerprint)]
        if not same and len(family) >= MOST_ROLES:
            same = family
        if same:
            nearest = max(same, key=lambda cluster: cluster.first.similarity(fingerprint))
            own.clusters.move_to_end(nearest.agent.key)
            return nearest.agent
        if key in own.clusters:
            key = blake2b(f"{fingerprint.exact}\0{offered}".encode(), digest_size=4).hexdigest()
        agent_id = f"agent-{key}"
        given = next(filter(None, (names.of_id(agent_id) for names in self._names)), None)
        workflow_type, name = given or ("", agent_id)
        agent = RecognisedAgent(name, workflow_type, key, CONFIDENCE, of_models and of_models[0])
        own.clusters[key] = _Cluster(fingerprint, offered, agent)
        if len(own.clusters) > MOST_CLUSTERS:
            own.clusters.popitem(last=False)
        return agent


def _alike(cluster: _Cluster, fingerprint: Fingerprint, tools: str) -> bool:
    return cluster.tools == tools and cluster.first.resembles(fingerprint)
