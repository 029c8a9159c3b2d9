"""Our KV connector as `--kv-transfer-config` takes it, alone and beside another one in vLLM's `MultiConnector`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

STATES_CONNECTOR: Final = "StatesConnector"
ALONE: Final[Mapping[str, Any]] = {
    "kv_connector": STATES_CONNECTOR,
    "kv_role": "kv_producer",
    "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
}

_OF_THE_ENGINE: Final = ("engine_id", "kv_load_failure_policy")
"""What vLLM reads of the whole configuration; a part with an `engine_id` of its own is an error in vLLM."""


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether our connector is in this configuration."""
    return any(one.get("kv_connector") == STATES_CONNECTOR for one in (config, *_parts(config)))


def with_states(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of both: the connector of `config`, or those of its `MultiConnector`, and ours."""
    if config.get("kv_connector") == "MultiConnector":
        extra = {**config["kv_connector_extra_config"], "connectors": [*_parts(config), dict(ALONE)]}
        return {**config, "kv_connector_extra_config": extra}
    whole = {name: config[name] for name in _OF_THE_ENGINE if name in config}
    part = {name: value for name, value in config.items() if name not in _OF_THE_ENGINE}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": config.get("kv_role", "kv_both"),
        **whole,
        "kv_connector_extra_config": {"connectors": [part, dict(ALONE)]},
    }


def _parts(config: Mapping[str, Any]) -> list[Any]:
    extra = config.get("kv_connector_extra_config")
    parts = extra.get("connectors") if isinstance(extra, Mapping) else None
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
