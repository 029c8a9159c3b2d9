"""How long does adding a day to a store take, as the store grows?

The day has 100,000 steps, of which a tenth are workflows that the store has from the day before, as in exports whose
windows overlap. It is added to an empty store, and to stores of a million and of ten million steps, in a process of its
own each time; the ratio is to the empty store.

    python benchmarks/nightly_ingestion.py [--sizes 0,1000000,10000000] [--day 100000] [--repeats 3] [--folder DISK]

Needs 1 GB of disk and about five minutes. Prints a table and one JSON line. Peak memory is the largest resident set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from ingest_speed import STEPS_A_WORKFLOW, measure, steps

from presage.datasets.ingest import ingest
from presage.datasets.schema import conform

MONTH = 1_000_000


def written(table: pa.Table, path: Path) -> Path:
    """A trace as a file."""
    pq.write_table(table, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0,1000000,10000000", help="steps in the store, rising")
    parser.add_argument("--day", type=int, default=100_000, help="steps of a day")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; else the folder for temporary files")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    again = args.day // 10 // STEPS_A_WORKFLOW * STEPS_A_WORKFLOW
    rows: list[dict[str, float]] = []
    print("| steps in the store | seconds | CPU seconds | ratio | peak MiB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, held = Path(name), 0
        before = conform(steps(0, 0, 0, 0), "steps")
        for size in map(int, args.sizes.split(",")):
            while held < size:
                count = min(MONTH, size - held)
                before = conform(steps(held, count, 0, 0), "steps")
                ingest([written(before, folder / "month.parquet")], folder / "store")
                held += count
            before = before.slice(max(0, len(before) - again))
            new = conform(steps(held, args.day - len(before), 0, 0), "steps")
            day = written(pa.concat_tables([before, new]), folder / "day.parquet")
            found = []
            for _ in range(args.repeats):
                shutil.rmtree(folder / "copy", ignore_errors=True)
                if held:
                    shutil.copytree(folder / "store", folder / "copy")
                here, there = context.Pipe()
                process = context.Process(target=measure, args=(day, folder / "copy", there))
                process.start()
                there.close()
                seconds, cpu, added, peak_mib = here.recv()
                process.join()
                assert added == len(new)
                found.append((seconds, cpu, peak_mib))
            seconds, cpu, peak_mib = (statistics.median(column) for column in zip(*found, strict=True))
            ratio = cpu / rows[0]["cpu_seconds"] if rows else 1.0
            rows.append({"steps": held, "seconds": seconds, "cpu_seconds": cpu, "ratio": ratio, "peak_mib": peak_mib})
            print(f"| {held:,} | {seconds:.1f} | {cpu:.1f} | {ratio:.2f} | {peak_mib:,.0f} |", flush=True)
    print(json.dumps({"benchmark": "nightly_ingestion", "day": args.day, "rows": rows}))


if __name__ == "__main__":
    main()
