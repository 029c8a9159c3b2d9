"""Settings of the webhook: the object `webhook` of an engine's settings, the table [webhook] of a gateway file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from presage.errors import ConfigurationError
from presage.serving_hooks.lifecycle.event import LIFECYCLE_KINDS, LifecycleKind
from presage.serving_hooks.lifecycle.signature import secret_keys


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.fragment or "@" in parts.netloc:
        raise ValueError("give an address such as https://tools.example:9000/events, without user name")
    return value


class WebhookConfig(BaseModel):
    """Where lifecycle events are delivered; `url`, `file` and a secret are required."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    url: Annotated[str, AfterValidator(_url)]
    """address that events are posted to"""
    file: str = Field(min_length=1)
    """file in which events wait until they are delivered; created if missing. Processes of one machine that deliver to
    the same address may share it"""
    secret_variable: str = Field("PRESAGE_WEBHOOK_SECRET", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """environment variable with the secret that signs them, whsec_…; two, separated by a space, during a rotation"""
    secret_file: str | None = Field(None, min_length=1)
    """file with the secret, read in place of the variable"""
    kinds: Sequence[LifecycleKind] = LIFECYCLE_KINDS
    """kinds of events that are delivered"""
    batch: int = Field(500, ge=1, le=10_000)
    """events of one delivery at most; 1 sends each alone, as application/cloudevents+json"""
    timeout_s: float = Field(10.0, gt=0)
    """seconds for the receiver to answer"""
    longest_retry_s: float = Field(30.0, gt=0)
    """seconds between two tries at most; they begin at half a second and double"""
    most_waiting: int = Field(1_000_000, ge=1)
    """events that may wait in the file, 0.5 KB each; beyond that the oldest are dropped"""
    most_in_memory: int = Field(16_384, ge=1)
    """events that may wait for the file, some milliseconds; beyond that new ones are dropped"""

    def keys(self) -> tuple[bytes, ...]:
        """The keys that sign.

        Raises:
            ConfigurationError: there is no secret, or it has another form.
        """
        if self.secret_file is None:
            where, text = self.secret_variable, os.environ.get(self.secret_variable, "")
        else:
            where = self.secret_file
            try:
                text = Path(where).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"webhook.secret_file is {where}, which cannot be read ({type(error).__name__}); correct the path"
                ) from None
        try:
            return secret_keys(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None

    @property
    def host(self) -> str:
        """Host and port of the receiver: what logs show, since an address may hold a token."""
        return urlsplit(self.url).netloc
