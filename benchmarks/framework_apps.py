"""Applications of agent frameworks, unchanged but for the base URL; runs in a Python that has the framework.

    python framework_apps.py langgraph-incident http://127.0.0.1:8100/v1 --runs 20 --at-once 8

A run marks its requests with the header `x-test-run`, which the gateway does not read, and `frameworks.py` judges by
it. Each application is a function of (base URL, run, question, random numbers) that returns when its run has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

RUN, MODEL = "x-test-run", "simulated"

_WORDS = (
    "account archive balance branch bridge budget buffer cable canal carrier chart claim cluster column contract "
    "customer deadline delivery deposit desk device discount engine export factory ferry filter forecast freight "
    "garden grant harbour hotel invoice journal ledger licence market meeting meter mirror museum number office order "
    "parcel patent payment pipeline policy printer project quota refund region report river road sample schedule "
    "sensor server shipment signal storage street supplier survey tariff terminal ticket tower trade train transfer "
    "tunnel turbine update vendor voucher wagon warehouse water weather window winter yard"
)
WORDS = _WORDS.split()
NAMES = ("Alice", "Bogdan", "Chen", "Dana", "Emre", "Fatou", "Grace", "Hugo", "Ines", "Jamal")


def asked(rng: random.Random) -> str:
    """A question of 9 to 30 words."""
    return f"Why did the {' '.join(rng.sample(WORDS, rng.randrange(4, 26)))} of {rng.choice(NAMES)} stop?"


def langchain(url: str, run: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", default_headers={RUN: run}, max_retries=1)


def searching(rng: random.Random, fails: float = 0.0) -> Callable[[str], str]:
    def search(query: str) -> str:
        """Searches the archive."""
        time.sleep(0.005)
        if rng.random() < fails:
            return "error: the archive timed out, try again"
        return f"Three articles mention {query}: {' '.join(rng.sample(WORDS, 8))}."

    return search


def langgraph_incident(url: str, run: str, question: str, rng: random.Random) -> None:
    """Planner, parallel researchers by Send whose tool fails, writer, critic that sends back, human interrupt."""
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Command, Send, interrupt

    class State(TypedDict, total=False):
        question: str
        topic: str
        topics: list[str]
        notes: Annotated[list[str], operator.add]
        draft: str
        verdict: str
        rounds: int

    model, customer = langchain(url, run), f"Customer-{rng.randrange(1, 9)}"

    def say(system: str, user: str) -> str:
        return str(model.invoke([("system", system), ("user", user)]).content)

    def plan(state: State) -> State:
        said = say("You plan the work on incidents. List the topics to research.", state["question"])
        topics = ["logs", "metrics", "deployments", "tickets", "network"]
        return {"topics": rng.sample(topics, 2 + len(said) % 3), "rounds": 0}

    def research(state: State) -> State:
        system = f"You research the {state['topic']} of incidents. Use your tools before you answer."
        agent = create_agent(model, [searching(rng, 0.3)], system_prompt=system)
        given = f"Question of {customer}: {state['question']}\nLook into: {state['topic']}"
        return {"notes": [agent.invoke({"messages": [("user", given)]})["messages"][-1].content]}

    def write(state: State) -> State:
        given = f"Report on: {state['question']}\n\nFindings:\n" + "\n\n".join(state["notes"])
        if state["rounds"]:
            given += f"\n\nImprove this draft:\n{state['draft']}\n\nThe critic said: {state['verdict']}"
        return {"draft": say("You write reports on incidents for engineers.", given), "rounds": state["rounds"] + 1}

    def judge(state: State) -> State:
        given = f"Question: {state['question']}\n\nDraft:\n{state['draft']}"
        return {"verdict": say("You criticise reports. Say OK, or what is missing.", given)}

    def approve(state: State) -> State:
        interrupt({"draft": state["draft"]})
        return {}

    graph = StateGraph(State)
    for name, node in (("plan", plan), ("research", research), ("write", write), ("judge", judge), ("ask", approve)):
        graph.add_node(name, node)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges(
        "plan", lambda state: [Send("research", {**state, "topic": topic}) for topic in state["topics"]], ["research"]
    )
    graph.add_edge("research", "write")
    graph.add_edge("write", "judge")
    graph.add_conditional_edges("judge", lambda state: "write" if state["rounds"] < 1 + rng.randrange(2) else "ask")
    graph.add_edge("ask", END)
    config = {"configurable": {"thread_id": run}}
    built = graph.compile(checkpointer=InMemorySaver())
    built.invoke({"question": question, "notes": []}, config)
    built.invoke(Command(resume=True), config)


def langgraph_supervisor(url: str, run: str, question: str, rng: random.Random) -> None:
    """A supervisor chooses by structured output which of two agents with tools goes on with the shared messages."""
    from langchain.agents import create_agent
    from langchain_core.messages import HumanMessage
    from langgraph.graph import END, START, MessagesState, StateGraph

    class Route(TypedDict):
        """Who acts next."""

        next: Literal["researcher", "coder", "FINISH"]

    model = langchain(url, run)
    workers = {
        "researcher": create_agent(model, [searching(rng)], system_prompt="You are a researcher. Cite your sources."),
        "coder": create_agent(model, [searching(rng)], system_prompt="You write and run code that draws charts."),
    }

    def supervise(state: Any) -> Any:
        system = "You are a supervisor of these workers: researcher, coder. Say who acts next, or FINISH."
        chosen = model.with_structured_output(Route).invoke([("system", system), *state["messages"]])
        return {"next": chosen["next"]}

    def worker(name: str) -> Callable[[Any], Any]:
        def node(state: Any) -> Any:
            said = workers[name].invoke({"messages": state["messages"]})["messages"][-1].content
            return {"messages": [HumanMessage(said, name=name)]}

        return node

    class State(MessagesState):
        next: str

    graph = StateGraph(State)
    graph.add_node("supervisor", supervise)
    graph.add_edge(START, "supervisor")
    for name in workers:
        graph.add_node(name, worker(name))
        graph.add_edge(name, "supervisor")
    graph.add_conditional_edges("supervisor", lambda state: END if state["next"] == "FINISH" else state["next"])
    graph.compile().invoke({"messages": [("user", question)]})


def langgraph_subgraphs(url: str, run: str, question: str, rng: random.Random) -> None:
    """A triage node, then two subgraphs with states of their own, each draft and check, then a node that joins both."""
    from langgraph.graph import END, START, StateGraph

    class State(TypedDict, total=False):
        question: str
        summary: str
        opinions: Annotated[list[str], operator.add]
        answer: str

    class Inner(TypedDict, total=False):
        case: str
        draft: str

    model = langchain(url, run)

    def say(system: str, user: str) -> str:
        return str(model.invoke([("system", system), ("user", user)]).content)

    def department(name: str) -> Callable[[State], State]:
        inner = StateGraph(Inner)
        draft = f"You are the {name} department. Give an opinion on the case."
        inner.add_node("draft", lambda state: {"draft": say(draft, f"<case>\n{state['case']}\n</case>")})
        check = f"You check opinions of the {name} department for mistakes."
        inner.add_node("check", lambda state: {"draft": say(check, f"Opinion to check:\n{state['draft']}")})
        inner.add_edge(START, "draft")
        inner.add_edge("draft", "check")
        inner.add_edge("check", END)
        built = inner.compile()
        return lambda state: {"opinions": [built.invoke({"case": state["question"]})["draft"]]}

    graph = StateGraph(State)
    graph.add_node("triage", lambda state: {"summary": say("You sum up cases in one line.", state["question"])})
    graph.add_edge(START, "triage")
    for name in ("legal", "finance"):
        graph.add_node(name, department(name))
        graph.add_edge("triage", name)
    join = "You answer customers, from opinions of departments."
    graph.add_node("join", lambda state: {"answer": say(join, "\n---\n".join(state["opinions"]))})
    graph.add_edge(["legal", "finance"], "join")
    graph.add_edge("join", END)
    graph.compile().invoke({"question": question, "opinions": []})


def langgraph_resumed(url: str, run: str, question: str, rng: random.Random, second: bool = False) -> None:
    """An agent asks a human; hours later another process goes on from its checkpoint."""
    from langchain.agents import create_agent
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.types import Command, interrupt

    def approval(amount: str) -> str:
        """Asks the manager to approve an amount."""
        return f"The manager says: {interrupt(amount)}"

    system = "You settle refunds. Look the order up, and ask for an approval before you answer."
    path = Path(tempfile.gettempdir(), f"framework-apps-{os.environ['FRAMEWORK_APPS']}-{run}.db")
    with SqliteSaver.from_conn_string(str(path)) as saver:
        agent = create_agent(langchain(url, run), [searching(rng), approval], system_prompt=system, checkpointer=saver)
        given = Command(resume="granted") if second else {"messages": [("user", question)]}
        agent.invoke(given, {"configurable": {"thread_id": run}})
    if second:
        path.unlink()


def langgraph_map_reduce(url: str, run: str, question: str, rng: random.Random) -> None:
    """Four of twelve documents, which runs share, are read in parallel, and one request joins what was found."""
    model = langchain(url, run)
    corpus = [" ".join(random.Random(number).choices(WORDS, k=60)) for number in range(12)]
    head = ("system", "You read one document and note what it says of the question.")
    found = model.batch([[head, ("user", f"{document}\n\n{question}")] for document in rng.sample(corpus, 4)])
    notes = "\n---\n".join(str(one.content) for one in found)
    model.invoke([("system", "You join notes into one answer."), ("user", f"Question: {question}\nNotes:\n{notes}")])


def map_reduce_alone(url: str, run: str, question: str, rng: random.Random) -> None:
    """The same where nothing but the document is sent: only the answers tell that they belong together."""
    model = langchain(url, run)
    documents = [f"Page {rng.randrange(900)}: {' '.join(rng.choices(WORDS, k=60))}" for _ in range(4)]
    found = model.batch([[("system", "Sum up the page in two sentences."), ("user", one)] for one in documents])
    notes = "\n---\n".join(str(one.content) for one in found)
    model.invoke([("system", "You merge summaries into a report."), ("user", f"Merge these summaries:\n{notes}")])


def agents_sdk(url: str, run: str, api: str) -> Any:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", default_headers={RUN: run})
    return (OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel)(MODEL, openai_client=client)


def handoffs(url: str, run: str, question: str, rng: random.Random, api: str = "chat") -> None:
    """OpenAI Agents SDK: triage looks an order up and hands off to refunds."""
    from agents import Agent, Runner, function_tool

    model, search = agents_sdk(url, run, api), function_tool(searching(rng))
    refunds = Agent(name="refunds", instructions="You settle refunds. Be brief and kind.", model=model, tools=[search])
    triage = "You are the first to speak with a customer; find out what is wrong, then hand off."
    first = Agent(name="triage", instructions=triage, model=model, tools=[search], handoffs=[refunds])
    asyncio.run(Runner.run(first, question))


def handoffs_responses(url: str, run: str, question: str, rng: random.Random) -> None:
    handoffs(url, run, question, rng, "responses")


def agents_as_tools(url: str, run: str, question: str, rng: random.Random) -> None:
    """OpenAI Agents SDK: an orchestrator calls two agents as tools, another agent judges what it says."""
    from agents import Agent, Runner, function_tool

    model, search = agents_sdk(url, run, "chat"), function_tool(searching(rng))
    helpers = [
        Agent(name=name, instructions=f"You are the {name}. {does}", model=model, tools=[search]).as_tool(name, does)
        for name, does in (("translator", "Translates into French."), ("historian", "Knows what was before."))
    ]
    lead = Agent(name="lead", instructions="You answer with the help of your tools.", model=model, tools=helpers)
    judge = Agent(name="judge", instructions="You judge whether an answer is complete.", model=model)

    async def go() -> None:
        said = (await Runner.run(lead, question)).final_output
        await Runner.run(judge, f"Answer to judge:\n\n{said}")

    asyncio.run(go())


def autogen(url: str, run: str) -> Any:
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able: Any = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=url, api_key="none", default_headers={RUN: run},
        model_info={**able, "family": "unknown"},
    )  # fmt: skip


def autogen_team(client: Any, rng: random.Random) -> list[Any]:
    from autogen_agentchat.agents import AssistantAgent

    says = {
        "researcher": "You are a researcher. Look things up before you answer, and cite what you found.",
        "writer": "You write the report. Keep to short paragraphs and to what the others found.",
        "critic": "Act as a strict critic: list every claim of the report that has no source.",
    }
    return [
        AssistantAgent(
            name, client, description=said, system_message=said,
            tools=[searching(rng)] if name == "researcher" else [],
        )
        for name, said in says.items()
    ]  # fmt: skip


def autogen_group(url: str, run: str, question: str, rng: random.Random) -> None:
    """AutoGen: a researcher with a tool, a writer and a critic, who speak in turn over one history."""
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat

    team = autogen_team(autogen(url, run), rng)
    asyncio.run(RoundRobinGroupChat(team, termination_condition=MaxMessageTermination(9)).run(task=question))


def autogen_selected(url: str, run: str, question: str, rng: random.Random) -> None:
    """AutoGen: the same team; a model selects who speaks."""
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import SelectorGroupChat

    client = autogen(url, run)
    team = SelectorGroupChat(autogen_team(client, rng), client, termination_condition=MaxMessageTermination(9))
    asyncio.run(team.run(task=question))


def autogen_swarm(url: str, run: str, question: str, rng: random.Random) -> None:
    """AutoGen: triage looks up an order and hands off to refunds."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination, TextMessageTermination
    from autogen_agentchat.teams import Swarm

    client = autogen(url, run)
    triage = AssistantAgent(
        "triage", client, tools=[searching(rng)], handoffs=["refunds"],
        system_message="You are the first to speak with a customer; find out what is wrong, then hand off.",
    )  # fmt: skip
    refunds = AssistantAgent("refunds", client, system_message="You settle refunds. Be brief and kind.")
    end = MaxMessageTermination(12) | TextMessageTermination("refunds")
    asyncio.run(Swarm([triage, refunds], termination_condition=end).run(task=question))


def pydantic_ai(url: str, run: str, question: str, rng: random.Random) -> None:
    """pydantic-ai: an agent delegates by a tool, then another one judges by structured output."""
    from openai import AsyncOpenAI
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Verdict(BaseModel):
        good: bool
        why: str

    client = AsyncOpenAI(base_url=url, api_key="none", default_headers={RUN: run})
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
    worker = Agent(model, system_prompt="You collect facts.", tools=[searching(rng)])

    async def delegate(task: str) -> str:
        """Gives a task to the worker."""
        return str((await worker.run(task)).output)

    lead = Agent(model, system_prompt="You plan and delegate, and answer at the end.", tools=[delegate])
    judge = Agent(model, system_prompt="You judge answers.", output_type=Verdict)

    async def go() -> None:
        said = (await lead.run(question)).output
        await judge.run(f"Question: {question}\nAnswer: {said}")

    asyncio.run(go())


def smolagents(url: str, run: str, question: str, rng: random.Random) -> None:
    """smolagents: a manager with a managed agent, both call tools."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    found = searching(rng)

    @tool
    def search(query: str) -> str:
        """Searches the archive.

        Args:
            query: what for
        """
        return found(query)

    headers = {"default_headers": {RUN: run}}
    model = OpenAIServerModel(model_id=MODEL, api_base=url, api_key="none", client_kwargs=headers)
    under = ToolCallingAgent([search], model, name="searcher", description="Searches", max_steps=4, verbosity_level=0)
    ToolCallingAgent([], model, managed_agents=[under], max_steps=5, verbosity_level=0).run(question)


def llama_index(url: str, run: str, question: str, rng: random.Random) -> None:
    """LlamaIndex: an agent workflow with a handoff."""
    from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        default_headers={RUN: run},
    )  # fmt: skip

    def agent(name: str, system: str, **more: Any) -> Any:
        return FunctionAgent(
            name=name,
            description=name,
            system_prompt=system,
            tools=[searching(rng)],
            llm=model,
            streaming=False,
            **more,
        )

    first = agent("researcher", "You look things up, then hand off to the writer.", can_handoff_to=["writer"])
    team = AgentWorkflow(agents=[first, agent("writer", "You write the report.")], root_agent="researcher")

    async def go() -> None:
        await team.run(user_msg=question)

    asyncio.run(go())


def strands(url: str, run: str) -> Callable[..., Any]:
    from strands import Agent
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": url, "api_key": "none", "default_headers": {RUN: run}}, model_id=MODEL)
    return lambda name, system, *tools: Agent(
        name=name, model=model, system_prompt=system, tools=list(tools), callback_handler=None
    )


def strands_tools(url: str, run: str, question: str, rng: random.Random) -> None:
    """Strands: an orchestrator with an agent as a tool."""
    from strands import tool

    agent = strands(url, run)
    coder = agent("coder", "You write code.", tool(searching(rng)))

    @tool
    def ask_coder(task: str) -> str:
        """Gives a task to the coder."""
        return str(coder(task))

    agent("planner", "You plan, then give the coder tasks.", ask_coder)(question)


def strands_graph(url: str, run: str, question: str, rng: random.Random) -> None:
    """Strands: a graph; each agent gets the task and the texts of those before it in a template of the framework."""
    from strands.multiagent import GraphBuilder

    agent, builder = strands(url, run), GraphBuilder()
    for name in ("planner", "left", "right", "writer"):
        builder.add_node(agent(name, f"You are the {name} of a team of analysts."), name)
    for one, other in (("planner", "left"), ("planner", "right"), ("left", "writer"), ("right", "writer")):
        builder.add_edge(one, other)
    builder.set_entry_point("planner")
    builder.build()(question)


def crew(url: str, run: str, question: str, rng: random.Random, managed: bool = False) -> None:
    """CrewAI: a researcher with a tool, a writer and an editor, one after the other."""
    from crewai import LLM, Agent, Crew, Process, Task
    from crewai.tools import tool

    search = tool("search")(searching(rng))
    model = LLM(model=f"openai/{MODEL}", base_url=url, api_key="none", default_headers={RUN: run})

    def agent(role: str, goal: str, backstory: str, **more: Any) -> Any:
        return Agent(role=role, goal=goal, backstory=backstory, llm=model, **more)

    team = [
        agent("Researcher", "Find what the archive says", "You have read the archive for years.", tools=[search]),
        agent("Writer", "Write a short report", "You write for a newspaper, in plain words."),
        agent("Editor", "Polish the report", "You have an eye for claims without a source."),
    ]
    tasks = [
        ("Collect what is known: {question}", "Notes with sources"),
        ("Write a report from the notes.", "Three paragraphs"),
        ("Polish the report for print.", "The final text"),
    ]
    work = [
        Task(description=description, expected_output=wanted, **({} if managed else {"agent": who}))
        for (description, wanted), who in zip(tasks, team, strict=True)
    ]
    how = {"process": Process.hierarchical, "manager_llm": model} if managed else {"process": Process.sequential}
    Crew(agents=team, tasks=work, **how).kickoff(inputs={"question": question})


def crew_managed(url: str, run: str, question: str, rng: random.Random) -> None:
    """CrewAI: the same under a manager, who delegates."""
    crew(url, run, question, rng, managed=True)


def dspy(url: str, run: str, question: str, rng: random.Random) -> None:
    """DSPy: an outline by chain of thought, a section for each title in turn, then an agent with a tool checks."""
    import dspy as library

    model = library.LM(
        f"openai/{MODEL}", api_base=url, api_key="none", extra_headers={RUN: run}, cache=False, num_retries=0
    )
    with library.context(lm=model):
        outline = library.ChainOfThought("question -> titles: list[str]")(question=question).titles[:3]
        sections = [
            library.Predict("question, title -> section")(question=question, title=title).section for title in outline
        ]
        library.ReAct("report -> verdict", tools=[searching(rng)], max_iters=3)(report="\n\n".join(sections))


def google_adk(url: str, run: str, question: str, rng: random.Random) -> None:
    """Google ADK: parallel agents that leave their findings in the state, then one whose instruction holds them."""
    from google.adk.agents import LlmAgent, ParallelAgent, SequentialAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model = LiteLlm(f"openai/{MODEL}", api_base=url, api_key="none", extra_headers={RUN: run})

    def agent(name: str, instruction: str, *tools: Any) -> Any:
        return LlmAgent(name=name, model=model, instruction=instruction, output_key=name, tools=list(tools))

    both = ParallelAgent(
        name="both",
        sub_agents=[agent(name, f"You research the {name} side.", searching(rng)) for name in ("energy", "transport")],
    )
    joined = agent("joiner", "Join both into one report.\nEnergy: {energy}\nTransport: {transport}")
    team = SequentialAgent(name="team", sub_agents=[both, joined])

    async def go() -> None:
        runner = InMemoryRunner(agent=team, app_name="app")
        session = await runner.session_service.create_session(app_name="app", user_id="user")
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            pass

    asyncio.run(go())


def agno(url: str, run: str, question: str, rng: random.Random) -> None:
    """Agno: a team whose leader delegates to its members."""
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike
    from agno.team import Team

    def model() -> Any:
        return OpenAILike(id=MODEL, base_url=url, api_key="none", default_headers={RUN: run})

    members = [
        Agent(name=name, role=does, model=model(), tools=[searching(rng)], telemetry=False)
        for name, does in (("Finder", "Finds sources"), ("Editor", "Edits texts"))
    ]
    Team(members=members, model=model(), instructions=["You lead a newsroom."], telemetry=False).run(question)


def claude_code(url: str, run: str, question: str, rng: random.Random) -> None:
    """As Claude Code sends its requests, but for the id of its session: a main loop that delegates to sub-agents."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", default_headers={RUN: run})
    device = "0f" * 32

    def turn(system: str, messages: list[Any], *tools: str) -> Any:
        attribution = f"x-anthropic-billing-header: cc_version=2.1.90; cch={rng.getrandbits(20):05x};"
        return client.messages.create(
            model=MODEL, max_tokens=500, messages=messages, metadata={"user_id": f"user_{device}"},
            system=[{"type": "text", "text": attribution}, {"type": "text", "text": system}],
            tools=[
                {"name": name, "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}
                for name in tools
            ],
        )  # fmt: skip

    def loop(system: str, ask: str, *tools: str) -> str:
        messages: list[Any] = [{"role": "user", "content": ask}]
        for _ in range(8):
            answer = turn(system, messages, *tools)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            results = [
                loop(EXPLORER, call.input["text"], "Grep", "Read") if call.name == "Task" else searching(rng)("files")
                for call in calls
            ]
            messages.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call.id, "content": result}
                        for call, result in zip(calls, results, strict=True)
                    ],
                }
            )
        return "".join(block.text for block in answer.content if block.type == "text")

    EXPLORER = "You are a file search specialist. You find files, and you never change one."
    main = "You are Claude Code, Anthropic's official CLI for Claude. You help users with software engineering."
    turn("Write a title of this session in four words.", [{"role": "user", "content": question}])
    loop(main, question, "Task", "Edit", "Bash")


def plain_client(url: str, run: str) -> Callable[..., Any]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", default_headers={RUN: run})

    def say(system: str, *messages: Any, **more: Any) -> Any:
        given = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        head = [{"role": "system", "content": system}] if system else []
        return client.chat.completions.create(model=MODEL, messages=[*head, *given], **more).choices[0].message

    return say


def plain_loop(url: str, run: str, question: str, rng: random.Random) -> None:
    """A loop of one's own: the time, a name and a path in the system prompt, tool calls, at last a summary."""
    say = plain_client(url, run)
    search = {"type": "object", "properties": {"query": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": search}} for name in ("search", "open", "edit")
    ]

    def system() -> str:
        now = f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"
        return f"You are an engineer. It is {now}. User: {rng.choice(NAMES)}. Folder: /home/{run}/src. Be careful."

    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(6):
        answer = say(system(), *messages, tools=tools)
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": searching(rng)(call.function.arguments)}
            for call in answer.tool_calls
        ]
    say("You write commit messages.", f"Summarise:\n{messages[-1].get('content')}")


def plain_pipeline(url: str, run: str, question: str, rng: random.Random) -> None:
    """No system prompts: keywords, an answer from them, a translation; each prompt is a template with one text."""
    say = plain_client(url, run)
    words = say("", f"Extract keywords from the following request.\n\nRequest: {question}\n\nKeywords:").content
    answer = say("", f"Answer the request, use these keywords.\nKeywords: {words}\nRequest: {question}").content
    say("", f'Translate into German, and keep the tone:\n\n"""{answer}"""')


def two_applications(url: str, run: str, question: str, rng: random.Random) -> None:
    """Every second run is of another application behind the same key, with the same library and no word in common."""
    say = plain_client(url, run)
    if int(run.rsplit("-", 1)[1]) % 2:
        kind = say("You sort mails: complaint, order or other.", f"Mail:\n{question}").content
        draft = say("You answer mails of customers.", f"Kind: {kind}\nMail: {question}").content
        say("You proofread mails.", draft)
        return
    query = say("You write SQL for PostgreSQL.", f"Schema: orders(id, day, amount)\nQuestion: {question}").content
    say("You explain the results of queries to managers.", f"Question: {question}\nQuery: {query}\nResult: 42 rows")


def debate(url: str, run: str, question: str, rng: random.Random) -> None:
    """Two debaters answer each other for two rounds, three judges vote by one word, all at once."""
    say, said = plain_client(url, run), ""
    for _ in range(2):
        for side in ("for", "against"):
            said += (
                f"\n{side}: "
                + say(f"You argue {side} the motion.", f"Motion: {question}\nSo far:{said or ' -'}").content
            )
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda judge: say(f"You are judge {judge}.", f"Motion: {question}\n{said}\nWho wins?"), range(3)))


def tree_of_thoughts(url: str, run: str, question: str, rng: random.Random) -> None:
    """Three thoughts at once, each scored alone, the best one gone on from, twice."""
    say, path = plain_client(url, run), ""
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            ask = f"Problem: {question}\nSteps so far: {path or 'none'}\nPropose the next step."
            thoughts = [one.content for one in pool.map(say, ["You propose steps."] * 3, [ask] * 3)]
            scores = pool.map(lambda one: say("You score steps from 1 to 10.", f"Step: {one}"), thoughts)
            path += max(zip(scores, thoughts, strict=True), key=lambda pair: len(pair[0].content))[1]
    say("You give the final answer.", f"Problem: {question}\nSolution: {path}")


Application = Callable[[str, str, str, random.Random], None]
APPLICATIONS: dict[str, tuple[str, Application]] = {
    "langgraph-incident": ("newest", langgraph_incident),
    "langgraph-supervisor": ("newest", langgraph_supervisor),
    "langgraph-subgraphs": ("newest", langgraph_subgraphs),
    "langgraph-resumed": ("newest", langgraph_resumed),
    "langgraph-map-reduce": ("newest", langgraph_map_reduce),
    "map-reduce-alone": ("newest", map_reduce_alone),
    "agents-handoffs": ("newest", handoffs),
    "agents-handoffs-responses": ("newest", handoffs_responses),
    "agents-as-tools": ("newest", agents_as_tools),
    "autogen-group": ("newest", autogen_group),
    "autogen-selected": ("newest", autogen_selected),
    "autogen-swarm": ("newest", autogen_swarm),
    "pydantic-ai": ("newest", pydantic_ai),
    "smolagents": ("newest", smolagents),
    "llama-index": ("openai-2", llama_index),
    "strands-tools": ("openai-2", strands_tools),
    "strands-graph": ("openai-2", strands_graph),
    "crew": ("crewai", crew),
    "crew-managed": ("crewai", crew_managed),
    "dspy": ("litellm", dspy),
    "google-adk": ("litellm", google_adk),
    "agno": ("litellm", agno),
    "claude-code": ("anthropic", claude_code),
    "plain-loop": ("newest", plain_loop),
    "plain-pipeline": ("newest", plain_pipeline),
    "two-applications": ("newest", two_applications),
    "debate": ("newest", debate),
    "tree-of-thoughts": ("newest", tree_of_thoughts),
}
"""The environment of each application, by the name of its requirements, and what it does."""
FAN_OUT = {
    "langgraph-incident": float("nan"),  # differs from run to run; .359 by OpenInference's spans of eight runs
    "langgraph-subgraphs": 3 / 6,
    "langgraph-map-reduce": 1 / 5,
    "map-reduce-alone": 1 / 5,
    "google-adk": 1 / 5,
    "strands-graph": 3 / 4,
    "debate": 3 / 7,
    "tree-of-thoughts": 4 / 13,
}
"""The share of requests that wait for several others or have siblings, where there are any."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("application", choices=APPLICATIONS)
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--second", action="store_true", help="the process that goes on with what a first one began")
    given = parser.parse_args()
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "CREWAI_TESTING": "true"}
    os.environ |= {"OPENAI_API_KEY": "none", "OTEL_SDK_DISABLED": "true"}
    _, application = APPLICATIONS[given.application]
    more: Any = {"second": True} if given.second else {}

    def one(number: int) -> None:
        rng = random.Random(f"{given.application} {given.seed} {number}")
        application(given.url, f"run-{number}", asked(rng), rng, **more)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(one, range(given.runs)))


if __name__ == "__main__":
    main()
