"""The end of a workflow, said over HTTP, for clients that learn of it only after their last request.

Two plugins by the name `presage`, for vLLM keeps the two apart: one adds methods to the engine's core, the other adds
the routes that call them. vLLM loads routes only where `VLLM_PLUGINS=presage` names them; without them a workflow
still ends by `workflow_end` on its last request, or by its time to live.

    POST /v1/workflows/r1/end?workflow_type=review   ->  {"ended": true}
    GET  /v1/workflows/status                        ->  {"engines": [...]}
    GET  /metrics                                    ->  vLLM's own, and ours behind them (metrics_scrape.py)
    GET  /v1/workflows/r1/explain?workflow_type=review  ->  {"engines": [...]}, of those that know it

The type may also stand in the body, `{"workflow_type": "review"}`; without one it is that of requests that give none.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from presage.serving_hooks.forecasting.names import scoped
from presage.serving_hooks.vllm import admin, compat
from presage.serving_hooks.vllm.metadata import MAX_NAME
from presage.serving_hooks.vllm.metrics_scrape import Appended, Asked
from presage.serving_hooks.vllm.tenants import NotesTenant, Tenants, keys_of, mark, tenant

logger = logging.getLogger(__name__)


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
        compat.add_to_engine(
            {
                "presage_workflow_ended": workflow_ended,
                "presage_status": status,
                "presage_explain": explain,
                "presage_set_mode": admin.set_mode,
                "presage_modes": admin.modes,
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
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, and what tells clients apart."""
        args = getattr(app.state, "args", None)
        app.add_middleware(NotesTenant, tenants=Tenants(keys_of(args)))
        key = admin.admin_key(args)
        if key is not None:
            admin.add_admin_routes(app, key, self._call)

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
        app.add_middleware(Appended, asked=Asked(self._statuses))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Is told of the engine; None on a server without one."""
        self._engine = engine_client
        if engine_client is not None:
            compat.on_generate(engine_client, mark)

    async def _statuses(self) -> list[tuple[str, dict[str, Any]]]:
        answers = await self._call("presage_status")
        return list(zip(compat.engine_names(self._engine), answers, strict=True))

    async def _call(self, method: str, *args: str | None) -> list[Any]:
        if self._engine is None:
            raise HTTPException(503, "no engine runs behind this server; ask the one that serves the workflow")
        return await compat.call_engines(self._engine, method, *args)


def _own(workflow_id: str) -> str:
    """A workflow as the client that asks means it: its own, whatever others call theirs."""
    return scoped(tenant(), workflow_id)
