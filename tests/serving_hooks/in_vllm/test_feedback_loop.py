"""From an engine that records to its next champion and back, with the commands a user types: the benchmark itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; this test starts its server")

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
QUICK = "--set network.epochs=5 --set boosting.rounds=5 --baselines markov-1"


def test_the_feedback_loop_closes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "feedback_loop.py"), "--to", str(tmp_path / "loop")),
            *("--workflows", "40", "--training", QUICK),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["forecasts"] > 0, "the champion has forecast"
    assert told["other_answers"] == 0
    assert told["cached_share"].keys() == {"stock", "ours"}
    assert any(reason["figure"] == "transitions never seen" for reason in told["alarm"]["reasons"])
    assert told["alarm"]["workflows"] < 100
