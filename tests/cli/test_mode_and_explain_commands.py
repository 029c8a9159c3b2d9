"""`presage mode` and `presage explain` against a server made up here: what is sent, what people read, what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from cli_samples import run

ADMIN = "an admin's long key"
MODES = {
    "default": "on",
    "rules": [{"policy": "eviction", "workflow_type": "[red]beta", "mode": "off"}],
    "policies": {"priority": "on", "eviction": "on", "admission": "on", "prefetch": "on"},
}
FORECAST: dict[str, Any] = {
    "ago_s": 1.5,
    "agent": "planner",
    "step": 3,
    "moment": "completion",
    "source": "champion",
    "version": 7,
    "evidence": 120,
    "reason": None,
    "horizons": [{"agents": {"coder": 0.7, "tester": 0.2}, "end": 0.1}],
    "remaining": {"source": "champion", "version": 2, "evidence": 9, "reason": None, "quantiles": {"0.5": 210.0}},
}
EXPLAINED: dict[str, Any] = {
    "workflow_type": "review",
    "workflow_id": "a/b",
    "alive": True,
    "modes": {"priority": "on", "eviction": "on", "admission": "on", "prefetch": "on"},
    "forecasts": [{**FORECAST, "version": None, "source": "none", "horizons": []}, FORECAST],
    "requests": [
        {
            "agent": "coder",
            "step": 4,
            "state": "WAITING",
            "prompt_tokens": 900,
            "output_tokens": 0,
            "held": True,
            "place": 3,
            "waiting": 17,
            "key": {"class": 0, "level": -1, "remaining_tokens": 210.0},
        }
    ],
    "admission": None,
    "blocks": {
        "blocks": 50,
        "free": 40,
        "all_free": 900,
        "groups": [{"blocks": 50, "free": 40, "agents": ["coder"], "users": 1, "score": 0.75, "before": 600}],
    },
    "reasons": ["it is held: the cache is full; for 2.0 s so far"],
}


class Made:
    """A server that answers with one code and body, and notes what it is asked.

    `listed` are type and id of its workflows.
    """

    def __init__(self) -> None:
        self.code, self.body = 200, b"{}"
        self.listed: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        made = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                made.asked.append((self.command, self.path, dict(self.headers), body))
                answer = made.page(self.path) or made.body
                self.send_response(made.code)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = answer  # noqa: N815 -- named by the library

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def page(self, path: str) -> bytes | None:
        asked = parse_qs(path.partition("?")[2])
        if not path.startswith("/v1/workflows?") or self.code != 200:
            return None
        first, most = (int(asked[name][0]) for name in ("first", "most"))
        page = self.listed[first : first + most]
        workflows = [{"workflow_type": kind, "workflow_id": name} for kind, name in page]
        listed = {"running": 1, "ended": len(self.listed) - 1, "first": first, "workflows": workflows}
        return json.dumps({"engines": [listed, {}]}).encode()

    def says(self, code: int, body: Any) -> None:
        self.code, self.body = code, json.dumps(body).encode()


@pytest.fixture
def made() -> Iterator[Made]:
    server = Made()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESAGE_ADMIN_KEY", ADMIN)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_a_mode_is_sent_with_both_keys_and_what_holds_is_shown(made: Made) -> None:
    made.says(200, {"engines": [MODES, {}]})
    ran = run("mode", made.url, "off", "--policy", "eviction", "--workflow-type", "[red]beta", "--api-key", "a key")
    assert ran.code == 0
    ((method, path, headers, body),) = made.asked
    assert (method, path) == ("POST", "/v1/workflows/mode")
    assert body == {"mode": "off", "policy": "eviction", "workflow_type": "[red]beta"}
    assert (headers["X-Presage-Admin-Key"], headers["Authorization"]) == (ADMIN, "Bearer a key")
    assert "[red]beta" in ran.out
    assert "at most: priority on, eviction on" in ran.out
    assert "Engine 1: its scheduler is another" in ran.out


def test_without_a_mode_it_asks_what_holds(made: Made) -> None:
    made.says(200, {"engines": [MODES]})
    ran = run("mode", made.url, "--json")
    assert json.loads(ran.out) == {"engines": [MODES]}
    assert made.asked[0][0] == "GET"
    assert "want a mode" in run("mode", made.url, "--policy", "eviction").complaint
    assert run("mode", made.url, "maybe").code == 2


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (401, {"detail": "send the admin key"}, "send the admin key; set it in PRESAGE_ADMIN_KEY"),
        (401, {"error": "Unauthorized"}, "wants a key; give the one it was started with as --api-key"),
        (
            403,
            {"error": {"message": "this is not the admin key"}},
            "this is not the admin key; set the one it was start",
        ),
        (404, {"detail": "Not Found"}, "it has no admin routes; start it with PRESAGE_ADMIN_KEY set"),
        (404, {"error": {"message": "There is no '/v1' here."}}, "There is no '/v1' here; it has no admin routes"),
        (400, {"detail": "no more modes"}, "no more modes"),
        (422, {"detail": [{"msg": "mode: none of off, shadow, on"}]}, "mode: none of off, shadow, on"),
        (503, {"detail": "no engine runs behind this server"}, "no engine runs behind this server"),
        (503, {}, "no engine runs behind this server; use the URL"),
        (500, {"error": {"message": "a secret of the server"}}, "answers 500; see the server's log"),
        (400, {"detail": "two\nlines\x1b[31m"}, "two lines[31m"),
    ],
)
def test_who_refuses_and_why_is_one_line_and_no_key(made: Made, code: int, body: Any, said: str) -> None:
    made.says(code, body)
    ran = run("mode", made.url, "off")
    assert ran.code == 2
    assert said in ran.complaint
    assert ADMIN not in ran.complaint


def test_a_workflow_is_explained_to_people(made: Made) -> None:
    made.says(200, {"engines": [EXPLAINED]})
    ran = run("explain", made.url, "a/b", "--type", "review & co")
    assert made.asked[0][1] == "/v1/workflows/a%2Fb/explain?workflow_type=review+%26+co"
    for shown in (
        "it is held: the cache is full",
        "coder 0.70, tester 0.20",
        "champion 7",
        "210 (p50)",
        "waiting, held",
        "3 of 17",
        "900 free blocks in total",
        "0.750",
    ):
        assert shown in ran.out, shown


def test_cache_groups_show_their_score_or_the_wait_for_their_next_use(made: Made) -> None:
    (by_score,) = EXPLAINED["blocks"]["groups"]
    common = {name: value for name, value in by_score.items() if name != "score"}
    for groups, shown in (
        ([by_score], ("score", "0.750")),
        ([{**common, "wait_s": 12.34}, {**common, "wait_s": None}], ("next use in", "12.3 s", "–")),
    ):
        blocks = {**EXPLAINED["blocks"], "groups": groups}
        made.says(200, {"engines": [{**EXPLAINED, "requests": [], "blocks": blocks}]})
        ran = run("explain", made.url, "a/b", "--type", "review")
        assert ran.code == 0
        cache = ran.out[ran.out.index("free blocks in total") :]
        assert all(word in cache for word in shown), cache


def test_the_type_of_a_workflow_is_found_where_only_one_has_its_id(made: Made) -> None:
    made.says(200, {"engines": [EXPLAINED]})
    made.listed = [("coding", f"w-{number}") for number in range(600)] + [("review", "a/b"), ("", "none")]
    assert run("explain", made.url, "a/b").code == 0
    assert made.asked[-1][1] == "/v1/workflows/a%2Fb/explain?workflow_type=review"
    for untyped in ("none", "unknown"):
        assert run("explain", made.url, untyped).code == 0
        assert made.asked[-1][1] == f"/v1/workflows/{untyped}/explain"
    made.listed += [("coding", "a/b"), ("coding", "a/b")]
    ran = run("explain", made.url, "a/b")
    assert ran.code == 2
    assert "several types have a workflow 'a/b': 'coding', 'review'; name one with --type" in ran.complaint
    assert run("explain", made.url, "a/b", "--type", "coding").code == 0


@pytest.mark.parametrize("body", [{"detail": "no such workflow"}, {"error": {"message": "no such workflow"}}])
def test_the_servers_own_words_explain_why_a_workflow_is_not_explained(made: Made, body: Any) -> None:
    made.says(404, body)  # as FastAPI words it, and as vLLM does
    assert run("explain", made.url, "r1").complaint.endswith(f"{made.url}: no such workflow")
    made.says(404, {"detail": "Not Found"})
    assert "one without Presage's routes (404)" in run("explain", made.url, "r1").complaint


def test_json_is_what_the_server_says(made: Made) -> None:
    made.says(200, {"engines": [EXPLAINED]})
    assert json.loads(run("explain", made.url, "a/b", "--json").out) == {"engines": [EXPLAINED]}


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_it_is_drawn_and_twice_the_same(made: Made, tmp_path: Path, ending: str) -> None:
    made.says(200, {"engines": [EXPLAINED]})
    files = [tmp_path / f"{number}.{ending}" for number in range(2)]
    for file in files:
        ran = run("explain", made.url, "a/b", "--picture", str(file))
        assert ran.code == 0
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first[:4] == b"\x89PNG" if ending == "png" else all(word in first for word in (b"coder", b"p50", b"a/b"))


def test_a_workflow_of_which_nothing_is_known_is_drawn_as_well(made: Made, tmp_path: Path) -> None:
    nothing = {**EXPLAINED, "forecasts": [], "requests": [], "blocks": None, "reasons": []}
    made.says(200, {"engines": [nothing]})
    assert run("explain", made.url, "x", "--picture", str(tmp_path / "p.svg")).code == 0
    assert b"no recent forecast" in (tmp_path / "p.svg").read_bytes()


NEXT, LEFT, CACHE = b"next agent", b"output tokens left", b"free blocks in eviction order"
WITHOUT = {**FORECAST, "horizons": [], "remaining": {**FORECAST["remaining"], "quantiles": {}}, "reason": "too new"}


@pytest.mark.parametrize(
    ("changed", "panels"),
    [
        ({"forecasts": [FORECAST]}, {NEXT, LEFT, CACHE}),
        ({"forecasts": [FORECAST] * 50, "blocks": None}, {NEXT, LEFT}),
        ({"forecasts": [{**FORECAST, "remaining": WITHOUT["remaining"]}], "blocks": None}, {NEXT}),
        ({"forecasts": [{**FORECAST, "horizons": []}], "blocks": {"groups": [], "all_free": 0}}, {LEFT}),
        ({"forecasts": [WITHOUT]}, {CACHE}),
        ({"forecasts": [WITHOUT], "blocks": None}, {b"its last forecast is unknown: too new"}),
    ],
)
def test_only_panels_with_something_to_show_are_drawn(
    made: Made, tmp_path: Path, changed: dict[str, Any], panels: set[bytes]
) -> None:
    made.says(200, {"engines": [{**EXPLAINED, **changed}]})
    ran = run("explain", made.url, "x", "--picture", str(tmp_path / "p.svg"))  # a warning of matplotlib would fail
    assert ran.code == 0
    drawn = (tmp_path / "p.svg").read_bytes()
    assert {text for text in (NEXT, LEFT, CACHE, *panels) if text in drawn} == panels


def test_long_strange_and_many_names_fit_into_a_picture(made: Made, tmp_path: Path) -> None:
    names = ["_hidden", "$x^", "研究員", "Senior Data Researcher of Solar Storage and Wind"]
    agents = dict.fromkeys(names, 0.2) | {f"agent {number}": 0.01 for number in range(20)}
    made_by = {**FORECAST, "agent": names[-1], "horizons": [{"agents": agents, "end": 0.0}]}
    made.says(200, {"engines": [{**EXPLAINED, "workflow_id": "w" * 200, "forecasts": [made_by] * 3}]})
    for ending in ("png", "svg"):
        assert run("explain", made.url, "x", "--picture", str(tmp_path / f"p.{ending}")).code == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert all(shown in drawn for shown in ("_hidden", "$x^", "研究員", "Senior Data Re…rage and Wind", "others"))
    assert names[-1] not in drawn
    assert "w" * 100 not in drawn


def test_a_picture_is_refused_before_anybody_is_asked(made: Made, tmp_path: Path) -> None:
    assert "ends in .svg or .png" in run("explain", made.url, "x", "--picture", "p.jpg").complaint
    assert not made.asked
    made.says(200, {"engines": [EXPLAINED]})
    missing = run("explain", made.url, "x", "--picture", str(tmp_path / "no" / "p.svg"))
    assert missing.code == 2
    assert "give another place" in missing.complaint
