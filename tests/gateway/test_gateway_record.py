"""What a gateway knows of a running workflow stands in its record; who keeps a table by workflow is named here."""

import gc
from pathlib import Path
from typing import Any

import httpx
from served import gateway, served

from presage.gateway.simulated_engine import SimulatedEngine
from presage.serving_hooks.workflows import Workflow

WORKFLOWS = 24

TABLES = {
    "WorkflowTable._running": "the table",
    "DemandForecast._workflows": "demand of models: the policy knows no gateway",
    "Fleet.programs": "placement: the policies know no gateway",
    "TenantIndex.conversations": "identity, by conversation: what prompts continue, also after a workflow's end",
}


def test_few_tables_are_by_workflow(tmp_path: Path) -> None:
    """Found in the gateway itself: every dict and set with most of the running workflows as keys."""
    engine, recorder = SimulatedEngine(), {"folder": str(tmp_path / "recording")}
    upstream = {"models": ["simulated"]}
    with (
        served(engine.app()) as one,
        served(engine.app()) as two,
        gateway(one, two, forecasts={"recorder": recorder}, upstream=upstream) as (url, _front),
    ):
        for number in range(WORKFLOWS):
            body = {
                "model": "simulated",
                "messages": [{"role": "user", "content": f"question {number}"}],
                "vllm_xargs": {"workflow_type": "t", "workflow_id": f"w{number}", "agent": "a"},
            }
            assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        keys = {f"t\0w{number}" for number in range(WORKFLOWS)}

        def is_workflow(key: Any) -> bool:
            if isinstance(key, Workflow):
                return key.key in keys
            parts = key if isinstance(key, tuple) else (key,)
            return any(isinstance(part, str) and part.rpartition("\0")[0] in keys | {"t"} for part in parts)

        tables = set()
        for part in [one for one in gc.get_objects() if str(type(one).__module__).startswith("presage.")]:
            for name, value in getattr(part, "__dict__", {}).items():
                if isinstance(value, dict | set) and sum(map(is_workflow, value)) >= WORKFLOWS // 2:
                    tables.add(f"{type(part).__name__}.{name}")
    assert tables == TABLES.keys()
