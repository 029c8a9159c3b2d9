"""Checks what an engine with the hooks needs, with the functions that the engine itself uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from presage.serving_hooks.forecasting.sources import Held
from presage.serving_hooks.vllm import engine, engine_check
from presage.serving_hooks.vllm.ask_registry import open_existing, resolve_registry_uri
from presage.serving_hooks.vllm.command import ENDPOINTS, PLUGIN, SCHEDULER
from presage.serving_hooks.vllm.config import PresageConfig, read_config
from presage.serving_hooks.vllm.registered import model_status, predictors

GENERAL: Final = "vllm.general_plugins"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: was checked.
        state: "ok"; "less": the engine starts with reduced function; "no": it does not start, or not as configured.
        found: a description.
    """

    what: str
    state: Literal["ok", "less", "no"]
    found: str


def findings(registry: str | None, report: Callable[[str], None]) -> list[Finding]:
    """Checks vLLM, its plugins, the platform, the registry and the models.

    Args:
        registry: the setting of that name.
        report: receives progress messages.
    """
    report("looking at vLLM")
    found = [_version(), *_plugins()]
    report("looking at the platform")
    found += [_platform(), _scheduling()]
    report("asking the registry")
    return found + _registry(read_config({"presage": {"registry": registry}}))


def _version() -> Finding:
    differing = engine_check.differences()
    if differing:
        return Finding("vLLM", "no", "; ".join(differing))
    return Finding("vLLM", "ok", f"{engine_check.installed()}, supported ({engine_check.WINDOW}.*)")


def _plugins() -> list[Finding]:
    groups = {GENERAL: "methods of the engine", ENDPOINTS: "HTTP routes"}
    return [_plugin(group, called) for group, called in groups.items()]


def _plugin(group: str, called: str) -> Finding:
    what = f"plugin: {called}"
    plugins = [plugin for plugin in entry_points(group=group) if plugin.name == PLUGIN]
    if not plugins:
        return Finding(what, "no", f"{group} holds no {PLUGIN}; install Presage again, its metadata is of another time")
    try:
        plugins[0].load()
    except Exception as error:
        return Finding(what, "no", f"cannot be loaded: {type(error).__name__}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if (allowed is None and group == ENDPOINTS) or (allowed is not None and PLUGIN not in allowed.split(",")):
        return Finding(what, "ok", "there; `presage serve` adds it to VLLM_PLUGINS, `vllm serve` wants it named there")
    return Finding(what, "ok", "there")


def _platform() -> Finding:
    try:
        kind, device = engine.platform()
    except Exception as error:
        return Finding("platform", "no", f"a tensor cannot be made on it: {type(error).__name__}")
    return Finding("platform", "ok", kind if kind == device else f"{kind}, {device}")


def _scheduling() -> Finding:
    try:
        ahead = engine.schedules_ahead(SCHEDULER)
    except Exception as error:
        return Finding("scheduling", "no", f"vLLM makes no configuration with {SCHEDULER}: {type(error).__name__}")
    how = "asynchronous: a step is scheduled while the one before runs" if ahead else "synchronous"
    return Finding("scheduling", "ok", how)


def _registry(config: PresageConfig) -> list[Finding]:
    uri = resolve_registry_uri(config.registry)
    if uri is None:
        answers = Finding("registry", "less", "none, and none is needed: counts learnt online answer after a while")
    else:
        try:
            open_existing(uri)
            answers = Finding("registry", "ok", f"{uri} answers")
        except Exception as error:
            answers = Finding("registry", "no", str(error))
    held = predictors(config)
    there = answers.state == "ok"
    models = [_model("next-agent", held.next_agent, there), _model("remaining-length", held.remaining_length, there)]
    return [answers, *models]


def _model(kind: str, held: Held[Any], registry: bool) -> Finding:
    if held.predictor is not None:
        return Finding(f"model: {kind}", "ok", str(model_status(held)))
    return Finding(f"model: {kind}", "less", str(model_status(held)) if registry else "none, without a registry")
