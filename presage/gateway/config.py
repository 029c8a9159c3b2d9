"""Gateway files (TOML): the servers behind it, what it may decide, and its limits.

listen = "127.0.0.1:8100"

[[upstreams]]
url = "http://127.0.0.1:8000"
dialect = "vllm"                # or presage, vllm-router, llm-d, dynamo

[forecasts]
next_agent = "models:/next-agent@champion"

[forecasts.recorder]
folder = "recording"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from presage.errors import ConfigurationError
from presage.gateway.dialects import DIALECTS
from presage.gateway.models.model_choice import AUTO, Pool
from presage.serving_hooks.addresses import host_and_port, split_address
from presage.serving_hooks.lifecycle.config import WebhookConfig
from presage.serving_hooks.mode_names import GatewayPolicyName
from presage.serving_hooks.policies.routing import ROUTERS
from presage.serving_hooks.settings import (
    STRICT,
    ForecastSettings,
    ObjectivesSettings,
    TypeName,
    WeightSettings,
    Word,
    WorkflowTypeSettings,
)
from presage.wording import nearest

POLICIES: Final[tuple[str, ...]] = get_args(GatewayPolicyName)
_MOST_PROBLEMS: Final = 20
_OWN_PATHS: Final = ("v1", "v2", "health", "ready", "metrics")
PREFILL_AHEAD: Final = "prefill-ahead"

_Seconds = Annotated[float, Field(gt=0)]


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("give an address such as http://127.0.0.1:8000, without user name or query")
    return value.rstrip("/").removesuffix("/v1")


def _dialect(value: str) -> str:
    if value not in DIALECTS:
        meant = nearest(value[:64], DIALECTS)
        raise ValueError(f"{f'did you mean {meant}? ' if meant else ''}give one of {', '.join(DIALECTS)}")
    return value


def _routing(value: str) -> str:
    if value not in ROUTERS:
        raise ValueError(f"give one of {', '.join(ROUTERS)}")
    return value


class UpstreamSettings(BaseModel):
    """A server behind the gateway."""

    model_config = STRICT

    url: Annotated[str, AfterValidator(_url)]
    """address of an OpenAI-compatible server, with or without /v1"""
    name: str = Field(default="", max_length=64)
    """in metrics and headers; default: host and port"""
    models: tuple[str, ...] = ()
    """models it serves; default: what its /v1/models lists"""
    dialect: Annotated[str, AfterValidator(_dialect)] = "vllm"
    """how it takes annotations"""
    api_key_variable: str = ""
    """environment variable with its API key, sent in place of the client's; default: the client's is passed on"""
    engine: str = ""
    """engine file with its costs (`presage calibrate-cost`); default: measured while it serves"""

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or urlsplit(self.url).netloc


class PoolSettings(BaseModel):
    """Models among which the gateway chooses for a client that asks for the pool; see `model_choice.Pool`."""

    model_config = STRICT

    name: str = Field(default=AUTO, min_length=1, max_length=256)
    """model that clients ask for"""
    models: tuple[str, ...] = Field(min_length=1)
    """its models; each must be listed by an upstream"""
    default: str = ""
    """model without evidence; default: the first"""
    rule: Literal["price", "slack"] = "price"
    """price: confidence less λ for each second; slack: Chimera's rule"""
    price: float = Pool.price
    """λ, confidence that a second is worth"""
    slack: float = Pool.slack
    """τ, share by which the answer may be later than the fastest"""
    margin: float = Pool.margin
    """Δs, confidence that another model must have more"""
    costs: Mapping[str, float] = {}
    """confidence that a request to a model must bring; others cost nothing"""

    def pool(self) -> Pool:
        """As the chooser takes it; raises ConfigurationError for numbers or names that it refuses."""
        return Pool(
            self.name, self.models, self.default or self.models[0], self.rule, self.price, self.slack, self.margin,
            dict(self.costs),
        )  # fmt: skip


class PrefillAheadSettings(BaseModel):
    """When the known beginning of a workflow's next prompt is prefilled while its tool runs."""

    model_config = STRICT

    probability: float = Field(0.8, gt=0, le=1)
    """of the next agent, from which on it is"""
    least_new_tokens: int = Field(256, ge=1)
    """tokens, estimated, that no cache is known to hold"""
    most_in_flight: int = Field(1, ge=1)
    """prefills at a server at once"""
    most_running: int = Field(8, ge=1)
    """requests with which a server is busy; it also is while one waits for its first token"""
    patience_s: _Seconds = 10.0
    """seconds that a prefill waits for a server to be idle"""
    most_wasted: float = Field(0.5, gt=0, le=1)
    """share of prefilled tokens that may be wasted; above it the workflow type pauses"""
    window: int = Field(100, ge=10)
    """latest prefills of a workflow type that this share is of"""
    pause_s: _Seconds = 300.0
    """seconds of a pause"""
    memory_mb: int = Field(256, ge=1)
    """MiB of texts of running workflows that are kept"""


class ModesSettings(BaseModel):
    """Modes by policy and workflow type: off, shadow or on."""

    model_config = STRICT

    default: Word = "on"
    policies: Mapping[GatewayPolicyName, Word] = {}
    workflow_types: Mapping[str, Word] = {}


class Limits(BaseModel):
    """What clients can use of the gateway."""

    model_config = STRICT

    body_mb: int = Field(default=64, ge=1)
    """MiB of a request"""
    bodies_mb: int = Field(default=1024, ge=1)
    """MiB of all requests, from their first byte to the end of the answer; without room, the body that has been
    arriving for longest is answered 503"""
    messages: int = Field(default=10_000, ge=1)
    """messages and their parts in a request; more are answered 413"""
    values: int = Field(default=1_000_000, ge=1)
    """values in a request's JSON, an object or a list counting as five; more are answered 413"""
    requests: int = Field(default=2048, ge=1)
    """requests in flight, counted once their bodies are here; further ones are answered 503 with Retry-After"""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """share of `requests` and `bodies_mb` that one key may take, where several keys are tenants; beyond it 429"""
    body_s: _Seconds = 60.0
    """seconds for a request's body to arrive; then 408"""
    connect_s: _Seconds = 5.0
    """seconds to connect to an upstream"""
    silence_s: _Seconds = 600.0
    """seconds without a byte from an upstream, or in which a client takes none"""
    drain_s: _Seconds = 30.0
    """seconds for running requests to finish at shutdown"""


def _route(value: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value) or value.split("/")[1] in _OWN_PATHS:
        raise ValueError(f"give a path such as /research, which does not begin with {' or '.join(_OWN_PATHS)}")
    return value


class GatewayTypeSettings(WorkflowTypeSettings):
    """The same, and after the header by the beginning of the path: http://GATEWAY/research/v1 as a client's base URL.

    routes = { "/research" = "research" }
    """

    routes: Mapping[Annotated[str, AfterValidator(_route)], TypeName] = {}
    """by what stands before /v1 in the path"""


class GatewayConfig(BaseModel):
    """A gateway file; only an upstream is required."""

    model_config = STRICT

    listen: Annotated[str, AfterValidator(host_and_port)] = "127.0.0.1:8100"
    """host:port"""
    upstreams: tuple[UpstreamSettings, ...] = Field(min_length=1)
    routing: Annotated[str, AfterValidator(_routing)] = "session-affinity"
    """among several upstreams that serve one model"""
    pools: tuple[PoolSettings, ...] = ()
    """models to choose among"""
    router: str | None = Field(default="models:/router@champion", min_length=1)
    """router of the pools: models:/NAME@ALIAS, models:/NAME/VERSION or an artefact folder; null for none"""
    forecasts: ForecastSettings = Field(default_factory=lambda: ForecastSettings.model_validate({}))
    """models, monitoring and recorder; as in the engine's settings"""
    demand_ahead_s: _Seconds = 30.0
    """seconds ahead for which the demand of each model is exported: until a replica asked for now would serve"""
    workflow_type: GatewayTypeSettings = GatewayTypeSettings()
    """type of workflows whose clients name none, in place of `app-` and a hash: one for all, or a table of header,
    routes, tenants and default"""
    modes: ModesSettings = ModesSettings()
    objectives: ObjectivesSettings = ObjectivesSettings()
    """service objectives; `first_token_s` of a request is its deadline in annotations, and workflows that would miss
    their `deadline_s` go first where a routing policy holds workflows"""
    weights: WeightSettings = WeightSettings()
    """shares of tenants and workflow types where a routing policy holds workflows; who is not named has 1"""
    prefill_ahead: PrefillAheadSettings | None = None
    """prefills the known beginnings of next prompts, by the policy `prefill-ahead`; null for never"""
    webhook: WebhookConfig | None = None
    """delivers lifecycle events of workflows to an address; null for never"""
    limits: Limits = Limits()
    keys_variable: str = ""
    """environment variable with the gateway's API keys, separated by commas; each key is a tenant"""
    names_secret_variable: str = ""
    """environment variable with the secret that makes tenants' names of workflows and sessions, the same for gateways
    that share servers; default: drawn at each start"""
    client_priority: bool = False
    """let clients set `priority` themselves"""
    agent_names: str = ""
    """file of agent names by fingerprint (`presage traces agents`)"""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [one.label for one in self.upstreams]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two upstreams are called {twice[0]}: give each its own name")
        if self.prefill_ahead is None and PREFILL_AHEAD in self.modes.policies:
            raise ValueError(f"modes.policies names {PREFILL_AHEAD}, which is not set up; add a table [prefill_ahead]")
        listed = {model for one in self.upstreams for model in one.models}
        for pool in self.pools:
            pool.pool()
            if missing := sorted(set(pool.models) - listed):
                raise ValueError(f"pool {pool.name}: no upstream lists {missing[0]!r} in its `models`; add it there")
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that have modes."""
        return tuple(one for one in POLICIES if one != PREFILL_AHEAD or self.prefill_ahead is not None)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        return split_address(self.listen)

    def keys(self) -> list[str]:
        """The gateway's API keys.

        Raises:
            ConfigurationError: the variable is named and not set.
        """
        if not self.keys_variable:
            return []
        found = [key.strip() for key in os.environ.get(self.keys_variable, "").split(",") if key.strip()]
        if not found:
            raise ConfigurationError(f"keys_variable is {self.keys_variable}, which is not set; set it to the API keys")
        return found

    def names_secret(self) -> bytes:
        """The secret of tenants' names.

        Raises:
            ConfigurationError: the variable is named and not set.
        """
        if not self.names_secret_variable:
            return token_bytes(32)
        secret = os.environ.get(self.names_secret_variable, "")
        if len(secret) < 16:
            what = f"names_secret_variable is {self.names_secret_variable}, which has no 16 characters"
            raise ConfigurationError(f"{what}; set it to a secret: openssl rand -hex 32")
        return blake2b(secret.encode(), digest_size=32).digest()


def read_gateway_given(path: Path) -> dict[str, Any]:
    """The content of a gateway file, not validated yet.

    Raises:
        ConfigurationError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read ({type(error).__name__}); give a TOML file with [[upstreams]] tables"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}; correct the file") from None


def gateway_config(given: Mapping[str, Any], where: str) -> GatewayConfig:
    """Settings from a mapping; `where` begins error messages.

    Raises:
        ConfigurationError: unknown or invalid settings.
    """
    try:
        return GatewayConfig.model_validate(_as_json(given))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc']))[:200] or 'file'}: "
            + (_meant(one["loc"]) if one["type"] == "extra_forbidden" else one["msg"].removeprefix("Value error, "))
            for one in error.errors()[:_MOST_PROBLEMS]
        )
        raise ConfigurationError(f"{where}: invalid gateway settings: {problems}") from None


def _meant(place: tuple[int | str, ...]) -> str:
    """What an unknown setting may be instead."""
    table, name = ".".join(str(one) for one in place[:-1] if isinstance(one, str)), str(place[-1])[:64]
    tables = dict(_tables(GatewayConfig, ""))
    here = nearest(name, tables.get(table, ()))
    homes = [_shown_table(home) for home, names in tables.items() if name in names]
    if homes and not here:
        return f"belongs {' or '.join(homes)}"
    near = [(table, here), *((home, nearest(name, tables[home])) for home in tables)]
    for home, meant in near:
        if meant:
            return f"there is no such setting; did you mean {meant}{'' if home == table else ' ' + _shown_table(home)}?"
    return "there is no such setting; `presage gateway --check` prints those there are"


def _shown_table(name: str) -> str:
    if not name:
        return "at the top of the file"
    return f"in [[{name}]]" if name in ("upstreams", "pools") else f"in [{name}]"


def _tables(model: type[BaseModel], name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The settings of each table of a gateway file."""
    yield name, tuple(model.model_fields)
    for field, about in model.model_fields.items():
        kinds = [about.annotation, *get_args(about.annotation)]
        for kind in [inner for one in kinds for inner in (one, *get_args(one))]:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _tables(kind, f"{name}.{field}" if name else field)


def _as_json(value: Any) -> Any:
    """Lists as tuples, which strict models require."""
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    return tuple(map(_as_json, value)) if isinstance(value, list) else value
