"""What means something else in one of the supported minor versions of vLLM."""

from pathlib import Path
from typing import Any

import prefetch_samples
import pytest
from prefetch_samples import prefetching, prompt, served, status
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_samples import BLOCK, HASH, Request, everything_is_free

pytestmark = pytest.mark.vllm

since_33 = pytest.mark.skipif(not hasattr(VllmConfig, "num_hash_lookahead_tokens"), reason="vLLM has it since 0.33")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "lookahead", [pytest.param(0), pytest.param(1, marks=since_33), pytest.param(5, marks=since_33)]
)
def test_a_prefetch_has_the_hashes_that_vllm_would_compute_for_it_and_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookahead: int, ahead: bool
) -> None:
    hasher = get_request_block_hasher(BLOCK, HASH, *([lookahead] if lookahead else []))
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", lookahead, raising=False)  # as for EAGLE
    monkeypatch.setattr(prefetch_samples, "HASHER", hasher)
    engine = prefetching(tmp_path, ahead=ahead)
    internal: list[Any] = []
    add = Scheduler.add_request

    def noted(self: Any, request: Any) -> None:
        internal.extend([request] if request.request_id.startswith("presage-prefetch") else [])
        add(self, request)

    monkeypatch.setattr(Scheduler, "add_request", noted)
    for name in ("a1", "a2"):
        served(engine, name, prompt(0, 640))
    served(engine, "z1", prompt(100, 1200), workflow_end=True)
    engine.settle()
    assert internal
    for request in internal:
        tokens = list(request.prompt_token_ids)
        computed = Request("again", tokens, request.sampling_params, None, block_hasher=hasher).block_hashes
        assert list(request.block_hashes) == list(computed)
        assert len(computed) * BLOCK + lookahead == len(tokens)
    assert served(engine, "a3", prompt(0, 660)) == (640 - lookahead) // BLOCK * BLOCK
    assert status(engine)["wasted_tokens"] == 0
    assert everything_is_free(engine.scheduler)


@since_33
def test_where_prefills_keep_an_interval_nothing_is_prefetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Scheduler.__init__

    def with_interval(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.prefill_schedule_interval = 4
        made(self, vllm_config, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "__init__", with_interval)
    engine = prefetching(tmp_path)
    assert "prefills keep an interval" in caplog.text
    assert not any(status(engine).values())
    assert served(engine, "a1", prompt(0, 640)) == 0
