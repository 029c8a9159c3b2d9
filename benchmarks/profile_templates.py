"""How often is the beginning of the next prompt known exactly, how much of it, and what does learning cost?

Templates are learnt from some tasks and judged on the others, whose steps are predicted in order, each given its agent.
Stems are kept as digests, so a judge sees each stem once before it can predict it.

- lmcache: 53 recorded agent sessions with whole prompts, three applications, five-fold by session (too few for one
  split); the trace names no agents: the beginning of a prompt does, in taubench who speaks first.
- autocoderover: two applications, its last messages and answers cut at 4,000 characters; 80 / 20 by task, five-fold.
- own: applications whose composition is known, as texts and as token ids; 60 tasks learnt from, 60 judged.
- cost: 100,000 steps of growing conversations and of a coder / tester loop; seconds of `fit`, peak memory of the
  process above its start, the texts themselves included (a mark that never falls: a later row is at least the earlier).

    python benchmarks/profile_templates.py [--steps 100000]

Precision: share of predicted prefixes that the prompt begins with. Recall: predicted share of all characters; new: of
those behind the longest common prefix with an earlier prompt and answer of the same workflow. Prints a table and one
JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from presage.predictors.profile.composition import PromptStep
from presage.predictors.profile.templates import PromptTemplates, TemplateConfig, TemplateFigures, prompt_steps

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FOLDS = 5
GREETING = "Hi! How can I help you today?"
"""A simulated user of taubench is prompted with what the assistant said first."""

Workflows = list[tuple[str, list[PromptStep]]]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def lmcache() -> dict[str, Workflows]:
    sessions: dict[tuple[str, str], list[PromptStep]] = defaultdict(list)
    for row in sorted(
        rows_of(DATA / "serving" / "lmcache_agent_trace.jsonl.gz"), key=lambda row: int(row["timestamp"])
    ):
        prompt = row["input"]
        agent = ("user" if prompt.startswith(GREETING) else "assistant") if row["kind"] == "taubench" else prompt[:24]
        sessions[row["kind"], row["session_id"]].append(PromptStep(agent, prompt, row["output"]))
    found: dict[str, Workflows] = defaultdict(list)
    for (kind, session), steps in sessions.items():
        found[f"lmcache {kind}"].append((session, steps))
    return found


def autocoderover() -> dict[str, Workflows]:
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(DATA / "workflows" / "autocoderover.jsonl.gz"):
        runs[row["workflow_type"], row["task_id"], row["workflow_id"]].append(row)
    found: dict[str, Workflows] = defaultdict(list)
    for (kind, task, _), rows in runs.items():
        found[kind].append((task, prompt_steps(sorted(rows, key=lambda row: int(row["step"])))))
    return found


def words(rng: random.Random, most: int) -> str:
    return " ".join(f"{rng.getrandbits(20):x}" for _ in range(rng.randrange(most // 2, most)))


def map_reduce(rng: random.Random) -> list[PromptStep]:
    question, parts = words(rng, 60), rng.randrange(2, 6)
    steps = [PromptStep("splitter", f"Split this question into {parts} parts.\nQuestion: {question}", words(rng, 60))]
    steps += [PromptStep("mapper", f"Answer part {i} of:\n{steps[0].answer}", words(rng, 99)) for i in range(parts)]
    notes = "".join(f"\n## Notes\n{step.answer}" for step in steps[1:])
    return [*steps, PromptStep("reducer", f"Merge the notes.\nQuestion: {question}{notes}\nMerged:", words(rng, 60))]


def debate(rng: random.Random) -> list[PromptStep]:
    motion, steps = words(rng, 60), list[PromptStep]()
    for turn in range(2 * rng.randrange(2, 5)):
        agent = ("pro", "contra")[turn % 2]
        said = f"\nYour opponent said: {steps[-1].answer}\nReply." if steps else "\nBegin."
        steps.append(PromptStep(agent, f"You argue {agent} in a debate. Motion: {motion}{said}", words(rng, 99)))
    return [*steps, PromptStep("judge", f"Who won?\nPro: {steps[-2].answer}\nContra: {steps[-1].answer}", "pro")]


def reflection(rng: random.Random) -> list[PromptStep]:
    steps = [PromptStep("writer", f"Write an essay about the topic.\nTopic: {words(rng, 60)}", words(rng, 99))]
    for _ in range(rng.randrange(1, 5)):
        steps.append(
            PromptStep("critic", f"You are a critic. Essay:\n{steps[-1].answer}\nCriticise it.", words(rng, 99))
        )
        again = f"{steps[-2].prompt}\n\nassistant: {steps[-2].answer}\n\nuser: {steps[-1].answer}"
        steps.append(PromptStep("writer", again, words(rng, 99)))
    return steps


def coder_tester(rng: random.Random) -> list[PromptStep]:
    task = words(rng, 60)
    steps = [PromptStep("coder", f"You write code.\nTask: {task}\n", words(rng, 99))]
    for _ in range(rng.randrange(1, 9)):
        code = steps[-1].answer
        steps.append(PromptStep("tester", f"You run tests.\n{code}\n>>> Output:\n{words(rng, 60)}", words(rng, 60)))
        steps.append(PromptStep("coder", f"You write code.\nTask: {task}\nReport: {steps[-1].answer}", words(rng, 99)))
    return steps


def stamped(rng: random.Random) -> list[PromptStep]:
    """The time and a request id stand inside a long system prompt."""
    steps = []
    for _ in range(rng.randrange(1, 5)):
        when = f"2025-06-14 {rng.randrange(10, 24)}:{rng.randrange(10, 60)}"
        system = f"You work in a shop. {'Be polite to everybody. ' * 40}Time: {when}, id req-{rng.getrandbits(64):x}"
        steps.append(PromptStep("clerk", f"{system}\nAnswer the customer.\nCustomer: {words(rng, 60)}", words(rng, 60)))
    return steps


def chat(rng: random.Random) -> list[PromptStep]:
    steps = [PromptStep("chat", f"system: You chat with a user.\nuser: {words(rng, 60)}", words(rng, 99))]
    for _ in range(rng.randrange(2, 20)):
        said = f"{steps[-1].prompt}\nassistant: {steps[-1].answer}\nuser: {words(rng, 60)}"
        steps.append(PromptStep("chat", said, words(rng, 99)))
    return steps


APPS: tuple[Callable[[random.Random], list[PromptStep]], ...] = (
    map_reduce,
    debate,
    reflection,
    coder_tester,
    stamped,
    chat,
)


def as_arrays(runs: Workflows) -> Workflows:
    """A token id for each character."""

    def ids(text: Any) -> Any:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)

    return [(task, [PromptStep(s.agent, ids(s.prompt), ids(s.answer)) for s in steps]) for task, steps in runs]


def drawn(app: Callable[[random.Random], list[PromptStep]], number: int, seed: int) -> Workflows:
    return [(f"{seed}-{i}", app(random.Random(f"{seed}-{i}"))) for i in range(number)]


def folds(runs: Workflows, min_tasks: int) -> TemplateFigures:
    """All tasks judged, each by templates of the other folds."""
    tasks = sorted({task for task, _ in runs})
    random.Random(0).shuffle(tasks)
    parts = []
    for fold in range(FOLDS):
        test = set(tasks[fold::FOLDS])
        learnt = PromptTemplates.fit([run for run in runs if run[0] not in test], TemplateConfig(min_tasks=min_tasks))
        parts.append(learnt.evaluate([run for run in runs if run[0] in test]))
    return together(parts)


def together(parts: list[TemplateFigures]) -> TemplateFigures:
    return TemplateFigures(*map(sum, zip(*map(astuple, parts), strict=True)))


def row(name: str, figures: TemplateFigures) -> dict[str, Any]:
    """Prints a row of the table and returns its figures."""
    shares = {
        "precision": figures.precision,
        "precision_by_workflow": figures.precision_by_workflow,
        "recall": figures.recall,
        "recall_new": figures.recall_new,
        "wasted": figures.wasted,
        "predicted": figures.predicted / figures.prompts,
    }
    cells = " | ".join("-" if share is None else f"{share:.3f}" for share in shares.values())
    print(f"| {name} | {figures.prompts} | {cells} |", flush=True)
    return {"prompts": figures.prompts, **shares}


def cost(steps: int) -> dict[str, dict[str, float]]:
    """Seconds and MiB of learning from many steps; the texts are drawn before the clock starts."""
    found = {}
    print("\n| learnt from | steps | characters | s | MiB above start |")
    print("|---|---|---|---|---|")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for app, tokens in ((coder_tester, False), (chat, False), (coder_tester, True)):
        runs: Workflows = []
        number = size = 0
        rng = random.Random(0)
        while number < steps:
            run = app(rng)
            runs += [(str(len(runs)), run)] if not tokens else as_arrays([(str(len(runs)), run)])
            number += len(run)
            size += sum(len(str(step.prompt)) for step in run)
        begun = time.perf_counter()
        templates = PromptTemplates.fit(runs)
        seconds = time.perf_counter() - begun
        assert templates.templates
        mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        name = f"{app.__name__}{', token ids' if tokens else ''}"
        print(f"| {name} | {number} | {size / 1e6:.0f} M | {seconds:.1f} | {mib:.0f} |", flush=True)
        found[name] = {"steps": number, "characters": size, "s": seconds, "mib": mib}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    chosen = parser.parse_args()
    costs = cost(chosen.steps)
    print("\n| workflows | prompts | precision | by workflow | recall | new | wasted | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    found = {}
    traces = {**lmcache(), **autocoderover()} if DATA.is_dir() else {}
    sums: dict[str, list[TemplateFigures]] = defaultdict(list)
    for name, runs in traces.items():
        figures = folds(runs, 5)
        sums[name.split(" ")[0].removesuffix("_validate")].append(figures)
        found[name] = row(name, figures)
        if name == "lmcache taubench":  # eight sessions: with the default, half of six or seven are too few
            found[f"{name}, min_tasks=3"] = row(f"{name}, min_tasks=3", folds(runs, 3))
    found |= {f"{name}, all": row(f"{name}, all", together(parts)) for name, parts in sums.items()}
    for app in APPS:
        learn, test = drawn(app, 60, 0), drawn(app, 60, 1)
        found[app.__name__] = row(app.__name__, PromptTemplates.fit(learn).evaluate(test))
        tokens = PromptTemplates.fit(as_arrays(learn)).evaluate(as_arrays(test))
        found[f"{app.__name__}, token ids"] = row(f"{app.__name__}, token ids", tokens)
    print(json.dumps({"benchmark": "profile_templates", "workflows": found, "cost": costs}))


if __name__ == "__main__":
    main()
