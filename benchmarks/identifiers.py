"""Do predictors hold when each prompt carries something unique to its workflow?

An agent loop whose length depends on one word of the request (fix, add, tidy, doc). In each row of the table the same
workflows carry something else as well, drawn anew for each workflow: a ticket number, a UUID, the name of a customer,
a path, a paragraph of random words, and so on. Models train on 400 workflows and are judged on 2,000 others. The
addition carries no information, so all rows should equal the first, "nothing".

    python benchmarks/identifiers.py [--kinds ticket,uuid] [--lengths] [--types 1] [--workflows 400] [--test 2000]

`--lengths` tests the remaining-length predictor instead of the next-agent predictor. `--types 20` spreads the
workflows at random over 20 workflow types: many similar applications with few traces each. Prints a Markdown table
and one JSON line. Takes a minute per row.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import os
import random
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import pandas as pd

from presage.datasets.read import read_traces

ROUNDS = {"fix": 0.35, "add": 0.6, "tidy": 0.15, "doc": 0.05}
"""Chance of another round of coder and tester, by the word of the request."""
BASELINES = ("markov-1", "markov-3", "boosted-trees-ids", "published-graphsage")
FIRST = [
    "Anna",
    "Ben",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jamal",
    "Katya",
    "Liam",
    "Mei",
    "Nora",
    "Omar",
    "Priya",
    "Rosa",
    "Sven",
    "Tara",
]
LAST = [
    "Kowalski",
    "Okafor",
    "Tanaka",
    "Schmidt",
    "Rossi",
    "Novak",
    "Garcia",
    "Larsen",
    "Haddad",
    "Chen",
    "Dubois",
    "Silva",
    "Petrov",
    "Yilmaz",
    "Bauer",
]


def _words(size: int) -> list[str]:
    rng = random.Random(7)
    found = set()
    while len(found) < size:
        syllables = rng.choice((2, 2, 3, 3, 4))
        found.add("".join(rng.choice("bcdfghklmnprst") + rng.choice("aeiou") for _ in range(syllables)))
    return sorted(found)


WORDS = _words(2000)


def _some(rng: random.Random, count: int, between: str = " ") -> str:
    return between.join(rng.choice(WORDS) for _ in range(count))


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(count))


def _jwt(rng: random.Random) -> str:
    claims = json.dumps({"sub": rng.getrandbits(48), "iat": rng.randrange(10**9, 2 * 10**9)}).encode()
    parts = (b'{"alg":"HS256","typ":"JWT"}', claims, rng.randbytes(32))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def _address(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4))


def _time(rng: random.Random) -> str:
    return datetime.datetime.fromtimestamp(1.6e9 + rng.random() * 1e8, datetime.UTC).isoformat()


KINDS: dict[str, Callable[[random.Random], str]] = {
    "nothing": lambda rng: "",
    "ticket": lambda rng: f" ticket {rng.randrange(10**6)}",
    "#17": lambda rng: f" #{rng.randrange(400)}",
    "order": lambda rng: f" order ORD-{rng.randrange(10**7):07d}",
    "uuid": lambda rng: f" request {uuid.UUID(int=rng.getrandbits(128))}",
    "hex": lambda rng: f" commit {rng.getrandbits(160):040x}",
    "base64": lambda rng: " token " + "".join(rng.choice("ABCDEFGHabcdefghijkl0123456789+/") for _ in range(32)) + "==",
    "name": lambda rng: f" for {rng.choice(FIRST)} {rng.choice(LAST)}",
    "email": lambda rng: f" from {_some(rng, 2, '.')}@{_some(rng, 1)}.com",
    "path": lambda rng: f" in /srv/{_some(rng, 3, '/')}.py",
    "url": lambda rng: f" see https://{_some(rng, 1)}.example.com/{_some(rng, 1)}?q={rng.randrange(9999)}",
    "time": lambda rng: f" at {_time(rng)}",
    "rare word": lambda rng: " " + "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(9)),
    "dozen words": lambda rng: " " + _some(rng, 12),
    "paragraph": lambda rng: f" {_some(rng, 60)}.",
    "jwt": lambda rng: f" Authorization: Bearer {_jwt(rng)}",
    "phone": lambda rng: f" call +49 {rng.randrange(100, 999)} {rng.randrange(10**7):07d}",
    "pod": lambda rng: f" on {_some(rng, 1)}-api-{rng.getrandbits(36):09x}-{_letters(rng, 5)}",
    "log line": lambda rng: f"\n{_time(rng)} ERROR [{_address(rng)}] {_some(rng, 3)}: code {rng.randrange(600)}",
    "name in Chinese": lambda rng: " 给" + "".join(chr(rng.randrange(0x4E00, 0x5E00)) for _ in range(3)),
    "customer's prompt": lambda rng: f" You serve {_some(rng, 2)}, account {rng.getrandbits(40):x}. {_some(rng, 150)}.",
    "stack trace": lambda rng: "".join(
        f'\n  File "/app/{_some(rng, 1)}.py", line {rng.randrange(999)}, in {_some(rng, 1, "_")}' for _ in range(6)
    ),
    "every other": lambda rng: f" ticket {rng.randrange(10**6)}" if rng.random() < 0.5 else "",
}
"""What a prompt carries beside the word that matters."""


def rows(kind: str, workflows: int, seed: int, types: int = 1) -> Iterator[dict[str, Any]]:
    """Generates steps. Routes and lengths depend on the seed alone, so that table rows differ only in their prompts."""
    law, noise = random.Random(seed), random.Random(seed + 10**6)
    for number in range(workflows):
        word = law.choice(list(ROUNDS))
        asked = f"{word} it{KINDS[kind](noise)}"
        path = ["triage", "coder", "tester"]
        while law.random() < ROUNDS[word]:
            path += ["coder", "tester"]
        path += ["reviewer"] * (law.random() < 0.8)
        for step, agent in enumerate(path):
            began = 1.7e9 + number * 99 + step
            yield {
                "workflow_type": f"loop-{zlib.crc32(f'{seed}-{number}'.encode()) % types}",
                "workflow_id": f"{seed}-{number}",
                "step": step,
                "agent": agent,
                "start_time": began,
                "end_time": began + 0.5,
                "output_tokens": law.randrange(50, 150),
                "input_text": f"You are {agent}. {asked}",
                "output_text": "ok",
            }


def judged(kind: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Trains on some workflows and returns the metrics on others."""
    learn, test = (
        read_traces(pd.DataFrame(rows(kind, count, seed, chosen.types))).table
        for count, seed in ((chosen.workflows, chosen.seed), (chosen.test, chosen.seed + 99))
    )
    if chosen.lengths:
        from presage.training.length.train import train_lengths

        return train_lengths(learn, test, seed=chosen.seed).metrics
    from presage.training.next_agent.train import train

    return train(learn, test, seed=chosen.seed, baselines=BASELINES).metrics


def next_agent_row(kind: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Prints a row of the table and returns its figures."""
    figures = metrics["moments"]["prefill"]
    engine = metrics["profiles"]["engine"]["moments"]["prefill"]
    rivals = {name: of["prefill"]["accuracy"] for name, of in metrics["baselines"].items()}
    best = [max(of[k] for of in rivals.values()) for k in range(len(figures["accuracy"]))]
    cells = [figures["accuracy"], best, figures["ece"], engine["accuracy"]]
    told = " | ".join(" / ".join(f"{value:.3f}" for value in cell) for cell in cells)
    states = metrics["state_choice"]["chosen"]
    print(f"| {kind} | {told} | {len(metrics['behind'])} | {states} |", flush=True)
    return {
        "accuracy": figures["accuracy"],
        "ci95": figures["ci95"],
        "ece": figures["ece"],
        "engine": engine["accuracy"],
        "baselines": rivals,
        "lost": metrics["behind"],
        "states": states,
    }


def length_row(kind: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Prints a row of the table and returns its figures."""
    baseline = metrics["baselines"]["median-per-step"]
    median = baseline["pinball"]["0.5"]
    coverage, pinball = metrics["coverage"], metrics["pinball"]
    told, theirs = (" / ".join(f"{value:.3f}" for value in of.values()) for of in (coverage, baseline["coverage"]))
    states = metrics["state_choice"]["chosen"]
    print(
        f"| {kind} | {pinball['0.5']:.1f} | {median:.1f} | {told} | {theirs} | {len(metrics['behind'])} | {states} |",
        flush=True,
    )
    return {
        "pinball": pinball,
        "median per step": median,
        "coverage": coverage,
        "coverage of quantiles per step": baseline["coverage"],
        "lost": metrics["behind"],
        "states": states,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--types", type=int, default=1)
    parser.add_argument("--workflows", type=int, default=400)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    kinds = chosen.kinds.split(",")
    if unknown := set(kinds) - KINDS.keys():
        sys.exit(f"identifiers: no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if chosen.lengths:
        print(
            "| prompts carry | pinball .5, tokens | median per step | within .5 / .9 / .99 | "
            "quantiles per step: within | lost | texts |"
        )
        print("|---|---|---|---|---|---|---|")
    else:
        print("| prompts carry | accuracy at 1 / 2 / 3 | best baseline | ECE | profile engine | lost | states |")
        print("|---|---|---|---|---|---|---|")
    found = {}
    for kind in kinds:
        begun = time.perf_counter()
        found[kind] = (length_row if chosen.lengths else next_agent_row)(kind, judged(kind, chosen))
        print(f"identifiers: {kind}, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    print(
        json.dumps(
            {
                "benchmark": "identifiers",
                "lengths": chosen.lengths,
                "types": chosen.types,
                "seed": chosen.seed,
                "kinds": found,
            }
        )
    )


if __name__ == "__main__":
    main()
