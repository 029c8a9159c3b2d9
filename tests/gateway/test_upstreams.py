"""Several servers behind one gateway: pools of models, placement, and servers that fail."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from served import eventually, gateway, served

from presage.errors import ConfigurationError
from presage.gateway.config import gateway_config
from presage.gateway.front import Front
from presage.gateway.serve import build
from presage.gateway.simulated_engine import SimulatedEngine

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Which way to the sea?"}]
WITHOUT = {"next_agent": None, "remaining_length": None, "return_time": None, "profile": None, "reload_s": None}


@contextmanager
def before(upstreams: list[dict[str, Any]], **given: Any) -> Iterator[tuple[str, Front]]:
    front = build(gateway_config({"upstreams": upstreams, "forecasts": WITHOUT, "router": None, **given}, "test"))
    with served(front.app()) as url:
        yield url, front


@contextmanager
def unreachable() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_pool_is_a_model_that_clients_ask_for() -> None:
    small, large = SimulatedEngine(("small",)), SimulatedEngine(("large",))
    with ExitStack() as stack:
        upstreams = [
            {"url": stack.enter_context(served(one.app())), "models": list(one.models)} for one in (small, large)
        ]
        pools = [{"models": ["small", "large"], "default": "large"}]
        url, _ = stack.enter_context(before(upstreams, pools=pools))
        assert "presage/auto" in [one["id"] for one in httpx.get(url + "/v1/models").json()["data"]]
        body = {"model": "presage/auto", "messages": ASKED}
        answer = httpx.post(url + CHAT, json=body, headers={"x-presage-forecast": "1"})
        assert answer.json()["model"] == "large"  # no router: the default
        assert "no router is loaded" in answer.headers["x-presage-forecast"]
        assert httpx.post(url + CHAT, json={**body, "model": "small"}).json()["model"] == "small"
        assert httpx.post(url + CHAT, json={**body, "model": "huge"}).json()["error"]["code"] == "model_not_found"
        assert 'presage_gateway_model_choices_total{model="large"' in httpx.get(url + "/metrics").text


def test_a_server_that_cannot_be_reached_gives_its_requests_to_another() -> None:
    engine = SimulatedEngine()
    with served(engine.app()) as alive, unreachable() as dead:
        upstreams = [{"url": dead, "models": ["simulated"]}, {"url": alive, "models": ["simulated"]}]
        with before(upstreams, routing="round-robin") as (url, front):
            for _ in range(4):
                assert httpx.post(url + CHAT, json={"model": "simulated", "messages": ASKED}).status_code == 200
            status = httpx.get(url + "/v1/workflows/status").json()["upstreams"]
            assert [one["open"] for one in status.values()] == [False, True]
            assert status[front.upstreams.all[0].name]["reason"] == "does not accept requests"


def test_a_single_server_gets_its_requests_whatever_the_monitor_thinks() -> None:
    with unreachable() as dead, gateway(dead, upstream={"models": ["simulated"]}) as (url, _):
        for _ in range(2):
            answer = httpx.post(url + CHAT, json={"model": "simulated", "messages": ASKED})
            assert answer.json()["error"]["code"] == "upstream_unreachable"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "upstreams: Field required"),
        ({"upstreams": []}, "upstreams"),
        ({"upstreams": [{"url": "nowhere"}]}, "give an address"),
        ({"upstreams": [{"url": "http://user:pw@host"}]}, "without user name"),
        ({"upstreams": [{"url": "http://a", "dialect": "vlm"}]}, "vllm"),
        ({"upstreams": [{"url": "http://a"}, {"url": "http://a"}]}, "give each its own name"),
        ({"upstreams": [{"url": "http://a"}], "routing": "best"}, "session-affinity"),
        ({"upstreams": [{"url": "http://a"}], "pools": [{"models": ["m"]}]}, "no upstream lists 'm'"),
        ({"upstreams": [{"url": "http://a", "models": ["m"]}], "pools": [{"models": ["m"], "price": -1.0}]}, "price"),
        ({"upstreams": [{"url": "http://a"}], "limits": {"requests": 0}}, "limits.requests"),
        ({"upstreams": [{"url": "http://a"}], "modes": {"policies": {"eviction": "on"}}}, "modes.policies"),
        ({"upstreams": [{"url": "http://a"}], "forecasts": {"gamma": 1.0}}, "forecasts.gamma"),
        ({"upstreams": [{"url": "http://a"}], "listen": "here"}, "listen"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=r"gateway\.toml") as found:
        gateway_config(given, "gateway.toml")
    assert message in str(found.value)
    assert "pydantic" not in str(found.value)


def test_the_page_of_metrics_has_the_demand_of_models_that_are_served() -> None:
    engine = served(SimulatedEngine().app())
    with engine as upstream, before([{"url": upstream, "models": ["simulated"]}]) as (url, _):
        for model in ("simulated", "invented-by-a-client"):
            httpx.post(url + CHAT, json={"model": model, "messages": ASKED})
        page = httpx.get(url + "/metrics").text
    assert 'presage_demand_requests{horizon_s="0",model="simulated"' in page
    assert "invented-by-a-client" not in page


def test_it_is_ready_once_a_server_behind_it_answers() -> None:
    with unreachable() as dead, served(SimulatedEngine().app()) as alive:
        with before([{"url": dead, "models": ["simulated"]}]) as (url, _):
            assert eventually(lambda: httpx.get(url + "/ready").status_code == 503)
            assert httpx.get(url + "/health").status_code == 200
        with before([{"url": dead}, {"url": alive}]) as (url, front):
            assert eventually(lambda: httpx.get(url + "/ready").status_code == 200)
            front.draining = True
            assert httpx.get(url + "/ready").status_code == 503


def test_servers_that_are_all_down_are_an_error_and_nobody_waits() -> None:
    with unreachable() as first, unreachable() as second:
        upstreams = [{"url": url, "models": ["m"]} for url in (first, second)]
        with before(upstreams) as (url, front):
            names = [one.name for one in front.upstreams.all]
            assert eventually(lambda: all(front.upstreams.monitor.outage(name) for name in names))
            answer = httpx.post(url + CHAT, json={"model": "m", "messages": ASKED}, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")


def test_an_error_of_tls_names_the_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = self_signed(tmp_path)
    with (
        served(SimulatedEngine().app(), ssl_certfile=cert, ssl_keyfile=key) as trusts_itself,
        served(SimulatedEngine().app()) as plain,
    ):
        for server, told in ((trusts_itself, "certificate"), (plain, "TLS")):
            with before([{"url": server.replace("http://", "https://"), "models": ["m"]}]) as (url, _):
                error = httpx.post(url + CHAT, json={"model": "m", "messages": ASKED}).json()["error"]
            assert told in error["message"]
            assert "127.0.0.1" not in error["message"]
    assert "its certificate is not accepted (self-signed certificate)" in caplog.text
    assert "it does not answer in TLS" in caplog.text


def self_signed(folder: Path) -> tuple[str, str]:
    """A certificate that nobody trusts, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(folder / "cert"), str(folder / "key")
