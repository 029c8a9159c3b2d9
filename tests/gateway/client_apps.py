"""Small applications on real client libraries, and what a gateway makes of their requests."""

import json
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, TypedDict

from served import gateway, served

from presage.gateway.front import Front
from presage.gateway.simulated_engine import Reply, SimulatedEngine
from presage.serving_hooks.identity.identifier import Identity
from presage.serving_hooks.identity.request import ApiRequest

RUN: ContextVar[str] = ContextVar("run", default="")
"""The run of an application that sends a request; the gateway does not read it."""
RUN_HEADER = "x-test-run"

_TEXT = (
    "the river town market budget train museum walk garden bridge ferry evening morning ticket harbour coast view "
    "guide price change weather lunch station hotel family children season plan draft section opening closing source"
)
WORDS = _TEXT.split()


class Model:
    """Answers in sentences that differ at each call, as those of a model that samples."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def text(self) -> str:
        words = [[self._random.choice(WORDS) for _ in range(self._random.randint(7, 12))] for _ in range(4)]
        return " ".join(f"{' '.join(sentence).capitalize()}." for sentence in words)

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        made = f"call_{''.join(self._random.choices('abcdefgh0123456789', k=22))}7a"
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"content": None, "tool_calls": [{"id": made, "type": "function", "function": function}]}

    def __call__(self, body: Mapping[str, Any]) -> str | Mapping[str, Any]:
        """Calls each offered tool once, handoffs last; then answers."""
        given = body.get("messages") or body.get("input")
        offered = [(tool.get("function") or tool) for tool in body.get("tools") or ()]
        called = json.dumps(given)
        left = [tool["name"] for tool in offered if f'"{tool["name"]}"' not in called]
        if not left:
            return self.text()
        name = min(left, key=lambda one: one.startswith("transfer"))
        return self.call(name) if name.startswith("transfer") else self.call(name, query=self.text()[:40])


class Sent:
    """What a gateway made of the requests that it got: (run, system prompt, identity) of each."""

    def __init__(self, front: Front) -> None:
        self.found: list[tuple[str, str, Identity]] = []
        identify = front.decisions.identifier.identify

        def seen(request: ApiRequest) -> Identity:
            identity = identify(request)
            self.found.append((request.headers.get(RUN_HEADER, ""), request.texts[0] or "", identity))
            return identity

        front.decisions.identifier.identify = seen  # type: ignore[method-assign]

    def workflows(self) -> set[str]:
        return {identity.step.workflow_id for _, _, identity in self.found}

    def agents(self) -> dict[str, set[str]]:
        """Names of agents by system prompt."""
        found: dict[str, set[str]] = {}
        for _, system, identity in self.found:
            found.setdefault(system, set()).add(identity.step.agent)
        return found

    def agents_are_right(self) -> bool:
        """Each system prompt has one agent, and no two the same."""
        names = list(self.agents().values())
        return all(len(one) == 1 for one in names) and len(set.union(*names)) == len(names)

    def scores(self) -> tuple[float, float]:
        """(precision, recall) of pairs of requests that are put in one workflow."""
        pairs = [(a[0] == b[0], a[2].step.workflow_id == b[2].step.workflow_id) for a, b in combinations(self.found, 2)]
        both = sum(real and given for real, given in pairs)
        given, real = sum(given for _, given in pairs), sum(real for real, _ in pairs)
        return both / given if given else 1.0, both / real if real else 1.0


@dataclass
class Behind:
    """A gateway before a simulated engine; `url` ends in /v1."""

    url: str
    sent: Sent
    front: Front
    engine: SimulatedEngine


@contextmanager
def behind_gateway(reply: Reply | None = None, token_s: float = 0.0) -> Iterator[Behind]:
    engine = SimulatedEngine(token_s=token_s, prefill_s=0.0, slots=64, reply=reply or Model())
    with served(engine.app()) as upstream, gateway(upstream) as (url, front):
        yield Behind(f"{url}/v1", Sent(front), front, engine)


def tagged(request: Any) -> None:
    """Event hook: marks a request with its run."""
    request.headers[RUN_HEADER] = RUN.get()


async def tagged_async(request: Any) -> None:
    tagged(request)


def chat_model(url: str, **more: Any) -> Any:
    """LangChain's client."""
    from langchain_openai import ChatOpenAI
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

    clients = {
        "http_client": DefaultHttpxClient(event_hooks={"request": [tagged]}),
        "http_async_client": DefaultAsyncHttpxClient(event_hooks={"request": [tagged_async]}),
    }
    return ChatOpenAI(model="simulated", base_url=url, api_key="none", **{**clients, **more})


class Report(TypedDict, total=False):
    question: str
    plan: str
    draft: str
    review: str


def report_graph(model: Any) -> Any:
    """Planner, writer and reviewer: each reads what the one before it wrote, and no history."""
    from langgraph.graph import END, START, StateGraph

    def agent(role: str, reads: str, writes: str) -> Callable[[Report], Report]:
        def node(state: Report) -> Report:
            given: dict[str, Any] = dict(state)
            answer = model.invoke([("system", ROLES[role]), ("user", f"{reads.capitalize()}:\n{given[reads]}")])
            return {writes: answer.content}  # type: ignore[misc, return-value]

        return node

    graph = StateGraph(Report)
    for role, reads, writes in (
        ("planner", "question", "plan"),
        ("writer", "plan", "draft"),
        ("reviewer", "draft", "review"),
    ):
        graph.add_node(role, agent(role, reads, writes))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "writer")
    graph.add_edge("writer", "reviewer")
    graph.add_edge("reviewer", END)
    return graph.compile(name="report")


ROLES = {
    "planner": "You are the planner. Break the question into three steps that a colleague can carry out.",
    "writer": "You write the report. Follow the plan you are given and keep to short paragraphs.",
    "reviewer": "Act as a strict reviewer: list every claim of the draft that has no source.",
    "researcher": "You are a researcher. Look things up before you answer, and cite what you found.",
    "router": "Name the department that answers this question, in one word.",
    "billing": "You are the billing department; you know everything about invoices.",
    "shipping": "You follow parcels around the world and say where they are.",
    "lawyer": "As a lawyer you read contracts, and you warn of what they leave open.",
    "chief": "You are the editor in chief. Join the notes of the experts into one answer.",
    "editor": "You are an editor. Polish the findings of the researcher for a newspaper.",
}


DESKS = ("billing", "shipping")


def research_graph(model: Any) -> Any:
    """A researcher with a tool and an editor, over one history of messages."""
    from langchain_core.tools import tool
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def search(query: str) -> str:
        """Searches the archive."""
        return f"Three articles of the archive mention {query}"

    def researcher(state: Any) -> Any:
        return {"messages": [model.bind_tools([search]).invoke([("system", ROLES["researcher"]), *state["messages"]])]}

    def editor(state: Any) -> Any:
        return {"messages": [model.invoke([("system", ROLES["editor"]), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("researcher", researcher)
    graph.add_node("tools", ToolNode([search]))
    graph.add_node("editor", editor)
    graph.add_edge(START, "researcher")
    graph.add_conditional_edges("researcher", tools_condition, {"tools": "tools", END: "editor"})
    graph.add_edge("tools", "researcher")
    graph.add_edge("editor", END)
    return graph.compile(name="research")


def desk_graph(model: Any) -> Any:
    """A router, which answers with a node's name, and two specialists that read the question alone."""
    from langgraph.graph import END, START, StateGraph

    def agent(role: str) -> Callable[[Any], Any]:
        def node(state: Any) -> Any:
            answer = model.invoke([("system", ROLES[role]), ("user", state["question"])]).content
            return {"plan" if role == "router" else "draft": answer.strip()}

        return node

    graph = StateGraph(Report)
    graph.add_node("router", agent("router"))
    for role in DESKS:
        graph.add_node(role, agent(role))
        graph.add_edge(role, END)
    graph.add_edge(START, "router")
    graph.add_conditional_edges("router", lambda state: state["plan"])
    return graph.compile(name="desk")


def desk_reply(model: Model) -> Reply:
    """Answers for `desk_graph`."""

    def reply(body: Mapping[str, Any]) -> str:
        system, user = (message["content"] for message in body["messages"])
        return DESKS[len(user) % len(DESKS)] if system == ROLES["router"] else model.text()

    return reply


def panel_graph(model: Any) -> Any:
    """Three experts answer one question at the same time, and an editor in chief joins their notes."""
    from langgraph.graph import END, START, StateGraph

    class Notes(TypedDict, total=False):
        question: str
        notes: Annotated[list[str], operator.add]
        answer: str

    def expert(role: str) -> Callable[[Any], Any]:
        def node(state: Any) -> Any:
            return {"notes": [model.invoke([("system", ROLES[role]), ("user", state["question"])]).content]}

        return node

    def chief(state: Any) -> Any:
        given = f"Question: {state['question']}\nNotes:\n" + "\n".join(state["notes"])
        return {"answer": model.invoke([("system", ROLES["chief"]), ("user", given)]).content}

    graph = StateGraph(Notes)
    graph.add_node("chief", chief)
    for role in (*DESKS, "lawyer"):
        graph.add_node(role, expert(role))
        graph.add_edge(START, role)
        graph.add_edge(role, "chief")
    graph.add_edge("chief", END)
    return graph.compile(name="panel")


def triage(url: str, api: str, *, client: Any = None) -> Any:
    """Two agents of the OpenAI Agents SDK: triage looks up an order and hands off to refunds."""
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    set_tracing_disabled(True)
    http = DefaultAsyncHttpxClient(event_hooks={"request": [tagged_async]})
    client = client or AsyncOpenAI(base_url=url, api_key="none", http_client=http)
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind(model="simulated", openai_client=client)

    @function_tool
    def order(query: str) -> str:
        """Looks up an order."""
        return f"Order 17 was sent: {query}"

    refunds = Agent(name="refunds", instructions="You settle refunds. Be brief and kind.", model=model)
    return Agent(
        name="triage",
        instructions="You are the first to speak with a customer; find out what is wrong, then hand off.",
        model=model,
        tools=[order],
        handoffs=[refunds],
    )
