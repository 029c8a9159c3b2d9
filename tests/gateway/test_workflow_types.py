"""The setting `workflow_type`: what workflows are called whose clients name no type."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_apps import Sent
from served import Seen, before
from starlette.responses import JSONResponse

CHAT = "/v1/chat/completions"
SETTING = {
    "default": "support",
    "tenants": {"key-1": "research"},
    "routes": {"/desk": "desk", "/desk/night": "night"},
    "header": "X-Application",
}


def reply(_: Seen) -> JSONResponse:
    message = {"role": "assistant", "content": "It is at the harbour of the town, and leaves in the evening."}
    return JSONResponse({"id": "c", "model": "m", "choices": [{"index": 0, "message": message}], "usage": {}})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sends a question; returns its workflow type, workflow and the path that the server got."""
    monkeypatch.setenv("GATEWAY_KEYS", "one,two")
    with before(reply, workflow_type=SETTING, keys_variable="GATEWAY_KEYS") as (url, server, front):
        sent = Sent(front)

        def ask(
            question: str, route: str = "", key: str = "one", body: Any = None, **headers: str
        ) -> tuple[str, str, str]:
            messages = [{"role": "system", "content": "You follow parcels."}, {"role": "user", "content": question}]
            httpx.post(
                f"{url}{route}{CHAT}",
                json={"model": "m", "messages": messages, **(body or {})},
                headers={"authorization": f"Bearer {key}", **headers},
                trust_env=False,
            ).raise_for_status()
            step = sent.found[-1][2].step
            return step.workflow_type, step.workflow_id, server.seen[-1].path

        yield ask


def test_the_most_particular_setting_counts_and_what_a_client_names_before_it(asked: Any) -> None:
    named = {"metadata": {"workflow_type": "own"}}
    cases = [
        ("support", {}),
        ("research", {"key": "two"}),
        ("desk", {"key": "two", "route": "/desk"}),
        ("night", {"key": "two", "route": "/desk/night"}),
        ("crm", {"key": "two", "route": "/desk", "x-application": "crm"}),
        ("support", {"x-application": "x" * 257}),
        ("own", {"route": "/desk", "x-application": "crm", "body": named}),
        ("own", {"route": "/desk", "baggage": "gen_ai.workflow.name=own"}),
    ]
    for number, (workflow_type, how) in enumerate(cases):
        found, _, path = asked(f"Where is parcel {number} of all these?", **how)
        assert (found, path) == (workflow_type, CHAT), how


def test_a_workflow_keeps_its_type_whatever_its_later_requests_say(asked: Any) -> None:
    question = "Where is the parcel that I sent in the morning?"
    begun = asked(question, route="/desk")
    history = [{"role": "user", "content": question}, json.loads(bytes(reply(None).body))["choices"][0]["message"]]  # type: ignore[arg-type]
    later = {"messages": [*history, {"role": "user", "content": "And now?"}]}
    assert asked("", body=later)[:2] == begun[:2]


def test_a_path_that_only_resembles_a_route_is_none(asked: Any) -> None:
    for route in ("/desks", "/%64esk", "/desk/desk"):
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            asked("Where is it?", route=route)
