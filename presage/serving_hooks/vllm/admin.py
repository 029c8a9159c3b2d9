"""Routes that change how an engine works: they exist where an admin key is set, and ask for it.

    POST /v1/workflows/mode   {"mode": "off", "policy": "eviction", "workflow_type": "review"}
    GET  /v1/workflows/mode   ->  {"engines": [...]}

The key comes in the header `ADMIN_KEY_HEADER`; vLLM's own API key, where there is one, is asked for before it. The
answers: 404 no admin key is set, 401 none was sent, 403 it is another one.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from presage.errors import ConfigurationError
from presage.serving_hooks.vllm.config import read_config
from presage.serving_hooks.vllm.metadata import MAX_NAME
from presage.serving_hooks.vllm.mode_names import ADMIN_KEY_HEADER, ModeName, PolicyName

SHORTEST_KEY: Final = 16

Call = Callable[..., Any]
"""Calls a method of every engine behind the server; awaited."""


class ModeSaid(BaseModel):
    """How far policies are to go."""

    model_config = ConfigDict(extra="forbid")

    mode: ModeName
    policy: PolicyName | None = None
    workflow_type: str | None = Field(None, max_length=MAX_NAME)


def admin_key(args: Any, environment: Mapping[str, str] = os.environ) -> str | None:
    """The admin key of a server; None where none is set.

    Args:
        args: of vLLM's server; its `additional_config` may name another variable.
        environment: where the key is.

    Raises:
        ConfigurationError: it is too short to be one, or the settings are no good.
    """
    name = read_config(getattr(args, "additional_config", None)).admin_key_variable
    key = environment.get(name)
    if key and len(key) < SHORTEST_KEY:
        raise ConfigurationError(f"{name} has {len(key)} characters; give {SHORTEST_KEY} or more, or unset it")
    return key or None


def add_admin_routes(app: FastAPI, key: str, call: Call) -> None:
    """Adds the routes.

    Args:
        app: of the server.
        key: that is asked for.
        call: reaches the engines.
    """
    wanted = sha256(key.encode()).digest()

    def door(sent: Annotated[str | None, Header(alias=ADMIN_KEY_HEADER)] = None) -> None:
        if sent is None:
            raise HTTPException(401, f"send the admin key in the header {ADMIN_KEY_HEADER}")
        if not hmac.compare_digest(sha256(sent.encode()).digest(), wanted):
            raise HTTPException(403, "this is not the admin key")

    async def say(said: ModeSaid) -> dict[str, list[Any]]:
        answers = await call("presage_set_mode", said.mode, said.policy, said.workflow_type)
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:
            raise HTTPException(400, refused[0])
        return {"engines": answers}

    async def tell() -> dict[str, list[Any]]:
        return {"engines": await call("presage_modes")}

    behind = [Depends(door)]
    app.add_api_route("/v1/workflows/mode", say, methods=["POST"], dependencies=behind)
    app.add_api_route("/v1/workflows/mode", tell, methods=["GET"], dependencies=behind)


def set_mode(core: Any, mode: str, policy: str | None, workflow_type: str | None) -> dict[str, Any]:
    """Tells the scheduler of an engine's core how far policies go; another scheduler says nothing."""
    scheduler = core.scheduler
    if not hasattr(scheduler, "set_mode"):
        return {}
    try:
        return dict(scheduler.set_mode(mode, policy, workflow_type))
    except ConfigurationError as error:
        return {"refused": str(error)}


def modes(core: Any) -> dict[str, Any]:
    """How far the policies of an engine's core go."""
    return dict(core.scheduler.modes()) if hasattr(core.scheduler, "modes") else {}
