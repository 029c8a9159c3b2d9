"""What a workflow will come back for stays in the cache, where vLLM alone would have given it up."""

from pathlib import Path

import pytest
from vllm_samples import Engine, Scheduler, ask, build

from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]
PREFIX, OTHER, LATER = 640, 640, 768


def prompt(start: int, tokens: int) -> list[int]:
    return [(start + i) % 500 for i in range(tokens)]


def found_on_return(folder: Path, kind: type[Scheduler]) -> tuple[int, int, Engine]:
    """A workflow of 640 tokens pauses; another, younger, ends; a stranger needs space. How much of each is left?"""
    engine = Engine(build(folder, kind, blocks=90))

    def run(name: str, tokens: list[int], **sent: object) -> int:
        engine.scheduler.add_request(ask(name, tokens, 2, **sent))
        engine.run()
        return engine.hits[name]

    run("a1", prompt(0, PREFIX), workflow_type="t", workflow_id="a", agent="planner")
    run("b1", prompt(100, OTHER), workflow_type="t", workflow_id="b", agent="planner", workflow_end="true")
    run("c1", prompt(200, LATER), workflow_type="t", workflow_id="c", agent="planner")
    kept = run("a2", prompt(0, PREFIX + 16), workflow_type="t", workflow_id="a", agent="planner")
    return kept, run("b2", prompt(100, OTHER + 16)), engine


def test_a_workflow_keeps_its_prefix_and_one_that_has_ended_gives_up_its_own(tmp_path: Path) -> None:
    assert found_on_return(tmp_path, Scheduler)[0] == 0
    kept, left, engine = found_on_return(tmp_path, SyncWorkflowScheduler)
    assert kept == PREFIX
    assert left == 0
    assert engine.scheduler.presage_status()["on"] == {"priority": True, "eviction": True, "admission": True}
