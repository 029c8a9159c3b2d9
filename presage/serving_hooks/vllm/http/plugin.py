"""HTTP routes: end or pause a workflow, status, explanations, and modes of policies.

There are two vLLM plugins named `presage`: one adds a method to the engine core, the other adds the routes that call
it. vLLM loads routes only if `VLLM_PLUGINS=presage` names them.

    POST /v1/workflows/r1/end?workflow_type=review   ->  {"ended": true}
    POST /v1/workflows/r1/pause?workflow_type=review ->  {"paused": true}
    GET  /                                           ->  a page that shows all of these (page.py)
    GET  /v1/workflows?first=0&most=50               ->  {"engines": [...]}, running ones and those that ended lately
    GET  /v1/workflows/agents                        ->  {"engines": [...]}
    GET  /v1/workflows/status                        ->  {"engines": [...]}
    GET  /metrics                                    ->  vLLM's metrics, followed by ours (metrics.py)
    GET  /v1/workflows/r1/explain?workflow_type=review  ->  {"engines": [...]}, of those that know it

The body may give the type instead, `{"workflow_type": "review"}`; the default is that of requests without a type.

Routes that change an engine exist only if an admin key is set, and require it:

    POST /v1/workflows/mode   {"mode": "off", "policy": "eviction", "workflow_type": "review"}
    GET  /v1/workflows/mode   ->  {"engines": [...]}

Status codes: 404 no admin key is set, 401 none was sent, 403 the key is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from presage.datasets.schema.names import MAX_NAME
from presage.errors import ConfigurationError, EngineError
from presage.features.agent_names import AgentNames
from presage.serving_hooks import admin
from presage.serving_hooks.mode_names import ADMIN_KEY_HEADER, ModeName, PolicyName
from presage.serving_hooks.page import overview_page
from presage.serving_hooks.settings import NO_TYPES
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.config import read_config
from presage.serving_hooks.vllm.engine import EngineClient
from presage.serving_hooks.vllm.http import answers, carriers, texts
from presage.serving_hooks.vllm.http.answers import AnswerMiddleware
from presage.serving_hooks.vllm.http.carriers import CarrierMiddleware
from presage.serving_hooks.vllm.http.metrics_page import Appended, StatusCache
from presage.serving_hooks.vllm.http.request_sources import RequestSources, ServerNames
from presage.serving_hooks.vllm.http.texts import ServerTexts, TextMiddleware
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.metadata import MISTAKES
from presage.serving_hooks.workflows.observed import OBSERVED, REQUEST, name_unnamed
from presage.serving_hooks.workflows.tenants import (
    ANONYMOUS,
    ARGUMENT,
    TenantMiddleware,
    Tenants,
    keys_of,
    mark,
    tenant,
)

logger = logging.getLogger(__name__)

JOINED: Final = (
    "workflows are inferred and recorded, and all clients are one tenant, as behind a proxy with one key: requests of "
    "several users may be joined to one recorded workflow. Give users who must be apart keys of their own, or a "
    "cache_salt, or set infer_workflows to false (docs/identity.md#bounds-and-attacks)"
)

METHOD: Final = "presage_call"
"""Name of `call_scheduler` in vLLM's engine core."""

AdminKey = Annotated[str | None, Header(alias=ADMIN_KEY_HEADER)]

Call = Callable[..., Any]
"""Calls a method of the scheduler of every engine behind the server; awaited."""


class ModeRequest(BaseModel):
    """The body of a request that sets a mode."""

    model_config = ConfigDict(extra="forbid")

    mode: ModeName
    policy: PolicyName | None = None
    workflow_type: str | None = Field(None, max_length=MAX_NAME)


def admin_key(args: Any) -> str | None:
    """The admin key in the environment; None where none is set. The server's `additional_config` names the variable.

    Raises:
        ConfigurationError: the key is too short, or the settings are invalid.
    """
    return admin.admin_key(read_config(getattr(args, "additional_config", None)).admin_key_variable)


def add_admin_routes(app: FastAPI, key: str, call: Call) -> None:
    """Adds the routes that require this key in the header."""

    def check_key(sent: AdminKey = None) -> None:
        if refused := admin.refusal(sent, key):
            raise HTTPException(*refused)

    async def set_one(request: ModeRequest) -> dict[str, list[Any]]:
        answers = await call("set_mode", request.mode, request.policy, request.workflow_type)
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:
            raise HTTPException(400, refused[0])
        return {"engines": answers}

    async def get_all() -> dict[str, list[Any]]:
        return {"engines": await call("modes")}

    guarded = [Depends(check_key)]
    app.add_api_route("/v1/workflows/mode", set_one, methods=["POST"], dependencies=guarded)
    app.add_api_route("/v1/workflows/mode", get_all, methods=["GET"], dependencies=guarded)


def call_scheduler(core: Any, method: str, arguments: Sequence[Any] = ()) -> Any:
    """Calls a method of an engine's scheduler. The arguments are one list, since vLLM counts those of its methods.

    Returns:
        plain data: {} if the engine has another scheduler, {"refused": reason} if a setting is invalid.
    """
    if not hasattr(core.scheduler, method):
        return {}
    try:
        return getattr(core.scheduler, method)(*arguments)
    except ConfigurationError as error:
        return {"refused": str(error)}


def register() -> None:
    """Called by vLLM in each of its processes, with any scheduler: must not fail."""
    try:
        engine.add_engine_method(METHOD, call_scheduler)
    except Exception as error:
        logger.warning("the HTTP routes of Presage cannot reach the engine: %s", type(error).__name__)


Type = Annotated[str | None, Query(max_length=MAX_NAME)]
Count = Annotated[int, Query(ge=0, lt=10**9)]
Id = Annotated[str, Path(min_length=1, max_length=MAX_NAME)]


class WorkflowEnd(BaseModel):
    """The body of a request that ends a workflow."""

    model_config = ConfigDict(extra="forbid")

    workflow_type: str = Field(max_length=MAX_NAME)


class WorkflowRoutes:
    """The endpoint plugin.

    Attributes:
        texts: what computes features of texts; None where the setting `texts` is off.
        names: what the models call agents; None before there are routes.
    """

    name = "presage"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._engines: EngineClient | None = None
        self.texts: ServerTexts | None = None
        self.names: ServerNames | None = None
        self._infers = False
        self._tenants = 0

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, and the middleware that isolates tenants and reads names, prompts and answers."""
        args = getattr(app.state, "args", None)
        config = read_config(getattr(args, "additional_config", None))
        self._infers, self._tenants = config.infer_workflows, len(set(keys_of(args)))
        if config.answers:
            app.add_middleware(AnswerMiddleware, report=self._answered)
        if config.texts:
            self.texts = ServerTexts(partial(self._call, "text_models"))
            app.add_middleware(TextMiddleware, texts=self.texts, report=self._answer_text)
        names = AgentNames.load(FilePath(config.agent_names)) if config.agent_names else None
        sources = RequestSources(names, (config.workflow_type or NO_TYPES).given)
        self.names = ServerNames(partial(self._call, "agent_names"), sources.agents)
        app.add_middleware(CarrierMiddleware, sources=sources)
        app.add_middleware(TenantMiddleware, tenants=Tenants(keys_of(args)))
        key = admin_key(args)
        if key is not None:
            add_admin_routes(app, key, self._call)

        async def end(workflow_id: Id, workflow_type: Type = None, body: WorkflowEnd | None = None) -> dict[str, bool]:
            types = {name for name in (workflow_type, body.workflow_type if body else None) if name is not None}
            if len(types) > 1:
                raise HTTPException(400, "the query and the body name two workflow types; give one")
            answers = await self._call("workflow_ended", types.pop() if types else "", _own(workflow_id))
            return {"ended": any(answers)}

        async def pause(workflow_id: Id, workflow_type: Type = None) -> dict[str, bool]:
            return {"paused": any(await self._call("workflow_paused", workflow_type or "", _own(workflow_id)))}

        async def status_of_all(sent: AdminKey = None) -> dict[str, list[Any]]:
            """Without the names of other tenants, except for the admin."""
            whole = key is not None and sent is not None and admin.refusal(sent, key) is None
            return {"engines": await self._call("presage_status", "" if whole else tenant())}

        async def list_all(first: Count = 0, most: Count = 50) -> dict[str, list[Any]]:
            return {"engines": await self._call("workflows", tenant(), first, most)}

        async def list_agents() -> dict[str, list[Any]]:
            return {"engines": await self._call("agents", tenant())}

        async def explain_one(workflow_id: Id, workflow_type: Type = None) -> dict[str, list[Any]]:
            answers = await self._call("explain", workflow_type or "", _own(workflow_id))
            shown = ("alive", "forecasts", "requests")
            known = [answer for answer in answers if any(answer.get(key) for key in shown)]
            if not known:
                raise HTTPException(404, "no engine knows this workflow; give the workflow_type that its requests give")
            return {"engines": known}

        # `:path`, since an id may contain a slash.
        app.add_api_route("/v1/workflows/{workflow_id:path}/end", end, methods=["POST"])
        app.add_api_route("/v1/workflows/{workflow_id:path}/pause", pause, methods=["POST"])
        app.add_api_route("/v1/workflows/{workflow_id:path}/explain", explain_one, methods=["GET"])
        app.add_api_route("/v1/workflows", list_all, methods=["GET"])
        app.add_api_route("/v1/workflows/agents", list_agents, methods=["GET"])
        app.add_api_route("/v1/workflows/status", status_of_all, methods=["GET"])
        if all(getattr(route, "path", None) != "/" for route in app.routes):  # vLLM has none
            app.add_route("/", overview_page, include_in_schema=False)
        app.add_middleware(Appended, ask=StatusCache(self._statuses), types=config.metrics_by_type)
        if config.infer_workflows and config.recorder is not None and self._tenants < 2:
            logger.warning(JOINED)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Receives the engine's client; None on a server without an engine.

        Raises:
            EngineError: clients have different keys, and this vLLM does not let their requests be marked.
        """
        if engine_client is not None:
            self._engines = EngineClient(engine_client)
            try:
                self._engines.on_generate(partial(_generates, self._infers))
            except (AttributeError, TypeError) as error:  # slots, or a class in C or Rust
                if self._tenants > 1:
                    raise EngineError(
                        "this vLLM does not let requests be marked with their API keys, so clients with different keys "
                        "could take each other's workflows; give one key, or remove presage from VLLM_PLUGINS"
                    ) from error
                logger.warning("requests are served without what the server tells of them: %s", type(error).__name__)
            for followed in (self.texts, self.names):
                if followed is not None:
                    followed.start()

    async def _answered(self, step: Step | str, finish_reason: str, tools: list[str], lost: int) -> None:
        if isinstance(step, str):
            await self._call("request_answered", step, finish_reason, tools, lost)
            return
        names = step.workflow_type, step.workflow_id, step.agent, step.number
        await self._call("step_answered", *names, finish_reason, tools, lost)

    async def _answer_text(self, step: Step | str, features: dict[str, str]) -> None:
        if isinstance(step, str):
            await self._call("request_answer_text", step, features)
            return
        names = step.workflow_type, step.workflow_id, step.agent, step.number
        await self._call("answer_text", *names, features)

    async def _statuses(self) -> list[tuple[str, dict[str, Any]]]:
        answers = await self._call("presage_status")
        names = self._engines.names if self._engines is not None else []
        return list(zip(names, answers, strict=True))

    async def _call(self, method: str, *args: Any) -> list[Any]:
        if self._engines is None:
            raise HTTPException(503, "no engine runs behind this server; ask the one that serves the workflow")
        return await self._engines.call(METHOD, method, args)


_OF_SERVER: Final = (ARGUMENT, MISTAKES, OBSERVED, REQUEST, texts.ARGUMENT)
"""Keys in `extra_args` that only this server writes; what a client writes there is discarded."""


def _generates(infers: bool, params: Any, session_id: object) -> None:
    """A request is about to reach the engine. Does not raise: `call_before` would not mark the next one."""
    sent = getattr(params, "extra_args", None)
    try:
        params.extra_args = _of_client(sent)
        carriers.generates(params, session_id)
        mark(params)
        name_unnamed(params, session_id, infers)
        answers.generates(params, session_id)
        texts.generates(params, session_id)
        params.extra_args = params.extra_args or (None if sent is None else {})
    except Exception as error:
        logger.warning("a request is served without what the server tells of it: %s", type(error).__name__)
        # Unmarked, it would be of all tenants.
        params.extra_args = _of_client(sent) | ({ARGUMENT: ANONYMOUS} if tenant() else {})


def _of_client(sent: object) -> dict[str, Any]:
    """Extra arguments as a client sent them, to be added to: its dict may be that of several requests."""
    arguments = dict(sent) if isinstance(sent, dict) else {}
    for key in _OF_SERVER:
        arguments.pop(key, None)
    return arguments


def _own(workflow_id: str) -> str:
    """The workflow id within the tenant of the requesting client."""
    return scoped(tenant(), workflow_id)
