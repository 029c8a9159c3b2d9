"""`presage status` against a server made up here: what people and scripts read, and all that may be wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_samples import run
from registry_database import new_database

from presage.cli import server as asking
from presage.registry.connect import open_registry

STATUS: dict[str, Any] = {
    "on": {"priority": True, "eviction": False, "admission": True},
    "workflows": 3,
    "ended": {"finished": 9, "expired": 1, "aborted": 0},
    "data_parallel": 2,
    "prompts": {"tokens": 1000, "local_tokens": 640, "external_tokens": 60},
    "evicted": {"blank": 91, "retired": 40, "forecast": 3},
    "ageing": {"promoted": 2, "demoted": 1},
    "models": {"next-agent": "models:/next-agent@champion, version 3", "remaining-length": "none: no [bold]registry"},
    "model_versions": {
        "next-agent": {"reference": "models:/next-agent@champion", "version": 3},
        "remaining-length": {"reason": "no [bold]registry"},
    },
    "states": "no predictor reads them",
    "prefetch": {"on": False},
    "counts": {"forecast: champion": 6, "workflow_id: missing": 2, "prefetch: ValueError": 1},
    "counted": {
        "presage_forecasts_total": [{"labels": ["next-agent", "champion"], "count": 6}],
        "presage_metadata_left_out_total": [{"labels": ["workflow_id", "missing"], "count": 2}],
        "presage_errors_total": [{"labels": ["prefetch", "ValueError"], "count": 1}],
    },
    "admission": {
        "held": 1,
        "held_requests": 2,
        "paused": 4,
        "held_s": 3.25,
        "longest_held_s": 2.25,
        "outlook": {
            "chosen": {"workflows": 3, "steps_per_s": 2.5, "miss_share": 0.04},
            "everybody": {"workflows": 8, "steps_per_s": 2.0, "miss_share": 0.63},
        },
    },
    "returns": {
        "workflow_types": {
            "review": {"back-off": {"judged": {"0.5": 40, "0.9": 40}, "within": {"0.5": 19, "0.9": 37}}}
        },
    },
    "monitor": {
        "alarms": {"review": {}},
        "promised": {
            "review": {
                "figures": {
                    "accuracy at prefill": {"promised": [0.8, 0.75, 0.85], "live": [0.6, 0.5, 0.7], "workflows": 60}
                },
                "kept": False,
                "causes": [{"text": "agents that the traces do not have: 'checker'", "mend": "train again"}],
            }
        },
        "against_counts": {"review": {"steps": 1000, "model": 0.6, "counts": 0.7, "stands_back": True}},
        "workflow_types": {
            "review": {"version 3": {"moments": {"prefill": {"accuracy": [0.75, 0.5], "positions": [8, 4]}}}}
        },
    },
}


class Made:
    """A server that answers as a test says.

    Attributes:
        url: its address.
        answers: code and body, or a header as well, by path.
        asked: path and bearer of each request.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self.asked: list[tuple[str, str | None]] = []
        made = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                made.asked.append((self.path, self.headers.get("Authorization")))
                code, body, headers = made.answers.get(self.path, (404, b"{}", {}))
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def says(self, body: object, code: int = 200, path: str = "/v1/workflows/status", **headers: str) -> None:
        self.answers[path] = code, body if isinstance(body, bytes) else json.dumps(body).encode(), headers


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.delenv(asking.KEY, raising=False)
    server = Made()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def test_people_read_tables(made: Made) -> None:
    made.says({"engines": [STATUS]})
    ran = run("status", made.url)
    assert (ran.code, ran.err) == (0, "")
    said = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert {
        "policies priority on, eviction off, admission on, prefetch off",
        "next-agent models:/next-agent@champion, version 3",
        "remaining-length none: no [bold]registry",
        "workflows 3 running, 9 finished, 1 expired",
        "data-parallel engine one of 2; send all requests of a workflow to the same one (session affinity)",
        "next-agent 6 champion, 0 profile, 0 back-off, 0 none",
        "accuracy: review, version 3, before the output 0.750 / 0.500",
        "returns: review, back-off 0.475 within 0.5, 0.925 within 0.9",
        "found in the cache 640 (64.0%)",
        "loaded 60 (6.0%)",
        "evicted blocks 91 blank, 40 retired, 3 forecast",
        "ageing 2 promoted, 1 demoted",
        "held back now 1 held with 2 requests, 4 paused while their tools run",
        "held back so far 3.2 s, the longest workflow 2.2 s",
        "expected 2.50 steps/s of 3 workflows, 4% of their contexts lost; all 8: 2.00, 63% lost",
        "prefetch: ValueError 1",
        "workflow_id left out: missing 2",
        "drift review",
        "accuracy at prefill: review 0.800 [0.750, 0.850] promised, 0.600 [0.500, 0.700] live of 60 workflows",
        "against counts: review 0.600, online counts 0.700 at its latest 1000 steps",
        "below its promise review",
        "likely cause: review agents that the traces do not have: 'checker'; train again",
        "stands back review: online counts forecast it until it recovers",
    } <= set(said)


def test_models_shows_promised_and_live_figures_of_an_engine(made: Made, tmp_path: Path) -> None:
    made.says({"engines": [STATUS, {}]})
    uri = new_database(tmp_path / "mlflow.db")
    open_registry(uri)
    asked = ("models", "--tracking-uri", uri, "--url", made.url)
    said = [" ".join(line.split()) for line in run(*asked).out.splitlines()]
    assert {
        f"Live on {made.url}",
        "next-agent models:/next-agent@champion, version 3",
        "accuracy at prefill: review 0.800 [0.750, 0.850] promised, 0.600 [0.500, 0.700] live of 60 workflows",
        "below its promise review",
        "likely cause: review agents that the traces do not have: 'checker'; train again",
        "stands back review: online counts forecast it until it recovers",
    } <= set(said)
    (live,) = run(*asked, "--json").json["live"]
    assert live["promised"] == STATUS["monitor"]["promised"]
    assert live["models"] == STATUS["models"]


def test_the_key_that_a_client_sent_in_vain_is_shown(made: Made) -> None:
    counted = [{"labels": ["agent", "misspelt"], "count": 4}, {"labels": ["agent", "not printable"], "count": 1}]
    examples = {"agent: misspelt": "agent_name", "agent: not printable": "agent"}
    made.says({"engines": [{"counted": {"presage_metadata_left_out_total": counted}, "examples": examples}]})
    said = [" ".join(line.split()) for line in run("status", made.url).out.splitlines()]
    assert {"agent left out: misspelt 4, for example agent_name", "agent left out: not printable 1"} <= set(said)


def test_a_version_that_is_being_loaded_is_shown(made: Made) -> None:
    loading = {"next-agent": "version 4 is being loaded since 12 s"}
    made.says({"engines": [{**STATUS, "reload": {"renewed": 0, "loading": loading}}]})
    said = [" ".join(line.split()) for line in run("status", made.url).out.splitlines()]
    assert "next-agent version 4 is being loaded since 12 s" in said


def test_scripts_read_what_the_server_said(made: Made) -> None:
    made.says({"engines": [STATUS, {}]})
    assert run("status", made.url, "--json").json == {"engines": [STATUS, {}]}


def test_an_engine_with_another_scheduler_and_one_that_says_little_are_told(made: Made) -> None:
    made.says({"engines": [{}, {"on": {}, "prompts": {"tokens": 0, "local_tokens": 0, "external_tokens": 0}}]})
    ran = run("status", made.url)
    assert ran.code == 0
    assert "Engine 0 runs another scheduler" in ran.out
    assert "Engine 1" in ran.out


def test_a_status_of_another_form_is_shown_as_json_alone(made: Made) -> None:
    made.says({"engines": [{"counted": "about a prompt"}]})
    complaint = run("status", made.url).complaint
    assert "the server's status cannot be read" in complaint
    assert "prompt" not in complaint
    assert run("status", made.url, "--json").json == {"engines": [{"counted": "about a prompt"}]}


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_key_is_sent_as_vllm_wants_it(made: Made, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made.says({"engines": []})
    if how == "variable":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert run("status", made.url, *(["--api-key", "secret"] if how == "option" else [])).code == 0
    assert made.asked == [("/v1/workflows/status", "Bearer secret")]


def test_a_password_of_another_program_is_not_sent(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.says({"engines": []})
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert run("status", made.url).code == 0
    assert run("status", made.url, "--api-key", "key").code == 0
    assert [key for _, key in made.asked] == [None, "Bearer key"]


def test_a_path_in_front_of_the_api_and_a_missing_scheme(made: Made) -> None:
    made.says({"engines": []}, path="/behind/v1/workflows/status")
    assert run("status", made.url.removeprefix("http://") + "/behind/").code == 0


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (401, b'{"error": "Unauthorized"}', "wants a key; give the one it was started with as --api-key"),
        (404, b"", "is not there; this is another server, or one without Presage's routes"),
        (503, b"", "no engine runs behind this server"),
        (500, b"Traceback", "answers 500; see the server's log"),
        (200, b"<html>", "this is another server"),
        (200, b"\xff\xfe", "this is another server"),
        (200, b"[]", "did not answer with a status"),
        (200, b'{"engines": [3]}', "did not answer with a status"),
    ],
)
def test_what_is_wrong_is_one_line(made: Made, code: int, body: bytes, said: str) -> None:
    made.says(body, code)
    for more in ((), ("--json",)):
        assert said in run("status", made.url, *more).complaint


def test_a_wrong_key_is_told_from_a_missing_one(made: Made) -> None:
    made.says({}, 401)
    said = run("status", made.url, "--api-key", "secret").complaint
    assert "does not take this key" in said
    assert "secret" not in said


def test_a_key_does_not_follow_a_redirection(made: Made) -> None:
    made.says({}, 307, Location=f"{made.url}/elsewhere")
    made.says({"engines": []}, path="/elsewhere")
    assert "answers 307" in run("status", made.url, "--api-key", "secret").complaint
    assert [path for path, _ in made.asked] == ["/v1/workflows/status"]


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[::1", "http://a b", "http://ü"])
def test_what_is_no_address(url: str) -> None:
    assert "is no address of a server" in run("status", url).complaint


def test_a_password_in_the_address_is_not_repeated() -> None:
    assert "secret" not in run("status", "http://me:secret@host").complaint


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert "does not answer (Connection refused); start it with `presage serve`" in run("status", url).complaint


def test_something_that_speaks_another_protocol_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def greet() -> None:
            client, _ = silent.accept()
            with client:
                client.recv(1000)
                client.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert "this is another server" in run("status", url).complaint
        thread.join()
        monkeypatch.setattr("presage.cli.server.TIMEOUT_S", 0.05)
        assert "no answer in time" in run("status", url).complaint


def test_watching_goes_on_until_interrupted(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.says({"engines": [STATUS]})
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    ran = run("status", made.url, "--watch", "2.5", "--json")
    assert ran.code == 130
    assert [json.loads(line) for line in ran.out.splitlines()] == [{"engines": [STATUS]}] * 3
    assert pauses == [2.5] * 3
    pauses.clear()
    assert run("status", made.url, "--watch", "1").out.count("policies ") == 3
