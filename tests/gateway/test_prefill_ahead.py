"""Prefill ahead: what is sent while a tool runs, when, to whom, and that no request is touched by it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from served import gateway, served
from starlette.requests import Request
from starlette.responses import JSONResponse

from presage.datasets.schema import conform
from presage.errors import ConfigurationError
from presage.features.sequences import sequences_of
from presage.gateway.config import gateway_config
from presage.gateway.front import Front
from presage.gateway.prefill.planning import PrefillPlanner
from presage.gateway.simulated_engine import SimulatedEngine
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import ProfileConfig
from presage.predictors.profile.prompts import recorded_prompts

CHAT = "/v1/chat/completions"
SYSTEMS = {"coder": "You write code for the desk.", "tester": "You test code for the desk, line by line."}
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "nrslm"]


def text(seed: object, count: int = 300) -> str:
    rng = random.Random(repr(seed))
    return " ".join(rng.choice(WORDS) for _ in range(count))


def body(agent: str, workflow: str, content: str, **more: Any) -> dict[str, Any]:
    """A request of the desk: the coder gets a task, the tester the coder's whole answer behind a line of its own."""
    said = f"Test this:\n{content}" if agent == "tester" else content
    named = {"workflow_type": "desk", "workflow_id": workflow, "agent": agent, **more.pop("xargs", {})}
    messages = [{"role": "system", "content": SYSTEMS[agent]}, {"role": "user", "content": said}]
    return {"model": "simulated", "messages": messages, "vllm_xargs": named, **more}


def rows(count: int) -> Iterator[dict[str, Any]]:
    """coder tester, as a gateway records them."""
    for at in range(count):
        answer = text(("answer", at), 40)
        for step, (agent, said) in enumerate((("coder", text(("task", at), 20)), ("tester", f"Test this:\n{answer}"))):
            named = {"workflow_type": "desk", "workflow_id": f"w{at:03d}", "step": step, "agent": agent}
            texts = {"system_prompt": SYSTEMS[agent], "input_text": said}
            yield {**named, **texts, "output_text": answer if step == 0 else text(("verdict", at), 8)}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = conform(pa.Table.from_pylist(list(rows(60))), "desk")
    sequences = sequences_of(table)
    folder = tmp_path_factory.mktemp("desk") / "profile"
    ProfilePredictor(ProfileConfig()).fit(sequences, prompts=recorded_prompts(table, sequences)).save(folder)
    return folder


class Desk:
    """Workflows of the desk before a gateway."""

    def __init__(self, url: str, front: Front, engines: list[SimulatedEngine]) -> None:
        self.url, self.front, self.engines, self.number = url, front, engines, 0

    def ask(self, given: dict[str, Any], **headers: str) -> str:
        answer = httpx.post(self.url + CHAT, json=given, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def settle(self) -> None:
        """Until nothing is in flight, no prefill either; generous, since machines are busy."""
        assert self.front.ahead is not None
        for _ in range(6000):
            if not self.front.in_flight and not self.front.ahead.debug_state()["tasks"]:
                return
            time.sleep(0.01)
        raise AssertionError("something is in flight for a minute")

    def run(self, *, pause_s: float | None = None, tester: str | None = None, **more: Any) -> str:
        """A whole workflow; the tool between its steps takes `pause_s`, or until the prefill is done.

        `tester` is what the tester is given.
        """
        self.number += 1
        workflow = f"{more.pop('prefix', 'live')}-{self.number}"
        headers = more.pop("headers", {})
        said = self.ask(body("coder", workflow, text(workflow, 30), **more), **headers)
        if pause_s is None:
            self.settle()
        else:
            time.sleep(pause_s)
        last = {"xargs": {"workflow_end": "true"}}
        self.ask(body("tester", workflow, said if tester is None else tester, **more, **last), **headers)
        if pause_s is None:
            self.settle()
        return workflow

    def real(self) -> list[dict[str, Any]]:
        """The bodies of all other requests that engines got."""
        return [one for engine in self.engines for one, _ in engine.seen if not one.get("continue_final_message")]

    def prefills(self) -> list[dict[str, Any]]:
        """The bodies of all prefills that engines got."""
        seen = [one for engine in self.engines for one, _ in engine.seen]
        return [one for one in seen if one.get("continue_final_message")]

    def counts(self, name: str) -> dict[str, float]:
        """A counter by its last label."""
        found: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(f"presage_gateway_{name}_total{{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.rsplit('="', 1)[1].removesuffix('"}')] = float(value)
        return found

    def outcomes(self) -> dict[str, float]:
        return self.counts("prefills")


def answers(given: Any) -> str:
    """Long answers that depend on the prompt alone, and a slow one."""
    if given["messages"][-1]["content"] == "slow":
        return text("slow", 3000)
    return "one" if given.get("max_tokens") == 1 else text(given["messages"], 90)


@contextmanager
def desk(profile: Path, *, engines: int = 1, mode: str = "on", engine: Any = None, **given: Any) -> Iterator[Desk]:
    made = [engine or SimulatedEngine(token_s=0.00005, reply=answers) for _ in range(engines)]
    ahead = {"least_new_tokens": 50, **given.pop("ahead", {})}
    modes = {"policies": {"prefill-ahead": mode}}
    with served(made[0].app()) as one, served(made[-1].app()) as two:
        urls = [one, two][:engines]
        forecasts = {"profile": str(profile), **given.pop("forecasts", {})}
        upstream = {"models": ["simulated"], **given.pop("upstream", {})}
        with gateway(*urls, forecasts=forecasts, prefill_ahead=ahead, modes=modes, upstream=upstream, **given) as (
            url,
            front,
        ):
            yield Desk(url, front, made)


def test_the_known_beginning_of_the_next_prompt_is_sent_once_after_all_others(profile: Path) -> None:
    with desk(profile) as of:
        for _ in range(4):
            of.run()
        sent = [one for one, _ in of.engines[0].seen]
        prefills = of.prefills()
        assert len(prefills) == 2  # two workflows show how the tester is prompted
        for prefill in prefills:
            after = sent[sent.index(prefill) + 1]
            assert after["messages"][0] == prefill["messages"][0]
            assert after["messages"][1]["content"] == prefill["messages"][1]["content"]
            assert (prefill["max_tokens"], prefill["add_generation_prompt"], prefill.get("stream")) == (1, False, None)
            assert prefill["priority"] == 2**31 - 1
            assert "vllm_xargs" not in prefill
        assert of.outcomes() == {"used": 2.0}
        assert of.counts("prefilled_tokens")["yes"] > 150
        assert not any(of.front.ahead.debug_state()[name] for name in ("followed workflows", "tasks"))  # type: ignore[union-attr]


def test_requests_and_answers_are_those_of_a_gateway_without_it(profile: Path) -> None:
    seen = []
    for mode in ("on", "off"):
        with desk(profile, mode=mode) as of:
            for _ in range(4):
                of.run()
            seen.append((of.real(), len(of.prefills())))
    assert seen[0][0] == seen[1][0]
    assert [count for _, count in seen] == [2, 0]


def test_in_shadow_nothing_is_sent_and_it_counts_what_would_have_been_right(profile: Path) -> None:
    with desk(profile, mode="shadow") as of:
        for _ in range(4):
            of.run()
        of.run(tester="something else")
        assert of.prefills() == []
        assert of.outcomes() == {"used": 2.0, "another prompt": 1.0}
        assert 'presage_gateway_prefills_total{mode="shadow",outcome="used"} 2.0' in httpx.get(of.url + "/metrics").text


def test_it_goes_to_the_server_of_the_workflow(profile: Path) -> None:
    with desk(profile, engines=2) as of:
        of.ask(body("coder", "held", "A task."))  # it runs on the first server, so the next ones begin on the other
        for _ in range(4):
            of.run()
        assert of.outcomes() == {"used": 2.0}
        for engine in of.engines:
            sent = [one for one, _ in engine.seen]
            for prefill in [one for one in sent if one.get("continue_final_message")]:
                assert sent[sent.index(prefill) + 1]["messages"][1] == prefill["messages"][1]


def test_a_router_that_turns_round_robin_gets_none(profile: Path) -> None:
    with desk(profile, engines=2, routing="round-robin") as of:
        for _ in range(4):
            of.run()
        assert of.prefills() == []
        assert of.counts("prefill_plans")["server unknown"] >= 1


def test_a_busy_server_gets_none(profile: Path) -> None:
    with desk(profile, ahead={"most_running": 1}) as of:
        for _ in range(2):
            of.run()
        with httpx.stream("POST", of.url + CHAT, json=body("coder", "long", "slow", stream=True), timeout=60) as answer:
            parts = answer.iter_raw()
            next(parts)
            of.run(pause_s=0.2)
            assert of.outcomes() == {"not sent": 1.0}
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        of.run()
        assert of.outcomes() == {"not sent": 1.0, "used": 1.0}


class Watching(SimulatedEngine):
    """An engine that reads prefills until they are aborted."""

    left = 0

    async def _taken(self, request: Request) -> Any:
        found = await super()._taken(request)
        if isinstance(found, dict) and found.get("continue_final_message"):
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.left += 1
        return found


def test_a_prefill_that_the_request_overtakes_is_aborted(profile: Path) -> None:
    engine = Watching(token_s=0.00005, reply=answers)
    with desk(profile, engine=engine) as of:
        for _ in range(3):
            of.run(pause_s=1.0)
        of.settle()
        assert of.outcomes() == {"late": 1.0}
        for _ in range(1000):
            if engine.left:
                break
            time.sleep(0.01)
        assert engine.left == 1


def test_wrong_forecasts_are_wasted_and_enough_of_them_pause_the_type(profile: Path) -> None:
    with desk(profile) as of:
        for _ in range(2):
            of.run()
        for _ in range(8):
            of.run(tester="something else")
        assert of.outcomes() == {"another prompt": 8.0}
        assert of.counts("prefilled_tokens") == {"no": pytest.approx(of.counts("prefilled_tokens")["no"])}
        for _ in range(3):
            of.run()
        assert len(of.prefills()) == 8
        assert of.counts("prefill_plans")["paused"] == 3
        time.sleep(1.2)  # of the gateway's tick
        assert "presage_gateway_prefill_paused 1.0" in httpx.get(of.url + "/metrics").text


def test_after_the_pause_it_is_tried_again(profile: Path) -> None:
    with desk(profile, ahead={"pause_s": 1.5}) as of:
        for _ in range(2):
            of.run()
        for _ in range(8):
            of.run(tester="something else")
        time.sleep(1.6)
        of.run()
        assert len(of.prefills()) == 9


def test_another_agent_and_a_workflow_that_ends_are_wasted(profile: Path) -> None:
    with desk(profile) as of:
        for _ in range(2):
            of.run()
        for workflow in ("again", "gone"):
            of.ask(body("coder", workflow, text(workflow, 30)))
            of.settle()
        of.ask(body("coder", "again", text("more", 30)))
        ended = httpx.post(f"{of.url}/v1/workflows/gone/end?workflow_type=desk")
        assert ended.json() == {"ended": True}
        assert of.outcomes() == {"another agent": 1.0, "never came": 1.0}


def test_explain_tells_what_became_of_it(profile: Path) -> None:
    with desk(profile) as of:
        for _ in range(3):
            workflow = of.run()
        (found,) = httpx.get(f"{of.url}/v1/workflows/{workflow}/explain?workflow_type=desk").json()["engines"]
        assert [one.get("prefilled_ahead") for one in found["decisions"]] == [None, "used"]


def test_what_one_tenant_shows_is_not_used_for_another(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK_KEYS", "first,second")
    with desk(profile, keys_variable="DESK_KEYS") as of:
        for _ in range(3):
            of.run(headers={"authorization": "Bearer first"})
        assert len(of.prefills()) == 1
        for _ in range(2):
            of.run(headers={"authorization": "Bearer second"})
        assert len(of.prefills()) == 1  # it learns anew
        of.run(headers={"authorization": "Bearer second"})
        assert len(of.prefills()) == 2
        assert all("authorization" not in headers for one, headers in of.engines[0].seen)


def test_salts_of_the_cache_are_apart_and_sent(profile: Path) -> None:
    with desk(profile) as of:
        for salt in ("a", "a", "a", "b"):
            of.run(cache_salt=salt)
        assert [one["cache_salt"] for one in of.prefills()] == ["a"]


def test_tools_are_sent_as_the_agent_has_them_and_must_be_alike(profile: Path) -> None:
    tool = {"type": "function", "function": {"name": "run", "parameters": {}}}
    with desk(profile) as of:
        for tools in ([tool], [tool], [tool], [tool, tool], [tool, tool]):
            of.run(tools=tools, chat_template_kwargs={"enable_thinking": False})
        assert [one["tools"] for one in of.prefills()] == [[tool], [tool]]
        assert {str(one["chat_template_kwargs"]) for one in of.prefills()} == {"{'enable_thinking': False}"}
        assert of.outcomes() == {"used": 1.0, "another prompt": 1.0}


class Refusing(SimulatedEngine):
    """An engine that knows no `continue_final_message`."""

    async def _taken(self, request: Request) -> Any:
        found = await super()._taken(request)
        refuses = isinstance(found, dict) and found.get("continue_final_message")
        return JSONResponse({"error": {"message": "unknown"}}, 400) if refuses else found


def test_a_server_that_refuses_it_costs_nothing_else(profile: Path) -> None:
    with desk(profile, engine=Refusing(token_s=0.00005, reply=answers)) as of:
        for _ in range(4):
            of.run()
        assert of.outcomes() == {"refused": 2.0}


def test_an_error_switches_it_off_and_requests_go_on(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("secret text")

    with desk(profile) as of:
        monkeypatch.setattr(PrefillPlanner, "plan", fails)
        for _ in range(4):
            of.run()
        page = httpx.get(of.url + "/metrics").text
        assert of.prefills() == []
        assert 'presage_errors_total{reason="RuntimeError",what="prefill ahead"} 1.0' in page


def test_without_its_table_there_is_no_such_policy(profile: Path) -> None:
    with pytest.raises(ConfigurationError, match="prefill_ahead"):
        gateway_config(
            {"upstreams": [{"url": "http://127.0.0.1:1"}], "modes": {"policies": {"prefill-ahead": "on"}}}, "test"
        )
    config = gateway_config({"upstreams": [{"url": "http://127.0.0.1:1"}]}, "test")
    assert "prefill-ahead" not in config.policies


def test_a_workflow_whose_texts_take_too_much_memory_is_not_followed(profile: Path) -> None:
    with desk(profile, ahead={"memory_mb": 1}) as of:
        of.ask(body("coder", "small", "A task."))
        of.ask(body("coder", "large", "A task. " * 100_000))
        of.settle()
        assert of.counts("prefill_plans")["workflow not followed"] == 1
        assert of.front.ahead is not None
        assert of.front.ahead.debug_state()["followed workflows"] == 1
