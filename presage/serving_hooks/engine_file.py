"""Engine files (TOML): cache, limits and costs of an engine.

Three come with the package: `invented`, whose costs fit no machine (only ratios of results mean anything), and
`h100-8b-datasheet` and `8xh100-70b-datasheet`, whose costs are computed from data sheets and were not measured.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from presage.errors import ConfigurationError
from presage.serving_hooks.policies.workload import attention_pairs

_Seconds = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]


class Cost(BaseModel):
    """Seconds of an iteration: the one part of a replay that vLLM does not compute.

        seconds = iteration_s + prefill_token_s · tokens prefilled + decode_token_s · tokens decoded
                  + context_token_s · tokens attended to + attention_pair_s · pairs
                  + host_token_s · tokens loaded from the host

    The terms stand for reading weights, arithmetic, reading the cache, and the attention of prefills: a pair is a
    prefilled token and one of the tokens up to it, so a prompt of n tokens has n (n + 1) / 2. Cost models of published
    schedulers lack that term, which exceeds the others in long prompts. An iteration waits for loads from the host, so
    none of their time is hidden; writes to the host cost nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str = Field(min_length=1, description="where the numbers come from")
    iteration_s: float = Field(gt=0, le=60, allow_inf_nan=False, description="each iteration, whatever its tokens")
    prefill_token_s: _Seconds = Field(description="each prompt token computed")
    decode_token_s: _Seconds = Field(description="each token produced")
    context_token_s: _Seconds = Field(description="each token attended to, cached or computed, of each request")
    attention_pair_s: _Seconds = Field(0.0, description="each prompt token computed, for each token up to it")
    host_token_s: _Seconds | None = Field(
        None, description="each token loaded from the host: bytes of a token's cache / bytes per second of the link"
    )

    def seconds(
        self, prefill_tokens: int, decode_tokens: int, context_tokens: int, host_tokens: int = 0, pairs: int = 0
    ) -> float:
        """Seconds of one iteration."""
        return (
            self.iteration_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_token_s * decode_tokens
            + self.context_token_s * context_tokens
            + (self.host_token_s or 0.0) * host_tokens
            + self.attention_pair_s * pairs
        )

    def prefill_s(self, tokens: int, before: int = 0) -> float:
        """Seconds that prefilling so many tokens after `before` cached ones adds to iterations."""
        return self.prefill_token_s * tokens + self.attention_pair_s * attention_pairs(tokens, before + tokens)


class EngineFile(BaseModel):
    """The content of an engine file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cache_tokens: int = Field(gt=0, le=10**9, description="tokens the KV cache holds")
    host_cache_tokens: int = Field(0, ge=0, le=10**10, description="tokens the host-memory tier holds")
    block_tokens: int = Field(16, ge=1, le=1024, description="tokens of a block")
    most_requests: int = Field(64, ge=1, le=65536, description="requests in one iteration (max_num_seqs)")
    most_tokens: int = Field(2048, ge=1, le=10**6, description="tokens in one iteration (max_num_batched_tokens)")
    chunked_prefill: bool = Field(True, description="whether a prompt may be prefilled in parts")
    cost: Cost

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return self.cache_tokens // self.block_tokens

    @property
    def host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.host_cache_tokens // self.block_tokens


def shipped() -> list[str]:
    """Names of the engines that come with the package."""
    folder = resources.files("presage.serving_hooks") / "engines"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_engine(name: str, cache_tokens: int | None = None, host_cache_tokens: int | None = None) -> EngineFile:
    """Reads an engine file; `cache_tokens` and `host_cache_tokens` override it.

    Args:
        name: path of a TOML file, or a name of `shipped`.

    Raises:
        ConfigurationError: no such file, no TOML, or unknown, missing or impossible settings, all of them named.
    """
    text = _text(name)
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name}: not valid TOML: {error}; correct the file") from None
    overrides = {"cache_tokens": cache_tokens, "host_cache_tokens": host_cache_tokens}
    return checked(given | {setting: tokens for setting, tokens in overrides.items() if tokens is not None}, name)


def checked(given: Mapping[str, Any], name: str) -> EngineFile:
    """Validates the content of an engine file, which errors call `name`.

    Raises:
        ConfigurationError: unknown, missing or impossible settings, all of them named.
    """
    try:
        engine = EngineFile.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
            for problem in error.errors()
        )
        raise ConfigurationError(f"{name}: invalid engine file: {problems}") from None
    if engine.blocks < 2:
        raise ConfigurationError(
            f"{name}: cache_tokens is {engine.cache_tokens}, which is {engine.blocks} blocks of {engine.block_tokens}; "
            "vLLM reserves one for itself: give more"
        )
    if engine.most_tokens < engine.most_requests:
        raise ConfigurationError(
            f"{name}: most_tokens is {engine.most_tokens}, less than the {engine.most_requests} requests of an "
            "iteration, each of which decodes one token: give more tokens or fewer requests"
        )
    tokens = engine.host_cache_tokens
    if tokens and not engine.host_blocks:
        raise ConfigurationError(
            f"{name}: host_cache_tokens is {tokens}, less than a block of {engine.block_tokens}: give more, or 0 for "
            "no cache in the host"
        )
    if tokens and engine.cost.host_token_s is None:
        raise ConfigurationError(
            f"{name}: host_cache_tokens is {tokens} and [cost] has no host_token_s, the seconds that a token takes "
            "from the host: add it (bytes of a token's cache / bytes per second of the link), or set "
            "host_cache_tokens to 0"
        )
    return engine


def engine_text(engine: EngineFile) -> str:
    """The TOML text of an engine, as `read_engine` reads it."""
    given = engine.model_dump(exclude_none=True)
    costs = given.pop("cost")
    lines = [*(f"{name} = {_value(value)}" for name, value in given.items()), "", "[cost]"]
    return "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in costs.items())]) + "\n"


def _value(value: bool | float | str) -> str:
    """A value as JSON, which is TOML here except for one control character that JSON lets pass."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(name: str) -> str:
    if name in shipped():
        return (resources.files("presage.serving_hooks") / "engines" / f"{name}.toml").read_text("utf-8")
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{name}: no engine file ({type(error).__name__}); give the path of a TOML file, or one of "
            f"{', '.join(shipped())}"
        ) from None
