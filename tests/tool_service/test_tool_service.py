"""Tools are prepared ahead for workflows that will need them, handed out fairly, and gone when nobody needs them."""

from __future__ import annotations

import base64
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tool_services import AT_ONCE, SECRET, event, slow, tools_service, until

from presage.errors import ConfigurationError, OutputError
from presage.tool_service.app import build, serve
from presage.tool_service.config import ToolServiceConfig
from presage.tool_service.resources import ResourceTable


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", SECRET)
    monkeypatch.delenv("PRESAGE_TOOLS_TOKEN", raising=False)


def shell(script: str, **given: Any) -> dict[str, Any]:
    return {"subprocess": {"command": ["sh", "-c", script], **given}}


def test_a_workflow_keeps_its_tool_until_it_ends_and_then_nothing_is_left(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        first = tools.acquire("w")
        assert Path(first["folder"]).is_dir()
        assert tools.acquire("w")["id"] == first["id"]
        assert tools.acquire("other")["id"] != first["id"]
        tools.hear(event("ended", "w"))
        until(lambda: len(tools.processes()) == 1)
        tools.hear(event("ended", "other"))
        until(tools.nothing_left)
        assert tools.counts()["removed"] == 2


def test_a_released_tool_is_removed_and_the_next_is_another(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        first = tools.acquire("w")
        tools.release(first["id"])
        tools.release(first["id"])
        tools.release("unknown")
        second = tools.acquire("w")
        assert second["id"] != first["id"]
        until(lambda: tools.states() == ["used"])
        until(lambda: tools.folders() == [second["id"]])


def test_a_tool_is_prepared_before_it_is_asked_for_and_not_for_agents_that_never_need_it(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.2)}) as tools:
        tools.learn()
        tools.hear(event("step.started", "w", "planner"))
        tools.hear(event("expected", "w", "planner", next_agents={"planner": 0.9}, return_s={"0.5": 0.0}))
        assert tools.states() == []
        tools.hear(event("expected", "w", "planner", next_agents={"coder": 0.9}, return_s={"0.5": 0.1}))
        until(lambda: tools.states() == ["ready"])
        tools.hear(event("step.started", "w", "coder"))
        before = tools.counts()
        assert tools.acquire("w")["waited_s"] < 0.2
        assert tools.counts()["asked for"] == before["asked for"]
        assert tools.counts()["prepared in time"] >= 1
        tools.hear(event("ended", "w"))
        until(tools.nothing_left)
        hidden = httpx.get(tools.url + "/status").json()["tools"]["sandbox"]["hidden"]
        assert 0 < hidden < 1


def test_a_tool_that_is_needed_late_is_prepared_late(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.1)}) as tools:
        tools.learn()
        tools.hear(event("expected", "w", "planner", next_agents={"coder": 0.9}, return_s={"0.5": 1000.0}))
        tools.hear(event("expected", "v", "planner", next_agents={"coder": 0.9}, return_s={"0.5": 0.6}))
        assert tools.states() == []
        until(lambda: tools.states() == ["ready"])
        (of,) = httpx.get(tools.url + "/resources").json()["resources"]
        assert of["workflow_id"] == "v"


def test_a_tool_that_is_called_long_after_the_answer_is_prepared_whatever_comes_next(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.1)}) as tools:
        for number in range(4):
            tools.hear(event("step.started", f"learn{number}", "coder"))
            time.sleep(0.8)
            tools.acquire(f"learn{number}")
            tools.hear(event("ended", f"learn{number}"))
        until(tools.nothing_left)
        begun = time.monotonic()
        tools.hear(event("step.started", "w", "coder"))
        tools.hear(event("expected", "w", "coder", next_agents={"planner": 0.9}, return_s={"0.5": 1.0}))
        assert tools.states() == []
        until(lambda: tools.states() == ["ready"])
        assert time.monotonic() - begun > 0.4
        tools.hear(event("expected", "w", "coder", next_agents={"planner": 0.9}, return_s={"0.5": 1.0}))
        assert tools.acquire("w")["waited_s"] < 0.1
        assert "unneeded" not in tools.counts()


def test_what_one_workflow_did_not_need_another_gets_and_what_nobody_needs_is_removed(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": {**slow(0.1), "wait_cost": 60.0}}) as tools:
        tools.learn()
        tools.hear(event("expected", "w", "planner", next_agents={"coder": 0.9}, return_s={"0.5": 0.0}))
        until(lambda: tools.states() == ["ready"])
        (prepared,) = tools.folders()
        tools.hear(event("ended", "w"))
        assert tools.acquire("v")["id"] == prepared
        tools.hear(event("ended", "v"))
        until(tools.nothing_left)
    with tools_service(tmp_path, {"sandbox": {**slow(0.1), "wait_cost": 2.0}}) as tools:
        tools.hear(event("expected", "w2", "planner", next_agents={"coder": 0.95}, return_s={"0.5": 0.0}))
        until(lambda: tools.states() == ["ready"])
        tools.hear(event("ended", "w2"))
        until(tools.nothing_left)
        assert tools.counts()["unneeded"] == 1


def test_two_agents_of_a_workflow_that_ask_at_once_get_the_same_tool(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.2)}) as tools, ThreadPoolExecutor(8) as agents:
        found = list(agents.map(lambda _: tools.acquire("w")["id"], range(8)))
        assert len(set(found)) == 1
        assert len(tools.processes()) == 1


def test_tools_for_several_workflows_are_set_up_at_the_same_time(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(2)}) as tools, ThreadPoolExecutor(4) as agents:
        asked = [agents.submit(tools.acquire, f"w{number}") for number in range(4)]
        until(lambda: tools.states() == ["preparing"] * 4)
        assert len({one.result()["id"] for one in asked}) == 4


def test_beyond_the_most_workflows_wait_in_order_and_get_one_when_it_is_free(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": {**AT_ONCE, "most": 2}}) as tools, ThreadPoolExecutor(4) as agents:
        first, second = tools.acquire("w0"), tools.acquire("w1")
        refused = tools.ask("w2", timeout_s=0.1)
        assert refused.status_code == 503
        assert "2 of 2" in refused.json()["error"]
        third = agents.submit(tools.acquire, "w3")
        until(lambda: httpx.get(tools.url + "/status").json()["workflows"] == 4)
        fourth = agents.submit(tools.acquire, "w4")
        until(lambda: httpx.get(tools.url + "/status").json()["workflows"] == 5)
        tools.release(first["id"])
        assert third.result()["id"] not in (first["id"], second["id"])
        assert not fourth.done()
        tools.hear(event("ended", "w1"))
        fourth.result()
        assert len(tools.processes()) == 2


def test_a_tenant_at_its_limit_waits_and_holds_up_nobody(tmp_path: Path) -> None:
    settings = {**AT_ONCE, "most": 3, "most_per_tenant": 1}
    with tools_service(tmp_path, {"sandbox": settings}) as tools, ThreadPoolExecutor(8) as agents:
        used = tools.acquire("a0", tenant="a")
        waiting = [agents.submit(tools.acquire, f"a{number}", tenant="a") for number in range(1, 6)]
        until(lambda: httpx.get(tools.url + "/status").json()["workflows"] == 6)
        tools.acquire("b", tenant="b")
        tools.acquire("c", tenant="c")
        assert "raise most" in tools.ask("d", tenant="d", timeout_s=0.1).json()["error"]
        assert "1 of most_per_tenant" in tools.ask("a9", tenant="a", timeout_s=0.1).json()["error"]
        assert not any(one.done() for one in waiting)
        tools.release(used["id"])
        until(lambda: any(one.done() for one in waiting))
        assert len(tools.processes()) <= 3
        while waiting:
            until(lambda: any(one.done() for one in waiting))
            (done,) = [one for one in waiting if one.done()]
            waiting.remove(done)
            tools.release(done.result()["id"])


def test_what_is_prepared_for_a_tenant_at_its_limit_gives_way_to_others(tmp_path: Path) -> None:
    settings = {**slow(0.05), "most": 2, "most_per_tenant": 1}
    with tools_service(tmp_path, {"sandbox": settings}) as tools, ThreadPoolExecutor(2) as agents:
        tools.learn()
        coming = {"next_agents": {"coder": 0.95}, "return_s": {"0.5": 0.0}, "tenant": "a"}
        tools.hear(event("expected", "a0", "planner", **coming))
        until(lambda: tools.states() == ["ready"])
        tools.hear(event("expected", "a1", "planner", **coming))
        assert tools.states() == ["ready"]
        second = agents.submit(tools.acquire, "a1", tenant="a")  # gets one of its own, what was prepared is not its
        used = second.result()
        first = agents.submit(tools.acquire, "a0", tenant="a")
        until(lambda: tools.states() == ["ready", "used"])
        assert tools.acquire("b", tenant="b")["waited_s"] < 10
        assert not first.done()
        tools.release(used["id"])
        first.result()


def test_what_was_prepared_for_a_client_that_has_left_does_not_stay(tmp_path: Path) -> None:
    settings = {**slow(1.0), "wait_cost": 1.0}
    with tools_service(tmp_path, {"sandbox": settings}) as tools:
        body = {"tool": "sandbox", "workflow_type": "app", "workflow_id": "w"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(tools.url + "/acquire", json=body, timeout=0.1)
        assert tools.states() == ["preparing"]
        until(lambda: tools.states() == ["ready"])
        until(tools.nothing_left)  # though the workflow has not ended
        assert tools.counts()["unneeded"] == 1
        assert tools.ask("w", timeout_s=0.1).status_code == 503
        until(tools.nothing_left)
        tools.acquire("w")


def test_a_workflow_that_ends_while_it_waits_gets_nothing(tmp_path: Path) -> None:
    settings = {**slow(0.4), "wait_cost": 1.0}
    with tools_service(tmp_path, {"sandbox": settings}) as tools, ThreadPoolExecutor(1) as agents:
        asked = agents.submit(tools.ask, "w")
        until(lambda: tools.states() == ["preparing"])
        tools.hear(event("ended", "w"))
        assert asked.result().status_code == 410
        until(tools.nothing_left)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (shell("exit 3", ready=["false"]), "ended with 3 before it could be used"),
        (shell("sleep 1000 & exec sleep 1000", ready=["false"]), "could not be used within 0.3 s"),
        (shell("sleep 1000", ready=["sh", "-c", "sleep 1000 & sleep 1000"]), "could not be used within 0.3 s"),
        (shell("sleep 1000", ready=["missing-program"]), "cannot be run"),
        ({"subprocess": {"command": ["missing-program"]}}, "cannot be started"),
        (shell("exit 4 # {port}"), "ended with 4"),
    ],
)
def test_a_tool_that_cannot_be_prepared_is_reported_and_leaves_nothing(
    tmp_path: Path, tool: dict[str, Any], message: str
) -> None:
    with tools_service(tmp_path, {"sandbox": {**tool, "ready_within_s": 0.3}}) as tools:
        answer = tools.ask("w")
        assert answer.status_code == 502
        assert message in answer.json()["error"]
        until(tools.nothing_left)
        assert tools.counts()["asked for"] == 1


def test_a_tool_that_ends_at_once_is_started_once_for_each_call(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": {"subprocess": {"command": ["true"]}}}) as tools:
        tools.ask("w")
        assert tools.counts()["asked for"] == 1
        tools.ask("w")
        assert tools.counts()["asked for"] == 2
        tools.hear(event("ended", "w"))
        until(tools.nothing_left)


def test_a_tool_that_dies_in_use_or_before_is_replaced_when_it_is_asked_for(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.05)}) as tools:
        tools.learn()
        first = tools.acquire("w")
        os.kill(first["pid"], 9)
        second = tools.acquire("w")
        assert second["id"] != first["id"]
        tools.hear(event("expected", "v", "planner", next_agents={"coder": 0.95}, return_s={"0.5": 0.0}))
        until(lambda: tools.states() == ["ready", "used"])
        (prepared,) = set(tools.processes()) - {second["pid"]}
        os.kill(prepared, 9)
        assert tools.acquire("v")["pid"] != prepared
        assert tools.counts()["lost"] == 2
        tools.hear(event("ended", "w"), event("ended", "v"))
        until(tools.nothing_left)


def test_children_that_left_the_session_and_locked_files_are_removed_and_nothing_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o400)
    script = (
        "setsid sleep 1000 & (setsid sh -c 'sleep 1000 & exec sleep 1000' &) ; mkdir -p a/b; echo x > a/b/c;"
        f"ln -s {outside} a/link; ln -s {outside}/kept a/file; chmod 000 a/b/c; chmod 555 a/b; chmod 000 a;"
        "mkdir c; chmod 000 c; touch ready; exec sleep 1000"
    )
    with tools_service(tmp_path, {"sandbox": shell(script, ready=["test", "-e", "ready"])}) as tools:
        tools.acquire("w")
        until(lambda: len(tools.processes()) == 4)
        tools.hear(event("ended", "w"))
        until(tools.nothing_left)
    assert (outside / "kept").read_text() == "kept"
    assert (outside / "kept").stat().st_mode & 0o777 == 0o400


def test_the_tool_gets_a_port_of_its_own_and_none_of_the_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRESAGE_TOOLS_TOKEN", "t0ken")
    script = "env > env; touch ready; exec sleep 1000 # {port}"
    with tools_service(tmp_path, {"sandbox": shell(script, ready=["test", "-e", "ready"])}) as tools:
        found = []
        for number in range(3):
            body = {"tool": "sandbox", "workflow_type": "app", "workflow_id": f"w{number}"}
            answer = httpx.post(tools.url + "/acquire", json=body, headers={"authorization": "Bearer t0ken"})
            found.append(answer.json())
        assert len({of["port"] for of in found}) == 3
        environment = Path(found[0]["folder"], "env").read_text()
        assert f"PRESAGE_TOOL_PORT={found[0]['port']}\n" in environment
        assert SECRET not in environment
        assert "t0ken" not in environment


def test_events_that_come_twice_late_or_after_the_end_change_nothing(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": slow(0.05)}) as tools:
        tools.learn()
        now = time.time()
        started, ended = event("step.started", "w", "coder", now - 3), event("ended", "w", at=now - 2)
        coming = {"next_agents": {"coder": 0.95}, "return_s": {"0.5": 0.0}}
        tools.hear(ended, ended)
        tools.hear(started, event("expected", "w", "planner", now - 2.5, **coming), ended)
        assert tools.states() == []
        assert httpx.get(tools.url + "/status").json()["workflows"] == 0
        tools.hear(event("step.started", "v", "planner", now), event("expected", "v", "planner", now - 1, **coming))
        assert tools.states() == []  # what was expected before this step is over


def test_a_second_run_with_the_same_id_is_another_workflow(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        now = time.time()
        tools.hear(event("step.started", "w", "coder", now - 9))
        first = tools.acquire("w")
        tools.hear(event("ended", "w", at=now - 8), event("step.started", "w", "coder", now - 7))
        second = tools.acquire("w")
        assert second["id"] != first["id"]
        tools.hear(event("ended", "w", at=now - 8))  # again, and late
        tools.hear(event("ended", "w", at=now - 7.5))
        assert tools.acquire("w")["id"] == second["id"]
        tools.hear(event("ended", "w", at=now - 6))
        until(tools.nothing_left)


def test_a_workflow_of_which_nothing_is_heard_expires(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}, expire_s=0.4) as tools:
        tools.acquire("w")
        until(tools.nothing_left)
        assert httpx.get(tools.url + "/status").json()["workflows"] == 0


def test_only_who_has_the_token_and_the_secret_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_TOOLS_TOKEN", "t0ken")
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": b"Bearer \xff"}):
            assert httpx.get(tools.url + "/status", headers=headers).status_code == 401
            assert httpx.post(tools.url + "/acquire", json={}, headers=headers).status_code == 401
        good = {"authorization": "Bearer t0ken"}
        assert httpx.get(tools.url + "/status", headers=good).status_code == 200
        assert httpx.get(tools.url + "/status", headers={**good, "origin": "http://evil.example"}).status_code == 403
        assert httpx.post(tools.url + "/events", content=b"[]", headers=good).status_code == 400
        tools.hear(event("ended", "w"))
    monkeypatch.delenv("PRESAGE_WEBHOOK_SECRET")
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        assert httpx.post(tools.url + "/events", content=b"[]").status_code == 403


def test_a_tenant_acts_for_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "of a")
    monkeypatch.setenv("B_TOKEN", "of b")
    with tools_service(tmp_path, {"sandbox": AT_ONCE}, tenants={"a": "A_TOKEN", "b": "B_TOKEN"}) as tools:
        a, b = ({"authorization": f"Bearer of {name}"} for name in "ab")
        body = {"tool": "sandbox", "workflow_type": "app", "workflow_id": "w"}
        assert httpx.post(tools.url + "/acquire", json=body).status_code == 401
        assert httpx.post(tools.url + "/acquire", json={**body, "tenant": "b"}, headers=a).status_code == 403
        used = httpx.post(tools.url + "/acquire", json=body, headers=a).json()
        assert httpx.post(tools.url + "/release", json={"id": used["id"]}, headers=b).status_code == 204

        def shown(headers: dict[str, str]) -> list[str]:
            listed = httpx.get(tools.url + "/resources", headers=headers).json()["resources"]
            return [one["tenant"] for one in listed if one["state"] == "used"]

        assert (shown(a), shown(b)) == (["a"], [])
        httpx.post(tools.url + "/release", json={"id": used["id"]}, headers=a)
        assert shown(a) == []
    monkeypatch.delenv("B_TOKEN")
    with pytest.raises(ConfigurationError, match="'b' has no token: set B_TOKEN"):
        build(config(tmp_path / "other", tenants={"a": "A_TOKEN", "b": "B_TOKEN"}))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xfe", 400),
        (b'"\xff"', 400),
        (b"[]", 400),
        (b'{"tool": "sandbox"}', 400),
        (b'{"tool": "sandbox", "workflow_type": "a", "workflow_id": ""}', 400),
        (b'{"tool": "sandbox", "workflow_type": "a", "workflow_id": "w", "timeout_s": -1}', 400),
        (b'{"tool": "sandbox", "workflow_type": "a", "workflow_id": "w", "timeout_s": 1e999}', 400),
        (b'{"tool": "sandbox", "workflow_type": "a", "workflow_id": "w", "more": 1}', 400),
        (b'{"tool": "saw", "workflow_type": "a", "workflow_id": "w"}', 404),
        (b" " * 100_000, 413),
    ],
)
def test_a_bad_request_is_refused_and_starts_nothing(tmp_path: Path, body: bytes, status: int) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        assert httpx.post(tools.url + "/acquire", content=body).status_code == status
        if status != 404:
            assert httpx.post(tools.url + "/release", content=body).status_code == status
        assert tools.nothing_left()


def config(folder: Path, **given: Any) -> ToolServiceConfig:
    return ToolServiceConfig.model_validate({"folder": str(folder), "tools": {"sandbox": AT_ONCE}, **given})


def test_other_folders_beside_the_database_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tools/mine").mkdir(parents=True)
    (tmp_path / "tools/mine/file").write_text("mine")
    (tmp_path / "tools/0123456789abcdef").mkdir()  # as a tool's that a killed service has left
    with tools_service(tmp_path, {"sandbox": AT_ONCE}) as tools:
        until(lambda: tools.folders() == ["mine"])
    assert (tmp_path / "tools/mine/file").read_text() == "mine"


def test_two_services_do_not_share_a_folder(tmp_path: Path) -> None:
    with tools_service(tmp_path, {"sandbox": AT_ONCE}), pytest.raises(ConfigurationError, match="another tool service"):
        build(config(tmp_path / "tools"))


def test_a_service_that_cannot_work_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="give another folder"):
        build(config(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="PRESAGE_TOOLS_TOKEN"):
        serve(config(tmp_path / "tools", listen="0.0.0.0:0"))
    with tools_service(tmp_path / "a", {"sandbox": AT_ONCE}) as tools:
        taken = tools.url.removeprefix("http://")
        with pytest.raises(ConfigurationError, match="cannot be listened on"):
            serve(config(tmp_path / "tools", listen=taken))
    monkeypatch.setenv("PRESAGE_WEBHOOK_SECRET", "whsec_" + base64.b64encode(b"short").decode())
    with pytest.raises(ConfigurationError, match="secret"):
        build(config(tmp_path / "tools"))


def test_a_tool_that_left_the_file_or_has_another_driver_is_removed_as_it_was_started(tmp_path: Path) -> None:
    both: dict[str, Any] = {"sandbox": AT_ONCE, "old": AT_ONCE}
    docker = {"docker": {"image": "x", "program": "true"}}

    with tools_service(tmp_path, both, keep=True) as tools:
        tools.acquire("w", "old")
        tools.acquire("w", "sandbox")
    table = ResourceTable(tmp_path / "tools/tools.sqlite")
    kept = {name: json.loads(text) for name, text in json.loads(table.fact("settings") or b"").items()}
    former = {name: json.dumps({**of, "a former setting": 1}) for name, of in kept.items()}
    table.keep_fact("settings", json.dumps(former).encode())
    table.close()
    with tools_service(tmp_path, {"sandbox": docker}) as tools:
        until(lambda: len(tools.processes()) == 1)  # the one in use whose driver is still known
        tools.hear(event("ended", "w"))
        until(tools.nothing_left)
