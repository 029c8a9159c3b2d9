"""The page at `/`, in a real browser: what it shows and to whom, and that names of clients stay text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser import DESK, PHONE, Browser, browser
from fastapi import FastAPI
from fastapi.testclient import TestClient
from served import Seen, before
from served import served as serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from presage.gateway.front import Front
from presage.serving_hooks.listeners.overview import LEAST_ENDED
from presage.serving_hooks.page import overview_page
from presage.serving_hooks.problems import with_problems
from presage.serving_hooks.status import (
    AdmissionStatus,
    CauseStatus,
    EngineStatus,
    ModesStatus,
    MonitorStatus,
    PromisedFigure,
    PromiseStatus,
    as_json,
)
from presage.serving_hooks.vllm.http import plugin

HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


def reply(_: Seen) -> JSONResponse:
    message = {"role": "assistant", "content": "Done, and written down."}
    return JSONResponse({"id": "c", "model": "m", "choices": [{"index": 0, "message": message}], "usage": {}})


@contextmanager
def gateway(**given: Any) -> Iterator[tuple[str, Front]]:
    with before(reply, **given) as (url, _, front):
        yield url, front


def ask(url: str, workflow_id: str, *agents: str, workflow_type: str = "research", key: str = "") -> None:
    for agent in agents:
        sent = {"workflow-type": workflow_type, "workflow-id": workflow_id, "agent": agent}
        headers = {f"X-Presage-{name}": of for name, of in sent.items()} | ({"x-api-key": key} if key else {})
        body = {"model": "m", "messages": [{"role": "user", "content": f"Go on with {workflow_id}."}]}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False).raise_for_status()


def end(url: str, workflow_id: str, workflow_type: str = "research") -> None:
    path = f"{url}/v1/workflows/{quote(workflow_id, safe='')}/end"
    httpx.post(path, params={"workflow_type": workflow_type}, trust_env=False).raise_for_status()


def learn(url: str, *agents: str, workflow_type: str = "research") -> None:
    """Twenty runs of these agents that have ended, so that there are forecasts."""
    for number in range(20):
        ask(url, f"past-{number}", *agents, workflow_type=workflow_type)
        end(url, f"past-{number}", workflow_type)


def test_it_shows_workflows_their_forecasts_and_who_follows_whom(chromium: Browser) -> None:
    with gateway() as (url, _), chromium.tab() as tab:
        learn(url, "planner", "reader", "writer")
        for number in range(20):
            ask(url, f"run-{number}", "planner")
        tab.open(url)
        assert tab.shows("20\nworkflows running", "run-19", "research", "planner", "page 1 of 3")
        tab.click("older")
        assert tab.shows("page 2 of 3", "run-0", "past-19", "finished")
        tab.click("run-0")
        assert tab.shows("Forecast after planner", "next step", "in 2 steps", "its last request went to")
        ask(url, "run-0", "reader")
        tab.click("newer")
        assert tab.shows("page 1 of 3", "Forecast after reader")  # asked again, and it came to the front
        graph = tab.run("document.querySelector('svg[role=img]').getAttribute('aria-label')")
        assert graph == "planner → reader 21, reader → writer 20"


def test_problems_come_with_what_to_do(chromium: Browser) -> None:
    with gateway(workflow_type="lonely") as (url, _), chromium.tab() as tab:
        for number in range(LEAST_ENDED):
            body = {"model": "m", "messages": [{"role": "user", "content": f"Question {number} of its own."}]}
            httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).raise_for_status()
        for workflow in httpx.get(f"{url}/v1/workflows", trust_env=False).json()["engines"][0]["workflows"]:
            end(url, workflow["workflow_id"], "lonely")
        tab.open(url)
        assert tab.shows("Problems", "one step: lonely", "docs/recognised.md says what joins them")
        assert tab.shows("Requests, by what identified", "new")


def test_a_key_sees_its_own_and_stays_in_its_tab(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", "first-key,second-key")
    with gateway(keys_variable="GATEWAY_KEYS") as (url, _), chromium.tab() as tab, chromium.tab() as other:
        ask(url, "mine", "planner", "writer", key="first-key")
        ask(url, "theirs", "spy", "thief", workflow_type="secret", key="second-key")
        tab.open(url)
        assert tab.shows("The server wants a key.")
        tab.type("#key", "third-key")
        assert tab.shows("does not take this key")
        tab.type("#key", "first-key")
        assert tab.shows("1\nworkflows running", "mine", "planner")
        for name in ("theirs", "spy", "thief", "secret"):
            assert name not in tab.run("document.documentElement.outerHTML")
        assert tab.run(
            "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, location.search])"
        ) == ('[{"presage-key":"first-key"},{},"",""]')
        other.open(url)
        assert other.shows("The server wants a key.")
        tab.click("another key")
        assert tab.shows("The server wants a key.")
        assert "mine" not in tab.text()


def test_the_status_of_a_gateway_names_no_types_of_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEYS", "first-key,second-key")
    with gateway(keys_variable="GATEWAY_KEYS") as (url, front):
        ask(url, "mine", "planner", key="first-key")
        ask(url, "theirs", "spy", workflow_type="secret", key="second-key")
        front.decisions.overview.one_step = lambda: {"key-0\xa0research": 1.0, "key-1\xa0secret": 1.0}
        for key, own in (("first-key", "research"), ("second-key", "secret")):
            answer = httpx.get(f"{url}/v1/workflows/status", headers={"authorization": f"Bearer {key}"})
            (engine,) = answer.json()["engines"]
            assert engine["one_step"] == {own: 1.0}
            assert [what for what, _ in engine["problems"]] == [f"one step: {own}"]


def test_a_name_is_text_whatever_it_is(chromium: Browser) -> None:
    with gateway() as (url, _), chromium.tab() as tab:
        learn(url, HOSTILE, "writer", workflow_type=HOSTILE)
        ask(url, HOSTILE, HOSTILE, workflow_type=HOSTILE)
        tab.open(url)
        assert tab.shows(HOSTILE)
        tab.click(HOSTILE)
        assert tab.shows(f"Forecast after {HOSTILE}")
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert tab.run("document.title") == "Presage"


def test_the_browser_may_run_and_load_nothing_else(chromium: Browser) -> None:
    with gateway() as (url, _), gateway() as (elsewhere, _), chromium.tab() as tab:
        tab.open(url)
        assert tab.shows("workflows running")
        tab.run("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))")
        assert tab.run("document.title") == "Presage"
        for place, reached in ((f"{elsewhere}/health", False), (f"{url}/health", True)):
            assert tab.run(f"fetch({json.dumps(place)}, {{mode: 'no-cors'}}).then(() => true, () => false)") is reached


ENGINE = EngineStatus(
    on={"priority": True, "eviction": True, "admission": True},
    modes=ModesStatus("on", policies={"priority": "on", "eviction": "on", "admission": "shadow"}),
    off={"prefetch": "failed with ValueError; presage mode URL on tries again"},
    workflows=3,
    ended={"finished": 9, "expired": 1},
    evicted={"blank": 91, "forecast": 3},
    admission=AdmissionStatus(held=2, held_requests=3, held_s=71.0, reasons={"its context does not fit": 2}),
    monitor=MonitorStatus(
        promised={
            "review": PromiseStatus(
                figures={"accuracy before the output": PromisedFigure((0.8, 0.75, 0.85), (0.6, 0.5, 0.7), 60)},
                kept=False,
                causes=(CauseStatus("agents that the traces do not have: 'checker'", "train again"),),
            )
        }
    ),
)
LONG = "an-application-whose-name-has-no-space-at-all-and-goes-on-" * 2


@contextmanager
def engine() -> Iterator[str]:
    """A server whose engine has something to show in each part of the page; its routes are the hooks' otherwise."""
    workflow = {"workflow_type": LONG, "workflow_id": LONG, "agent": LONG, "steps": 12345, "requests": 3}
    times = {"state": "running", "arrived_ago_s": 1e6, "active_ago_s": 0.2}
    quantiles = {"source": "champion", "version": 3, "quantiles": {"0.5": 812.0, "0.9": 12345.0}}
    horizon = {"agents": {LONG: 0.7, "critic": 0.2}, "end": 0.1}
    request = {"agent": LONG, "state": "WAITING", "held": True, "place": 3, "waiting": 9, "key": {"level": 1}}
    explained = {
        "reasons": [f"it is held: its context does not fit; a request of agent {LONG!r} waits"],
        "forecasts": [
            {
                "agent": LONG,
                "ago_s": 3.0,
                "evidence": 400,
                "horizons": [horizon] * 3,
                "remaining": quantiles,
                **quantiles,
            }
        ],
        "requests": [{**request, "prompt_tokens": 123456, "output_tokens": 0}],
        "admission": {"held": True, "reason": "its context does not fit", "held_s": 71.0},
        "blocks": {"blocks": 812, "free": 12},
        "returns": None,
    }
    agents = [
        {"agent": f"{LONG}{number}", "workflow_type": LONG, "steps": 10**number, "model": LONG} for number in range(7)
    ]
    calls = [
        {"workflow_type": of, "agent": f"agent {a}", "next": f"agent {(a + by) % most}", "times": 900 // (1 + by + a)}
        for of, most in ((LONG, 7), ("large", 20))
        for a in range(most)
        for by in range(3)
    ]
    answers = {
        "/v1/workflows": {"running": 1, "ended": 99, "workflows": [{**workflow, **times}]},
        "/v1/workflows/agents": {"agents": [*agents, {**agents[0], "workflow_type": "large"}], "calls": calls},
        "/v1/workflows/status": with_problems(as_json(ENGINE)),
        f"/v1/workflows/{LONG}/explain": explained,
    }

    def answer(request: Request) -> JSONResponse:
        return JSONResponse({"engines": [answers[request.url.path]]})

    routes = [Route("/", overview_page), *(Route(path, answer) for path in answers)]
    with serving(Starlette(routes=routes)) as url:
        yield url


def test_it_shows_what_was_promised_what_came_and_what_is_held(chromium: Browser) -> None:
    with engine() as url, chromium.tab() as tab:
        tab.open(url)
        assert tab.shows(
            "Problems", "prefetch is off", "presage mode URL on tries again", "below its promise", "train again",
            "Promised and live", "0.750 – 0.850", "0.500 – 0.700", "60",
            "Held and evicted", "2 workflows with 3 requests", "2 its context does not fit", "91 blank, 3 forecast",
            "admission shadow",
        )  # fmt: skip


WIDER = """[...document.querySelectorAll("body *")].filter(one => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map(one => one.tagName + " " + one.textContent.slice(0, 60))"""
CONTRAST = """(() => {
  const parts = text => text.match(/[0-9.]+/g).map(Number);
  const linear = of => of <= 0.04045 ? of / 12.92 : ((of + 0.055) / 1.055) ** 2.4;
  const light = text => {
    const [r, g, b] = parts(text).map(of => linear(of / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
  };
  const texts = [...document.querySelectorAll("body *")].filter(one => one.tagName !== "SCRIPT"
    && one.checkVisibility() && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return texts.map(one => {
    const style = getComputedStyle(one), colour = one instanceof SVGElement ? style.fill : style.color;
    const [dark, bright] = [light(colour), light(behind(one))].sort((one, other) => one - other);
    return [(bright + 0.05) / (dark + 0.05), one.tagName + " " + one.textContent.slice(0, 40)];
  });
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_can_be_read_on_a_phone_and_in_the_dark(chromium: Browser, size: tuple[int, int], dark: bool) -> None:
    with engine() as url, chromium.tab() as tab:
        tab.open(url, size, dark=dark)
        tab.click(LONG)
        assert tab.shows("next step", "request of", "agent 0 → agent 1")
        assert tab.run("document.documentElement.scrollWidth") == size[0]
        assert tab.run(WIDER) == []
        contrasts = tab.run(CONTRAST)
        assert len(contrasts) > 100
        assert [text for contrast, text in contrasts if contrast < 4.5] == []  # WCAG 2.2, AA
        dark_paper = tab.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark_paper is dark


def test_a_server_that_is_gone_and_comes_back_is_said_so(chromium: Browser) -> None:
    silent = False

    async def status(_: Request) -> JSONResponse:
        return JSONResponse({"error": {}}, 503) if silent else JSONResponse({"engines": [{"workflows": 7, "on": {}}]})

    def other(_: Request) -> JSONResponse:
        return JSONResponse({"engines": [{"running": 0, "ended": 0, "workflows": [], "agents": []}]})

    paths = ("/v1/workflows", "/v1/workflows/agents")
    routes = [Route("/", overview_page), Route("/v1/workflows/status", status), *(Route(path, other) for path in paths)]
    with serving(Starlette(routes=routes)) as url, chromium.tab() as tab:
        tab.open(url)
        assert tab.shows("as of", "7")
        silent = True
        assert tab.shows("no answer (v1/workflows/status answers 503); trying again")
        silent = False
        assert tab.shows("as of")


def test_an_engine_has_the_page_unless_vllm_has_one() -> None:
    app, taken = FastAPI(), FastAPI()
    taken.add_route("/", lambda _: PlainTextResponse("vLLM's"))
    for one in (app, taken):
        plugin.WorkflowRoutes().attach_router(one)
    page = TestClient(app).get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert TestClient(taken).get("/").text == "vLLM's"
