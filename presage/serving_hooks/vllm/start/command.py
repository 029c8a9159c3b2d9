"""`presage serve`: adds the options of the hooks to a `vllm serve` command line, and checks what they need.

Options given on the command line are kept. `findings` runs the same checks as the engine. Adds vLLM's options for the
scheduler and plugins, and where hidden states are read those for workers and connector.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from presage.errors import ConfigurationError, without_passwords
from presage.registry.connect import open_existing
from presage.serving_hooks.forecasting.champions import model_status, predictors, resolve_registry_uri
from presage.serving_hooks.forecasting.sources import Held
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.config import PresageConfig, read_config
from presage.serving_hooks.vllm.start import engine_check
from presage.serving_hooks.vllm.start.multi_connector import ALONE, has_states, with_states
from presage.serving_hooks.vllm.start.states_needed import StatesDecision

SCHEDULER: Final = "presage.serving_hooks.vllm.WorkflowScheduler"
WORKER: Final = "presage.serving_hooks.vllm.StatesWorker"
CONNECTOR: Final = json.dumps(ALONE)
PLUGIN: Final = "presage"
ENDPOINTS: Final = "vllm.endpoint_plugins"

_TRANSFER: Final = "--kv-transfer-config"
_OFFLOADING: Final = "--kv-offloading-size"

_SCHEDULER: Final = ("--scheduler-cls", SCHEDULER, "a class that does not derive from it runs without the policies")
_WORKER: Final = ("--worker-cls", WORKER, "without it forecasts have no hidden states")
"""A class that is added if none is given: option, value, and what another one means."""


@dataclass(frozen=True)
class Command:
    """A command line of vLLM.

    Attributes:
        plugins: the value of VLLM_PLUGINS.
        notes: a sentence on hidden states, and one for each given option that differs from ours.
    """

    arguments: tuple[str, ...]
    plugins: str
    notes: tuple[str, ...] = ()


def command(
    arguments: Sequence[str],
    plugins: str | None,
    others: Iterable[str] = (),
    layer: int | None = None,
    *,
    decide: Callable[[PresageConfig], StatesDecision],
) -> Command:
    """The command line for arguments of `vllm serve`: a model, and any options.

    Args:
        plugins: the value of VLLM_PLUGINS; None if it is not set.
        others: plugins that vLLM loads if VLLM_PLUGINS is not set.
        layer: overrides the setting `state_layer`; None keeps the arguments.
        decide: whether hidden states are read; not called if the arguments settle it.

    Raises:
        ConfigurationError: the settings under "presage" in --additional-config are invalid, the webhook's secret is
            missing, or the file of --config cannot be read.
    """
    given = _given(arguments)
    additional = _additional(given)
    config = read_config(additional)
    if config.webhook is not None:
        config.webhook.keys()  # else the engine says so once its model is loaded
    added = [] if layer is None else _with_layer(given, additional, layer)
    notes = []
    states = _states(given, arguments, partial(decide, config))
    if states.note is not None:
        notes.append(states.note)
    for option, value, otherwise in (_SCHEDULER, *([_WORKER] if states.added else ())):
        own = _own(given, option)
        if not own:
            added += (option, value)
        elif value not in own.values():
            notes.append(f"your {_shown(own)} is kept instead of {value}; {otherwise}")
    if states.added:
        theirs = _connector(given)
        if theirs is None:
            added += (_TRANSFER, CONNECTOR)
        elif not has_states(theirs):
            notes.append(_beside(given, theirs))
    names = list(others) if plugins is None else plugins.split(",")
    listed = ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))
    return Command(("serve", *arguments, *added), listed, tuple(notes))


def _states(given: Mapping[str, Any], arguments: Sequence[str], decide: Callable[[], StatesDecision]) -> StatesDecision:
    if any(option.startswith(("--speculative-config", "--spec-m")) for option in given) or "-sc" in arguments:
        return StatesDecision(False, "with speculative decoding no hidden states are read: no connector is added")
    theirs = _connector(given)
    return StatesDecision(True) if theirs is not None and has_states(theirs) else decide()


def _own(given: Mapping[str, Any], option: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name.split(".")[0] == option}


def _shown(own: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in own.items())


def _connector(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration of the connector that the given options bring; None if they bring none.

    vLLM makes one of --kv-offloading-size, and overwrites with it the name in another.
    """
    if _OFFLOADING in given:
        return _offloading(given)
    if not _own(given, _TRANSFER):
        return None
    found = _object(given, _TRANSFER)
    return found if isinstance(found, Mapping) else {}


def _offloading(given: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of its options for offloading."""
    if given.get("--kv-offloading-backend", "native") != "native":
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("", "0")
    try:
        size = float(given[_OFFLOADING])
    except ValueError:
        return {}  # vLLM refuses it
    return {
        "kv_connector": "SimpleCPUOffloadConnector" if simple else "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": int(size * (1 << 30))},
    }


def _beside(given: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The note on a connector that ours is not in, with the option that has both."""
    kept = f"your {_shown(_own(given, _OFFLOADING) or _own(given, _TRANSFER))} is kept; without our connector in it "
    kept += "forecasts have no hidden states"
    if "kv_connector" not in theirs:
        return kept
    return f"{kept}: give {_TRANSFER} {shlex.quote(json.dumps(with_states(theirs)))} instead"


def loaded_by_default() -> list[str]:
    """Names of installed plugins that vLLM loads if VLLM_PLUGINS is not set: all but those that add routes."""
    groups = {group for group in entry_points().groups if group.startswith("vllm.") and group != ENDPOINTS}
    return sorted({plugin.name for group in groups for plugin in entry_points(group=group)})


def _with_layer(given: Mapping[str, Any], additional: object, layer: int) -> list[str]:
    """Options that set the layer, after the given ones: vLLM uses the last object, and merges dotted options."""
    dotted = any(name.startswith("--additional-config.") for name in given)
    if dotted or "--additional-config" not in given or not isinstance(additional, dict):
        return [f"--additional-config.presage.state_layer={layer}"]
    return [
        "--additional-config",
        json.dumps(additional | {"presage": additional.get("presage", {}) | {"state_layer": layer}}),
    ]


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    """Options with their last values; as in vLLM, those of the file of --config come first."""
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
    yaml: Any = import_module("yaml")  # a dependency of vLLM
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: cannot be read as YAML ({type(error).__name__})") from None
    return [(f"--{name}".replace("_", "-"), value) for name, value in found.items()] if isinstance(found, dict) else []


def _object(options: Mapping[str, Any], name: str) -> object:
    """The value of an option as vLLM reads it: an object, or the dotted options, which override it."""
    dotted: dict[str, Any] = {}
    for option, value in options.items():
        head, *keys = option.split(".")
        if head == name and keys:
            place = dotted
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = _value(value)
    if dotted:
        return dotted
    given = options.get(name, {})
    return _value(given) if isinstance(given, str) else given


def _additional(options: Mapping[str, Any]) -> object:
    """The value of --additional-config."""
    found = _object(options, "--additional-config")
    if isinstance(found, str):
        raise ConfigurationError(f"--additional-config {found:.60}: not JSON; give an object")
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


GENERAL: Final = "vllm.general_plugins"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        state: "ok"; "less": the engine starts with reduced function; "no": it does not start, or not as configured.
    """

    what: str
    state: Literal["ok", "less", "no"]
    found: str


def findings(registry: str | None, report: Callable[[str], None]) -> list[Finding]:
    """Checks vLLM, its plugins, the platform, the registry and the models; `report` receives progress messages."""
    report("checking vLLM")
    found = [_version(), _plugin(GENERAL, "methods of the engine"), _plugin(ENDPOINTS, "HTTP routes")]
    report("checking the platform")
    found.append(_checked("platform", "cannot create a tensor", lambda: ", ".join(dict.fromkeys(engine.platform()))))
    found.append(_checked("scheduling", f"vLLM cannot be configured with {SCHEDULER}", _scheduling))
    report("checking the registry")
    return found + _registry(read_config({"presage": {"registry": registry}}))


RUST: Final = "VLLM_USE_RUST_FRONTEND"
"""The variable that replaces vLLM's HTTP server by one without plugins."""


def _version() -> Finding:
    differing = engine_check.differences()
    if differing:
        return Finding("vLLM", "no", "; ".join(differing))
    if left_out := engine_check.lacking():
        without = "; ".join(f"no policies of {policies}: {reason}" for policies, reason in left_out.items())
        return Finding("vLLM", "less", f"{engine_check.installed()}: {without}")
    state = "verified" if engine_check.verified() else "accepted, not verified"
    verified = ", ".join(engine_check.VERIFIED)
    return Finding(
        "vLLM", "ok", f"{engine_check.installed()}, {state} (verified: {verified}; accepted: {engine_check.WINDOW})"
    )


def _checked(what: str, problem: str, check: Callable[[], str]) -> Finding:
    """A finding of what `check` returns, or of the kind of its error."""
    try:
        return Finding(what, "ok", check())
    except Exception as error:
        return Finding(what, "no", f"{problem}: {type(error).__name__}")


def _plugin(group: str, called: str) -> Finding:
    what = f"plugin: {called}"
    if group == ENDPOINTS and os.environ.get(RUST, "0") not in ("", "0"):
        lost = "no status, metrics, explanations or modes, no tenants, and workflows end only by workflow_end or time"
        return Finding(what, "less", f"{RUST} is set, and that server loads none: {lost}; unset it for them")
    plugins = [plugin for plugin in entry_points(group=group) if plugin.name == PLUGIN]
    if not plugins:
        return Finding(what, "no", f"{group} has no {PLUGIN}; reinstall Presage, its metadata is outdated")

    def found() -> str:
        plugins[0].load()
        allowed = os.environ.get("VLLM_PLUGINS")
        if (allowed is None and group == ENDPOINTS) or (allowed is not None and PLUGIN not in allowed.split(",")):
            return "found; `presage serve` adds it to VLLM_PLUGINS, for `vllm serve` add it yourself"
        return "found"

    return _checked(what, "cannot be loaded", found)


def _scheduling() -> str:
    if engine.schedules_ahead(SCHEDULER):
        return "asynchronous: a step is scheduled while the previous one runs"
    return "synchronous"


def _registry(config: PresageConfig) -> list[Finding]:
    uri = resolve_registry_uri(config.registry)
    answers = Finding("registry", "less", "none; optional: online counts forecast once they have enough data")
    if uri is not None:
        try:
            open_existing(uri)
            answers = Finding("registry", "ok", f"{without_passwords(uri)} answers")
        except Exception as error:
            answers = Finding("registry", "no", str(error))
    models = predictors(config).items()
    return [answers, *(_model(kind, held, answers.state == "ok") for kind, held in models)]


def _model(kind: str, held: Held, registry: bool) -> Finding:
    if held.predictor is not None:
        return Finding(f"model: {kind}", "ok", str(model_status(held)))
    return Finding(f"model: {kind}", "less", str(model_status(held)) if registry else "none, without a registry")
