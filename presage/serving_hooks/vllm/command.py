"""The command line of `vllm serve` with the hooks in it: what is added, and what somebody who says it himself keeps.

Knows the options of vLLM that name a scheduler, workers, a connector and plugins, and no others; does not import vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from presage.errors import ConfigurationError
from presage.serving_hooks.vllm.config import read_config

SCHEDULER: Final = "presage.serving_hooks.vllm.WorkflowScheduler"
WORKER: Final = "presage.serving_hooks.vllm.StatesWorker"
CONNECTOR: Final = json.dumps(
    {
        "kv_connector": "StatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector",
    }
)
PLUGIN: Final = "presage"
ENDPOINTS: Final = "vllm.endpoint_plugins"

ADDED: Final[Sequence[tuple[str, str, str]]] = (
    ("--scheduler-cls", SCHEDULER, "a class that does not derive from it leaves the policies out"),
    ("--worker-cls", WORKER, "without it forecasts have no hidden states"),
    ("--kv-transfer-config", CONNECTOR, "unless ours is in it, forecasts have no hidden states"),
)
"""Options that are added where nobody has said them: option, value, and what another value means."""


@dataclass(frozen=True)
class Command:
    """How vLLM is to be started.

    Attributes:
        arguments: after `vllm`.
        plugins: the value of VLLM_PLUGINS.
        notes: what an operator has said himself and we would have said otherwise, a sentence each.
    """

    arguments: tuple[str, ...]
    plugins: str
    notes: tuple[str, ...] = ()


def command(
    arguments: Sequence[str], plugins: str | None, others: Iterable[str] = (), layer: int | None = None
) -> Command:
    """The command line for the arguments that `vllm serve` would have been given.

    Args:
        arguments: a model, and any options of `vllm serve`.
        plugins: VLLM_PLUGINS as it is; None if it is not set.
        others: plugins that vLLM loads where VLLM_PLUGINS is not set.
        layer: the setting `state_layer`, in place of one in the arguments; None leaves them as they are.

    Raises:
        ConfigurationError: the settings under "presage" in --additional-config are no good, or a file named by
            --config cannot be read.
    """
    said = _said(arguments)
    additional = _additional(said)
    read_config(additional)
    added = [] if layer is None else _with_layer(said, additional, layer)
    notes = []
    for option, value, otherwise in ADDED:
        own = {name: said[name] for name in said if name.split(".")[0] == option}
        if not own:
            added += (option, value)
        elif value not in own.values():
            stays = " ".join(f"{name} {given}" for name, given in own.items())
            notes.append(f"{stays} stays as you said it, in place of {value}; {otherwise}")
    names = list(others) if plugins is None else plugins.split(",")
    listed = ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))
    return Command(("serve", *arguments, *added), listed, tuple(notes))


def loaded_by_default() -> list[str]:
    """Names of installed plugins that vLLM loads where VLLM_PLUGINS is not set: all but those that add routes."""
    groups = {group for group in entry_points().groups if group.startswith("vllm.") and group != ENDPOINTS}
    return sorted({plugin.name for group in groups for plugin in entry_points(group=group)})


def _with_layer(said: Mapping[str, Any], additional: object, layer: int) -> list[str]:
    """Options that set the layer, after those that are said: vLLM goes by the last object, and joins dotted options."""
    dotted = any(name.startswith("--additional-config.") for name in said)
    if dotted or "--additional-config" not in said or not isinstance(additional, dict):
        return [f"--additional-config.presage.state_layer={layer}"]
    return [
        "--additional-config",
        json.dumps(additional | {"presage": additional.get("presage", {}) | {"state_layer": layer}}),
    ]


def _said(arguments: Sequence[str]) -> dict[str, Any]:
    """Options and their values, the last of each; those of a file that --config names come first, as in vLLM."""
    options = _options(arguments)
    file = next((value for option, value in options if option == "--config"), None)
    return dict([*(_of_file(Path(file)) if file else ()), *options])


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Options of vLLM with their values; "--a_b.c" is "--a-b.c"."""
    found = []
    for at, argument in enumerate(arguments):
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            head, *rest = option.split(".")
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            found.append((".".join([head.replace("_", "-"), *rest]), value if equals else following))
    return found


def _of_file(path: Path) -> list[tuple[str, Any]]:
    yaml: Any = import_module("yaml")  # which comes with vLLM
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: cannot be read as YAML ({type(error).__name__})") from None
    return [(f"--{name}".replace("_", "-"), value) for name, value in found.items()] if isinstance(found, dict) else []


def _additional(said: Mapping[str, Any]) -> object:
    """What vLLM makes of --additional-config: an object, or the dotted options, which go before it."""
    dotted: dict[str, Any] = {}
    for option, value in said.items():
        head, *keys = option.split(".")
        if head == "--additional-config" and keys:
            place = dotted
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = _value(value)
    if dotted:
        return dotted
    given = said.get("--additional-config", {})
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        raise ConfigurationError(f"--additional-config {given:.60}: not JSON; give an object") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
