"""How many steps per second does an adapter read, and is its memory bounded?

The benchmark writes OTLP JSON lines like a collector's file exporter (batches of spans of many traces, children before
parents) for workflows with a fan-out, a join and tools, 1.7 spans per step, and reads them in a fresh process, whose
peak memory is measured. On a shared machine, quote the steps per second of CPU time.

    python benchmarks/adapter_speed.py [--steps 100000] [--text 0] [--sessions] [--one-trace]

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from presage.datasets.adapters.spans.reader import read_spans

BATCH_SPANS = 512
START_NS = 1_767_225_600_000_000_000


def attribute(key: str, value: str | int) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}


class Application:
    """Generates the spans of workflows, one after the other."""

    def __init__(self, text: int, sessions: bool, one_trace: bool) -> None:
        self.draw = random.Random(0)
        self.words = "lorem ipsum dolor sit amet " * (text // 27 + 1)
        self.text, self.sessions, self.one_trace = text, sessions, one_trace
        self.clock = START_NS
        self.made = 0

    def workflow(self) -> list[dict[str, Any]]:
        """About ten steps: a planner, three workers at once of which some call a tool, a writer and its reviewer."""
        trace = f"{1 if self.one_trace else self.made + 1:032x}"
        self.made += 1
        spans: list[dict[str, Any]] = []
        root = self.span(spans, trace, None, "invoke_workflow", "support", self.clock)
        now = self.agent(spans, trace, root, "planner", self.clock + 1000, 1, False)
        ends = [self.agent(spans, trace, root, f"worker-{i}", now, 1, i != 1) for i in range(3)]
        now = self.agent(spans, trace, root, "writer", max(ends) + 1000, 2, False)
        now = self.agent(spans, trace, root, "reviewer", now + 1000, 1, True)
        spans[0]["endTimeUnixNano"] = str(now + 1000)
        if self.sessions:
            spans[0]["attributes"].append(attribute("gen_ai.conversation.id", f"conversation-{self.made // 3}"))
        self.clock = now + 1_000_000 if self.one_trace else self.clock + 100_000
        return spans[::-1]

    def agent(self, spans: list[Any], trace: str, parent: str, name: str, now: int, calls: int, tool: bool) -> int:
        """Adds an agent with its requests and perhaps a tool call; returns when it ends, ns."""
        span = self.span(spans, trace, parent, "invoke_agent", name, now)
        made = spans[-1]
        made["attributes"].append(attribute("gen_ai.agent.name", name))
        for call in range(calls):
            self.span(spans, trace, span, "chat", "model-1", now)
            end = now + self.draw.randrange(10**8, 10**10)
            spans[-1]["endTimeUnixNano"] = str(end)
            spans[-1]["attributes"] += [
                attribute("gen_ai.provider.name", "vllm"),
                attribute("gen_ai.request.model", "model-1"),
                attribute("gen_ai.request.temperature", 1),
                attribute("gen_ai.response.id", f"chatcmpl-{end:x}"),
                attribute("gen_ai.usage.input_tokens", 400 + call),
                attribute("gen_ai.usage.output_tokens", 80),
                attribute("gen_ai.usage.cache_read.input_tokens", 256),
                attribute("server.address", "localhost"),
            ]
            if self.text:
                said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": self.words[: self.text]}]}])
                spans[-1]["attributes"].append(attribute("gen_ai.input.messages", said))
            now = end + 1000
        if tool:
            self.span(spans, trace, span, "execute_tool", "search", now)
            spans[-1]["attributes"].append(attribute("gen_ai.tool.name", "search"))
            now += 10**8
            spans[-1]["endTimeUnixNano"] = str(now)
        made["endTimeUnixNano"] = str(now)
        return now

    def span(self, spans: list[Any], trace: str, parent: str | None, operation: str, name: str, start: int) -> str:
        """Adds a span; returns its id."""
        span_id = f"{self.draw.getrandbits(63) + 1:016x}"
        spans.append(
            {
                "traceId": trace,
                "spanId": span_id,
                "parentSpanId": parent or "",
                "flags": 256,
                "name": f"{operation} {name}",
                "kind": 1,
                "startTimeUnixNano": str(start),
                "endTimeUnixNano": str(start + 1000),
                "attributes": [attribute("gen_ai.operation.name", operation)],
                "status": {},
            }
        )
        return span_id


def write(path: Path, steps: int, text: int, sessions: bool, one_trace: bool) -> tuple[int, int]:
    """Writes at least `steps` steps; returns the numbers of steps and spans written."""
    application = Application(text, sessions, one_trace)
    resource_of = {"attributes": [attribute("service.name", "bench"), attribute("telemetry.sdk.language", "python")]}
    written = spans_written = 0
    with path.open("w", encoding="utf-8") as file:
        for batch in batches(application, steps):
            scope = {"scope": {"name": "bench"}, "spans": batch}
            envelope = {"resourceSpans": [{"resource": resource_of, "scopeSpans": [scope]}]}
            file.write(json.dumps(envelope, separators=(",", ":")) + "\n")
            spans_written += len(batch)
            written += sum(span["name"].startswith(("chat", "execute_tool")) for span in batch)
    return written, spans_written


def batches(application: Application, steps: int) -> Iterator[list[dict[str, Any]]]:
    waiting: list[dict[str, Any]] = []
    made = 0
    while made < steps:
        spans = application.workflow()
        made += sum(span["name"].startswith(("chat", "execute_tool")) for span in spans)
        waiting += spans
        while len(waiting) >= BATCH_SPANS:
            yield waiting[:BATCH_SPANS]
            del waiting[:BATCH_SPANS]
    yield waiting


def read(path: Path) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    steps = sum(source.table.num_rows for source in read_spans(path))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps": steps, "seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--text", type=int, default=0, help="characters of prompt on each request")
    parser.add_argument("--sessions", action="store_true", help="three traces a workflow, so that steps wait for them")
    parser.add_argument("--one-trace", action="store_true", help="all steps in a single trace")
    parser.add_argument("--read", type=Path, help="read this file and print the figures: what the fresh process does")
    chosen = parser.parse_args()
    if chosen.read is not None:
        print(json.dumps(read(chosen.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.json"
        steps, spans = write(path, chosen.steps, chosen.text, chosen.sessions, chosen.one_trace)
        size = path.stat().st_size
        command = [sys.executable, __file__, "--read", str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["steps"] == steps, f"{steps} steps written, {found['steps']} read"
    speed = steps / found["seconds"]
    print(f"{steps:,} steps, {spans:,} spans, {size / 2**20:,.0f} MiB of OTLP JSON\n")
    print("| steps/s | steps/s of CPU time | spans/s | MiB/s | peak MiB |\n|---|---|---|---|---|")
    print(
        f"| {speed:,.0f} | {steps / found['cpu_seconds']:,.0f} | {spans / found['seconds']:,.0f} "
        f"| {size / 2**20 / found['seconds']:.0f} | {found['peak_mib']:,.0f} |"
    )
    print(json.dumps({"benchmark": "adapter_speed", "steps_per_s": speed, "spans": spans, "bytes": size} | found))


if __name__ == "__main__":
    main()
