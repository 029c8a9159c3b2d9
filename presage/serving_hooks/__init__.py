"""Forecasts at run time."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "presage.serving_hooks.gateway": "presage.gateway",
    "presage.serving_hooks.replay": "presage.replay",
    "presage.serving_hooks.tool_service": "presage.tool_service",
    "presage.serving_hooks.vllm.plugin": "presage.serving_hooks.vllm.http.plugin",  # an entry point, once installed
    "presage.serving_hooks.vllm.carriers": "presage.serving_hooks.vllm.http.carriers",
    "presage.serving_hooks.vllm.engine_check": "presage.serving_hooks.vllm.start.engine_check",
    "presage.serving_hooks.vllm.listeners": "presage.serving_hooks.listeners",
    "presage.serving_hooks.vllm.modes": "presage.serving_hooks.modes",
    "presage.serving_hooks.vllm.request_sources": "presage.serving_hooks.vllm.http.request_sources",
    "presage.serving_hooks.workflows.inference": "presage.serving_hooks.identity.inference",
}


class _FormerPaths(MetaPathFinder, Loader):
    """What has moved answers to its former path, with a warning, for one version."""

    def find_spec(self, name: str, *_others: Any) -> ModuleSpec | None:
        for former, path in _MOVED.items():
            if name == former or name.startswith(f"{former}."):
                return ModuleSpec(name, self, loader_state=path + name.removeprefix(former))
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        path = module.__spec__.loader_state
        if module.__name__ in _MOVED:  # once a room
            message = f"{module.__name__} is now {path}; the former path goes with the next version"
            warnings.warn(message, FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(path)


sys.meta_path.insert(0, _FormerPaths())
