"""Requests of one workflow are recognised as such, those of another one or of another tenant never."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from presage.gateway.metrics import GatewayMetrics
from presage.serving_hooks.counts import EventCounts
from presage.serving_hooks.identity.identifier import Identifier, Identity
from presage.serving_hooks.identity.request import ApiRequest, Endpoint
from presage.serving_hooks.status import EngineStatus
from presage.serving_hooks.workflows import EndReason, Workflow
from presage.serving_hooks.workflows.identity import Step, scoped

SYSTEM = {"role": "system", "content": "You are a planner. Today is Monday, 2 March 2026, 10:31."}
LATER = {"role": "system", "content": "You are a planner. Today is Monday, 2 March 2026, 10:44."}
OTHER = {"role": "system", "content": "You settle refunds. Be brief and kind."}
TASK = "The nightly export of invoices fails for customers without an address."
PLAN = "First reproduce the failure with an empty address, then guard the formatter."
CHINESE = "\u3002".join("".join(chr(0x4E00 + 97 * line + at) for at in range(14)) for line in range(6))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
Message = Mapping[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Gateway:
    """An identifier, and requests to it."""

    def __init__(self, most: int = 100) -> None:
        self.counts = EventCounts()
        self.identifier = Identifier(counts=self.counts, most_conversations=most)

    def sent(
        self,
        *messages: Message,
        answers: tuple[Any, ...] = (),
        response: str | None = None,
        endpoint: Endpoint = "chat",
        headers: Mapping[str, str] | None = None,
        tenant: str = "",
        at_s: float = 0.0,
        **body: Any,
    ) -> Identity:
        if endpoint != "completions":
            body["messages" if endpoint == "chat" else "input"] = list(messages)
        request = ApiRequest(endpoint, {"model": "m", **body}, headers or {}, tenant, at_s)
        identity = self.identifier.identify(request)
        if answers or response:
            self.identifier.answered(identity, request, response, answers)
        return identity


def same(*identities: Identity) -> bool:
    return len({of.step.workflow for of in identities}) == 1


def test_a_prompt_that_goes_on_from_prompt_and_answer_is_of_its_workflow() -> None:
    gateway = Gateway()
    first = gateway.sent(SYSTEM, user(TASK), answers=(assistant(PLAN),))
    later = gateway.sent(LATER, user(TASK), assistant(f" {PLAN}\n"), user("Go on."))
    assert (first.workflow_source, later.workflow_source) == ("new", "continuation")
    assert same(first, later)
    assert first.step.agent == later.step.agent
    assert later.workflow_confidence > 0.9


def test_tool_calls_are_compared_by_name_and_arguments_whatever_their_layout_and_ids() -> None:
    gateway = Gateway()
    answer = {"role": "assistant", "content": None, "tool_calls": [{"name": "grep", "arguments": '{"q":"x","n":1}'}]}
    call = {"id": "other", "type": "function", "function": {"name": "grep", "arguments": '{ "n": 1, "q": "x" }'}}
    first = gateway.sent(user("Hi"), answers=(answer,))
    sent_back = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert same(
        first, gateway.sent(user("Hi"), sent_back, {"role": "tool", "content": "none", "tool_call_id": "other"})
    )


def test_the_same_prompt_again_is_another_workflow_unless_the_client_says_that_it_retries() -> None:
    gateway = Gateway()
    first, again = gateway.sent(SYSTEM, user(TASK)), gateway.sent(SYSTEM, user(TASK))
    assert not same(first, again)
    assert same(again, gateway.sent(SYSTEM, user(TASK), headers={"x-stainless-retry-count": "1"}))
    assert not same(again, gateway.sent(SYSTEM, user(TASK), headers={"x-stainless-retry-count": "0"}))


def test_workflows_with_one_template_are_told_apart_by_their_answers() -> None:
    gateway = Gateway()
    answers = [f"The answer of workflow number {at}." for at in range(12)]
    begun = [gateway.sent(SYSTEM, user("Begin."), answers=(assistant(answer),)) for answer in answers]
    assert len({of.step.workflow for of in begun}) == 12
    for first, answer in zip(begun[::-1], answers[::-1], strict=True):
        assert same(first, gateway.sent(SYSTEM, user("Begin."), assistant(answer), user("Go on.")))


def test_of_workflows_with_one_answer_each_is_gone_on_from_once_and_the_doubt_is_given() -> None:
    gateway = Gateway()
    begun = [gateway.sent(user("Begin."), answers=(assistant("Yes."),)) for _ in range(3)]
    later = [gateway.sent(user("Begin."), assistant("Yes."), user(f"Then {at}.")) for at in range(3)]
    assert sorted(of.step.workflow for of in later) == sorted(of.step.workflow for of in begun)
    assert all(of.workflow_confidence < 0.5 for of in later)


def test_of_several_answers_each_may_be_gone_on_from_and_branches_stay_in_their_workflow() -> None:
    gateway = Gateway()
    first = gateway.sent(user(TASK), answers=(assistant("A."), assistant("B.")))
    later = [gateway.sent(user(TASK), assistant(one), user(f"Try {one}")) for one in ("A.", "B.", "A.", "A.")]
    assert same(first, *later)


@pytest.mark.parametrize("turns", [3, 60])
def test_a_conversation_goes_on_after_its_beginning_was_truncated(turns: int) -> None:
    gateway, history = Gateway(), [user(TASK)]
    found = []
    for at in range(turns):
        answer = assistant(f"Step {at} of this repair is to look at module {at * 7} and its tests.")
        found.append(gateway.sent(SYSTEM, *history, answers=(answer,)))
        history += [answer, user(f"And {at}?")]
    assert same(*found, gateway.sent(SYSTEM, *history[-5:]))


def test_a_conversation_goes_on_from_its_summary() -> None:
    gateway = Gateway()
    first = gateway.sent(SYSTEM, user(TASK), answers=(assistant(PLAN),))
    summary = (
        "The user wants invoices without address. A guard in the formatter is planned, and a test of it after that."
    )
    asked = gateway.sent(SYSTEM, user(TASK), assistant(PLAN), user("Summarise."), answers=(assistant(summary),))
    assert same(first, asked, gateway.sent(SYSTEM, user(f"Summary of what was said:\n{summary}\n\nGo on.")))


def test_a_reminder_that_is_gone_in_the_next_prompt_does_not_matter() -> None:
    gateway, history = Gateway(), [user(TASK)]
    found = []
    for at in range(5):
        reminded = user(f"{history[-1]['content']}\n<reminder>It is {at} o'clock.</reminder>")
        answer = assistant(f"I look at the file {at} of the exporter and its tests.")
        found.append(gateway.sent(SYSTEM, *history[:-1], reminded, answers=(answer,)))
        history += [answer, user(f"Result {at}")]
    assert same(*found)


def test_agents_that_hand_texts_on_are_of_one_workflow() -> None:
    gateway, coder = Gateway(), {"role": "system", "content": "You are a coder."}
    plan = f"1. {PLAN}\n2. Then write a test with an address of white space alone."
    planned = gateway.sent(SYSTEM, user(TASK), answers=(assistant(plan),))
    coded = gateway.sent(coder, user(f"Write the code for this plan:\n{plan}\nNothing else."))
    assert same(planned, coded)
    assert planned.step.agent != coded.step.agent


@pytest.mark.parametrize(
    ("plan", "passed_on"),
    [
        pytest.param(CHINESE, "\u3002".join(CHINESE.split("\u3002")[1:4]), id="chinese"),
        pytest.param(f"{PLAN}\n{TASK}", json.dumps({"plan": f"{PLAN}\n{TASK}"}), id="json"),
        pytest.param(f"{TASK[:-1]}! {PLAN[:-1]}?", f"> {PLAN[:-1]}? {TASK[:-1]}! Go.", id="marks"),
    ],
)
def test_sentences_are_found_in_other_scripts_and_in_json(plan: str, passed_on: str) -> None:
    gateway = Gateway()
    planned = gateway.sent(SYSTEM, user("Begin."), answers=(assistant(plan),))
    assert same(planned, gateway.sent(OTHER, user(f"Do this:\n{passed_on}\nNothing else.")))


def test_a_sub_agent_is_found_by_the_argument_of_the_call_that_began_it() -> None:
    gateway = Gateway()
    call = {"name": "delegate", "arguments": '{"to": "search", "task": "find all unpaid invoices"}'}
    first = gateway.sent(SYSTEM, user(TASK), answers=({"role": "assistant", "tool_calls": [call]},))
    child = {"role": "system", "content": "You search."}
    assert same(first, gateway.sent(child, user("find all unpaid invoices")))
    assert not same(first, gateway.sent(child, user("search")))  # too short to mean anything


def test_what_an_answer_only_repeats_of_its_prompt_identifies_nothing() -> None:
    gateway = Gateway()
    rule = "Answer in the language of the question and name your sources in full."
    first = gateway.sent(SYSTEM, user(f"{rule}\n{TASK}"), answers=(assistant(f"{rule}\nYes."),))
    assert not same(first, gateway.sent(user(f"{rule}\nWhich invoices are open?")))


def test_prompts_of_the_completions_api() -> None:
    gateway = Gateway()
    prompt = "Question: why does the export fail?\nThought:"
    first = gateway.sent(endpoint="completions", prompt=prompt, answers=({"content": " the address is empty\nAct"},))
    later = f"{prompt} the address is empty\nAction: look\n"
    assert same(first, gateway.sent(endpoint="completions", prompt=later))
    assert not same(first, gateway.sent(endpoint="completions", prompt=prompt))
    tokens = list(range(300))
    first = gateway.sent(endpoint="completions", prompt=tokens)
    assert same(first, gateway.sent(endpoint="completions", prompt=[*tokens, 7, 8]))


def test_the_responses_api_by_response_id_and_by_items() -> None:
    gateway = Gateway()
    said = [
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": PLAN}]},
        {"type": "function_call", "name": "run", "call_id": "call_1", "arguments": "{}"},
    ]
    first = gateway.sent(user(TASK), endpoint="responses", answers=tuple(said), response="resp_1")
    by_id = gateway.sent(user("Go on."), endpoint="responses", previous_response_id="resp_1")
    done = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}
    by_items = gateway.sent(user(TASK), *said[1:], done, endpoint="responses")
    assert (by_id.workflow_source, by_items.workflow_source) == ("response", "continuation")
    assert same(first, by_id, by_items)
    assert gateway.sent(user("x"), endpoint="responses", previous_response_id="resp_2").workflow_source == "new"


def test_a_handoff_that_passes_on_a_tools_result_without_its_call_stays_in_its_workflow() -> None:
    """The requests of AutoGen's Swarm: the second agent gets the result as a message of the first."""
    gateway = Gateway()
    handed_over = user("Transferred to refunds, adopting the role of refunds immediately.")
    begun, later = [], []
    for at in range(3):  # all at the same time, with the same question
        begun.append(gateway.sent(SYSTEM, user(TASK), answers=(_call(at),)))
    for at in range(3):
        result = {"role": "tool", "content": f"Order {at} was sent to {at} Harbour Road.", "tool_call_id": f"c{at}"}
        assert same(begun[at], gateway.sent(SYSTEM, user(TASK), _call(at), result))
        later.append(gateway.sent(OTHER, user(TASK), user(result["content"]), handed_over))
    assert [of.step.workflow for of in later] == [of.step.workflow for of in begun]
    failed = {"role": "tool", "content": "The archive is closed today.", "tool_call_id": "c9"}
    for at in range(2):
        gateway.sent(SYSTEM, user(f"{TASK} {at}"), answers=(_call(at + 10),))
        gateway.sent(SYSTEM, user(f"{TASK} {at}"), _call(at + 10), failed)
    of_two = gateway.sent(OTHER, user(str(failed["content"])), handed_over)
    assert of_two.workflow_source == "new"  # two workflows have this result


def _call(at: int) -> Message:
    call = {"id": f"c{at}", "type": "function", "function": {"name": "order", "arguments": json.dumps({"number": at})}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


GREETING = "Hello! How can I help you today?"


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((user("Hi"), assistant(GREETING), user("Where is my order?")), id="greeting"),
        pytest.param((user("Hi"), _call(7), {"role": "tool", "tool_call_id": "c7", "content": PLAN}), id="result"),
        pytest.param((_call(7), {"role": "tool", "tool_call_id": "c7", "content": PLAN}, assistant("?")), id="earlier"),
        pytest.param((user("Hi"), _call(7), {"role": "function", "name": "order", "content": PLAN}), id="legacy"),
        pytest.param(
            (user("Hi"), {"type": "custom_tool_call_output", "call_id": "c7", "output": PLAN}), id="responses"
        ),
    ],
)
def test_a_history_that_began_elsewhere_is_not_joined_by_what_many_hold(later: tuple[Message, ...]) -> None:
    """After a restart, or hours later: another workflow has this greeting, or called this tool with this result."""
    gateway = Gateway()
    gateway.sent(SYSTEM, user(TASK), answers=(assistant(GREETING),))
    asked = (SYSTEM, user(TASK), assistant(GREETING), user("Look it up."))
    gateway.sent(*asked, answers=(_call(1),))
    gateway.sent(*asked, _call(1), {"role": "tool", "tool_call_id": "c1", "content": PLAN})
    assert gateway.sent(SYSTEM, *later).workflow_source == "new"


def test_ids_of_tool_calls_survive_any_change_of_the_texts() -> None:
    gateway, drawn = Gateway(), "chatcmpl-tool-9f8e7d6c5b4a39281706"
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": drawn, "name": "f", "arguments": "{}"}]}
    first = gateway.sent(user(TASK), answers=(answer,))
    assert same(first, gateway.sent(user("[cut]"), {"role": "tool", "tool_call_id": drawn, "content": "1"}))


NAMES = {"workflow_id": "w1", "workflow_type": "review", "agent": "coder"}
WITHOUT_ID = {"workflow_type": "review", "agent": "coder"}


@pytest.mark.parametrize(
    ("body", "headers", "source"),
    [
        ({"vllm_xargs": NAMES}, {}, "explicit"),
        ({"vllm_xargs": json.dumps(NAMES)}, {}, "explicit"),
        ({"app_metadata": {"workflow_id": "w1", "workflow_type_id": "review", "agent_id": "coder"}}, {}, "explicit"),
        ({"extra_body": {"app_metadata": NAMES}}, {}, "explicit"),
        ({"vllm_xargs": {"agentic_context": json.dumps(NAMES)}}, {}, "explicit"),
        ({"agentic_context": NAMES}, {}, "explicit"),
        ({"metadata": NAMES}, {}, "explicit"),
        ({"vllm_xargs": NAMES, "metadata": {"workflow_id": "w2"}}, {"x-session-id": "w3"}, "explicit"),
        ({"vllm_xargs": WITHOUT_ID}, {"x-session-id": "w1"}, "session"),
        ({"metadata": WITHOUT_ID, "session_id": "w1"}, {}, "session"),
        ({"metadata": WITHOUT_ID, "conversation": {"id": "w1"}}, {}, "session"),
        ({"metadata": {**WITHOUT_ID, "session_id": "w1"}}, {}, "session"),
    ],
)
def test_names_that_clients_send(body: dict[str, Any], headers: dict[str, str], source: str) -> None:
    found = Gateway().sent(user("Hi"), headers=headers, **body)
    assert found.step == Step("review", "w1", "coder")
    assert (found.workflow_source, found.agent_source, found.agent_confidence) == (source, "explicit", 1.0)


def test_a_user_is_no_workflow_and_a_cache_key_only_if_drawn_at_random() -> None:
    gateway = Gateway()
    for body in ({"user": "u1"}, {"prompt_cache_key": "my-application"}):
        assert not same(gateway.sent(user("A"), **body), gateway.sent(user("B"), **body))
    body = {"prompt_cache_key": "0198c5c4-11d0-7c31-b0a5-6d0c2a41f9be"}
    assert same(gateway.sent(user("A"), **body), gateway.sent(user("B"), **body))


def test_one_trace_is_one_workflow_and_a_client_that_draws_one_for_each_request_is_recognised_too() -> None:
    gateway = Gateway()

    def traced(trace: str, span: int) -> dict[str, str]:
        return {"traceparent": f"00-{trace}-{span:016x}-01"}

    first = gateway.sent(SYSTEM, user(TASK), headers=traced(TRACE, 1), answers=(assistant(PLAN),))
    other = gateway.sent(user("Another agent, nothing in common."), headers=traced(TRACE, 2))
    assert same(first, other)
    assert (first.workflow_source, other.workflow_source) == ("trace", "trace")
    later = gateway.sent(SYSTEM, user(TASK), assistant(PLAN), user("Go on."), headers=traced("a" * 32, 3))
    assert (later.workflow_source, same(first, later)) == ("continuation", True)


def test_the_baggage_of_a_trace_names_session_application_and_agent() -> None:
    headers = {"baggage": "session.id=s%201;x=y, service.name=shop,gen_ai.agent.name=clerk"}
    found = Gateway().sent(user("Hi"), headers=headers)
    assert (found.step, found.workflow_source, found.agent_source) == (Step("shop", "s 1", "clerk"), "session", "trace")


def test_an_agent_that_another_one_calls_is_of_its_workflow_though_it_has_a_conversation_of_its_own() -> None:
    """As pydantic-ai sends them with OpenTelemetry's instrumentation of its HTTP client."""

    def headers(conversation: str, trace: str) -> dict[str, str]:
        return {"traceparent": f"00-{trace}-{1:016x}-01", "baggage": f"gen_ai.conversation.id={conversation}"}

    gateway = Gateway()
    planner = gateway.sent(SYSTEM, user(TASK), headers=headers("c1", TRACE))
    coder = gateway.sent(OTHER, user("A guard, please."), headers=headers("c2", TRACE))
    later = gateway.sent(SYSTEM, user("And now?"), headers=headers("c1", "a" * 32))
    assert [found.workflow_source for found in (planner, coder, later)] == ["session", "trace", "session"]
    assert same(planner, coder)
    assert same(planner, later)


def test_a_workflow_keeps_its_type_whichever_agent_asks_and_whoever_names_it() -> None:
    gateway, other = Gateway(), {"role": "system", "content": "You are a reviewer of contracts."}
    body = {"vllm_xargs": {"workflow_id": "w1"}}
    first, second = gateway.sent(SYSTEM, user("A"), **body), gateway.sent(other, user("B"), **body)
    assert same(first, second)
    assert first.step.workflow_type.startswith("app-")
    assert first.step.agent != second.step.agent
    sent = gateway.sent(user("A"), vllm_xargs={"workflow_id": "w2", "workflow_type": "t"}, answers=(assistant(PLAN),))
    assert same(sent, gateway.sent(user("A"), assistant(PLAN), user("B")))  # the names are left out


def test_a_forged_id_of_another_tenant_identifies_nothing() -> None:
    gateway = Gateway()
    sent = {
        "headers": {"traceparent": f"00-{TRACE}-{1:016x}-01", "x-session-id": "s1"},
        "prompt_cache_key": "0198c5c4-11d0-7c31-b0a5-6d0c2a41f9be",
        "previous_response_id": "resp_1",
    }
    mine = gateway.sent(user(TASK), tenant="key-0", answers=(assistant(PLAN),), response="resp_1", **sent)
    for forged in (sent, sent | {"headers": {"traceparent": sent["headers"]["traceparent"]}}, sent | {"headers": {}}):
        theirs = gateway.sent(user(TASK), assistant(PLAN), user("Go on."), tenant="key-1", **forged)
        assert not same(mine, theirs)
        assert theirs.step.workflow_id.startswith(scoped("key-1", ""))


def test_requests_without_a_key_are_never_joined() -> None:
    gateway = Gateway()
    body = {"vllm_xargs": {"workflow_id": "w1"}}
    found = [gateway.sent(user(TASK), tenant="anonymous", answers=(assistant(PLAN),), **body) for _ in range(2)]
    assert not same(*found)
    assert gateway.identifier.debug_state()["conversations"] == 0


def test_an_ended_workflow_is_forgotten_and_no_late_answer_brings_it_back() -> None:
    gateway = Gateway()
    for tenant in ("", "key-1"):
        request = ApiRequest("chat", {"messages": [SYSTEM, user(TASK)]}, {"x-session-id": "s"}, tenant)
        identity = gateway.identifier.identify(request)
        gateway.identifier.answered(identity, request, "r", [assistant(PLAN)])
        gateway.sent(endpoint="completions", prompt=TASK * 9, tenant=tenant, headers={"x-session-id": "s"})
        gateway.identifier.ended(Workflow(identity.step, 0.0, 0.0), EndReason.FINISHED)
        gateway.identifier.answered(identity, request, "r", [assistant(PLAN)])
    state = gateway.identifier.debug_state()
    assert (state["conversations"], state["conversation_digests"], state["conversation_tails"]) == (0, 0, 0)


def test_a_workflow_that_fell_silent_goes_on_from_its_answer_or_with_its_ids_and_no_other_by_its_texts() -> None:
    """A human answers hours later, in another process that has the history."""
    gateway = Gateway()
    first = gateway.sent(SYSTEM, user(TASK), answers=(assistant(PLAN),))
    gateway.identifier.ended(Workflow(first.step, 0.0, 0.0), EndReason.EXPIRED)
    assert gateway.sent(OTHER, user(f"Judge this plan:\n{PLAN} {PLAN}"), at_s=2e4).workflow_source == "new"
    resumed = gateway.sent(SYSTEM, user(TASK), assistant(PLAN), user("Granted."), at_s=2e4)
    assert same(first, resumed)
    assert resumed.goes_on_from == first.number


def test_memory_is_bounded_and_a_tenant_has_a_share() -> None:
    gateway = Gateway(most=8)
    quiet = gateway.sent(user(TASK), tenant="key-0", answers=(assistant(PLAN),))
    for at in range(50):
        gateway.sent(user(f"Task {at}"), tenant="key-1", answers=(assistant(f"Answer {at}"),))
    assert gateway.identifier.debug_state()["conversations"] == 3
    assert same(quiet, gateway.sent(user(TASK), assistant(PLAN), user("Go on."), tenant="key-0"))
    for at in range(50):
        gateway.sent(user(f"Task {at}"), tenant=f"key-{at}")
    assert gateway.identifier.debug_state()["conversations"] == 8


def test_identities_are_counted_and_exported_by_their_sources() -> None:
    gateway = Gateway()
    gateway.sent(SYSTEM, user(TASK), answers=(assistant(PLAN),))
    gateway.sent(SYSTEM, user(TASK), assistant(PLAN), user("Go on."))
    page = GatewayMetrics(lambda: EngineStatus(counted=gateway.counts.by_metric())).page(0, 0).decode()
    assert 'presage_gateway_identities_total{agent="fingerprint",workflow="continuation"} 1.0' in page


ROUTER = {"role": "system", "content": "Name the department that answers this question, in one word."}
EXPERT = {"role": "system", "content": "You are the billing department; you know everything about invoices."}


def test_a_question_that_a_router_hands_on_is_of_its_workflow() -> None:
    gateway = Gateway()
    for _ in range(3):  # runs of one question, each of its own
        router = gateway.sent(ROUTER, user(TASK), answers=(assistant("billing"),))
        expert = gateway.sent(EXPERT, user(TASK), answers=(assistant(PLAN),))
        assert router.workflow_source == "new"
        assert same(router, expert)
        assert router.step.agent != expert.step.agent
    assert gateway.identifier.debug_state()["conversations"] == 3


def test_a_question_that_another_agent_gets_much_later_or_that_is_short_begins_a_workflow() -> None:
    gateway = Gateway()
    for begun_s, later_s, joins in ((1000.0, 1061.0, False), (2000.0, 2059.0, True)):
        first = gateway.sent(ROUTER, user(f"{TASK} {begun_s}"), at_s=begun_s)
        assert same(first, gateway.sent(EXPERT, user(f"{TASK} {begun_s}"), at_s=later_s)) is joins
    assert not same(gateway.sent(ROUTER, user("Go on, please.")), gateway.sent(EXPERT, user("Go on, please.")))
    assert not same(gateway.sent(user(PLAN)), gateway.sent(user(PLAN)))  # no system prompts: one agent, or unknown


def test_runs_with_the_same_answers_are_told_apart_by_the_agents_that_are_still_to_come() -> None:
    gateway = Gateway()
    for _ in range(3):
        first = gateway.sent(SYSTEM, user(TASK), answers=(assistant(PLAN),))
        assert first.workflow_source == "new"
        assert same(first, gateway.sent(EXPERT, user(PLAN), answers=(assistant("Done, as planned."),)))


def test_a_short_prompt_is_sent_again_by_a_library_that_marks_it() -> None:
    gateway = Gateway()
    first = gateway.sent(user("Hello!"))
    assert same(first, gateway.sent(user("Hello!"), headers={"x-stainless-retry-count": "1"}))
    assert not same(first, gateway.sent(user("Hello!")))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_prompt_that_only_fills_the_cache_joins_no_sessions(endpoint: Endpoint) -> None:
    gateway, template = Gateway(), f"{TASK} {PLAN} " * 8

    def session(text: str, *more: Message) -> Identity:
        if endpoint == "completions":
            return gateway.sent(endpoint=endpoint, prompt=template + text, answers=(f"{text}: {PLAN}",))
        said = (user(template), *((user(text),) if text else ()), *more)
        return gateway.sent(*said, answers=([assistant(f"{text} is done, and nothing is left to do.")],))

    session("")
    found = [session(f"Customer {n} has no address.").step.workflow_id for n in range(10)]
    assert len(set(found)) == 10, "at most one is taken for what follows"
    assert [session(f"Customer {n} has no address.").step.workflow_id for n in range(1)] == found[:1]


QUESTION = "Why has the checkout been slow since the release of Monday night?"
PLANNER = {"role": "system", "content": "You plan the work on incidents."}
RESEARCHER = {"role": "system", "content": "You research one topic with your tools and answer in one paragraph."}


def test_a_question_inside_another_agents_template_is_of_the_workflow_that_began_with_it() -> None:
    gateway = Gateway()
    first = gateway.sent(PLANNER, user(QUESTION), answers=(assistant("logs, metrics"),))
    other = gateway.sent(PLANNER, user("How many parcels of Friday are still in the warehouse of Hamburg?"))
    told = [
        gateway.sent(RESEARCHER, user(f'Question of Customer-3: "{QUESTION}"\nLook into: {topic}'))
        for topic in ("logs", "metrics")
    ]
    under = gateway.sent({"role": "system", "content": f"You criticise answers to {QUESTION}"}, user("A draft."))
    assert same(first, *told, under)
    assert not same(first, other)
    assert {identity.workflow_source for identity in told} == {"continuation"}


@pytest.mark.parametrize(
    "later",
    [
        {"at_s": 1000.0},
        {"tenant": "b"},
        {"text": f"{QUESTION} Answer in German."},  # the planner is asked again
        {"text": f"Plan this: {QUESTION.replace('Monday', 'Tuesday')}"},
        {"text": QUESTION.replace(" night?", "")},
    ],
)
def test_what_only_resembles_an_opening_begins_a_workflow(later: dict[str, Any]) -> None:
    gateway = Gateway()
    first = gateway.sent(PLANNER, user(QUESTION), tenant="a")
    text = later.pop("text", None)
    asked = (PLANNER, user(text)) if text else (RESEARCHER, user(f"Look into this: {QUESTION}"))
    assert not same(first, gateway.sent(*asked, **{"tenant": "a", **later}))


def test_a_question_that_two_have_at_a_time_tells_neither() -> None:
    gateway = Gateway()
    both = [gateway.sent(PLANNER, user(QUESTION)) for _ in range(2)]
    told = gateway.sent(RESEARCHER, user(f"Look into the logs: {QUESTION}"))
    assert told.workflow_source == "new"
    assert not any(same(told, identity) for identity in both)


@pytest.mark.parametrize(
    "form", ["What does it say on liability of the carrier?\n\n{}", "{}\n\nWho signed it, and when?"]
)
def test_two_applications_that_ask_about_one_document_are_not_joined(form: str) -> None:
    gateway, document = Gateway(), " ".join(f"Clause {n} binds party {n * 7} to goods {n * 13}." for n in range(60))
    first = gateway.sent(PLANNER, user(form.format(document)))
    assert not same(first, gateway.sent(RESEARCHER, user(f"Extract all names of this text:\n{document}")))


def test_templates_of_a_word_show_once_several_workflows_have_them() -> None:
    gateway = Gateway()
    for number in range(3):
        ticket = f"Order {number} of customer {number * 17} has not arrived at the depot in {'ABC'[number]}-town yet."
        first = gateway.sent(user(f"Classify: {ticket}\nBe brief."), at_s=float(number))
        later = gateway.sent(user(f"Answer this ticket.\n{ticket}"), at_s=float(number))
        assert same(first, later) == (number > 0)  # of the first, nobody could say what is template
        assert first.step.workflow_type == later.step.workflow_type


def test_a_template_around_the_whole_conversation_and_the_bare_question_are_of_one_workflow() -> None:
    """AutoGen: a model selects who speaks; the speakers get the messages themselves, with results of others' tools."""
    gateway = Gateway()
    roles = "These roles are available:\nresearcher: looks things up\nwriter: writes reports\n"
    asks = "\n\nWho speaks next? Name the role alone."
    selects = gateway.sent(user(f"{roles}\nuser: {QUESTION}{asks}"), answers=(assistant("researcher"),))
    speaks = gateway.sent(RESEARCHER, user(QUESTION), answers=(_call(1),))
    other = gateway.sent(user(f"{roles}\nuser: How many parcels are still in the warehouse of Hamburg?{asks}"))
    again = gateway.sent(user(f"{roles}\nuser: {QUESTION}\nresearcher: 17 articles{asks}"))
    writes = gateway.sent(EXPERT, user(QUESTION), user("17 articles"))
    assert same(selects, speaks, again, writes)
    assert not same(selects, other)


def test_the_next_run_of_an_agent_with_a_template_is_not_joined_by_the_template() -> None:
    """DSPy: its template, of which the first run shows no edge, and steps of that run that were not recognised."""
    gateway = Gateway()
    ends = "\n\nRespond with the fields, starting with the field reasoning, then titles, and end with the mark done."
    for number in range(3):
        question = f"Why did engine {number} of depot {'ABC'[number]} stop after its check of Monday?"
        asks = user(f"## question ##\n{question}{ends}")
        assert gateway.sent(PLANNER, asks).workflow_source == "new"
        for title in ("one", "two"):
            gateway.sent(RESEARCHER, user(f"## question ##\n{question}\n## title ##\n{title}\nWrite a section."))


def test_an_agent_is_found_by_the_short_argument_of_the_call_that_began_it_inside_its_template() -> None:
    """smolagents: a managed agent gets the task on a line of its own."""
    gateway, task = Gateway(), "Find the price of tin in 1913"
    call = {"id": "c1", "function": {"name": "searcher", "arguments": json.dumps({"task": task})}}
    first = gateway.sent(PLANNER, user(QUESTION), answers=({"role": "assistant", "tool_calls": [call]},))
    under = user(f"You're a helpful agent named 'searcher'.\n---\nTask:\n{task}\n---\nReport to your manager.")
    assert same(first, gateway.sent(RESEARCHER, under))
    assert not same(first, gateway.sent(RESEARCHER, user(str(under["content"]).replace("1913", "1914"))))


def test_what_other_agents_wrote_into_a_system_prompt_makes_no_other_agent() -> None:
    """Google ADK: an instruction with placeholders for what agents before it have said."""
    gateway, names = Gateway(), set()
    for number in range(4):
        said = [f"Part {part} of run {number} costs {number * 91 + part} euros more than planned." for part in range(6)]
        gateway.sent(PLANNER, user(f"{QUESTION} {number}"), answers=(assistant(" ".join(said)),))
        system = f"Join both into one report.\nFindings: {' '.join(said)}\nYour name is joiner."
        names.add(gateway.sent({"role": "system", "content": system}, user("Begin.")).step.agent)
    assert len(names) == 1
