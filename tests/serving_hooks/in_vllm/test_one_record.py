"""What is known of a running workflow stands in its record; who keeps a table by workflow beside it is named here."""

import gc
from pathlib import Path
from typing import Any

import pytest
from vllm_samples import Engine, ask, build

from presage.serving_hooks.listeners import EVENTS, Listener
from presage.serving_hooks.vllm.hooks import Hooks
from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
from presage.serving_hooks.workflows import Workflow

pytestmark = [pytest.mark.vllm, pytest.mark.one_version]

WORKFLOWS = 40

TABLES = {
    "WorkflowTable._running": "the table",
    "WorkflowColumns._rows": "rows of arrays over all workflows, for admission",
    "AccessIndex.running": "which blocks workflows use; policies know no engine",
}

PREFETCH = {
    "ExpectedPrompts._due": "workflows with a new forecast",
    "LastConversations._agents": "prompts within a bound of memory",
    "LastConversations._kept": "the same, least recently used first",
}
"""Those of a guest, which is off by default."""


def attributes(of: Any) -> dict[str, Any]:
    slots = [name for kind in type(of).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__"]
    return {**getattr(of, "__dict__", {}), **{name: getattr(of, name, None) for name in slots}}


@pytest.mark.parametrize("prefetch", [False, True])
def test_few_tables_are_by_workflow(tmp_path: Path, prefetch: bool) -> None:
    """Found in the engine itself: every dict and set with most of the running workflows as keys."""
    presage = {"recorder": {"folder": str(tmp_path / "recording")}, "prefetch": prefetch}
    engine = Engine(build(tmp_path, SyncWorkflowScheduler, blocks=900, presage=presage))
    for round_ in range(2):
        for number in range(WORKFLOWS):
            names = {"workflow_type": "t", "workflow_id": f"w{number}", "agent": "a"}
            engine.scheduler.add_request(ask(f"r{round_}-{number}", list(range(40 + 20 * round_)), 4, **names))
            if round_ == 0 or number % 3 == 0:
                engine.step()
        if not round_:
            engine.run()
    pairs = {("t", f"w{number}") for number in range(WORKFLOWS)}
    keys = {"\0".join(pair) for pair in pairs}

    def is_workflow(key: object) -> bool:
        if isinstance(key, tuple):
            return key[:2] in pairs or (bool(key) and key[0] in keys)
        return isinstance(key, Workflow) or key in keys

    found = set()
    ours = [one for one in gc.get_objects() if str(type(one).__module__).startswith("presage.serving_hooks")]
    for one in ours:
        for name, value in attributes(one).items():
            if isinstance(value, dict | set) and sum(map(is_workflow, value)) >= WORKFLOWS // 2:
                found.add(f"{type(one).__name__}.{name}")
    found -= {"Group.many", "Decision.held"}  # those that share a group of blocks, and what was decided last
    assert found == TABLES.keys() | (PREFETCH.keys() if prefetch else set())


def test_the_parts_of_the_hooks_hear_the_same_events(tmp_path: Path) -> None:
    scheduler = build(tmp_path, SyncWorkflowScheduler, blocks=90, presage={"prefetch": True})
    parts = [one for one in vars(scheduler).values() if isinstance(one, Listener)]
    assert {type(one).__name__ for one in parts} >= {"StepForecasts", "ScoredBlocks", "Prefetcher", "QueuePolicies"}
    assert isinstance(scheduler.queue_policies.admission, Listener)
    assert len(EVENTS) == 8
    own = {name for name in vars(Hooks) if name in EVENTS}
    assert not own, "the scheduler tells, and hears nothing itself"
