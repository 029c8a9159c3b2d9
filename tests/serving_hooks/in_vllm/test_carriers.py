"""Names in headers and in OpenAI's `metadata` reach the engine; keys that only resemble names are reported to it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from http_routes import CHAT, Served

from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.vllm.http import carriers
from presage.serving_hooks.vllm.http.carriers import LONGEST, Carriers
from presage.serving_hooks.vllm.http.request_sources import RequestSources
from presage.serving_hooks.workflows import metadata
from presage.serving_hooks.workflows.identity import Step, scoped
from presage.serving_hooks.workflows.metadata import LONGEST_KEY, MISTAKES, MOST_KEYS, check, read, warning
from presage.serving_hooks.workflows.observed import OBSERVED, REQUEST
from presage.serving_hooks.workflows.tenants import ANONYMOUS, ARGUMENT
from presage.wording import nearest

NAMES = {"workflow_type": "review", "workflow_id": "r1", "agent": "coder", "step": 2}
STEP = Step("review", "r1", "coder", 2)


HEADERS = {
    "X-Presage-Workflow-Type": "review",
    "X-Presage-Workflow-Id": "r1",
    "X-Presage-Agent": "coder",
    "X-Presage-Step": "2",
}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"vllm_xargs": NAMES}, {}),
        ({"metadata": {**NAMES, "step": "2"}}, {}),
        ({"metadata": json.dumps(NAMES)}, {}),
        ({"app_metadata": {"workflow_type_id": "review", "workflow_id": "r1", "agent_id": "coder", "step": 2}}, {}),
        ({}, HEADERS),
        ({"vllm_xargs": {"agent": "coder"}, "metadata": NAMES}, {"X-Presage-Workflow-Type": "review"}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_names_are_read_from_each_carrier_and_the_body_is_not_touched(
    body: dict[str, Any], headers: dict[str, str], path: str
) -> None:
    served = Served()
    assert served.ask(body, headers, path) == STEP
    assert json.loads(served.bodies[-1]) == {"model": "m", "messages": [], **body}
    assert served.counts.by_key() == {}


def test_arguments_win_over_headers_and_headers_over_metadata() -> None:
    other = {"workflow_type": "other", "workflow_id": "other", "agent": "other", "step": 9}
    served = Served()
    assert served.ask({"vllm_xargs": NAMES, "metadata": other}, {"X-Presage-Agent": "header"}) == STEP
    assert served.ask({"metadata": other}, HEADERS) == STEP
    assert served.ask({"vllm_xargs": {"agent_id": "coder", "session_id": "s"}, "metadata": other}) == Step(
        "other", "s", "coder", 9
    )
    assert served.counts.by_key() == {}


def test_a_workflow_ends_by_a_header_and_by_metadata() -> None:
    served = Served()
    for body, headers in (({}, {"X-Presage-Workflow-End": "true"}), ({"metadata": {"workflow_end": "true"}}, {})):
        step = served.ask({"vllm_xargs": NAMES, **body}, headers)
        assert step is not None
        assert step.last


def test_headers_are_decoded_as_the_gateway_does() -> None:
    step = Served().ask({}, {"X-Presage-Workflow-Id": "r%C3%A9sum%C3%A9%2F1", "X-Presage-Agent": "100%25"})
    assert step == Step("", "résumé/1", "100%")


def test_a_carrier_belongs_to_the_key_of_its_request() -> None:
    served = Served("one", "two")
    forged = {"metadata": {**NAMES, "presage_tenant": "key-0"}}
    of = served.ask(forged, {"Authorization": "Bearer two"})
    assert of is not None
    assert of.workflow_id == scoped("key-1", "r1")
    assert served.ask({}, HEADERS, "/invocations") is None
    assert served.counts.by_key() == {"workflow_id: without a key": 1}


@pytest.mark.parametrize(
    ("body", "headers", "counted", "example"),
    [
        ({"workflow_id": "r1"}, {}, "workflow_id: misplaced", "workflow_id"),
        ({"agent": "coder"}, {}, "agent: misplaced", "agent"),
        ({"extra_body": {"vllm_xargs": NAMES}}, {}, "extra_body: misplaced", "extra_body"),
        ({"vllm_args": NAMES}, {}, "extra_args: misspelt", "vllm_args"),
        ({"workflowId": "r1"}, {}, "workflow_id: misspelt", "workflowId"),
        ({"metadata": {"workflow-id": "r1"}}, {}, "workflow_id: misspelt", "workflow-id"),
        ({"metadata": {"workflow_typ": "review"}}, {}, "workflow_type: misspelt", "workflow_typ"),
        ({"vllm_xargs": {"agent_name": "coder"}}, {}, "agent: misspelt", "agent_name"),
        ({"vllm_xargs": {"Workflow_ID": "r1"}}, {}, "workflow_id: misspelt", "Workflow_ID"),
        ({}, {"X-Workflow-Id": "r1"}, "workflow_id: misspelt", "x-workflow-id"),
        ({"metadata": "review"}, {}, "metadata: wrong type", "metadata"),
        ({"metadata": {"workflow_id": "r\n1"}}, {}, "workflow_id: not printable", "workflow_id"),
        ({"vllm_xargs": {"workflow_id": "r1", "agent_id": "a\n"}}, {}, "agent: not printable", "agent_id"),
    ],
)
def test_what_is_sent_in_vain_is_counted_with_its_key(
    body: dict[str, Any], headers: dict[str, str], counted: str, example: str
) -> None:
    served = Served()
    served.ask(body, headers)
    assert served.counts.by_key()[counted] == 1
    assert served.left_out[counted] == example


def test_what_a_workflow_lacks_is_counted_and_so_are_requests_without_one() -> None:
    served = Served()
    served.ask({"vllm_xargs": {"workflow_id": "r1"}})
    served.ask({"vllm_xargs": {"agent": "coder", "workflow_type": "review"}})
    served.ask({"metadata": {"user": "u1"}})
    served.ask({}, {"X-Session-ID": "s1"})  # a client that knows nothing of us, and is served as a session
    assert served.counts.by_key() == {
        "workflow_type: missing": 1,
        "agent: missing": 1,
        "workflow_id: missing": 1,
        "requests without a workflow": 1,
    }


def test_a_key_that_resembles_a_name_is_no_mistake_beside_the_name() -> None:
    served = Served()
    beside = {"agent_name": "Coder", "workflowId": 7, "session": "s"}
    assert served.ask({"vllm_xargs": NAMES, "metadata": beside, **beside}) == STEP
    assert served.counts.by_key() == {}


@pytest.mark.parametrize("key", ["workflow_id\n", "workflow_id" + "-" * 60, "workflow\x00id"])
def test_an_unsound_key_is_not_shown(key: str) -> None:
    served = Served()
    served.ask({key: "r1", "metadata": {key: "r1"}, "vllm_xargs": {key: "r1"}})
    assert served.left_out == {}


@pytest.mark.vllm
def test_no_field_of_vllms_own_counts_as_a_mistake() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; its fields are read from its models")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    served = Served()
    for path, model in (
        (CHAT, ChatCompletionRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/messages", AnthropicMessagesRequest),
    ):
        assert {"model", "vllm_xargs", "temperature"} <= model.model_fields.keys()
        served.ask({**dict.fromkeys(model.model_fields, None), "vllm_xargs": {}}, {"User-Agent": "agent/1"}, path)
    assert served.left_out == {}


def test_a_client_cannot_report_mistakes_of_others() -> None:
    served = Served()
    assert served.ask({"vllm_xargs": {**NAMES, MISTAKES: {"extra_body": ["misplaced", "forged"]}}}) == STEP
    assert served.counts.by_key() == {}
    for forged in (
        {"agent": 1},
        {"agent": ["no reason", "a"]},
        {"who": ["missing", "a"]},
        {"agent": ["missing", 1]},
        1,
    ):
        check({"workflow_type": "t", "workflow_id": "r1", MISTAKES: forged}, None, served.counts)
    assert served.counts.by_key() == {"agent: missing": 5}


def test_a_body_that_is_too_long_to_be_read_is_served() -> None:
    served = Served()
    assert served.ask({"metadata": NAMES, "prompt": "x" * LONGEST}) is None
    assert served.ask({"metadata": NAMES, "prompt": "x" * LONGEST}, HEADERS) == STEP


class Watched(dict[Any, Any]):
    """A client's arguments that are asked for by name only."""

    def __iter__(self) -> Any:
        raise AssertionError("walked over")

    keys = values = items = copy = __iter__


@pytest.mark.parametrize("nested", [False, True])
def test_the_engine_asks_for_names_and_walks_over_nothing_of_a_client(nested: bool) -> None:
    counts, sent = EventCounts(), Watched({**NAMES, "agent": "", "workflowId": "r2", "workflow_end": "x" * 100})
    arguments = Watched({"app_metadata": sent, MISTAKES: Watched({"agent": ("misspelt", "agnt")})}) if nested else sent
    assert read(arguments, None, counts) == Step("review", "r1", "", 2)
    check(arguments, None, counts)
    assert counts.by_key() == {
        "workflow_end: neither true nor false": 1,
        "agent: misspelt" if nested else "agent: missing": 1,
    }


@pytest.mark.parametrize("choices", [1, 8])
def test_few_keys_of_a_request_are_compared_with_names_and_once(monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    compared: list[str] = []

    def counting(key: str, known: Iterable[str]) -> str | None:
        compared.append(key)
        return nearest(key, known)

    for module in (carriers, metadata):
        monkeypatch.setattr(module, "nearest", counting)
    odd = {f"workflow_{choices}i{number}": "x" for number in range(2_000)} | {"workflow" + 5_000 * "i": "x"}
    headers = [(f"x-workflow-{choices}i{number}".encode(), b"x") for number in range(5_000)]
    one = Carriers(CHAT, [*headers, (b"x-workflow" + 5_000 * b"i", b"x")], RequestSources())
    one.received({"type": "http.request", "body": json.dumps({"metadata": odd, **odd}).encode()})
    for _ in range(choices):
        params = SimpleNamespace(extra_args={**NAMES, **odd})
        one.generates(params, None)
    assert 0 < len(set(compared)) <= MOST_KEYS
    assert max(map(len, compared)) <= LONGEST_KEY
    assert len(compared) <= 2 * MOST_KEYS
    assert params.extra_args == {**NAMES, **odd}


def test_an_object_that_is_too_long_for_names_is_counted() -> None:
    served = Served()
    assert served.ask({"metadata": {**NAMES, "more": "x" * 2**16}}) is None
    assert served.counts.by_key()["metadata: too long"] == 1


@pytest.mark.parametrize("failing", ["carriers.generates", "mark", "name_unnamed", "answers.generates"])
@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_if_marking_fails_a_client_keeps_its_own_arguments_and_is_of_no_tenant(
    monkeypatch: pytest.MonkeyPatch, failing: str, keys: tuple[str, ...]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(f"presage.serving_hooks.vllm.http.plugin.{failing}", fails)
    served, own = Served(*keys), {**NAMES, "repetition": 3}
    forged = {ARGUMENT: "key-0", MISTAKES: {}, OBSERVED: {}, REQUEST: "r"}
    body, headers = {"vllm_xargs": {**own, **forged}}, {"Authorization": "Bearer two"}
    assert served.sent(body, headers, CHAT)[0] == ({**own, ARGUMENT: ANONYMOUS} if keys else own)
    assert served.ask(body, headers) == (None if keys else STEP)


def test_the_warning_names_the_key_found_and_the_key_wanted() -> None:
    assert warning("workflow_id", "misspelt", "workflowId") == (
        "a client sends `workflowId`, which is not read; send `workflow_id` in `vllm_xargs`, in `metadata` or in a "
        "header (docs/serving.md#what-a-client-sends)"
    )
    assert "without `agent`" in warning("agent", "missing", "")
    assert "`agent_id` of a request is left out: not printable" in warning("agent", "not printable", "agent_id")
