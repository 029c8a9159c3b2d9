"""Fleet files (TOML): the engines of a fleet, when they are added and drained.

[[engines]]
count = 4                       # alike; named a-1, a-2, …
name = "a"
engine = "h100-8b-datasheet"    # an engine file, or one that comes with the package
cache_tokens = 64000            # overrides the engine file
scheduler = "stjf"              # order of its queue, as by the priorities of the gateway

[[engines]]
name = "spare"
added_s = 120.0                 # asked for at this second of the replay
load_s = 30.0                   # takes requests so many seconds later
drained_s = 600.0               # takes none from then on, and answers those it has

Where engines serve several models, each table names its own, and agents that are not named use that of the first table:

[[engines]]
name = "b"
model = "large"

[agents]
planner = "large"

With [scaling], engines are asked for and drained by demand; the tables then say which there may be:

[scaling]
policy = "forecast"             # or last-window, reactive
requests_per_engine = 12        # requests in flight that one engine serves well
load_s = 30.0
least = { large = 0 }           # engines of a model that are always there; default 1
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from presage.errors import ConfigurationError
from presage.replay.policies import POLICIES, STOCK, Policy, crossed
from presage.serving_hooks.engine_file import EngineFile, read_engine, shipped
from presage.serving_hooks.policies.scaling import ScalingConfig

MOST_ENGINES = 1024

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Engines(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("engine", min_length=1, max_length=64, description="of the engine; with a number if several")
    count: int = Field(1, ge=1, le=MOST_ENGINES, description="engines alike")
    model: str | None = Field(None, min_length=1, max_length=128, description="that it serves")
    engine: str = Field("invented", description="path of an engine file, or the name of a shipped one")
    cache_tokens: int | None = Field(None, gt=0, description="overrides the engine file")
    host_cache_tokens: int | None = Field(None, ge=0, description="overrides the engine file")
    policy: str = Field(STOCK, description="hooks in the engine: a policy of `presage replay`")
    scheduler: Literal["fcfs", "sjf", "stjf", "stjf-oracle"] | None = Field(None, description="order of its queue")
    added_s: _Seconds = Field(0.0, description="when it is asked for")
    load_s: _Seconds = Field(0.0, description="from then until it takes requests")
    drained_s: _Seconds | None = Field(None, description="when it stops to take requests")


class _FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: list[_Engines] = Field(min_length=1)
    agents: dict[str, str] = Field(default_factory=dict, description="model by agent")
    scaling: ScalingConfig | None = None


@dataclass(frozen=True)
class FleetMember:
    """One engine of a fleet.

    Attributes:
        policy: of the hooks in the engine.
        model: that it serves; empty if the fleet has only one.
        opens_s, closes_s: between these seconds it takes requests.
    """

    name: str
    engine: EngineFile
    policy: Policy
    opens_s: float = 0.0
    closes_s: float = math.inf
    model: str = ""


@dataclass(frozen=True)
class FleetPlan:
    """The engines of a fleet, and who uses them.

    Attributes:
        agents: model by agent; others use that of the first engine.
        scaling: how engines are added and drained.
    """

    engines: tuple[FleetMember, ...] = ()
    agents: Mapping[str, str] = field(default_factory=dict)
    scaling: ScalingConfig | None = None


def read_fleet(path: Path) -> FleetPlan:
    """Reads a fleet file. Paths of engine files are relative to its folder.

    Raises:
        ConfigurationError: no such file, no TOML, unknown, missing or impossible settings, or a fleet that cannot be
            replayed.
    """
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--fleet {path}: cannot be read ({type(error).__name__}); give a TOML file with [[engines]] tables"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"--fleet {path}: not valid TOML: {error}; correct the file") from None
    try:
        file = _FleetFile.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise ConfigurationError(f"--fleet {path}: invalid fleet file: {problems}") from None
    members = tuple(member for table in file.engines for member in _members(table, path))
    _check(members, path)
    _check_models(members, file.agents, path)
    if file.scaling is not None:
        _check_scaling(members, file.scaling, path)
    return FleetPlan(members, file.agents, file.scaling)


def _members(table: _Engines, path: Path) -> list[FleetMember]:
    policy = POLICIES.get(table.policy)
    if policy is None or policy.foresight or policy.swept:
        usable = ", ".join(name for name, candidate in POLICIES.items() if not (candidate.foresight or candidate.swept))
        raise ConfigurationError(f"--fleet {path}: policy {table.policy!r} of {table.name!r}: give one of {usable}")
    if table.scheduler is not None:
        policy = crossed([policy], table.scheduler)[0]
    given = table.engine if table.engine in shipped() else str(path.parent / table.engine)
    engine = read_engine(given, table.cache_tokens, table.host_cache_tokens)
    closes_s = math.inf if table.drained_s is None else table.drained_s
    names = [table.name] if table.count == 1 else [f"{table.name}-{number + 1}" for number in range(table.count)]
    opens_s, model = table.added_s + table.load_s, table.model or ""
    return [FleetMember(name, engine, policy, opens_s, closes_s, model) for name in names]


def _check(members: tuple[FleetMember, ...], path: Path) -> None:
    names = [member.name for member in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"--fleet {path}: two engines are called {twice[0]!r}: give each table its own name")
    if len(members) > MOST_ENGINES:
        raise ConfigurationError(f"--fleet {path}: {len(members)} engines; give at most {MOST_ENGINES}")
    sizes = sorted({member.engine.block_tokens for member in members})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"--fleet {path}: block_tokens are {', '.join(map(str, sizes))}; all engines of a fleet need the same"
        )
    for member in members:
        if member.closes_s <= member.opens_s:
            raise ConfigurationError(
                f"--fleet {path}: {member.name!r} is drained at {member.closes_s:g} s, before it takes requests at "
                f"{member.opens_s:g} s: drain it later"
            )
    for model in dict.fromkeys(member.model for member in members):
        if all(member.closes_s < math.inf for member in members if member.model == model):
            which = f"every engine of {model!r}" if model else "every engine"
            raise ConfigurationError(f"--fleet {path}: {which} is drained in the end; keep one for the last requests")


def _check_models(members: tuple[FleetMember, ...], agents: Mapping[str, str], path: Path) -> None:
    served = list(dict.fromkeys(member.model for member in members))
    if agents and not any(served):
        raise ConfigurationError(f"--fleet {path}: [agents] names models and no engine does: give each table a model")
    if "" in served and len(served) > 1:
        unnamed = next(member.name for member in members if not member.model)
        raise ConfigurationError(
            f"--fleet {path}: {unnamed!r} has no model and other engines have: give each table one"
        )
    for agent, model in agents.items():
        if model not in served:
            raise ConfigurationError(
                f"--fleet {path}: agent {agent!r} uses {model!r}, which no engine serves; there are {', '.join(served)}"
            )
    for model in served[1:]:
        if model not in agents.values():
            raise ConfigurationError(f"--fleet {path}: no agent uses {model!r}: name one in [agents]")


def _check_scaling(members: tuple[FleetMember, ...], scaling: ScalingConfig, path: Path) -> None:
    planned = [member.name for member in members if member.opens_s > 0 or member.closes_s < math.inf]
    if planned:
        raise ConfigurationError(
            f"--fleet {path}: [scaling] decides when engines are added and drained, and {planned[0]!r} has times: "
            "leave out added_s, load_s and drained_s of the engines"
        )
    for model, least in scaling.least.items():
        there = sum(member.model == model for member in members)
        if least > there:
            raise ConfigurationError(
                f"--fleet {path}: [scaling] keeps at least {least} engines of {model!r}, and there are {there}"
            )
