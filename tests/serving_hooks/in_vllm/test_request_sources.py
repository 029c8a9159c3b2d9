"""What the HTTP server observes of requests whose clients do not know us: each source and its rank, and no texts."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from http_routes import CHAT, Served
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ArtefactError
from presage.features.agent_fingerprint import LONGEST_SYSTEM
from presage.features.agent_names import AgentNames
from presage.serving_hooks.identity.agents import Agents
from presage.serving_hooks.identity.request import PATHS, ApiRequest
from presage.serving_hooks.identity.turns import system_text
from presage.serving_hooks.vllm.http.carriers import LONGEST, Carriers
from presage.serving_hooks.vllm.http.request_sources import MESSAGES, RequestSources, ServerNames
from presage.serving_hooks.workflows.identity import Step
from presage.serving_hooks.workflows.observed import KNOWN_AS, NOTHING, OBSERVED, Observed
from presage.serving_hooks.workflows.tenants import ARGUMENT

RESPONSES, COMPLETIONS = "/v1/responses", "/v1/completions"
UUID = "0198c5c4-11d0-7c31-b0a5-6d0c2a41f9be"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
USER = f"user_{'ab12' * 16}_account_{UUID[::-1]}_session_{UUID}"
USER_JSON = json.dumps({"device_id": "ab12" * 16, "account_uuid": "", "session_id": UUID})


def user(user_id: Any) -> dict[str, Any]:
    return {"metadata": {"user_id": user_id}}


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        ({}, {"X-Session-ID": "s1"}, Observed(session="s1")),
        ({}, {"Session-Id": "s1"}, Observed(session="s1")),
        ({}, {"session_id": "s1"}, Observed(session="s1")),
        ({}, {"conversation_id": "s1"}, Observed(session="s1")),
        ({}, {"X-Claude-Code-Session-Id": UUID}, Observed(session=UUID)),
        ({"session_id": "s1"}, {}, Observed(session="s1")),
        ({"conversation": "conv_1"}, {}, Observed(session="conv_1")),
        ({"conversation": {"id": "conv_1"}}, {}, Observed(session="conv_1")),
        (user(USER), {}, Observed(session=UUID)),
        (user(f"user_{'0' * 64}_account__session_{UUID}"), {}, Observed(session=UUID)),
        (user(USER_JSON), {}, Observed(session=UUID)),
        ({}, {"baggage": "session.id=s%2F1,user.id=7"}, Observed(session="s/1")),
        ({}, {"baggage": "gen_ai.conversation.id=c1;ttl=1"}, Observed(conversation="c1")),
        ({"prompt_cache_key": UUID}, {}, Observed(cache_key=UUID)),
        ({"previous_response_id": "resp_1"}, {}, Observed(response="resp_1")),
        ({}, PARENT, Observed(trace=TRACE)),
        (
            {},
            {"baggage": "gen_ai.agent.name=coder,service.name=review"},
            Observed(agent="coder", agent_confidence=0.95, workflow_type="review"),
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_each_source_is_read_on_each_route(
    body: dict[str, Any], headers: dict[str, str], found: Observed, path: str
) -> None:
    served = Served()
    assert served.observe(body, headers, path) == found
    assert served.counts.by_key() == {}


@pytest.mark.parametrize(
    "body",
    [
        {"user": UUID},
        {"safety_identifier": UUID},
        user(UUID),
        user(f"user_{'0' * 64}"),
        user(f"{USER}x"),
        user(json.dumps({"account_uuid": UUID})),
        {"prompt_cache_key": "my-application"},
        {"prompt_cache_key": "user-17"},
        {"metadata": {"trace_id": TRACE}},
        {"store": True, "service_tier": "auto"},
    ],
)
def test_what_names_a_person_or_an_application_identifies_no_workflow(body: dict[str, Any]) -> None:
    assert Served().observe(body) is NOTHING


SESSIONS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"session_id": "first"}, {}),  # vLLM's own reading
    ({}, {"X-Session-ID": "first"}),
    ({}, {"session-id": "first"}),
    ({}, {"session_id": "first"}),
    ({}, {"conversation_id": "first"}),
    ({}, {"X-Claude-Code-Session-Id": "first"}),
    ({"conversation": "first"}, {}),
    (user(USER), {}),
    ({}, {"baggage": "session.id=first"}),
]


@pytest.mark.parametrize("at", range(len(SESSIONS) - 1))
def test_of_several_sessions_the_one_that_was_meant_most_counts(at: int) -> None:
    (body, headers), (less_body, less_headers) = SESSIONS[at], SESSIONS[at + 1]
    first = UUID if body == user(USER) else "first"
    second = json.loads(json.dumps([less_body, less_headers]).replace("first", "second"))
    assert Served().observe({**second[0], **body}, {**second[1], **headers}).session == first


def test_all_sources_are_told_beside_each_other() -> None:
    found = Served().observe(
        {"prompt_cache_key": UUID, "previous_response_id": "resp_1", "instructions": "You are the planner."},
        {**PARENT, "X-Session-ID": "s1"},
        RESPONSES,
    )
    assert (found.session, found.trace, found.cache_key, found.response) == ("s1", TRACE, UUID, "resp_1")
    assert found.agent.startswith("agent-")
    assert found.workflow_type == found.agent.replace("agent", "app")


def test_the_setting_gives_a_type_to_requests_whose_clients_name_none() -> None:
    served = Served("one", "two", workflow_type={"default": "support", "tenants": {"key-1": "crm"}, "header": "X-App"})
    headers = {"authorization": "Bearer one"}
    told = [
        served.observe({}, {**headers, **more}).workflow_type
        for more in (
            {},
            {"authorization": "Bearer two"},
            {"x-app": "desk"},
            {"x-app": "desk", "baggage": "gen_ai.workflow.name=own"},
        )
    ]
    assert told == ["support", "crm", "desk", "own"]
    assert Served(workflow_type="support").observe({}).workflow_type == "support"


SYSTEM = "You are the planner of a travel agency. Break the question into steps that a colleague can carry out."
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}],
    RESPONSES: [{"type": "function", "name": "search", "parameters": {"type": "object"}}],
    MESSAGES: [{"name": "search", "input_schema": {"type": "object"}}],
}
TALK = [{"role": "user", "content": "Lisbon?"}, {"role": "assistant", "content": "Yes."}]
BLOCKS = [{"type": "text", "text": SYSTEM}]
ATTRIBUTION = "x-anthropic-billing-header: cc_version=2.1.90.a1b; cc_entrypoint=cli; cch=0d9e8;"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "system", "content": SYSTEM}, *TALK]}),
        (CHAT, {"messages": [{"role": "developer", "content": BLOCKS}, *TALK]}),
        (CHAT, {"messages": [*TALK, {"role": "system", "content": SYSTEM}]}),
        (CHAT, {"messages": [{"role": "system", "content": SYSTEM}, *TALK, {"role": "system", "content": "Hurry."}]}),
        (RESPONSES, {"instructions": SYSTEM, "input": "Lisbon?"}),
        (RESPONSES, {"input": [{"role": "developer", "content": SYSTEM}, *TALK]}),
        (RESPONSES, {"instructions": SYSTEM, "input": [{"type": "reasoning"}, *TALK, {"role": "system"}]}),
        (MESSAGES, {"system": SYSTEM, "messages": TALK}),
        (MESSAGES, {"system": BLOCKS, "messages": [*TALK, {"role": "system", "content": "Hurry."}]}),
        (MESSAGES, {"system": [{"type": "text", "text": ATTRIBUTION}, *BLOCKS], "messages": TALK}),
    ],
)
def test_an_agent_is_recognised_on_each_route_by_what_the_gateway_sees(path: str, body: dict[str, Any]) -> None:
    known = Agents(None).recognise("", SYSTEM, ["search"])
    found = Served().observe({**body, "tools": TOOLS[path]}, path=path)
    assert found == Observed(agent=known.name, agent_confidence=0.95, workflow_type=f"app-{known.key}")


TEXTS = st.text(max_size=20)
CONTENTS = st.none() | TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])}, optional={"content": CONTENTS}
)
TOOL = st.fixed_dictionaries(
    {}, optional={"name": TEXTS, "type": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS})}
)


@given(
    path=st.sampled_from(sorted(PATHS)),
    body=st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(SAID, max_size=6),
            "input": TEXTS | st.lists(SAID, max_size=6),
            "instructions": CONTENTS,
            "prompt": TEXTS,
            "tools": st.none() | st.lists(TOOL, max_size=3),
        },
    ),
)
def test_an_agent_has_one_name_before_and_behind_a_gateway(path: str, body: dict[str, Any]) -> None:
    whole = ApiRequest(PATHS[path], body)
    known = Agents(None).recognise("", system_text(whole, LONGEST_SYSTEM), whole.tools)
    top = msgspec.json.decode(msgspec.json.encode(body), type=dict[str, msgspec.Raw])
    found = RequestSources().read(path, {}, top, "", None)
    assert found.get("agent") == ([known.name, known.confidence] if known.confidence else None)


def test_a_request_without_system_prompt_and_tools_has_no_agent() -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        assert Served().observe({"messages": TALK, "input": TALK, "prompt": SYSTEM}, path=path) is NOTHING


def test_agents_have_the_names_of_a_file(tmp_path: Path) -> None:
    columns = {"workflow_type": ["travel"], "agent": ["planner"], "system_prompt": [SYSTEM]}
    AgentNames.learn(pa.table(columns)).save(tmp_path / "agents.json")
    served = Served(agent_names=str(tmp_path / "agents.json"))
    body = {"messages": [{"role": "system", "content": SYSTEM}, *TALK]}
    assert served.observe(body) == Observed(agent="planner", agent_confidence=1.0, workflow_type="travel")
    assert served.observe(body, {"baggage": "agent.name=own,service.name=app"}).agent == "own"
    with pytest.raises(ArtefactError, match="no readable file"):
        Served(agent_names=str(tmp_path / "none.json"))


def test_agents_have_the_names_that_the_models_of_the_engine_call_them_by() -> None:
    columns = {"workflow_type": ["travel"], "agent": ["planner"], "system_prompt": [SYSTEM]}
    models = {
        "old": AgentNames.learn(pa.table(columns)),
        "new": AgentNames.learn(pa.table(columns | {"agent": ["p2"]})),
    }
    sources, asked, live = RequestSources(), list[str](), ["old"]

    async def ask(known: str) -> list[dict[str, str]]:
        asked.append(known)
        if live == ["lost"]:
            raise ConnectionError
        names = models.get(live[0])
        if names is None:
            return [{}, {}]
        return [{}, {"digest": names.digest} | ({} if names.digest == known else {"names": names.as_json.decode()})]

    follows = ServerNames(ask, sources.agents)
    top = {"messages": msgspec.Raw(json.dumps([{"role": "system", "content": SYSTEM}, *TALK]).encode())}

    def called() -> Any:
        asyncio.run(follows.renew())
        return sources.read(CHAT, {}, top, "", None)["agent"]

    unnamed = sources.read(CHAT, {}, top, "", None)["agent"]
    assert called() == called() == ["planner", 1.0]
    assert asked == ["", models["old"].digest]
    live[:] = ["new"]
    assert called() == ["p2", 1.0]
    live[:] = ["lost"]
    assert called() == ["p2", 1.0]
    live[:] = ["none"]
    assert called() == unnamed


NAMES = {"workflow_type": "review", "workflow_id": "r1", "agent": "coder"}
IDS = {"prompt_cache_key": UUID, "instructions": SYSTEM}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"vllm_xargs": NAMES}, {}),
        ({"vllm_xargs": {"workflow_id": "r1"}}, {}),
        ({"metadata": NAMES}, {}),
        ({"app_metadata": {"workflow_id": "r1"}}, {}),
        ({}, {"X-Presage-Workflow-Id": "r1"}),
        ({"vllm_xargs": {"workflow_type": "t", "agent": "a"}}, {"X-Session-ID": "s1"}),
    ],
)
def test_nothing_is_observed_where_the_workflow_is_named(body: dict[str, Any], headers: dict[str, str]) -> None:
    assert Served().observe({**IDS, **body}, {**PARENT, **headers}, RESPONSES) is NOTHING


def test_of_a_named_agent_that_the_models_lack_they_are_told_whose_system_prompt_it_has() -> None:
    columns = {"workflow_type": ["travel"], "agent": ["planner"], "system_prompt": [SYSTEM]}
    sources = RequestSources()
    body = {"messages": [{"role": "system", "content": SYSTEM}, *TALK]}

    def told(names: dict[str, str], headers: tuple[tuple[bytes, bytes], ...] = (), **more: Any) -> Any:
        one = Carriers(CHAT, headers, sources)
        one.received({"type": "http.request", "body": json.dumps({**body, **more}).encode()})
        params = SimpleNamespace(extra_args=dict(names))
        one.generates(params, None)
        return params.extra_args.get(OBSERVED)

    renamed = {**NAMES, "agent": "guide"}
    assert told(renamed) is None
    sources.agents.take_names(AgentNames.learn(pa.table(columns)))
    seen = sources.debug_state()
    assert told({**NAMES, "agent": "planner"}) is None
    assert sources.debug_state() == seen, "nothing is read for an agent that the models know"
    assert told(renamed) == {KNOWN_AS: ("travel", "planner")}
    assert told({"workflow_type": "review", "workflow_id": "r1"}, metadata={"agent": "guide"}) == {
        KNOWN_AS: ("travel", "planner")
    }
    assert told(renamed, messages=[{"role": "system", "content": "You count."}]) is None
    assert told({"workflow_id": "r1"}) is None, "who sends no name of an agent has renamed none"
    by_trace = told({}, ((b"baggage", b"agent.name=guide"),))
    assert (by_trace["agent"], by_trace[KNOWN_AS]) == (["guide", 0.95], ("travel", "planner"))
    assert KNOWN_AS not in told({})
    assert told({**renamed, ARGUMENT: "key-1"}) == {KNOWN_AS: ("travel", "planner")}, "whoever the tenant is"


def test_names_stay_as_they_are_beside_what_is_observed() -> None:
    served = Served()
    assert served.ask({**IDS, "vllm_xargs": {"agent": "coder"}}, {"X-Session-ID": "s1"}, RESPONSES) == Step(
        "", "s1", "coder"
    )
    assert served.observe({**IDS, "vllm_xargs": {"agent": "coder"}}, path=RESPONSES).cache_key == UUID


@pytest.mark.parametrize("path", [CHAT, "/invocations"])
def test_what_a_client_claims_to_be_observed_is_discarded(path: str) -> None:
    forged = {"vllm_xargs": {OBSERVED: {"session": "s of another"}}}
    assert Served().observe(forged, path=path) is NOTHING
    assert Served().observe(forged, {"X-Session-ID": "s1"}, path) == Observed(session="s1")


def test_a_claim_is_discarded_outside_of_any_request() -> None:
    assert Served().generate({OBSERVED: {"session": "s"}, "workflow_id": "r1"}) == {"workflow_id": "r1"}


def test_a_tenants_agents_are_its_own_and_who_has_no_key_is_nobody() -> None:
    served = Served("one", "two")
    body = {"messages": [{"role": "system", "content": SYSTEM}]}
    found = [served.observe(body, {**PARENT, "Authorization": f"Bearer {key}"}) for key in ("one", "two")]
    assert found[0] == found[1]  # the names of agents are the same everywhere
    assert found[0].trace == TRACE
    assert served.observe(body, {**PARENT, "X-Session-ID": "s1"}) is NOTHING
    sources = RequestSources()
    top = {"messages": msgspec.Raw(json.dumps(body["messages"]).encode())}
    for tenant in ("key-0", "key-1"):
        sources.read(CHAT, {}, top, tenant, None)
    assert sources.debug_state() == {"agent_clusters": 2, "agent_prompts": 6}


def test_all_prompts_of_one_request_are_told_the_same() -> None:
    one = Carriers(COMPLETIONS, [(b"x-session-id", b"s1")], RequestSources())
    for _ in range(2):
        params = SimpleNamespace(extra_args=None)
        one.generates(params, "s1")
        assert params.extra_args == {OBSERVED: {"session": "s1"}}


def test_a_system_prompt_behind_thousands_of_messages_is_not_looked_for() -> None:
    served, system = Served(), {"role": "system", "content": SYSTEM}
    assert served.observe({"messages": [TALK[0]] * 5 + [system]}).agent
    assert not served.observe({"messages": [TALK[0]] * 5_000 + [system]}).agent


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        TRACE,
        f"00-{TRACE}",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-b7ad6b7169203331-01",
        f"00-{TRACE}-b7ad6b7169203331-01-more",
        f"00-{TRACE}'; drop table-b7ad6b7169203331-01",
        "0" * 100_000,
    ],
)
def test_a_malformed_trace_is_as_good_as_none(parent: str) -> None:
    assert Served().observe(headers={"traceparent": parent}) is NOTHING


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Claude-Code-Session-Id": "s" * 300},
        {"X-Claude-Code-Session-Id": "s" * 60_000},
        {"conversation_id": "a\tb"},
        {"baggage": f"session.id={'s' * 10_000}"},
        {"baggage": "session.id=a%00b,agent.name=%0a,service.name=%c2%a0"},
        {"baggage": "," * 8_000},
    ],
)
def test_an_unsound_header_is_as_good_as_none(headers: dict[str, str]) -> None:
    assert Served().observe(headers=headers) is NOTHING


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"messages": NaN}',
        b'{"messages": ' + DEEP + b"}",
        b'{"tools": ' + DEEP + b"}",
        b'{"conversation": ' + DEEP + b"}",
        b'{"metadata": {"user_id": ' + DEEP + b"}}",
        json.dumps(user("{" * 1000)).encode(),
        json.dumps(user('{"session_id": ["s"]}')).encode(),
        b'{"metadata": {"user_id": "\\ud800{"}}',
        b'{"session_id": 1.5, "conversation": [{"id": "c"}], "prompt_cache_key": ["k"], "previous_response_id": {}}',
        b'{"messages": {"role": "system"}, "tools": "search", "instructions": 7, "system": {}, "input": false}',
        b'{"messages": [1, "system", null, ["system"]], "tools": [1, null, {"function": 3}]}',
        b'{"messages": [{"role": ["system"], "content": "x"}, {"role": "system"}, {"role": "system", "content": {}}]}',
        b'{"prompt_cache_key": "' + b"a1" * LONGEST + b'"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_a_hostile_body_is_served_and_tells_nothing(body: bytes, path: str) -> None:
    served = Served()
    assert served.observe(body, path=path) is NOTHING
    assert served.observe(body, PARENT, path) == Observed(trace=TRACE)  # headers are read all the same


RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "name", "function", "id", "user_id"]), inner)
    ),
    max_leaves=15,
)
KEYS = (
    "messages",
    "input",
    "instructions",
    "system",
    "tools",
    "metadata",
    "conversation",
    "session_id",
    "prompt_cache_key",
)


@given(
    path=st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/invocations"]),
    body=st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, RAW)),
    headers=st.dictionaries(st.sampled_from(["traceparent", "baggage", "x-session-id", "session_id"]), st.text()),
)
def test_reading_a_request_never_raises(path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    top = msgspec.json.decode(msgspec.json.encode(body), type=dict[str, msgspec.Raw])
    found = RequestSources().read(path, headers, top, "", headers.get("x-session-id"))
    assert found.keys() <= {field.name for field in fields(Observed)}
    msgspec.msgpack.encode(found)  # as vLLM sends it to the engine


SECRET = "lighthouse"


def test_nothing_of_a_text_is_kept_sent_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served = Served()
    sources = RequestSources()
    for path, key in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        said = [{"role": "system", "content": f"{SYSTEM} The word is {SECRET}."}, {"role": "user", "content": SECRET}]
        body = {key: said, "system": f"{SYSTEM} It is {SECRET}.", "user": SECRET, "metadata": {"user_id": SECRET}}
        assert SECRET not in repr(served.observe(body, path=path))
        top = {of: msgspec.Raw(json.dumps(value).encode()) for of, value in body.items()}
        sources.read(path, {}, top, "", None)
    assert SECRET not in caplog.text
    assert not [kept for kept in reachable(sources) if SECRET in kept]


def reachable(held: object) -> list[str]:
    """All strings and bytes that an object holds, those of classes and modules aside."""
    found, seen, left = [], set(), [held]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes):
            found.append(one if isinstance(one, str) else one.decode("latin-1"))
        else:
            left += gc.get_referents(one)
    return found


def test_the_walk_above_finds_what_is_kept() -> None:
    holder = SimpleNamespace(of={"a": [SimpleNamespace(text=f"the {SECRET}")]})
    assert [kept for kept in reachable(holder) if SECRET in kept]
