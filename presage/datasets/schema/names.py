"""Names with ids in them, folded: `researcher-7f3a` and `researcher-91c0` are one agent.

A predictor learns nothing about a name that never comes again. A mapping is a list of rules, `REGEX=NAME`, for agents
and for workflow types. It travels with what it folded: the manifest of a store, the metadata of a table, the vocabulary
of an artefact; so training and serving have one definition.

The first rule whose pattern is the whole name replaces it, and again until none changes the name: a folded name stays
as it is. Tools keep their names. Clients choose the names that a server folds, so the patterns are RE2's, by Arrow,
which takes linear time; it has neither look-around nor references inside a pattern.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.errors import ConfigurationError

NAMES_KEY: Final = b"presage.names"
"""In the metadata of a table that was read from a store with a mapping."""

MAX_NAME: Final = 256
"""Characters of a name; with a longer one nothing is served or recorded."""

_ROUNDS: Final = 32
_REMEMBERED: Final = 4096
_SECTIONS: Final = ("agents", "workflow_types")
_FORM: Final = "expected REGEX=NAME, such as 'researcher-.*=researcher' or '(.+)-[0-9a-f]+=\\1'"

Rules = tuple[tuple[str, str], ...]
"""Pattern and name, the first that matches first."""


@dataclass(frozen=True)
class NameMapping:
    """How names are folded; raises ConfigurationError for a pattern or a name that is none.

    `remembered` are the latest answers, by section and name.
    """

    agents: Rules = ()
    workflow_types: Rules = ()
    remembered: dict[tuple[str, str], str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for pattern, name in (*self.agents, *self.workflow_types):
            try:
                pc.match_substring_regex("", pattern=pattern)  # alone, so that none closes the group around it
                _replaced(pa.array([""]), pattern, name)
            except pa.ArrowInvalid as error:
                raise ConfigurationError(f"pattern {pattern}={name}: {error}; {_FORM}, in RE2's syntax") from None
            if not _sound(name):
                raise ConfigurationError(f"pattern {pattern}={name}: {name!r} is no name; {_FORM}")

    def __bool__(self) -> bool:
        return bool(self.agents or self.workflow_types)

    def __str__(self) -> str:
        rules = (f"{pattern}={name}" for section in _SECTIONS for pattern, name in getattr(self, section))
        return ", ".join(rules) or "no patterns"

    def agent(self, name: str) -> str:
        """The agent that a name stands for, remembered; the name itself where it folds to none."""
        return self._one("agents", name) if self.agents else name

    def workflow_type(self, name: str) -> str:
        """The same of a workflow type."""
        return self._one("workflow_types", name) if self.workflow_types else name

    def _one(self, section: str, name: str) -> str:
        folded = self.remembered.get((section, name))
        if folded is None:
            try:
                folded = self._folded(section, pa.array([name], pa.string()))[0].as_py()
            except (ConfigurationError, ValueError):  # such as half a surrogate pair
                folded = name
            if len(self.remembered) >= _REMEMBERED:
                self.remembered.clear()
            self.remembered[section, name] = folded
        return folded

    def column(self, section: str, names: pa.ChunkedArray) -> pa.ChunkedArray:
        """A column of names, folded; raises ConfigurationError for one that folds to no name."""
        if not getattr(self, section):
            return names
        distinct = pc.unique(names)
        return self._folded(section, distinct).take(pc.index_in(names, value_set=distinct))

    def table(self, table: pa.Table) -> pa.Table:
        """A table with the names of its workflow types, and of the agents of its LLM steps, folded."""
        for column, section in (("agent", "agents"), ("workflow_type", "workflow_types")):
            if getattr(self, section):
                folded = self.column(section, table[column])
                if column == "agent":
                    folded = pc.if_else(pc.equal(table["kind"], "llm"), folded, table[column])
                position = table.schema.get_field_index(column)
                table = table.set_column(position, table.schema.field(position), folded)
        return table

    def _folded(self, section: str, names: pa.Array) -> pa.Array:
        """Distinct names, folded until none changes; raises ConfigurationError for one that does not end as a name."""
        for _ in range(_ROUNDS):
            before, names = names, self._once(getattr(self, section), names)
            changed = np.flatnonzero(pc.not_equal(names, before).to_numpy(zero_copy_only=False))
            if not len(changed):
                return names
            for row in changed.tolist():
                if not _sound(names[row].as_py()):
                    raise ConfigurationError(
                        f"the patterns of {section} fold {before[row].as_py()!r} to {names[row].as_py()[:80]!r}; "
                        f"expected a name of 1 to {MAX_NAME} printable characters: change the patterns"
                    )
        raise ConfigurationError(
            f"the patterns of {section} fold {before[row].as_py()!r} to {names[row].as_py()!r} and so on without end; "
            "expected names that no pattern changes further: change the patterns"
        )

    @staticmethod
    def _once(rules: Rules, names: pa.Array) -> pa.Array:
        folded, left = names, pc.not_equal(names, "")
        for pattern, name in rules:
            hit = pc.and_(left, pc.match_substring_regex(names, pattern=_whole(pattern)))
            if not pc.any(hit).as_py():
                continue
            folded = pc.if_else(hit, pc.utf8_trim_whitespace(_replaced(names, pattern, name)), folded)
            left = pc.and_not(left, hit)
        return folded

    def and_then(self, later: NameMapping) -> NameMapping:
        """The mapping of names that this one folded and the later one folds further."""
        both = (tuple(dict.fromkeys((*getattr(self, section), *getattr(later, section)))) for section in _SECTIONS)
        return NameMapping(*both)

    def on(self, table: pa.Table) -> pa.Table:
        """The table, marked as folded by this mapping."""
        if not self:
            return table
        return table.replace_schema_metadata({**(table.schema.metadata or {}), NAMES_KEY: json.dumps(self.to_dict())})

    @classmethod
    def of(cls, table: pa.Table) -> NameMapping:
        """The mapping by which a table was folded."""
        written = (table.schema.metadata or {}).get(NAMES_KEY)
        return NO_NAMES if written is None else cls.from_dict(json.loads(written))

    def to_dict(self) -> dict[str, list[list[str]]]:
        """JSON values: pattern and name of each rule, in order, by `agents` and `workflow_types`."""
        return {section: [list(rule) for rule in getattr(self, section)] for section in _SECTIONS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[Sequence[str]]]) -> NameMapping:
        """Inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        return cls(*(tuple((str(pattern), str(name)) for pattern, name in data[section]) for section in _SECTIONS))

    @classmethod
    def read(cls, agent_patterns: Iterable[str], file: Path | None = None) -> NameMapping:
        """The rules that a user gives: `REGEX=NAME` each, then those of a TOML or JSON file.

        The file has a table `agents`, `workflow_types` or both, of `"pattern" = "name"`; or it is of `presage agents
        name`. Raises ConfigurationError.
        """
        agents = []
        for rule in agent_patterns:
            pattern, _, name = rule.rpartition("=")
            if not pattern:
                raise ConfigurationError(f"--agent-pattern {rule!r}: no pattern and name; {_FORM}")
            agents.append((pattern.strip(), name.strip()))
        of_file = _file(file) if file is not None else {}
        return cls((*agents, *of_file.get("agents", ())), of_file.get("workflow_types", ()))


NO_NAMES: Final = NameMapping()


def _file(path: Path) -> dict[str, Rules]:
    wanted = "expected TOML or JSON with a table agents or workflow_types of pattern = name, both strings"
    try:
        text = path.read_text(encoding="utf-8-sig")
        given = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"--names {path}: cannot be read ({error.strerror}); {wanted}") from error
    except ValueError as error:
        raise ConfigurationError(f"--names {path}: {error}; {wanted}: patterns in 'single quotes' in TOML") from error
    if isinstance(given, dict) and "format" in given:
        try:
            return _of_ids(given["ids"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigurationError(
                f"--names {path}: no agents by their ids; expected a file of `presage agents name agent-…=NAME`"
            ) from None
    if not isinstance(given, dict) or not given or not given.keys() <= set(_SECTIONS):
        names = ", ".join(map(repr, given)) if isinstance(given, dict) else type(given).__name__
        raise ConfigurationError(f"--names {path}: found {names or 'nothing'}; {wanted}")
    for section, rules in given.items():
        if not isinstance(rules, dict) or not all(isinstance(name, str) for name in rules.values()):
            raise ConfigurationError(f"--names {path}: {section} is {rules!r:.80}; {wanted}")
    return {section: tuple(rules.items()) for section, rules in given.items()}


def _of_ids(ids: Mapping[str, Sequence[str]]) -> dict[str, Rules]:
    """The rules in a file of `presage agents name`: of agents by id, and of types that are named after those agents."""
    agents = tuple((agent_id, agent) for agent_id, (_, agent) in ids.items())
    types = ((f"app-{agent_id.removeprefix('agent-')}", given) for agent_id, (given, _) in ids.items() if given)
    return {"agents": agents, "workflow_types": tuple(types)}


def _whole(pattern: str) -> str:
    return rf"\A(?:{pattern})\z"


def _replaced(names: pa.Array, pattern: str, name: str) -> pa.Array:
    return pc.replace_substring_regex(names, pattern=_whole(pattern), replacement=name)


def _sound(name: str) -> bool:
    return 0 < len(name.strip()) <= len(name) <= MAX_NAME and name.isprintable()
