"""What a gateway file names beside itself: secrets in the environment, files, and models of servers that run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from presage.errors import ConfigurationError, PresageError
from presage.features.agent_names import AgentNames
from presage.gateway.config import GatewayConfig, UpstreamSettings
from presage.gateway.forward import listed_models
from presage.serving_hooks import admin
from presage.serving_hooks.engine_file import read_engine

_TIMEOUT_S = 3.0


def check_settings(config: GatewayConfig) -> list[str]:
    """Warnings: what only a running server can tell, and did not.

    Raises:
        ConfigurationError: something that the settings name is missing or broken; all of it is in the message.
    """
    problems: list[str] = []
    for look in (config.keys, config.names_secret, *([config.webhook.keys] if config.webhook is not None else [])):
        try:
            look()
        except PresageError as error:
            problems.append(str(error))
    try:
        admin.admin_key(config.forecasts.admin_key_variable)
        if config.agent_names:
            AgentNames.load(Path(config.agent_names))
    except PresageError as error:
        problems.append(str(error))
    problems += _unknown_tenants(config)
    warnings: list[str] = []
    for upstream in config.upstreams:
        found, unsure = _check_upstream(upstream)
        problems += found
        warnings += unsure
    if problems:
        raise ConfigurationError("; ".join(problems))
    return warnings


def _unknown_tenants(config: GatewayConfig) -> Iterator[str]:
    """Of tables by tenant: those that no key of a client is."""
    try:
        keys = len(set(config.keys()))
    except PresageError:
        return  # told already
    tenants = [f"key-{place}" for place in range(keys)] if keys > 1 else []
    for table in ("workflow_type", "weights", "objectives"):
        for tenant in getattr(config, table).tenants:
            if tenant not in tenants:
                meant = f"give one of {', '.join(tenants)}" if tenants else "give two keys or more in `keys_variable`"
                yield f"{table}.tenants names {tenant}, which no API key is; {meant}"


def _check_upstream(upstream: UpstreamSettings) -> tuple[list[str], list[str]]:
    """(problems, warnings)."""
    name, problems = f"upstream {upstream.label}", []
    if upstream.engine:
        try:
            read_engine(upstream.engine)
        except PresageError as error:
            problems.append(f"{name}: {error}")
    key = os.environ.get(upstream.api_key_variable, "") if upstream.api_key_variable else ""
    if upstream.api_key_variable and not key:
        problems.append(f"{name}: api_key_variable is {upstream.api_key_variable}, which is not set; set it to its key")
    try:
        with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = client.get(f"{upstream.url}/v1/models", headers=headers)
    except httpx.HTTPError as error:
        return problems, [f"{name} cannot be reached ({error or type(error).__name__}); its models are not checked"]
    if answer.status_code != 200:
        return problems, [f"{name} answers {answer.status_code} to /v1/models; its models are not checked"]
    serves = [model for model, _ in listed_models(answer.content)]
    missing = [model for model in upstream.models if model not in serves]
    if missing and serves:
        problems.append(f"{name} does not serve {missing[0]!r}; it lists {', '.join(serves)[:500]}")
    return problems, []


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings of a gateway file as that file has them; what is null is a comment."""
    return "\n".join(_lines(settings, "")) + "\n"


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    inner: list[tuple[str, str, Mapping[str, Any]]] = []
    for key, value in table.items():
        place = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, Mapping):
            inner.append((place, f"[{place}]", value))
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            inner += [(place, f"[[{place}]]", one) for one in value]
        elif value is None:
            yield f"# {_key(key)}: none"
        else:
            yield f"{_key(key)} = {json.dumps(value, ensure_ascii=False)}"
    for place, head, value in inner:
        if value:
            yield f"\n{head}"
            yield from _lines(value, place)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)
