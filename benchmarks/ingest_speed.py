"""How fast do traces enter a store, and with how much memory?

The benchmark creates steps with ids, agents, models, tokens and times in one file per format (`parquet` as Presage
writes traces, `plain.parquet` and `csv` as pandas does) and ingests each into a new store in a process of its own:
checked, deduplicated, committed. `--texts` adds a prompt and an answer to every step, `--state-size` two hidden
states; then the data is far larger than the allowed memory.

    python benchmarks/ingest_speed.py [--steps 1000000] [--texts 0] [--state-size 0] [--formats parquet,…]
                                      [--repeats 3] [--folder TEMPORARY]

Prints a table and one JSON line. Peak memory is the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import multiprocessing.connection
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.datasets.schema import conform

CHUNK = 20_000
STEPS_A_WORKFLOW = 10


def steps(first: int, count: int, texts: int, state_size: int) -> pa.Table:
    """`count` steps from number `first` on: workflows of ten steps, four types in turn."""
    draw = np.random.default_rng(first)
    numbers = np.arange(first, first + count)
    workflow, step = numbers // STEPS_A_WORKFLOW, numbers % STEPS_A_WORKFLOW
    started = 1.76e9 + workflow * 0.5 + step * 2.0
    columns = {
        "workflow_type": [f"application-{one % 4}" for one in workflow],
        "workflow_id": [f"run-{one * 2654435761 % 2**32:08x}-{one:09d}" for one in workflow],
        "step": step,
        "agent": [f"agent-{one}" for one in draw.integers(0, 12, count)],
        "task_id": [f"task-{one // 3}" for one in workflow],
        "model": ["a-model-of-some-name"] * count,
        "start_time": started,
        "end_time": started + 1.5,
        "input_tokens": draw.integers(1, 8000, count),
        "output_tokens": draw.integers(1, 800, count),
        "cached_input_tokens": draw.integers(0, 4000, count),
    }
    if texts:
        letters = draw.integers(97, 123, texts * 2, dtype=np.uint8).tobytes().decode()
        starts = draw.integers(0, texts, (2, count))
        columns |= {
            name: [letters[start : start + texts] for start in row]
            for name, row in zip(("input_text", "output_text"), starts, strict=True)
        }
    if state_size:
        for name in ("prefill_state", "completion_state"):
            values = draw.standard_normal(count * state_size, np.float32).astype(np.float16)
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values), state_size)
    return pa.table(columns)


def write(kind: str, folder: Path, count: int, texts: int, state_size: int) -> Path:
    """Writes the steps as one file."""
    path = folder / f"steps.{kind}"
    tables = (steps(first, min(CHUNK, count - first), texts, state_size) for first in range(0, count, CHUNK))
    if kind.endswith("parquet"):
        writer = None
        for table in tables:
            rows = table if kind == "plain.parquet" else conform(table, "steps")
            writer = writer or pq.ParquetWriter(path, rows.schema)
            writer.write_table(rows)
        assert writer is not None
        writer.close()
        return path
    with gzip.open(path, "wt", compresslevel=1) if kind.endswith("gz") else path.open("w") as sink:
        for number, table in enumerate(tables):
            if kind.startswith("csv"):
                table.to_pandas().to_csv(sink, index=False, header=number == 0)
                continue
            for row in table.to_pylist():
                sink.write(json.dumps(row) + "\n")
    return path


def measure(path: Path, store: Path, answer: multiprocessing.connection.Connection) -> None:
    """Runs in a process of its own; returns seconds, steps and peak memory in MiB."""
    from presage.datasets.ingest import ingest

    begun, begun_cpu = time.perf_counter(), time.process_time()
    done = ingest([path], store)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    # Not getrusage: what that calls the peak of a process includes that of the process which started it.
    status = Path("/proc/self/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    answer.send((seconds, cpu, done.steps, peak_kib / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--texts", type=int, default=0, help="characters of a prompt and of an answer")
    parser.add_argument("--state-size", type=int, default=0)
    parser.add_argument(
        "--formats", default="parquet,jsonl", help="of parquet, plain.parquet, jsonl, jsonl.gz, csv, csv.gz"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; else the folder for temporary files")
    chosen = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        for kind in chosen.formats.split(","):
            path = write(kind, folder, chosen.steps, chosen.texts, chosen.state_size)
            seconds, cpu, peaks = [], [], []
            for _ in range(chosen.repeats):
                here, there = context.Pipe()
                process = context.Process(target=measure, args=(path, folder / "store", there))
                process.start()
                taken, used, count, peak = here.recv()
                process.join()
                assert count == chosen.steps
                seconds.append(taken)
                cpu.append(used)
                peaks.append(peak)
                shutil.rmtree(folder / "store")
            found[kind] = {
                "file_mib": path.stat().st_size / 2**20,
                "seconds": statistics.median(seconds),
                "cpu_seconds": statistics.median(cpu),
                "steps_per_s": chosen.steps / statistics.median(seconds),
                "peak_mib": max(peaks),
            }
            path.unlink()
    print(f"{chosen.steps} steps, {chosen.texts} characters twice a step, states of {chosen.state_size} numbers\n")
    print("| from | file MiB | seconds | of all cores | steps/s | peak MiB |\n|---|---|---|---|---|---|")
    for kind, row in found.items():
        print(
            f"| {kind} | {row['file_mib']:,.0f} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} "
            f"| {row['steps_per_s']:,.0f} | {row['peak_mib']:,.0f} |"
        )
    shape = {"steps": chosen.steps, "texts": chosen.texts, "state_size": chosen.state_size}
    print(json.dumps({"benchmark": "ingest_speed", **shape, "formats": found}))


if __name__ == "__main__":
    main()
