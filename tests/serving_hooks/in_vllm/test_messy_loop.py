"""What was promised from messy traces comes in the engine, and a renamed agent is named as the cause of the alarm."""

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
QUICK = "--set network.epochs=5 --set boosting.rounds=20 --baselines markov-1"


def test_a_promise_from_messy_traces_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "messy_loop.py"), "--to", str(tmp_path / "loop")),
            *("--workflows", "60", "--training", QUICK),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kept"] is True
    assert told["promised"].keys() == {"accuracy at prefill", "accuracy at completion"}
    for figure in told["promised"].values():
        assert abs(figure["difference"]) <= figure["within"]
    assert "'engineer'" in told["causes"][0]
