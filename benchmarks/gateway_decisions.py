"""What does a decision of the gateway cost, and does its memory stay flat over 100,000 workflows?

No HTTP: requests go straight to the object that decides, with online counts. Each workflow has two
agents and three steps; nothing is named, so it is recognised by its prompts; it expires. Microseconds of wall time of
`arrived` (identity, forecasts, annotation) and `answered`; resident memory as the workflows pass.

    .venv/bin/python benchmarks/gateway_decisions.py
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from presage.gateway.config import gateway_config
from presage.gateway.serve import build
from presage.serving_hooks.answer_reader import AnswerReader
from presage.serving_hooks.identity.request import ApiRequest

STEPS: Final = 3
AT_ONCE: Final = 500
SYSTEM: Final = ("You plan the work of others. " * 20, "You do what the plan says. " * 20)


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def answered(text: str) -> AnswerReader:
    """An answer of one choice, with token counts."""
    reader = AnswerReader("chat", False)
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 300, "completion_tokens": len(text.split())}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    reader.add(json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())
    reader.end()
    return reader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=100_000)
    args = parser.parse_args()
    now = [0.0]
    forecasts = {
        "next_agent": None,
        "remaining_length": None,
        "return_time": None,
        "profile": None,
        "reload_s": None,
        "time_to_live_s": 60.0,
    }
    config = gateway_config({"upstreams": [{"url": "http://127.0.0.1:9"}], "forecasts": forecasts}, "")
    decisions = build(config, clock=lambda: now[0]).decisions
    arrived_us: list[float] = []
    answered_us: list[float] = []
    memory: dict[int, float] = {}
    print(f"{'workflows':>10}{'MiB':>9}{'arrived us p50':>16}{'p99':>8}{'answered us p50':>17}{'p99':>8}")
    for first in range(0, args.workflows, AT_ONCE):
        talks: list[list[dict[str, Any]]] = [[] for _ in range(AT_ONCE)]
        for step in range(STEPS):
            for number, talk in enumerate(talks):
                asked = {"role": "user", "content": f"Step {step} of case {first + number}, please."}
                messages = [{"role": "system", "content": SYSTEM[step % 2]}, *talk, asked]
                request = ApiRequest("chat", {"model": "m", "messages": messages}, at_s=now[0])
                began = time.perf_counter()
                decision = decisions.arrived(request)
                middle = time.perf_counter()
                answer = answered(f"Case {first + number}: done with step {step}, on to the next one.")
                then = time.perf_counter()
                decisions.answered(decision, answer)
                answered_us.append(1e6 * (time.perf_counter() - then))
                arrived_us.append(1e6 * (middle - began))
                talk += [asked, answer.messages[0]]
            now[0] += 5.0
        now[0] += 50.0
        decisions.tick()
        done = first + AT_ONCE
        if done % max(AT_ONCE, args.workflows // 10) == 0:
            memory[done] = resident_mib()
            figures = [*np.percentile(arrived_us, (50, 99)), *np.percentile(answered_us, (50, 99))]
            print(
                f"{done:10,}{memory[done]:9.1f}{figures[0]:16.0f}{figures[1]:8.0f}{figures[2]:17.0f}{figures[3]:8.0f}"
            )
            shown = figures
            arrived_us, answered_us = [], []
    half = memory[min(memory, key=lambda done: abs(done - args.workflows // 2))]
    last = memory[max(memory)]
    print(
        json.dumps(
            {
                "benchmark": "gateway_decisions",
                "workflows": args.workflows,
                "arrived_us": shown[:2],
                "answered_us": shown[2:],
                "mib": memory,
                "mib_last_to_half": last / half,
                "tables": decisions.debug_state(),
            }
        )
    )


if __name__ == "__main__":
    main()
