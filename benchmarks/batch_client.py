"""What does `presage batch run` itself cost: how many answers a second, and how much memory, by the number of rows?

Each row is a conversation of two calls about a text of its own. The engine is in this process and answers at once with
16 words, so all time is the client's: reading rows, ordering them, messages, HTTP through httpx's transport, SQLite and
results. Each size runs in a process of its own.

    .venv/bin/python benchmarks/batch_client.py [--rows 1000 10000 100000] [--words 200]

Memory is the process's peak, beyond what the packages take. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from presage.batch import Plan, call, given, template
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.rows import RowFile
from presage.batch.run import BatchRun
from presage.batch.schedule import soft_order

ANSWER = "word " * 16


class Engine(httpx.AsyncBaseTransport):
    """Answers at once."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "root": "m"}]})
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404)
        prompt = await request.aread()
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 16}
        choice = {"message": {"content": ANSWER}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})


def plan() -> Plan:
    text = given("text")
    first = call("reader", text, max_tokens=32)
    talk = [("user", text), ("assistant", first)]
    return Plan("read", answer=call("reader", template("Shorter: {a}", a=first), history=talk, max_tokens=32))


def measured(rows: int, words: int) -> dict[str, Any]:
    """Figures of one run, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w") as lines:
            for number in range(rows):
                text = f"{number} " + " ".join(f"w{draw.randrange(20_000)}" for _ in range(words))
                lines.write(json.dumps({"text": text}) + "\n")
        begun = time.perf_counter()
        of, read = plan(), RowFile(file)
        order = soft_order(of, tree_of(of, field_tokens(of, read)), read)
        ordered = time.perf_counter()
        run = BatchRun(of, read, ["http://engine"], Path(folder) / "run", order=order, transport=Engine())
        report = asyncio.run(run.run())
        results = sum(1 for _ in run.results())
        run.close()
        read.close()
        size = file.stat().st_size
    assert results == rows
    assert report.asked == 2 * rows
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": rows,
        "file_mb": round(size / 1e6, 1),
        "order_s": round(ordered - begun, 2),
        "answers_per_s": round(2 * rows / (ended - ordered)),
        "memory_mb": round((peak - before) * 1024 / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--words", type=int, default=200, help="of a row's text")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measured(args.rows[0], args.words)))
        return
    print(f"{'rows':>8}{'file MB':>9}{'ordered in s':>14}{'answers a s':>13}{'memory MB':>11}")
    found = []
    for rows in args.rows:
        command = [sys.executable, __file__, "--here", "--rows", str(rows), "--words", str(args.words)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        of = found[-1]
        print(
            f"{of['rows']:>8}{of['file_mb']:>9}{of['order_s']:>14}{of['answers_per_s']:>13}{of['memory_mb']:>11}",
            flush=True,
        )
    print(json.dumps({"benchmark": "batch_client", "words": args.words, "runs": found}))


if __name__ == "__main__":
    main()
