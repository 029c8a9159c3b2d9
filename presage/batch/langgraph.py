"""A LangGraph graph in a plan: each row is run through it, and its models are answered by the run.

The graph stays as it is. A node is Python that asks models as it likes, so what is known before it runs are nodes and
edges alone; its calls are found as they come. While a row is in a graph, the chat completions that its models send
through httpx, or httpx2 as openai 3 does, are taken off the wire and handed to the run: it orders them, keeps their
answers and asks the engines. The classes of httpx are wrapped for that, as OpenTelemetry's instrumentation wraps them;
without a row around it a request goes where it was sent.

After a kill a row's graph begins anew, and its calls are answered from the run's file up to where it was: so its nodes
must ask the same again for the same answers, and what else they do they do again. No checkpoints are kept.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from presage.batch.operators import Ask, CallingProgram, Constant, Operator, RowFailedError, function, given
from presage.batch.plan import RESULT_COLUMNS, Plan, what_and_where
from presage.client import graph_node
from presage.errors import ConfigurationError, EngineError

_COMPLETIONS: Final = "/chat/completions"
_OTHERS: Final = ("/responses", "/completions")
_FINAL: Final = {"content-type": "application/json", "x-should-retry": "false"}  # the run has tried again already
_ENDS: Final = {"__start__": "start", "__end__": "end"}
_TASK: Final = re.compile(r"During task with name '(.+)' and id")
_UNNAMED: Final = "LangGraph"


def is_graph(made: Any) -> bool:
    """Whether something is a graph of LangGraph, compiled or not."""
    return any(base.__module__.partition(".")[0] == "langgraph" for base in type(made).__mro__)


def run_graph(graph: Any, /, **inputs: Operator | str) -> Operator:
    """The final state of a compiled graph, for some fields of its first state; messages are those of OpenAI's API.

    Raises:
        ConfigurationError: it is not compiled, stops for a person, or has no such field.
    """
    return _program(graph, inputs, "")


def plan_of_graph(graph: Any, fields: Sequence[str], name: str, version: str = "") -> Plan:
    """A plan of one graph: its outputs are the fields of the final state.

    Args:
        fields: of the rows; those that the graph's input has are given to it.
        name: of the workflow type, for a graph without a name.
        version: of the graph's code; a run goes on only with the version that it was begun with.

    Raises:
        ConfigurationError: as `run_graph`, or the rows have none of its fields.
    """
    taken = [field for field in input_fields(graph) if field in fields]
    if not taken:
        raise ConfigurationError(
            f"a graph whose input has {', '.join(input_fields(graph))}, and the rows have none of these but "
            f"{', '.join(fields) or 'no field'}"
        )
    state = _program(graph, {field: given(field) for field in taken}, version)
    outputs = {
        f"state_{key}" if key in (*RESULT_COLUMNS, "wanted") else key: function(dict.get, state, key)
        for key in _output_fields(graph)
    }
    return Plan(graph.name if graph.name != _UNNAMED else name, wanted=None, **outputs)


def input_fields(graph: Any) -> list[str]:
    """Fields of a graph's input, in its order; raises ConfigurationError if it is not compiled."""
    _check(graph)
    return [str(name) for name in graph.builder.schemas[graph.builder.input_schema]]


def _output_fields(graph: Any) -> list[str]:
    channels = graph.output_channels
    return [channels] if isinstance(channels, str) else list(channels)


def _check(graph: Any) -> None:
    if not hasattr(graph, "ainvoke") or not hasattr(graph, "builder"):
        what = "a graph that is not compiled" if hasattr(graph, "compile") else f"a {type(graph).__name__}"
        raise ConfigurationError(f"{what}; a compiled graph of LangGraph is wanted: graph = builder.compile()")
    if stops := [*graph.interrupt_before_nodes, *graph.interrupt_after_nodes]:
        raise ConfigurationError(
            f"a graph that stops for a person before or after {', '.join(stops)}, and a batch has none; compile it "
            "without interrupt_before and interrupt_after"
        )
    names = [str(name) for name in graph.builder.schemas[graph.builder.input_schema]]
    if names == ["__root__"]:
        raise ConfigurationError("a graph whose state has no fields; a TypedDict or a class is wanted")


def _program(graph: Any, inputs: Mapping[str, Operator | str], version: str) -> Operator:
    names = input_fields(graph)
    if unknown := [name for name in inputs if name not in names]:
        raise ConfigurationError(f"graph {graph.name}: no input {unknown[0]!r}; it has {', '.join(names)}")
    drawn = graph.get_graph()
    edges = sorted((edge.source, edge.target, edge.conditional) for edge in drawn.edges)
    code = json.dumps([graph.name, sorted(drawn.nodes), edges, version])
    parts = tuple(Constant(value) if isinstance(value, str) else value for value in inputs.values())
    return CallingProgram(tuple(inputs), parts, _GraphRun(graph), code, tuple(_known(graph, drawn)))


def _known(graph: Any, drawn: Any) -> Iterator[str]:
    """What is known of a graph before it runs."""
    yield f"graph {graph.name}, whose calls are found as it runs:"
    names = list(drawn.nodes)
    follow: dict[str, list[Any]] = {name: [] for name in names}
    for edge in drawn.edges:
        follow[edge.source].append(edge)
    for name, edges in follow.items():
        if edges:
            word = " or " if all(edge.conditional for edge in edges) else " and "
            yield f"  {_shown(name)} -> {word.join(_shown(edge.target) for edge in edges)}"
    index_of = {name: number for number, name in enumerate(names)}
    pairs = np.array([(index_of[edge.source], index_of[edge.target]) for edge in drawn.edges], dtype=np.int64).reshape(
        -1, 2
    )
    matrix = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(names), len(names)))
    _, component = connected_components(matrix, connection="strong")
    circles: dict[int, list[str]] = {}
    for name, number in zip(names, component.tolist(), strict=True):
        circles.setdefault(number, []).append(name)
    itself = {edge.source for edge in drawn.edges if edge.source == edge.target}
    limit = (graph.config or {}).get("recursion_limit")
    for circle in circles.values():
        if len(circle) > 1 or circle[0] in itself:
            bound = f"at most {limit} steps" if limit else "bound it by graph.with_config(recursion_limit=...)"
            yield f"  again and again: {', '.join(circle)}; {bound}"


def _shown(node: str) -> str:
    return _ENDS.get(node, node)


@dataclass(eq=False)
class _RowInGraph:
    """A row that is in a graph.

    Attributes:
        loop, thread: where the run is.
        sent: requests that were handed to the run.
        error: of the run, or why the row cannot go on. It outlives whatever the graph makes of it.
        over: whether nobody waits for the graph any more; its threads may still be at work.
        refused: what an engine said of the last call that it did not take.
    """

    ask: Ask
    loop: asyncio.AbstractEventLoop
    thread: int
    sent: int = 0
    error: Exception | None = None
    over: bool = False
    refused: str = ""

    async def answer(self, path: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the answer to a request."""
        if asyncio.get_running_loop() is not self.loop:  # a loop that a node has made
            asked = asyncio.run_coroutine_threadsafe(self.answer(path, content), self.loop)
            return await asyncio.wrap_future(asked)
        self.sent += 1
        if self.error is None and not path.endswith(_COMPLETIONS):
            self.error = RowFailedError(
                f"a model asked {path}, and engines of a batch are asked chat completions; "
                "for ChatOpenAI: use_responses_api=False"
            )
        if self.error is not None or self.over:
            return _refusal(503, str(self.error or "the row has ended"))
        body = json.loads(content)
        streams = body.pop("stream", False)
        usage = (body.pop("stream_options", None) or {}).get("include_usage")
        try:
            status, said = await self.ask(_agent(), body)
        except Exception as error:
            self.error = self.error or error
            return _refusal(503, str(error))
        if status != 200:
            self.refused = said["error"]["message"]
            return _refusal(status, self.refused)
        if streams:
            return 200, {"content-type": "text/event-stream"}, _events(said, bool(usage)).encode()
        return 200, _FINAL, json.dumps(said).encode()

    def answer_thread(self, path: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        """The same, for synchronous code in a thread."""
        if threading.get_ident() == self.thread:
            self.error = self.error or RowFailedError(
                f"{_agent()} asks its model with invoke in an asynchronous function, where no other row goes on "
                "meanwhile; use await model.ainvoke, or make the function synchronous"
            )
            return _refusal(503, str(self.error))
        return asyncio.run_coroutine_threadsafe(self.answer(path, content), self.loop).result()


_ROW: ContextVar[_RowInGraph | None] = ContextVar("presage_batch_row", default=None)


@dataclass(frozen=True)
class _GraphRun:
    """Runs a graph for one row."""

    graph: Any

    async def __call__(self, inputs: dict[str, Any], ask: Ask) -> Any:
        from langgraph.errors import GraphRecursionError

        _wrapped_clients()
        graph = self.graph.copy({"checkpointer": None})
        row = _RowInGraph(ask, asyncio.get_running_loop(), threading.get_ident())
        before = _ROW.set(row)
        try:
            state = await graph.ainvoke(inputs, {"callbacks": [_ended_models(row)]})
        except Exception as error:
            if row.error is not None:
                raise row.error from None
            if isinstance(error, GraphRecursionError):
                raise RowFailedError(f"graph {graph.name}: it reached its recursion limit before its end") from None
            tasks = [_TASK.match(note) for note in getattr(error, "__notes__", ())]
            where = next((f"node {task[1]} raised " for task in tasks if task), "")
            refused = f" ({row.refused})" if row.refused else ""
            kind = f"graph {graph.name}: {where}{type(error).__name__}"
            raise RowFailedError(f"{kind}{refused or what_and_where(error)}", kind=kind) from error
        finally:
            row.over = True
            _ROW.reset(before)
        if row.error is not None:  # the graph went on without the answer
            raise row.error
        if "__interrupt__" in state:
            raise RowFailedError(f"graph {graph.name}: it stopped for a person (interrupt), and a batch has none")
        return _as_json(state)


def _ended_models(row: _RowInGraph) -> Any:
    """A callback that ends the run if a model was asked past it: its answers would be neither kept nor ordered."""
    from langchain_core.callbacks import BaseCallbackHandler

    class EndedModels(BaseCallbackHandler):
        run_inline = True

        def __init__(self) -> None:
            self.ended = 0

        def on_llm_end(self, *_: Any, **__: Any) -> None:
            self.ended += 1
            if row.sent < self.ended and row.error is None:
                row.error = EngineError(
                    f"{_agent()} asked a model past the batch: only chat completions of OpenAI's API that go through "
                    "httpx can be kept and ordered; use ChatOpenAI, without a cache of LangChain"
                )

    return EndedModels()


def _agent() -> str:
    """The node that asks now."""
    from langgraph.config import get_config

    try:
        return graph_node(dict(get_config().get("metadata") or {})) or _UNNAMED
    except RuntimeError:  # in a thread or task that the graph does not know
        return _UNNAMED


@cache
def _wrapped_clients() -> None:
    """Have requests for completions answered by the row around them, in both generations of httpx, once a process."""
    for name in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        _wrap(module, module.HTTPTransport.handle_request, module.AsyncHTTPTransport.handle_async_request)


def _wrap(module: Any, handle: Any, handle_async: Any) -> None:
    def handle_request(self: Any, request: Any) -> Any:
        row = _ROW.get()
        if row is None or not request.url.path.endswith((_COMPLETIONS, *_OTHERS)):
            return handle(self, request)
        status, headers, content = row.answer_thread(request.url.path, request.read())
        return module.Response(status, headers=headers, content=content)

    async def handle_async_request(self: Any, request: Any) -> Any:
        row = _ROW.get()
        if row is None or not request.url.path.endswith((_COMPLETIONS, *_OTHERS)):
            return await handle_async(self, request)
        status, headers, content = await row.answer(request.url.path, await request.aread())
        return module.Response(status, headers=headers, content=content)

    module.HTTPTransport.handle_request = handle_request
    module.AsyncHTTPTransport.handle_async_request = handle_async_request


def _refusal(status: int, why: str) -> tuple[int, dict[str, str], bytes]:
    return status, _FINAL, json.dumps({"error": {"message": why, "type": "presage_batch"}}).encode()


def _events(said: dict[str, Any], usage: bool) -> str:
    """A whole answer as the events of a stream: one with its message, one with its end."""
    base = {name: said.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for choice in said["choices"]:
        message = dict(choice["message"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
        index = choice.get("index", 0)
        chunks.append({**base, "choices": [{"index": index, "delta": message, "finish_reason": None}]})
        end = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
        chunks.append({**base, "choices": [end]})
    if usage:
        chunks.append({**base, "choices": [], "usage": said.get("usage")})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _as_json(value: Any) -> Any:
    """A value of a state as JSON has it; what has no such form stays, and the result says so."""
    from langchain_core.messages import BaseMessage, convert_to_openai_messages
    from pydantic import BaseModel

    if isinstance(value, BaseMessage):
        return convert_to_openai_messages(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(name): _as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(entry) for entry in value]
    return value
