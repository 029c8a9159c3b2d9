"""A delivery is taken only from the holder of the secret, only when it is fresh, and each event is handled once."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest

from presage.errors import ConfigurationError, WebhookError
from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event, batched, read_cloud_events
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.receiver import WebhookReceiver
from presage.serving_hooks.lifecycle.signature import secret_keys, signed_headers, verify

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
NOW = 1_790_000_000.0
ENDED = LifecycleEvent("a-7", "ended", "/presage/engine/a", NOW, "t", "w", 7, 3, "x", reason="expired")
EXPECTED = LifecycleEvent(
    "a-8", "expected", "/presage/engine/a", NOW, "t", "v", 4, 2, "x", "key-1", next_agents={"y": 0.75}, end=0.25,
    return_s={"0.5": 2.5},
)  # fmt: skip


def delivery(*events: LifecycleEvent, secret: str = SECRET, at: float = NOW) -> tuple[dict[str, str], bytes]:
    body = batched([as_cloud_event(event) for event in events])
    return signed_headers(secret_keys(secret), "id", int(at), body), body


def test_the_signature_is_that_of_the_standards_own_example() -> None:
    """The vector of the reference libraries of Standard Webhooks."""
    keys = secret_keys("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed_headers(keys, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_events_are_cloud_events_and_come_back_as_they_were() -> None:
    assert read_cloud_events(as_cloud_event(ENDED)) == [ENDED]
    _, body = delivery(ENDED, EXPECTED)
    assert read_cloud_events(body) == [ENDED, EXPECTED]
    assert as_cloud_event(EXPECTED) == (
        b'{"specversion":"1.0","id":"a-8","source":"/presage/engine/a","type":"presage.expected","subject":"v",'
        b'"time":"2026-09-21T14:13:20Z","datacontenttype":"application/json","data":{"workflow_type":"t",'
        b'"workflow_id":"v","sequence":4,"step":2,"agent":"x","tenant":"key-1","next_agents":{"y":0.75},"end":0.25,'
        b'"return_s":{"0.5":2.5}}}'
    )


@pytest.mark.parametrize("module", ["receiver", "sender"])
def test_receiver_and_sender_are_light(module: str) -> None:
    heavy = "('numpy', 'pyarrow', 'pandas', 'mlflow', 'torch', 'vllm')"
    code = f"import sys, presage.serving_hooks.lifecycle.{module}; sys.exit(any(one in sys.modules for one in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kinds_of_a_later_version_are_left_out() -> None:
    later = as_cloud_event(ENDED).replace(b"presage.ended", b"presage.moved")
    assert read_cloud_events(batched([later, as_cloud_event(EXPECTED)])) == [EXPECTED]


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"type": 3}', b'[{"type": "presage.ended"}]', b"\xff"])
def test_what_is_no_event_of_ours_is_refused(body: bytes) -> None:
    with pytest.raises(WebhookError, match="no CloudEvent of Presage"):
        read_cloud_events(body)


def test_only_the_holder_of_the_secret_is_believed() -> None:
    receiver = WebhookReceiver(SECRET, now=lambda: NOW)
    headers, body = delivery(ENDED)
    other = "whsec_" + base64.b64encode(b"o" * 32).decode()
    for bad, sent in (
        (delivery(ENDED, secret=other)[0], body),
        (headers, body.replace(b"expired", b"aborted")),
        ({**headers, "webhook-id": "another"}, body),
        ({**headers, "webhook-timestamp": "1790000001"}, body),
        ({**headers, "webhook-signature": headers["webhook-signature"].replace("v1", "v1a")}, body),
        ({**headers, "webhook-signature": "v1,ü"}, body),
        ({**headers, "webhook-timestamp": "9" * 400}, body),
        ({}, body),
    ):
        with pytest.raises(WebhookError), receiver.received(bad, sent):
            pytest.fail("a forged delivery was handled")
    with receiver.received({name.title(): value for name, value in headers.items()}, body) as events:
        assert events == [ENDED]


def test_a_delivery_that_is_replayed_later_is_refused() -> None:
    headers, body = delivery(ENDED, at=NOW - 301)
    with (
        pytest.raises(WebhookError, match="within 300 s"),
        WebhookReceiver(SECRET, now=lambda: NOW).received(headers, body),
    ):
        pytest.fail("an old delivery was handled")


def test_during_a_rotation_either_secret_verifies() -> None:
    new = "whsec_" + base64.b64encode(b"n" * 32).decode()
    headers, body = delivery(ENDED, secret=f"{new} {SECRET}")
    for secret in (new, SECRET):
        verify(secret_keys(secret), headers, body, NOW)


def test_an_event_is_handled_once_and_again_only_if_its_handling_failed() -> None:
    receiver = WebhookReceiver(SECRET, now=lambda: NOW)
    headers, body = delivery(ENDED, EXPECTED, ENDED)
    with pytest.raises(RuntimeError), receiver.received(headers, body) as events:
        raise RuntimeError
    with receiver.received(headers, body) as events:
        assert events == [ENDED, EXPECTED]
    with receiver.received(*delivery(EXPECTED, ENDED)) as events:
        assert events == []


def test_a_receiver_knows_the_latest_ids_only() -> None:
    receiver = WebhookReceiver(SECRET, most=1, now=lambda: NOW)
    for event in (ENDED, EXPECTED, ENDED):
        with receiver.received(*delivery(event)) as events:
            assert events == [event]


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_no base64", "password"])
def test_a_secret_of_another_form_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="openssl rand") as raised:
        secret_keys(secret)
    assert "password" not in str(raised.value)
