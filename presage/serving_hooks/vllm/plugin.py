"""The HTTP routes of the hooks: a workflow's end, the status, explanations, and how far policies go.

Two plugins by the name `presage`, for vLLM keeps the two apart: one adds methods to the engine's core, the other adds
the routes that call them. vLLM loads routes only where `VLLM_PLUGINS=presage` names them; without them a workflow
still ends by `workflow_end` on its last request, or by its time to live.

    POST /v1/workflows/r1/end?workflow_type=review   ->  {"ended": true}
    GET  /v1/workflows/status                        ->  {"engines": [...]}
    GET  /metrics                                    ->  vLLM's own, and ours behind them (metrics.py)
    GET  /v1/workflows/r1/explain?workflow_type=review  ->  {"engines": [...]}, of those that know it

The type may also stand in the body, `{"workflow_type": "review"}`; without one it is that of requests that give none.

Routes that change how an engine works exist where an admin key is set, and ask for it:

    POST /v1/workflows/mode   {"mode": "off", "policy": "eviction", "workflow_type": "review"}
    GET  /v1/workflows/mode   ->  {"engines": [...]}

The key comes in the header `ADMIN_KEY_HEADER`; vLLM's own API key, where there is one, is asked for before it. The
answers: 404 no admin key is set, 401 none was sent, 403 it is another one.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from presage.errors import ConfigurationError
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.config import read_config
from presage.serving_hooks.vllm.engine import EngineClient
from presage.serving_hooks.vllm.metadata import MAX_NAME
from presage.serving_hooks.vllm.metrics_page import Appended, StatusCache
from presage.serving_hooks.vllm.mode_names import ADMIN_KEY_HEADER, ModeName, PolicyName
from presage.serving_hooks.vllm.tenants import NotesTenant, Tenants, keys_of, mark, tenant
from presage.serving_hooks.workflows.identity import scoped

logger = logging.getLogger(__name__)


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


def workflow_ended(core: Any, workflow_type: str, workflow_id: str) -> bool:
    """Tells the scheduler of an engine's core; whether it knew the workflow. Another scheduler knows none."""
    scheduler = core.scheduler
    return bool(scheduler.workflow_ended(workflow_type, workflow_id)) if hasattr(scheduler, "workflow_ended") else False


def status(core: Any) -> dict[str, Any]:
    """What the scheduler of an engine's core says of its policies; another scheduler says nothing."""
    scheduler = core.scheduler
    return dict(scheduler.presage_status()) if hasattr(scheduler, "presage_status") else {}


def explain(core: Any, workflow_type: str, workflow_id: str) -> dict[str, Any]:
    """What the scheduler of an engine's core knows of a workflow, and why it does what; empty for one it has not."""
    scheduler = core.scheduler
    if not hasattr(scheduler, "explain"):
        return {}
    told = dict(scheduler.explain(workflow_type, workflow_id))
    return told if told["alive"] or told["forecasts"] or told["requests"] else {}


def register() -> None:
    """Called by vLLM in each of its processes, whichever scheduler is used: must not fail."""
    try:
        engine.add_engine_methods(
            {
                "presage_workflow_ended": workflow_ended,
                "presage_status": status,
                "presage_explain": explain,
                "presage_set_mode": set_mode,
                "presage_modes": modes,
            }
        )
    except Exception as error:
        logger.warning("the end of a workflow cannot be said over HTTP: %s", type(error).__name__)


Type = Annotated[str | None, Query(max_length=MAX_NAME)]
Id = Annotated[str, Path(min_length=1, max_length=MAX_NAME)]


class WorkflowEnd(BaseModel):
    """What the body may say of a workflow that sends no more requests."""

    model_config = ConfigDict(extra="forbid")

    workflow_type: str = Field(max_length=MAX_NAME)


class WorkflowRoutes:
    """What vLLM asks of an endpoint plugin."""

    name = "presage"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._engines: EngineClient | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, and what tells clients apart."""
        args = getattr(app.state, "args", None)
        app.add_middleware(NotesTenant, tenants=Tenants(keys_of(args)))
        key = admin_key(args)
        if key is not None:
            add_admin_routes(app, key, self._call)

        async def end(workflow_id: Id, workflow_type: Type = None, body: WorkflowEnd | None = None) -> dict[str, bool]:
            said = {name for name in (workflow_type, body.workflow_type if body else None) if name is not None}
            if len(said) > 1:
                raise HTTPException(400, "the query and the body name two workflow types; give one")
            answers = await self._call("presage_workflow_ended", said.pop() if said else "", _own(workflow_id))
            return {"ended": any(answers)}

        async def status_of_all() -> dict[str, list[Any]]:
            return {"engines": await self._call("presage_status")}

        async def explain_one(workflow_id: Id, workflow_type: Type = None) -> dict[str, list[Any]]:
            told = [one for one in await self._call("presage_explain", workflow_type or "", _own(workflow_id)) if one]
            if not told:
                raise HTTPException(
                    404, "no engine knows this workflow; its workflow_type is the one its requests give"
                )
            return {"engines": told}

        # An id may hold a slash: a path, not one part of it.
        app.add_api_route("/v1/workflows/{workflow_id:path}/end", end, methods=["POST"])
        app.add_api_route("/v1/workflows/{workflow_id:path}/explain", explain_one, methods=["GET"])
        app.add_api_route("/v1/workflows/status", status_of_all, methods=["GET"])
        app.add_middleware(Appended, asked=StatusCache(self._statuses))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Is told of the engine; None on a server without one."""
        if engine_client is not None:
            self._engines = EngineClient(engine_client)
            self._engines.on_generate(mark)

    async def _statuses(self) -> list[tuple[str, dict[str, Any]]]:
        answers = await self._call("presage_status")
        names = self._engines.names if self._engines is not None else []
        return list(zip(names, answers, strict=True))

    async def _call(self, method: str, *args: str | None) -> list[Any]:
        if self._engines is None:
            raise HTTPException(503, "no engine runs behind this server; ask the one that serves the workflow")
        return await self._engines.call(method, *args)


def _own(workflow_id: str) -> str:
    """A workflow as the client that asks means it: its own, whatever others call theirs."""
    return scoped(tenant(), workflow_id)
