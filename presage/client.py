"""Names a client application's workflows and agents to the gateway or to `presage serve`.

    client = OpenAI(base_url=GATEWAY, http_client=http_client())
    with workflow("report"), agent("planner"):
        client.chat.completions.create(...)

An event hook of the HTTP client (httpx or httpx2) writes the names into headers of each request. The gateway takes them
off, so no server behind it sees them. Without a workflow around it a request is sent as it is. A workflow that waits
for a human is left with `pause()` and entered again by its id, hours later and in any process.

The names follow the context: threads that copy it (LangGraph's) and asyncio tasks inherit them. This module imports the
standard library alone until one of the client libraries is used, so it can be copied into an application.
"""

from __future__ import annotations

import os
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

TYPE_HEADER: Final = "x-presage-workflow-type"
ID_HEADER: Final = "x-presage-workflow-id"
AGENT_HEADER: Final = "x-presage-agent"
_END_S: Final = 5.0
_GENERIC_NODES: Final = frozenset({"agent", "model", "llm"})
"""Nodes of LangGraph's prebuilt agents, which are no names of roles."""


@dataclass(eq=False)
class _Run:
    """One workflow.

    Attributes:
        agent: of its requests that no `agent` surrounds.
        places: where its requests went, and with which key: it is ended there.
        entered_by_id: whether another process may have sent its earlier requests.
        pauses: whether leaving it does not end it.
    """

    workflow_type: str
    workflow_id: str
    agent: str = ""
    places: dict[str, str] = field(default_factory=dict)
    entered_by_id: bool = False
    pauses: bool = False

    def leave(self) -> None:
        """Tells the gateway in a thread, since the caller may be an event loop; a failure leaves it to expire."""
        places = self.places or (_default_places() if self.entered_by_id else {})
        if places:
            threading.Thread(target=self._tell, args=(places, "pause" if self.pauses else "end")).start()

    def _tell(self, places: dict[str, str], what: str) -> None:
        names = quote(self.workflow_id, safe=""), what, quote(self.workflow_type, safe="")
        path = "/v1/workflows/{}/{}?workflow_type={}".format(*names)
        for place, key in places.items():
            headers = {"authorization": key} if key else {}
            request = urllib.request.Request(place + path, data=b"", headers=headers, method="POST")
            with suppress(OSError), urllib.request.urlopen(request, timeout=_END_S):
                pass


def _default_places() -> dict[str, str]:
    """Where this process sent its latest named request, else where OpenAI's clients send theirs."""
    place, api, _ = (os.environ.get("OPENAI_BASE_URL", "") + "/").partition("/v1/")
    key = os.environ.get("OPENAI_API_KEY")
    return _LATEST or ({place: f"Bearer {key}" if key else ""} if api else {})


_LATEST: dict[str, str] = {}
"""The place of the latest named request, and its key."""
_RUN: ContextVar[_Run | None] = ContextVar("presage_workflow", default=None)
_AGENT: ContextVar[str] = ContextVar("presage_agent", default="")


@contextmanager
def workflow(workflow_type: str, workflow_id: str | None = None, *, agent: str = "") -> Iterator[str]:
    """Names the requests within it, and ends the workflow at the gateway after it; yields the workflow's id.

    After `pause()` leaving it does not end it: whoever enters it by its id, in any process, goes on with it.

    Args:
        workflow_id: unique to this run of the application; default: drawn at random.
        agent: of requests within it that no `agent` surrounds.
    """
    run = _Run(workflow_type, workflow_id or uuid.uuid4().hex, agent, entered_by_id=workflow_id is not None)
    before, outer = _RUN.set(run), _AGENT.set("")
    try:
        yield run.workflow_id
    finally:
        _RUN.reset(before)
        _AGENT.reset(outer)
        run.leave()


def pause() -> None:
    """The workflow around it pauses, for a human's answer or a worker elsewhere: leaving it does not end it.

    The gateway keeps it until its next request, for three days at most. Outside of a workflow it does nothing.
    """
    run = _RUN.get()
    if run is not None:
        run.pauses = True


@contextmanager
def agent(name: str) -> Iterator[None]:
    """Names the agent of the requests within it."""
    before = _AGENT.set(name)
    try:
        yield
    finally:
        _AGENT.reset(before)


def names() -> dict[str, str]:
    """The headers of a request that is sent now, for clients without event hooks; percent-encoded, {} for no names."""
    run = _RUN.get()
    found = {AGENT_HEADER: _AGENT.get() or (run.agent if run else "")}
    if run is not None:
        found |= {TYPE_HEADER: run.workflow_type, ID_HEADER: run.workflow_id}
    return {name: quote(value, safe="") for name, value in found.items() if value}


def add_names(request: Any) -> None:
    """Event hook for a request of httpx or httpx2: adds the headers."""
    request.headers.update(names())
    run, (place, api, _) = _RUN.get(), str(request.url).partition("/v1/")
    if run is not None and api:
        run.places[place] = request.headers.get("authorization", "")
        _LATEST.clear()
        _LATEST[place] = run.places[place]


async def add_names_async(request: Any) -> None:
    """The same for an asynchronous client."""
    add_names(request)


def http_client(**options: Any) -> Any:
    """An HTTP client for `OpenAI` and `ChatOpenAI(http_client=…)`, with OpenAI's defaults and the hook.

    Args:
        options: of the client.
    """
    from openai import DefaultHttpxClient

    return DefaultHttpxClient(**_hooked(options, add_names))


def async_http_client(**options: Any) -> Any:
    """The same for `AsyncOpenAI` and `ChatOpenAI(http_async_client=…)`."""
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient(**_hooked(options, add_names_async))


def _hooked(options: dict[str, Any], hook: Any) -> dict[str, Any]:
    hooks = options.get("event_hooks") or {}
    return {**options, "event_hooks": {**hooks, "request": [*hooks.get("request", ()), hook]}}


def langchain_handler(workflow_type: str = "", workflow_id: str | None = None) -> Any:
    """A callback handler of LangChain and LangGraph, for `config={"callbacks": [langchain_handler()]}`.

    One run of a graph or chain is a workflow, which ends with it, unless a `workflow` surrounds it; agents are named by
    the nodes of the graph. A graph that is interrupted or drained pauses: the run that resumes its thread, in any
    process, goes on with its workflow. The models need an HTTP client with the hook.

    Args:
        workflow_type: default: the name of the graph or chain.
        workflow_id: default: the `thread_id` of the configuration, else drawn at random.
    """
    try:
        from langgraph.callbacks import GraphCallbackHandler as Handler
    except ImportError:
        from langchain_core.callbacks import BaseCallbackHandler as Handler  # type: ignore[assignment]

    class PresageHandler(Handler):
        run_inline = True  # in the context that sends the request

        def __init__(self) -> None:
            self._runs: dict[Any, _Run] = {}  # of each chain that runs
            self._begun: dict[Any, _Run] = {}  # by the outermost chain or model of each
            self._before: dict[Any, tuple[_Run | None, str]] = {}

        def on_chain_start(self, *_: Any, **event: Any) -> None:
            run = self._runs.get(event.get("parent_run_id")) or _RUN.get()
            self._runs[event["run_id"]] = run or self._begin(event, event.get("name"))

        def on_chain_end(self, *_: Any, **event: Any) -> None:
            self._runs.pop(event["run_id"], None)
            self._end(event)

        def on_chain_error(self, error: Any = None, *_: Any, **event: Any) -> None:
            if type(error).__name__ == "GraphDrained":  # its process shuts down; another one resumes it
                self._pauses(event["run_id"], True)
            self.on_chain_end(**event)

        def on_interrupt(self, event: Any) -> None:
            self._pauses(event.run_id, True)

        def on_resume(self, event: Any) -> None:
            self._pauses(event.run_id, False)

        def on_chat_model_start(self, *_: Any, **event: Any) -> None:
            before = self._before[event["run_id"]] = _RUN.get(), _AGENT.get()
            run = self._runs.get(event.get("parent_run_id")) or before[0]
            _RUN.set(run or self._begin(event, None))
            _AGENT.set(graph_node(event.get("metadata") or {}) or before[1])

        def on_llm_start(self, *_: Any, **event: Any) -> None:
            self.on_chat_model_start(**event)

        def on_llm_end(self, *_: Any, **event: Any) -> None:
            before = self._before.pop(event["run_id"], None)
            if before is not None:
                _RUN.set(before[0])
                _AGENT.set(before[1])
            self._end(event)  # a model without a chain around it

        def on_llm_error(self, *_: Any, **event: Any) -> None:
            self.on_llm_end(**event)

        def _begin(self, event: dict[str, Any], name: str | None) -> _Run:
            given = workflow_id or (event.get("metadata") or {}).get("thread_id")
            run = _Run(workflow_type or name or "langchain", str(given or event["run_id"]), entered_by_id=bool(given))
            self._begun[event["run_id"]] = run
            return run

        def _pauses(self, run_id: Any, pauses: bool) -> None:
            run = self._runs.get(run_id)
            if run is not None:
                run.pauses = pauses

        def _end(self, event: dict[str, Any]) -> None:
            run = self._begun.pop(event["run_id"], None)
            if run is not None:
                run.leave()

    return PresageHandler()


def graph_node(metadata: dict[str, Any]) -> str:
    """The agent that a request of LangGraph belongs to: the innermost node that has a name of its own; "" for none.

    Args:
        metadata: of a configuration or of an event, as LangGraph makes it.
    """
    if metadata.get("lc_agent_name"):
        return str(metadata["lc_agent_name"])
    nodes = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or "").split("|")]
    nodes = [*nodes, str(metadata.get("langgraph_node") or "")]
    return next((node for node in reversed(nodes) if node and node not in _GENERIC_NODES), nodes[-1])


def agents_hooks() -> Any:
    """Run hooks of the OpenAI Agents SDK, for `Runner.run(…, hooks=agents_hooks())` within a `workflow`.

    They name the agent of each request. The client of the models needs an HTTP client with the hook. Agents that run at
    the same time need a `workflow` of their own each, or an `agent` around each of them.
    """
    from agents import RunHooks

    class PresageHooks(RunHooks[Any]):
        async def on_llm_start(self, context: Any, of: Any, system_prompt: Any, input_items: Any) -> None:
            run = _RUN.get()
            if run is not None:
                run.agent = of.name

    return PresageHooks()
