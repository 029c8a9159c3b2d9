"""Settings of the recorder: the object `recorder` of the hooks' settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from presage.errors import ConfigurationError

Redact = Callable[[str, str], object]
"""Called with a text and the column it is for; returns what may be kept of it, or None."""


class RecorderConfig(BaseModel):
    """Settings of the recorder; only `folder` is required."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    folder: str = Field(min_length=1, description="where recordings go; created if missing. Engines may share it")
    states: Literal["off", "prefill", "both"] = Field(
        "off", description="hidden states to record: none, after prefill, or also after the last output token"
    )
    text: Literal["off", "on"] = Field("off", description="whether to record prompts and answers")
    redact: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="package.module:function, called with each text and its column; returns what may be kept, or None",
    )
    rows_per_file: int = Field(50_000, ge=1, description="rows after which a file is full")
    file_mb: int = Field(256, ge=1, description="MiB after which a file is full")
    file_age_s: float = Field(600.0, gt=0, allow_inf_nan=False, description="seconds after which a file is full")
    max_mb: int = Field(
        10_240,
        ge=1,
        description="MiB that all recordings in the folder may take; recording then stops until there is room",
    )
    queue_rows: int = Field(16_384, ge=1, description="rows that may wait for the disk; more are dropped")
    queue_mb: int = Field(256, ge=1, description="MiB of rows that may wait for the disk")
    flush_s: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="seconds after which a row is in its file, if the disk keeps up"
    )
    linger_s: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="seconds that a completed step waits for its last state at most"
    )


def load_redact(name: str | None) -> Redact | None:
    """Imports the configured redaction.

    Raises:
        ConfigurationError: it is no function, or cannot be imported.
    """
    if name is None:
        return None
    module, function = name.split(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"recorder.redact is {name}, which cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"recorder.redact is {name}, a {type(found).__name__}; name a function")
    redact: Redact = found
    return redact
