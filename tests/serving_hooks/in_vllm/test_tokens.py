"""On the real engine: the same tokens with the hooks off, on, on with forecasts by chance, and prefetching by them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from presage.testing.models import save_qwen

pytest.importorskip("vllm", reason="vLLM is not installed; these tests start its engine")

pytestmark = pytest.mark.vllm
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, made on the spot."""
    return save_qwen(tmp_path_factory.mktemp("model"))


def served(model: Path, settings: Any, program: str = "serve_tokens.py") -> Any:
    done = subprocess.run(
        [sys.executable, program, str(model), json.dumps(settings)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_hooks_change_no_token(model: Path) -> None:
    chance = {"forecasts": "serve_tokens:by_chance", "starved_after": 4, "quantum": 2}
    several = [{}, chance, {**chance, "prefetch": True}]
    stock, *ours = served(model, [None, *several])
    own = stock["tokens"]
    assert len({json.dumps(tokens) for tokens in own}) > 120  # answers differ, so a mix-up would show
    assert stock["preempted"] > 0
    for settings, hooked in zip(several, ours, strict=True):
        assert hooked["tokens"] == own
        assert hooked["preempted"] > 0
        assert hooked["status"]["on"] == {"priority": True, "eviction": True, "admission": True}
        assert sum(hooked["status"]["evicted"].values()) > 0, "the cache was too small for all"
        assert hooked["status"]["prompts"]["local_tokens"] > 0, "and was used"
        fetched = hooked["status"]["prefetch"]
        assert fetched["on"] == ("prefetch" in settings)
        assert not fetched["on"] or (fetched["tokens"] > 0 and fetched["used_tokens"] > 0)
        assert ("forecast: champion" in hooked["status"]["counts"]) == bool(settings)


@pytest.mark.slow
def test_beside_a_request_that_decodes_prefetch_loads_from_a_tier_and_changes_no_token(model: Path) -> None:
    forecasts = {"forecasts": "serve_tier:returns"}
    own = served(model, forecasts, "serve_tier.py")
    fetching = served(model, {**forecasts, "prefetch": True}, "serve_tier.py")
    assert fetching["tokens"] == own["tokens"]
    said = {name: told["prefetch"] for name, told in fetching["said"].items()}
    assert said["z1"]["tokens"] == 0
    assert said["r1"]["tokens"] == 320  # loaded while it decoded: 29 of 39 blocks were taken, 10 of 20 were left
    assert (said["a3"]["used_tokens"], said["a3"]["wasted_tokens"]) == (320, 0)
    assert fetching["left"] == []
