"""Guests: parts that are off by default, each in a folder of its own, joined to the scheduler by a mixin."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from presage.serving_hooks.vllm.config import read_config

GUESTS: Final[Mapping[str, str]] = {"prefetch": "presage.serving_hooks.vllm.prefetch.scheduler:Prefetching"}
"""By setting the mixin, which goes before a class with the policies."""


def with_guests(scheduler: type[Any], vllm_config: Any) -> type[Any]:
    """The scheduler class with the guests that the settings ask for.

    Raises:
        ConfigurationError: `additional_config["presage"]` is invalid.
    """
    config, mixins = read_config(vllm_config.additional_config), []
    for setting, path in GUESTS.items():
        if getattr(config, setting):
            module, _, name = path.partition(":")
            mixins.append(getattr(import_module(module), name))
    return type(scheduler.__name__, (*mixins, scheduler), {}) if mixins else scheduler
