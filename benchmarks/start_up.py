"""How long does `presage forecast` of one step take, from the shell and back?

A small next-agent model is trained and registered in a database; then new processes forecast one step from it: the
first with an empty cache of compiled code, the others with a full one, and `--help` for comparison. Wall clock and
processor seconds; their difference is what else the machine does.

    python benchmarks/start_up.py [--calls 5]

Prints a table of seconds and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEP = {"workflow_type": "retry", "workflow_id": "w", "step": 0, "agent": "planner"}
CALLS = {
    "of a registered version": ("forecast", "models:/next-agent/1", "steps.jsonl"),
    "of an artefact folder": ("forecast", "model", "steps.jsonl"),
    "forecast --help": ("forecast", "--help"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps.jsonl").write_text(json.dumps(STEP))
        _run(folder, "presage", "traces", "generate", "--process", "retry", "--workflows", "200", "--to", "traces")
        _run(folder, "train_predictor", "next-agent", "traces", "--out", "model", "--baselines", "none")
        first = _run(folder, "presage", *CALLS["of a registered version"], cache=folder / "compiled")
        found = {what: [_run(folder, "presage", *one) for _ in range(calls)] for what, one in CALLS.items()}
    rows = {"first one, which compiles": first}
    rows |= {what: (median(w for w, _ in of), median(c for _, c in of)) for what, of in found.items()}
    print(f"{'':28}{'wall s':>8}{'processor s':>13}")
    for what, (wall, processor) in rows.items():
        print(f"{what:28}{wall:8.2f}{processor:13.2f}")
    seconds = {what: {"wall_s": wall, "processor_s": processor} for what, (wall, processor) in rows.items()}
    print(json.dumps({"benchmark": "start_up", "calls": calls, "seconds": seconds}))


def _run(folder: Path, program: str, *arguments: str, cache: Path | None = None) -> tuple[float, float]:
    """Seconds that a command takes, by the wall and of processors."""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    code = f"from presage.cli.{program} import main; main()"
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
