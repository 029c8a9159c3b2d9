"""A small multi-agent application in which the model's output decides who comes next.

A triage agent hands a task to one of four workers; workers hand on to each other or to a critic; the critic ends the
workflow or sends it back. Every agent shows the model a few examples and asks for its own answer. The agent named
after the answer's last "Next:" comes next; without a name, the worker whose words it uses most; without any of these,
the critic; and after the critic the workflow ends. Nothing here depends on an engine.

Tasks are templates filled from short lists, so that one kind of task has many wordings; some need two workers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

WORKERS = ("researcher", "coder", "calculator", "writer")
DONE = "done"
MOST_STEPS = 8
"""Nobody is asked after so many steps."""

ANSWER_TOKENS = 32
MOST_SHOWN = 2
"""Contributions that the next agent sees, the latest."""

Message = dict[str, str]

_ROLES = {
    "triage": "You are the triage agent of a team. In one sentence say what the task needs first, and who does it: "
    "researcher, coder, calculator or writer.",
    "researcher": "You are the researcher of a team. State the facts that the task asks for in one sentence. Then say "
    "who goes on: coder, calculator, writer, or critic if nothing is missing.",
    "coder": "You are the coder of a team. Write the program that the task asks for, as short as you can. Then say who "
    "goes on: researcher, calculator, writer, or critic if nothing is missing.",
    "calculator": "You are the calculator of a team. Work out the number that the task asks for in one line. Then say "
    "who goes on: researcher, coder, writer, or critic if nothing is missing.",
    "writer": "You are the writer of a team. Write the text that the task asks for in one or two sentences. Then say "
    "who goes on: researcher, coder, calculator, or critic if nothing is missing.",
    "critic": "You are the critic of a team. Say in one sentence whether the work answers the whole task. Then say "
    "done, or who has to go on: researcher, coder, calculator or writer.",
}

_SHOWN: dict[str, Sequence[tuple[str, str]]] = {
    "triage": (
        ("Task: Add 14 and 29, then double the sum.", "This needs arithmetic. Next: calculator."),
        ("Task: Write a Python function that counts vowels.", "This needs a program. Next: coder."),
        ("Task: Find out when the Eiffel Tower was built.", "This needs a fact that is looked up. Next: researcher."),
        ("Task: Write a birthday message for a colleague.", "This needs a text. Next: writer."),
    ),
    "researcher": (
        (
            "Task: Find out when the Eiffel Tower was built and write a postcard about it.",
            "It was built from 1887 to 1889. The postcard is still missing. Next: writer.",
        ),
        ("Task: Find out how many moons Mars has.", "Mars has two moons. Nothing is missing. Next: critic."),
        (
            "Task: Find out how high Mount Everest is and convert it to feet.",
            "It is 8,849 metres high. The conversion is still missing. Next: calculator.",
        ),
    ),
    "coder": (
        (
            "Task: Write a Python function that reverses a text.",
            "def reverse(text): return text[::-1]. Nothing is missing. Next: critic.",
        ),
        (
            "Task: Write a function for the area of a circle and work it out for radius 3.",
            "def area(r): return 3.14159 * r * r. The number is still missing. Next: calculator.",
        ),
        (
            "Task: Write a program that sorts names and explain it to a beginner.",
            "print(sorted(names)). The explanation is still missing. Next: writer.",
        ),
    ),
    "calculator": (
        ("Task: What is 12 times 12?", "12 times 12 is 144. Nothing is missing. Next: critic."),
        (
            "Task: What do 5 tickets at 8 euros cost? Tell a friend in a message.",
            "5 times 8 is 40 euros. The message is still missing. Next: writer.",
        ),
    ),
    "writer": (
        (
            "Task: Write a birthday message for a colleague.",
            "Happy birthday, and thank you for your good humour. Nothing is missing. Next: critic.",
        ),
        (
            "Task: Write a postcard from the highest mountain of Spain.",
            "Greetings from the top! The name of the mountain is still missing. Next: researcher.",
        ),
    ),
    "critic": (
        (
            "Task: What is 12 times 12?\nWork so far:\ncalculator: 12 times 12 is 144.",
            "The number is there. Next: done.",
        ),
        (
            "Task: Find out how many moons Mars has and write a poem about them.\nWork so far:\nresearcher: Two moons.",
            "The poem is missing. Next: writer.",
        ),
        (
            "Task: Write a function for the area of a circle and work it out for radius 3.\nWork so far:\n"
            "coder: def area(r): return 3.14159 * r * r.",
            "The number was not worked out. Next: calculator.",
        ),
        (
            "Task: Write a birthday message for a colleague.\nWork so far:\nwriter: Happy birthday!",
            "The message is fine. Next: done.",
        ),
    ),
}

_TEMPLATES = (
    "What is {a} times {b}, plus {c}?",
    "How many {thing} are in {a} boxes of {b} {thing} each?",
    "What do {a} {thing} at {c} euros each cost? Tell {person} in a message.",
    "Add up {a}, {b} and {c}, and write a function that adds any three numbers.",
    "Write a Python function that {does} {data}.",
    "Write a program that {does} {data}, and explain it to {person}.",
    "Write a program that {does} {data} and say how often it runs for {a} items.",
    "Find out who discovered {topic}.",
    "Find out when {place} was built and write a postcard to {person}.",
    "Find out how tall {place} is and convert it to feet.",
    "Find out how tall {place} is and write a program that prints it.",
    "Write a short poem about {topic}.",
    "Write an email to {person} about {topic}.",
    "Write a message to {person} that names three facts about {topic}.",
    "Explain {topic} to {person}.",
    "Compare {topic} and {place} in one sentence.",
)
_FILLERS = {
    "a": ("3", "7", "12", "15", "24", "40"),
    "b": ("4", "6", "9", "11", "18", "25"),
    "c": ("2", "5", "8", "13", "20", "50"),
    "thing": ("apples", "books", "tickets", "chairs", "bottles", "lamps"),
    "person": ("my landlord", "a child", "a colleague", "my sister", "a new customer", "the mayor"),
    "does": ("sorts", "reverses", "counts", "filters", "removes doubles from", "prints"),
    "data": ("a list of numbers", "a list of names", "the words of a text", "the lines of a file", "a table of prices"),
    "topic": ("rain", "gravity", "bees", "volcanoes", "the moon", "electricity", "chess", "coffee"),
    "place": ("the Eiffel Tower", "the Great Wall", "Big Ben", "the Colosseum", "the Golden Gate Bridge"),
}
_NEXT = re.compile(r"Next:\s*(\w+)")
_WORDS = {
    "researcher": r"facts?|found|find|histor\w*|discover\w*|research\w*|science|scientist|source|look\w*|name",
    "coder": r"programs?|functions?|code|python|computer|language|loop|list",
    "calculator": r"numbers?|math\w*|arithmetic|sums?|add\w*|multipl\w*|calculat\w*|cost|convert\w*|conversion",
    "writer": r"messages?|texts?|poems?|postcards?|emails?|letters?|story|stories|sentences?|pictures?|explanation",
}


def tasks(number: int, draw: random.Random) -> list[str]:
    """Draws tasks; some occur twice."""
    return [
        draw.choice(_TEMPLATES).format(**{name: draw.choice(of) for name, of in _FILLERS.items()})
        for _ in range(number)
    ]


def messages_before(agent: str) -> list[Message]:
    """The messages that every prompt of an agent begins with."""
    shown = [
        {"role": role, "content": text}
        for pair in _SHOWN[agent]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [{"role": "system", "content": _ROLES[agent]}, *shown]


@dataclass
class Run:
    """One workflow.

    Attributes:
        task: its text.
        agent: the next agent; None after the end.
        steps: agents so far, each with its answer.
    """

    task: str
    agent: str | None = "triage"
    steps: list[tuple[str, str]] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """The prompt of the next agent."""
        assert self.agent is not None
        work = [f"{agent}: {_NEXT.split(answer)[0].strip()}" for agent, answer in self.steps if agent in WORKERS]
        so_far = "\n".join(["\nWork so far:", *work[-MOST_SHOWN:]]) if work else ""
        return [*messages_before(self.agent), {"role": "user", "content": f"Task: {self.task}{so_far}"}]

    def answered(self, answer: str) -> None:
        """Takes the agent's answer, which decides who comes next."""
        assert self.agent is not None
        self.steps.append((self.agent, answer))
        self.agent = None if len(self.steps) == MOST_STEPS else who_is_next(self.agent, answer)


def who_is_next(agent: str, answer: str) -> str | None:
    """The agent that an answer hands on to; None at the end."""
    named = [name.lower() for name in _NEXT.findall(answer)]
    if named and named[-1] in (*WORKERS, "critic", DONE):
        name = "critic" if named[-1] == DONE and agent != "critic" else named[-1]
        return None if name in (DONE, agent) and agent == "critic" else name
    used = {worker: len(re.findall(rf"\b({words})\b", answer.lower())) for worker, words in _WORDS.items()}
    used.pop(agent, None)
    most = max(used, key=lambda worker: used[worker])
    return most if used[most] else None if agent == "critic" else "critic"
