"""Laws of identity: extensions are found, tenants never meet, and no input whatever raises or fails."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.identifier import Identifier
from presage.serving_hooks.identity.request import ApiRequest, Endpoint
from presage.serving_hooks.identity.turns import LEAST_SENTENCE, sentences, system_text, values_of
from presage.serving_hooks.workflows.identity import tenant_of

TEXT = (
    st.text(st.characters(codec=None), min_size=1, max_size=40).filter(str.strip).filter(lambda text: "<" not in text)
)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": json.dumps(arguments)}},
    TEXT,
    st.dictionaries(TEXT, st.integers() | TEXT, max_size=3),
)
USER = st.builds(lambda text: {"role": "user", "content": text}, TEXT)
ANSWER = st.builds(
    lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, TEXT, st.lists(CALL, max_size=3)
)
SYSTEM = st.builds(lambda text: {"role": "system", "content": text}, st.text(max_size=200))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "type", "output", "arguments", "name", "id"]),
        JSON | ROLES,
        max_size=5,
    )
    | JSON,
    max_size=5,
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("messages", "input", "prompt"), MESSAGES | JSON),
        **dict.fromkeys(("vllm_xargs", "app_metadata", "agentic_context", "extra_body", "metadata"), JSON),
        **dict.fromkeys(("session_id", "conversation", "prompt_cache_key", "previous_response_id"), JSON),
        **dict.fromkeys(("tools", "instructions", "model", "user"), JSON),
    },
)
HEADERS = st.dictionaries(
    st.sampled_from(["traceparent", "baggage", "x-session-id", "x-stainless-retry-count"]), st.text(max_size=60)
)
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions", "responses")


def identifier(most: int = 100) -> Identifier:
    return Identifier(counts=EventCounts(), most_conversations=most)


def chat(messages: list[Any]) -> ApiRequest:
    return ApiRequest("chat", {"model": "m", "messages": messages})


@given(SYSTEM, SYSTEM, st.lists(USER | ANSWER, min_size=1, max_size=6), ANSWER, st.lists(USER, min_size=1, max_size=3))
def test_a_prompt_extended_by_its_answer_is_always_found(
    system: Any, later: Any, messages: list[Any], answer: Any, more: list[Any]
) -> None:
    of = identifier()
    request = chat([system, *messages])
    first = of.identify(request)
    of.answered(first, request, None, [answer])
    found = of.identify(chat([later, *messages, answer, *more]))
    assert found.step.workflow == first.step.workflow


@given(st.text(min_size=1, max_size=700), st.text(min_size=1, max_size=300), st.text(max_size=300))
def test_a_completion_prompt_extended_by_its_answer_is_always_found(prompt: str, answer: str, more: str) -> None:
    of = identifier()
    request = ApiRequest("completions", {"prompt": prompt})
    first = of.identify(request)
    of.answered(first, request, None, [answer])
    found = of.identify(ApiRequest("completions", {"prompt": prompt + answer + more}))
    assert found.step.workflow == first.step.workflow


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["key-0", "key-1", ""]), st.sampled_from(ENDPOINTS), BODY, HEADERS), max_size=6)
)
def test_workflows_of_two_tenants_are_never_one(requests: list[tuple[str, Endpoint, Any, Any]]) -> None:
    of, owner = identifier(), dict[str, str]()
    for tenant, endpoint, body, headers in requests * 2:
        request = ApiRequest(endpoint, body, headers, tenant)
        identity = of.identify(request)
        of.answered(identity, request, "resp_1", ["The answer to all that was asked."])
        assert tenant_of(identity.step.workflow_id) == tenant
        assert owner.setdefault(identity.step.workflow, tenant) == tenant


@settings(max_examples=150)
@given(st.sampled_from(ENDPOINTS), BODY, HEADERS, st.lists(JSON, max_size=3))
def test_no_json_fails(endpoint: Endpoint, body: Any, headers: Any, answers: list[Any]) -> None:
    counts = EventCounts()
    of = Identifier(counts=counts, most_conversations=10)
    for _ in range(2):
        request = ApiRequest(endpoint, body, headers)
        of.answered(of.identify(request), request, None, answers)
    assert "presage_errors_total" not in counts.by_metric()


def nested(depth: int) -> Any:
    found: Any = "x"
    for _ in range(depth):
        found = [{"content": found}]
    return found


BRACKETS = {"function": {"name": "f", "arguments": "[" * 10**6}}
SURROGATES = [{"role": "user", "content": "\ud800" * 10}, {"role": "system", "content": "\udfff You"}]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"role": "user", "content": "x"}] * 100_000, id="many"),
        pytest.param([{"role": "user", "content": "x y. " * 2_000_000}], id="long"),
        pytest.param([{"role": "system", "content": "X " * 2_000_000}] * 3, id="long-system"),
        pytest.param([{"role": "user", "content": nested(5000)}], id="nested"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}], id="parts"),
        pytest.param([{"role": "assistant", "tool_calls": [BRACKETS] * 9}], id="calls"),
        pytest.param([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested(5000)}]}], id="arguments"),
        pytest.param(SURROGATES, id="surrogates"),
        pytest.param([{"role": "user", "content": float("nan")}, None, [[]], 10**400], id="types"),
    ],
)
def test_hostile_prompts_fail_nothing_and_leave_little(messages: list[Any]) -> None:
    counts = EventCounts()
    of = Identifier(counts=counts, most_conversations=10)
    for endpoint, key in (("chat", "messages"), ("responses", "input"), ("completions", "prompt")):
        request = ApiRequest(endpoint, {"model": "m", key: messages}, {"baggage": "a=" * 100_000})  # type: ignore[arg-type]
        of.answered(of.identify(request), request, "r" * 10**6, messages)
    assert "presage_errors_total" not in counts.by_metric()
    assert sum(of.debug_state().values()) < 1000


@given(st.lists(st.binary(min_size=LEAST_SENTENCE, max_size=2 * LEAST_SENTENCE), max_size=12), st.integers(1, 6))
def test_of_any_text_so_many_sentences_are_read(parts: list[bytes], most: int) -> None:
    kept = sentences(b"\n".join(parts), most)
    assert len(kept) <= most
    assert all(len(sentence) >= LEAST_SENTENCE for sentence in kept)


def test_what_is_nested_deeply_is_not_read() -> None:
    shallow, deep = (json.loads("[" * depth + '"text"' + "]" * depth) for depth in (2, 50))
    for content, text, values in ((shallow, "text", [b"text"]), (deep, "", [])):
        request = ApiRequest("chat", {"messages": [{"role": "system", "content": content}]})
        assert system_text(request, 100) == text
        assert values_of(json.dumps(content).encode()) == values
