"""The former path of the `StatesConnector`, which a `--kv-transfer-config` may still name."""

import warnings

from presage.serving_hooks.vllm.hidden_states.connector import StatesConnector

__all__ = ["StatesConnector"]

warnings.warn(
    "kv_connector_module_path presage.serving_hooks.vllm.tap.connector is deprecated; give "
    "presage.serving_hooks.vllm.hidden_states.connector",
    FutureWarning,
    stacklevel=2,
)
