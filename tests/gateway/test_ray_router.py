"""The gateway's router in Ray Serve: its placement alone, and on a cluster of Ray with simulated engines."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from served import WITHOUT_MODELS

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="the extra `distributed` is not installed")
serve = pytest.importorskip("ray.serve")

from presage.errors import ConfigurationError  # noqa: E402
from presage.gateway.client_keys import ClientKeys  # noqa: E402
from presage.gateway.config import gateway_config  # noqa: E402
from presage.gateway.hosts.ray_router import GatewayRouter, ReplicaPlacements, read_request  # noqa: E402
from presage.gateway.simulated_engine import SimulatedEngine  # noqa: E402

REPLICAS = {"a": 8, "b": 8, "c": 8}
QUESTIONS = [f"Question {n}, which has enough bytes to be told apart from all the other ones." for n in range(7)]
ROUTER = "presage.gateway.hosts.ray_router:GatewayRouter"


@dataclass
class RawRequest:
    """Headers as Ray Serve LLM passes them on."""

    headers: dict[str, str] = field(default_factory=dict)


def chat(*texts: str, system: str = "You plan.") -> dict[str, Any]:
    """A conversation: what the user said, and in turn what was answered."""
    said = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
    return {"model": "simulated", "messages": [{"role": "system", "content": system}, *said]}


def named(workflow: str) -> RawRequest:
    return RawRequest({"X-Presage-Workflow-Id": workflow, "X-Presage-Workflow-Type": "report"})


def placements(now: list[float] | None = None, **given: Any) -> ReplicaPlacements:
    settings = {"upstreams": [{"url": "http://ray-serve"}], "forecasts": WITHOUT_MODELS, **given}
    at = now or [0.0]
    return ReplicaPlacements(gateway_config(settings, "test"), lambda: at[0])


def place(of: ReplicaPlacements, *arguments: Any, replicas: dict[str, int] | None = None, ends: bool = True) -> str:
    found = asyncio.run(of.place(arguments, "", REPLICAS if replicas is None else replicas))
    assert found is not None
    decision, replica = found
    if ends:
        of.ended(decision, failed=False)
    return replica


def test_workflows_stay_and_are_spread() -> None:
    of = placements()
    homes = {number: place(of, chat("Hello"), named(f"w{number}")) for number in range(9)}
    assert sorted(homes.values()) == ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    for number, home in homes.items():
        assert place(of, chat("Anything else"), named(f"w{number}")) == home


def test_a_conversation_is_recognised_by_its_prompts_without_any_name() -> None:
    of = placements()
    homes = {question: place(of, chat(question)) for question in QUESTIONS}
    for question in reversed(QUESTIONS):
        assert place(of, chat(question, "An answer that Ray did not show", "Go on")) == homes[question]
    assert len(of.decisions.table) == len(QUESTIONS)


def test_a_workflow_moves_when_its_replica_is_gone() -> None:
    of = placements()
    home = place(of, chat("Hello"), named("w"))
    left = {name: most for name, most in REPLICAS.items() if name != home}
    new = place(of, chat("Hello"), named("w"), replicas=left)
    assert new in left
    assert place(of, chat("Hello"), named("w")) == new  # also once the first one is back


def test_rows_of_replicas_that_are_gone_are_taken_again() -> None:
    of = placements()
    for generation in range(50):
        for number in range(4):
            replicas = {f"{generation}-{name}": 8 for name in "abc"}
            place(of, chat("Hello"), named(f"w{number}"), replicas=replicas)
    assert len(of.placements.fleet.engines) <= 6


def test_load_is_counted_until_a_request_ends() -> None:
    of = placements(routing="least-loaded")
    replicas = [place(of, chat("Hello"), named(f"w{n}"), ends=False) for n in range(3)]
    assert sorted(replicas) == ["a", "b", "c"]
    assert [engine.requests for engine in of.placements.fleet.engines] == [1, 1, 1]
    assert all(engine.predicted_tokens > 0 for engine in of.placements.fleet.engines)
    found = asyncio.run(of.place([chat("Hello"), named("w3")], "", REPLICAS))
    assert found is not None
    before = of.placements.fleet.mean_output
    of.ended(found[0], failed=True)
    assert sum(engine.requests for engine in of.placements.fleet.engines) == 3
    assert of.placements.fleet.mean_output == before


def test_workflows_expire() -> None:
    now = [0.0]
    of = placements(now, forecasts={**WITHOUT_MODELS, "time_to_live_s": 10.0})
    place(of, chat("Hello"), named("w"))
    now[0] = 100.0
    place(of, chat("Hello"), named("v"))
    assert len(of.placements.fleet.programs) == 1


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_placement_that_is_not_on_leaves_the_choice_to_ray(mode: str) -> None:
    assert place(placements(modes={"policies": {"placement": mode}}), chat("Hello"), named("w")) == ""


@pytest.mark.parametrize("routing", ["presage", "thunderagent", "program-scheduling"])
def test_a_policy_that_holds_requests_is_refused(routing: str) -> None:
    with pytest.raises(ConfigurationError, match="session-affinity"):
        placements(routing=routing)


def test_a_workflow_stays_where_ray_has_sent_it() -> None:
    of = placements()
    found = asyncio.run(of.place([chat("Hello"), named("w")], "", REPLICAS))
    assert found is not None
    decision, home = found
    other = next(name for name in REPLICAS if name != home)
    of.taken(decision, other)
    of.ended(decision, failed=False)
    assert place(of, chat("Hello"), named("w")) == other
    of.taken(decision, "unknown")
    assert decision.upstream == "unknown"


@pytest.mark.parametrize("wrong", [{"routing": "nowhere"}, {"routing": "presage"}, {"config": "missing.toml"}])
def test_wrong_settings_leave_rays_choice(wrong: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    router = object.__new__(GatewayRouter)
    router.initialize_state(**wrong)
    assert "Ray's own choice of replicas stays" in caplog.text


class Model:
    """As a pydantic model of a request."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.messages, self._body = body["messages"], body

    def model_dump(self, exclude_unset: bool) -> dict[str, Any]:
        assert exclude_unset
        return self._body


@pytest.mark.parametrize("form", [dict, Model, json.dumps, lambda body: json.dumps(body).encode()])
def test_a_body_comes_in_many_forms(form: Any) -> None:
    request = read_request([3, RawRequest({"A": "b"}), form(chat("Hello"))], "", ClientKeys([]), 1.0)
    assert request is not None
    assert request.texts == ("You plan.", "Hello")
    assert (request.endpoint, request.headers["a"], request.at_s) == ("chat", "b", 1.0)
    text = read_request([{"prompt": "Hello"}], "", ClientKeys([]), 1.0)
    tokens = read_request([{"prompt": [1, 2]}], "", ClientKeys([]), 1.0)
    assert text is not None
    assert tokens is not None
    assert (text.endpoint, text.texts, tokens.texts) == ("completions", (None, "Hello"), (None, None))


def test_without_body_a_session_identifies() -> None:
    request = read_request([b"\x80\x05pickled"], "s1", ClientKeys([]), 0.0)
    assert request is not None
    assert request.headers == {"x-session-id": "s1"}
    for nothing in ([], [3], ["text"], [b"\x80"], [{"input": "embedded"}], [{}], [None]):
        assert read_request(nothing, "", ClientKeys([]), 0.0) is None


class Replica:
    """A simulated engine; answers say which replica gave them."""

    def __init__(self) -> None:
        transport = httpx.ASGITransport(SimulatedEngine(token_s=0.0).app())
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def chat(self, body: Any, headers: Any = None, *, wait_s: float = 0.0) -> dict[str, Any]:
        await asyncio.sleep(wait_s)
        if body == "fail":
            raise RuntimeError
        answer = await self._client.post("/v1/chat/completions", json=body) if isinstance(body, dict) else None
        text = answer.json()["choices"][0]["message"]["content"] if answer is not None else ""
        return {"replica": self._name, "text": text, "pid": os.getpid()}

    async def words(self, body: dict[str, Any], headers: Any = None) -> Any:
        for word in (await self.chat(body))["text"].split():
            yield self._name, word

    async def __call__(self, request: Any) -> dict[str, Any]:
        return await self.chat(await request.json())


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def http() -> Iterator[str]:
    """A cluster of Ray on this machine, and the URL of its HTTP proxy."""
    address = {"host": "127.0.0.1", "port": port()}
    ray.shutdown()  # of another file's tests
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:  # a busy machine answers late
        patch.setenv("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "10")
        patch.setattr(GatewayRouter, "queue_len_response_deadline_s", 10.0)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options=address)
        yield f"http://127.0.0.1:{address['port']}"
        serve.shutdown()
        ray.shutdown()


def deployed(name: str, **options: Any) -> Any:
    config = {"request_router_class": ROUTER, "request_router_kwargs": {"forecasts": WITHOUT_MODELS}}
    deployment = serve.deployment(Replica, name=name).options(
        request_router_config=config, ray_actor_options={"num_cpus": 0.1}, **options
    )
    return serve.run(deployment.bind(), name=name, route_prefix=f"/{name}")


@pytest.fixture(scope="module")
def handle(http: str) -> Any:
    return deployed("engines", num_replicas=3)


@pytest.fixture(scope="module")
def small(http: str) -> Any:
    """Replicas that take one request at a time."""
    return deployed("small", num_replicas=2, max_ongoing_requests=1)


@pytest.mark.slow
def test_on_a_cluster_workflows_stay_on_their_replicas(handle: Any) -> None:
    histories = {question: [question] for question in QUESTIONS}
    homes: dict[str, set[str]] = {question: set() for question in QUESTIONS}
    for turn in range(4):
        order = QUESTIONS[turn:] + QUESTIONS[:turn]
        asked = {question: handle.chat.remote(chat(*histories[question])) for question in order}
        for question, answer in asked.items():
            found = answer.result(timeout_s=60)
            homes[question].add(found["replica"])
            histories[question] += [found["text"], "Go on."]
    assert [len(home) for home in homes.values()] == [1] * len(QUESTIONS)
    assert len(set.union(*homes.values())) == 3


@pytest.mark.slow
def test_on_a_cluster_answers_are_streamed(handle: Any) -> None:
    streaming = handle.options(stream=True)
    replicas = set()
    for _ in range(3):
        words = list(streaming.words.remote(chat("Say it."), named("streamed")))
        assert len(words) > 3
        replicas |= {replica for replica, _ in words}
    assert len(replicas) == 1


@pytest.mark.slow
def test_on_a_cluster_requests_that_nothing_is_known_of_are_served(handle: Any) -> None:
    answers = [handle.chat.remote(body).result(timeout_s=60) for body in (None, 3, "text", b"\x80", '{"messages":')]
    assert len(answers) == 5


@pytest.mark.slow
def test_on_a_cluster_a_request_that_fails_or_is_cancelled_does_no_harm(handle: Any) -> None:
    assert handle.chat.remote(chat("Hello"), named("w")).result(timeout_s=60)["text"]
    with pytest.raises(RuntimeError):
        handle.chat.remote("fail", named("w")).result(timeout_s=60)
    waiting = handle.chat.remote(chat("Hello"), named("w"), wait_s=60)
    waiting.cancel()
    with pytest.raises(Exception, match=r"(?i)cancel"):
        waiting.result(timeout_s=60)
    for _ in range(3):  # wherever: on a busy machine the workflow was once moved
        assert handle.chat.remote(chat("Hello"), named("w")).result(timeout_s=60)["text"]


@pytest.mark.slow
def test_on_a_cluster_a_full_replica_is_passed_over(small: Any) -> None:
    asked = [small.chat.remote(chat("Hello"), named("busy"), wait_s=1.0) for _ in range(2)]
    assert len({one.result(timeout_s=60)["replica"] for one in asked}) == 2


@pytest.mark.slow
def test_on_a_cluster_a_workflow_goes_on_where_its_replica_has_died(small: Any) -> None:
    first = small.chat.remote(chat("Hello"), named("w")).result(timeout_s=60)
    os.kill(first["pid"], 9)
    second = None
    for _ in range(20):
        with suppress(ray.exceptions.RayError):
            second = small.chat.remote(chat("Hello"), named("w")).result(timeout_s=60)
            break
    assert second is not None
    assert second["replica"] != first["replica"]
    assert small.chat.remote(chat("Hello"), named("w")).result(timeout_s=60)["replica"] == second["replica"]


@pytest.mark.slow
def test_on_a_cluster_sessions_stay_over_http(http: str, handle: Any) -> None:
    def replicas(session: str) -> set[str]:
        headers = {"x-session-id": session}
        answers = [httpx.post(f"{http}/engines", json=chat(f"{n}"), headers=headers, timeout=60) for n in range(4)]
        return {answer.json()["replica"] for answer in answers}

    found = [replicas(session) for session in ("one", "two", "three")]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
