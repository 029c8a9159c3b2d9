"""An application that asks a human between planner and writer, as two processes: one asks, another goes on.

python approval_app.py URL CHECKPOINTS (begin | ANSWER)
"""

import ast
import sys
from pathlib import Path
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from presage.client import http_client, langchain_handler


class State(TypedDict, total=False):
    question: str
    plan: str
    approved: str
    draft: str


class SavedInFile(InMemorySaver):
    """Checkpoints for another process."""

    def load(self, file: Path) -> None:
        threads, self_writes, blobs = ast.literal_eval(file.read_text())
        for thread, namespaces in threads.items():
            self.storage[thread].update(namespaces)
        self.writes.update(self_writes)
        self.blobs.update(blobs)

    def save(self, file: Path) -> None:
        threads = {thread: dict(namespaces) for thread, namespaces in self.storage.items()}
        file.write_text(repr((threads, dict(self.writes), dict(self.blobs))))


def graph(model: Any, checkpoints: InMemorySaver) -> Any:
    """A planner, a human in a graph of its own, and a writer."""
    human = StateGraph(State)
    human.add_node("ask", lambda state: {"approved": interrupt(state["plan"])})
    human.add_edge(START, "ask")
    made = StateGraph(State)
    made.add_node("planner", lambda state: {"plan": model.invoke(f"Plan: {state['question']}").content})
    made.add_node("human", human.compile())
    made.add_node("writer", lambda state: {"draft": model.invoke(f"Write: {state['plan']}").content})
    for before, after in ((START, "planner"), ("planner", "human"), ("human", "writer"), ("writer", END)):
        made.add_edge(before, after)
    return made.compile(name="approval", checkpointer=checkpoints)


def answers(url: str, file: Path, answer: str) -> list[str]:
    """Runs two threads up to the human, or on from there with this answer."""
    checkpoints = SavedInFile()
    if answer != "begin":
        checkpoints.load(file)
    model = ChatOpenAI(model="simulated", base_url=url, api_key="none", http_client=http_client())
    application, ends = graph(model, checkpoints), []
    for number in (0, 1):
        given = {"question": f"Who likes parcel {number}?"} if answer == "begin" else Command(resume=answer)
        config = {"configurable": {"thread_id": f"thread-{number}"}, "callbacks": [langchain_handler()]}
        ends.append("asks" if "__interrupt__" in application.invoke(given, config) else "done")
    checkpoints.save(file)
    return ends


if __name__ == "__main__":
    print(answers(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
