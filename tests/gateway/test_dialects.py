"""Dialects: what each server is told, in its polarity, and that nothing else of a request changes."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.gateway.annotation import Annotation
from presage.gateway.dialects import (
    DIALECTS,
    ORDER_HEADERS,
    answer_headers,
    isolated,
    without_client_order,
)
from presage.gateway.dialects.answer import HEADER, MOST_BYTES
from presage.gateway.dialects.names import SafeNames, body_name, header_name
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.metadata import read

NAMES = sorted(DIALECTS)
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.2, "seed": 1}


def annotation(**more: Any) -> Annotation:
    return Annotation(
        **{
            "step": Step("review", "w1", "coder"),
            "number": 3,
            "rank": 800.0,
            "remaining_tokens": (800.0, 4000.0),
            "output_tokens": (120.4, 900.0),
            "next_agents": (("tester", 0.7), ("coder", 0.2)),
            "end": 0.1,
            "return_s": (2.0, 30.0),
            "time_to_live_s": 12.5,
            "deadline_s": 4.0,
            "source": "champion",
            "evidence": 40,
            **more,
        }
    )


def annotated(name: str, body: dict[str, Any] | None = None, headers: Any = None, **more: Any) -> tuple[Any, Any]:
    return DIALECTS[name](BODY if body is None else body, headers or {}, annotation(**more))


def context(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body["vllm_xargs"]["agentic_context"])
    return found


# A key by which each server orders, as it documents it: the request with the smaller one is served first.
SERVED_FIRST: dict[str, Any] = {
    "vllm": lambda body, _: body["priority"],
    "vllm-router": lambda body, _: -context(body)["priority"],
    "dynamo": lambda body, _: -body["nvext"]["agent_hints"]["priority"],
}
RANKS = st.floats(-1e12, 1e12, allow_nan=False)


@pytest.mark.parametrize("name", sorted(SERVED_FIRST))
@given(first=RANKS, second=RANKS)
def test_the_lower_rank_is_served_first_or_as_early(name: str, first: float, second: float) -> None:
    low, high = sorted((first, second))
    key = SERVED_FIRST[name]
    assert key(*annotated(name, rank=low)) <= key(*annotated(name, rank=high))


@pytest.mark.parametrize("name", sorted(SERVED_FIRST))
def test_half_the_work_is_served_strictly_first(name: str) -> None:
    key = SERVED_FIRST[name]
    for tokens in (10, 100, 1000, 10_000, 100_000):
        assert key(*annotated(name, rank=tokens / 2)) < key(*annotated(name, rank=tokens))


@pytest.mark.parametrize("name", sorted(SERVED_FIRST))
@pytest.mark.parametrize("rank", [float("inf"), float("-inf"), float("nan"), None])
def test_a_rank_without_a_number_gives_no_priority(name: str, rank: float | None) -> None:
    assert '"priority"' not in json.dumps(annotated(name, rank=rank), allow_nan=False).replace('\\"', '"')


def test_priorities_fit_into_32_bits_and_dynamo_gets_seconds_from_0_to_60() -> None:
    for rank in (-1e30, -5.0, 0.0, 0.5, 7e5, 1e30):
        assert abs(annotated("vllm", rank=rank)[0]["priority"]) < 2**31
        assert abs(context(annotated("vllm-router", rank=rank)[0])["priority"]) < 2**31
        assert 0 <= annotated("dynamo", rank=rank)[0]["nvext"]["agent_hints"]["priority"] <= 60


def test_llm_d_is_told_the_shorter_deadline_as_the_shorter_objective() -> None:
    soon, late = (annotated("llm-d", deadline_s=seconds)[1]["x-llm-d-slo-ttft-ms"] for seconds in (0.25, 30.0))
    assert (soon, late) == ("250", "30000")


def test_vllm_gets_a_priority_alone() -> None:
    assert annotated("vllm") == ({**BODY, "priority": 800}, {})


def test_our_engine_reads_the_step_that_the_gateway_means() -> None:
    body, headers = annotated("presage", step=Step("review", "w1", "coder", last=True))
    assert headers == {}
    assert "priority" not in body
    assert all(isinstance(value, str | int) for value in body["vllm_xargs"].values())
    assert read(body["vllm_xargs"], None, EventCounts()) == Step("review", "w1", "coder", 3, last=True)


def test_our_engine_reads_the_step_behind_vllm_router_too() -> None:
    body, _ = annotated("vllm-router")
    assert isinstance(body["vllm_xargs"]["agentic_context"], str)
    assert read(body["vllm_xargs"], None, EventCounts()) == Step("review", "w1", "coder", 3)


def test_vllm_router_gets_a_program_with_hints() -> None:
    body, headers = annotated("vllm-router")
    assert headers == {}
    assert context(body) == {
        "program_id": "w1",
        "task_id": "w1",
        "agent_role": "coder",
        "blocks_parent": False,
        "expected_resume": True,
        "workflow_profile_id": "review",
        "step_id": 3,
        "priority": -800,
        "deadline_seconds": 4.0,
        "expected_output_length": 120,
        "kv_retention_ttl_seconds": 12.5,
    }
    assert not context(annotated("vllm-router", step=Step("review", "w1", "coder", last=True))[0])["expected_resume"]


@pytest.mark.parametrize("as_text", [True, False])
def test_vllm_router_keeps_a_clients_context_and_its_tree_of_programs(as_text: bool) -> None:
    sent = {"program_id": "t:coder", "parent_program_id": "t:lead", "priority": 5, "note": "ö"}
    body, _ = annotated(
        "vllm-router", {**BODY, "vllm_xargs": {"agentic_context": json.dumps(sent) if as_text else sent, "x": 1}}
    )
    found = context(body)
    assert {name: found[name] for name in sent} == sent
    assert "blocks_parent" not in found
    assert found["expected_output_length"] == 120
    assert body["vllm_xargs"]["x"] == 1


@pytest.mark.parametrize("sent", ["{", "[1]", 7, None, ["a"], '{"a": ' + "[" * 100_000])
def test_vllm_router_never_gets_a_context_that_it_refuses(sent: object) -> None:
    assert context(annotated("vllm-router", {**BODY, "vllm_xargs": {"agentic_context": sent}})[0])["program_id"] == "w1"


def test_vllm_router_gets_a_long_context_as_the_client_sent_it() -> None:
    sent = {"program_id": "p", "note": "x" * 16_330}
    body, _ = annotated("vllm-router", {**BODY, "vllm_xargs": {"agentic_context": json.dumps(sent)}})
    assert context(body) == sent


def test_dynamo_gets_hints_and_a_session() -> None:
    body, headers = annotated("dynamo", rank=1023.0)
    assert body["nvext"] == {"agent_hints": {"priority": 30, "osl": 120}}
    assert headers == {"x-dynamo-session-id": "w1"}


def test_dynamo_keeps_a_clients_extension() -> None:
    sent = {"annotations": ["a"], "agent_hints": {"priority": 2, "speculative_prefill": True}}
    body, _ = annotated("dynamo", {**BODY, "nvext": sent})
    assert body["nvext"] == {**sent, "agent_hints": {"priority": 2, "osl": 120, "speculative_prefill": True}}


def test_llm_d_leaves_the_body_and_adds_headers() -> None:
    assert annotated("llm-d") == (BODY, {"x-session-affinity": "w1", "x-llm-d-slo-ttft-ms": "4000"})
    assert annotated("llm-d", headers={"x-claude-code-session-id": "c", "x-slo-ttft-ms": "9"}) == (BODY, {})


def test_sys_annotations_are_those_of_pythia() -> None:
    body, headers = annotated("sys_annotations")
    assert headers == {}
    assert body["app_metadata"] == {"workflow_type_id": "review", "workflow_id": "w1", "agent_id": "coder"}
    assert body["sys_annotations"]["predicted_output_len"] == [120, 900]
    assert body["sys_annotations"]["predicted_next_agents"] == {"tester": 0.7, "coder": 0.2}


@pytest.mark.parametrize("name", NAMES)
def test_an_annotation_without_forecasts_is_identity_at_most(name: str) -> None:
    bare = Annotation(Step("", "w1", ""), 0)
    body, headers = DIALECTS[name](BODY, {}, bare)
    assert {key: body[key] for key in BODY} == BODY
    assert "null" not in json.dumps([body, headers])
    assert not {"priority", "osl", "deadline_seconds"} & {*body, *body.get("nvext", {}).get("agent_hints", {})}


NUMBERS = st.none() | st.floats()
PAIRS = st.none() | st.tuples(st.floats(), st.floats())
FORECASTS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("rank", "end", "time_to_live_s", "deadline_s"), NUMBERS),
        **dict.fromkeys(("remaining_tokens", "output_tokens", "return_s"), PAIRS),
    }
)


@pytest.mark.parametrize("name", NAMES)
@given(forecasts=FORECASTS)
def test_no_number_breaks_the_json_of_a_request_or_an_answer(name: str, forecasts: dict[str, Any]) -> None:
    json.dumps(annotated(name, **forecasts), allow_nan=False)
    value = answer_headers(annotation(**forecasts), {"confidence": float("nan")})[HEADER]
    assert not {"NaN", "Infinity"} & {*value.replace(":", ",").replace("-", ",").split(",")}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TOUCHED = ("session_id", "priority", "vllm_xargs", "nvext", "app_metadata", "sys_annotations")
BODIES = st.fixed_dictionaries(
    {"model": st.text(max_size=5), "messages": VALUES, "temperature": VALUES},
    optional={
        "priority": VALUES,
        "vllm_xargs": VALUES | st.fixed_dictionaries({"agentic_context": VALUES, "session_id": VALUES}),
        "nvext": VALUES | st.fixed_dictionaries({"agent_hints": VALUES}),
        "sys_annotations": VALUES,
        "user": VALUES,
    },
)


@pytest.mark.parametrize("name", NAMES)
@given(body=BODIES, tenant=st.sampled_from(["", "key-1"]))
def test_nothing_else_of_a_request_changes_and_arguments_stay(name: str, body: dict[str, Any], tenant: str) -> None:
    headers = {"x-session-id": "s", "authorization": "Bearer k"}
    told = annotation(step=Step("review", scoped(tenant, "w1"), "coder"))
    given_body, given_headers = copy.deepcopy(body), dict(headers)
    changed, added = DIALECTS[name](body, headers, told)
    assert (body, headers) == (given_body, given_headers)
    assert {key: value for key, value in changed.items() if key not in TOUCHED} == {
        key: value for key, value in body.items() if key not in TOUCHED
    }
    assert "authorization" not in added
    assert without_client_order(body).keys() == body.keys() - {"priority"}
    assert body == given_body


WILD = st.text(min_size=1, max_size=300) | st.sampled_from(["a\r\nX-Evil: 1", " ", "a ", "~", "é", "\ud800", "a\x00b"])


@given(name=WILD)
def test_names_of_headers_cannot_inject_anything(name: str) -> None:
    for known in (header_name(name), SafeNames(b"secret").of("key-0", name)):
        assert known.isascii()
        assert known.isprintable()
        assert known == known.strip() != ""
        assert len(known) <= 256


@given(one=WILD, other=WILD, tenants=st.tuples(*[st.sampled_from(["", "key-0", "key-1"])] * 2))
def test_two_workflows_have_one_name_only_if_they_are_one(one: str, other: str, tenants: tuple[str, str]) -> None:
    safe = SafeNames(b"secret")
    same = scoped(tenants[0], one) == scoped(tenants[1], other)
    for sent in (body_name, header_name):
        names = [
            safe.of(tenant, name) if tenant else sent(name) for tenant, name in zip(tenants, (one, other), strict=True)
        ]
        assert (names[0] == names[1]) == same


def test_plain_names_stay_and_a_client_cannot_send_another_tenants_name() -> None:
    assert body_name("Prüfung 7") == "Prüfung 7"
    assert header_name("run-7/a:b") == "run-7/a:b"
    theirs = SafeNames(b"secret").of("key-0", "w1")
    assert theirs.startswith("w1~")
    assert "key-0" not in theirs
    assert body_name(theirs) != theirs
    assert theirs != SafeNames(b"another").of("key-0", "w1"), "who knows the names can compute it"


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
IDS: dict[str, Any] = {
    "session_id": "s",
    "request_id": "r",
    "vllm_xargs": {"session_id": "s", "workflow_id": 7, "agentic_context": '{"program_id": "p", "root_id": "p"}'},
    "app_metadata": '{"workflow_id": "w"}',
    "nvext": {"agent_context": {"session_id": "s", "trajectory_id": "t"}},
    "metadata": {"workflow_id": "w", "user_id": f"user_ab_account__session_{UUID}"},
    "extra_body": {"vllm_xargs": {"session_id": "s"}},
}
ID_HEADERS = (
    "x-session-id", "session-id", "session_id", "conversation_id", "x-session-affinity", "x-claude-code-session-id",
    "x-dynamo-session-id", "x-llm-d-inference-fairness-id",
)  # fmt: skip


def leaves(value: Any) -> set[str]:
    """All texts in a value, also those in JSON."""
    if isinstance(value, dict):
        return set().union(*map(leaves, value.values())) if value else set()
    if isinstance(value, str) and value.startswith("{"):
        return leaves(json.loads(value))
    return {str(value)}


@pytest.mark.parametrize("name", [None, *NAMES])
def test_two_tenants_that_send_the_same_ids_never_meet(name: str | None) -> None:
    sent_headers = {**dict.fromkeys(ID_HEADERS, "s"), "baggage": "session.id=s,other=1;p=2"}
    found, safe = [], SafeNames(b"secret")
    for tenant in ("key-0", "key-1"):
        body, headers = isolated({**BODY, **IDS}, sent_headers, tenant, safe)
        assert {key: body[key] for key in BODY} == BODY
        assert headers["baggage"].endswith(",other=1;p=2")
        if name is not None:
            step = Step("review", scoped(tenant, "w1"), "coder")
            told = annotation(step=step, sent_id=safe.of(tenant, "w1"), rank=None)
            body, added = DIALECTS[name](body, headers, told)
            headers = {**headers, **added}
        ids = leaves({key: value for key, value in body.items() if key in IDS}) | set(headers.values())
        found.append({text for text in ids if "~" in text or "session" in text})
        assert not ids & {"s", "r", "p", "t", "w", "7", "w1"}
        assert UUID not in str(body)
    assert len(found[0]) == len(found[1]) >= 7
    assert not found[0] & found[1]
    assert isolated({**BODY, **IDS}, sent_headers, "", safe) == ({**BODY, **IDS}, sent_headers)


@given(body=BODIES)
def test_ids_of_any_shape_are_a_tenants_own_or_stay(body: dict[str, Any]) -> None:
    given_body = copy.deepcopy(body)
    changed, _ = isolated(body, {}, "key-1", SafeNames(b"secret"))
    assert body == given_body
    assert changed.keys() == body.keys()


def test_a_client_that_may_not_set_priorities_has_none() -> None:
    body = {
        **BODY,
        "priority": -9,
        "nvext": {"agent_hints": {"priority": 9, "strict_priority": 9, "osl": 4}, "ignore_eos": True},
        "vllm_xargs": {"agentic_context": '{"program_id": "p", "priority": 9, "deadline_seconds": 0}'},
    }
    left = without_client_order(body)
    assert left["nvext"] == {"agent_hints": {"osl": 4}, "ignore_eos": True}
    assert context(left) == {"program_id": "p"}
    assert "priority" not in left
    assert annotated("vllm", left)[0]["priority"] == 800
    assert {"x-vllm-priority", "x-dynamo-request-priority"} < ORDER_HEADERS
    assert without_client_order(BODY) == BODY


def test_a_priority_that_a_client_may_set_stays() -> None:
    assert annotated("vllm", {**BODY, "priority": -9})[0]["priority"] == -9


def test_the_answer_says_forecast_and_decision() -> None:
    headers = answer_headers(
        annotation(step=Step("review", scoped("key-0", "w1"), "coder")), {"model": "big", "x": None}
    )
    told = json.loads(headers[HEADER])
    assert told["workflow_id"] == "w1"
    assert told["predicted_next_agents"] == {"tester": 0.7, "coder": 0.2}
    assert (told["model"], told["source"], told["evidence"]) == ("big", "champion", 40)
    assert "x" not in told


@given(agents=st.lists(st.tuples(st.text(max_size=90), st.floats(0, 1)), max_size=60), workflow_id=WILD, model=WILD)
def test_the_answers_header_is_safe_and_bounded(agents: Any, workflow_id: str, model: str) -> None:
    told = replace(annotation(next_agents=tuple(agents)), step=Step(workflow_id, workflow_id, workflow_id))
    value = answer_headers(told, {"model": model * 9})[HEADER]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= MOST_BYTES
    assert json.loads(value)["predicted_output_len"] == [120, 900]
