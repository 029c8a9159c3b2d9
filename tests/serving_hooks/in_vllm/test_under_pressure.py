"""On the real engine with a third of the cache it wants: the same answers, and nothing lost.

How much more of the prompts is found again: benchmarks/real_engine.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; this test starts its engine")

pytestmark = [pytest.mark.vllm, pytest.mark.one_version, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]


def test_under_pressure_all_is_answered_as_by_vllm_alone_and_the_cache_is_used() -> None:
    load = ["--pairs", "1", "--workflows", "24", "--hidden-size", "64", "--workloads", "own"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "real_engine.py"), *load, "--variants", "+ counts", "truth"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"benchmark"')))
    (ran,) = told["own"]["runs"]
    assert ran["vLLM alone"]["cached_tokens"] > 0
    for variant in ("+ counts", "truth"):
        assert ran[variant]["other_answers"] == 0
        assert ran[variant]["cached_tokens"] > 0
        assert sum(ran[variant]["status"]["evicted"].values()) > 0, "the cache was too small for all"
        assert ran[variant]["prompt_tokens"] == ran["vLLM alone"]["prompt_tokens"]
        assert ran[variant]["status"]["on"] == {"priority": True, "eviction": True, "admission": True}
        assert ran[variant]["status"]["workflows"] == 0
