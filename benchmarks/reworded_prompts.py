"""Are agents recognised whose release also rewrote their system prompts, and are others taken for them?

No public trace has a column of system prompts. Two applications have them within their inputs: ChatDev, whose prompts
name the role, the task and much that all roles share, and Magentic-One in LMCache's agent trace, told apart by its
opening words. The names are learnt from two thirds of the tasks, and looked for in the others:

- as they are, and reworded (`presage.training.next_agent.change`): the share that is found, by the first rule
  (`AgentNames.find`) and by words too (`find_reworded`), and the share that is found under a wrong name
- left out: an agent that the names lack is found under another name
- other application: the names are those of the other one

    python benchmarks/reworded_prompts.py [--data FOLDER]

Prints a Markdown table and one JSON line. Texts are neither shown nor kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa

from presage.features.agent_fingerprint import masked_prompt
from presage.features.agent_names import AgentNames
from presage.training.next_agent.change import rewording

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
OF_ROLE = re.compile(r"You are (?:the )?([A-Z][A-Za-z ]+?)[.,]")
OF_TASK = re.compile(r"(?:task|request)[^:]*:\s*(.{20,40})", re.DOTALL)
LEAST_PROMPTS = 3
"""Of an agent that is judged."""
Prompts = Mapping[str, Sequence[str]]
"""Different system prompts by agent."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file."""
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def chatdev(data: Path) -> Prompts:
    """The bracketed beginning of inputs, by the role that they name."""
    found = defaultdict(set)
    for row in rows(data / "workflows" / "chatdev.jsonl.gz"):
        text = row.get("input_text") or ""
        if text.startswith("[") and "]\n" in text:
            system = text[1 : text.index("]\n")]
            if role := OF_ROLE.search(system):
                found[role[1]].add(system)
    return {name: sorted(of) for name, of in sorted(found.items()) if len(of) >= LEAST_PROMPTS}


def magentic(data: Path) -> Prompts:
    """The first message of inputs, by its first words."""
    found = defaultdict(set)
    for row in rows(data / "serving" / "lmcache_agent_trace.jsonl.gz"):
        if row["kind"] == "magagent" and row["input"]:
            system = re.split(r"\n(?:user|assistant): ", row["input"])[0]
            found[" ".join(system.split()[:4])].add(system)
    return {name: sorted(of) for name, of in sorted(found.items())}


def is_test(prompt: str) -> bool:
    """Whether its task is in the last third; prompts without a task are all on one side."""
    task = OF_TASK.search(prompt)
    return crc32((task[1] if task else prompt).encode()) % 3 == 0


def names_of(prompts: Prompts) -> AgentNames:
    """Learnt from the training tasks, as an artefact keeps them."""
    steps = [("app", name, of) for name, several in prompts.items() for of in several if not is_test(of)]
    columns = ("workflow_type", "agent", "system_prompt")
    names = AgentNames.of_traces(pa.table(dict(zip(columns, map(list, zip(*steps, strict=True)), strict=True))))
    assert names is not None
    return names


def judged(prompts: Prompts, others: Prompts) -> dict[str, Any]:
    """Shares of the test prompts."""
    names, strange = names_of(prompts), names_of(others)
    reword = rewording([of for several in prompts.values() for of in several], 0)
    found: dict[str, list[bool]] = defaultdict(list)
    for name, several in prompts.items():
        known = {agent: of for agent, of in prompts.items() if agent != name}
        without = names_of(known)
        for prompt in filter(is_test, several):
            for what, text in (("as they are", prompt), ("reworded", reword(prompt))):
                one = masked_prompt(text, {}).fingerprint()
                for rule, answer in (("find", names.find(one)), ("find_reworded", names.find_reworded(one))):
                    found[f"{what}, {rule}"].append(answer is not None and answer[0][1] == name)
                    found[f"{what}, {rule}, wrong"].append(answer is not None and answer[0][1] != name)
                found[f"{what}, left out"].append(without.find_reworded(one) is not None)
                found[f"{what}, other application"].append(strange.find_reworded(one) is not None)
    return {"agents": len(prompts), "prompts": len(found["reworded, find"])} | {
        what: round(sum(of) / len(of), 3) for what, of in found.items()
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    data = parser.parse_args().data
    apps = {"chatdev": chatdev(data), "magentic": magentic(data)}
    results = {
        name: judged(prompts, apps[other]) for (name, prompts), other in zip(apps.items(), reversed(apps), strict=True)
    }
    print("| | " + " | ".join(results) + " |\n|---|" + "---|" * len(results))
    for what in results["chatdev"]:
        print(f"| {what} | " + " | ".join(str(of[what]) for of in results.values()) + " |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
