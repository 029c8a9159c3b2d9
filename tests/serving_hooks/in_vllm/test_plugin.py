"""The end of a workflow reaches every engine over HTTP, and what is no end is refused."""

import asyncio
import subprocess
import sys
from inspect import signature
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from presage.errors import EngineError
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.http import plugin


class Engines:
    """Two engine cores, of which the second has our scheduler and knows one workflow."""

    def __init__(self, workflow_type: str = "review", workflow_id: str = "r1") -> None:
        ours = SimpleNamespace(
            workflow_ended=lambda *names: names == (workflow_type, workflow_id),
            presage_status=lambda tenant: {"on": {}},
        )
        self.cores = [SimpleNamespace(scheduler=scheduler) for scheduler in (SimpleNamespace(), ours)]
        self.engine_core = self
        self.generate = None

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert method == plugin.METHOD
        assert len(args) <= len(signature(plugin.call_scheduler).parameters) - 1, "vLLM refuses more"
        return [plugin.call_scheduler(core, *args) for core in self.cores]


def client(engines: Engines | None) -> TestClient:
    routes, app = plugin.WorkflowRoutes(), FastAPI()
    routes.attach_router(app)
    asyncio.run(routes.init_state(engines, app.state, None))
    return TestClient(app)


def test_an_end_is_told_to_all_engines() -> None:
    http = client(Engines())
    for name, ended in (("r1", True), ("r2", False)):
        for said in ({"params": {"workflow_type": "review"}}, {"json": {"workflow_type": "review"}}):
            answer = http.post(f"/v1/workflows/{name}/end", **said)
            assert (answer.status_code, answer.json()) == (200, {"ended": ended})
    assert http.get("/v1/workflows/status").json() == {"engines": [{}, {"on": {}}]}


def test_a_workflow_without_a_type_is_another_one() -> None:
    assert client(Engines()).post("/v1/workflows/r1/end").json() == {"ended": False}
    assert client(Engines("", "r1")).post("/v1/workflows/r1/end").json() == {"ended": True}


@pytest.mark.parametrize("name", ["a/b", "end", "a b?c", "ü", "status"])
def test_an_id_is_any_name_a_request_may_give(name: str) -> None:
    url = f"/v1/workflows/{quote(name, safe='')}/end"
    assert client(Engines("", name)).post(url).json() == {"ended": True}


@pytest.mark.parametrize(
    ("url", "body", "code"),
    [
        (f"/v1/workflows/{'x' * 257}/end", None, 422),
        (f"/v1/workflows/r1/end?workflow_type={'x' * 257}", None, 422),
        ("/v1/workflows/r1/end", {"agent": "a"}, 422),
        ("/v1/workflows/r1/end", {"workflow_type": 3}, 422),
        ("/v1/workflows/r1/end?workflow_type=a", {"workflow_type": "b"}, 400),
        ("/v1/workflows//end", None, 422),
    ],
)
def test_what_names_no_workflow_is_refused(url: str, body: Any, code: int) -> None:
    assert client(Engines()).post(url, json=body).status_code == code


def test_a_server_without_an_engine_says_so() -> None:
    assert client(None).post("/v1/workflows/r1/end").status_code == 503


def test_registering_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, method: object) -> None:
        raise ImportError("no such engine")

    monkeypatch.setattr(engine, "add_engine_method", missing)
    plugin.register()


@pytest.mark.vllm
def test_the_engine_has_the_method_after_registering() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.engine.core import EngineCore

    plugin.register()
    plugin.register()
    assert EngineCore.presage_call is plugin.call_scheduler


@pytest.mark.parametrize(
    "module", ["presage.serving_hooks.vllm.http.plugin", "presage.serving_hooks.vllm.hidden_states.connector"]
)
def test_what_vllm_loads_before_its_engine_starts_does_without_numba(module: str) -> None:
    """vLLM's CPU worker looks through the objects of all modules that are loaded, and breaks at one of llvmlite's."""
    if module.endswith("connector"):
        pytest.importorskip("vllm", reason="vLLM is not installed; the connector is one of its classes")
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Closed:
    """A client of an engine of which nothing can be replaced."""

    __slots__ = ()
    engine_core = None

    def generate(self) -> None: ...


def test_a_client_that_cannot_be_hooked_is_served_unless_its_tenants_would_mix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for keys in ((), ("one",), ("one", "two")):
        routes, app = plugin.WorkflowRoutes(), FastAPI()
        app.state.args = SimpleNamespace(api_key=list(keys), additional_config={"presage": {"texts": False}})
        routes.attach_router(app)
        if len(keys) > 1:
            with pytest.raises(EngineError, match="does not let requests be marked"):
                asyncio.run(routes.init_state(Closed(), app.state, None))
        else:
            asyncio.run(routes.init_state(Closed(), app.state, None))
            assert caplog.text.count("requests are served without what the server tells of them: AttributeError") > 0
