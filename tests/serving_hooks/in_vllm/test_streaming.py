"""A request that streams its input waits in vLLM's other queue, with its blocks, and comes back out of it."""

from pathlib import Path
from typing import Any

import pytest
from vllm_samples import AsyncScheduler, Engine, Scheduler, ask, build, everything_is_free

from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler, WorkflowScheduler

pytestmark = pytest.mark.vllm


def part(tokens: int, resumable: bool) -> Any:
    request = ask("stream", list(range(tokens)), 4, workflow_id="w1", agent="listener")
    request.resumable = resumable
    return request


def talked(engine: Engine) -> list[int]:
    """Three parts of one input, with other requests between them, then the end of the stream."""
    engine.scheduler.add_request(part(40, True))
    for turn in range(3):
        engine.scheduler.add_request(ask(f"other{turn}", list(range(100 * turn, 100 * turn + 50)), 8, workflow_id="w2"))
        for _ in range(30):
            engine.step()
        assert [request.request_id for request in engine.scheduler.kv_holding_waiting] == ["stream"]
        engine.scheduler.add_request(part(20, turn < 2))
    engine.run()
    assert len(engine.scheduler.requests) == 0
    return engine.said["stream"]


@pytest.mark.parametrize(
    ("stock", "ours", "ahead"), [(Scheduler, SyncWorkflowScheduler, False), (AsyncScheduler, WorkflowScheduler, True)]
)
def test_a_stream_is_answered_as_vllm_answers_it(tmp_path: Path, stock: Any, ours: Any, ahead: bool) -> None:
    own, hooked = (Engine(build(tmp_path, kind, blocks=90), ahead) for kind in (stock, ours))
    assert talked(own) == talked(hooked) != []
    assert everything_is_free(hooked.scheduler)
    assert hooked.scheduler.presage_status()["on"] == {"priority": True, "eviction": True, "admission": True}
    assert not hooked.scheduler.debug_state()["requests"]
