"""Names of agents by fingerprints of their system prompts, learnt from a trace: JSON, in an artefact or in a file.

    {"format": "presage-agent-names", "format_version": 1, "agents": [
      {"workflow_type": "review", "agent": "coder", "exact": "…", "head": "…", "sketch": [1, …], "words": [5, …]}, …]}

It holds names and hashes, and no text. A trace has no sets of tools, so two agents with one system prompt have none of
its names. An artefact has those of its training traces: an engine calls an agent what its models call it. Agents that
were seen while serving can be named by their ids; a file with such names is of format version 2:

    "ids": {"agent-0a1b2c3d": ["review", "coder"], …}
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import pyarrow as pa

from presage.atomic_file import write_file
from presage.datasets.schema.names import MAX_NAME
from presage.errors import ArtefactError, InputError
from presage.features.agent_fingerprint import Fingerprint, Pieces, masked_prompt
from presage.features.vocabulary import Vocabulary, codes
from presage.wording import nearest

FORMAT: Final = "presage-agent-names"
FORMAT_VERSIONS: Final = (1, 2)
ARTEFACT_FILE: Final = "agent_names.json"
"""Of a predictor, in its artefact."""
MOST_PROMPTS: Final = 64
"""Fingerprints of one agent that a file has, the most frequent ones."""
FEW_PROMPTS: Final = 4
"""Of one agent in an artefact, none of which resembles another one: 3 kB each, where a model may have 1.5 MB."""
LEAST_SHARED: Final = 0.25
"""Of the weight of the words of two prompts: what a prompt shares with the one that it was before."""
LEAST_LEAD: Final = 0.15
"""By how much another agent shares less."""
_MOST_READ: Final = 1024
"""System prompts of one agent that are read, the most frequent ones: one with a clock in it has one a request."""
_COLUMNS: Final = ("workflow_type", "agent", "system_prompt")

ID: Final = re.compile(r"agent-[0-9a-f]{8}")
"""What an agent without a name is called."""

Name = tuple[str, str]
"""Workflow type, "" if it is unknown, and agent."""


class AgentNames:
    """Names of agents by fingerprint, and by the ids that agents without a name have."""

    def __init__(self, known: Iterable[tuple[Fingerprint, Name]], ids: Mapping[str, Name] | None = None) -> None:
        self._known, self._ids = list(known), dict(ids or {})
        exact: dict[str, set[Name]] = defaultdict(set)
        self._by_head: dict[str, list[tuple[Fingerprint, Name]]] = defaultdict(list)
        for fingerprint, name in self._known:
            exact[fingerprint.exact].add(name)
            self._by_head[fingerprint.head].append((fingerprint, name))
        self._exact = {digest: next(iter(names)) for digest, names in exact.items() if len(names) == 1}
        self._shared = {digest for digest, names in exact.items() if len(names) > 1}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, found: Fingerprint) -> tuple[Name, float] | None:
        """The name of an agent and the similarity of its system prompt; None if it is unknown or has several names."""
        if found.exact in self._exact:
            return self._exact[found.exact], 1.0
        if found.exact in self._shared:
            return None
        best: dict[Name, float] = {}
        for candidate, name in self._by_head.get(found.head, ()):
            if found.same_agent(candidate):
                best[name] = max(best.get(name, 0.0), found.similarity(candidate))
        if not best:
            return None
        name = max(best, key=best.__getitem__)
        return (name, best[name]) if list(best.values()).count(best[name]) == 1 else None

    def find_reworded(self, found: Fingerprint) -> tuple[Name, float] | None:
        """As `find`; and if it knows none, the name of the agent whose system prompt most likely became this one.

        For agents under names that nobody knows. Prompts are compared by their plain words, each with the weight of an
        inverse document frequency over the agents (Spärck Jones, "A statistical interpretation of term specificity",
        1972), so that what the prompts of an application have in common tells nothing. The best must share
        LEAST_SHARED of the weight, and LEAST_LEAD more than the second (`benchmarks/reworded_prompts.py`).
        """
        same = self.find(found)
        if same is not None or found.exact in self._shared:
            return same
        weights, of_unknown, totals = self._weights
        own = sum(weights.get(word, of_unknown) for word in found.words)
        shared: dict[Name, float] = {}
        for (candidate, name), total in zip(self._known, totals, strict=True):
            both = sum(weights[word] for word in found.words & candidate.words)
            shared[name] = max(shared.get(name, 0.0), both / (own + total - both) if both else 0.0)
        if not shared:
            return None
        best = max(shared, key=shared.__getitem__)
        second = max((share for name, share in shared.items() if name != best), default=0.0)
        sure = shared[best] >= LEAST_SHARED and shared[best] - second >= LEAST_LEAD
        return (best, shared[best]) if sure else None

    @cached_property
    def _weights(self) -> tuple[Mapping[int, float], float, Sequence[float]]:
        """The weight of each word, of one that no prompt has, and of all words of each fingerprint."""
        words: dict[Name, set[int]] = defaultdict(set)
        for fingerprint, name in self._known:
            words[name] |= fingerprint.words
        counts = Counter(word for own_words in words.values() for word in own_words)
        weights = {word: math.log((len(words) + 1) / count) for word, count in counts.items()}
        return (
            weights,
            math.log(len(words) + 1),
            [sum(map(weights.__getitem__, fingerprint.words)) for fingerprint, _ in self._known],
        )

    @cached_property
    def agents(self) -> frozenset[str]:
        """All agents with a fingerprint."""
        return frozenset(name[1] for _, name in self._known)

    def of_id(self, agent_id: str) -> Name | None:
        """The name of an agent with this id; None if it has none."""
        return self._ids.get(agent_id)

    def renamed(self, given: Mapping[str, str], workflow_type: str | None = None) -> AgentNames:
        """With other names.

        Args:
            given: the new name by id, or by the name so far.
            workflow_type: of agents that are given by their ids; of the others, only those of this type are renamed.

        Raises:
            InputError: an agent is unknown, or a name is no sound one.
        """
        by_fingerprint, ids = list(self._known), dict(self._ids)
        for agent, new in given.items():
            _check(new)
            if ID.fullmatch(agent):
                ids[agent] = (_check(workflow_type or ids.get(agent, ("",))[0]), new)
                continue
            agents = {name[1] for _, name in by_fingerprint if workflow_type in (None, name[0])}
            agents |= {name[1] for name in ids.values() if workflow_type in (None, name[0])}
            if agent not in agents:
                meant = nearest(agent, agents)
                hint = f"; did you mean {meant}?" if meant else ""
                raise InputError(f"{agent}: neither an id (agent- and 8 hexadecimal digits) nor an agent{hint}")

            def now(name: Name, agent: str = agent, new: str = new) -> Name:
                return (name[0], new) if name[1] == agent and workflow_type in (None, name[0]) else name

            by_fingerprint = [(fingerprint, now(name)) for fingerprint, name in by_fingerprint]
            ids = {agent_id: now(name) for agent_id, name in ids.items()}
        return AgentNames(by_fingerprint, ids)

    @classmethod
    def learn(cls, table: pa.Table) -> AgentNames:
        """Names from a trace with the column `system_prompt`.

        Raises:
            InputError: the trace has no system prompts.
        """
        if any(name not in table.column_names for name in _COLUMNS):
            raise InputError("the trace has no column system_prompt: agents cannot be recognised by it; record texts")
        by_name: dict[Name, dict[str, tuple[int, Fingerprint]]] = defaultdict(dict)
        known_pieces: Pieces = {}
        read = Counter[Name]()
        for name, prompt, times in _prompts(table):
            read[name] += 1
            if read[name] <= _MOST_READ:
                fingerprint = masked_prompt(prompt, known_pieces).fingerprint()
                by_name[name][fingerprint.exact] = (
                    by_name[name].get(fingerprint.exact, (0, fingerprint))[0] + times,
                    fingerprint,
                )
        if not by_name:
            raise InputError(
                "no step of the trace has a system prompt: agents cannot be recognised by it; record texts"
            )
        by_fingerprint: list[tuple[Fingerprint, Name]] = []
        for name, prompts in sorted(by_name.items()):
            often = sorted(prompts.values(), key=lambda counted: (-counted[0], counted[1].exact))[:MOST_PROMPTS]
            by_fingerprint += [(fingerprint, name) for _, fingerprint in often]
        return cls(by_fingerprint)

    @classmethod
    def of_traces(cls, table: pa.Table) -> AgentNames | None:
        """As `learn`, few for each agent; None for a trace without system prompts."""
        if "system_prompt" not in table.column_names or table["system_prompt"].null_count == table.num_rows:
            return None
        try:
            learnt = cls.learn(table)
        except InputError:
            return None
        few: dict[Name, list[Fingerprint]] = defaultdict(list)
        for fingerprint, name in learnt._known:
            if len(few[name]) < FEW_PROMPTS and not any(fingerprint.same_agent(other) for other in few[name]):
                few[name].append(fingerprint)
        return cls((fingerprint, name) for name, kept in few.items() for fingerprint in kept)

    def and_then(self, newer: AgentNames) -> AgentNames:
        """The names of both; the newer one of an agent that has two."""
        kept = [
            older
            for older in self._known
            if not any(older[0].same_agent(fingerprint) for fingerprint, _ in newer._known)
        ]
        return AgentNames([*kept, *newer._known], {**self._ids, **newer._ids})

    @cached_property
    def digest(self) -> str:
        """Of the names, 16 hexadecimal digits."""
        return blake2b(self.as_json, digest_size=8).hexdigest()

    @cached_property
    def as_json(self) -> bytes:
        """The content of a file."""
        agents = [
            {
                "workflow_type": name[0],
                "agent": name[1],
                "exact": fingerprint.exact,
                "head": fingerprint.head,
                "sketch": list(fingerprint.sketch),
                "words": sorted(fingerprint.words),
            }
            for fingerprint, name in self._known
        ]
        version = FORMAT_VERSIONS[1 if self._ids else 0]
        content = {"format": FORMAT, "format_version": version, "agents": agents}
        if self._ids:
            content["ids"] = self._ids
        return json.dumps(content, separators=(",", ":")).encode() + b"\n"

    def save(self, path: Path) -> None:
        """Writes the file.

        Raises:
            OutputError: it cannot be written.
        """
        write_file(path, self.as_json)

    @classmethod
    def load(cls, path: Path) -> AgentNames:
        """Reads the file.

        Raises:
            ArtefactError: it is no file of agent names, of another version, or damaged.
        """
        try:
            written = path.read_bytes()
        except OSError as error:
            _refuse(path, f"no readable file ({error.strerror})", "a file of agent names")
        return cls.from_json(written, path)

    @classmethod
    def from_json(cls, written: bytes, path: Path) -> AgentNames:
        """From `as_json`, read from the file that an error names; raises as `load`."""
        try:
            content: Any = msgspec.json.decode(written)
        except (msgspec.DecodeError, RecursionError):
            _refuse(path, "no valid JSON", "a file of agent names")
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            _refuse(path, "another file", f"a file of the format {FORMAT}")
        version = content.get("format_version")
        if version not in FORMAT_VERSIONS:
            wanted = " or ".join(map(str, FORMAT_VERSIONS))
            _refuse(path, f"format version {version!r}", f"format version {wanted}; learn the names anew")
        try:
            entries = msgspec.convert(content.get("agents"), list[_Entry])
            ids = msgspec.convert(content.get("ids", {}), dict[str, _Name])
        except msgspec.ValidationError as error:
            _refuse(path, f"a damaged entry ({error})", "names, digests and hashes; copy the file again")
        made = cls(
            ((entry.fingerprint(), (entry.workflow_type, entry.agent)) for entry in entries),
            {agent_id: (name.workflow_type, name.agent) for agent_id, name in ids.items()},
        )
        made.as_json = written  # megabytes, of many agents: an engine has no time to write them again
        return made


def recognised_as(sent: Name, found: Name | None, models: Collection[Vocabulary]) -> str | None:
    """The agent that a sent name stands for, since a release renamed it; None if the name stands for itself.

    It stands for itself where a model knows it, where no model knows the agent that was found, and where the request is
    of another application that the models know: two applications may have one system prompt.

    Args:
        sent: by the client; without a name, nothing was renamed.
        found: the name of the system prompt, by `AgentNames.find_reworded` in the names of these models.
    """
    workflow_type, agent = sent
    if found is None or not agent or any(model.knows_agent(agent) for model in models):
        return None
    same_type = any(model.names.workflow_type(workflow_type) == found[0] for model in models)
    if not same_type and any(model.knows_type(workflow_type) for model in models):
        return None
    return found[1] if any(model.knows_agent(found[1]) for model in models) else None


def recognised(table: pa.Table, names: AgentNames | None, vocabulary: Vocabulary) -> pa.Table:
    """A valid trace with its renamed agents called as the model with these names calls them (`recognised_as`)."""
    unknown = np.flatnonzero(vocabulary.encode_agents(table["agent"]) == vocabulary.unknown)
    if names is None or not len(unknown) or "system_prompt" not in table.column_names:
        return table
    steps = table.select(_COLUMNS).take(pa.array(unknown))
    keys = np.stack([codes(column.fill_null("")) for column in steps.columns])
    _, first, key_of_row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    pieces: Pieces = {}
    known_as: list[str | None] = []
    for row in steps.take(pa.array(first)).to_pylist():
        prompt = row["system_prompt"]
        recalled = names.find_reworded(masked_prompt(prompt, pieces).fingerprint()) if prompt else None
        known_as.append(recognised_as((row["workflow_type"], row["agent"]), recalled and recalled[0], (vocabulary,)))
    if not any(known_as):
        return table
    agents = table["agent"].to_pylist()
    for row, name in zip(unknown.tolist(), (known_as[key] for key in key_of_row.ravel().tolist()), strict=True):
        agents[row] = name or agents[row]
    position = table.schema.get_field_index("agent")
    return table.set_column(position, table.schema.field(position), pa.array(agents, table.schema.field(position).type))


def as_files(names: AgentNames | None) -> dict[str, bytes]:
    """The further files of an artefact that keeps these names."""
    return {} if names is None else {ARTEFACT_FILE: names.as_json}


def from_files(files: Mapping[str, bytes], folder: str | Path) -> AgentNames | None:
    """The names that the artefact in this folder keeps; raises ArtefactError if they are damaged."""
    return AgentNames.from_json(files[ARTEFACT_FILE], Path(folder, ARTEFACT_FILE)) if ARTEFACT_FILE in files else None


def _prompts(table: pa.Table) -> Iterator[tuple[Name, str, int]]:
    """Agent, system prompt and its number of steps, the most frequent first."""
    counted = table.select(_COLUMNS).group_by(list(_COLUMNS)).aggregate([([], "count_all")])
    order = [("count_all", "descending"), *((column, "ascending") for column in _COLUMNS)]
    for batch in counted.sort_by(order).to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            if row["system_prompt"]:
                yield (row["workflow_type"], row["agent"]), row["system_prompt"], row["count_all"]


class _Name(msgspec.Struct, array_like=True):
    workflow_type: str
    agent: str

    def __post_init__(self) -> None:
        _refuse_unsound(self.workflow_type, self.agent)


class _Entry(msgspec.Struct):
    workflow_type: str
    agent: str
    exact: str
    head: str
    sketch: list[int]
    words: list[int]

    def __post_init__(self) -> None:
        _refuse_unsound(self.workflow_type, self.agent)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.exact, self.head, tuple(self.sketch), frozenset(self.words))


def _refuse_unsound(*names: str) -> None:
    if not all(map(_is_sound, names)):
        raise ValueError("a name is too long or not printable")


def _is_sound(name: str) -> bool:
    return len(name) <= MAX_NAME and name.isprintable()


def _check(name: str) -> str:
    if not _is_sound(name):
        raise InputError(f"{name[:40]!r} is no name: give at most {MAX_NAME} printable characters")
    return name


def _refuse(path: Path, actual: str, wanted: str) -> NoReturn:
    raise ArtefactError(f"{path}: found {actual}; expected {wanted}.")
