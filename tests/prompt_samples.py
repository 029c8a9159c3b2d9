"""Traces of a small application whose prompts have a known composition, and words that are in no name."""

from __future__ import annotations

import random
from typing import Any

STEMS = (
    "You write code.\nZanzibar task: ",
    "You run tests, quixotically.\n",
    "You write code.\nReport of the tester: ",
)
"""Of the coder's first prompt, the tester's, and the coder's later prompts, which copy the tester's answer."""
WORDS = [f"{a}{b}{c}vex" for a in "bdfgk" for b in "aeiou" for c in "nrslm"]


def prompted(workflows: int, seed: int = 0, workflow_type: str = "loop") -> list[dict[str, Any]]:
    """coder (tester coder){1,3}: the tester reads the coder's answer, the coder the tester's, each whole."""
    rng = random.Random(seed)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(20, 40)))

    rows: list[dict[str, Any]] = []
    for at in range(workflows):
        agents = ["coder", *["tester", "coder"] * rng.randint(1, 3)]
        said = text()
        for step, agent in enumerate(agents):
            stem = STEMS[0] if step == 0 else STEMS[1 if agent == "tester" else 2]
            prompt, said = stem + said, text()
            named = {"workflow_type": workflow_type, "workflow_id": f"{seed}-{at:04d}", "step": step, "agent": agent}
            rows.append({**named, "input_text": prompt, "output_text": said})
    return rows


def leaks(text: str) -> list[str]:
    """Words of prompts and answers in a text."""
    return [word for word in ("Zanzibar", "quixotically", "You write", "Report of", "vex") if word in text]
