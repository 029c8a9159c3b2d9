"""How well does the engine recognise workflows without ids?

- lmcache: recorded agent sessions with full texts, in recorded order and all sessions at a time. Each request is
  answered before the next one comes. A link is right if the first request of the workflow that it names is of the same
  session. Recall is over the requests that are not the first of their session; once without the requests of which the
  log has no input, which nothing can recognise. Pairs of requests count as right if both are of one session
- claude_code: real sessions without text, 40 at a time. A prompt is its whole blocks of 64 tokens, each a hash.
  An answer is as many blocks as its length fills, of those that the next prompt to go on from it has behind it. This
  tells recall by beginnings alone, and no precision, since blocks are local to their session. Misses are split by the
  share of their blocks that were seen in an earlier prompt of the session
- single chats: unrelated requests with one system prompt, a tenth of them one of eight popular questions, answered by
  one of three refusals, by the popular question's answer, or by a text of their own. Whatever is linked is wrong
- cost: CPU time of this thread for a prompt that goes on from an earlier one (rule 1), and for a new one, whose windows
  are looked up as well (rule 2); of reading an answer of 500 tokens; and bytes kept, of a block that a workflow has in
  the cache and of a single request, when the index is full

Tokens of texts are those of `presage traces ingest --infer-workflows`, and stand for an engine's.

    python benchmarks/identity.py [--data FOLDER] [--singles 200000]

The folder is that of the public traces; without it their parts are left out. Prints Markdown tables and one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import statistics
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any

from presage.continuation import PromptedWorkflow, PromptIndex, TokenPrompt, chained, head_of, text_tokens
from presage.openings import TEMPLATE, Openings

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
KEY, BLOCK, CLAUDE_BLOCK = b"a key for the benchmark", 16, 64
AT_ONCE = 40
WORDS = [a + b for a in ("ba", "de", "fi", "go", "ku", "la", "me", "no") for b in ("ck", "lt", "mp", "nd", "rs", "st")]


@dataclass
class Judged:
    """The requests of a case: the workflow that each was given, the true one, its kind, and whether it was linked."""

    given: list[int] = field(default_factory=list)
    true: list[Hashable] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    links: list[str | None] = field(default_factory=list)
    empty: list[bool] = field(default_factory=list)

    def shares(self, kind: str | None) -> dict[str, float]:
        """Precision and recall of links and pairs, of the requests of a kind."""
        first: dict[int, Hashable] = {}
        seen, seen_full = set[Hashable](), set[Hashable]()
        count = Counter[str]()
        pairs = Counter[tuple[int, Hashable]]()
        for given, true, its, link, empty in zip(
            self.given, self.true, self.kinds, self.links, self.empty, strict=True
        ):
            first.setdefault(given, true)
            if kind is None or its == kind:
                right = link is not None and first[given] == true
                count["requests"] += 1
                count["links"] += link is not None
                count["right"] += right
                count["due"] += true in seen
                count["found"] += right and true in seen
                count["due, with input"] += not empty and true in seen_full
                count["found, with input"] += right and not empty and true in seen_full
                pairs[given, true] += 1
            seen.add(true)
            if not empty:
                seen_full.add(true)
        both = sum(comb(n, 2) for n in pairs.values())
        ours, theirs = (_pairs(at, pairs) for at in (0, 1))
        return {
            "requests": count["requests"],
            "link precision": count["right"] / max(1, count["links"]),
            "link recall": count["found"] / max(1, count["due"]),
            "recall with input": count["found, with input"] / max(1, count["due, with input"]),
            "pair precision": both / max(1, ours),
            "pair recall": both / max(1, theirs),
        }


def _pairs(at: int, pairs: Counter[tuple[int, Hashable]]) -> int:
    groups = Counter[Hashable]()
    for key, n in pairs.items():
        groups[key[at]] += n
    return sum(comb(n, 2) for n in groups.values())


class Engine:
    """The index, as an engine uses it."""

    def __init__(self, block: int = BLOCK, **options: int) -> None:
        self.index: PromptIndex[PromptedWorkflow] = PromptIndex(KEY, block, **options)
        self.openings = Openings(self.index)
        self.block = block

    def prompt(self, tokens: Sequence[int]) -> TokenPrompt:
        return TokenPrompt("", chained(tokens, self.block), tokens)

    def ask(self, prompt: TokenPrompt) -> tuple[PromptedWorkflow, str | None]:
        link, agent = self.index.find(prompt), head_of(prompt.tokens[:TEMPLATE], least=1)
        opener = self.openings.find(prompt, agent, 0.0) if link is None else None
        of = link.workflow if link is not None else opener or PromptedWorkflow("")
        if link is None and opener is None:
            self.index.begin(of)
            self.openings.begins(of, prompt)
        self.openings.step(of, agent)
        self.index.asked(of, prompt, link=link)
        return of, link.by if link is not None else None if opener is None else "quoted"

    def answer(self, of: PromptedWorkflow, tokens: Sequence[int], answer: Sequence[int]) -> None:
        both = self.prompt([*tokens, *answer])
        self.index.answered(of, both, len(tokens))
        self.openings.answered(of, both, len(tokens))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def in_turns(flows: Iterable[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A request of each workflow in turn."""
    return (row for rows in itertools.zip_longest(*flows) for row in rows if row is not None)


def lmcache(data: Path, at_a_time: bool) -> Judged:
    rows: Iterable[dict[str, Any]] = sorted(
        rows_of(data / "serving" / "lmcache_agent_trace.jsonl.gz"), key=lambda row: row["timestamp"]
    )
    if at_a_time:
        flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            flows[row["session_id"]].append(row)
        rows = in_turns(flows.values())
    engine, judged = Engine(), Judged()
    for row in rows:
        tokens = text_tokens(row["input"])
        of, link = engine.ask(engine.prompt(tokens))
        engine.answer(of, tokens, text_tokens(row["output"]))
        for column, value in zip(
            (judged.given, judged.true, judged.kinds, judged.links, judged.empty),
            (of.number, row["session_id"], row["kind"], link, not tokens),
            strict=True,
        ):
            column.append(value)  # type: ignore[attr-defined]
    return judged


def with_answers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A session whose requests have the hashes of the blocks of their prompts, and of their answers."""
    prompts = [
        [f"{row['workflow_id']} {at}".encode() for first, last in row["prefix_blocks"] for at in range(first, last + 1)]
        for row in rows
    ]
    made = []
    for place, (row, blocks) in enumerate(zip(rows, prompts, strict=True)):
        size, known = len(blocks), row["output_tokens"] // CLAUDE_BLOCK
        later = (other for other in prompts[place + 1 :] if len(other) > size and other[:size] == blocks)
        answer = next(later, [])[size : size + known]
        made.append({**row, "blocks": blocks, "answer": answer})
    return made


def claude_code(data: Path) -> dict[str, int]:
    """Counts of requests that are not the first of their session: linked, and missed by what was seen of them."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(data / "workflows" / "claude_code.jsonl.gz"):
        runs[row["workflow_id"]].append(row)
    flows, count, other_tokens = list(runs.values()), Counter[str](), itertools.count(10**7)
    for start in range(0, len(flows), AT_ONCE):
        engine, seen = Engine(CLAUDE_BLOCK), defaultdict[str, set[bytes]](set)
        for row in in_turns(list(map(with_answers, flows[start : start + AT_ONCE]))):
            run, blocks, answer = row["workflow_id"], row["blocks"], row["answer"]
            if not blocks:
                count["without a whole block"] += 1
                continue
            # Tokens stand only for their number: what is compared are the hashes of the blocks.
            of, link = engine.ask(TokenPrompt("", blocks, range(len(blocks) * CLAUDE_BLOCK)))
            if answer:
                both = [*blocks, *answer]
                unheard = [next(other_tokens) for _ in range(len(answer) * CLAUDE_BLOCK)]
                prompt = range(len(blocks) * CLAUDE_BLOCK)
                engine.index.answered(of, TokenPrompt("", both, [*prompt, *unheard]), len(prompt))
            if seen[run]:
                share = len(seen[run].intersection(blocks)) / len(blocks)
                missed = "none seen" if not share else "less than half seen" if share < 0.5 else "half or more seen"
                count["due"] += 1
                count["linked" if link else f"missed, {missed}"] += 1
            seen[run].update(blocks)
    return dict(count)


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def singles(requests: int = 1000, seed: int = 0) -> float:
    """The share of unrelated chats that were linked."""
    rng = random.Random(seed)
    system = prose(rng, 120)
    popular = [(prose(rng, 8), prose(rng, 60)) for _ in range(8)]
    refusals = [prose(rng, 40) for _ in range(3)]
    engine, linked = Engine(), 0
    for _ in range(requests):
        question, answer = prose(rng, rng.randint(5, 20)), prose(rng, rng.randint(30, 200))
        if rng.random() < 0.1:
            question, answer = rng.choice(popular)
        elif rng.random() < 0.2:
            answer = rng.choice(refusals)
        tokens = text_tokens(f"{system}\n\nUser: {question}\n\nAssistant: ")
        of, link = engine.ask(engine.prompt(tokens))
        linked += link is not None
        engine.answer(of, tokens, text_tokens(answer))
    return linked / requests


def microseconds(call: Callable[[], object], times: int) -> float:
    """Median CPU time of a call."""
    spent = []
    for _ in range(times):
        begun = time.thread_time_ns()
        call()
        spent.append(time.thread_time_ns() - begun)
    return statistics.median(spent) / 1e3


def cost(tokens: int, running: int = 200, seed: int = 0) -> dict[str, float]:
    """Times with `running` workflows that share a system prompt."""
    rng = random.Random(seed)
    engine = Engine()

    def drawn(n: int) -> list[int]:
        return rng.choices(range(1, 100_000), k=n)

    system = drawn(400)
    for _ in range(running):
        prompt = system + drawn(2000)
        of, _ = engine.ask(engine.prompt(prompt))
        engine.answer(of, prompt, drawn(500))
    history, answer = system + drawn(tokens - 900), drawn(500)
    of, _ = engine.ask(engine.prompt(history))
    engine.answer(of, history, answer)
    longer, fresh = engine.prompt(history + answer + drawn(20)), engine.prompt(system + drawn(tokens - 400))
    both = engine.prompt([*history, *answer])
    times = max(5, 2_000_000 // tokens // 10)
    found = {
        "continues": microseconds(lambda: engine.index.find(longer), times),
        "new": microseconds(lambda: engine.index.find(fresh), times),
        "opening": microseconds(lambda: engine.openings.find(fresh, "another", 0.0), times),
        "answer": microseconds(lambda: engine.index.answered(of, both, len(history)), times),
        "answer, opening": microseconds(lambda: engine.openings.answered(of, both, len(history)), times),
    }
    link = engine.index.find(longer)
    assert link is not None
    assert link.by == "answered"
    assert engine.index.find(fresh) is None
    blocks = len(fresh.blocks)
    return found | {"continues, a block": found["continues"] / blocks, "new, a block": found["new"] / blocks}


def kept(workflows: int = 500, steps: int = 8, step_tokens: int = 1200, seed: int = 0) -> float:
    """Bytes of a block of prompts that grow by `step_tokens` a step, the fixed table of parts left out."""
    rng = random.Random(seed)
    engine = Engine()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(workflows):
        prompt: list[int] = []
        for _ in range(steps):
            prompt += rng.choices(range(1, 100_000), k=step_tokens - 200)
            of, _ = engine.ask(engine.prompt(prompt))
            answer = rng.choices(range(1, 100_000), k=200)
            engine.answer(of, prompt, answer)
            prompt += answer
    del prompt, answer, of
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (workflows * steps * step_tokens / BLOCK)


def many_singles(requests: int, seed: int = 0) -> dict[str, float]:
    """Requests that nothing follows: bytes of those that are known, early and at the end, and CPU time of one more."""
    rng = random.Random(seed)
    system = rng.choices(range(1, 100_000), k=160)
    engine = Engine()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    early = 0.0

    def drawn() -> TokenPrompt:
        return engine.prompt(system + [rng.randrange(1, 100_000) for _ in range(60)])

    for number in range(requests):
        prompt = drawn()
        of, _ = engine.ask(prompt)
        engine.answer(of, prompt.tokens, [rng.randrange(1, 100_000) for _ in range(60)])
        if number == 2 * len(engine.index):
            early = tracemalloc.get_traced_memory()[0] - before
    del prompt, of
    late = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    known = len(engine.index)
    later = (drawn() for _ in range(2000))
    spent_us = statistics.median(microseconds(lambda one=one: engine.ask(one), 1) for one in later)  # type: ignore[misc]
    return {
        "known": known, "bytes each": late / known, "MiB then": early / 2**20, "MiB": late / 2**20, "us": spent_us,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--singles", type=int, default=200_000)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if (given.data / "serving" / "lmcache_agent_trace.jsonl.gz").exists():
        print("| lmcache | kind | links: precision | recall | with input | pairs: precision | recall |")
        print("|---|---|---|---|---|---|---|")
        for name, at_a_time in (("as recorded", False), ("all at a time", True)):
            judged = lmcache(given.data, at_a_time)
            for kind in (None, *sorted(set(judged.kinds))):
                shares = results[f"lmcache, {name}, {kind or 'all'}"] = judged.shares(kind)
                shown = " | ".join(f"{value:.3f}" for key, value in shares.items() if key != "requests")
                print(f"| {name} | {kind or 'all'} ({shares['requests']:.0f}) | {shown} |", flush=True)
    else:
        print(f"lmcache left out: no serving/lmcache_agent_trace.jsonl.gz in {given.data.name}")
    if (given.data / "workflows" / "claude_code.jsonl.gz").exists():
        found = results["claude_code"] = claude_code(given.data)
        print("\n| claude_code | requests | share |\n|---|---|---|")
        for what, count in sorted(found.items()):
            share = "" if what in ("due", "without a whole block") else f"{count / found['due']:.4f}"
            print(f"| {what} | {count} | {share} |")
    else:
        print(f"claude_code left out: no workflows/claude_code.jsonl.gz in {given.data.name}")
    results["singles linked"] = [singles(seed=seed) for seed in range(5)]
    print(f"\nSingle chats linked, of 1,000: {', '.join(f'{share:.1%}' for share in results['singles linked'])}")
    print("\n| tokens | continues, us | a block | new, us | a block | opening, us | answer, us | opening, us |")
    print("|---" * 8, "|", sep="")
    for tokens in (1_000, 10_000, 100_000):
        spent = results[f"microseconds, {tokens}"] = cost(tokens)
        print(
            f"| {tokens} | {spent['continues']:.0f} | {spent['continues, a block']:.2f} | {spent['new']:.0f} | "
            f"{spent['new, a block']:.2f} | {spent['opening']:.0f} | {spent['answer']:.0f} | "
            f"{spent['answer, opening']:.0f} |",
            flush=True,
        )
    results["bytes a block"] = kept()
    print(f"\nKept of a block of a workflow's prompts: {results['bytes a block']:.1f} bytes")
    many = results["single requests"] = many_singles(given.singles)
    print(
        f"After {given.singles} single requests: {many['known']:.0f} known, {many['bytes each']:.0f} bytes each, "
        f"{many['MiB']:.0f} MiB; {many['MiB then']:.0f} MiB when as many had been forgotten; {many['us']:.0f} us each"
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
