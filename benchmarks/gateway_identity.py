"""Does the gateway recognise workflow and agent of requests whose clients were not changed?

Each application below runs 40 workflows, 16 at a time, and sends what such clients send: no workflow ids. The texts are
drawn at random and new in each workflow, except where an application exists to repeat them. Answers reach the gateway
before the next request of their workflow. With the public traces beside the checkout, also:

- lmcache: 53 recorded agent sessions with full texts, as prompts of the completions API, since the trace flattens
  messages and leaves out some answers; once in recorded order, once all sessions at a time
- claude_code: real sessions without text. Each 64-token block of a prompt stands for one message, so it tests only how
  often a prompt goes on from an earlier one of its session (recall): blocks are local to a session, so no two sessions
  can be confused, and answers are unknown. Left out are prompts with the same whole blocks as an earlier one, and those
  of more than 4,096 blocks
- last messages: traces of which only each step's last message is recorded; what is found was passed on from an answer

Workflows are judged by pairs of requests: precision is the share of pairs given one workflow that are of one workflow,
recall the share of pairs of one workflow that were given one. A workflow that is split once in its middle loses half of
its pairs, so the share of requests that were joined to what came before stands beside them. Agents are judged by the
best one-to-one assignment of recognised to true agents, so both mixing and splitting cost.

    python benchmarks/gateway_identity.py [--only react,pipeline] [--workflows 40] [--claude-sessions 20]

Times are CPU time of this thread. Prints Markdown tables and one JSON line. Takes a minute.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import textwrap
import time
import tracemalloc
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.identifier import Identifier
from presage.serving_hooks.identity.request import ApiRequest, Endpoint
from presage.serving_hooks.identity.turns import MOST_TURNS

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NOUNS = (
    "account address agent answer archive balance batch branch bridge budget buffer cache canal carrier chart "
    "check city claim class client cloud cluster column commit config cost cursor data date delay demand depth "
    "design detail device disk docket draft driver edge editor energy engine entry error event export factor "
    "field figure file filter final flag flight fold format frame garden grant graph group guard handle harbor "
    "header hotel image import index input issue item job journal kernel key label layer ledger length letter "
    "level limit link list loader lock logic loop market master matrix merge method metric mirror model module "
    "monitor motor name network node note number object offer office option order output owner packet page panel "
    "parser patch path pattern period phase pilot plan plate pointer policy pool port price print probe process "
    "profile project proof queue quota range rate reader record region report request reserve result return "
    "review river road role root route row rule sample schema scope score script search section sector sensor "
    "server session share ship signal site slot source space stage state station status step stock storage store "
    "stream string study supply surface switch symbol system table target task team tensor term test text theme "
    "thread ticket timer title token tool total tower track trade train transfer tree trend unit update user "
    "value vector vendor version view volume wagon warehouse water weight window worker yard zone "
)
WORDS = NOUNS.split()
VERBS = ("adds", "blocks", "builds", "checks", "copies", "drops", "finds", "fixes", "holds", "joins", "loads", "reads")
USERS = (
    "Alice Smith",
    "Bogdan Ionescu",
    "Chen Wei",
    "Dana Katz",
    "Emre Aydin",
    "Fatou Diop",
    "Grace Lee",
    "Hugo Martin",
)


@dataclass
class Request:
    """One request of a workflow, and what it is answered."""

    workflow: str
    agent: str
    body: dict[str, Any]
    answers: list[Any] = field(default_factory=list)
    endpoint: Endpoint = "chat"
    headers: dict[str, str] = field(default_factory=dict)
    tenant: str = ""
    response_id: str | None = None


Workflow = Iterator[list[Request]]
"""Rounds of requests; those of one round are sent before any of them is answered."""
App = Callable[[random.Random, str], Workflow]


def sentence(rng: random.Random) -> str:
    return f"The {rng.choice(WORDS)} {rng.choice(WORDS)} {rng.choice(VERBS)} the {' '.join(rng.sample(WORDS, 6))}."


def prose(rng: random.Random, sentences: int) -> str:
    return " ".join(sentence(rng) for _ in range(sentences))


def lines(rng: random.Random, count: int) -> str:
    return "\n".join(f"{at + 1}. {sentence(rng)}" for at in range(count))


def code(rng: random.Random) -> str:
    names = rng.sample(WORDS, 12)
    body = "\n".join(
        f"    {a}_{b} = {c}({a!r}, {rng.randrange(1000)})  # {sentence(rng)}"
        for a, b, c in zip(names[::3], names[1::3], names[2::3], strict=True)
    )
    return f"```python\ndef {names[0]}_{names[1]}():\n{body}\n```"


def clock(rng: random.Random) -> str:
    weekday, month = rng.choice(("Monday", "Thursday", "Sunday")), rng.choice(("January", "March", "July"))
    return f"{weekday}, {rng.randrange(1, 29)} {month} 2026, {rng.randrange(24)}:{rng.randrange(10, 60)}:07"


BOILERPLATE = prose(random.Random(7), 25)
RULES = lines(random.Random(8), 12)


def system(role: str, duty: str, rng: random.Random, user: str, run: str) -> dict[str, str]:
    return {
        "role": "system",
        "content": f"You are the {role} of a software team. {duty}\nCurrent time: {clock(rng)}\nUser: {user}\n"
        f"Session {run}\nWorking directory: /home/{user.split()[0].lower()}/src/{rng.randrange(10**6)}\n\n{RULES}",
    }


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def called(rng: random.Random, name: str, **arguments: Any) -> dict[str, Any]:
    call_id = f"chatcmpl-tool-{rng.getrandbits(128):032x}"
    return {
        "role": "assistant",
        "content": sentence(rng) if rng.random() < 0.5 else "",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        ],
    }


def returned(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": text}


def react(rng: random.Random, run: str, steps: int = 8) -> Workflow:
    """One agent with tools; the clock in its system prompt changes with each request."""
    user, tools = rng.choice(USERS), [tool("bash"), tool("edit")]
    history: list[dict[str, Any]] = [{"role": "user", "content": f"Please fix this: {prose(rng, 3)}"}]
    for step in range(rng.randrange(3, steps + 1)):
        head = system("engineer", "You repair bugs with the tools that you have.", rng, user, run)
        answer = called(rng, "bash", command=f"grep -rn {rng.choice(WORDS)} src/{rng.choice(WORDS)}", timeout=step)
        yield [Request(run, "engineer", {"messages": [head, *history], "tools": tools}, [answer])]
        history += [answer, returned(answer, prose(rng, rng.randrange(1, 12)))]


def pipeline(rng: random.Random, run: str) -> Workflow:
    """Planner, coder, reviewer: each gets the text of the one before in a template of its own."""
    user, task = rng.choice(USERS), prose(rng, 2)
    plan = lines(rng, 5)
    head = system("planner", "You write plans, never code.", rng, user, run)
    yield [Request(run, "planner", {"messages": [head, {"role": "user", "content": f"Task: {task}"}]}, [plan])]
    for _ in range(rng.randrange(1, 4)):
        head = system("coder", "You write code after the plan.", rng, user, run)
        written = f"Here is the code.\n{code(rng)}"
        ask = f"Write the code for this plan:\n<plan>\n{plan}\n</plan>\nAnswer with code alone."
        yield [Request(run, "coder", {"messages": [head, {"role": "user", "content": ask}]}, [written])]
        head = system("reviewer", "You judge code and name its errors.", rng, user, run)
        plan = f"Verdict: rework.\n{lines(rng, 4)}"
        ask = f"Review this code strictly.\n\n{written}\n\nIs it correct?"
        yield [Request(run, "reviewer", {"messages": [head, {"role": "user", "content": ask}]}, [plan])]


def group_chat(rng: random.Random, run: str) -> Workflow:
    """Three agents over one history, as AutoGen sends it: an agent's own answers are `assistant`, others' `user`."""
    said = [("user", f"Discuss: {prose(rng, 2)}")]
    for turn in range(9):
        name = ("critic", "writer", "editor")[turn % 3]
        history = [{"role": "assistant" if who == name else "user", "name": who, "content": text} for who, text in said]
        head = {"role": "system", "content": f"You are the {name} in a discussion. {BOILERPLATE}"}
        answer = prose(rng, 3)
        yield [Request(run, name, {"messages": [head, *history]}, [answer])]
        said.append((name, answer))


def fan_out(rng: random.Random, run: str) -> Workflow:
    """An orchestrator delegates to parallel sub-agents, whose first message is the argument of its tool call."""
    user, tools = rng.choice(USERS), [tool("delegate")]
    history: list[dict[str, Any]] = [{"role": "user", "content": f"Answer with sources: {prose(rng, 2)}"}]
    for _ in range(2):
        head = system("orchestrator", "You split the work and delegate it.", rng, user, run)
        asks = [f"Find out which {' '.join(rng.sample(WORDS, 5))} there are" for _ in range(3)]
        answer = called(rng, "delegate", task=asks[0])
        for ask in asks[1:]:
            answer["tool_calls"] += called(rng, "delegate", task=ask)["tool_calls"]
        yield [Request(run, "orchestrator", {"messages": [head, *history], "tools": tools}, [answer])]
        children = [[{"role": "user", "content": ask}] for ask in asks]
        for _ in range(3):
            sent = []
            for child in children:
                head = system("researcher", "You search and report what you found.", rng, user, run)
                step = called(rng, "search", query=" ".join(rng.sample(WORDS, 4)))
                body = {"messages": [head, *child], "tools": [tool("search")]}
                sent.append(Request(run, "researcher", body, [step]))
                child += [step, returned(step, prose(rng, 4))]
            yield sent
        history.append(answer)
        history += [
            {"role": "tool", "tool_call_id": call["id"], "content": prose(rng, 3)} for call in answer["tool_calls"]
        ]


def retries(rng: random.Random, run: str) -> Workflow:
    """The ReAct loop, every fourth request sent again; half of the repetitions bear the header of OpenAI's library."""
    for [request] in react(rng, run):
        yield [request]
        if rng.random() < 0.25:
            headers = {"x-stainless-retry-count": "1"} if rng.random() < 0.5 else {}
            yield [Request(run, request.agent, request.body, request.answers, headers=headers)]


def compaction(rng: random.Random, run: str) -> Workflow:
    """A long conversation, whose client drops the oldest messages, or has them summarised and goes on from that."""
    head = {"role": "system", "content": f"You are a support agent. {BOILERPLATE}"}
    history: list[dict[str, Any]] = [{"role": "user", "content": prose(rng, 2)}]
    for turn in range(12):
        answer = {"role": "assistant", "content": prose(rng, 2)}
        yield [Request(run, "support", {"messages": [head, *history]}, [answer])]
        history += [answer, {"role": "user", "content": prose(rng, 1)}]
        if turn == 4:
            history = history[-4:]
        if turn == 8:
            ask = {"role": "user", "content": "Summarise the conversation above in a few sentences."}
            summary = prose(rng, 3)
            yield [Request(run, "support", {"messages": [head, *history, ask]}, [summary])]
            history = [{"role": "user", "content": f"Summary of the conversation so far:\n{summary}\n\nGo on."}]


def templates(rng: random.Random, run: str) -> Workflow:
    """Every workflow begins with the same messages; only the answers differ."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Begin the nightly check and name the first step."}]
    head = {"role": "system", "content": f"You are the night watch. {RULES}"}
    for _ in range(5):
        answer = {"role": "assistant", "content": sentence(rng)}
        yield [Request(run, "watch", {"messages": [head, *history]}, [answer])]
        history += [answer, {"role": "user", "content": "Go on."}]


def twins(rng: random.Random, run: str) -> Workflow:
    """As templates, but the first answer is the same too, as at temperature 0."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Begin the nightly check and name the first step."}]
    head = {"role": "system", "content": f"You are the night watch. {RULES}"}
    for turn in range(5):
        answer = {"role": "assistant", "content": sentence(rng) if turn else "First I list the servers."}
        yield [Request(run, "watch", {"messages": [head, *history]}, [answer])]
        history += [answer, {"role": "user", "content": sentence(rng)}]


def altered(rng: random.Random, run: str) -> Workflow:
    """A client that rewrites the answers that it sends back: only the part after a mark is kept."""
    history: list[dict[str, Any]] = [{"role": "user", "content": prose(rng, 2)}]
    head = {"role": "system", "content": f"You are a data analyst. {RULES}"}
    for _ in range(6):
        said = sentence(rng)
        yield [Request(run, "analyst", {"messages": [head, *history]}, [f"Thoughts: {prose(rng, 2)}\nFINAL {said}"])]
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": sentence(rng)}]


def tenants(rng: random.Random, run: str) -> Workflow:
    """Two tenants send the same texts at the same time: every second workflow repeats the one before, to the letter."""
    number = int(run.rpartition("-")[2])
    twin = random.Random(number // 2)
    for sent in react(twin, f"{run}-text"):
        yield [
            Request(run, one.agent, one.body, one.answers, tenant=f"key-{number % 2}", response_id="resp-1")
            for one in sent
        ]


def completions(rng: random.Random, run: str) -> Workflow:
    """A ReAct loop over one growing prompt."""
    prompt = f"{RULES}\nAnswer the question.\n\nQuestion: {sentence(rng)}\nThought:"
    for _ in range(6):
        answer = f" {sentence(rng)}\nAction: search[{' '.join(rng.sample(WORDS, 3))}]\n"
        yield [Request(run, "none", {"prompt": prompt}, [{"content": answer}], "completions")]
        prompt += f"{answer}Observation: {prose(rng, 2)}\nThought:"


def responses(rng: random.Random, run: str) -> Workflow:
    """The responses API; half of the workflows send ids of earlier responses, half the whole history."""
    stored, latest = rng.random() < 0.5, None
    history: list[dict[str, Any]] = [{"role": "user", "content": prose(rng, 1)}]
    new = list(history)
    for _ in range(6):
        call_id = f"call_{rng.getrandbits(96):024x}"
        items = [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": sentence(rng)}]},
            {"type": "function_call", "name": "search", "call_id": call_id, "arguments": '{"q": "x"}'},
        ]
        body = {"instructions": f"You are a clerk. {RULES}", "input": new if stored else history}
        if stored and latest:
            body["previous_response_id"] = latest
        latest = f"resp_{rng.getrandbits(96):024x}"
        yield [Request(run, "clerk", body, items, "responses", response_id=latest)]
        new = [{"type": "function_call_output", "call_id": call_id, "output": sentence(rng)}]
        history = [*history, *items, *new]


def map_reduce(rng: random.Random, run: str) -> Workflow:
    """Parallel requests that share nothing but their template, and one that gets all their answers."""
    said = [prose(rng, 2) for _ in range(4)]
    head = {"role": "system", "content": f"You are a reader of documents. {RULES}"}
    yield [
        Request(run, "reader", {"messages": [head, {"role": "user", "content": f"Summarise: {prose(rng, 8)}"}]}, [one])
        for one in said
    ]
    ask = "Merge these summaries:\n" + "\n---\n".join(said)
    head = {"role": "system", "content": f"You are the merger of summaries. {RULES}"}
    yield [Request(run, "merger", {"messages": [head, {"role": "user", "content": ask}]}, [prose(rng, 3)])]


def desk(rng: random.Random, run: str) -> Workflow:
    """A router answers in one word, then three experts get the question alone, and one joins their notes."""
    question, notes = {"role": "user", "content": sentence(rng)}, [prose(rng, 2) for _ in range(3)]
    roles = ["router of questions", "lawyer of contracts", "doctor of machines", "clerk of parcels"]
    heads = [{"role": "system", "content": f"You are the {role}. {RULES}"} for role in roles]
    router, *experts = [{"messages": [head, question]} for head in heads]
    yield [Request(run, roles[0], router, ["legal"])]
    yield [Request(run, role, body, [note]) for role, body, note in zip(roles[1:], experts, notes, strict=True)]
    ask = "Join these notes:\n" + "\n".join(notes)
    head = {"role": "system", "content": f"You are the editor in chief. {RULES}"}
    yield [Request(run, "editor", {"messages": [head, {"role": "user", "content": ask}]}, [prose(rng, 3)])]


TOPICS = ("logs", "metrics", "deployments", "tickets", "runbooks", "network")


def incident(rng: random.Random, run: str) -> Workflow:
    """A planner gets the bare question, parallel researchers with a failing tool get it in a template, and a critic
    sends the writer back. Topics stand in the system prompts of the researchers, customers in their template."""
    customer, question = f"Customer-{rng.randrange(1, 9)}", f"{sentence(rng)[:-1]} since {clock(rng)}, why?"
    topics = rng.sample(TOPICS, rng.randrange(2, 5))
    head = {"role": "system", "content": f"You plan the work on incidents. {RULES}"}
    yield [Request(run, "planner", {"messages": [head, {"role": "user", "content": question}]}, [", ".join(topics)])]
    notes, open_ = [], []
    for topic in topics:
        head = {"role": "system", "content": f"You research the {topic} of incidents with your tools. {RULES}"}
        asked = {"role": "user", "content": f"Question of {customer}: {question}\nLook into: {topic}"}
        open_.append([head, asked])
    for turn in range(3):
        sent = []
        for topic, messages in zip(topics, open_, strict=True):
            call, last = called(rng, "search", query=topic), turn == 2
            answer = {"role": "assistant", "content": prose(rng, 3)} if last else call
            body = {"messages": list(messages), "tools": [tool("search")]}
            sent.append(Request(run, "researcher", body, [answer]))
            if last:
                notes.append(answer["content"])
            messages += [call, returned(call, "timeout" if rng.random() < 0.3 else prose(rng, 2))]
        yield sent
    critique = ""
    for _ in range(rng.randrange(1, 3)):
        draft = prose(rng, 4)
        head = {"role": "system", "content": f"You write reports on incidents. {RULES}"}
        ask = f"Report on: {question}\nFindings:\n" + "\n".join(notes) + critique
        yield [Request(run, "writer", {"messages": [head, {"role": "user", "content": ask}]}, [draft])]
        head = {"role": "system", "content": f"You criticise reports. {RULES}"}
        verdict = prose(rng, 1)
        ask = f"{question}\n\n{draft}"
        yield [Request(run, "critic", {"messages": [head, {"role": "user", "content": ask}]}, [verdict])]
        critique = f"\nImprove: {verdict}"


def voters(rng: random.Random, run: str) -> Workflow:
    """A router gets a short question, three judges get it in one template of their own, and say one word."""
    question = " ".join(rng.sample(WORDS, rng.randrange(9, 14))) + "?"
    head = {"role": "system", "content": f"You route questions to a jury. {RULES}"}
    yield [Request(run, "router", {"messages": [head, {"role": "user", "content": question}]}, ["jury"])]
    head = {"role": "system", "content": f"You are one of three judges. {RULES}"}
    ask = f"Please judge the following with yes or no, and with nothing else.\n\n<question>{question}</question>"
    body = {"messages": [head, {"role": "user", "content": ask}]}
    yield [Request(run, "judge", {**body, "seed": seed}, [rng.choice(["yes", "no"])]) for seed in range(3)]


def scripted(rng: random.Random, run: str) -> Workflow:
    """No system prompts, templates in messages: two requests on one document, then a section for each short title."""
    document, titles = prose(rng, 4), [" ".join(rng.sample(WORDS, 3)) for _ in range(3)]
    notes = [prose(rng, 1), ", ".join(titles)]
    for ask, note in zip(("List the facts of this document:", "Give titles, three words each:"), notes, strict=True):
        messages = [{"role": "user", "content": f"{ask}\n\n{document}\n\nAnswer at once."}]
        yield [Request(run, "assistant", {"messages": messages}, [note])]
    yield [
        Request(
            run,
            "assistant",
            {"messages": [{"role": "user", "content": f"Write a section on {title} from this:\n{document}"}]},
            [prose(rng, 3)],
        )
        for title in titles
    ]


def corpus(rng: random.Random, run: str) -> Workflow:
    """Two applications that read the same thirty documents: one answers questions, the other extracts names."""
    number, document = int(run.rsplit("-", 1)[1]), prose(random.Random(rng.randrange(30)), 5)
    asks = number % 2
    head = {"role": "system", "content": f"You {'answer questions' if asks else 'extract names'}. {RULES}"}
    ask = f"{sentence(rng)}\n\n{document}" if asks else f"The text: {document}"
    agent = "answerer" if asks else "extractor"
    yield [Request(run, agent, {"messages": [head, {"role": "user", "content": ask}]}, [prose(rng, 2)])]


def handed_on(rng: random.Random, run: str, form: str) -> Workflow:
    """A planner, and a worker that gets the plan in some form."""
    han = ["".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(rng.randrange(12, 23))) for _ in range(8)]
    said, passed = {
        "chinese": ("\u3002".join(han), "\u3002".join(han[3:7])),
        "json": ((text := lines(rng, 6)), json.dumps({"plan": text})),
        "wrapped": ((text := prose(rng, 6)), textwrap.fill(text, 72)),
        "code": ((text := "\n".join(f"{word} = {rng.choice(WORDS)}[7]" for word in rng.sample(WORDS, 20))), text),
    }[form]
    head = {"role": "system", "content": f"You are the planner of a team. {RULES}"}
    yield [Request(run, "planner", {"messages": [head, {"role": "user", "content": sentence(rng)}]}, [said])]
    head = {"role": "system", "content": f"You are the worker in a factory. {RULES}"}
    ask = f"Do what this says:\n{passed}\nNow begin."
    yield [Request(run, "worker", {"messages": [head, {"role": "user", "content": ask}]}, [prose(rng, 2)])]


def other_forms(rng: random.Random, run: str) -> Workflow:
    """Some sentences of a plan in Chinese, or lines in a JSON string."""
    return handed_on(rng, run, rng.choice(("chinese", "json")))


def without_sentences(rng: random.Random, run: str) -> Workflow:
    """A plan whose lines are wrapped anew, or code with short lines."""
    return handed_on(rng, run, rng.choice(("wrapped", "code")))


def rivals(rng: random.Random, run: str) -> Workflow:
    """Two applications, compared on the same forty questions at the same time: a worst case, see `SHARED_S`."""
    question = f"Question {rng.randrange(40)}: how does a warehouse count its parcels at night?"
    role = rng.choice(["first edition of the clerk", "second edition of the doctor"])
    head = {"role": "system", "content": f"You are the {role}. {RULES}"}
    history: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(3):
        answer = {"role": "assistant", "content": prose(rng, 2)}
        yield [Request(run, role, {"messages": [head, *history]}, [answer])]
        history += [answer, {"role": "user", "content": sentence(rng)}]


def map_reduce_traced(rng: random.Random, run: str) -> Workflow:
    """The same with OpenTelemetry in the client: one trace a workflow."""
    trace = f"{rng.getrandbits(128):032x}"
    for sent in map_reduce(rng, run):
        for request in sent:
            request.headers["traceparent"] = f"00-{trace}-{rng.getrandbits(64):016x}-01"
        yield sent


def trace_each(rng: random.Random, run: str) -> Workflow:
    """The ReAct loop of a client that draws a trace id for each request, since no span encloses them."""
    for [request] in react(rng, run):
        request.headers["traceparent"] = f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01"
        yield [request]


def reminders(rng: random.Random, run: str) -> Workflow:
    """A coding agent that appends a reminder to its latest message, which is gone in the next request."""
    head = {"role": "system", "content": f"You are a coding agent. {RULES}"}
    history: list[dict[str, Any]] = [{"role": "user", "content": prose(rng, 2)}]
    for _ in range(6):
        reminder = f"\n<system-reminder>It is {clock(rng)}.</system-reminder>"
        latest = {**history[-1], "content": history[-1]["content"] + reminder}
        answer = called(rng, "edit", path=f"src/{rng.choice(WORDS)}.py", text=sentence(rng))
        yield [Request(run, "coder", {"messages": [head, *history[:-1], latest], "tools": [tool("edit")]}, [answer])]
        history += [answer, returned(answer, prose(rng, 1))]


def late_roles(rng: random.Random, run: str) -> Workflow:
    """Three agents whose system prompts differ in one word near the end, and in the user's name and the date."""
    user = rng.choice(USERS)
    history: list[dict[str, Any]] = [{"role": "user", "content": prose(rng, 1)}]
    for turn in range(6):
        role = ("buyer", "seller", "broker")[turn % 3]
        head = {
            "role": "system",
            "content": f"You negotiate for {user}. {BOILERPLATE}\nDate: {clock(rng)}\nYou act as {role}.",
        }
        answer = {"role": "assistant", "content": sentence(rng)}
        yield [Request(run, role, {"messages": [head, *history]}, [answer])]
        history += [answer, {"role": "user", "content": sentence(rng)}]


APPS: dict[str, App] = {
    "react": react,
    "pipeline": pipeline,
    "group-chat": group_chat,
    "fan-out": fan_out,
    "retries": retries,
    "compaction": compaction,
    "templates": templates,
    "twins": twins,
    "altered": altered,
    "tenants": tenants,
    "completions": completions,
    "responses": responses,
    "map-reduce": map_reduce,
    "map-reduce-traced": map_reduce_traced,
    "desk": desk,
    "other-forms": other_forms,
    "without-sentences": without_sentences,
    "rivals": rivals,
    "trace-each": trace_each,
    "late-roles": late_roles,
    "reminders": reminders,
    "incident": incident,
    "voters": voters,
    "scripted": scripted,
    "corpus": corpus,
}
NO_AGENTS = {"completions"}


def interleaved(flows: list[Workflow], at_once: int, rng: random.Random) -> Iterator[tuple[int, list[Request] | None]]:
    """Rounds of the workflows, of which so many run at a time; None: the answers of the latest round arrive."""
    waiting, running = list(enumerate(flows))[::-1], list[list[Any]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append([*waiting.pop(), False])
        place = rng.randrange(len(running))
        number, flow, pending = running[place]
        sent = None if pending else next(flow, None)
        if sent is None and not pending:
            del running[place]
        else:
            running[place][2] = not pending
            yield number, sent


@dataclass
class Judged:
    """True and recognised workflow and agent of each request, with source and confidence."""

    rows: list[tuple[str, str, str, str, str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def workflows(self) -> tuple[float, float]:
        """Precision and recall by pairs."""
        both = Counter((row[0], row[1]) for row in self.rows)
        true, found = Counter(row[0] for row in self.rows), Counter(row[1] for row in self.rows)
        pairs = sum(n * (n - 1) for n in both.values())
        given, wanted = (sum(n * (n - 1) for n in of.values()) for of in (found, true))
        return pairs / given if given else 1.0, pairs / wanted if wanted else 1.0

    def joined(self) -> float:
        """Share of the requests after the first of their workflow that did not begin another one."""
        begun, true = len({row[1] for row in self.rows}), len({row[0] for row in self.rows})
        return 1 - max(0, begun - true) / max(1, len(self.rows) - true)

    def agents(self) -> float:
        """Accuracy of the best one-to-one assignment."""
        both = Counter((row[2], row[3]) for row in self.rows)
        true, found = sorted({row[2] for row in self.rows}), sorted({row[3] for row in self.rows})
        table = np.array([[both[a, b] for b in found] for a in true])
        return float(table[linear_sum_assignment(-table)].sum() / table.sum())

    def by_source(self) -> dict[tuple[str, float], tuple[int, int]]:
        """(right, all) by source and confidence: a request is right in the workflow that has most of its fellows."""
        major: dict[str, Counter[str]] = defaultdict(Counter)
        for row in self.rows:
            major[row[1]][row[0]] += 1
        first = {row[0]: row[1] for row in reversed(self.rows)}
        right: dict[tuple[str, float], list[bool]] = defaultdict(list)
        for true, found, _, _, source, confidence in self.rows:
            new = source in ("new", "trace") and major[found].most_common(1)[0][0] == true
            good = first[true] == found if new else major[found].most_common(1)[0][0] == true
            right[source, confidence].append(good)
        return {key: (sum(of), len(of)) for key, of in right.items()}


def judge(flows: list[Workflow], at_once: int, most: int = 10_000, seed: int = 0) -> Judged:
    """Sends the requests of all workflows."""
    identifier, judged, rng = Identifier(counts=EventCounts(), most_conversations=most), Judged(), random.Random(seed)
    open_: dict[int, list[Any]] = {}
    for number, sent in interleaved(flows, at_once, rng):
        for identity, request, of in open_.pop(number, ()):
            identifier.answered(identity, request, of.response_id, of.answers)
        for of in sent or ():
            body = json.loads(json.dumps(of.body))  # as it comes over HTTP
            request = ApiRequest(of.endpoint, {"model": "m", **body}, of.headers, of.tenant)
            began = time.thread_time()
            identity = identifier.identify(request)
            judged.seconds += time.thread_time() - began
            step = identity.step
            judged.rows.append(
                (
                    of.workflow,
                    step.workflow,
                    of.agent,
                    step.agent,
                    identity.workflow_source,
                    identity.workflow_confidence,
                )
            )
            open_.setdefault(number, []).append((identity, request, of))
    return judged


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def lmcache(at_once: int) -> Judged:
    """Recorded sessions; in their recorded order where `at_once` is 0."""
    rows = sorted(rows_of(DATA / "serving" / "lmcache_agent_trace.jsonl.gz"), key=lambda row: row["timestamp"])
    sessions: dict[str, list[list[Request]]] = defaultdict(list)
    for row in rows:
        request = Request(
            row["session_id"], row["kind"], {"prompt": row["input"]}, [{"content": row["output"]}], "completions"
        )
        sessions["all" if at_once == 0 else row["session_id"]].append([request])
    return judge([iter(of) for of in sessions.values()], at_once or 1)


def claude_code(most: int) -> Judged:
    """Sessions by blocks."""
    flows: dict[str, list[list[Request]]] = {}
    ends: set[tuple[str, int]] = set()
    for row in rows_of(DATA / "workflows" / "claude_code.jsonl.gz"):
        run = row["workflow_id"]
        if run not in flows and len(flows) >= most:
            break
        steps = flows.setdefault(run, [])
        if len(steps) >= 100:
            continue
        blocks = [at for first, last in row["prefix_blocks"] for at in range(first, last + 1)]
        if not 0 < len(blocks) <= MOST_TURNS or (run, blocks[-1]) in ends:
            continue
        ends.add((run, blocks[-1]))
        messages = [{"role": "user", "content": f"{run} {at:09d} " * 8} for at in blocks]
        steps.append([Request(run, row["agent"], {"messages": messages})])
    return judge([iter(of) for of in flows.values()], len(flows))


def last_messages(name: str, most: int) -> Judged:
    """Steps of which the last message is recorded."""
    flows: dict[str, list[list[Request]]] = defaultdict(list)
    for row in rows_of(DATA / "workflows" / f"{name}.jsonl.gz"):
        run = f"{row['workflow_type']} {row['workflow_id']}"
        if (run not in flows and len(flows) >= most) or not row.get("input_text"):
            continue
        body = {"messages": [{"role": "user", "content": row["input_text"]}]}
        flows[run].append([Request(run, row["agent"], body, [row.get("output_text") or ""])])
    return judge([iter(of) for of in flows.values()], 16)


def speed(size: int) -> dict[str, float]:
    """CPU microseconds of `identify`, median of 30, for a prompt of so many characters in messages of 500."""
    rng = random.Random(0)
    messages = [{"role": "system", "content": f"You are a clerk. {RULES}"}]
    while sum(len(one["content"]) for one in messages) < size:
        role = "assistant" if len(messages) % 2 == 0 else "user"
        messages.append({"role": role, "content": prose(rng, 10)[: min(500, size)]})
    found: dict[str, float] = {}

    def timed(name: str, request: Callable[[int], ApiRequest], prepare: bool) -> None:
        times = []
        for at in range(30):
            identifier = Identifier(counts=EventCounts(), most_conversations=1000)
            if prepare:
                begun = ApiRequest("chat", {"model": "m", "messages": messages})
                identifier.answered(identifier.identify(begun), begun, None, ["Good."])
            else:  # the agent is known
                identifier.identify(ApiRequest("chat", {"model": "m", "messages": messages[:1]}))
            later = request(at)
            began = time.thread_time()
            identifier.identify(later)
            times.append(time.thread_time() - began)
        found[name] = sorted(times)[15] * 1e6

    more = [*messages, {"role": "assistant", "content": "Good."}, {"role": "user", "content": "Go on."}]
    timed("continues", lambda at: ApiRequest("chat", {"model": "m", "messages": more}), True)
    timed("new", lambda at: ApiRequest("chat", {"model": "m", "messages": messages}), False)
    fresh = [{"role": "system", "content": f"You are a clerk. {prose(rng, 60)}"}, *messages[1:]]
    timed("new, agent unknown", lambda at: ApiRequest("chat", {"model": "m", "messages": fresh}), False)
    text = "\n".join(one["content"] for one in messages)
    timed("completions, new", lambda at: ApiRequest("completions", {"model": "m", "prompt": text}), False)
    return found


def hostile() -> dict[str, float]:
    """CPU milliseconds of `identify` for prompts that are made to take long."""
    found: dict[str, float] = {}
    for name, messages in {
        "100,000 messages": [{"role": "user", "content": f"Message {at} of a long list."} for at in range(100_000)],
        "12 MB in one message": [{"role": "user", "content": "One sentence more of many. " * 450_000}],
        "4,000 tool calls": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1, 2]"}] * 4000}],
    }.items():
        identifier = Identifier(counts=EventCounts(), most_conversations=10)
        request = ApiRequest("chat", {"model": "m", "messages": messages})
        began = time.thread_time()
        identifier.identify(request)
        found[name] = (time.thread_time() - began) * 1e3
    return found


def memory(workflows: int) -> float:
    """Bytes of a running workflow of eight steps."""
    flows = [react(random.Random(at), f"m-{at}") for at in range(workflows)]
    identifier = Identifier(counts=EventCounts(), most_conversations=workflows)
    tracemalloc.start()
    for flow in flows:
        for [of] in flow:
            request = ApiRequest(of.endpoint, {"model": "m", **of.body})
            identifier.answered(identifier.identify(request), request, str(uuid.uuid4()), of.answers)
    del request, of, flow, flows
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / workflows


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--workflows", type=int, default=40)
    parser.add_argument("--claude-sessions", type=int, default=20)
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    results: dict[str, Any] = {}
    sources: Counter[tuple[str, float]] = Counter()
    rights: Counter[tuple[str, float]] = Counter()
    cases: dict[str, Callable[[], Judged]] = {
        name: lambda app=app, name=name: judge(
            [app(random.Random(f"{name}-{at}"), f"{name}-{at}") for at in range(given.workflows)], 16
        )
        for name, app in APPS.items()
    }
    cases["all at once"] = lambda: judge(
        [
            app(random.Random(f"{name}-{at}"), f"{name}-{at}")
            for at in range(given.workflows)
            for name, app in APPS.items()
        ],
        64,
    )
    if DATA.is_dir():
        cases["lmcache, as recorded"] = lambda: lmcache(0)
        cases["lmcache, all at a time"] = lambda: lmcache(53)
        cases["claude_code"] = lambda: claude_code(given.claude_sessions)
        for name in ("hyperagent", "magentic_whowhen", "ag2_gsm", "autocoderover"):
            cases[f"last messages: {name}"] = lambda name=name: last_messages(name, 200)
    columns = ("case", "requests", "workflows: precision", "recall", "joined", "agents", "us / request")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, case in cases.items():
        if only and name not in only:
            continue
        judged = case()
        precision, recall = judged.workflows()
        agents = judged.agents() if name in APPS and name not in NO_AGENTS else None
        per_request = judged.seconds / len(judged.rows) * 1e6
        results[name] = {
            "requests": len(judged.rows),
            "precision": round(precision, 4),
            "recall": round(recall, 4),
            "joined": round(judged.joined(), 4),
            "agents": None if agents is None else round(agents, 4),
            "us": round(per_request),
        }
        shown = "" if agents is None else f"{agents:.3f}"
        shares = f"{precision:.3f} | {recall:.3f} | {judged.joined():.3f}"
        print(f"| {name} | {len(judged.rows)} | {shares} | {shown} | {per_request:.0f} |", flush=True)
        if name in APPS:
            for key, (right, of) in judged.by_source().items():
                rights[key] += right
                sources[key] += of
    print("\nThe applications, by what identified the workflow:\n")
    print("| source | confidence | requests | right |\n|---|---|---|---|")
    for (source, confidence), of in sorted(sources.items()):
        print(f"| {source} | {confidence:.3f} | {of} | {rights[source, confidence] / of:.3f} |")
    times: dict[str, dict[str, float]] = {}
    kept = 0.0
    if not only:
        sizes = (1_000, 4_000, 10_000, 50_000, 200_000)
        times = {str(size): speed(size) for size in sizes}
        names = list(times["1000"])
        print(f"\n| characters | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for size in sizes:
            print(f"| {size} | {' | '.join(f'{times[str(size)][name]:.0f}' for name in names)} |")
        for what, spent in (slow := hostile()).items():
            print(f"\n{what}: {spent:.0f} ms")
        times["hostile, ms"] = slow
        kept = memory(500)
        print(f"\nMemory of a running workflow: {kept / 1024:.1f} KiB")
    print(json.dumps({"cases": results, "microseconds": times, "workflow_bytes": round(kept)}))


if __name__ == "__main__":
    main()
