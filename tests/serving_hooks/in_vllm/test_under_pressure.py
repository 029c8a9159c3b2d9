"""On the real engine with a third of the cache it wants: the same answers, and more of the prompts found again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; this test starts its engine")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]


def test_workflows_find_more_of_their_prompts_than_with_vllm_alone() -> None:
    load = ["--workflows", "24", "--at-once", "16", "--seeds", "0", "--styles", "own"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "real_engine.py"), *load, "--forecasts", "none", "oracle"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"benchmark"')))
    ran = told["own"]["seeds"]["0"]
    assert ran["oracle"]["cached_tokens"] > ran["stock"]["cached_tokens"] > 0
    for kind in ("none", "oracle"):
        assert ran[kind]["other_answers"] == 0
        assert ran[kind]["prompt_tokens"] == ran["stock"]["prompt_tokens"]
        assert ran[kind]["status"]["on"] == {"priority": True, "eviction": True, "admission": True}
        assert ran[kind]["status"]["workflows"] == 0
