"""What SDKs send by themselves, and what the API server observes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from http_routes import Served
from sdk_runs import Sdk, scenarios, truth

from presage.serving_hooks.workflows.observed import Observed

pytestmark = pytest.mark.sdk
SESSION = "57a121ec-f78c-48c3-a745-e3036a3ecc33"

Sent = list[tuple[dict[str, Any], Observed]]
"""Requests, with the agents and workflows that sent them, and what the server observed."""


def sent(sdk: Sdk, scenario: str) -> Sent:
    served = Served()
    found = []
    for one in truth(sdk, scenario)["wire"]:
        headers = {name: value for name, value in one["headers"].items() if name != "content-length"}
        found.append((one, served.observe(json.dumps(one["body"]).encode(), headers, one["path"])))
    assert served.counts.by_key() == {}
    return found


def alike(of: Sequence[object], seen: Sequence[object]) -> bool:
    """Whether both sequences change in the same places."""
    return len(set(zip(of, seen, strict=True))) == len(set(of)) == len(set(seen))


def check_agents(found: Sent) -> None:
    assert all(seen.agent for _, seen in found)
    assert alike([one["agent"] for one, _ in found], [seen.agent for _, seen in found])


ALONE = (
    (Sdk("newest", "langgraph", "openinference"), "agents_and_tools two_runs session"),
    (Sdk("newest", "agents_sdk", "openinference"), "handoff_chat handoff_responses two_runs session"),
    (Sdk("newest", "agents_sdk", "openllmetry"), "handoff_responses two_runs session"),
    (Sdk("newest", "pydantic_ai", "otel"), "delegate_chat delegate_responses handoff two_runs session"),
)


@pytest.mark.parametrize(("sdk", "scenario"), scenarios(*ALONE))
def test_instrumentation_that_only_exports_spans_sends_no_id(sdk: Sdk, scenario: str) -> None:
    """Its spans go to their collector; a session that the application gave it stays there too."""
    found = sent(sdk, scenario)
    check_agents(found)
    assert {(seen.session, seen.conversation, seen.trace, seen.cache_key, seen.response) for _, seen in found} == {
        (None,) * 5
    }


ENCLOSED = (
    # OpenLLMetry's instrumentations of LangChain and of OpenAI's client send the trace themselves, in chats alone.
    (Sdk("newest", "langgraph", "openllmetry"), "agents_and_tools two_runs"),
    (Sdk("newest", "agents_sdk", "openllmetry"), "handoff_chat"),
    (Sdk("newest", "agents_sdk", "openinference+http"), "handoff_chat handoff_responses two_runs"),
    (Sdk("newest", "pydantic_ai", "otel+http"), "delegate_chat delegate_responses two_runs"),
    (Sdk("newest", "pydantic_ai", "logfire+http"), "delegate_chat delegate_responses two_runs"),
)


@pytest.mark.parametrize(("sdk", "scenario"), scenarios(*ENCLOSED))
def test_where_the_trace_is_sent_along_it_is_one_a_run(sdk: Sdk, scenario: str) -> None:
    found = sent(sdk, scenario)
    check_agents(found)
    assert all(seen.trace for _, seen in found)
    assert alike([one["workflow"] for one, _ in found], [seen.trace for _, seen in found])


def test_openinferences_spans_of_langgraph_do_not_enclose_its_requests() -> None:
    found = sent(Sdk("newest", "langgraph", "openinference+http"), "agents_and_tools")
    assert len({seen.trace for _, seen in found}) == len(found) == 4


def test_pydantic_ai_gives_each_agents_run_a_conversation_and_names_its_agents() -> None:
    delegated = sent(Sdk("newest", "pydantic_ai", "otel+http"), "delegate_chat")
    assert [seen.agent for _, seen in delegated] == [one["agent"] for one, _ in delegated]
    assert alike([one["agent"] for one, _ in delegated], [seen.conversation for _, seen in delegated])
    gone_on = sent(Sdk("newest", "pydantic_ai", "otel+http"), "session")
    assert {seen.conversation for _, seen in gone_on} == {"conversation-1"}
    assert len({seen.trace for _, seen in gone_on}) == 2


CLAUDE = Sdk("anthropic", "claude_code", "none")


@pytest.mark.parametrize("scenario", ["until_2_1_77", "since_2_1_78", "since_2_1_86"])
def test_claude_code_names_its_session_and_its_sub_agents_differ(scenario: str) -> None:
    found = sent(CLAUDE, scenario)
    assert {seen.session for _, seen in found} == {SESSION}
    check_agents(found)


def test_a_plain_user_of_anthropics_api_is_no_session() -> None:
    assert {seen.session for _, seen in sent(CLAUDE, "user_alone")} == {None}
