"""The end of a workflow, said over HTTP, for clients that learn of it only after their last request.

Two plugins by the name `presage`, for vLLM keeps the two apart: one adds methods to the engine's core, the other adds
the routes that call them. vLLM loads routes only where `VLLM_PLUGINS=presage` names them; without them a workflow
still ends by `workflow_end` on its last request, or by its time to live.

    POST /v1/workflows/end   {"workflow_type": "review", "workflow_id": "r1"}   ->  {"ended": true}
    GET  /v1/workflows/status                                                    ->  {"engines": [...]}
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from presage.serving_hooks.vllm import compat
from presage.serving_hooks.vllm.metadata import MAX_NAME

logger = logging.getLogger(__name__)


def workflow_ended(core: Any, workflow_type: str, workflow_id: str) -> bool:
    """Tells the scheduler of an engine's core; whether it knew the workflow. Another scheduler knows none."""
    scheduler = core.scheduler
    return bool(scheduler.workflow_ended(workflow_type, workflow_id)) if hasattr(scheduler, "workflow_ended") else False


def status(core: Any) -> dict[str, Any]:
    """What the scheduler of an engine's core says of its policies; another scheduler says nothing."""
    scheduler = core.scheduler
    return dict(scheduler.presage_status()) if hasattr(scheduler, "presage_status") else {}


def register() -> None:
    """Called by vLLM in each of its processes, whichever scheduler is used: must not fail."""
    try:
        compat.add_to_engine({"presage_workflow_ended": workflow_ended, "presage_status": status})
    except Exception as error:
        logger.warning("the end of a workflow cannot be said over HTTP: %s", type(error).__name__)


class WorkflowEnd(BaseModel):
    """A workflow that sends no more requests; names as its requests gave them."""

    model_config = ConfigDict(extra="forbid")

    workflow_type: str = Field("", max_length=MAX_NAME)
    workflow_id: str = Field(min_length=1, max_length=MAX_NAME)


class WorkflowRoutes:
    """What vLLM asks of an endpoint plugin."""

    name = "presage"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes."""

        async def end(body: WorkflowEnd) -> dict[str, bool]:
            answers = await self._call("presage_workflow_ended", body.workflow_type, body.workflow_id)
            return {"ended": any(answers)}

        async def said() -> dict[str, list[Any]]:
            return {"engines": await self._call("presage_status")}

        app.add_api_route("/v1/workflows/end", end, methods=["POST"])
        app.add_api_route("/v1/workflows/status", said, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Is told of the engine; None on a server without one."""
        self._engine = engine_client

    async def _call(self, method: str, *args: str) -> list[Any]:
        if self._engine is None:
            raise HTTPException(503, "no engine runs behind this server; ask the one that serves the workflow")
        return await compat.call_engines(self._engine, method, *args)
