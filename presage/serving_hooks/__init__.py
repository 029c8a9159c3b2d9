"""Forecasts at run time."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _FormerPaths(MetaPathFinder, Loader):
    """Rooms that stood in `presage.serving_hooks` answer to their former path, with a warning, for one version."""

    def find_spec(self, name: str, *_others: Any) -> ModuleSpec | None:
        package, _, rest = name.removeprefix("presage.serving_hooks.").partition(".")
        former = name.startswith("presage.serving_hooks.") and package in ("gateway", "replay", "tool_service")
        return ModuleSpec(name, self, loader_state=f"presage.{package}.{rest}".rstrip(".")) if former else None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        path = module.__spec__.loader_state
        if path.count(".") == 1:  # once a room
            message = f"{module.__name__} is now {path}; the former path goes with the next version"
            warnings.warn(message, FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(path)


sys.meta_path.insert(0, _FormerPaths())
