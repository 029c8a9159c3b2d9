"""The end of a workflow reaches every engine over HTTP, and what is no end is refused."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from presage.serving_hooks.vllm import compat, plugin


class Engines:
    """Two engine cores, of which the second has our scheduler and knows one workflow."""

    def __init__(self) -> None:
        ours = SimpleNamespace(
            workflow_ended=lambda *names: names == ("review", "r1"), presage_status=lambda: {"on": {}}
        )
        self.cores = [SimpleNamespace(scheduler=scheduler) for scheduler in (SimpleNamespace(), ours)]
        self.engine_core = self

    async def call_utility_all_async(self, method: str, *args: str) -> list[Any]:
        known = {"presage_workflow_ended": plugin.workflow_ended, "presage_status": plugin.status}
        return [known[method](core, *args) for core in self.cores]


def client(engines: Engines | None) -> TestClient:
    routes, app = plugin.WorkflowRoutes(), FastAPI()
    routes.attach_router(app)
    asyncio.run(routes.init_state(engines, app.state, None))
    return TestClient(app)


def test_an_end_is_told_to_all_engines() -> None:
    http = client(Engines())
    for name, ended in (("r1", True), ("r2", False)):
        answer = http.post("/v1/workflows/end", json={"workflow_type": "review", "workflow_id": name})
        assert (answer.status_code, answer.json()) == (200, {"ended": ended})
    assert http.get("/v1/workflows/status").json() == {"engines": [{}, {"on": {}}]}


@pytest.mark.parametrize(
    "body", [{}, {"workflow_id": ""}, {"workflow_id": "x" * 257}, {"workflow_id": "r", "agent": "a"}]
)
def test_what_names_no_workflow_is_refused(body: dict[str, str]) -> None:
    assert client(Engines()).post("/v1/workflows/end", json=body).status_code == 422


def test_a_server_without_an_engine_says_so() -> None:
    assert client(None).post("/v1/workflows/end", json={"workflow_id": "r1"}).status_code == 503


def test_registering_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(methods: object) -> None:
        raise ImportError("no such engine")

    monkeypatch.setattr(compat, "add_to_engine", missing)
    plugin.register()


@pytest.mark.vllm
def test_the_engine_has_the_methods_after_registering() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.engine.core import EngineCore

    plugin.register()
    plugin.register()
    assert EngineCore.presage_workflow_ended is plugin.workflow_ended
    assert EngineCore.presage_status is plugin.status
